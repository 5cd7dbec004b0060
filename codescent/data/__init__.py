"""In: a text corpus, or the samples of a task. Out: token shards on disk, and the batches of every training step.
Does not import torch, except in loader.py. Does not know models, configs, tasks or run folders.

Preparing a text: corpora (find files) -> sources (read text) -> scan (first pass: count and check) -> chunks (cut)
-> pool, tokenizers (encode) -> shards (second pass: write).
Reading a batch: dataset (open) -> split, or the source of a task (samples) -> loader (order, read-ahead)."""
