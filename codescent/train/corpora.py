"""In: an open run whose data may be a mixture. Out: the share of each corpus in a step, its validation loss and epochs.
Does not choose samples (data/mixed_order.py does) and does not validate (validate.py does)."""

from __future__ import annotations

from codescent.data.mixed_order import MixedOrder
from codescent.data.mixture import MixedSource, uses
from codescent.record.corpora import SHARE, VAL_LOSS
from codescent.train.open import OpenRun
from codescent.train.validate import Validated


class CorpusColumns:
    """The columns of the metrics of a mixture, in which `order` takes the samples."""

    def __init__(self, order: MixedOrder) -> None:
        self.order = order

    def values(self, step: int, found: Validated) -> dict[str, float | None]:
        """The columns of a row, for a step from 1: of each corpus the share of the samples of the global batch."""
        counts = zip(self.order.names, self.order.of_step(step - 1), strict=True)
        size = self.order.global_batch_size
        shares: dict[str, float | None] = {f"{SHARE}{name}": count / size for name, count in counts}
        return shares | {f"{VAL_LOSS}{name}": found.by_corpus.get(name) for name in self.order.names}


def corpus_columns(run: OpenRun) -> CorpusColumns | None:
    """The columns of a run, on the rank that writes them; None elsewhere, and without a mixture."""
    source = None if run.folder is None else run.source("train")
    if not isinstance(source, MixedSource):
        return None
    return CorpusColumns(source.order(run.plan.seed, run.plan.work.global_batch_size))


def lines(run: OpenRun) -> list[str]:
    """What a run takes of each corpus of its mixture, in words."""
    train = run.config.train
    return [use.in_words() for use in uses(run.source("train"), train.global_batch_size, train.num_steps)]
