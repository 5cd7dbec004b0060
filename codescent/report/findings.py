"""In: the numbers of runs. Out: sentences: how fast they are, what limits them, who is slow, what is odd.
Does not read files. Every sentence follows from numbers of the report; the limits are the constants of this file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import median

import numpy as np

from codescent.base.amounts import of_number, of_seconds, of_share
from codescent.base.counted import counted
from codescent.plan import Plan
from codescent.report.content import KeyQuestion, Said
from codescent.report.outpaced import outpaced
from codescent.report.slow import paces
from codescent.report.summary import Summary
from codescent.results import PART_WORDS, State

WAITED = 0.02
"""A slow rank (slow.py) is named if the others wait for at least this share of a step longer than it does."""
UNEVEN = 0.25
"""Steps vary if the slowest tenth takes so much longer than the median."""
STEADY = 0.75
"""A rank that is slow in a smaller share of the rows is slow at times: other programs may be the cause."""
COMPUTES = 0.85
"""If computing has at least this share of a step, it limits the run."""
MOST = 12
"""Sentences of an answer; the number of the others is said."""

REMEDIES = {
    "communication_s": "larger micro-batches, more samples per step, or a layout that sends less",
    "bubble_s": "more micro-batches per step, chunks (parallel.virtual_stages), or another schedule",
    "data_s": "a faster disk, or data that need less preparation: reading ahead does not keep up",
    "optimizer_s": "a larger batch per step, which spreads the update over more samples",
    "other_s": "a profile says what it is: it is outside of the parts that are measured",
}


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than others of its kind, while they wait.

    Attributes:
        slower: by which share its passes take longer than expected.
        compute_s: seconds of its passes in a step.
        waited_s: by how much longer the others wait in a step than it does, in the median.
        rows: the share of the rows of ranks.csv in which it is slow.
        host: of the rank; "": unknown.
        planned: whether it is compared by the FLOPs of the plan, because no rank computes the same part.
    """

    rank: int
    slower: float
    compute_s: float
    waited_s: float
    rows: float
    host: str
    planned: bool

    @property
    def steady(self) -> bool:
        """Whether it is slow in most rows."""
        return math.isnan(self.rows) or self.rows >= STEADY


def stragglers(summary: Summary) -> list[Straggler]:
    """The ranks whose passes are slow, and for which the others wait."""
    parts, plan = summary.ranks, summary.run.plan
    if len(parts) < 2 or plan is None or len(parts) != plan.mesh.world_size:
        return []
    found = []
    for one, pace in zip(parts, paces([one.compute_s for one in parts], plan), strict=True):
        waited_s = median(other.exposed_comm_s for other in parts if other.rank != one.rank) - one.exposed_comm_s
        if pace.is_slow and waited_s > WAITED * one.step_s:
            rows = _rows_slow(summary, one.rank, plan)
            host = summary.run.hosts[one.rank]
            found.append(Straggler(one.rank, pace.slower, one.compute_s, waited_s, rows, host, not pace.peers))
    return found


def _rows_slow(summary: Summary, rank: int, plan: Plan) -> float:
    """The share of the rows of ranks.csv, after the warm-up, in which a rank is slow."""
    slow = []
    kept = [row for row in summary.run.ranks if row["step"] - row["steps"] >= summary.warmup]
    for _, rows in groupby(kept or summary.run.ranks, key=itemgetter("step")):
        compute_s = [row["forward_s"] + row["backward_s"] for row in rows]
        if len(compute_s) == plan.mesh.world_size:
            slow.append(paces(compute_s, plan)[rank].is_slow)
    return sum(slow) / len(slow) if slow else math.nan


def answers(summaries: Sequence[Summary]) -> list[KeyQuestion]:
    """What a reader wants to know of runs first."""
    return [
        KeyQuestion("How fast is it?", few(list(fast(summaries)), "run")),
        KeyQuestion("What limits it?", few(list(limits(summaries)), "run")),
        KeyQuestion("What is odd?", few(list(odd(summaries))) or [("", "Nothing that this report looks for.")]),
    ]


def few(sentences: list[Said], noun: str = "remark") -> list[Said]:
    """The first MOST sentences, and how many more there are. What is said of several is said once."""
    about: dict[str, list[str]] = {}
    for name, sentence in sentences:
        about.setdefault(sentence, []).append(name)
    sentences = [(_listed(names), sentence) for sentence, names in about.items()]
    more = len(sentences) - MOST
    return (
        sentences if more <= 0 else [*sentences[:MOST], ("", f"And {counted(more, noun)} more: see the tables below.")]
    )


def _listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def fast(summaries: Sequence[Summary]) -> Iterator[Said]:
    """How fast the runs are, the fastest first."""
    known = [one for one in summaries if one.step_s is not None]
    for one in sorted(known, key=lambda one: -_number(one.rate("tokens_per_s"))):
        assert one.step_s is not None
        speed = f"{of_number(one.rate('tokens_per_s'))} tokens/s"
        low, high = of_seconds(one.step_s.low), of_seconds(one.step_s.high)
        interval = "" if math.isnan(one.step_s.low) else f" (95 %: {low} to {high})"
        step = f"a step takes {of_seconds(one.step_s.value)}{interval}"
        yield one.name, f"{speed} on {counted(one.run.num_ranks, 'rank')}; {step}{_use_said(one)}."
    if lost := [one.name for one in summaries if one.step_s is None]:
        yield "", f"No step was measured: {', '.join(lost)}."


def _use_said(one: Summary) -> str:
    """The share of the measured peak, with what other programs used meanwhile; "": neither is known."""
    busy = one.run.busy_at_peak
    others = f"other programs used {busy[0]:.1f} of {counted(busy[1], 'core')}" if busy else ""
    if math.isfinite(use := one.rate("mfu")):
        return f", {of_share(use)} of the measured peak{f' ({others} then)' if others else ''}"
    return f"; mfu is not known, because {others} when the peak was measured" if others else ""


def _number(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def limits(summaries: Sequence[Summary]) -> Iterator[Said]:
    """Which part of the step limits each run, and then what helps."""
    found: dict[str, str] = {}
    for one in summaries:
        if slow := [rank for rank in stragglers(one) if rank.steady]:
            worst = max(slow, key=lambda rank: rank.waited_s)
            yield one.name, f"rank {worst.rank} is slow, and the others wait for it."
        elif one.shares and one.compute_share >= COMPUTES:
            found["computing"] = "only faster or more devices help"
            yield one.name, f"computing, {of_share(one.compute_share)} of a step."
        elif one.shares:
            part = max(REMEDIES, key=lambda name: one.shares[name])
            found[PART_WORDS[part]] = REMEDIES[part]
            share, computing = of_share(one.shares[part]), of_share(one.compute_share)
            yield one.name, f"{PART_WORDS[part]}, {share} of a step; computing has {computing}."
        elif one.steps:
            yield one.name, "unknown, because the run has no ranks.csv (an older version wrote it, or it ended early)."
    for name, remedy in found.items():
        yield "", f"Against {name}: {remedy}."


def odd(summaries: Sequence[Summary]) -> Iterator[Said]:
    """What a reader should look at, the gravest first."""
    for one in summaries:
        yield from _ending(one)
    for one in summaries:
        yield from ((one.name, _slow_said(slow)) for slow in stragglers(one))
    for one in summaries:
        yield from _crowded(one)
        yield from _events(one)
        if one.varies > UNEVEN:
            yield (
                one.name,
                f"steps vary: the slowest tenth takes {of_share(one.varies)} longer than the median, or more.",
            )
        yield from _memory(one)
    yield from outpaced(summaries)
    yield from _trajectories(summaries)


def _ending(one: Summary) -> Iterator[Said]:
    state, steps = one.run.state, counted(one.steps, "step")
    if state is State.UNFINISHED:
        yield one.name, f"has not ended: it still trains, or was killed. Its {steps} so far are used."
    elif state is State.STOPPED:
        yield one.name, f"was stopped after {steps}, which are used."
    elif state is State.FAILED:
        yield one.name, f"failed after {steps}: {one.run.why}"


def _slow_said(slow: Straggler) -> str:
    than = "than its share of the plan's FLOPs" if slow.planned else "than the other ranks of its part"
    where = f" on {slow.host}" if slow.host else ""
    often = "" if slow.steady else f" It is so in {of_share(slow.rows)} of the rows: other programs may be the cause."
    return (
        f"rank {slow.rank}{where} computes {of_share(slow.slower)} longer {than}; the others wait "
        f"{of_seconds(slow.waited_s)} a step longer than it.{often}"
    )


def _crowded(one: Summary) -> Iterator[Said]:
    """Whether ranks on CPUs share cores: their times are then those of a crowded machine."""
    if one.run.crowd is not None:
        threads, cores = one.run.crowd
        yield one.name, f"{counted(threads, 'thread')} share {counted(cores, 'core')}, so its times say little."


def _events(one: Summary) -> Iterator[Said]:
    """What the run has recorded of itself."""
    kinds = [str(event.get("kind")) for event in one.run.events]
    if number := len(one.curves.skipped):
        yield one.name, f"the loss of {counted(number, 'step')} was not finite."
    if number := kinds.count("resume"):
        yield one.name, f"was resumed {counted(number, 'time')}; times of several machines may be mixed."
    if number := one.run.profiled:
        yield one.name, f"the profiler recorded {counted(number, 'step')}, which makes them longer; they count."
    if "slow_steps" in kinds:
        said = next(event for event in reversed(one.run.events) if event.get("kind") == "slow_steps")
        yield one.name, f"{said.get('advice', 'steps have become slow')}"
    if one.rate("mfu") > 1:
        yield one.name, "it is faster than the peak that was measured: other programs ran during that measurement."


def _memory(one: Summary) -> Iterator[Said]:
    found = one.memory_bytes
    if len(found) > 1 and max(found) > 1.25 * median(found):
        rank = found.index(max(found))
        yield (
            one.name,
            f"rank {rank} holds {of_share(max(found) / median(found) - 1)} more memory than the median rank.",
        )


def _trajectories(summaries: Sequence[Summary]) -> Iterator[Said]:
    """Whether runs of one trajectory have the same losses."""
    groups: dict[str, list[Summary]] = {}
    for one in summaries:
        if one.run.plan is not None and one.steps:
            groups.setdefault(repr(sorted(one.run.plan.trajectory().items())), []).append(one)
    for first, *others in groups.values():
        for other in others:
            apart = _apart(first, other)
            if apart > 0.01:
                said = f"should have the losses of {first.name}, and differs by up to {of_share(apart)} of the loss."
                yield other.name, f"{said} Rounding grows at high learning rates; more than that is a fault."


def _apart(one: Summary, other: Summary) -> float:
    """The largest relative difference of the training losses of common steps."""
    _, mine, theirs = np.intersect1d(one.run.columns["step"], other.run.columns["step"], return_indices=True)
    losses = one.run.columns["train_loss"][mine], other.run.columns["train_loss"][theirs]
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(losses[0] - losses[1]) / np.abs(losses[0])
    finite = relative[np.isfinite(relative)]
    return float(finite.max()) if len(finite) else 0.0
