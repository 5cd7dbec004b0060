"""In: a number of ranks. Out: what real ranks hold after each message of a ring all-reduce (Patarasuk and Yuan 2009).
Does not compute what a rank should hold: collectives/holdings.py decodes what came through the process group."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from codescent.base.amounts import of_bytes
from codescent.base.errors import RunFailed
from codescent.base.output import note
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import LessonInput, Topic, replicas
from codescent.plan import Plan

MOST = 8
TIMEOUT_S = 60


def lesson(asked: LessonInput) -> Lesson:
    """Each moment of real ranks, then what the ring costs."""
    say, ranks = asked.say, asked.plan.mesh.dp
    moments = _moments(ranks)
    return Lesson(
        topic="ring",
        title=say("A ring all-reduce, message by message"),
        about=say("{ranks} real ranks have summed an array. This is what each held after each message.", ranks=ranks),
        config=asked.config_line,
        frames=[*(_frame(moment, ranks, say) for moment in moments), _cost(asked.plan, ranks, say)],
        see=(
            ("codescent collectives", say("which collectives each backend offers here, and their times")),
            ("codescent collectives --explain", say("the same in short")),
        ),
    )


def _moments(ranks: int) -> list[dict[str, Any]]:
    """Of real ranks. Raises RunFailed: they cannot all-reduce."""
    from codescent.collectives import survey
    from codescent.collectives.holdings import moments

    note(f"{ranks} ranks start here: each loads torch, which takes some seconds")
    try:
        return moments(survey.Survey(ranks, TIMEOUT_S).explain())
    except survey.RanksEnded as ended:
        raise RunFailed("explain ring: its ranks have ended: see above") from ended


def _frame(moment: Mapping[str, Any], ranks: int, say: Language) -> LessonFrame:
    holds, messages = moment["holds"], moment["messages"]
    rows = []
    for rank in range(ranks):
        received = messages[rank]["received"] if messages else None
        cells = []
        for chunk, text in enumerate(holds[rank]):
            shares = text.count("+") + 1
            tone = Tone.GRADIENTS if shares == ranks else Tone.ACTIVATIONS if shares > 1 else Tone.OTHER
            cells.append(GridCell(text, tone, chunk == received))
        rows.append((say("rank {number}", number=ascii_lowercase[rank]), cells))
    heads = [say("chunk {number}", number=chunk) for chunk in range(ranks)]
    legend = [
        (Tone.OTHER, say("of one rank")),
        (Tone.ACTIVATIONS, say("a sum of some ranks")),
        (Tone.GRADIENTS, say("the whole sum")),
    ]
    grid = Grid(heads, rows, "", legend)
    if not messages:
        says = say("Each rank has an array of {ranks} chunks. a0 is chunk 0 of rank a.", ranks=ranks)
        return LessonFrame(say("At first"), (says,), (grid,))
    sent = ", ".join(
        f"{ascii_lowercase[rank]}{at['sent']} -> {ascii_lowercase[at['to']]}" for rank, at in enumerate(messages)
    )
    title = say("{phase}, step {step} of {steps}", phase=moment["phase"], step=moment["step"], steps=ranks - 1)
    return LessonFrame(title, (say("Sent at the same time: {sent}.", sent=sent),), (grid,))


def _cost(plan: Plan, ranks: int, say: Language) -> LessonFrame:
    size = sum(tensor.gradients_bytes(plan.mesh, 0) for tensor in plan.trained)
    each = 2 * (ranks - 1) / ranks
    rows = [
        (say("ring"), f"2 (n - 1) = {2 * (ranks - 1)}", of_bytes(size * each), of_bytes(size * each)),
        (say("all to one, and back"), "2", of_bytes(size), of_bytes(size * (ranks - 1))),
    ]
    heads = (say("way"), say("messages in turn"), say("a rank sends"), say("the busiest rank receives"))
    return LessonFrame(
        say("What it costs for the gradients of this config"),
        (say("The gradients have {size}. n = {ranks} ranks.", size=of_bytes(size), ranks=ranks),),
        (TextTable(heads, rows, numbers=(1, 2, 3)),),
        (say("With more ranks, a rank of a ring sends hardly more. In the other way one rank receives all."),),
    )


def lacks(plan: Plan) -> str:
    """A ring has two ranks or more."""
    return "it needs ranks that sum gradients, and this config has one" if plan.mesh.dp < 2 else ""


def refuses(plan: Plan) -> str:
    """More than eight do not fit in 80 columns."""
    if plan.mesh.dp > MOST:
        return f"{plan.mesh.dp} ranks do not fit beside each other; give --ranks {MOST}, or less"
    return ""


TOPIC = Topic(
    about="a ring all-reduce on real ranks, message by message",
    example=replicas(most=MOST),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 4}, {"parallel.ranks": 2}),
    refuses=refuses,
)
