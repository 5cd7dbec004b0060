"""In: nothing. Out: the dataclasses of an evaluated study: points with intervals, groups of points, fits, sentences.
Does not run or evaluate anything: other files of this room do, report/ draws what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from codescent.plan import FlopFormula
from codescent.planner.bands import Band
from codescent.planner.beside import COMPUTING, ComparedPart
from codescent.results import Interval
from codescent.study.marks import Mark


class Kind(StrEnum):
    """What stays constant while the number of workers grows."""

    STRONG = "strong"  # the global batch
    WEAK = "weak"  # the batch of each rank
    THREADS = "threads"  # the batch; the workers are threads of one rank
    GRID = "grid"  # nothing grows: the points are compared with the baseline
    WIDTHS = "widths"  # learning rate and seed, while the model gets wider: the sizes of activations are compared


class PointState(StrEnum):
    """How far a point has come."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"  # it cannot exist; the reason is `build`'s
    TO_DO = "to do"


@dataclass(frozen=True)
class PointQuantity:
    """A quantity of a point in all its time, and in its computation alone; None: unknown."""

    total: Interval | None = None
    compute: Interval | None = None


@dataclass(frozen=True)
class PredictedPoint:
    """What was predicted of a point before its runs began.

    Attributes:
        cluster: on which machines.
        step_s: seconds of a step.
        band_s: between which 8 of 10 such steps are measured.
        compared: the step and its parts, predicted and measured.
        speed_up, efficiency: beside the prediction of the baseline; None: it has none.
        flops_per_s: of all ranks; None: unknown.
        memory_bytes: of the fullest rank.
    """

    cluster: str
    step_s: float
    band_s: Band
    compared: Sequence[ComparedPart]
    speed_up: float | None
    efficiency: float | None
    flops_per_s: float | None
    memory_bytes: float

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward passes."""
        return next((one.predicted for one in self.compared if one.name == COMPUTING), 0.0)


@dataclass(frozen=True)
class Point:
    """One point of a study, over its repeats.

    Attributes:
        name: short and unique in the study, such as "ranks=2 batch=8".
        axes: value of each axis.
        workers: ranks, or threads for Kind.THREADS: the horizontal axis of figures. None: the study has no such axis.
        state: of the point: DONE if at least one repeat is done.
        why: why it is FAILED, OUT_OF_MEMORY or REFUSED.
        repeats: number of repeats that are done.
        step_s: seconds of a step, and of its forward and backward passes.
        speed_up: seconds of the baseline / seconds x growth_of_work.
        efficiency: speed-up / growth of the workers.
        flops_per_s: FLOPs / seconds, of all ranks, by the formula of the study.
        tokens_per_s: of all ranks.
        mfu: those FLOPs per second / (workers' measured peak).
        parts_s: each part of `results.PARTS`, by its mean share over ranks and repeats; they sum to the median of
            step_s. Empty: unknown.
        memory_bytes: largest peak memory of a rank; None: unknown.
        serial_share: the share that Amdahl's law gives this point (Karp & Flatt 1990); None: the baseline, or unknown.
        load: largest load of the machine per core during its repeats; None: unknown.
        marks: what a reader must know, such as that it is super-linear.
        runs: the run folders of its repeats.
        tokens: of a step, of all ranks; None: unknown.
        others: largest share of the cores that other programs used during its repeats; None: unknown.
        mesh: degree of each axis of its mesh; empty: unknown.
        growth_of_work: tokens of its step / those of the baseline's.
        predicted: with run.cluster: before its runs; None: nothing was.
    """

    name: str
    axes: Mapping[str, Any]
    workers: int | None
    state: PointState
    why: str = ""
    repeats: int = 0
    step_s: PointQuantity = PointQuantity()
    speed_up: PointQuantity = PointQuantity()
    efficiency: PointQuantity = PointQuantity()
    flops_per_s: PointQuantity = PointQuantity()
    tokens_per_s: Interval | None = None
    mfu: Interval | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    serial_share: Interval | None = None
    load: float | None = None
    marks: Sequence[Mark] = ()
    runs: Sequence[str] = ()
    tokens: float | None = None
    others: float | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    growth_of_work: float = 1.0
    predicted: PredictedPoint | None = None

    @property
    def overhead(self) -> float | None:
        """The share of a step that is not computation; None: unknown."""
        whole = sum(self.parts_s.values())
        return 1 - (self.parts_s["forward_s"] + self.parts_s["backward_s"]) / whole if whole else None


@dataclass(frozen=True)
class Fit:
    """A law fitted to the points of a group.

    Attributes:
        law: "Amdahl", "Gustafson" or "universal scalability law".
        parameters: each with its interval: "serial share"; for the last law "contention" and "coherency".
        said: the fit in a sentence; or why there is none, such as "too few points".
        curve: speed-up that the law gives for each number of workers; empty without a fit.
        worst: by which share the curve differs from the farthest point that it was fitted to; None without a fit.
    """

    law: str
    parameters: Mapping[str, Interval]
    said: str
    curve: Mapping[int, float] = field(default_factory=dict)
    worst: float | None = None


@dataclass(frozen=True)
class Group:
    """Points that differ only in their number of workers: one line of a figure.

    Attributes:
        label: the other axes, such as "batch=8"; "" if there are none.
        points: by number of workers, all states.
        baseline: name of the point that speed-up refers to.
    """

    label: str
    points: Sequence[Point]
    baseline: str
    fits: Sequence[Fit] = ()


@dataclass(frozen=True)
class Study:
    """An evaluated study.

    Attributes:
        name: of the study file.
        kind: what stays constant.
        groups: in order of the study file.
        paragraphs: what it says, in plain words.
        machine: facts about the machine and software, as in environment.json of its runs.
        folder: where its run folders are; None: a table that others measured.
        unit: of `workers`: "ranks" or "threads".
        warmup: steps that each run leaves out; None: a table that others measured.
        config: base config of its runs, in words; "": a table that others measured.
        models: of its runs, each in a line; empty: none is done, or a table that others measured.
        formula: by which FLOPs are counted; None: a table that others measured.
    """

    name: str
    kind: Kind
    groups: Sequence[Group]
    paragraphs: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    unit: str = "ranks"
    warmup: int | None = None
    config: str = ""
    models: Sequence[str] = ()
    formula: FlopFormula | None = None
