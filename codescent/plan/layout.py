"""In: nothing. Out: the dataclass Layout: options of the config section [parallel], such as schedule and ZeRO stage.
Does not contain the size of each mesh axis (mesh.py does) and does not apply an option (strategies do)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Options for the strategies. Each field is the key of [parallel] with the same name (see docs/config.md)."""

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

    @property
    def computes_blocks_again(self) -> bool:
        """Whether backward computes blocks again from their inputs, and so repeats the messages inside of them."""
        return self.recompute in ("products", "full")
