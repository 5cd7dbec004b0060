"""In: text, by name or path; or tensors. Out: token shards on disk, and from them the batches of every step.
Does not import torch (loader.py does, and .pt files where there are any) and does not know models, configs or run folders.

The way of a text: corpora -> sources -> scan (first reading) -> chunks -> tokenizers -> shards (second reading);
the way of a batch: dataset -> loader (sampler and read-ahead)."""
