"""In: an open run whose data may be a mixture. Out: of each corpus its share of a step, its validation loss, its epochs.
Does not choose samples (data/mixed_order.py does) and does not validate (validate.py does)."""

from __future__ import annotations

from codescent.data.mixture import MixedSource, uses
from codescent.record.corpora import SHARE, VAL_LOSS
from codescent.train.open import OpenRun
from codescent.train.validate import Validated


class Corpora:
    """What the metrics of a run say of each corpus of its mixture; of other data nothing."""

    def __init__(self, run: OpenRun) -> None:
        source = None if run.folder is None else run.source("train")  # only the rank that writes has a use for it
        self.batch = run.plan.work.global_batch_size
        self.order = source.order(run.plan.seed, self.batch) if isinstance(source, MixedSource) else None

    def columns(self, step: int, found: Validated) -> dict[str, float | None]:
        """The columns of a row of metrics, for a step from 1: the share of all samples of the global batch."""
        if self.order is None:
            return {}
        counts = zip(self.order.names, self.order.of_step(step - 1), strict=True)
        shares: dict[str, float | None] = {f"{SHARE}{name}": count / self.batch for name, count in counts}
        return shares | {f"{VAL_LOSS}{name}": found.by_corpus.get(name) for name in self.order.names}


def lines(run: OpenRun) -> list[str]:
    """What a run takes of each corpus of its mixture, in words."""
    train = run.config.train
    return [use.in_words() for use in uses(run.source("train"), train.global_batch_size, train.num_steps)]
