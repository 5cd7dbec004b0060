"""In: the tp axis, the roles of a model's parameters. Out: matrices divided over its ranks, and what these exchange.
Does not name a module of any model, and does no arithmetic (sequence and vocabulary do)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.base.nearest import near_multiples
from codescent.plan import (
    DTYPE_BYTES,
    WIDE,
    Collective,
    Parameter,
    Placement,
    Plan,
    Role,
    Schedule,
    TensorPlan,
    Traffic,
    Verb,
    Work,
)
from codescent.strategies.refusals import near_degrees, near_lengths
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch

DIM: Mapping[Role, int] = {
    Role.COLUMN: 0,
    Role.BIAS_COLUMN: 0,
    Role.VOCAB: 0,
    Role.ADAPTER_COLUMN: 0,
    Role.ROW: 1,
    Role.ADAPTER_ROW: 1,
}
"""The dim that is divided, by role; the others are whole on every rank."""


@dataclass(frozen=True)
class TensorOptions:
    """`sequence_parallel`: between the matrices each rank has a part of the sequence, not all of it.
    `recompute`: with "full" a block's activations are exchanged once more in the backward pass."""

    sequence_parallel: bool
    recompute: str


class Tensor:
    """Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", section 3): of a pair of matrices the first is divided by
    columns (its outputs), the second by rows (its inputs), so that nothing is exchanged between them.

    Sequence parallelism: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2.
    """

    axis = "tp"
    Options = TensorOptions
    variants: tuple[Mapping[str, Any], ...] = ({}, {"sequence_parallel": False})

    def __init__(self, options: TensorOptions) -> None:
        self.options = options
        self.splits = options.sequence_parallel

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Heads that do not divide, positions that do not where they have to."""
        degree, work = ask.mesh.degree(self.axis), ask.work
        if degree == 1:
            return
        for what, number in (("heads", work.num_heads), ("key-value heads", work.num_kv_heads)):
            if number % degree and not (what != "heads" and number == work.num_heads):
                yield (
                    f"parallel.tp = {degree}: {number} {what} do not divide into {degree} parts; nearest that would "
                    f"do: {near_degrees(ask, self.axis, number, self._fits)}"
                )
        cp = ask.mesh.cp
        for length in self._lengths(work):
            if self.splits and length // cp % degree:
                shared, slices = (f" / {cp} (cp)", 2) if cp > 1 else ("", 1)
                factor = cp * math.lcm(slices, degree)
                which = "of one of the model's sequences" if work.streams else "(data.seq_len)"
                lengths = near_multiples(length, factor) if work.streams else near_lengths(length, factor)
                yield (
                    f"parallel.tp = {degree}: {length} positions {which}{shared} do not divide into {degree} "
                    f"parts; nearest that would do: {lengths}, or parallel.sequence_parallel = false"
                )

    def _fits(self, ask: Ask) -> bool:
        work, degree = ask.work, ask.mesh.tp
        whole = not self.splits or all(length // ask.mesh.cp % degree == 0 for length in self._lengths(work))
        return work.num_heads % degree == 0 and work.num_kv_heads % degree == 0 and whole

    def _lengths(self, work: Work) -> tuple[int, ...]:
        return work.streams or (work.seq_len,)

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """By role. What is whole on every rank is read with a part of the sequence, and its gradient is a part too; of
        an adapter's matrix that is whole it is anyway, since the other one is divided."""
        if ask.mesh.degree(self.axis) == 1:
            return tensor
        dim = DIM.get(tensor.parameter.role)
        if dim is None:
            parted = self.splits or tensor.parameter.role is Role.ADAPTER
            partial = parted and tensor.parameter.trained
            return replace(tensor, partial=(*tensor.partial, self.axis)) if partial else tensor
        shard = Placement({**tensor.weights.shards, self.axis: dim})
        return replace(tensor, weights=shard, gradients=shard, optimizer=shard)

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """The same list: activations are exchanged inside FORWARD and BACKWARD."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Of every micro-batch: before and after each pair of matrices, and at both ends of the model. The ranks wait
        for all of it."""
        if plan.mesh.degree(self.axis) == 1:
            return
        work, mesh = plan.work, plan.mesh
        for stage in range(mesh.pp):
            depths = [depth for part in plan.schedule.parts(stage) for depth in part]
            for verb, collective, what, stream, times in self._exchanges(plan, stage, depths):
                tokens = work.microbatch_size * work.positions(stream) // mesh.cp
                yield Traffic(
                    collective,
                    self.axis,
                    tokens * work.hidden_dim * DTYPE_BYTES[work.precision],
                    work.precision,
                    verb,
                    None,
                    what,
                    times * work.num_microbatches,
                    stage if mesh.pp > 1 else None,
                )
            tokens = work.microbatch_size * work.positions(-1) // mesh.cp
            if self._heads(plan, stage, depths):
                yield from self._losses(plan, round(tokens * work.head_share), stage if mesh.pp > 1 else None)
            yield from self._logits(plan, tokens, stage, depths)

    def _heads(self, plan: Plan, stage: int, depths: list[int]) -> int:
        """Heads over a vocabulary at the end of a stage: one or none."""
        end, held = plan.work.num_layers + 1, [tensor.parameter for tensor in plan.held_by(stage)]
        return sum(end in depths and end in p.depths and p.role is Role.VOCAB for p in held)

    def _exchanges(
        self, plan: Plan, stage: int, depths: list[int]
    ) -> Iterator[tuple[Verb, Collective, str, int | None, int]]:
        """Verb, collective, what, of which sequence's residual stream and how often for each micro-batch."""
        into, out = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if self.splits else (None, Collective.ALL_REDUCE)
        forward, backward = Verb.FORWARD, plan.schedule.input_verb
        held = [tensor.parameter for tensor in plan.held_by(stage)]
        last = len(plan.work.streams) - 1 if plan.work.streams else None
        full = self.options.recompute == "full"
        for stream in (None, *range(len(plan.work.streams))):
            of_stream = [parameter for parameter in held if parameter.stream == stream]
            roles = [parameter.role for parameter in of_stream]
            columns, rows = roles.count(Role.COLUMN), roles.count(Role.ROW)
            embeddings = [p for p in of_stream if 0 in depths and 0 in p.depths and p.role is Role.VOCAB]
            embeds, learning = len(embeddings), sum(p.trained for p in embeddings)
            ends = self._heads(plan, stage, depths) if stream == last else 0
            found = {
                (forward, into, "inputs of matrices divided by columns"): columns + ends,
                (forward, out, "outputs of matrices divided by rows"): rows + embeds,
                (backward, out, "gradients of inputs"): columns + (0 if self._some_rows(plan) else ends),
                (backward, into, "gradients of outputs"): rows + learning,
                (backward, into, "inputs, made again"): columns if full else 0,
                (backward, out, "outputs, made again"): self._again(plan, held, stream) if full else 0,
            }
            for (verb, collective, what), times in found.items():
                if collective is not None and times:
                    yield verb, collective, what, stream, times

    def _again(self, plan: Plan, held: list[Parameter], stream: int | None) -> int:
        """Outputs of matrices divided by rows that blocks which are made again exchange again: all but a block's last
        one, and this too where something after it is needed, the mask of a dropout or what a norm reads."""
        found: dict[str, bool] = {}
        last: dict[int, str] = {}  # by depth: the latest output that there is
        for parameter in held:
            depth = parameter.depths[0]
            if parameter.role is Role.ROW:
                if parameter.stream == stream:
                    found[parameter.name] = plan.work.dropout > 0
                last[depth] = parameter.name
            elif parameter.role in (Role.NORM, Role.COLUMN) and last.get(depth) in found:
                found[last[depth]] = True
        return sum(found.values())

    def _some_rows(self, plan: Plan) -> bool:
        """Whether the gradients of the head's input are summed of the positions alone that it reads."""
        return not self.splits and plan.work.head_share < 1

    def _logits(self, plan: Plan, tokens: int, stage: int, depths: list[int]) -> Iterator[Traffic]:
        """Of a head that every rank has whole, where each makes the outputs of its own positions."""
        work, at = plan.work, stage if plan.mesh.pp > 1 else None
        heads = [t.parameter for t in plan.held_by(stage) if t.parameter.role is Role.LOGITS]
        for head in heads if self.splits and work.num_layers + 1 in depths else []:
            payload_bytes, what = tokens * head.shape[0] * DTYPE_BYTES[work.precision], "logits of all positions"
            yield Traffic(
                Collective.ALL_GATHER,
                self.axis,
                payload_bytes,
                work.precision,
                Verb.FORWARD,
                None,
                what,
                work.num_microbatches,
                at,
            )

    def _losses(self, plan: Plan, tokens: int, stage: int | None) -> Iterator[Traffic]:
        """Of every chunk of the head: each token's largest logit; its sum of exponentials and its target's logit. And
        where only some positions are read, the gradients of these."""
        work, wide = plan.work, WIDE[plan.work.precision]
        if self._some_rows(plan):
            payload_bytes, what = tokens * work.hidden_dim * DTYPE_BYTES[work.precision], "gradients of the head's rows"
            verb, times = plan.schedule.input_verb, work.num_microbatches
            yield Traffic(
                Collective.ALL_REDUCE, self.axis, payload_bytes, work.precision, verb, None, what, times, stage
            )
        chunk = work.head_chunk_tokens or tokens
        for rows, times in ((chunk, tokens // chunk), (tokens % chunk, 1)):
            if not (rows and times):
                continue
            for numbers, what in ((1, "largest logits"), (2, "sums of exponentials, logits of the targets")):
                payload_bytes = numbers * rows * DTYPE_BYTES[wide]
                times_all = times * work.num_microbatches
                verb = Verb.FORWARD
                yield Traffic(Collective.ALL_REDUCE, self.axis, payload_bytes, wide, verb, None, what, times_all, stage)

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """Parameters shrink to this rank's part; what a matrix exchanges is put before or after it."""
        degree = here.plan.mesh.degree(self.axis)
        if degree == 1:
            return
        import torch  # noqa: PLC0415 - keeps torch out of planning

        from codescent.strategies.sequence import enter, gather_sequence, leave, scatter_sum  # noqa: PLC0415
        from codescent.strategies.vocabulary import SplitVocabulary  # noqa: PLC0415

        group, index, plan = here.groups[self.axis], here.coordinates[self.axis], here.plan
        before = partial(gather_sequence if self.splits else enter, group=group)
        after = partial(scatter_sum if self.splits else leave, group=group)
        planned = {tensor.parameter.name: tensor for tensor in here.tensors}
        for name, parameter in list(part.named_parameters()):
            tensor, (owner, _, leaf) = planned[name], name.rpartition(".")
            layer = cast(Any, part.get_submodule(owner))
            sizes = tensor.optimizer.without("dp_shard").sizes(tensor.parameter.shape, plan.mesh, here.rank)
            if sizes != tuple(parameter.shape):
                setattr(layer, leaf, torch.nn.Parameter(parameter.new_empty(sizes), parameter.requires_grad))
            if tensor.parameter.role is Role.COLUMN:
                layer.before = before
                layer.first_output = index * -(-tensor.parameter.shape[0] // degree)
            elif tensor.parameter.role is Role.ROW:
                layer.after = after
        for layer in part.modules():
            if hasattr(layer, "first_head"):
                cast(Any, layer).first_head = index * plan.work.num_heads // degree
        reading = cast(Any, part)
        reading.vocabulary = SplitVocabulary(group, plan.work.vocab_size, sequence_parallel=self.splits)
        if self.splits:
            if plan.work.streams:  # of each sequence a part; the embedding reads the tokens of a rank side by side
                sequences = torch.split(torch.arange(plan.work.seq_len), list(plan.work.streams))
                parts = [sequence.chunk(degree) for sequence in sequences]
                reading.tokens_T = torch.cat([part[rank] for rank in range(degree) for part in parts])
                reading.rows_T = reading.tokens_T
            positions_T = torch.arange(plan.work.seq_len) if reading.rows_T is None else reading.rows_T
            reading.rows_T = positions_T.chunk(degree)[index]

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Of a rank's part of the matrices like of any other weights: others'."""
        return None
