"""In: a plan. Out: what it will cost, each price in its own file: compute, memory, simulate.
Does not touch torch, torch.distributed, or any strategy by name."""
