"""In: a config, the steps and the number format of a proof. Out: what all proofs share: words of their runs, a folder.
Does not know layouts (prove.py does) or faults (prove_faults.py does)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.temporary_folder import temporary_folder
from codescent.config.rate_schedules import of_optimizer
from codescent.config.sections import Config, Optimizer
from codescent.results import stopped_by_signals
from codescent.verbs.arguments import parse

TOLERANCE: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-4}
"""Largest relative difference with the verdict "same", by number format."""


@contextmanager
def folder_of_proof() -> Iterator[Path]:
    """A temporary folder for runs. If this command is stopped, they are stopped, and the folder is removed."""
    with stopped_by_signals(), temporary_folder("codescent-prove-") as folder:
        yield folder


def words_of_proof(given: Config, steps: int, precision: str, period: int = 1) -> list[str]:
    """Short runs that print nothing and log nowhere. Validations are at multiples of `period`."""
    return [
        f"train.precision={precision}",
        f"train.eval_every={max(1, steps // 2 // period) * period if given.train.eval_every else 0}",
        *_schedule(given.optimizer, given.optimizer.decay_steps or given.train.num_steps, steps),
        "train.num_epochs=auto",
        "train.ema=0.0",  # it changes no loss, and some methods have none
        "train.stop_after=0",
        *(["checkpoint.keep_best=false"] if given.train.eval_every else []),
        "log.sample_tokens=0",
        "log.tensorboard=false",
        *(f"log.{key}=auto" for key in ("to", "wandb", "mlflow", "trackio")),
        "profile.active=0",
        "parallel.reduce_dtype=auto",  # reducing in bf16 would change the gradients
    ]


def _schedule(optimizer: Optimizer, end: int, steps: int) -> list[str]:
    """Words that give the first steps the learning rates of the whole run. A decay may begin after them.

    Args:
        optimizer: of the config.
        end: the step at which a decay of the whole run has ended.
        steps: of the proof.
    """
    whole = optimizer.model_copy(update={"decay_steps": end})
    begins_later = any(of_optimizer(whole).refuse(whole, steps))
    return ["optimizer.schedule=constant"] if begins_later else [f"optimizer.decay_steps={end}"]


def refuse_without_effect(arguments: Namespace, beside: str, used: Collection[str]) -> None:
    """Refuse arguments that do nothing beside another one.

    Args:
        arguments: of `codescent prove`.
        beside: the other one, with its value.
        used: names of the arguments that have an effect there.

    Raises:
        UserError: such arguments are given.
    """
    defaults = parse(["prove", "default"])
    defaults.config = None
    free = {"verb", "log_level", *used}
    given = [name for name, value in vars(arguments).items() if name not in free and value != getattr(defaults, name)]
    if given:
        words = ", ".join("CONFIG" if name == "config" else name for name in given)
        raise UserError(f"prove {beside}: {words} would have no effect: leave it out")
