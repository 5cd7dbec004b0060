"""In: text, by name or path; or tensors. Out: token shards on disk, and from them the batches of every step.
Does not import torch (loader.py and readers of .pt files do) and does not know models, configs or run folders.

The way of a text: corpora -> sources -> scan (first reading) -> chunks -> tokenizers -> shards (second reading);
the way of a question: squad -> windows (by wordpiece) -> question_prepare -> question_source;
the way of a batch: dataset, or question_source -> loader (sampler and read-ahead)."""
