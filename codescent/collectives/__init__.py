"""torch's collectives probed on real ranks, and an all-reduce of our own out of sends and receives.

In: backends, devices, a number of ranks. Out: what works, what a collective costs, what each rank holds in between.
Does not train, and does not choose a backend for a run (train/world.py does).
"""
