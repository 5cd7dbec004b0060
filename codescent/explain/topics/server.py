"""In: a plan with a parameter server. Out: synchronous, bounded and asynchronous updates as timelines: who waits for
whom, what the server applies, and how old the weights of each gradient are (Li et al. 2014; Ho et al. 2013, "SSP").
Does not simulate (at_work.py asks the walk of the ranks)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from codescent.base.errors import UserError
from codescent.explain.at_work import AtWork, at_work, why_not_at_work
from codescent.explain.content import Arrow, Bar, Lesson, LessonFrame, RankLanes, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.plan import Plan, Scalar

SLOW = 2.0
"""Rank 1 computes so many times as long: the others wait for it, or do not."""
STEPS = 3.0
APPLY = 0.06
"""Width of the mark of a version, in steps of arithmetic."""
MOST_RANKS, MOST_SERVERS = 16, 4
"""More have no room beside each other, and their messages take long to simulate."""


@dataclass(frozen=True)
class _Way:
    """A way to update: the values of keys, and its words."""

    values: Mapping[str, Scalar]
    title: str
    says: Sequence[str]


def lesson(asked: LessonInput) -> Lesson:
    """A timeline for each way, then what it costs."""
    say = asked.say
    shown: list[tuple[_Way, Plan, AtWork]] = []
    for way in _ways(say):
        try:
            plan = asked.other(way.values)
        except UserError:  # this config has other keys that exclude it
            continue
        shown.append((way, plan, at_work(plan, say, STEPS, slow=_slow(plan), arrows=True)))
    return Lesson(
        topic="server",
        title=say("A parameter server: who waits for whom"),
        about=say("Workers send gradients to a server. It updates the weights, and sends them back."),
        config=asked.config_line,
        frames=[*(_frame(way, plan, work, say) for way, plan, work in shown), _table(shown, say)],
        see=(
            ("codescent docs parameter_server", say("all keys, and what each costs")),
            ("codescent prove CONFIG --replay RUN", say("apply again what an asynchronous run has applied")),
        ),
    )


def _slow(plan: Plan) -> dict[int, float]:
    """Rank 1, if it is a worker."""
    return {1: SLOW} if 1 in plan.mesh else {}


def _ways(say: Language) -> tuple[_Way, ...]:
    return (
        _Way(
            {"parallel.updates": "synchronous"},
            say("Synchronous: the server waits for all"),
            (
                say("A version is the sum of one gradient of each worker. All workers get the same weights."),
                say("It is the update of one process. But all wait for the slowest worker."),
            ),
        ),
        _Way(
            {"parallel.updates": "asynchronous", "parallel.staleness": 1},
            say("Bounded staleness: no gradient is too old"),
            (
                say("An update adds as many gradients as a step has samples, whoever sends them."),
                say("A gradient whose weights are older than the bound is not used. Here the bound is one update."),
            ),
        ),
        _Way(
            {"parallel.updates": "asynchronous"},
            say("Asynchronous: nobody waits for another worker"),
            (say("Each gradient is applied when it comes, to weights that others have changed meanwhile."),),
        ),
    )


def _frame(way: _Way, plan: Plan, work: AtWork, say: Language) -> LessonFrame:
    lanes = _with_versions(plan, work, say)
    slow = [say("Rank 1 computes {times} times as long as the others.", times=f"{SLOW:g}") for _ in _slow(plan)]
    link = say("A link needs half of a step's arithmetic to send all gradients, or all weights, once.")
    marks = say("v1, v2: versions of the weights. On an arrow to the server: the version of the gradient's weights.")
    return LessonFrame(way.title, (*way.says, *slow, link), (lanes,), (marks,))


def _with_versions(plan: Plan, work: AtWork, say: Language) -> RankLanes:
    """The lanes, with the versions that each server makes, and the versions on the arrows."""
    lanes = work.lanes
    made = _made(plan, lanes.arrows)
    bars = [
        Bar(server, at, at + APPLY, Tone.SERVER, f"v{number}")
        for server, moments in made.items()
        for number, at in enumerate(moments, 1)
        if at <= lanes.end
    ]
    has: dict[tuple[int, int], int] = {}
    arrows: list[Arrow] = []
    for arrow in sorted(lanes.arrows, key=lambda one: (one.sent, one.receiver not in made)):
        if arrow.receiver in made:
            number = has.get((arrow.sender, arrow.receiver), 0)
        else:
            number = bisect_right(made[arrow.sender], arrow.sent + 1e-9)
            has[arrow.receiver, arrow.sender] = number
        arrows.append(replace(arrow, text=f"v{number}"))
    legend = [*lanes.legend, (Tone.SERVER, say("applies a gradient, or the sum of all"))]
    return replace(lanes, bars=[*lanes.bars, *bars], arrows=arrows, legend=legend)


def _made(plan: Plan, arrows: Sequence[Arrow]) -> dict[int, list[float]]:
    """By server: when it makes each version."""
    is_one_by_one = plan.layout.updates == "asynchronous" and plan.layout.staleness is None
    together = 1 if is_one_by_one else plan.mesh.world_size
    pushes: dict[int, list[float]] = {rank: [] for rank in plan.servers}
    for arrow in sorted(arrows, key=lambda arrow: arrow.received):
        if arrow.receiver in pushes:
            pushes[arrow.receiver].append(arrow.received)
    return {server: moments[together - 1 :: together] for server, moments in pushes.items()}


def _table(shown: Sequence[tuple[_Way, Plan, AtWork]], say: Language) -> LessonFrame:
    rows = []
    for way, _, work in shown:
        ranks = [rank for rank in work.walk.ranks if rank.step_s]
        waits = [rank.waits_s / rank.step_s for rank in ranks]
        ages = work.walk.staleness or (0,)
        rows.append((
            way.title.partition(":")[0],
            f"{100 * min(waits):.0f} - {100 * max(waits):.0f} %",
            f"{sum(ages) / len(ages):.2f}",
            str(max(ages)),
        ))  # fmt: skip
    heads = (say("way"), say("ranks wait"), say("mean age"), say("largest age"))
    return LessonFrame(
        say("Side by side"),
        (say("Age: by how many versions the weights of a gradient are older than those that it changes."),),
        (TextTable(heads, rows, numbers=(1, 2, 3)),),
    )


def lacks(plan: Plan) -> str:
    """There has to be a server."""
    return "" if _has_servers(plan) else "this config has no server"


def refuses(plan: Plan) -> str:
    """Its ranks are not too many to be drawn."""
    if plan.world_size > MOST_RANKS or len(plan.servers) > MOST_SERVERS:
        return (
            f"{plan.world_size:,} ranks with {len(plan.servers):,} servers cannot be drawn; give at most {MOST_RANKS} "
            f"ranks, of which at most parallel.servers={MOST_SERVERS} serve"
        )
    return why_not_at_work(plan)


def why_not_without(plan: Plan) -> str:
    """Why a topic that is about ranks of the mesh alone has nothing to show; "": there are no others."""
    return "ranks of this config meet at servers; leave out parallel.servers" if _has_servers(plan) else ""


def _has_servers(plan: Plan) -> bool:
    return plan.world_size > plan.mesh.world_size


def _words(ranks: int) -> tuple[str, ...]:
    """One of them serves. There are two workers at least: one of them is slow."""
    layout = f"parallel.ranks={ranks}", f"parallel.dp_replicate={ranks - 1}", "parallel.servers=1"
    return example(*layout, batch=multiple(6, ranks - 1))


TOPIC = Topic(
    about="synchronous, bounded and asynchronous updates: who waits, what is applied, how old it is",
    example=Example(_words, least=3, most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=tuple({"parallel.ranks": ranks, "parallel.servers": 1} for ranks in (4, 3, 2)),
    refuses=refuses,
)
