"""In: nothing. Out: the room that says which rank a process is, and starts the ranks of one machine.
Does not import torch, and knows nothing of what the ranks do."""
