"""In: a plan. Out: its mesh: which ranks talk to which along each axis, and what they send.
Does not decide a layout (build does): it draws the groups of the plan's traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_bytes
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, Node, NodeLink, NodeNetwork, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.explain.two_devices import two_devices
from codescent.plan import AXES, Mesh, Plan

MOST_RANKS = 32
MOST_WIDE, MOST_DEEP, MOST_NAMED = 8, 8, 8
"""Of the picture of groups: ranks beside each other; ranks below each other; ranks that have a name, not a number."""


def lesson(asked: LessonInput) -> Lesson:
    """The coordinates of the ranks, a frame for each axis, then its bytes."""
    say, plan = asked.say, asked.plan
    axes = [axis for axis in AXES if plan.mesh.degree(axis) > 1]
    return Lesson(
        topic="hybrid",
        title=say("Hybrid layouts: each rank has a place on each axis"),
        about=say("Ranks that differ on one axis alone are a group. They talk to each other."),
        config=asked.config_line,
        frames=[_places(plan, axes, say), *_groups(plan, axes, say), _bytes(plan, axes, say), *two_devices(plan, say)],
        see=(
            ("codescent plan CONFIG --search", say("the fastest layouts of a config")),
            ("codescent docs which", say("which layout is right for which machine")),
            ("codescent docs two_devices", say("a module of your own on two devices of each rank")),
        ),
    )


def _does(say: Language) -> dict[str, str]:
    return {
        "pp": say("stages: each has some layers; activations go from one to the next"),
        "dp_replicate": say("copies of the model, with other samples; they sum gradients"),
        "dp_shard": say("other samples, and each holds a part of the model (ZeRO)"),
        "ep": say("other samples, and each has some experts of every layer"),
        "cp": say("parts of each sequence; keys and values go round"),
        "tp": say("parts of each matrix; activations are summed in each layer"),
    }


def _places(plan: Plan, axes: list[str], say: Language) -> LessonFrame:
    rows = []
    for axis in axes:
        cells = [GridCell(str(plan.mesh.coordinates(rank)[axis]), Tone.OTHER) for rank in range(plan.mesh.world_size)]
        rows.append((axis, cells))
    heads = [str(rank) for rank in range(plan.mesh.world_size)]
    what = [f"{axis}: {_does(say)[axis]}." for axis in axes]
    return LessonFrame(
        say("The places"),
        (say("Neighbouring ranks differ on the last axis: they are on one machine, where links are fast."),),
        (Grid(heads, rows, say("rank")),),
        what,
    )


def _groups(plan: Plan, axes: list[str], say: Language) -> Iterator[LessonFrame]:
    mesh = plan.mesh
    for axis in axes:
        groups = sorted({tuple(_group(mesh, rank, axis)) for rank in range(mesh.world_size)})
        shown = "; ".join(",".join(map(str, group)) for group in groups)
        yield LessonFrame(
            say("Groups of {axis}", axis=axis),
            (f"{axis}: {_does(say)[axis]}.", say("Each line joins the ranks of a group.")),
            (_network(groups, say),),
            (say("Groups: {groups}.", groups=shown),),
        )


def _group(mesh: Mesh, rank: int, axis: str) -> list[int]:
    place = mesh.coordinates(rank)
    return [mesh.rank_at({**place, axis: index}) for index in range(mesh.degree(axis))]


def _network(groups: Sequence[Sequence[int]], say: Language) -> NodeNetwork:
    """Groups below and beside each other; ranks of a group in a row, and back in the next one if it is long."""
    degree = len(groups[0])
    wide, deep = min(degree, MOST_WIDE), -(-degree // MOST_WIDE)
    below = max(1, MOST_DEEP // deep)
    columns, rows = -(-len(groups) // below) * (wide + 1) - 1, min(len(groups), below) * deep
    names = len(groups) * degree <= MOST_NAMED
    nodes: dict[int, Node] = {}
    links = []
    for number, group in enumerate(groups):
        for index, rank in enumerate(group):
            down, right = divmod(index, wide)
            x = number // below * (wide + 1) + (wide - 1 - right if down % 2 else right)
            y = number % below * deep + down
            name = say("rank {number}", number=rank) if names else str(rank)
            nodes[rank] = Node(name, x / max(1, columns - 1), y / max(1, rows - 1), Tone.WEIGHTS)
        links += [NodeLink(first, second, is_new=True) for first, second in zip(group, group[1:], strict=False)]
    return NodeNetwork([nodes[rank] for rank in sorted(nodes)], links)


def _bytes(plan: Plan, axes: list[str], say: Language) -> LessonFrame:
    rows = []
    for axis in axes:
        records = [one for one in plan.traffic if axis in one.axis.partition("[")[0].split("*")]
        size = sum(one.wire_bytes(plan.mesh.degree(one.axis)) * one.times / one.every for one in records)
        calls = ", ".join(dict.fromkeys(one.collective.value for one in records))
        rows.append((axis, str(plan.mesh.degree(axis)), calls, of_bytes(size)))
    heads = (say("axis"), say("ranks"), say("collectives"), say("a rank sends in a step"))
    return LessonFrame(
        say("What goes along each axis"),
        (),
        (TextTable(heads, rows, numbers=(1, 3)),),
        (say("The axis that sends most belongs on the fastest links: tp inside of a machine."),),
    )


def lacks(plan: Plan) -> str:
    """There have to be several ranks."""
    return "this config has one rank" if plan.mesh.world_size < 2 else ""


def refuses(plan: Plan) -> str:
    """They are not too many to be drawn."""
    if plan.mesh.world_size > MOST_RANKS:
        return f"{plan.mesh.world_size:,} ranks cannot be drawn; give at most {MOST_RANKS}"
    return ""


def _words(ranks: int) -> tuple[str, ...]:
    """Two parts of matrices, two stages, and replicas; an odd number of ranks are replicas alone."""
    tp = 1 if ranks % 2 else 2
    pp = 1 if ranks % 4 else 2
    copies = ranks // (tp * pp)
    layout = f"parallel.ranks={ranks}", f"parallel.pp={pp}", f"parallel.dp_replicate={copies}", f"parallel.tp={tp}"
    return example(*layout, batch=multiple(8, pp * copies))


TOPIC = Topic(
    about="the mesh: who talks to whom along each axis, and what they send",
    example=Example(_words, ranks=8, least=2, most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 8, "parallel.pp": 2, "parallel.tp": 2}, {"parallel.ranks": 2}),
    refuses=refuses,
)
