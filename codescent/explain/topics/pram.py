"""In: a plan. Out: each operator of forward, backward and update with its cost term, its reductions and its PRAM class,
and what resolves its conflicts here: a kernel, or a collective of the plan (JaJa 1992, "Introduction to Parallel
Algorithms", chapter 1). Does not count FLOPs (cost/operators.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from codescent.cost.letters import size_of
from codescent.cost.operators import ATTENTION, PRODUCT, Computed, operators_of_depth
from codescent.explain.content import Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, gpt2, multiple
from codescent.plan import Mesh, Plan, Verb
from codescent.plan.activations import CPU
from codescent.plan.traffic import Collective

EREW, CREW, CRCW = "EREW", "CREW", "CRCW sum"
SUMMING = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE, Collective.PUSH)


@dataclass(frozen=True)
class Rule:
    """How processors of a PRAM share the memory of an operator, one processor for each element of its result.

    Attributes:
        forward, backward: the class. EREW: no two read or write the same place. CREW: several read a place. CRCW sum:
            several write a place, which gets the sum.
        reads: over what forward sums or looks for a maximum; "": nothing.
        sums: over what backward sums; "": nothing.
        solves: a key of `_solutions`: what resolves the conflict here.
    """

    forward: str
    backward: str
    reads: str
    sums: str
    solves: str


def rule_of(plan: Plan, one: Computed, depth: int) -> Rule:
    """The rule of an operator, by its kind and by what it is."""
    name = one.name
    if one.kind == PRODUCT:
        return Rule(CREW, CRCW, _inner(one, plan), "B*T", "product")
    if one.kind == ATTENTION:
        return Rule(CREW, CREW, "HS" if "scores" in name else "T", "T", "attention")
    if "softmax" in name or "loss" in name:
        return Rule(CREW, CREW, "V" if "loss" in name else "T", "V" if "loss" in name else "T", "row")
    if "error" in name:
        return Rule(EREW, EREW, "B*T*C", "", "tree")
    if "norm" in name:
        return Rule(CREW, CRCW, "C", "B*T", "norm")
    if depth == 0:
        return Rule(CREW, CRCW, "", "B" if "position" in name else "B*T", "rows")
    return Rule(EREW, EREW, "", "", "none")


def _inner(one: Computed, plan: Plan) -> str:
    multiple, rest = divmod(one.sizes[1], plan.model.hidden_dim)
    return f"{one.sizes[1]:,}" if rest else f"{'' if multiple == 1 else multiple}C"


def lesson(asked: LessonInput) -> Lesson:
    """The classes, the operators, then the update with its collectives."""
    say = asked.say
    return Lesson(
        topic="pram",
        title=say("PRAM: which operators read or write the same memory"),
        about=say("A PRAM has as many processors as one wants, and one memory. The class says who may meet in it."),
        config=asked.config_line,
        frames=(_classes(say), *_operators(asked.plan, say), _update(asked.plan, say)),
        see=(
            ("codescent plan CONFIG --operators", say("FLOPs and bytes of each operator")),
            ("codescent explain flops", say("the formulas for FLOPs")),
        ),
    )


def _classes(say: Language) -> LessonFrame:
    rows = (
        (EREW, say("exclusive read, exclusive write"), say("one processor reads and writes a place: an activation")),
        (CREW, say("concurrent read, exclusive write"), say("many read a place, one writes: the weights of a product")),
        (CRCW, say("concurrent read, concurrent write"), say("many add to one place: a gradient, over all tokens")),
    )  # fmt: skip
    return LessonFrame(
        say("The classes"),
        figures=(TextTable((say("class"), say("it stands for"), say("an example")), rows),),
        after=(
            say("A sum of n numbers takes n - 1 additions. On n / 2 processors a tree needs log2(n) steps."),
            say("No machine has CRCW memory. A kernel or a collective takes its place: it sums in some order."),
        ),
    )


def _operators(plan: Plan, say: Language) -> Iterator[LessonFrame]:
    depths = ((0, say("Embedding")), (1, say("A block")), (plan.model.num_layers + 1, say("Head and loss")))
    whole = replace(plan, mesh=Mesh())
    for depth, title in depths:
        rows: list[Sequence[str]] = []
        used: dict[str, str] = {}
        for one in operators_of_depth(whole, depth, CPU):
            rule = rule_of(plan, one, depth)
            short, long = _solutions(say)[rule.solves]
            rows.append((one.name, size_of(whole, one), rule.forward, rule.reads, rule.backward, rule.sums, short))
            used |= {short: long} if short else {}
        if rows:
            heads = (say("operator"), say("cost"), say("forward"), say("sums over"), say("backward"), say("sums over"),
                     say("resolved by"))  # fmt: skip
            letters = [_letters(plan, say)] if depth == 0 else []
            yield LessonFrame(
                title, (), (TextTable(heads, rows),), [*(f"{name}: {what}." for name, what in used.items()), *letters]
            )


def _letters(plan: Plan, say: Language) -> str:
    model = plan.model
    return say(
        "B: samples. T = {positions}: positions. C = {channels}: channels. NH = {heads}: heads. "
        "HS = {size}: channels of a head. V = {vocabulary}: tokens of the vocabulary.",
        positions=f"{plan.work.positions(-1):,}",
        channels=f"{model.hidden_dim:,}",
        heads=model.num_heads,
        size=model.head_dim,
        vocabulary=f"{model.vocab_size:,}",
    )


def _solutions(say: Language) -> dict[str, tuple[str, str]]:
    """What resolves the conflicts of an operator: its name, and what it is."""
    return {
        "product": (say("tiles"), say("a core sums its own block of the result")),
        "attention": (say("flash"), say("one kernel, tile by tile, with running maxima and sums")),
        "row": (say("rows"), say("a core has a whole row: it looks for the maximum, then sums")),
        "tree": (say("tree"), say("each core sums its part, then the cores' sums are added")),
        "norm": (say("rows, tree"), say("a core has whole rows; sums of weights' gradients are added over cores")),
        "rows": (say("in order"), say("rows of the matrix that several tokens read are added one after the other")),
        "none": ("", ""),
    }


def _update(plan: Plan, say: Language) -> LessonFrame:
    sums = [
        record
        for record in plan.traffic
        if record.collective in SUMMING and record.verb in (Verb.REDUCE, Verb.BACKWARD)
    ]
    rows = [
        (say("gradients of a micro-batch"), CRCW, say("B*T: tokens"), say("the kernels above")),
        (
            say("gradients of several micro-batches"),
            EREW,
            say("micro-batches, one after the other"),
            say("an addition"),
        ),
    ]
    for collective in dict.fromkeys(f"{record.collective.value} ({record.axis})" for record in sums):
        rows.append((say("gradients of several ranks"), CRCW, say("ranks"), collective))
    rows += [
        (say("norm of the gradients"), CRCW, say("all parameters"), say("a sum in each rank, then over ranks")),
        (
            say("update by {optimizer}", optimizer=str(plan.update.get("kind", "adam"))),
            EREW,
            "",
            say("nothing to resolve"),
        ),
    ]
    heads = (say("what"), say("class"), say("sums over"), say("resolved by"))
    return LessonFrame(say("Gradients and update"), (), (TextTable(heads, rows),))


def _words(ranks: int) -> tuple[str, ...]:
    return gpt2(f"parallel.ranks={ranks}", f"parallel.dp_replicate={ranks}", batch=multiple(8, ranks))


TOPIC = Topic(
    about="each operator with its cost, its sums, its PRAM class, and what resolves its conflicts",
    example=Example(_words, ranks=2),
    lesson=lesson,
)
