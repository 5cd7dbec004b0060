"""In: the keys of the section [parallel]. Out: the layout that a run asks for, beyond the degrees of its mesh.
Does not decide what a key does: the strategy that it belongs to does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """What the user asks of strategies. Each field is the key of [parallel] with its name; docs/config.md has them."""

    schedule: str = "1f1b"
    virtual_stages: int = 1
    cut: str = "cost"
    zero_stage: int = 3
    context: str = "ring"
    sequence_parallel: bool = True
    recompute: str = "none"
    offload: str = "none"
    data_parallel: int = 1
    bucket_bytes: int = 16_777_216
    reduce_dtype: str = "auto"
