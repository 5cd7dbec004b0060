"""In: the repeats of each point. Out: the study evaluated: medians with intervals, speed-up, fits, marks, sentences.
Does not read folders or tables (opened.py and table.py do) and does not print."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codescent.base.amounts import of_share
from codescent.base.errors import UserError
from codescent.results import PARTS, Interval, bootstrap, rate, spread
from codescent.results.statistics import Values, medians
from codescent.study.file import NODES, WORKERS
from codescent.study.folder import Definition
from codescent.study.laws import AMDAHL, GUSTAFSON, UNIVERSAL, fitted
from codescent.study.marks import Mark, MarkKind, mark
from codescent.study.points import growing, is_of, name_of
from codescent.study.predicted import predicted_point, sentences
from codescent.study.repeat import Repeat
from codescent.study.result import Fit, Group, Kind, Point, PointQuantity, PointState, PredictedPoint, Study
from codescent.study.words import BUSY, SPREAD, paragraphs

UNSUITABLE = "not for this study"
"""Beginning of what is said of a law that is for work of another kind."""


@dataclass(frozen=True)
class Taken:
    """A point before its evaluation: its axes, its state, and the repeats that are done.

    Attributes:
        wanted: number of repeats that the study wants; 0: as many as there are.
        failed: why repeats have failed, although others are done.
        prediction: of its runs, as JSON (planner/prediction.py); None: nothing was predicted.
    """

    axes: Mapping[str, Any]
    workers: int | None
    state: PointState
    why: str = ""
    repeats: Sequence[Repeat] = ()
    wanted: int = 0
    failed: Sequence[str] = ()
    prediction: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """As in `Point`."""
        return name_of(self.axes)


def evaluated(
    name: str,
    kind: Kind,
    baseline: Mapping[str, Any],
    taken: Sequence[Taken],
    machine: Mapping[str, Any] | None = None,
    folder: str | None = None,
) -> Study:
    """Evaluate a study.

    Args:
        name: of the study.
        kind: what stays constant.
        baseline: values of axes. In each group, the point that has them; else the only point that has them.
        taken: all points, in order.
        machine: facts about it.
        folder: of its runs.

    Raises UserError: no point, or several, are the baseline of a group.
    """
    groups = [
        _group(kind, label, members, base) for label, members, base in _with_baselines(name, kind, baseline, taken)
    ]
    unit = WORKERS.get(kind, "ranks")
    study = Study(name, kind, groups, machine=machine or {}, folder=folder, unit=unit)
    return replace(study, paragraphs=[*paragraphs(study), *sentences(study)])


def check_baseline(definition: Definition) -> None:
    """Raise UserError if no point of a study, or several of a group, are its baseline: before anything runs."""
    kind = definition.kind
    points = [Taken(one.axes, growing(kind, one.axes), PointState.TO_DO) for one in definition.specs]
    _with_baselines(definition.name, kind, definition.baseline, points)


def _with_baselines(
    name: str, kind: Kind, baseline: Mapping[str, Any], taken: Sequence[Taken]
) -> list[tuple[str, list[Taken], Taken]]:
    """Label, points and baseline of each group: its own point with those values; else the only one of the study."""
    groups, problems = [], []
    every = [one for one in taken if is_of(one.axes, baseline)]
    if not every:
        raise UserError(f"{name}: baseline {name_of(baseline)}: is no point of this study")
    for label, members in _grouped(kind, taken):
        found = [one for one in members if one in every] or every
        if len(found) == 1:
            groups.append((label, members, found[0]))
        else:
            which = ", ".join(one.name for one in found[:4]) + ", ..." * (len(found) > 4)
            where = f" of {label}" if label else ""
            problems.append(f"{name}: baseline {name_of(baseline)}{where}: is {which}; give values of more axes")
    if problems:
        raise UserError(*problems)
    return groups


def _grouped(kind: Kind, taken: Sequence[Taken]) -> list[tuple[str, list[Taken]]]:
    """Points that differ only in their number of workers, and a label for them."""
    if kind is Kind.GRID:
        return [("", list(taken))]

    def by(without: Sequence[str]) -> dict[str, list[Taken]]:
        found: dict[str, list[Taken]] = {}
        for one in taken:
            rest = {axis: value for axis, value in one.axes.items() if axis not in without}
            found.setdefault(name_of(rest), []).append(one)
        return found

    groups = by([WORKERS[kind], NODES])
    if any(len({one.workers for one in members}) < len(members) for members in groups.values()):
        groups = by([WORKERS[kind]])  # the same number of workers on one machine and on two
    return [(label, sorted(members, key=lambda one: one.workers or 0)) for label, members in groups.items()]


def _group(kind: Kind, label: str, members: Sequence[Taken], base: Taken) -> Group:
    points = [_point(kind, one, base) for one in members]
    if kind is not Kind.GRID:
        points = _marked_steps(points)
    return Group(label, points, base.name, _fits(kind, members, base))


def _point(kind: Kind, one: Taken, base: Taken) -> Point:
    """A point with all that its repeats and those of the baseline say."""
    point = Point(one.name, one.axes, one.workers, one.state, one.why, len(one.repeats))
    grown = one.workers / base.workers if one.workers and base.workers else None
    if not one.repeats:
        return replace(point, predicted=_predicted(one, base, None, grown))
    repeats, is_base = one.repeats, one is base
    step_s = PointQuantity(_over(repeats, "step_s"), _over(repeats, "compute_s"))
    mine, of_base = _works(kind, [one, base]) if base.repeats else (1.0, 1.0)
    growth = mine / of_base
    speed_up = PointQuantity(*(_speed_up(one, base, growth, name) for name in ("step_s", "compute_s")))
    efficiency = PointQuantity(*(_scaled(found, grown) for found in (speed_up.total, speed_up.compute)))
    marks = [*_marks(one), *_other_threads(kind, one, base)]
    for what, found in ((MarkKind.SUPER_LINEAR, efficiency.total), (MarkKind.COMPUTATION, efficiency.compute)):
        if found is not None and grown is not None and grown > 1 and _exceeds_one(found):
            marks.append(mark(what))
    return replace(
        point,
        step_s=step_s,
        speed_up=speed_up,
        efficiency=efficiency,
        flops_per_s=PointQuantity(_rate(repeats, "flops", "step_s"), _rate(repeats, "flops", "compute_s")),
        tokens_per_s=_rate(repeats, "tokens", "step_s"),
        mfu=_rate(repeats, "peak_s", "step_s"),
        parts_s=_parts([repeat.parts_s for repeat in repeats], step_s.total),
        memory_bytes=max((repeat.memory_bytes for repeat in repeats if repeat.memory_bytes), default=None),
        serial_share=None if is_base else _serial_share(kind, speed_up.total, grown),
        load=max((max(repeat.load) for repeat in repeats if repeat.load), default=None),
        others=max((repeat.others for repeat in repeats if repeat.others is not None), default=None),
        tokens=repeats[0].tokens,
        mesh=repeats[0].mesh,
        growth_of_work=growth,
        marks=marks,
        runs=[repeat.run for repeat in repeats if repeat.run],
        predicted=_predicted(one, base, step_s.total, grown),
    )


def _predicted(one: Taken, base: Taken, step_s: Interval | None, grown: float | None) -> PredictedPoint | None:
    """What was predicted of a point, beside what its repeats say."""
    if one.prediction is None:
        return None
    parts_s = _parts([repeat.busiest_s for repeat in one.repeats], step_s)
    flops = one.repeats[0].flops if one.repeats else None
    return predicted_point(one.prediction, base.prediction, step_s, parts_s, flops, grown)


def _values(repeats: Sequence[Repeat], name: str) -> list[float]:
    """A quantity of each repeat that knows it."""
    found = (getattr(repeat, name) for repeat in repeats)
    return [float(value) for value in found if value is not None]


def _over(repeats: Sequence[Repeat], name: str) -> Interval | None:
    values = _values(repeats, name)
    return bootstrap(values) if values else None


def _rate(repeats: Sequence[Repeat], work: str, seconds: str) -> Interval | None:
    """Work per second; None: no repeat knows both."""
    found = [(getattr(repeat, work), getattr(repeat, seconds)) for repeat in repeats]
    known = [(amount, spent) for amount, spent in found if amount is not None and spent]
    return rate(*zip(*known)) if known else None


def _works(kind: Kind, taken: Sequence[Taken]) -> list[float]:
    """The work of a step of points that have repeats: its tokens; if a table lacks them, what is in proportion."""
    tokens = [one.repeats[0].tokens for one in taken]
    known = [float(number) for number in tokens if number]
    return known if len(known) == len(taken) else [_relative_work(kind, one) for one in taken]


def _relative_work(kind: Kind, one: Taken) -> float:
    """The work of a step relative to other points of its study, by its axes."""
    sizes = ("tokens",) if "tokens" in one.axes else ("batch", "sequence")
    numbers = [float(one.axes[name]) for name in sizes if isinstance(one.axes.get(name), int | float)]
    return math.prod(numbers) * (one.workers or 1 if kind is Kind.WEAK else 1)


def _speed_up(one: Taken, base: Taken, growth: float, name: str) -> Interval | None:
    """Throughput of a point / throughput of the baseline, with a step of `growth` times the work."""
    if one is base:
        return Interval(1.0, 1.0, 1.0) if _values(base.repeats, name) else None
    mine, of_base = _values(one.repeats, name), _values(base.repeats, name)
    if not (mine and of_base):
        return None

    def ratio(base_s: Values, mine_s: Values) -> Values:
        return growth * medians(base_s) / medians(mine_s)

    return bootstrap(of_base, mine, statistic=ratio)


def _scaled(found: Interval | None, grown: float | None) -> Interval | None:
    return None if found is None or grown is None else Interval(*(value / grown for value in found))


def _exceeds_one(efficiency: Interval) -> bool:
    """Whether an efficiency is clearly above 1; without an interval, whether it is above 1."""
    return (efficiency.value if math.isnan(efficiency.low) else efficiency.low) > 1 + 1e-9


def _parts(repeats: Sequence[Mapping[str, float]], step_s: Interval | None) -> dict[str, float]:
    """The mean share of each part in a step, in seconds of the median step; empty if no repeat knows its parts.

    `repeats`: the parts of each.
    """
    known = [(parts, whole) for parts in repeats if (whole := sum(parts.values()))]
    if not known or step_s is None:
        return {}
    return {name: step_s.value * float(np.mean([of[name] / whole for of, whole in known])) for name in PARTS}


def _serial_share(kind: Kind, speed_up: Interval | None, grown: float | None) -> Interval | None:
    """The serial share that Amdahl's law gives a speed-up (Karp & Flatt 1990); for Kind.WEAK Gustafson's law.

    It falls while the speed-up grows: the ends of its interval are those of the speed-up, in the other order.
    """
    if speed_up is None or grown is None or grown <= 1:
        return None

    def share(gain: float) -> float:
        return (grown - gain) / (grown - 1) if kind is Kind.WEAK else (1 / gain - 1 / grown) / (1 - 1 / grown)

    return Interval(share(speed_up.value), share(speed_up.high), share(speed_up.low))


def _marks(one: Taken) -> list[Mark]:
    """What a reader must know about the repeats of a point."""
    repeats, seconds = one.repeats, _values(one.repeats, "step_s")
    marks = list(dict.fromkeys(note for repeat in repeats for note in repeat.notes))
    if (wide := spread(seconds)) > SPREAD:
        marks.append(mark(MarkKind.SPREADS, share=of_share(wide)))
    if (busy := max(_values(repeats, "others"), default=0.0)) > BUSY:
        marks.append(mark(MarkKind.OTHERS, share=of_share(busy)))
    marks += [mark(MarkKind.FAILED, why=why) for why in dict.fromkeys(one.failed)]
    if len(repeats) < one.wanted:
        marks.append(mark(MarkKind.FEWER, done=len(repeats), wanted=one.wanted))
    return marks


def _other_threads(kind: Kind, one: Taken, base: Taken) -> list[Mark]:
    """That ranks of a point had another number of threads than those of the baseline: the comparison is unfair."""
    mine, of_base = (sorted(set(_values(taken.repeats, "threads"))) for taken in (one, base))
    if kind is Kind.THREADS or not (mine and of_base) or mine == of_base:
        return []
    here, there = ("/".join(f"{number:.0f}" for number in numbers) for numbers in (mine, of_base))
    return [mark(MarkKind.THREADS, here=here, there=there)]


def _marked_steps(points: Sequence[Point]) -> list[Point]:
    """Mark each point that is faster than ideal from the next smaller one of its group."""
    found = list(points)
    done = [index for index, point in enumerate(points) if point.step_s.total is not None]
    for before, index in itertools.pairwise(done):
        small, large = points[before], points[index]
        gain, ideal = gain_of(small, large)
        sure = all(one.step_s.total is None or math.isnan(one.step_s.total.low) for one in (small, large))
        if ideal > 1 and gain > ideal * (1.0 if sure else 1.0 + SPREAD):
            values = {"gain": f"{gain:.2f}", "workers": small.workers, "ideal": f"{ideal:.3g}"}
            found[index] = replace(large, marks=[*large.marks, mark(MarkKind.FASTER, **values)])
    return found


def gain_of(small: Point, large: Point) -> tuple[float, float]:
    """Growth of the throughput between two points, and growth of their workers."""
    if small.speed_up.total is None or large.speed_up.total is None or not (small.workers and large.workers):
        return 1.0, 1.0
    return large.speed_up.total.value / small.speed_up.total.value, large.workers / small.workers


def _fits(kind: Kind, members: Sequence[Taken], base: Taken) -> list[Fit]:
    """The laws, fitted to the points that are done and had a core for each thread."""
    if kind is Kind.GRID:
        return []
    used = [one for one in members if one.repeats and one.workers and not _oversubscribed(one)]
    workers = [one.workers for one in used if one.workers]
    works = _works(kind, [*used, base] if base.repeats else used)
    speeds = [[work / repeat.step_s for repeat in one.repeats] for work, one in zip(works, used)]
    per = works[-1] / float(np.median(_values(base.repeats, "step_s"))) if base.repeats else 1.0
    fitting, other = (GUSTAFSON, AMDAHL) if kind is Kind.WEAK else (AMDAHL, GUSTAFSON)
    grows = "for work that grows with the workers" if other is GUSTAFSON else "for work that stays the same"
    fits = [fitted(law, workers, speeds, per) for law in (fitting, UNIVERSAL)]
    left_out = sum(map(_oversubscribed, members))
    if left_out:
        fits = [replace(fit, said=f"{fit.said} ({left_out} oversubscribed left out)") for fit in fits]
    return [fits[0], Fit(other.name, {}, f"{UNSUITABLE}: a law {grows}"), fits[1]]


def _oversubscribed(one: Taken) -> bool:
    return any(note.oversubscribed for repeat in one.repeats for note in repeat.notes)
