"""In: a plan with replicas. Out: what each form of parallel.wire sends, what it loses, and what error feedback is
(Seide et al. 2014, 1-bit SGD; Alistarh et al. 2017, QSGD; Vogels et al. 2019, PowerSGD; Stich et al. 2018).
Does not encode: the bytes are those of plans; the numbers of the example are rounded here, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.amounts import of_bytes, of_share
from codescent.base.errors import UserError
from codescent.explain.at_work import MOST_RANKS, AtWork, at_work, why_not_at_work
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import TWO_REPLICAS, LessonInput, Topic, replicas
from codescent.plan import Plan

FORMS = ("none", "bf16", "int8", "int4", "sign", "topk:0.01", "powersgd:4")
EXAMPLE = (0.81, -0.12, 0.05, -0.64, 0.33, -0.02, 0.27, -0.09)
KEPT = 2
STEPS = 1.0


def lesson(asked: LessonInput) -> Lesson:
    """The forms, an example with error feedback, timelines."""
    say = asked.say
    shown: list[tuple[str, Plan, AtWork]] = []
    for form in FORMS:
        try:
            plan = asked.other({"parallel.wire": form})
        except UserError:
            continue
        shown.append((form, plan, at_work(plan, say, STEPS)))
    return Lesson(
        topic="compression",
        title=say("Compression: send less of each gradient"),
        about=say("What a sum has not delivered is kept, and added to the next gradient."),
        config=asked.config_line,
        frames=[_forms(shown, say), *_feedback(say), *_timelines(shown, say)],
        see=(
            ("codescent docs wire", say("all forms, and what they cost in losses and time")),
            ("codescent plan CONFIG --link 49mbit,0.2ms", say("the time of a step on your own network")),
        ),
    )


def _forms(shown: Sequence[tuple[str, Plan, AtWork]], say: Language) -> LessonFrame:
    what = {
        "none": say("each number in the format of the gradients"),
        "bf16": say("16 bits a number"),
        "int8": say("8 bits a number, and a scale for each block"),
        "int4": say("4 bits a number, and a scale for each block"),
        "sign": say("one bit a number, and a mean size for each block"),
        "topk:0.01": say("the largest 1 %, each with its place"),
        "powersgd:4": say("a matrix as a product of two thin ones, of rank 4"),
    }
    most = shown[0][1].sent_bytes(0, 10)
    rows = []
    for form, plan, work in shown:
        sent = plan.sent_bytes(0, 10)
        rows.append(
            (form, what[form], of_bytes(sent), of_share(sent / most if most else 1.0), of_share(work.walk.computes))
        )
    heads = (
        "parallel.wire",
        say("what is sent"),
        say("a rank sends in a step"),
        say("of none"),
        say("time that computes"),
    )
    return LessonFrame(
        say("The forms"),
        (say("The link needs half of a step's arithmetic to send all gradients once, as they are."),),
        (TextTable(heads, rows, numbers=(2, 3, 4)),),
        (say("computes: the share of the time in which the busiest rank computes."),),
    )


def _feedback(say: Language) -> list[LessonFrame]:
    """The example: the largest two of eight numbers are sent; the rest waits, and grows."""
    rest = [0.0] * len(EXAMPLE)
    frames = []
    for step in (1, 2):
        wanted = [gradient + left for gradient, left in zip(EXAMPLE, rest, strict=True)]
        largest = sorted(range(len(wanted)), key=lambda index: -abs(wanted[index]))[:KEPT]
        sent = [value if index in largest else 0.0 for index, value in enumerate(wanted)]
        left = [value - given for value, given in zip(wanted, sent, strict=True)]
        rows = [
            (say("gradient"), [GridCell(f"{value:.2f}", Tone.GRADIENTS) for value in EXAMPLE]),
            (say("left from before"), _cells(rest, Tone.OTHER)),
            (say("together"), [GridCell(f"{value:.2f}", Tone.ACTIVATIONS) for value in wanted]),
            (say("sent"), _cells(sent, Tone.MESSAGE)),
            (say("left"), _cells(left, Tone.OTHER)),
        ]
        frames.append(
            LessonFrame(
                say("Error feedback, step {number}", number=step),
                (say("An example of eight numbers. The two largest are sent; what is left waits."),),
                (Grid([str(index) for index in range(len(EXAMPLE))], rows),),
            )
        )
        rest = left
    return frames


def _cells(values: Sequence[float], tone: Tone) -> list[GridCell]:
    """Cells of numbers; of none for 0. What is sent is marked."""
    return [
        GridCell(f"{value:.2f}", tone, tone is Tone.MESSAGE) if value else GridCell("", Tone.NOTHING)
        for value in values
    ]


def _timelines(shown: Sequence[tuple[str, Plan, AtWork]], say: Language) -> list[LessonFrame]:
    picked = [one for one in shown if one[0] in ("none", "int8", "topk:0.01")]
    return [LessonFrame(say("A step with {form}", form=form), (), (work.lanes,), work.more) for form, _, work in picked]


def lacks(plan: Plan) -> str:
    """There have to be ranks that sum gradients."""
    return "it compresses what replicas send, and this config has one" if plan.mesh.dp_replicate < 2 else ""


TOPIC = Topic(
    about="what each form of parallel.wire sends and loses, and error feedback",
    example=replicas(most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=TWO_REPLICAS,
    refuses=why_not_at_work,
)
