"""In: a file, whole trainings. Out: what each one learnt: its validation loss, points of its curve, its first losses.
Does not run anything. The file is small: later calls, on other days too, add to it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import SystemFailed
from slow_methods import EQUAL_LOSSES
from slow_runs import EXACT, Case, Recorded

CURVE_POINTS = 100
"""Points of each loss curve: means of consecutive steps."""


@dataclass(frozen=True)
class Learnt:
    """A whole training on links without a limit.

    Attributes:
        key: of the case: all that decides the losses.
        method, hosts, seed, steps: of the case, for people.
        cpu: the losses of two processors differ in their last bits.
        val_loss: over the whole validation split, after the last step.
        wall_s: from the start of the processes to the end of the last.
        first_losses: of the first steps; empty: not recorded.
        curve: means of `steps_a_point` training losses.
        matmul: kernels of the matrix products, `train.matmul`. Both are fp32; they round differently.
    """

    key: str
    method: str
    hosts: int
    seed: int
    steps: int
    cpu: str
    val_loss: float
    wall_s: float
    first_losses: list[float]
    steps_a_point: int
    curve: list[float]
    matmul: str = EXACT

    @classmethod
    def of(cls, case: Case, recorded: Recorded, cpu: str, matmul: str = EXACT) -> Learnt:
        """What a recorded run learnt."""
        assert recorded.val_loss is not None  # the case validates
        losses, every = recorded.losses, max(1, len(recorded.losses) // CURVE_POINTS)
        curve = [round(statistics.mean(losses[at : at + every]), 5) for at in range(0, len(losses), every)]
        return cls(
            case.key, case.method.name, case.hosts, case.seed, case.steps, cpu, recorded.val_loss,
            round(recorded.wall_s, 1), losses[:EQUAL_LOSSES], every, curve, matmul,
        )  # fmt: skip


class Losses:
    """Trainings by the key of their case, one JSON object a line.

    Raises:
        SystemFailed: a line of the file is no such object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Learnt] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
            try:
                one = Learnt(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise SystemFailed(f"{path}, line {number}: not a training of this benchmark ({error})") from error
            self._found[one.key] = one

    def get(self, case: Case) -> Learnt | None:
        """The training of a case; None: it was not made."""
        return self._found.get(case.key)

    def put(self, one: Learnt) -> None:
        """Add a training to the file, in one write."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        self._found[one.key] = one


def distances(mine: Sequence[Learnt], of_ddp: Sequence[Learnt]) -> dict[str, Any]:
    """Validation losses by seed and their mean; its distance from DDP's as a fraction of it, over the same seeds; DDP's
    spread over all of its seeds. None: not measured."""
    own, theirs = ({one.seed: one.val_loss for one in runs} for runs in (mine, of_ddp))
    common = own.keys() & theirs.keys()
    of_common = [statistics.mean(losses[seed] for seed in common) for losses in (own, theirs)] if common else None
    spread = max(theirs.values()) - min(theirs.values()) if len(theirs) > 1 else None
    return {
        "val_losses": {str(seed): loss for seed, loss in own.items()},
        "val_loss": statistics.mean(own.values()) if own else None,
        "over_ddp": of_common[0] / of_common[1] - 1 if of_common else None,
        "ddp_spread": None if spread is None else spread / statistics.mean(theirs.values()),
    }


def mean_curve(runs: Sequence[Learnt]) -> list[float]:
    """The mean over seeds of each point."""
    return [statistics.mean(values) for values in zip(*(run.curve for run in runs), strict=True)]
