"""In: nothing. Out: the version; the verbs are in cli.py, and `python -m codescent` runs them.
Does not import torch: a program that only plans or prints help must not wait for it."""

__version__ = "0.1.0"
