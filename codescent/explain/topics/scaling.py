"""In: a plan. Out: how its step gets faster with more ranks, by the simulated ranks, and the laws fitted to it
(Amdahl 1967; Gustafson 1988; Gunther 2007, the universal scalability law).
Does not fit (study/laws.py does) and does not measure: a study does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from codescent.base.amounts import of_share
from codescent.base.errors import UserError
from codescent.explain.at_work import at_work, why_not_so_many
from codescent.explain.content import Chart, ChartLine, Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.laws import law_meanings, law_name, law_says
from codescent.explain.of_study import lesson_of_study
from codescent.explain.topic import Example, LessonInput, Topic, example
from codescent.explain.topics import server
from codescent.plan import Plan
from codescent.study.laws import AMDAHL, GUSTAFSON, UNIVERSAL, fitted

RANKS = (1, 2, 4, 8, 16, 32)
SENDS_IN = 0.05
"""The link takes this share of the arithmetic of a step on one rank to send all gradients once."""


def lesson(asked: LessonInput) -> Lesson:
    """Strong scaling, weak scaling, the laws."""
    say = asked.say
    strong = _points(asked, grows=False)
    weak = _points(asked, grows=True)
    return Lesson(
        topic="scaling",
        title=say("How a run scales"),
        about=say("More ranks share a step, or do more in it. How much faster does it get, and why not more?"),
        config=asked.config_line,
        frames=(_table(strong, weak, say), _curves(strong, weak, say), _laws(strong, weak, say)),
        see=(
            ("codescent study STUDY.toml", say("measure your own config, and fit the laws to it")),
            ("codescent explain scaling study-runs/NAME", say("the same lesson, of a study that you have measured")),
            ("codescent docs study", say("what each law says, and when it can be trusted")),
        ),
    )


def _points(asked: LessonInput, *, grows: bool) -> list[tuple[int, float]]:
    """Ranks, and samples in a step's arithmetic of one rank; of the numbers that divide the batch."""
    batch = asked.plan.work.global_batch_size
    found = []
    for ranks in RANKS:
        samples = batch * ranks if grows else batch
        values = {"parallel.ranks": ranks, "parallel.dp_replicate": ranks, "train.global_batch_size": samples}
        try:
            plan = asked.other(values)
        except UserError:  # the batch has no equal shares for so many
            continue
        computes = 1.0 if grows else 1.0 / ranks
        step = 1.0 if ranks == 1 else at_work(plan, asked.say, 1.0, computes=computes, sends_in=SENDS_IN).walk.step_s
        found.append((ranks, (ranks if grows else 1.0) / step))
    return found


def _table(strong: Sequence[tuple[int, float]], weak: Sequence[tuple[int, float]], say: Language) -> LessonFrame:
    weak_of = dict(weak)
    rows = []
    for ranks, speed in strong:
        other = weak_of.get(ranks)
        of_weak = ("", "") if other is None else (f"{other:.2f}", of_share(other / ranks))
        rows.append((str(ranks), f"{speed:.2f}", of_share(speed / ranks), *of_weak))
    heads = (
        say("ranks"),
        say("speed-up, same batch"),
        say("efficiency"),
        say("speed-up, batch grows"),
        say("efficiency"),
    )
    return LessonFrame(
        say("Strong and weak scaling"),
        (
            say("Same batch: the ranks share the samples of a step (strong scaling)."),
            say("Batch grows: each rank keeps its samples (weak scaling)."),
            say("A link sends all gradients once in {share} of a step of one rank.", share=of_share(SENDS_IN)),
        ),
        (TextTable(heads, rows, numbers=range(5)),),
        (say("Efficiency is the speed-up divided by the ranks."),),
    )


def _curves(strong: Sequence[tuple[int, float]], weak: Sequence[tuple[int, float]], say: Language) -> LessonFrame:
    def line(name: str, points: Sequence[tuple[int, float]]) -> ChartLine:
        return ChartLine(name, [(float(ranks), speed) for ranks, speed in points])

    lines = [
        line(say("same batch"), strong),
        line(say("batch grows"), weak),
        line(say("ideal"), [(ranks, float(ranks)) for ranks, _ in strong]),
    ]
    return LessonFrame(say("The curves"), (), (Chart(lines, say("ranks"), say("speed-up")),))


def _laws(strong: Sequence[tuple[int, float]], weak: Sequence[tuple[int, float]], say: Language) -> LessonFrame:
    rows = []
    for law, points in ((AMDAHL, strong), (GUSTAFSON, weak), (UNIVERSAL, strong)):
        fit = fitted(law, [ranks for ranks, _ in points], [[speed] for _, speed in points])
        says = law_says(fit, say)
        rows.append((law_name(law.name, say), say("same batch") if points is strong else say("batch grows"), says))
    heads = (say("law"), say("fitted to"), say("what it says"))
    return LessonFrame(
        say("The laws"),
        law_meanings(say),
        (TextTable(heads, rows),),
    )


def refuses(plan: Plan) -> str:
    """The study of the lesson varies replicas."""
    if plan.mesh.world_size != plan.mesh.dp_replicate:
        return "it varies the number of replicas alone; leave out pp, tp, cp and dp_shard"
    return server.why_not_without(plan) or _why_not_so_many(plan)


def _why_not_so_many(plan: Plan) -> str:
    """In weak scaling each rank has the whole batch."""
    work = plan.work
    return why_not_so_many(-(-work.global_batch_size // work.microbatch_size), 1, work.microbatch_size)


def _words(ranks: int) -> tuple[str, ...]:
    """A batch that the numbers of the study divide, and the number that is asked for."""
    return example("train.eval_every=0", f"parallel.ranks={ranks}", batch=math.lcm(max(RANKS), ranks))


TOPIC = Topic(
    about="speed-up and efficiency with more ranks, and the laws of Amdahl, Gustafson and Gunther",
    example=Example(_words, ranks=1),
    lesson=lesson,
    refuses=refuses,
    of_study=lesson_of_study,
)
