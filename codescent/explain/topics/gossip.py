"""In: a plan with replicas. Out: who exchanges with whom in a round, the mixing matrix, how far replicas are apart
(Lian et al. 2017, "D-PSGD"; Assran et al. 2019, "Stochastic gradient push"; Boyd et al. 2006).
Does not draw the graphs' neighbours (strategies/gossip_graphs.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from codescent.base.amounts import three_digits
from codescent.explain.content import (
    Chart,
    ChartLine,
    Grid,
    GridCell,
    Lesson,
    LessonFrame,
    Node,
    NodeLink,
    NodeNetwork,
    Tone,
)
from codescent.explain.language import Language
from codescent.explain.topic import TWO_REPLICAS, LessonInput, Topic, replicas
from codescent.plan import Plan
from codescent.strategies.gossip_graphs import Graph

KINDS = ("ring", "pairs", "exponential", "complete")
ROUNDS = 12
DRAWN_ROUNDS = 3
LEAST = 1e-6
"""What is smaller is drawn as this."""
MOST = 16
"""Replicas that have room in a circle and in 80 columns."""


def lesson(asked: LessonInput) -> Lesson:
    """The rounds of the config's graph, its matrix, then all graphs side by side."""
    say, plan = asked.say, asked.plan
    kind = plan.layout.gossip if plan.layout.gossip != "none" else "ring"
    graph = Graph(kind, plan.mesh.dp_replicate, plan.seed)
    return Lesson(
        topic="gossip",
        title=say("Gossip: replicas average with their neighbours alone"),
        about=say("No all-reduce: each replica sends its weights to few others. In time, all have the mean."),
        config=asked.config_line,
        frames=[*_rounds(graph, say), _matrix(graph, say), _distances(plan.mesh.dp_replicate, plan.seed, say)],
        see=(
            ("codescent docs gossip", say("all graphs, synchronous and asynchronous")),
            ("codescent explain average", say("averages of all replicas, each some steps")),
        ),
    )


def _rounds(graph: Graph, say: Language) -> Iterator[LessonFrame]:
    changes = graph.kind not in ("ring", "complete")
    for number in range(DRAWN_ROUNDS if changes else 1):
        rows = graph.matrix(number)
        pairs = {tuple(sorted((index, other))) for index, row in enumerate(rows) for other in row if other != index}
        links = [NodeLink(first, second, is_new=True) for first, second in sorted(pairs)]
        nodes = _circle([say("replica {number}", number=index) for index in range(graph.replicas)])
        most = say.many(
            "A replica sends {number} message a round.",
            "A replica sends at most {number} messages a round.",
            graph.messages,
        )
        title = say("{kind}: round {number}", kind=graph.kind, number=number) if changes else graph.kind
        yield LessonFrame(title, (most,), (NodeNetwork(nodes, links),))


def _circle(names: Sequence[str]) -> list[Node]:
    turn = 2 * math.pi / len(names)
    return [
        Node(name, 0.5 + 0.5 * math.sin(index * turn), 0.5 - 0.5 * math.cos(index * turn), Tone.WEIGHTS)
        for index, name in enumerate(names)
    ]


def _matrix(graph: Graph, say: Language) -> LessonFrame:
    rows = []
    for index, row in enumerate(graph.matrix(0)):
        cells = []
        for other in range(graph.replicas):
            share = row.get(other, 0.0)
            tone = Tone.NOTHING if not share else Tone.WEIGHTS if other == index else Tone.MESSAGE
            cells.append(GridCell(three_digits(share) if share else "", tone))
        rows.append((str(index), cells))
    legend = [(Tone.WEIGHTS, say("its own weights")), (Tone.MESSAGE, say("weights of a neighbour"))]
    return LessonFrame(
        say("The mixing matrix"),
        (say("Row i: how much of each replica's weights is in the new weights of replica i."),),
        (Grid([str(index) for index in range(graph.replicas)], rows, say("replica"), legend),),
        (say("Each column sums to 1. So the mean of all replicas stays what it is."),),
    )


def distances(graph: Graph, rounds: int) -> list[float]:
    """How far replicas are apart before each round, if nobody trains. Replica 0 begins with 1, all others with 0.

    It is the root of the summed squares of what they differ from the mean, over that of round 0.
    """
    values = [1.0] + [0.0] * (graph.replicas - 1)
    mean = sum(values) / len(values)
    found = []
    for number in range(rounds + 1):
        found.append(math.sqrt(sum((value - mean) ** 2 for value in values)))
        values = [sum(share * values[other] for other, share in row.items()) for row in graph.matrix(number)]
    return [one / found[0] for one in found]


def _distances(replicas: int, seed: int, say: Language) -> LessonFrame:
    lines = []
    for kind in KINDS:
        points = enumerate(distances(Graph(kind, replicas, seed), ROUNDS))
        lines.append(ChartLine(kind, [(float(number), max(one, LEAST)) for number, one in points]))
    return LessonFrame(
        say("How fast replicas agree"),
        (say("Replica 0 has 1, all others 0, and nobody trains. The distance to the mean falls in each round."),),
        (Chart(lines, say("round"), say("distance to the mean"), is_log=True),),
        (
            say("complete is an all-reduce: one round. exponential needs log2 of the replicas, a ring more than that."),
            say("{least} stands for this and less.", least=f"{LEAST:g}"),
        ),
    )


def lacks(plan: Plan) -> str:
    """There have to be replicas."""
    return "it needs replicas that average, and this config has one" if plan.mesh.dp_replicate < 2 else ""


def refuses(plan: Plan) -> str:
    """They are not too many to be drawn."""
    if plan.mesh.dp_replicate > MOST:
        return f"{plan.mesh.dp_replicate} replicas cannot be drawn; give at most parallel.dp_replicate={MOST}"
    return ""


TOPIC = Topic(
    about="who exchanges with whom, the mixing matrix, and how fast replicas agree",
    example=replicas("parallel.gossip=ring", ranks=8, most=MOST, layers=2, heads=2, width=64),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 4, "parallel.dp_replicate": 4}, *TWO_REPLICAS),
    refuses=refuses,
)
