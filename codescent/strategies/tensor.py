"""In: the mesh axis tp, each parameter's role (how it may be split). Out: tensor parallelism: matrices split over tp,
and functions, set before and after the matrices, that communicate.
Does not define these functions (sequence.py and vocabulary.py do), and depends on roles, not on names of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, cast

from codescent.base.counted import counted
from codescent.base.nearest import nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import DTYPE_BYTES, WIDE, Collective, Parameter, Placement, Plan, Role, TensorPlan, Traffic, Verb
from codescent.plan.activations import SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.flops import recomputed_rows
from codescent.plan.operators import LayerOperator
from codescent.strategies.refusals import length_factor, near_degrees, near_lengths, with_tokens
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch

DIM: Mapping[Role, int] = {
    Role.COLUMN: 0,
    Role.BIAS_COLUMN: 0,
    Role.COLUMN_NORM: 0,
    Role.VOCAB: 0,
    Role.ADAPTER_COLUMN: 0,
    Role.EXPERT_COLUMN: 0,
    Role.EXPERT_ROW: 0,
    Role.MAGNITUDE_COLUMN: 0,
    Role.ROW: 1,
    Role.ADAPTER_ROW: 1,
}
"""The dim that is split over ranks, for each role. Parameters of other roles are whole on every rank."""

COLUMNS, ROWS = (Role.COLUMN, Role.EXPERT_COLUMN), (Role.ROW, Role.EXPERT_ROW)
"""Roles of the first and of the second matrix of a pair."""

WHATS = (
    INPUTS := "inputs of matrices divided by columns",
    OUTPUTS := "outputs of matrices divided by rows",
    INPUT_GRADIENTS := "gradients of inputs",
    OUTPUT_GRADIENTS := "gradients of outputs",
    INPUTS_AGAIN := "inputs, recomputed",
    OUTPUTS_AGAIN := "outputs, recomputed",
    HEAD_ROWS := "gradients of the head's rows",
    LENGTHS := "squared lengths of rows, of adapters",
    SQUARES := "sums over all heads, of norms",
    LARGEST := "largest logits",
    SUMS := "sums of exponentials, logits of the targets",
    LOGITS := "logits of all positions",
)
"""What is sent, in the order in which a plan lists it."""


class TensorParallel(Strategy):
    """Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", section 3): matrices come in pairs. The first is split by
    columns (its outputs), the second by rows (its inputs), so the ranks exchange nothing between the two.

    Sequence parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2): outside these
    pairs each rank has a part of the sequence.
    """

    axis = "tp"
    variants = ({}, {"sequence_parallel": False})

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse heads that cannot be divided equally; else, with sequence parallelism, positions.

        What would do for heads would also do for positions.
        """
        mesh, model, work = candidate.mesh, candidate.model, candidate.work
        degree, cp = mesh.tp, 1 if work.streams else mesh.cp
        if degree == 1:
            return
        for what, number in (("head", model.num_heads), ("key-value head", model.num_kv_heads)):
            verb = "does" if number == 1 else "do"
            if number % degree and not (what != "head" and number == model.num_heads):
                yield Refusal(
                    f"parallel.tp = {degree}: {counted(number, what)} {verb} not divide into {degree} parts",
                    near_degrees(candidate, self.axis, number, _fits),
                )
        if model.num_heads % degree or model.num_kv_heads % degree:
            return
        keys = ("model.source_len", "model.target_len") if work.streams else ("data.seq_len",)
        for key, length in zip(keys, _divided_lengths(candidate), strict=False):  # no lengths, if none is divided
            if length // cp % degree:
                shared = f" / {cp} (cp)" if cp > 1 else ""
                more = _near_streams(candidate, key, length) if work.streams else near_lengths(candidate)
                yield Refusal(
                    f"parallel.tp = {degree}: {length} positions ({key}){shared} do not divide into {degree} parts",
                    [*more, Change({"parallel.sequence_parallel": False})],
                )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Shard by role. Gradients of whole tensors are partial if the sequence is split; of adapters and norms
        of heads, always."""
        dim = DIM.get(tensor.parameter.role)
        if dim is not None:
            shard = Placement({**tensor.weights.shards, self.axis: dim})
            return replace(tensor, weights=shard, gradients=shard, optimizer=shard)
        always = Role.ADAPTER, Role.HEAD_NORM, Role.ROUTER, Role.ROUTER_BIAS, Role.MAGNITUDE
        partial_sum = candidate.layout.sequence_parallel or tensor.parameter.role in always
        if partial_sum and tensor.parameter.trained:
            return replace(tensor, partial=(*tensor.partial, self.axis))
        return tensor

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Collectives of each micro-batch: around each pair of matrices, the embedding and the head. None overlaps."""
        held = [tensor.parameter for tensor in plan.held_by(stage)]
        found = [
            replace(record, depths=depths)
            for part in plan.schedule.parts(stage)
            for depths in _alike(held, part)
            for record in _of_depths(plan, held, range(*depths))
        ]
        yield from sorted(found, key=lambda record: WHATS.index(record.what))

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Divide heads, channels and vocabulary; with sequence parallelism also the positions of the residual stream.

        Then each matrix keeps the positions that it has gathered. An embedding keeps whose tokens other ranks have.
        """
        splits = run.layout.sequence_parallel
        for tensor in tensors:
            if not self.active(run):
                yield tensor
                continue
            if splits and tensor.product and Dim.POSITION in tensor.dims and Dim.COLUMN not in tensor.dims:
                tensor = replace(tensor, begins=0, unless=0)
            yield tensor.divided(self.axis, (Dim.COLUMN, Dim.SEQUENCE) if splits else (Dim.COLUMN,))
            if Dim.TOKEN in tensor.dims:
                yield replace(tensor, name=f"{tensor.name} of other ranks", dtype="bool")

    def operators(self, operators: Sequence[LayerOperator], run: Candidate | Plan) -> Iterator[LayerOperator]:
        """Divide heads, channels and vocabulary; with sequence parallelism also the rows of the residual stream."""
        dims = (Dim.COLUMN, Dim.SEQUENCE) if run.layout.sequence_parallel else (Dim.COLUMN,)
        return (operator.divided(self.axis, dims) for operator in operators)

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Shrink parameters to this rank's shards, and set the collectives before or after each matrix."""
        import torch  # noqa: PLC0415 - keeps torch out of planning

        from codescent.strategies.sequence import enter, gather_sequence, leave, scatter_sum, summed  # noqa: PLC0415
        from codescent.strategies.vocabulary import SplitVocabulary  # noqa: PLC0415

        plan, group, index = this_rank.plan, this_rank.groups[self.axis], this_rank.coordinates[self.axis]
        degree, splits = plan.mesh.tp, plan.layout.sequence_parallel
        before = partial(gather_sequence if splits else enter, group=group)
        after = partial(scatter_sum if splits else leave, group=group)
        planned = {tensor.parameter.name: tensor for tensor in this_rank.tensors}
        for name, parameter in list(part.named_parameters()):
            tensor, (owner, _, leaf) = planned[name], name.rpartition(".")
            layer = cast(Any, part.get_submodule(owner))
            sizes = tensor.optimizer.without("dp_shard").sizes(tensor.parameter.shape, plan.mesh, this_rank.rank)
            if sizes != tuple(parameter.shape):
                setattr(layer, leaf, torch.nn.Parameter(parameter.new_empty(sizes), parameter.requires_grad))
            if tensor.parameter.role in COLUMNS:
                layer.before = before
                layer.first_output = index * -(-tensor.parameter.shape[0] // degree)
            elif tensor.parameter.role in ROWS:
                layer.after = after
                layer.sum_ranks = partial(summed, group=group)
                layer.first_input = index * -(-tensor.parameter.shape[1] // degree)
            elif tensor.parameter.role is Role.ROUTER:
                layer.share = 1.0 / degree
        for layer in part.modules():
            if hasattr(layer, "first_head"):
                cast(Any, layer).first_head = index * plan.model.num_heads // degree
            if getattr(layer, "head_norm", None) is not None:
                cast(Any, layer).head_norm.sum_ranks = partial(summed, group=group)
        reading = cast(Any, part)
        reading.vocabulary = SplitVocabulary(group, plan.model.vocab_size, sequence_parallel=splits)
        if splits:
            if plan.work.streams:  # each rank has a part of each sequence; its tokens are adjacent in the embedding
                sequences = torch.split(torch.arange(plan.work.seq_len), list(plan.work.streams))
                parts = [sequence.chunk(degree) for sequence in sequences]
                reading.tokens_T = torch.cat([part[rank] for rank in range(degree) for part in parts])
                reading.rows_T = reading.tokens_T
            positions_T = torch.arange(plan.work.seq_len) if reading.rows_T is None else reading.rows_T
            reading.rows_T = positions_T.chunk(degree)[index]


def _fits(candidate: Candidate) -> bool:
    mesh, model = candidate.mesh, candidate.model
    cp = 1 if candidate.work.streams else mesh.cp
    whole = all(length // cp % mesh.tp == 0 for length in _divided_lengths(candidate))
    return model.num_heads % mesh.tp == 0 and model.num_kv_heads % mesh.tp == 0 and whole


def _near_streams(candidate: Candidate, key: str, length: int) -> list[Change]:
    """Values of model.source_len or model.target_len, the tokens of a sample, that tp can divide."""
    changes = each(key, lengths := nearest_multiples(length, length_factor(candidate)))
    if key == "model.source_len":
        return changes
    return [
        more for change, near in zip(changes, lengths, strict=True) for more in with_tokens(candidate, change, near)
    ]


def _divided_lengths(candidate: Candidate) -> tuple[int, ...]:
    """Lengths of the sequences of a sample that are split over tp; empty without sequence parallelism."""
    work = candidate.work
    return (work.streams or (work.seq_len,)) if candidate.layout.sequence_parallel else ()


def _alike(held: Sequence[Parameter], part: range) -> Iterator[tuple[int, int]]:
    """[first, end) of depths, one behind the other, that have the same collectives."""

    def roles(depth: int) -> Counter[tuple[Role, int | None]]:
        return Counter((parameter.role, parameter.stream) for parameter in held if depth in parameter.depths)

    for _, depths in groupby(part, roles):
        same = list(depths)
        yield same[0], same[-1] + 1


def _of_depths(plan: Plan, held: Sequence[Parameter], depths: range) -> Iterator[Traffic]:
    """The collectives of depths that are alike."""
    work, head = plan.work, plan.model.num_layers + 1
    read = [parameter for parameter in held if any(depth in depths for depth in parameter.depths)]
    vocabulary = head in depths and any(parameter.role is Role.VOCAB for parameter in read)
    embeddings = [parameter for parameter in read if 0 in depths and parameter.role is Role.VOCAB]
    if vocabulary:  # modules for more tokens look these up behind the blocks
        embeddings += [p for p in held if p.role is Role.VOCAB and 0 in p.depths] * plan.model.mtp_layers
    for stream in (None, *range(len(work.streams))):
        tokens = work.microbatch_size * work.positions(stream) // plan.mesh.cp
        heads = int(vocabulary and stream == (len(work.streams) - 1 if work.streams else None))
        heads *= 1 + plan.model.mtp_layers
        for verb, collective, what, width, times in _exchanges(plan, read, embeddings, stream, heads):
            yield _record(plan, collective, tokens * width, verb, what, times)
    tokens = work.microbatch_size * work.positions(-1) // plan.mesh.cp
    yield from _sums_of_norms(plan, sum(parameter.role is Role.COLUMN_NORM for parameter in read) // 2, tokens)
    yield from _lengths_of_rows(plan, [parameter for parameter in read if parameter.role is Role.MAGNITUDE])
    for _ in range(1 + plan.model.mtp_layers if vocabulary else 0):
        yield from _losses(plan, round(tokens * plan.task.head_share))
    for small in read if plan.layout.sequence_parallel and head in depths else ():
        if small.role is Role.LOGITS:  # each rank computes the outputs of its own positions
            yield _record(plan, Collective.ALL_GATHER, tokens * small.shape[0], Verb.FORWARD, LOGITS)


def _record(
    plan: Plan, collective: Collective, numel: int, verb: Verb, what: str, times: int = 1, dtype: str = ""
) -> Traffic:
    """A collective, `times` in each micro-batch. `dtype` "": that of activations."""
    dtype, times = dtype or plan.work.precision, times * plan.work.num_microbatches
    return Traffic(collective, TensorParallel.axis, numel * DTYPE_BYTES[dtype], dtype, verb, None, what, times)


def _exchanges(
    plan: Plan, held: Sequence[Parameter], embeddings: Sequence[Parameter], stream: int | None, heads: int
) -> Iterator[tuple[Verb, Collective, str, int, int]]:
    """The collectives of one sequence: verb, collective, what is sent, channels of a position, times per micro-batch.

    Ranks send what a COLUMN matrix reads: the residual stream, or latents that each rank computes of its positions.
    """
    splits, width = plan.layout.sequence_parallel, plan.model.hidden_dim
    again = plan.layout.computes_blocks_again and not heads  # no module behind the blocks is computed again
    into, out = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if splits else (None, Collective.ALL_REDUCE)
    forward, backward = Verb.FORWARD, plan.schedule.input_verb
    of_stream = [parameter for parameter in held if parameter.stream == stream]
    columns = Counter(p.shape[-1] + p.beside for p in of_stream if p.role in COLUMNS)
    rows = sum(parameter.role in ROWS for parameter in of_stream)
    embeddings = [parameter for parameter in embeddings if parameter.stream == stream]

    def of_width(times: int) -> Counter[int]:
        return Counter({width: times})

    found = {
        (forward, into, INPUTS): columns + of_width(heads),
        (forward, out, OUTPUTS): of_width(rows + len(embeddings)),
        (backward, out, INPUT_GRADIENTS): columns + of_width(0 if _reduces_selected_rows(plan) else heads),
        (backward, into, OUTPUT_GRADIENTS): of_width(rows + sum(p.trained for p in embeddings)),
        (backward, into, INPUTS_AGAIN): columns if again else Counter(),
        (backward, out, OUTPUTS_AGAIN): of_width(_recomputed_outputs(plan, held, stream) if again else 0),
    }
    for (verb, collective, what), widths in found.items():
        for channels, times in widths.items():
            if collective is not None and times:
                yield verb, collective, what, channels, times


def _sums_of_norms(plan: Plan, times: int, tokens: int) -> Iterator[Traffic]:
    """The sums of norms over all heads, of queries and keys together: two numbers of each token (`head_norm`)."""
    again = plan.layout.computes_blocks_again
    for verb, count in ((Verb.FORWARD, times), (plan.schedule.input_verb, times * (2 if again else 1))):
        if count:
            yield _record(plan, Collective.ALL_REDUCE, 2 * tokens, verb, SQUARES, count, WIDE[plan.work.precision])


def _lengths_of_rows(plan: Plan, of: Sequence[Parameter]) -> Iterator[Traffic]:
    """The sums over the inputs of ROW matrices with DoRA: one number of each row (`operators.linear`)."""
    verbs = (Verb.FORWARD, plan.schedule.input_verb) if plan.layout.computes_blocks_again else (Verb.FORWARD,)
    for verb, (numel, times) in product(verbs, Counter(parameter.numel for parameter in of).items()):
        yield _record(plan, Collective.ALL_REDUCE, numel, verb, LENGTHS, times, WIDE[plan.work.precision])


def _recomputed_outputs(plan: Plan, held: Sequence[Parameter], stream: int | None) -> int:
    """How many row-parallel outputs are reduced a second time when backward recomputes the blocks."""
    return sum(parameter.stream == stream for parameter in recomputed_rows(held, plan.model.dropout))


def _reduces_selected_rows(plan: Plan) -> bool:
    """Whether gradients of the head's input are all-reduced only for the positions that the head reads."""
    return not plan.layout.sequence_parallel and plan.task.head_share < 1


def _losses(plan: Plan, tokens: int) -> Iterator[Traffic]:
    """Collectives of the loss, chunk by chunk (see `SplitVocabulary`), and of the gradients of selected rows."""
    if _reduces_selected_rows(plan):
        numel = tokens * plan.model.hidden_dim
        yield _record(plan, Collective.ALL_REDUCE, numel, plan.schedule.input_verb, HEAD_ROWS)
    wide, chunk = WIDE[plan.work.precision], plan.model.head_chunk_tokens or tokens
    for rows, times in ((chunk, tokens // chunk), (tokens % chunk, 1)):
        if rows and times:
            yield _record(plan, Collective.ALL_REDUCE, rows, Verb.FORWARD, LARGEST, times, wide)
            yield _record(plan, Collective.ALL_REDUCE, 2 * rows, Verb.FORWARD, SUMS, times, wide)
