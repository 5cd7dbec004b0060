"""Looks at a cluster before a run does: machines, network, folders, devices, what earlier runs have left.

In: the ranks of any launcher, or none. Out: findings: what is wrong, where, what is expected, what mends it.
Does not import torch, does not train and changes nothing: its files in a folder are removed again.
"""
