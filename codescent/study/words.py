"""In: an evaluated study. Out: what it says in plain words: speed-up, what grew, why it stopped, what is inconsistent.
Does not evaluate (evaluate.py does) and does not print."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from codescent.base.amounts import of_change, of_measured, of_number, of_share
from codescent.base.counted import counted
from codescent.results import PART_WORDS, PARTS, Interval
from codescent.study.batch import KEPT, said_of
from codescent.study.file import NODES
from codescent.study.marks import Mark, MarkKind
from codescent.study.points import values_of
from codescent.study.result import Group, Kind, Point, PointState, Study

ALMOST_LINEAR = 0.95
"""Efficiency from which scaling is called almost linear."""

WIDE = 0.01
"""Half the width of an interval of a speed-up, from which it decides how many digits are shown."""

SPREAD = 0.05
"""A point is marked if (largest - smallest) / median of its repeats is more than this."""

COUNTED = (MarkKind.SPREADS, MarkKind.OVERSUBSCRIBED, MarkKind.OTHERS, MarkKind.FEWER)
"""Marks whose numbers alone differ between points."""

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")

BUSY = 0.1
"""A point is marked if other programs used more than this share of the cores."""

KIND_WORDS: Mapping[Kind, str] = {
    Kind.STRONG: "strong scaling: the global batch stays the same",
    Kind.WEAK: "weak scaling: the batch of each rank stays the same",
    Kind.THREADS: "threads of one rank: the batch stays the same",
    Kind.GRID: "a grid of settings",
    Kind.WIDTHS: "the sizes of activations while the model gets wider, without and with mu-P",
}
"""What stays constant in a study."""

NO_GAIN = 1.05
"""More workers gain nothing if they are not this many times as fast."""


def paragraphs(study: Study) -> list[str]:
    """What a study says: one paragraph for each group; for Kind.GRID one for each axis."""
    if study.kind is Kind.GRID:
        return [*_grid(study), *_trust(study)]
    return [*(text for group in study.groups if (text := " ".join(_group(study, group)))), *_trust(study)]


def _group(study: Study, group: Group) -> Iterator[str]:
    """Sentences about the points of a group."""
    points = [point for point in group.points if point.speed_up.total is not None]
    baseline = _baseline(study, group)
    if baseline is None or baseline.step_s.total is None:
        yield f"{_named(group)}The baseline {group.baseline} is not measured: there is no speed-up."
        return
    more = [point for point in points if (point.workers or 0) > (baseline.workers or 0)]
    if not more:
        if group.points and group.baseline not in [point.name for point in group.points]:
            yield from (f"{_named(group)}{_speed(point, group, study.unit)}" for point in points)
        return
    fair = [point for point in more if not _is_oversubscribed(point)]
    last = (fair or more)[-1]
    yield f"{_named(group)}{_speed(last, group, study.unit)} {_judged(last, study.unit)}"
    own = [point for point in group.points if point.name == group.baseline]
    yield from _best([*own, *more], study.unit)
    yield from _lost(baseline, last, study.unit)
    yield from _marked(group, study.unit)
    efficiency = last.efficiency.total
    if efficiency is not None and efficiency.value < KEPT:
        yield said_of(study, group, baseline, last)


def _trust(study: Study) -> Iterator[str]:
    """Whether the times can be trusted."""
    known = [point for group in study.groups for point in group.points if point.repeats > 1]
    points = [point for point in known if not _is_oversubscribed(point)]  # threads that share cores always spread
    wide = [point for point in points if any(mark.kind is MarkKind.SPREADS for mark in point.marks)]
    if wide:
        busy = max((point.others or 0.0 for point in wide), default=0.0)
        why = f"; other programs used up to {of_share(busy)} of the cores" if busy > BUSY else ""
        fair = " with a core for each thread" if len(points) < len(known) else ""
        yield (
            f"{len(wide)} of {counted(len(points), 'point')}{fair} spread by more than {100 * SPREAD:g} %{why}. "
            "Differences within the spread show nothing: repeat the study on an idle machine."
        )


def _named(group: Group) -> str:
    return f"{group.label}: " if group.label else ""


def _baseline(study: Study, group: Group) -> Point | None:
    points = [point for one in (group, *study.groups) for point in one.points]
    return next((point for point in points if point.name == group.baseline), None)


def short_name(point: Point, group: Group, unit: str) -> str:
    """The name of a point within its group: its workers; and its machines, if the group has several.

    Points without workers are named by their values alone.
    """
    if point.workers is None:
        return values_of(point.axes)
    alike = [one for one in group.points if one.workers == point.workers]
    if len(alike) > 1:
        return point.name
    machines = {str(one.axes.get(NODES, 1)) for one in group.points}
    on = f" on {counted(int(point.axes.get(NODES, 1)), 'node')}" if machines != {"1"} else ""
    return f"{counted(point.workers, unit.removesuffix('s'))}{on}"


def _speed(point: Point, group: Group, unit: str) -> str:
    """The speed-up of a point in a sentence."""
    assert point.speed_up.total is not None
    gain, efficiency = point.speed_up.total, point.efficiency.total
    share = efficiency_of(gain, efficiency)
    of = f", an efficiency of {share}" if share else ""
    base = next((one for one in group.points if one.name == group.baseline), None)
    than = short_name(base, group, unit) if base else f"the baseline ({group.baseline})"
    verb = "is" if point.workers == 1 else "are"
    slower = "" if gain.value >= 0.9 else "slower, "
    fast = f"{verb} {slower}{times(gain)} times as fast as"
    return f"{short_name(point, group, unit)} {fast} {than}{of}."


def times(gain: Interval) -> str:
    """A speed-up, with the digits that its interval allows; at least two."""
    if gain.half >= WIDE:
        return of_measured(gain.value, gain.half, least=2)
    return f"{gain.value:.2f}" if gain.value >= 0.1 else of_number(gain.value)


def efficiency_of(gain: Interval | None, efficiency: Interval | None) -> str:
    """An efficiency in per cent; empty: unknown. Where `times` shows a rounded speed-up, it is that of the rounded one:
    the two do not contradict each other."""
    if gain is None or efficiency is None:
        return ""
    shown = float(times(gain).replace(",", "")) if gain.half >= WIDE else gain.value
    return of_share(efficiency.value * shown / gain.value)


def _judged(point: Point, unit: str) -> str:
    """Whether that is linear."""
    efficiency = point.efficiency.total
    if efficiency is None or point.workers is None:
        return ""
    if any(mark.kind is MarkKind.SUPER_LINEAR for mark in point.marks):
        return "That is more than linear: look for a cause, such as a cache, before trusting it."
    if efficiency.value >= ALMOST_LINEAR:
        return "That is almost linear."
    lost = (1 - efficiency.value) * point.workers
    return f"That is not linear: the time of {lost:.2g} of {point.workers} {unit} is lost."


def _best(more: Sequence[Point], unit: str) -> Iterator[str]:
    """From which number of workers on more of them gain nothing."""
    for small, large in itertools.pairwise(more):
        assert small.speed_up.total is not None
        assert large.speed_up.total is not None
        one, other = small.speed_up.total, large.speed_up.total
        gain = other.value / one.value
        if gain < NO_GAIN:
            why = " (more threads than cores)" if _is_oversubscribed(large) else ""
            half = math.hypot(one.half / one.value, other.half / other.value)  # of a quotient, relative
            beyond = f"{small.workers} {unit if small.workers != 1 else unit.removesuffix('s')}"
            fast = times(Interval(gain, gain * (1 - half), gain * (1 + half)))
            yield f"Beyond {beyond} there is no gain: {large.workers} are {fast} times as fast{why}."
            return


def _lost(baseline: Point, point: Point, unit: str) -> Iterator[str]:
    """Which parts of a step took the time that is lost.

    With p workers a step costs p x seconds. What it costs beyond the baseline's seconds for the same work is lost, part
    by part; the sum over the parts is 1 - efficiency.
    """
    if not (baseline.workers and point.workers):
        return
    if not (baseline.parts_s and point.parts_s):
        yield "The parts of a step are not known, so the cause of the loss is unknown."
        return
    growth = point.workers / baseline.workers
    all_s = growth * sum(point.parts_s.values())
    lost = {
        name: (growth * point.parts_s[name] - point.growth_of_work * baseline.parts_s[name]) / all_s for name in PARTS
    }
    largest = sorted(((share, name) for name, share in lost.items() if share >= 0.01), reverse=True)[:3]
    if not largest:
        yield "No part of a step costs more than at the baseline."
        return
    listed = ", ".join(f"{PART_WORDS[name]} {of_share(share)}" for share, name in largest)
    yield f"Of the time of all {point.workers} {unit}, this is lost: {listed}."
    name = largest[0][1]
    before, after = (of_share(_share(one, name)) for one in (baseline, point))
    grows = _share(point, name) > _share(baseline, name)
    went = f"stays {after}" if before == after else f"{'grew' if grows else 'went'} from {before} to {after}"
    yield f"The share of {PART_WORDS[name]} in a step {went}: {_WHY[name]}."


_WHY: Mapping[str, str] = {
    "data_s": "reading is slower than computing",
    "forward_s": "each worker computes more slowly than one alone, or its share of the batch is too small",
    "backward_s": "each worker computes more slowly than one alone, or its share of the batch is too small",
    "communication_s": "the ranks wait for each other, and for messages",
    "bubble_s": "stages wait for micro-batches; more micro-batches shorten it",
    "optimizer_s": "every rank updates what it holds, however many ranks there are",
    "other_s": "what is done once a step does not become less",
}


def _share(point: Point, name: str) -> float:
    return point.parts_s[name] / sum(point.parts_s.values())


def _marked(group: Group, unit: str) -> Iterator[str]:
    """Pairs of points that do not fit together."""
    for point in group.points:
        for mark in point.marks:
            if mark.kind is MarkKind.FASTER:
                name = short_name(point, group, unit)
                yield f"Inconsistent: {name}: {mark}. The conditions of the two differed: measure both again."


def _is_oversubscribed(point: Point) -> bool:
    return any(mark.oversubscribed for mark in point.marks)


def _grid(study: Study) -> Iterator[str]:
    """For each axis and value: how many times as fast as with the baseline's value, all other axes equal."""
    points = [point for group in study.groups for point in group.points if point.step_s.total is not None]
    names = [group.baseline for group in study.groups]
    baseline = next((point for point in points if point.name in names), None)
    if baseline is None:
        yield "The baseline is not measured: there is no comparison."
        return
    for axis, usual in baseline.axes.items():
        for value in dict.fromkeys(str(point.axes[axis]) for point in points):
            if value != str(usual):
                yield from _effect(points, axis, str(usual), value)
    others = [point for point in points if point is not baseline]
    fastest = max(others, key=lambda point: point.speed_up.total.value if point.speed_up.total else 0.0, default=None)
    if fastest is None or fastest.speed_up.total is None:
        return
    gain = fastest.speed_up.total
    if gain.value <= 1 or gain.low <= 1:
        yield f"No point is shown to be faster than {baseline.name}."
    else:
        yield f"Fastest: {fastest.name}, {times(gain)} times as fast as {baseline.name}."


def _effect(points: Sequence[Point], axis: str, usual: str, value: str) -> Iterator[str]:
    """What a value of an axis changes."""
    of = {_key(point.axes, axis, str(point.axes[axis])): point for point in points}
    pairs = [
        (of[before], point)
        for point in points
        if str(point.axes[axis]) == value and (before := _key(point.axes, axis, usual)) in of
    ]
    if not pairs:
        return
    ratios = [_ratio(before, after) for before, after in pairs]
    middle = statistics.median(ratios)
    least, most = of_change(min(ratios) - 1), of_change(max(ratios) - 1)
    ends = f" ({least} to {most} in {len(pairs)} pairs)" if len(pairs) > 1 else ""
    change = f"{of_share(abs(middle - 1))} {'more' if middle > 1 else 'less'} time{ends}"
    unclear = sum(_overlap(one, other) for one, other in pairs)
    if unclear == len(pairs):
        said = f"no difference is shown, the intervals overlap; the medians say {change}."
    else:
        some = f" In {unclear} of them the intervals overlap." if unclear else ""
        said = f"{change}.{some}{_moved(pairs)}"
    yield f"{axis.rpartition('.')[2]} {value} instead of {usual}: {said}"


def _ratio(before: Point, after: Point) -> float:
    """Seconds of a point for the work of another, relative to its seconds."""
    assert before.step_s.total is not None
    assert after.step_s.total is not None
    return after.step_s.total.value * _work(before, after) / before.step_s.total.value


def _moved(pairs: Sequence[tuple[Point, Point]]) -> str:
    """The part that changed most between points, in a sentence."""
    known = [pair for pair in pairs if pair[0].parts_s and pair[1].parts_s]
    if not known:
        return ""
    changes = {
        name: statistics.median(b.parts_s[name] * _work(a, b) - a.parts_s[name] for a, b in known) for name in PARTS
    }
    name = max(changes, key=lambda part: abs(changes[part]))
    return f" What changed most: {PART_WORDS[name]}, by {changes[name] * 1000:+.3g} ms."


def _overlap(one: Point, other: Point) -> bool:
    a, b, work = one.step_s.total, other.step_s.total, _work(one, other)
    return a is not None and b is not None and a.low <= b.high * work and b.low * work <= a.high


def _work(one: Point, other: Point) -> float:
    """Tokens of a step of a point / those of another, where both are known."""
    return one.tokens / other.tokens if one.tokens and other.tokens else 1.0


def _key(axes: Mapping[str, object], axis: str, value: str) -> str:
    """All axes of a point as text, with another value of one of them."""
    return repr({name: value if name == axis else str(found) for name, found in axes.items()})


class Folded(NamedTuple):
    """A kind of marks.

    Attributes:
        about: which points have it, in words; more than three are counted.
        mark: the mark, with the range of each number.
        points: their names.
    """

    about: str
    mark: str
    points: Sequence[str]


def folded(marks: Sequence[tuple[str, Mark | str]]) -> list[Folded]:
    """Marks of points, each kind once. Marks of COUNTED kinds that differ only in numbers are one.

    Args:
        marks: the name of a point, and one of its marks; or why it has no numbers.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for name, mark in marks:
        text, counts = str(mark), isinstance(mark, Mark) and (mark.kind in COUNTED or mark.oversubscribed)
        kinds.setdefault(NUMBER.sub("\0", text) if counts else text, []).append((name, text))
    said = []
    for found in kinds.values():
        names = list(dict.fromkeys(name for name, _ in found))
        about = ", ".join(names) if len(names) <= 3 else counted(len(names), "point")
        said.append(Folded(about, _ranges([mark for _, mark in found]), names))
    return said


def _ranges(marks: Sequence[str]) -> str:
    """Marks that differ only in their numbers as one, with the range of each number."""
    first, *rest = NUMBER.split(marks[0])
    said = [first]
    for found, text in zip(zip(*map(NUMBER.findall, marks), strict=True), rest, strict=True):
        values = sorted(dict.fromkeys(found), key=lambda number: float(number.replace(",", "")))
        said += [" to ".join(dict.fromkeys((values[0], values[-1]))), text]
    return "".join(said)


def states_said(study: Study) -> str:
    """How many points have each state, such as "12 done, 2 refused"."""
    states = [point.state for group in study.groups for point in group.points]
    return ", ".join(f"{states.count(state)} {state}" for state in PointState if state in states)
