"""In: runs of two sides, A and B. Out: how their configs, machines, losses and memory differ.
Does not print, and does not compare times (compare.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.record.corpora import VAL_LOSS
from codescent.results.run import Run, differing

ROUNDING: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Largest relative difference, at the first step at which losses differ, that rounding makes: some hundred units in the
last place of the format, because a step has many sums."""

GROWN = 0.05
"""Largest relative difference to which rounding grows in a training: more is another trajectory."""

MEMORY_SHOWN = 0.02
"""Smallest relative difference of peak memory that is shown."""

SPEED_SHOWN = 0.05
"""Smallest relative difference of the measured peak of the processors that is shown."""

LAYOUT = ("parallel.", "train.microbatch_size")
NO_FACTS = ("run.name", "run.folder", "data.folder")
"""Keys that say where files are."""

SOFTWARE = (
    *("codescent", "python", "torch", "system", "levers.GLIBC_TUNABLES"),
    *("matmul.choice", "bf16_products.choice", "compile.choice"),
)
HARDWARE = ("processor", "instructions", "cores", "memory_bytes", "device", "num_threads", "levers.OMP_NUM_THREADS")
PLACES = ("host", "device")
"""Facts of each rank in environment.json."""

Values = Mapping[str, tuple[Sequence[Any], Sequence[Any]]]
"""For each fact its values in A and in B: of each run, without repeats. None: a run does not have the fact."""


@dataclass(frozen=True)
class Facts:
    """What differs between A and B, by group; and what differs between runs of the same side.

    Attributes:
        model: keys of [model] and [lora].
        config: all other keys, without those of the layout.
        layout: keys of [parallel], and the micro-batches.
        software, hardware: facts of environment.json. Users' code is software, by its hash.
        data: fingerprint of the dataset.
        inside: for each side that has some, the facts in which its own runs differ.
    """

    model: Values
    config: Values
    layout: Values
    software: Values
    hardware: Values
    data: Values
    inside: Mapping[str, Sequence[str]]


def facts(a: Sequence[Run], b: Sequence[Run]) -> Facts:
    """What differs in config, layout, software and hardware."""
    names = differing([*a, *b], but=NO_FACTS)
    keys = {key: (_once(r.keys.get(key) for r in a), _once(r.keys.get(key) for r in b)) for key in names}
    environment = {
        name: (_once(_fact(run, name) for run in a), _once(_fact(run, name) for run in b))
        for name in (*SOFTWARE, *HARDWARE, *PLACES, "dataset.digest")
    }
    code = {
        name: (_once(_own_code(run).get(name) for run in a), _once(_own_code(run).get(name) for run in b))
        for name in dict.fromkeys(name for run in (*a, *b) for name in _own_code(run))
    }
    of_code = {f"code of {name}": values for name, values in code.items()}
    both = {**keys, **environment, **of_code}
    sides = (("A", 0), ("B", 1))
    inside = {side: [name for name, values in both.items() if len(values[at]) > 1] for side, at in sides}
    apart = {name: values for name, values in both.items() if values[0] != values[1]}
    model = {name for name in keys if name.startswith(("model.", "lora."))}
    layout = {name for name in keys if name.startswith(LAYOUT)}
    return Facts(
        model=_only(apart, model),
        config=_only(apart, set(keys) - model - layout),
        layout=_only(apart, layout),
        software=_only(apart, (*SOFTWARE, *of_code)),
        hardware=_only(apart, (*HARDWARE, *PLACES)),
        data=_only(apart, ("dataset.digest",)),
        inside={side: names for side, names in inside.items() if names},
    )


def _only(values: Values, names: Iterable[str]) -> Values:
    wanted = set(names)
    return {name: value for name, value in values.items() if name in wanted}


def _once(values: Iterable[Any]) -> list[Any]:
    """The values in order, each once."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _fact(run: Run, name: str) -> Any:
    """A fact of environment.json; of `PLACES` those of all ranks."""
    if name in PLACES and (ranks := run.environment.get("ranks")):
        return ", ".join(dict.fromkeys(str(rank.get(name)) for rank in ranks))
    found: Any = run.environment
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if (
        name == "compile.choice" and found is None
    ):  # earlier versions compiled what the config names, and wrote no choice
        return run.keys.get("train.compile")
    return found


def _own_code(run: Run) -> dict[str, Any]:
    """The hash of the users' code that a run had, by key."""
    codes = run.environment.get("own_code")
    items = codes.items() if isinstance(codes, Mapping) else ()
    return {key: code.get("sha256") for key, code in items if isinstance(code, Mapping)}


class Alike(StrEnum):
    """How losses compare."""

    BITWISE = "equal, bitwise"
    ROUNDING = "equal to rounding"
    DIFFERENT = "different trajectory"


@dataclass(frozen=True)
class Losses:
    """The training losses of two runs, at the steps that both have.

    Attributes:
        steps: their number.
        alike: how they compare.
        first_step: the first step at which they differ; 0: they do not.
        first: the relative difference there.
        worst_step: the step with the largest difference.
        worst: the relative difference there.
        last_step: the last step that both have.
        last: both losses there.
        validation: the last validation losses of a step that both have; None: there is no such step.
        by_corpus: the same step's losses of each corpus that both have.
        decided: keys that decide the losses, and have different values.
        repeats: side to the first step at which its own runs have different losses.
    """

    steps: int
    alike: Alike
    first_step: int
    first: float
    worst_step: int
    worst: float
    last_step: int
    last: tuple[float, float]
    validation: tuple[int, float, float] | None
    by_corpus: Mapping[str, tuple[float, float]]
    decided: Sequence[str]
    repeats: Mapping[str, int]


def losses(a: Sequence[Run], b: Sequence[Run]) -> Losses | None:
    """Compare the losses of the first run of each side, and of the runs of a side; None: no common step."""
    one, other = a[0], b[0]
    steps, left, right = _common(one, other, "train_loss")
    if not len(steps):
        return None
    apart = _relative(left, right)
    where = np.flatnonzero(apart > 0)
    worst = int(np.argmax(apart))
    first = int(where[0]) if len(where) else None
    decided = _decided(one, other)
    limit = ROUNDING.get(str(one.keys.get("train.precision")), ROUNDING["fp32"])
    alike = Alike.DIFFERENT
    if first is None:
        alike = Alike.BITWISE
    elif not decided and apart[first] <= limit and apart[worst] <= GROWN:
        alike = Alike.ROUNDING
    validated, val_left, val_right = _common(one, other, "val_loss")
    known = np.flatnonzero(np.isfinite(val_left) & np.isfinite(val_right))
    at = int(known[-1]) if len(known) else None
    by_corpus = {
        column.removeprefix(VAL_LOSS): (float(of_one[at]), float(of_other[at]))
        for column in one.columns
        if at is not None and column.startswith(VAL_LOSS) and column in other.columns
        for _, of_one, of_other in [_common(one, other, column)]
    }
    return Losses(
        steps=len(steps),
        alike=alike,
        first_step=0 if first is None else int(steps[first]),
        first=0.0 if first is None else float(apart[first]),
        worst_step=int(steps[worst]),
        worst=float(apart[worst]),
        last_step=int(steps[-1]),
        last=(float(left[-1]), float(right[-1])),
        validation=None if at is None else (int(validated[at]), float(val_left[at]), float(val_right[at])),
        by_corpus=by_corpus,
        decided=decided,
        repeats={side: step for side, runs in (("A", a), ("B", b)) if (step := _first_repeat(runs))},
    )


def _common(one: Run, other: Run, column: str) -> tuple[Any, Any, Any]:
    """The steps that two runs have, and a column of each there."""
    steps, left, right = np.intersect1d(one.columns["step"], other.columns["step"], return_indices=True)
    return steps, one.columns[column][left], other.columns[column][right]


def _relative(left: Any, right: Any) -> Any:
    """Relative differences; 0 where both have the same value, or none; infinite where only one is finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(right - left) / np.abs(left)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, math.inf))


def _decided(one: Run, other: Run) -> list[str]:
    """The keys with different values that decide the losses; none where a plan is of an older version."""
    if one.plan is None or other.plan is None:
        return []
    left, right = one.plan.trajectory(), other.plan.trajectory()
    of_one_kind = [key for key in left.keys() ^ right.keys() if left.get(key) != right.get(key)]
    return [*one.plan.differing(other.plan), *sorted(of_one_kind)]


def _first_repeat(runs: Sequence[Run]) -> int:
    """The first step at which a run has another loss than the first of its side; 0: there is none."""
    found = []
    for run in runs[1:]:
        steps, left, right = _common(runs[0], run, "train_loss")
        where = np.flatnonzero(_relative(left, right) > 0)
        found += [int(steps[where[0]])] if len(where) else []
    return min(found, default=0)


@dataclass(frozen=True)
class Amount:
    """A quantity of each run: medians of both sides, and whether they differ.

    `shown`: the sides have no value in common range, and their medians are further apart than a bound.
    """

    a: float
    b: float
    shown: bool

    @property
    def change(self) -> float:
        """Relative."""
        return self.b / self.a - 1


def memory(a: Sequence[Run], b: Sequence[Run]) -> Amount | None:
    """Peak memory of the rank with the largest, in bytes; None: a side has no number."""
    left, right = ([max(run.peak_memory_bytes, default=None) for run in side] for side in (a, b))
    return _amount(left, right, MEMORY_SHOWN)


def speed(a: Sequence[Run], b: Sequence[Run]) -> Amount | None:
    """FLOP/s of matrix products on one rank, which each run has measured at its begin; None: a side has no number.

    It tells how fast the processors were, with all that other programs took from them.
    """
    name = "peak_flops_per_s"
    return _amount([r.environment.get(name) for r in a], [r.environment.get(name) for r in b], SPEED_SHOWN)


def load(a: Sequence[Run], b: Sequence[Run]) -> tuple[float, float] | None:
    """Median load of the machine at the begin of the runs: programs that wanted a core. None: a side has no number."""
    found = _amount([r.environment.get("load") for r in a], [r.environment.get("load") for r in b], 0.0)
    return None if found is None else (found.a, found.b)


def _amount(a: Sequence[float | None], b: Sequence[float | None], bound: float) -> Amount | None:
    left, right = ([value for value in side if value is not None] for side in (a, b))
    if not left or not right:
        return None
    one, other = float(np.median(left)), float(np.median(right))
    apart = max(left) < min(right) or max(right) < min(left)
    return Amount(one, other, apart and abs(other / one - 1) >= bound)


def refuse_empty(runs: Sequence[Run]) -> None:
    """Raise UserError for the runs that have no row of metrics."""
    if empty := [run.folder.path for run in runs if not len(run.columns["step"])]:
        raise UserError(*(f"{path}: has no row of metrics: a run has one after its first step" for path in empty))
