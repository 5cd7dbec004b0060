"""In: the tp axis, the roles of a model's parameters. Out: matrices divided over its ranks, and what these exchange.
Does not name a module of any model, and does no arithmetic (sequence and vocabulary do)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.plan import DTYPE_BYTES, WIDE, Collective, Placement, Plan, Role, Schedule, TensorPlan, Traffic, Verb
from codescent.strategies.near import near_degrees, near_lengths
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch

DIM: Mapping[Role, int] = {Role.COLUMN: 0, Role.BIAS_COLUMN: 0, Role.VOCAB: 0, Role.ROW: 1}
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
        if self.splits and work.seq_len // cp % degree:
            shared, slices = (f" / {cp} (cp)", 2) if cp > 1 else ("", 1)
            lengths = near_lengths(work.seq_len, cp * math.lcm(slices, degree))
            yield (
                f"parallel.tp = {degree}: {work.seq_len} positions (data.seq_len){shared} do not divide into {degree} "
                f"parts; nearest that would do: {lengths}, or parallel.sequence_parallel = false"
            )

    def _fits(self, ask: Ask) -> bool:
        work, degree = ask.work, ask.mesh.tp
        whole = not self.splits or work.seq_len // ask.mesh.cp % degree == 0
        return work.num_heads % degree == 0 and work.num_kv_heads % degree == 0 and whole

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """By role. What is whole on every rank is read with a part of the sequence, and its gradient is a part too."""
        if ask.mesh.degree(self.axis) == 1:
            return tensor
        dim = DIM.get(tensor.parameter.role)
        if dim is None:
            return replace(tensor, partial=(*tensor.partial, self.axis)) if self.splits else tensor
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
        tokens = work.microbatch_size * work.seq_len // mesh.cp
        stream_bytes = tokens * work.hidden_dim * DTYPE_BYTES[work.precision]
        for stage in range(mesh.pp):
            depths = [depth for part in plan.schedule.parts(stage) for depth in part]
            for verb, collective, what, times in self._exchanges(plan, stage, depths):
                yield Traffic(
                    collective,
                    self.axis,
                    stream_bytes,
                    work.precision,
                    verb,
                    None,
                    what,
                    times * work.num_microbatches,
                    stage if mesh.pp > 1 else None,
                )
            if work.num_layers + 1 in depths:
                yield from self._losses(plan, tokens, stage if mesh.pp > 1 else None)

    def _exchanges(self, plan: Plan, stage: int, depths: list[int]) -> Iterator[tuple[Verb, Collective, str, int]]:
        """Verb, collective, what and how often for each micro-batch, all of them of a residual stream."""
        into, out = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) if self.splits else (None, Collective.ALL_REDUCE)
        forward, backward = Verb.FORWARD, plan.schedule.input_verb
        roles = [tensor.parameter.role for tensor in plan.held_by(stage)]
        columns, rows = roles.count(Role.COLUMN), roles.count(Role.ROW)
        embeds, ends = int(0 in depths), int(plan.work.num_layers + 1 in depths)
        # What follows the last product of a block is made again only if something after it is needed: a dropout's mask.
        again = rows if plan.work.dropout else rows - sum(1 <= depth <= plan.work.num_layers for depth in depths)
        full = self.options.recompute == "full"
        found = {
            (forward, into, "inputs of matrices divided by columns"): columns + ends,
            (forward, out, "outputs of matrices divided by rows"): rows + embeds,
            (backward, out, "gradients of inputs"): columns + ends,
            (backward, into, "gradients of outputs"): rows + embeds,
            (backward, into, "inputs, made again"): columns if full else 0,
            (backward, out, "outputs, made again"): again if full else 0,
        }
        for (verb, collective, what), times in found.items():
            if collective is not None and times:
                yield verb, collective, what, times

    def _losses(self, plan: Plan, tokens: int, stage: int | None) -> Iterator[Traffic]:
        """Of every chunk of the head: each token's largest logit; its sum of exponentials and its target's logit."""
        work, wide = plan.work, WIDE[plan.work.precision]
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
                setattr(layer, leaf, torch.nn.Parameter(parameter.new_empty(sizes)))
            if tensor.parameter.role is Role.COLUMN:
                layer.before = before
            elif tensor.parameter.role is Role.ROW:
                layer.after = after
        for layer in part.modules():
            if hasattr(layer, "first_head"):
                cast(Any, layer).first_head = index * plan.work.num_heads // degree
        reading = cast(Any, part)
        reading.vocabulary = SplitVocabulary(group, plan.work.vocab_size, sequence_parallel=self.splits)
        if self.splits:
            positions_T = torch.arange(plan.work.seq_len) if reading.rows_T is None else reading.rows_T
            reading.rows_T = positions_T.chunk(degree)[index]

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Of a rank's part of the matrices like of any other weights: others'."""
        return None
