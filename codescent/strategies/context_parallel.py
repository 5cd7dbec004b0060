"""In: the cp axis. Out: each sequence divided over its ranks, attention exact: keys and values travel.
Does not compute attention (ring does) and sums no gradient: to replicate and zero its ranks are copies of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from codescent.plan import Collective, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.strategies.refusals import near_degrees, near_lengths
from codescent.strategies.ring_traffic import Message, SplitSizes, gather_traffic, ring_traffic
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ContextOptions:
    """`context`: "ring" or "all-gather", how keys and values reach the other ranks. `recompute`: with "full" they
    travel once more in the backward pass. `sequence_parallel`: whether a rank's positions are divided over tp again."""

    context: str
    recompute: str
    sequence_parallel: bool


class Context:
    """Context parallelism: a rank has two slices of every sequence, one from its front and one from its back, so that
    all have as much of the causal triangle to compute (Llama Team 2024, "The Llama 3 Herd of Models", 3.3.2).

    ring: Liu et al. 2023, "Ring Attention with Blockwise Transformers".
    """

    axis = "cp"
    Options = ContextOptions
    variants: tuple[Mapping[str, Any], ...] = ({"context": "ring"}, {"context": "all-gather"})

    def __init__(self, options: ContextOptions) -> None:
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Sequences that cannot be cut in two slices for every rank."""
        degree, length = ask.mesh.degree(self.axis), ask.work.seq_len
        if degree > 1 and length % (2 * degree):
            parts = ask.mesh.tp if self.options.sequence_parallel else 1
            lengths = near_lengths(length, degree * math.lcm(2, parts))
            near = near_degrees(
                ask, self.axis, length // 2, lambda other: length % (other.mesh.cp * math.lcm(2, parts)) == 0
            )
            yield (
                f"parallel.cp = {degree}: {length} positions (data.seq_len) are no multiple of 2 x {degree} slices; "
                f"nearest that would do: {lengths}; or {near}"
            )

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Every rank holds what it would without."""
        return tensor

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """The same list: keys and values travel inside FORWARD and BACKWARD."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """In every layer and micro-batch, forward and backward."""
        mesh, work = plan.mesh, plan.work
        if mesh.degree(self.axis) == 1:
            return
        sizes = SplitSizes(
            mesh.cp,
            work.microbatch_size,
            work.num_kv_heads // mesh.tp,
            work.seq_len // mesh.cp,
            work.head_dim,
            work.precision,
        )
        messages = ring_traffic(sizes) if self.options.context == "ring" else gather_traffic(sizes)
        backward = plan.schedule.input_verb
        for stage in range(mesh.pp):
            layers = sum(1 <= depth <= work.num_layers for part in plan.schedule.parts(stage) for depth in part)
            at = stage if mesh.pp > 1 else None
            for message in messages if layers else ():
                verb = Verb.FORWARD if message.verb is Verb.FORWARD else backward
                yield self._traffic(message, verb, layers * work.num_microbatches, at)
                if self.options.recompute == "full" and verb is Verb.FORWARD:
                    yield self._traffic(message, backward, layers * work.num_microbatches, at)

    def _traffic(self, message: Message, verb: Verb, times: int, stage: int | None) -> Traffic:
        kind, times, size_bytes = Collective(message.kind), message.times * times, message.payload_bytes
        during = verb if kind is Collective.SEND else None
        return Traffic(kind, self.axis, size_bytes, message.dtype, verb, during, message.what, times, stage)

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """The chunk reads this rank's positions of every sequence, and attention asks the others for theirs."""
        degree = here.plan.mesh.degree(self.axis)
        if degree == 1:
            return
        from codescent.strategies.ring import gathered_attention, ring_attention  # noqa: PLC0415 - no torch in planning
        from codescent.strategies.zigzag import zigzag_positions  # noqa: PLC0415

        positions_T = zigzag_positions(here.plan.work.seq_len, degree, here.coordinates[self.axis])
        reading = cast(Any, part)
        reading.tokens_T = reading.rows_T = positions_T
        attend = ring_attention if self.options.context == "ring" else gathered_attention
        for layer in part.modules():
            if hasattr(layer, "core"):
                cast(Any, layer).core = partial(attend, group=here.groups[self.axis])

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Sums over the copies of the model, which the ranks of this axis are: others'."""
        return None
