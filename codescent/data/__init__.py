"""In: text, by name or path; or samples of a task. Out: token shards on disk, and from them the batches of every step.
Does not import torch (loader.py does) and does not know models, configs, tasks or run folders.

The way of a text: corpora -> sources -> scan (first reading) -> chunks -> pool, tokenizers -> shards (second reading);
the way of a batch: dataset -> split (or the source of a task) -> loader (sampler and read-ahead)."""
