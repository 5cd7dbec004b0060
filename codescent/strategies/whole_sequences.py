"""In: a part that tensor parallelism has divided, its group. Out: a block in which it has no sequence parallelism.
Does not divide (tensor.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from codescent.strategies.sequence import enter, leave


@contextmanager
def whole_sequences(part: torch.nn.Module, group: ProcessGroup) -> Iterator[None]:
    """A block in which a divided part has no sequence parallelism: every rank computes all positions between matrices.

    So a part that trains with it reads texts of any length in between, such as one token of each.
    """
    layers = [cast(Any, layer) for layer in part.modules() if hasattr(layer, "before") and hasattr(layer, "after")]
    seams, reading = [(layer, layer.before, layer.after) for layer in layers], cast(Any, part)
    vocabulary, places = reading.vocabulary, (reading.tokens_T, reading.rows_T)
    splits = vocabulary.sequence_parallel
    try:
        for layer, before, after in seams:
            layer.before = before and partial(enter, group=group)
            layer.after = after and partial(leave, group=group)
        vocabulary.sequence_parallel, reading.tokens_T, reading.rows_T = False, None, None
        yield
    finally:
        for layer, before, after in seams:
            layer.before, layer.after = before, after
        vocabulary.sequence_parallel, (reading.tokens_T, reading.rows_T) = splits, places
