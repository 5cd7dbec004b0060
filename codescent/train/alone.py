"""In: a config for one process, environment.json of a run. Out: a trainer on which a replay computes its gradients.
Does not train and writes no run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from codescent.base.output import say
from codescent.base.rank import Rank
from codescent.config.sections import Config
from codescent.train.assemble import Trainer, assemble
from codescent.train.choices import other_machine, restore
from codescent.train.open import connect, open_data
from codescent.train.stop import StopRequest


@contextmanager
def trainer_alone(config: Config, recorded: dict[str, Any]) -> Iterator[Trainer]:
    """Connect, open the data and assemble the parts, with the initial weights of step 0. All is closed at the end.

    Kernels, the way of bf16 products and the number of threads are those of the run: another sum rounds otherwise.
    """
    with connect(config, Rank()) as world:
        config, plan, dataset = open_data(config, world, None, resume=False)
        restore(config, recorded)
        say([f"this machine rounds otherwise: {fact}" for fact in other_machine(recorded, world.device)])
        compiles = recorded["compile"]["choice"]
        with (
            StopRequest(alone=True) as stop,
            closing(assemble(config, plan, world, dataset, 0, stop, compiles)) as trainer,
        ):
            yield trainer
