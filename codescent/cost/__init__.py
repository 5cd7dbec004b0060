"""In: a plan. Out: what it will cost, each price in its own file: compute, memory.
Does not touch torch, torch.distributed, or any strategy by name."""
