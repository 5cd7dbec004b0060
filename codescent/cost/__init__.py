"""In: a plan. Out: estimates for one step: bytes of memory and of communication (memory.py), time (simulate.py).
Does not import torch and does not know the names of strategies."""
