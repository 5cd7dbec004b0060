"""In: nothing. Out: the noun for the batch of a step: how many samples, how long, in which number format.
Does not know the model or the task: `plan/model.py` and `plan/task.py` do."""

from __future__ import annotations

from dataclasses import dataclass


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
