"""In: a plan with pipeline stages. Out: one step of each schedule as a timeline of stages, with its bubble.
Does not simulate (cost/simulate.py does): each schedule is planned and simulated like that of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codescent.base.amounts import of_share, three_digits
from codescent.base.errors import UserError
from codescent.cost.lengths import lengths
from codescent.cost.simulate import Simulation, Span, simulate
from codescent.explain.content import Bar, Lesson, LessonFrame, RankLanes, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.plan import Plan, Scalar, Verb

MOST_MICROBATCHES, MOST_STAGES = 16, 64
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
TONES = {
    Verb.FORWARD: Tone.FORWARD,
    Verb.BACKWARD: Tone.BACKWARD,
    Verb.BACKWARD_INPUT: Tone.BACKWARD,
    Verb.BACKWARD_WEIGHT: Tone.GRADIENTS,
    Verb.REDUCE: Tone.MESSAGE,
    Verb.STEP: Tone.OPTIMIZER,
}


def lesson(asked: LessonInput) -> Lesson:
    """A frame for each schedule that the config admits, then their bubbles side by side."""
    say = asked.say
    left_out: dict[str, str] = {}
    drawn = [(name, plan, _simulated(plan)) for name, plan in _plans(asked, left_out)]
    if not drawn:
        why = [f"explain pipeline: this config does not admit {name}: {reason}" for name, reason in left_out.items()]
        raise UserError(*why)
    return Lesson(
        topic="pipeline",
        title=say("Pipelines: stages that wait less"),
        about=say("Each rank has some layers. Micro-batches go through them, forward and then backward."),
        config=asked.config_line,
        frames=[
            *(_schedule(name, plan, found, say) for name, plan, found in drawn),
            _table(drawn, left_out, asked.plan, say),
        ],
        see=(
            ("codescent plan CONFIG --timeline FILE.svg", say("a picture of the step, also with real times")),
            ("codescent docs schedules", say("all schedules, with their papers")),
        ),
    )


def _plans(asked: LessonInput, left_out: dict[str, str]) -> Iterator[tuple[str, Plan]]:
    """The plan of each schedule. `left_out` gets the reason of one that the config does not admit."""
    for name in SCHEDULES:
        virtual = 2 if name == "interleaved" else 1
        values = {**_fewer(asked.plan), "parallel.schedule": name, "parallel.virtual_stages": virtual}
        try:
            yield name, asked.other(values)
        except UserError as error:
            left_out[name] = error.problems[0]


def _fewer(plan: Plan) -> dict[str, Scalar]:
    """A batch of so few micro-batches that they can be drawn; nothing if it has no more."""
    work = plan.work
    if work.num_microbatches <= MOST_MICROBATCHES:
        return {}
    return {"train.global_batch_size": plan.mesh.dp * work.microbatch_size * MOST_MICROBATCHES}


def _simulated(plan: Plan) -> Simulation:
    given = lengths(plan)
    return simulate(plan.schedule, given.costs, waits=given.waits)


def _schedule(name: str, plan: Plan, found: Simulation, say: Language) -> LessonFrame:
    why = {
        "naive": say("One micro-batch at a time: one stage computes, and all others wait."),
        "gpipe": say("All micro-batches go forward, then all go backward (Huang et al. 2019)."),
        "1f1b": say("A stage goes backward as soon as it can: one forward, one backward (Narayanan et al. 2019)."),
        "interleaved": say("Each stage has two chunks of layers, so that it begins earlier (Narayanan et al. 2021)."),
        "zero-bubble": say("Gradients of weights fill the time in which a stage would wait (Qi et al. 2023)."),
    }[name]
    lanes = RankLanes(
        lanes=[say("stage {number}", number=stage) for stage in range(plan.mesh.pp)],
        bars=[_bar(span) for span in found.timeline if span.end_s - span.waits_s > span.start_s],
        unit=say("forward passes of a stage"),
        legend=_legend(found, say),
    )
    waits = say(
        "The step takes {length} units; {share} of them are the bubble, in which stages wait for each other.",
        length=three_digits(found.makespan_s),
        share=of_share(found.bubble_of_total),
    )
    held = ", ".join(str(stage.peak_live) for stage in found.stages)
    keeps = say("Stages keep at most {counts} micro-batches for backward.", counts=held)
    return LessonFrame(name, (why,), (lanes,), (say("Numbers are micro-batches."), waits, keeps))


def _bar(span: Span) -> Bar:
    what = span.instruction
    text = "" if what.microbatch is None else str(what.microbatch)
    return Bar(span.stage, span.start_s, span.end_s - span.waits_s, TONES.get(what.verb, Tone.OTHER), text)


def _legend(found: Simulation, say: Language) -> list[tuple[Tone, str]]:
    names = {
        Tone.FORWARD: say("forward"),
        Tone.BACKWARD: say("backward"),
        Tone.GRADIENTS: say("gradients of weights"),
        Tone.MESSAGE: say("sums of gradients"),
    }
    there = {_bar(span).tone for span in found.timeline if span.end_s - span.waits_s > span.start_s}
    return [(tone, name) for tone, name in names.items() if tone in there]


def _table(
    drawn: list[tuple[str, Plan, Simulation]], left_out: Mapping[str, str], given: Plan, say: Language
) -> LessonFrame:
    rows = []
    for name, _, found in drawn:
        most = max(stage.peak_live for stage in found.stages)
        rows.append((name, three_digits(found.makespan_s), of_share(found.bubble_of_total), str(most)))
    plan = drawn[0][1]
    stages, count = plan.mesh.pp, plan.work.num_microbatches
    own = given.work.num_microbatches
    fewer = [say("The config has {number} micro-batches; the pictures have fewer.", number=own)] if own > count else []
    heads = (say("schedule"), say("units"), say("bubble"), say("micro-batches kept"))
    return LessonFrame(
        say("Side by side"),
        (),
        (TextTable(heads, rows, numbers=(1, 2, 3)),),
        (
            say(
                "If all p = {p} stages were alike, gpipe and 1f1b would have this bubble: "
                "(p - 1) / (m + p - 1) = {share}.",
                p=stages,
                share=of_share((stages - 1) / (count + stages - 1)),
            ),
            say(
                "There are m = {m} micro-batches. Stages are not quite alike: one has the head. "
                "All wait for the slowest.",
                m=count,
            ),
            *fewer,
            *(say("{name} is not drawn: {why}", name=name, why=why) for name, why in left_out.items()),
            say("More micro-batches make it smaller. gpipe keeps all of them, 1f1b at most p."),
        ),
    )


def lacks(plan: Plan) -> str:
    """There have to be stages."""
    return "" if plan.mesh.pp > 1 else "this config has one stage"


def refuses(plan: Plan) -> str:
    """They are not too many to be drawn."""
    pp = plan.mesh.pp
    return f"{pp:,} stages cannot be drawn; give at most parallel.pp={MOST_STAGES}" if pp > MOST_STAGES else ""


def _words(ranks: int) -> tuple[str, ...]:
    """Two layers of a stage at least, which the interleaved schedule needs."""
    layout = "train.microbatch_size=1", f"parallel.ranks={ranks}", f"parallel.pp={ranks}"
    return example(*layout, layers=multiple(8, 2 * ranks), length=128, batch=multiple(8, ranks))


TOPIC = Topic(
    about="one step of each schedule of a pipeline, with its bubble",
    example=Example(_words, least=2, most=MOST_MICROBATCHES),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 2, "parallel.pp": 2},),
    refuses=refuses,
)
