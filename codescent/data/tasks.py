"""In: an open dataset, a task. Out: the samples of a split as the task makes them.
Does not open a dataset or read a token: each task's source does, when it is asked for samples."""

from __future__ import annotations

from codescent.data.dataset import Dataset
from codescent.data.samples import Source
from codescent.data.text_source import TextSource


def source_of(dataset: Dataset, split: str, seq_len: int, num_targets: int) -> Source:
    """The samples of a split.

    Args:
        dataset: what the run reads.
        split: "train" or "validation".
        seq_len: positions of a sample.
        num_targets: how many of them, at its end, something is wanted of.
    """
    tokens = dataset.train if split == "train" else dataset.validation
    return TextSource(tokens, seq_len, num_targets)
