"""In: the cp axis. Out: each sequence divided over its ranks, attention exact: keys and values are exchanged.
Does not compute attention (ring does) and sums no gradient: to ddp and zero the ranks of this axis are replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from codescent.plan import DTYPE_BYTES, WIDE, Collective, Plan, Traffic, Verb
from codescent.strategies.refusals import near_degrees, near_lengths
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SplitSizes:
    """Of keys and values: `batch` samples of a micro-batch, `length` positions and `kv_heads` heads of one rank."""

    degree: int
    batch: int
    kv_heads: int
    length: int
    head_dim: int
    precision: str

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one rank, stacked."""
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * DTYPE_BYTES[dtype]


def ring_traffic(sizes: SplitSizes) -> tuple[Traffic, ...]:
    """Of `ring.Ring` in one layer and micro-batch: n - 1 hops in forward, and twice as many in backward.

    A rank's keys and values reach all others in n - 1 hops. The sum of their gradients begins at the next rank and is
    back after as many. All but the last hop of the gradients can hide behind the computation.
    """
    hops = sizes.degree - 1
    return _records(sizes, Collective.SEND, Collective.SEND, 1, hops) if hops else ()


def gather_traffic(sizes: SplitSizes) -> tuple[Traffic, ...]:
    """Of `ring.Gather` in one layer and micro-batch: an all-gather in forward, another in backward, and one
    reduce-scatter.

    Whatever the algorithm, a rank sends n - 1 times its own part (`Traffic.wire_bytes`): as much as in the ring. The
    ranks wait for all of it.
    """
    if sizes.degree == 1:
        return ()
    return _records(sizes, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, sizes.degree, 1)


def _records(
    sizes: SplitSizes, there: Collective, back: Collective, parts: int, times: int
) -> tuple[Traffic, Traffic, Traffic]:
    """Keys and values in forward, the same in backward, and their gradients, which are wide."""
    dtype, what = sizes.precision, "keys and values"

    def record(collective: Collective, verb: Verb, dtype: str, what: str) -> Traffic:
        during = verb if collective is Collective.SEND else None
        return Traffic(collective, "cp", parts * sizes.kv_bytes(dtype), dtype, verb, during, what, times)

    return (
        record(there, Verb.FORWARD, dtype, what),
        record(there, Verb.BACKWARD, dtype, what),
        record(back, Verb.BACKWARD, WIDE[dtype], f"gradients of {what}"),
    )


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
        mesh, work, model = plan.mesh, plan.work, plan.model
        layers = sum(1 <= depth <= model.num_layers for part in plan.schedule.parts(stage) for depth in part)
        kv_heads, length = model.num_kv_heads // mesh.tp, work.seq_len // mesh.cp
        sizes = SplitSizes(mesh.cp, work.microbatch_size, kv_heads, length, model.head_dim, work.precision)
        records = ring_traffic(sizes) if plan.layout.context == "ring" else gather_traffic(sizes)
        for record in records if layers else ():
            forward, backward = record.verb is Verb.FORWARD, plan.schedule.input_verb
            again = forward and plan.layout.recompute == "full"
            for verb in (Verb.FORWARD, backward) if again else (Verb.FORWARD if forward else backward,):
                during = None if record.during is None else verb
                yield replace(record, verb=verb, during=during, times=record.times * layers * work.num_microbatches)

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """The chunk reads this rank's positions of every sequence; attention exchanges keys and values."""
        from codescent.strategies.causal_tiles import balanced_positions  # noqa: PLC0415 - keeps torch out of planning
        from codescent.strategies.ring import Gather, Ring, split_attention  # noqa: PLC0415

        plan, index = this_rank.plan, this_rank.coordinates[self.axis]
        reading = cast(Any, part)
        reading.tokens_T = reading.rows_T = balanced_positions(plan.work.seq_len, plan.mesh.cp, index)
        exchange = (Ring if plan.layout.context == "ring" else Gather)(this_rank.groups[self.axis])
        for layer in part.modules():
            if hasattr(layer, "core"):
                cast(Any, layer).core = partial(split_attention, exchange=exchange)
