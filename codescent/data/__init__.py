"""In: a text corpus, or another source of samples. Out: the corpus as token shards on disk; the batches of each step.
Does not import torch, except in loader.py. Does not know models, configs or run folders, and defines no task.

Preparing a text: corpora (find files) -> sources (read text) -> scan (first pass: count and check) -> chunks (cut)
-> pool, tokenizers (encode) -> shards (second pass: write).
Reading a batch: dataset (open) -> split (samples of a text; a task may have its own) -> loader (order, read-ahead)."""
