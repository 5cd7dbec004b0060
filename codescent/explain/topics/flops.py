"""In: a plan. Out: the formulas for the FLOPs of a step that papers and programs use, side by side, with its sizes.
Does not know the formulas (cost/flop_formulas.py does), does not count operators and does not measure."""

from __future__ import annotations

from codescent.base.amounts import of_share, three_digits
from codescent.cost.flop_formulas import FormulaSizes, executed_flops, formulas, sizes_of
from codescent.explain.content import Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, gpt2, multiple
from codescent.plan import Plan

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def lesson(asked: LessonInput) -> Lesson:
    """Sizes, formulas, and what is executed."""
    plan, say = asked.plan, asked.say
    sizes = sizes_of(plan)
    return Lesson(
        topic="flops",
        title=say("How many FLOPs has a step?"),
        about=say("Each formula counts something else. Here they all have the sizes of this config."),
        config=asked.config_line,
        frames=(_sizes(sizes, say), _formulas(sizes, say), _executed(plan, sizes, say)),
        see=(
            ("codescent plan CONFIG --operators", say("each operator with its FLOPs and bytes")),
            ("codescent explain pram", say("the cost of each operator in letters")),
        ),
    )


def _sizes(sizes: FormulaSizes, say: Language) -> LessonFrame:
    rows = (
        ("N", f"{sizes.n:,}", say("parameters, without an embedding that is only looked up")),
        ("L", f"{sizes.layers:,}", say("layers")),
        ("C", f"{sizes.channels:,}", say("channels of all heads together")),
        ("T", f"{sizes.positions:,}", say("positions of a sample")),
        ("B", f"{sizes.samples:,}", say("samples of a step, of all ranks together")),
    )
    return LessonFrame(
        say("The sizes"),
        figures=(TextTable((say("letter"), say("size"), say("what it is")), rows, numbers=(1,)),),
        after=(say("A FLOP is one addition or one multiplication of floating-point numbers."),),
    )


def _formulas(sizes: FormulaSizes, say: Language) -> LessonFrame:
    rows = []
    for formula in formulas(sizes):
        what = say("forward") if formula.is_forward else say("forward and backward")
        step = formula.flops * sizes.tokens
        rows.append((formula.name, what, amount(formula.flops), amount(step), formula.source))
    heads = (say("a token"), say("of"), say("FLOPs a token"), say("FLOPs a step"), say("used by"))
    return LessonFrame(
        say("The formulas"),
        (
            say("A product with a matrix needs 2 FLOPs for each of its numbers: one to multiply, one to add."),
            say("Backward needs twice as much: gradients of the inputs, and gradients of the weights."),
        ),
        (TextTable(heads, rows, numbers=(2, 3)),),
        (
            say("6NBT is 6N times the B T tokens of a step."),
            say("Attention compares each pair of positions: 2CT FLOPs for scores, 2CT for sums, in each layer."),
            say("2LCT and 6LCT count half of the pairs: a causal mask hides the others. 12LCT counts them all."),
        ),
    )


def _executed(plan: Plan, sizes: FormulaSizes, say: Language) -> LessonFrame:
    executed = executed_flops(plan)
    flops = plan.flops()
    rows = [
        (say("executed"), amount(executed), of_share(1.0)),
        ("6N + 12LCT", amount(flops.total_flops), of_share(flops.total_flops / executed)),
        ("6NBT", amount(flops.dense_flops), of_share(flops.dense_flops / executed)),
    ]
    if flops.recomputed_flops:
        rows.append((say("computed again (recompute)"), amount(flops.recomputed_flops),
                     of_share(flops.recomputed_flops / executed)))  # fmt: skip
    return LessonFrame(
        say("What is executed"),
        (say("All operators of all ranks, counted one by one: norms, activations and softmax, too."),),
        (TextTable((say("count"), say("FLOPs a step"), say("of executed")), rows, numbers=(1, 2)),),
        (say("Speeds in FLOP/s, and MFU, use 6N + 12LCT, as papers do. So they compare with other programs."),),
    )


def amount(flops: float) -> str:
    """Such as "1.23 GFLOP"."""
    for power in range(len(PREFIXES) - 1, 0, -1):
        if flops >= 1000.0**power:
            return f"{three_digits(flops / 1000.0**power)} {PREFIXES[power]}FLOP"
    return f"{three_digits(flops)} FLOP"


def refuses(plan: Plan) -> str:
    """The formulas are of one sequence."""
    if plan.work.streams:
        return "the formulas are of one sequence, and this model has a source and a target; take a gpt2 or llama model"
    return ""


def _words(ranks: int) -> tuple[str, ...]:
    return gpt2(f"parallel.ranks={ranks}", batch=multiple(4, ranks))


TOPIC = Topic(
    about="the formulas for the FLOPs of a step, side by side, and what is executed",
    example=Example(_words, ranks=1),
    lesson=lesson,
    refuses=refuses,
)
