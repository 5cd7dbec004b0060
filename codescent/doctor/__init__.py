"""In: the ranks of any launcher, or none. Out: findings on a cluster before a run: what is wrong, where, what mends it.
Does not import torch, does not train and changes nothing: its files in a folder are removed again."""
