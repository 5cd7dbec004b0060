"""In: a plan with replicas. Out: a sum in each step beside an average each H steps, as timelines, and what each sends
(Stich 2019, "Local SGD"; Douillard et al. 2023, "DiLoCo").
Does not simulate (at_work.py asks the walk of the ranks)."""

from __future__ import annotations

from codescent.base.amounts import of_bytes, of_share
from codescent.explain.at_work import MOST_RANKS, AtWork, at_work, why_not_at_work
from codescent.explain.content import Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.topic import TWO_REPLICAS, LessonInput, Topic, replicas
from codescent.explain.topics import server
from codescent.plan import Plan

PERIODS = (0, 2, 5, 10)
"""0: gradients are summed in each step."""
QUIET = {"train.eval_every": 0, "checkpoint.every": 0}
"""What is due at the end of a round alone, and would exclude periods."""


def lesson(asked: LessonInput) -> Lesson:
    """A timeline for each period, then what it sends."""
    say = asked.say
    shown = []
    for period in PERIODS:
        plan = asked.other({**QUIET, "parallel.average_every": period})
        shown.append((period, plan, at_work(plan, say, float(max(2, period)))))
    return Lesson(
        topic="average",
        title=say("Averages: agree less often"),
        about=say("Each replica trains alone for some steps. Then all take the average of their weights."),
        config=asked.config_line,
        frames=[*(_frame(period, work, say) for period, _, work in shown), _table(shown, say)],
        see=(
            ("codescent docs local_sgd", say("outer optimizers, fragments, and what it costs in losses")),
            ("codescent explain gossip", say("averages with neighbours alone")),
        ),
    )


def _frame(period: int, work: AtWork, say: Language) -> LessonFrame:
    if not period:
        title = say("Gradients are summed in each step")
        says = (say("All replicas have the same weights, always: the losses are those of one process."),)
    else:
        title = say("Weights are averaged each {number} steps", number=period)
        says = (say("Between two averages the replicas' weights drift apart. The losses depend on the period."),)
    return LessonFrame(title, says, (work.lanes,), work.more)


def _table(shown: list[tuple[int, Plan, AtWork]], say: Language) -> LessonFrame:
    rows = []
    for period, plan, work in shown:
        steps = max(1, period)
        sent = sum(plan.sent_bytes(0, number) for number in range(steps)) / steps
        rows.append((str(period or "-"), of_bytes(sent), of_share(work.walk.computes)))
    heads = (say("steps from one average to the next"), say("sent a step"), say("time that computes"))
    return LessonFrame(say("Side by side"), (), (TextTable(heads, rows, numbers=(0, 1, 2)),))


def lacks(plan: Plan) -> str:
    """There have to be replicas."""
    return "it needs replicas that average, and this config has one" if plan.mesh.dp_replicate < 2 else ""


def refuses(plan: Plan) -> str:
    """They exchange gradients or weights in rounds, and are not too many to be drawn."""
    if plan.layout.gossip != "none":
        return "replicas of this config gossip; leave out parallel.gossip"
    return server.why_not_without(plan) or why_not_at_work(plan)


TOPIC = Topic(
    about="replicas that average each some steps, beside sums in each step",
    example=replicas(most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=TWO_REPLICAS,
    refuses=refuses,
)
