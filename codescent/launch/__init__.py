"""In: environment variables, a command. Out: the rank of this process; the started ranks of one machine.
Does not import torch and does not know what the ranks do."""
