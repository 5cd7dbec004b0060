"""In: a config for one process. Out: its trainer, on which a replay computes gradients.
Does not train and writes no run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from codescent.base.rank import Rank
from codescent.config.sections import Config
from codescent.train.assemble import Trainer, assemble
from codescent.train.open import connect, open_data
from codescent.train.stop import StopRequest


@contextmanager
def trainer_alone(config: Config) -> Iterator[Trainer]:
    """Connect, open the data and assemble the parts, with the initial weights of step 0. All is closed at the end."""
    with connect(config, Rank()) as world:
        config, plan, dataset = open_data(config, world, None, resume=False)
        with StopRequest(alone=True) as stop, closing(assemble(config, plan, world, dataset, 0, stop)) as trainer:
            yield trainer
