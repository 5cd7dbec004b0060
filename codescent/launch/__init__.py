"""In: environment variables of a launcher; or a command to run. Out: the rank of this process; or N started processes.
Does not import torch and does not know what the ranks do."""
