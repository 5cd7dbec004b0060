"""In: run folders. Out: reports about them.
Does not import torch or train/, and writes no run folder."""
