"""In: a plan with tp. Out: which part of each matrix a rank has, and what the ranks sum in a block
(Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, sequence parallelism).
Does not divide a matrix (strategies/tensor.py does): the plan has each rank's box."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.amounts import of_bytes
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.purposes import joined, purpose
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.plan import Plan, Role, Scalar, TensorPlan

MOST_RANKS = 8
TWO_PARTS: dict[str, Scalar] = {"parallel.ranks": 2, "parallel.tp": 2}


def lesson(asked: LessonInput) -> Lesson:
    """The matrices of a block, the way of an activation, then the collectives."""
    say, plan = asked.say, asked.plan
    return Lesson(
        topic="tensor",
        title=say("Tensor parallelism: each rank has a part of each matrix"),
        about=say("The first matrix of a pair is cut by columns, the second by rows. Both need one sum."),
        config=asked.config_line,
        frames=(_parts(plan, say), _way(plan, say), _collectives(plan, say)),
        see=(
            ("codescent docs tensor", say("which heads and sizes can be divided")),
            ("codescent explain hybrid", say("tp beside other axes")),
        ),
    )


def _block(plan: Plan) -> list[TensorPlan]:
    return [tensor for tensor in plan.tensors if tensor.parameter.depths[0] == 1]


def _parts(plan: Plan, say: Language) -> LessonFrame:
    degree, rows = plan.mesh.tp, []
    for tensor in _block(plan):
        shape = tensor.parameter.shape
        cells = []
        for index in range(min(degree, MOST_RANKS)):
            box = tensor.weights.box(shape, plan.mesh, index)  # tp is the last axis
            cut = [dim for dim, (first, end) in enumerate(box) if end - first < shape[dim]]
            dim = cut[0] if cut else None
            tone = Tone.OTHER if dim is None else Tone.WEIGHTS if dim == 0 else Tone.ACTIVATIONS
            cells.append(GridCell(say("all") if dim is None else f"{box[dim][0]}:{box[dim][1]}", tone))
        name = tensor.parameter.name.partition(".")[2].partition(".")[2]
        rows.append((f"{name} {'x'.join(map(str, shape))}", cells))
    legend = [
        (Tone.WEIGHTS, say("a part of the outputs")),
        (Tone.ACTIVATIONS, say("a part of the inputs")),
        (Tone.OTHER, say("on all ranks")),
    ]
    heads = [say("rank {number}", number=index) for index in range(min(degree, MOST_RANKS))]
    return LessonFrame(
        say("Who has which part of a block"),
        (say("Outputs x inputs of each matrix of the first block, and the range that a rank has."),),
        (Grid(heads, rows, "", legend),),
        (say("Attention is cut by heads: a rank has {number} of {all}.",
             number=f"{plan.model.num_heads / degree:g}", all=plan.model.num_heads),),
    )  # fmt: skip


def _way(plan: Plan, say: Language) -> LessonFrame:
    roles = {tensor.parameter.role for tensor in _block(plan)}
    divided = plan.layout.sequence_parallel
    before = say("gather the positions of all ranks") if divided else say("nothing")
    after = say("sum, and each rank keeps its positions") if divided else say("sum over all ranks")
    back = say("the same in reverse") if divided else say("sum over all ranks")
    rows: list[Sequence[str]] = []
    if Role.COLUMN in roles:
        rows.append((say("first matrix, by columns"), say("all inputs, some outputs"), before, back))
        rows.append(
            (say("activation, or attention of its heads"), say("some channels"), say("nothing"), say("nothing"))
        )
    if Role.ROW in roles:
        rows.append((say("second matrix, by rows"), say("some inputs, all outputs"), after, say("nothing")))
    heads = (say("step"), say("what a rank computes"), say("sent in forward"), say("sent in backward"))
    return LessonFrame(say("The way through a pair of matrices"), (), (TextTable(heads, rows),))


def _collectives(plan: Plan, say: Language) -> LessonFrame:
    records = joined(record for record in plan.traffic if record.axis == "tp")
    rows = []
    for record in records:
        sent = of_bytes(record.wire_bytes(plan.mesh.tp))
        rows.append((purpose(record, say), record.collective.value, record.verb.value, str(record.times), sent))
    heads = (say("what"), say("collective"), say("in"), say("times a step"), say("a rank sends each time"))
    return LessonFrame(
        say("What the ranks send"),
        (say("These messages are in the middle of each layer, and nothing hides them. So tp needs fast links."),),
        (TextTable(heads, rows, numbers=(3, 4)),),
    )


def lacks(plan: Plan) -> str:
    """There have to be ranks that divide matrices."""
    return "" if plan.mesh.tp > 1 else "this config divides no matrix"


def _words(ranks: int) -> tuple[str, ...]:
    """Four heads, or as many as there are ranks."""
    heads = 4 if 4 % ranks == 0 else ranks
    layout = f"parallel.ranks={ranks}", f"parallel.tp={ranks}"
    return example(*layout, layers=2, heads=heads, width=32 * heads, length=multiple(64, ranks), batch=4)


TOPIC = Topic(
    about="which part of each matrix a rank has, and what the ranks sum in a block",
    example=Example(_words, least=2, most=MOST_RANKS),
    lesson=lesson,
    lacks=lacks,
    gives=(TWO_PARTS, {**TWO_PARTS, "parallel.sequence_parallel": False}),
)
