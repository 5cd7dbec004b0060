"""In: the profile of a run on CPUs (`[profile]`). Out: one recorded step as boxes of rank x time, on one clock.
Does not draw (run_figures.py and page.py do). On CUDA a trace shows when the host starts kernels: it is not used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.range_names import WAITING, step_of
from codescent.cost.doing import Doing
from codescent.plan import RECEIVES, SENDS, Instruction, Plan, Verb
from codescent.report.style import DOING
from codescent.report.walk import StepBox, StepTimeline, sends, when
from codescent.trace.intervals import Interval, intersection, union, without
from codescent.trace.ranks import RankTrace, file_of, folder_of

MOST_BYTES = 8_000_000
"""Size of all files of a window that a report reads: it must not wait for minutes. The command --profile reads all."""
WINDOW = 1


@dataclass
class _Rank:
    """The ranges of a rank, in seconds: its steps, instructions by name, and waiting."""

    steps: dict[int, Interval] = field(default_factory=dict)
    instructions: list[tuple[str, Interval]] = field(default_factory=list)
    waiting: list[Interval] = field(default_factory=list)


def traced(run: Path, plan: Plan) -> tuple[StepTimeline | None, str]:
    """A recorded step of a run, and "". Without one: None and why, in a sentence; "" if the run has no profile.

    Of the steps that all ranks have recorded it is the one with the median length.
    """
    files = [file_of(folder_of(run, WINDOW), rank) for rank in range(plan.mesh.world_size)]
    if not all(file.is_file() for file in files):
        return None, ""
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None, "Its profile is too large for a page; codescent report --profile reads it."
    try:
        found = [_read(file) for file in files]
    except UserError as error:
        return None, f"Its profile cannot be read: {'; '.join(error.problems)}."
    if None in found:
        return (
            None,
            "Its profile is of CUDA devices, and says when the host starts kernels.",
        )
    ranks = [rank for rank in found if rank is not None]
    steps = set.intersection(*(set(rank.steps) for rank in ranks))
    if not steps:
        return None, "Its profile has no step that all ranks have recorded."
    order = sorted(steps, key=lambda step: ranks[0].steps[step][1] - ranks[0].steps[step][0])
    return _walk(ranks, order[len(order) // 2], plan), ""


def _read(path: Path) -> _Rank | None:
    """The ranges of a rank; None: it is of a CUDA device. Raises UserError: the file is damaged."""
    trace = RankTrace(path)
    if trace.head.device != "cpu":
        return None
    found = _Rank()
    try:
        for event in trace.events():
            if event.get("ph") != "X" or event.get("cat") != "user_annotation":
                continue
            begin = float(event["ts"]) / 1e6
            interval, name = (begin, begin + float(event.get("dur", 0)) / 1e6), str(event["name"])
            if (number := step_of(name)) is not None:
                found.steps[number] = interval
            elif name == WAITING:
                found.waiting.append(interval)
            else:
                found.instructions.append((name, interval))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged: an event: {type(error).__name__}: {error}") from error
    return found


def _walk(ranks: list[_Rank], step: int, plan: Plan) -> StepTimeline:
    """The boxes of one step."""
    origin_s = min(rank.steps[step][0] for rank in ranks)
    sent, boxes = sends(plan), []
    for number, rank in enumerate(ranks):
        stage = plan.mesh.coordinates(number)["pp"]
        named = {str(at): at for at in plan.schedule.programs[stage]}
        waits = union(rank.waiting)
        for name, interval in rank.instructions:
            at = named.get(name)
            if at is not None and rank.steps[step][0] <= interval[0] < rank.steps[step][1]:
                why = awaited(at, plan)
                boxes += _boxes(number, at, why, interval, waits, origin_s, sent.get((stage, at), ""))
    end_s = max(rank.steps[step][1] for rank in ranks)
    source = f"Recorded by [profile]: step {step}, on the clock of rank 0. The profiler makes a step longer."
    return StepTimeline(f"recorded, step {step}", source, end_s - origin_s, range(len(ranks)), boxes)


def awaited(at: Instruction, plan: Plan) -> Doing:
    """For what an instruction waits. A trace does not say whether another rank has not come yet."""
    if at.verb in (Verb.PUSH, Verb.PULL):
        return Doing.SERVER
    if at.verb in (Verb.AVERAGE, Verb.MERGE, Verb.EXCHANGE) and plan.layout.gossip != "none":
        return Doing.MESSAGE
    passes = at.verb in (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT)
    if plan.mesh.pp == 1 or not (passes or at.verb in (*SENDS, *RECEIVES)):
        return Doing.COLLECTIVE
    sums = passes and any(plan.mesh.degree(axis) > 1 for axis in ("tp", "cp", "ep", "dp_shard"))
    return Doing.RANK if sums else Doing.MESSAGE  # a stage that waits for both is not told apart


def _boxes(
    rank: int, at: Instruction, why: Doing, interval: Interval, waits: list[Interval], origin_s: float, sends_what: str
) -> list[StepBox]:
    """An instruction as boxes: where it computes, and where it waits for others."""
    found = []
    name = str(at).replace("_", " ")
    for kind, parts in ((str(at.verb), without([interval], waits)), (why, intersection([interval], waits))):
        doing = f"{DOING[why][0]} in {name}" if kind == why else name
        for begin, end in parts:
            start_s, length_s = begin - origin_s, end - begin
            what = f"rank {rank}: {doing}, {when(start_s, length_s)}{sends_what}"
            found.append(StepBox(rank, kind, start_s, length_s, what, None if kind == why else at.microbatch))
    return found
