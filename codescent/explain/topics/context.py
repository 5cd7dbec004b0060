"""In: a plan with cp. Out: which positions of a sequence a rank has, and whose keys it sees at each hop
(Liu et al. 2023, "Ring Attention"; Llama team 2024, section 3.3.2).
Does not divide a sequence (strategies/causal_tiles.py does): its rule is drawn."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.amounts import of_bytes
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.purposes import joined, purpose
from codescent.explain.topic import Example, LessonInput, Topic, example
from codescent.plan import Plan

MOST_RANKS = 8


def lesson(asked: LessonInput) -> Lesson:
    """The parts, who sees whom, the hops, the bytes."""
    say, plan = asked.say, asked.plan
    return Lesson(
        topic="context",
        title=say("Context parallelism: each rank has a part of each sequence"),
        about=say("Attention needs the keys and values of all positions. So they go round, or are gathered."),
        config=asked.config_line,
        frames=[_parts(plan, say), _pairs(plan, say), *_hops(plan, say), _bytes(plan, say)],
        see=(
            ("codescent docs context", say("ring and all-gather, and which is faster")),
            ("codescent explain tensor", say("parts of each matrix instead")),
        ),
    )


def parts_of(plan: Plan, index: int) -> tuple[int, int]:
    """The two parts of the sequence, of 2 cp, that a rank has: an early and a late one."""
    return index, 2 * plan.mesh.cp - 1 - index


def _is_balanced(plan: Plan) -> bool:
    return plan.model.causal_layers > 0


def _own(plan: Plan, index: int) -> set[int]:
    return {*parts_of(plan, index)} if _is_balanced(plan) else {2 * index, 2 * index + 1}


def _parts(plan: Plan, say: Language) -> LessonFrame:
    degree = plan.mesh.cp
    size = plan.work.positions(-1) // (2 * degree)
    rows = []
    for index in range(degree):
        own = _own(plan, index)
        cells = [GridCell(str(part) if part in own else "", Tone.ACTIVATIONS if part in own else Tone.NOTHING)
                 for part in range(2 * degree)]  # fmt: skip
        rows.append((say("rank {number}", number=index), cells))
    why = say("A late position sees more keys than an early one. So each rank has an early and a late part.")
    whole = say("All positions see all keys. So each rank has neighbouring parts.")
    return LessonFrame(
        say("The parts of a sequence"),
        (say("{parts} parts of {size} positions.", parts=2 * degree, size=f"{size:,}"),),
        (Grid([str(part) for part in range(2 * degree)], rows, say("part")),),
        (why if _is_balanced(plan) else whole,),
    )


def _pairs(plan: Plan, say: Language) -> LessonFrame:
    degree, rows = plan.mesh.cp, []
    for index in range(degree):
        cells = []
        for source in range(degree):
            pairs = sum(
                1.0 if key < query or not _is_balanced(plan) else 0.5 if key == query else 0.0
                for query in _own(plan, index) for key in _own(plan, source)
            )  # fmt: skip
            cells.append(GridCell(f"{pairs:g}", Tone.FORWARD))
        total = sum(float(cell.text) for cell in cells)
        rows.append((say("rank {number}", number=index), [*cells, GridCell(f"{total:g}", Tone.OTHER)]))
    heads = [*(say("of {number}", number=source) for source in range(degree)), say("all")]
    return LessonFrame(
        say("Work of each rank"),
        (say("Pairs of parts that a rank computes, with the keys of each rank. A part with itself is half a pair."),),
        (Grid(heads, rows, say("queries")),),
        (say("All ranks have the same sum."),),
    )


def _hops(plan: Plan, say: Language) -> Iterator[LessonFrame]:
    degree = plan.mesh.cp
    if plan.layout.context != "ring":
        yield LessonFrame(
            say("One gather"),
            (say("All keys and values are gathered before attention, and summed back after backward."),),
        )
        return
    for hop in range(degree):
        rows = []
        for index in range(degree):
            has = (index - hop) % degree
            cells = [
                GridCell("K V", Tone.WEIGHTS, is_new=True) if source == has else GridCell() for source in range(degree)
            ]
            rows.append((say("rank {number}", number=index), cells))
        sends = say("Meanwhile it sends them to the next rank.") if hop < degree - 1 else say("Now all have seen all.")
        yield LessonFrame(
            say("Hop {number} of {hops}", number=hop, hops=degree - 1),
            (say("Each rank computes with the keys and values of one rank."), sends),
            (Grid([say("of {number}", number=source) for source in range(degree)], rows),),
        )


def _bytes(plan: Plan, say: Language) -> LessonFrame:
    records = joined(record for record in plan.traffic if record.axis == "cp")
    rows = []
    for record in records:
        hidden = say("computing") if record.during is not None else say("nothing")
        sent = of_bytes(record.wire_bytes(plan.mesh.cp) * record.times)
        rows.append((purpose(record, say), record.collective.value, record.verb.value, str(record.times), sent, hidden))
    heads = (say("what"), say("collective"), say("in"), say("times"), say("a rank sends"), say("hidden by"))
    return LessonFrame(say("What the ranks send in a step"), (), (TextTable(heads, rows, numbers=(3, 4)),))


def lacks(plan: Plan) -> str:
    """There have to be ranks that share a sequence."""
    return "this config divides no sequence" if plan.mesh.cp < 2 else ""


def refuses(plan: Plan) -> str:
    """They are not too many to be drawn."""
    if plan.mesh.cp > MOST_RANKS:
        return f"cp={plan.mesh.cp} cannot be drawn; give at most parallel.cp={MOST_RANKS}"
    return ""


def _words(ranks: int) -> tuple[str, ...]:
    return example(f"parallel.ranks={ranks}", f"parallel.cp={ranks}", layers=2, length=64 * ranks, batch=4)


TOPIC = Topic(
    about="which positions a rank has, and whose keys and values it sees at each hop",
    example=Example(_words, least=2, most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 2, "parallel.cp": 2},),
    refuses=refuses,
)
