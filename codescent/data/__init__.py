"""In: a text corpus, or another source of samples. Out: the corpus as token shards on disk; the batches of each step.
Does not import torch, except in loader.py. Does not know models, configs or run folders, and defines no task.

Preparing a text: corpora (find files) -> sources (read text) -> scan (first pass: count and check) -> chunks (cut)
-> pool (worker processes), tokenizers (encode) -> shards (second pass: write).
Reading a batch: dataset (open) -> split (the samples of a text) -> order -> loader (read-ahead). Of a mixture of
corpora: mixture (their samples) -> mixed_order. A task may bring its own dataset and split."""
