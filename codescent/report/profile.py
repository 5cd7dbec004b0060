"""In: the folder of a run with a profile. Out: which collectives cost how much, who is slow, and what to look at first.
Does not print (profile_text.py does) and does not read a trace itself (profile_rank.py does)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.range_names import WAITING
from codescent.cost.bubble import bubble_s
from codescent.plan import Plan
from codescent.report.profile_collectives import CollectiveRow, collective_rows
from codescent.report.profile_rank import RankSteps, read_rank
from codescent.report.slow import paces
from codescent.trace import operators, ranks

_WAITS = (WAITING, "c10d::", "_c10d_functional::", "nccl")
"""How names of operators and kernels begin in which a rank waits for others."""


@dataclass(frozen=True)
class Slow:
    """A rank that works longer than others.

    Attributes:
        rank: of the run.
        ratio: so many times as long as the others.
        others: in words.
        gain_s: so much longer.
        is_sure: the others do the same work; else only its FLOPs are known.
    """

    rank: int
    ratio: float
    others: str
    gain_s: float
    is_sure: bool


@dataclass(frozen=True)
class PossibleGain:
    """Something that a step could be rid of. `gain_s`: how much shorter a step would be at most."""

    name: str
    gain_s: float


@dataclass(frozen=True)
class ProfileReport:
    """What a profile says about a run. Seconds are means over the recorded steps.

    Attributes:
        window, folder: which recording.
        windows: numbers of all windows of the run.
        ranks: every rank's steps, in the order of ranks.
        collectives: the longest in flight first.
        operators: over all ranks, the largest self time first; seconds and calls are those of the whole window.
        step_s: mean length of a step.
        candidates: the largest gain first.
        slow: the ranks that are slow, the slowest first.
        busiest: the rank that works longest: no step is shorter than its work.
        bubble_s: in a pipeline, what the busiest rank waits for the work of other stages.
    """

    window: int
    folder: Path
    windows: list[int]
    ranks: list[RankSteps]
    collectives: list[CollectiveRow]
    operators: list[operators.Operator]
    step_s: float
    candidates: list[PossibleGain]
    slow: list[Slow]
    busiest: RankSteps
    bubble_s: float | None


def profile_report(run: Path, plan: Plan, window: int = 1) -> ProfileReport:
    """Read the profile of a run.

    Args:
        run: the run folder.
        plan: of the run.
        window: which of its windows.

    Raises:
        UserError: there is no such profile, or a file of it is missing, damaged, or of another layout than the run's.
    """
    there = list(_windows(run))
    if window not in there:
        raise UserError(_no_window(run, window, there))
    place = ranks.folder_of(run, window)
    found = _read_ranks(place, plan)
    tables = [operators.read_csv(operators.file_of(place, rank)) for rank in range(len(found))]
    step_s = statistics.fmean(one.step_s for one in found)
    slow = sorted(_slow(found, plan), key=lambda one: -one.ratio)
    busiest = max(found, key=_own_s)
    stage = plan.mesh.coordinates(busiest.head.rank)["pp"]
    bubble = bubble_s(plan.schedule, _stages(found, plan))[stage] if plan.mesh.pp > 1 else None
    rows = sorted(collective_rows(found, plan), key=lambda row: -row.flight_s)
    return ProfileReport(
        window,
        place,
        there,
        found,
        rows,
        _summed(tables),
        step_s,
        _candidates(found, step_s, slow, bubble, rows),
        slow,
        busiest,
        bubble,
    )


def _windows(run: Path) -> Iterator[int]:
    """The windows that have been recorded."""
    number = 1
    while ranks.file_of(ranks.folder_of(run, number), 0).is_file():
        yield number
        number += 1


def _no_window(run: Path, window: int, there: Sequence[int]) -> str:
    if there:
        return f"--window {window}: {run} has the windows {', '.join(map(str, there))}"
    return (
        f"{run}: has no profile: no {ranks.file_of(ranks.folder_of(run, window), 0)}; record one with profile.active, "
        "such as profile.active=5"
    )


def _read_ranks(place: Path, plan: Plan) -> list[RankSteps]:
    """The steps of every rank. Raises UserError: see `profile_report`."""
    number = ranks.RankTrace(ranks.file_of(place, 0)).head.world_size
    if number != plan.mesh.world_size:
        raise UserError(
            f"{place}: recorded on {number} ranks, but the run was continued on {plan.mesh.world_size}, and its plan "
            "is of these: record the profile again"
        )
    missing = [str(path) for rank in range(number) if not (path := ranks.file_of(place, rank)).is_file()]
    if missing:
        raise UserError(
            f"{place}: the traces of {len(missing)} of {number} ranks are missing: {', '.join(missing[:5])}"
        )
    found = [read_rank(ranks.file_of(place, rank)) for rank in range(number)]
    other = [one for one in found if one.head.steps != found[0].head.steps]
    if other:
        raise UserError(
            f"{place}: rank {other[0].head.rank} has the steps {other[0].head.steps}, rank 0 {found[0].head.steps}: "
            "the files are of two recordings"
        )
    return found


def _summed(tables: Sequence[Sequence[operators.Operator]]) -> list[operators.Operator]:
    """The operators of all ranks together, without those in which a rank waits for others."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in (row for table in tables for row in table if not row.operator.startswith(_WAITS)):
        of = sums.setdefault((row.operator, row.shapes, row.where), [0.0, 0.0, 0.0])
        for at, value in enumerate((row.calls, row.self_s, row.total_s)):
            of[at] += value
    rows = [operators.Operator(*key, int(calls), own, whole) for key, (calls, own, whole) in sums.items()]
    return sorted(rows, key=lambda row: -row.self_s)


def _stages(found: Sequence[RankSteps], plan: Plan) -> list[dict[str, float]]:
    """Seconds of the passes of each stage, as `bubble_s` wants them: of its slowest rank."""
    stages: list[dict[str, float]] = [{"forward_s": 0.0, "backward_s": 0.0} for _ in range(plan.mesh.pp)]
    for one in found:
        of = stages[plan.mesh.coordinates(one.head.rank)["pp"]]
        for name in of:
            of[name] = max(of[name], one.pass_s(name.removesuffix("_s")))
    return stages


def _slow(found: Sequence[RankSteps], plan: Plan) -> Iterator[Slow]:
    """Ranks that work longer than the others of their stage; if a stage has one rank: longer than its FLOPs explain."""
    for one, pace in zip(found, paces([one.usual_busy_s for one in found], plan), strict=True):
        if pace.is_slow:
            words = "the median of the others" if pace.peers else "the FLOPs of its stage explain"
            words = f"rank {pace.peers[0]}" if len(pace.peers) == 1 else words
            gain_s = pace.seconds - pace.expected_s
            yield Slow(one.head.rank, 1 + pace.slower, words, gain_s, bool(pace.peers))


def _own_s(one: RankSteps) -> float:
    """Seconds of a step in which a rank does not wait for others."""
    return one.busy_s + one.data_s + one.host_s


def _candidates(
    found: Sequence[RankSteps],
    step_s: float,
    slow: Sequence[Slow],
    bubble: float | None,
    rows: Sequence[CollectiveRow],
) -> list[PossibleGain]:
    """What a step could be rid of. No step is shorter than the work of its busiest rank, which bounds each gain."""
    waits_s = max(0.0, step_s - max(map(_own_s, found)))
    bubble_gain_s = min(bubble or 0.0, waits_s)
    most = max(rows, key=lambda row: row.exposed_s, default=None)
    candidates = [
        *(
            [PossibleGain(f"communication, most of it {most.kind} over {most.axis}", waits_s - bubble_gain_s)]
            if most
            else []
        ),
        *([PossibleGain("the bubble of the pipeline", bubble_gain_s)] if bubble is not None else []),
        *(PossibleGain(f"rank {one.rank}, which is slow", one.gain_s) for one in slow),
        PossibleGain("waiting for data", max(one.data_s for one in found)),
        PossibleGain("the host, for which the device waits", max(one.host_s for one in found)),
    ]
    return sorted(candidates, key=lambda one: -one.gain_s)
