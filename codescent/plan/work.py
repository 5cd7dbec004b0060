"""In: nothing. Out: the nouns for what a step computes: the batch (how many samples, how long), and the task.
Does not know the model (`plan/model.py` does) or any task: `tasks` makes these facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = int | float | bool | str | None


@dataclass(frozen=True)
class TaskFacts:
    """The task of a run, resolved.

    `extras`: whether layers at every depth read inputs of the sample beside activations, so that every pipeline stage
    loads it. `head_share` is the share of positions that the head reads, on average. `synthetic`: samples are random
    numbers, to measure with. `identity`: the keys of [data] that decide the samples, each with its value.
    """

    name: str
    extras: bool = False
    head_share: float = 1.0
    synthetic: bool = False
    identity: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """The batch arithmetic of one step: global_batch_size = dp * microbatch_size * num_microbatches.

    Batch sizes count samples of `seq_len` tokens. `precision` is the number format of the arithmetic. `streams` are the
    lengths of a sample's sequences (source and target), where there are several; they lie one after the other in its
    `seq_len` positions, and the loss is that of the last. `prefetch`: steps whose batches are read ahead.
    """

    seq_len: int
    global_batch_size: int
    microbatch_size: int
    num_microbatches: int
    precision: str
    streams: tuple[int, ...] = ()
    prefetch: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one step over all the ranks; of several sequences, those of the last."""
        return self.global_batch_size * self.positions(-1)

    def positions(self, stream: int | None = None) -> int:
        """Positions of a sample, or of one of its sequences."""
        return self.seq_len if stream is None or not self.streams else self.streams[stream]
