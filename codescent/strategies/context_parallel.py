"""In: the cp axis. Out: each sequence divided over its ranks, attention exact: keys and values are exchanged.
Does not compute attention (ring does) and sums no gradient: to ddp and zero the ranks of this axis are replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from codescent.plan import Collective, Plan, Traffic, Verb
from codescent.strategies.refusals import near_degrees, near_lengths
from codescent.strategies.ring_traffic import SplitSizes, gather_traffic, ring_traffic
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch


class Context(Strategy):
    """Context parallelism: a rank has two slices of every sequence, one from its front and one from its back, so that
    all have as much of the causal triangle to compute (Llama Team 2024, "The Llama 3 Herd of Models", 3.3.2).

    ring: Liu et al. 2023, "Ring Attention with Blockwise Transformers".
    """

    axis = "cp"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"context": "ring"}, {"context": "all-gather"})

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Sequences that cannot be cut in two slices for every rank."""
        degree, length = candidate.mesh.cp, candidate.work.seq_len
        if degree > 1 and length % (2 * degree):
            slices = math.lcm(2, candidate.mesh.tp if candidate.layout.sequence_parallel else 1)
            near = near_degrees(candidate, self.axis, length // 2, lambda other: length % (other.mesh.cp * slices) == 0)
            yield (
                f"parallel.cp = {degree}: {length} positions (data.seq_len) are no multiple of 2 x {degree} slices; "
                f"nearest that would do: {near_lengths(length, degree * slices)}; or {near}"
            )

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """In every layer and micro-batch, forward and backward; with recompute = "full" forward's once more."""
        mesh, work, model, layout = plan.mesh, plan.work, plan.model, plan.layout
        layers = sum(1 <= depth <= model.num_layers for part in plan.schedule.parts(stage) for depth in part)
        sizes = SplitSizes(
            mesh.cp,
            work.microbatch_size,
            model.num_kv_heads // mesh.tp,
            work.seq_len // mesh.cp,
            model.head_dim,
            work.precision,
        )
        messages = ring_traffic(sizes) if layout.context == "ring" else gather_traffic(sizes)
        for message in messages if layers else ():
            forward = message.verb is Verb.FORWARD
            kind, verb = Collective(message.kind), Verb.FORWARD if forward else plan.schedule.input_verb
            record = Traffic(
                kind,
                self.axis,
                message.payload_bytes,
                message.dtype,
                verb,
                verb if kind is Collective.SEND else None,
                message.what,
                message.times * layers * work.num_microbatches,
            )
            yield record
            if forward and layout.recompute == "full":
                again = plan.schedule.input_verb
                yield replace(record, verb=again, during=again if kind is Collective.SEND else None)

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """The chunk reads this rank's positions of every sequence; attention exchanges keys and values."""
        from codescent.strategies.causal_tiles import balanced_positions  # noqa: PLC0415 - keeps torch out of planning
        from codescent.strategies.ring import gathered_attention, ring_attention  # noqa: PLC0415

        plan, index = this_rank.plan, this_rank.coordinates[self.axis]
        reading = cast(Any, part)
        reading.tokens_T = reading.rows_T = balanced_positions(plan.work.seq_len, plan.mesh.cp, index)
        attend = ring_attention if plan.layout.context == "ring" else gathered_attention
        for layer in part.modules():
            if hasattr(layer, "core"):
                cast(Any, layer).core = partial(attend, group=this_rank.groups[self.axis])
