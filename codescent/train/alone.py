"""In: a config for one process, environment.json of a run. Out: a trainer on which a replay computes its gradients.
Does not train and writes no run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from codescent import tasks
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.rank import Rank
from codescent.checkpoint.checkpoints import Saved
from codescent.config.sections import Config
from codescent.data.loader import Portion
from codescent.plan import Plan
from codescent.record import RunFolder
from codescent.train.assemble import assemble
from codescent.train.choices import other_machine, restore
from codescent.train.open import connect, open_data
from codescent.train.same_tokens import check_same_tokens
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer

SECTIONS = ("run", "model", "lora", "data", "train", "optimizer")
"""Sections of the config that a run of one process has as the run of many ranks has them."""


@contextmanager
def trainer_alone(config: Config, of_run: Plan, recorded: dict[str, Any], saved: Saved) -> Iterator[Trainer]:
    """Connect, open the data and assemble the parts, with the initial weights of step 0. All is closed at the end.

    Kernels, the way of bf16 products and the number of threads are those of the run: another sum rounds otherwise. The
    date of a chat template is that of the run, too. Weights in `model.weights` are taken as they are.

    Args:
        config: of the run, for one process.
        of_run: the run's plan.
        recorded: environment.json of the run.
        saved: a checkpoint of the run.

    Raises:
        UserError: the files in the run folder contradict each other, or the data is not that of the run.
    """
    with connect(config, Rank()) as world:
        config, plan, dataset, _ = open_data(config, world, RunFolder.open(saved.path.parent.parent), resume=False)
        _refuse_another_run(of_run, plan)
        check_same_tokens(dataset, saved)
        compiles = restore(config, recorded)
        say([f"this machine rounds otherwise: {fact}" for fact in other_machine(recorded, world.device)])
        with (
            StopRequest(alone=True) as stop,
            closing(assemble(config, plan, world, dataset, 0, stop, compiles)) as trainer,
        ):
            yield trainer


def gradients_alone(
    trainer: Trainer, plan: Plan, step: int, part: int, *, of_step: bool
) -> tuple[Sequence[torch.Tensor], float, int]:
    """What a rank of the run has computed of its part of a step: gradients, the sum of its losses, their number.

    Args:
        trainer: of one process, with the weights that the rank had.
        plan: of the run.
        step: from 0.
        part: of the step's samples, which are divided over the data-parallel ranks.
        of_step: the gradients are those of the mean over the step's losses, so that parts add up; else over its own.
    """
    assert trainer.loader is not None
    ranks = plan.mesh.dp_replicate
    found = trainer.loader.part(step, part, ranks)
    divisor = found.losses if of_step else found.own_losses
    portion = Portion(found.batches[: plan.work.num_microbatches], divisor, found.own_losses)
    first = part * (plan.work.global_batch_size // ranks)
    with torch.enable_grad():
        return *trainer.executor.gradients_of(portion, step, first), found.own_losses


def _refuse_another_run(of_run: Plan, alone: Plan) -> None:
    """Raise UserError if config.toml is not that of plan.json.

    How ranks divide the work may differ. So may the places of files.
    """
    moved = {"model.weights", *tasks.task_named(of_run.task.name).kept}
    own = {key for key in alone.trajectory() if key.partition(".")[0] in SECTIONS} - moved
    differs = {key: values for key, values in of_run.differing(alone).items() if key in own}
    if differs:
        raise UserError(
            *(f"config.toml: {key} = {now!r}, but plan.json has {then!r}" for key, (then, now) in differs.items())
        )
