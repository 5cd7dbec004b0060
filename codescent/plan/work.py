"""In: nothing. Out: the dataclasses Work (batch sizes, sequence length, precision) and TaskFacts (what the plan has to
know of a task).
Does not know the model (plan/model.py does) and does not fill the fields of TaskFacts (tasks does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codescent.plan.brief import brief

Scalar = int | float | bool | str | None


@dataclass(frozen=True)
class TaskFacts:
    """The task of a run, with every value resolved.

    Attributes:
        extras: True if all layers read inputs of the sample in addition to activations. Every stage then loads it.
        head_share: average share of positions that the head reads.
        synthetic: True if samples are random numbers, for measurements.
        equal_losses: True if all samples have equally many losses.
        documents: True if a sample has several documents that the model keeps apart (data.documents).
        identity: the keys of [data] that determine the samples, with their values.
    """

    name: str
    extras: bool = False
    head_share: float = 1.0
    synthetic: bool = False
    equal_losses: bool = brief(True)
    documents: bool = brief(False)
    identity: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """Batch sizes of one step: global_batch_size = dp * microbatch_size * num_microbatches.

    Attributes:
        seq_len: positions of a sample. Batch sizes count samples.
        precision: dtype of the computation.
        streams: lengths of the source and the target, if a sample has both; else empty. The source comes first.
            The loss is the loss of the target.
        fp8: products of the blocks' matrices are in 8-bit floats, "rowwise" or "tensorwise"; "": they are not.
        fp8_emulated: operands are rounded to fp8, and multiplied in `precision`.
        prefetch: number of steps whose batches are read ahead.
    """

    seq_len: int
    global_batch_size: int
    microbatch_size: int
    num_microbatches: int
    precision: str
    streams: tuple[int, ...] = ()
    prefetch: int = 0
    fp8: str = brief("")
    fp8_emulated: bool = brief(False)

    @property
    def tokens(self) -> int:
        """Tokens of one step, summed over all ranks. With source and target: target tokens only."""
        return self.global_batch_size * self.positions(-1)

    def positions(self, stream: int | None = None) -> int:
        """Positions of a sample, or of one of its streams."""
        return self.seq_len if stream is None or not self.streams else self.streams[stream]
