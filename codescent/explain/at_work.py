"""In: a plan. Out: what its ranks do in a few steps, as lanes: they compute, send, wait and serve.
Does not simulate (cost/ranks_walk.py does). Time is in steps of arithmetic: no machine is meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.cost.coding import Coding
from codescent.cost.doing import SERVES, OrderedSpans, Window, parts_without
from codescent.cost.simulate import SimulatedMessage
from codescent.cost.walked import Walk
from codescent.explain.content import Arrow, Bar, RankLanes, Tone
from codescent.explain.language import Language
from codescent.plan import Plan, Verb
from codescent.planner.links import Links

SENDS_IN = 0.5
"""The link of a rank takes this share of a step's arithmetic to send all gradients once."""
PAUSE = 0.1
"""Messages that follow each other sooner are one arrow."""
LATENCY = 0.002
"""Of a message, in steps of arithmetic."""
MOST_RANKS, MOST_MICROBATCHES = 256, 256
"""More ranks, or more micro-batches of a rank, would take minutes."""
MOST_LANES = 16
"""Ranks that are drawn; the others are alike."""
TONES = {
    Verb.LOAD: Tone.OTHER,
    Verb.FORWARD: Tone.FORWARD,
    Verb.BACKWARD: Tone.BACKWARD,
    Verb.BACKWARD_INPUT: Tone.BACKWARD,
    Verb.BACKWARD_WEIGHT: Tone.GRADIENTS,
    Verb.REDUCE: Tone.MESSAGE,
    Verb.STEP: Tone.OPTIMIZER,
    Verb.AVERAGE: Tone.MESSAGE,
    Verb.MERGE: Tone.OPTIMIZER,
    Verb.EXCHANGE: Tone.MESSAGE,
    Verb.PUSH: Tone.MESSAGE,
    Verb.PULL: Tone.ACTIVATIONS,
    Verb.SERVE: Tone.SERVER,
}


@dataclass(frozen=True)
class AtWork:
    """What the ranks did.

    Attributes:
        walk: with times in steps of arithmetic.
        lanes: the same, to be drawn, of at most MOST_LANES ranks.
        more: a sentence on the ranks that are not drawn; none, if all are.
    """

    walk: Walk
    lanes: RankLanes
    more: tuple[str, ...] = ()


def why_not_at_work(plan: Plan) -> str:
    """Why a plan has too much to be simulated here; "": it has not."""
    if plan.world_size > MOST_RANKS:
        return f"{plan.world_size:,} ranks cannot be drawn; give at most {MOST_RANKS}"
    return why_not_so_many(plan.work.num_microbatches, plan.mesh.dp, plan.work.microbatch_size)


def why_not_so_many(parts: int, ranks: int, size: int) -> str:
    """Why a step has too many micro-batches. `parts`: of each of the data-parallel ranks; `size`: samples of one."""
    if parts <= MOST_MICROBATCHES:
        return ""
    most = ranks * size * MOST_MICROBATCHES
    return f"{parts:,} micro-batches cannot be drawn; give at most train.global_batch_size={most}"


def at_work(
    plan: Plan,
    say: Language,
    steps: float,
    *,
    slow: Mapping[int, float] | None = None,
    arrows: bool = False,
    computes: float = 1.0,
    sends_in: float = SENDS_IN,
) -> AtWork:
    """The first steps of the steady rounds of a plan.

    Args:
        plan: of several ranks.
        say: of the legend.
        steps: how many are drawn.
        slow: by rank: how many times longer its arithmetic takes.
        arrows: whether messages are drawn.
        computes: the arithmetic of a step of a rank.
        sends_in: the time in which a link sends all gradients once.
    """
    gradients_bytes = sum(tensor.gradients_bytes(plan.mesh, 0) for tensor in plan.trained)
    cluster = of_links(Link(gradients_bytes / sends_in, LATENCY))
    links = Links(cluster, None, computes, None, slow or {})
    walk = links.walk(plan, Coding(), timeline=True)
    more = plan.world_size - MOST_LANES
    alike = (say.many("{number} more rank is like these.", "{number} more ranks are like these.", more),)
    return AtWork(walk, _lanes(plan, walk, say, steps * walk.step_s, arrows=arrows), alike if more > 0 else ())


def _lanes(plan: Plan, walk: Walk, say: Language, end: float, *, arrows: bool) -> RankLanes:
    shown_time, ranks = Window(0.0, end), range(min(plan.world_size, MOST_LANES))
    drawn = [at for at in walk.activities if at.stage in ranks and at.doing not in SERVES]
    waits = shown_time.cut(drawn)
    bars = []
    of_rank = {rank: OrderedSpans(at for at in waits if at.stage == rank) for rank in ranks}
    for span in shown_time.cut(span for span in walk.timeline if span.stage in ranks):
        tone = TONES.get(span.instruction.verb, Tone.OTHER)
        own = of_rank[span.stage].during(span)
        bars += [Bar(span.stage, begin, ends, tone) for begin, ends in parts_without(span, own)]
    bars += [Bar(at.stage, at.start_s, at.end_s, Tone.WAITING) for at in waits]
    inside = plan.mesh.world_size  # behind them come those that only serve
    names = [say("rank {number}", number=rank) if rank < inside
             else say("server {number} (rank {rank})", number=rank - inside, rank=rank) for rank in ranks]  # fmt: skip
    flights = [at for at in walk.flights if at.start_s <= end + PAUSE] if arrows else []
    shown = [arrow for arrow in joined(flights) if arrow.received <= end]
    there = {bar.tone for bar in bars}
    legend = [(tone, name) for tone, name in _names(say).items() if tone in there]
    return RankLanes(names, bars, say("steps of arithmetic"), shown, legend)


def joined(flights: Iterable[SimulatedMessage]) -> list[Arrow]:
    """Messages between two ranks that follow each other without a pause, as one arrow each."""
    found: dict[tuple[int, int], list[Arrow]] = {}
    for at in sorted(flights, key=lambda at: at.start_s):
        if at.end_s <= at.start_s:
            continue
        of_pair = found.setdefault((at.stage, at.peer), [])
        if of_pair and at.start_s <= of_pair[-1].received + PAUSE:
            of_pair[-1] = replace(of_pair[-1], received=max(of_pair[-1].received, at.end_s))
        else:
            of_pair.append(Arrow(at.stage, at.start_s, at.peer, at.end_s))
    return sorted((arrow for of_pair in found.values() for arrow in of_pair), key=lambda arrow: arrow.sent)


def _names(say: Language) -> dict[Tone, str]:
    return {
        Tone.FORWARD: say("forward"),
        Tone.BACKWARD: say("backward"),
        Tone.MESSAGE: say("sends and receives"),
        Tone.ACTIVATIONS: say("fetches weights"),
        Tone.SERVER: say("serves"),
        Tone.OPTIMIZER: say("updates"),
        Tone.WAITING: say("waits"),
    }
