"""In: a plan with replicas. Out: who has which samples, when gradients are summed, and what overlaps with backward
(Li et al. 2020, "PyTorch Distributed").
Does not simulate (at_work.py asks the walk of the ranks)."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.amounts import of_bytes, of_share
from codescent.explain.at_work import MOST_RANKS as MOST_AT_WORK
from codescent.explain.at_work import at_work, why_not_at_work
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.purposes import purpose
from codescent.explain.topic import TWO_REPLICAS, LessonInput, Topic, replicas
from codescent.plan import Plan, Verb

MOST_RANKS, MOST_SAMPLES, MOST_BUCKETS = 8, 12, 8


def lesson(asked: LessonInput) -> Lesson:
    """Samples, a step, its buckets, then the rules of rates."""
    say, plan = asked.say, asked.plan
    return Lesson(
        topic="data-parallel",
        title=say("Data parallelism: one model, many samples"),
        about=say("Each rank has the same weights and other samples. The ranks average their gradients."),
        config=asked.config_line,
        frames=(_samples(plan, say), _step(plan, say), _buckets(plan, say), _rates(plan, say)),
        see=(
            ("codescent explain ring", say("how an all-reduce sums, message by message")),
            ("codescent explain zero", say("how ranks share what they would all hold")),
            ("codescent prove CONFIG --ranks 1,2", say("the losses are those of one process")),
        ),
    )


def _samples(plan: Plan, say: Language) -> LessonFrame:
    rows = []
    batch = plan.work.global_batch_size
    shown = range(min(batch, MOST_SAMPLES))
    for rank in range(min(plan.mesh.world_size, MOST_RANKS)):
        own = {sample for part in range(plan.work.num_microbatches) for sample in plan.samples(rank, part)}
        cells = [GridCell(str(sample) if sample in own else "", Tone.ACTIVATIONS if sample in own else Tone.NOTHING)
                 for sample in shown]  # fmt: skip
        rows.append((say("rank {number}", number=rank), cells))
    more = () if batch <= MOST_SAMPLES else (say("The batch has {number} samples.", number=f"{batch:,}"),)
    return LessonFrame(
        say("Who has which samples"),
        (say("The samples of a step, by their number. Each rank has others, and each sample belongs to one rank."),),
        (Grid(["" for _ in shown], rows, ""),),
        (
            *more,
            say("Which samples a step takes does not depend on the number of ranks. So the losses do not, either."),
        ),
    )


def _step(plan: Plan, say: Language) -> LessonFrame:
    work = at_work(plan, say, 1.0)
    return LessonFrame(
        say("A step"),
        (
            say("Forward and backward need no other rank. Then the sums are needed, and all wait for them."),
            say("Here the link needs half of a step's arithmetic to send all gradients once."),
        ),
        (work.lanes,),
        (*work.more, say("The ranks compute {share} of the time.", share=of_share(work.walk.computes))),
    )


def _buckets(plan: Plan, say: Language) -> LessonFrame:
    records = [record for record in plan.traffic if record.verb in (Verb.REDUCE, Verb.BACKWARD)]
    rows: list[Sequence[str]] = []
    for number, record in enumerate(records[:MOST_BUCKETS]):
        overlaps = say("backward") if record.during is not None else say("nothing")
        sent = record.wire_bytes(plan.mesh.degree(record.axis)) * record.times
        rows.append((str(number), purpose(record, say), record.collective.value, of_bytes(sent), overlaps))
    heads = (say("number"), say("what"), say("collective"), say("a rank sends"), say("overlaps with"))
    more = len(records) - MOST_BUCKETS
    rest = [say.many("{number} more is like these.", "{number} more are like these.", more)] if more > 0 else []
    return LessonFrame(
        say("The buckets"),
        (say("Gradients are sent in buckets. A bucket goes as soon as backward has filled it."),),
        (TextTable(heads, rows, numbers=(0, 3)),),
        (*rest, say("A ring sends 2 (n - 1) / n of the bytes of a bucket, on n ranks.")),
    )


def _rates(plan: Plan, say: Language) -> LessonFrame:
    ranks = plan.mesh.dp
    rows = [
        ("none", say("the rate stays: the batch is the same, however many ranks share it"), "1"),
        ("sqrt", say("for a batch that grows with the ranks"), f"{ranks**0.5:.3g}"),
        ("linear", say("for a batch that grows with the ranks (Goyal et al. 2017)"), str(ranks)),
    ]
    heads = ("optimizer.scale_learning_rate", say("when"), say("factor on {number} ranks", number=ranks))
    return LessonFrame(
        say("The learning rate"),
        (say("train.global_batch_size is of all ranks together. More ranks do not change it."),),
        (TextTable(heads, rows, numbers=(2,)),),
    )


def lacks(plan: Plan) -> str:
    """There have to be replicas."""
    return "it needs copies of the model, and this config has one" if plan.mesh.dp_replicate < 2 else ""


TOPIC = Topic(
    about="samples of each rank, sums of gradients, buckets, learning rates",
    example=replicas("parallel.bucket_bytes=1048576", most=MOST_AT_WORK),
    lesson=lesson,
    lacks=lacks,
    gives=TWO_REPLICAS,
    refuses=why_not_at_work,
)
