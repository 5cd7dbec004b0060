"""In: the mesh axis cp. Out: context parallelism: sequences split over the ranks of cp, with exact attention.
Does not compute attention (ring does). Does not sum gradients: ddp and zero do, and treat cp ranks as replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from codescent.base.refusal import Refusal
from codescent.operators.saved_attention import BEGINS, FEW_DOCUMENTS, OFFSETS, is_memory_efficient, rounded_up
from codescent.operators.saved_tensors import BLOCK_INPUTS
from codescent.plan import DTYPE_BYTES, WIDE, Collective, Plan, Traffic, Verb
from codescent.plan.activations import COMPILED, CPU, CUDA, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.model import runs_of
from codescent.plan.operators import LayerOperator
from codescent.strategies.refusals import length_factor, near_degrees, near_lengths
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch


def exchange_traffic(context: str, degree: int, kv_numel: int, precision: str) -> tuple[Traffic, ...]:
    """Collectives of one layer and micro-batch: keys and values in forward and backward, and their gradients.

    The gradients are sent in the wide dtype. "ring" (`ring.Ring`): keys and values reach all n ranks in n - 1 hops, and
    so do the sums of the gradients. Computation can hide every hop except the last hop of the gradients. "all-gather"
    (`ring.Gather`): a rank sends as many bytes (`Traffic.wire_bytes`), and computation waits for all of them.

    `kv_numel`: elements of one rank's keys and values, 2 * samples * key-value heads * positions * head_dim.
    """
    if degree == 1:
        return ()
    what, wide = "keys and values", WIDE[precision]
    gradients = f"gradients of {what}"
    if context == "ring":
        sends = (
            (Verb.FORWARD, precision, what, degree - 1, True),
            (Verb.BACKWARD, precision, what, degree - 1, True),
            (Verb.BACKWARD, wide, gradients, degree - 2, True),
            (Verb.BACKWARD, wide, gradients, 1, False),
        )
        return tuple(
            Traffic(
                Collective.SEND, "cp", kv_numel * DTYPE_BYTES[dtype], dtype, verb, verb if hides else None, name, hops
            )
            for verb, dtype, name, hops, hides in sends
            if hops
        )
    gathers = (
        (Collective.ALL_GATHER, Verb.FORWARD, precision, what),
        (Collective.ALL_GATHER, Verb.BACKWARD, precision, what),
        (Collective.REDUCE_SCATTER, Verb.BACKWARD, wide, gradients),
    )
    numel = kv_numel * degree
    return tuple(
        Traffic(collective, "cp", numel * DTYPE_BYTES[dtype], dtype, verb, None, name)
        for collective, verb, dtype, name in gathers
    )


class ContextParallel(Strategy):
    """Context parallelism: a rank has two slices of every sequence, one from its front and one from its back. So all
    ranks have the same work under the causal mask (Llama Team 2024, "The Llama 3 Herd of Models", 3.3.2)."""

    axis = "cp"
    variants = ({"context": "ring"}, {"context": "all-gather"})

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse sequences that cannot be cut into two equal slices for every rank."""
        degree, length = candidate.mesh.cp, candidate.work.seq_len
        if degree > 1 and length % (2 * degree) and not candidate.work.streams:  # with streams, the model refuses cp
            near = near_degrees(candidate, self.axis, length // 2, lambda other: length % length_factor(other) == 0)
            yield Refusal(
                f"parallel.cp = {degree}: {length} positions (data.seq_len) are no multiple of 2 x {degree} slices",
                [*near_lengths(candidate), *near],
            )

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Exchanges of every layer and micro-batch. Where backward computes blocks again, forward's happen twice."""
        mesh, work, model = plan.mesh, plan.work, plan.model
        kv_heads, length = model.num_kv_heads // mesh.tp, work.seq_len // mesh.cp
        kv_numel = 2 * work.microbatch_size * kv_heads * length * model.head_dim
        blocks = [
            (found[0], found[-1] + 1)
            for part in plan.schedule.parts(stage)
            if (found := [depth for depth in part if 1 <= depth <= model.num_layers])
        ]
        exchanged = exchange_traffic(plan.layout.context, mesh.cp, kv_numel, work.precision)
        for record, (first, end) in product(exchanged, blocks):
            forward, backward = record.verb is Verb.FORWARD, plan.schedule.input_verb
            again, times = forward and plan.layout.computes_blocks_again, (end - first) * work.num_microbatches
            for verb in (Verb.FORWARD, backward) if again else (Verb.FORWARD if forward else backward,):
                during = None if record.during is None else verb
                yield replace(record, verb=verb, during=during, times=record.times * times, depths=(first, end))
        head, preference = model.num_layers + 1, plan.objective.preference
        if preference is not None and mesh.cp > 1 and any(head in part for part in plan.schedule.parts(stage)):
            sums_bytes = work.microbatch_size * preference.sums * DTYPE_BYTES["fp64"]
            what, times, of_head = "log-probabilities of answers", work.num_microbatches, (head, head + 1)
            sums = Traffic(Collective.ALL_REDUCE, "cp", sums_bytes, "fp64", Verb.FORWARD, None, what, times)
            yield replace(sums, depths=of_head)

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Divide positions. Attention keeps queries, keys, values and output of this rank, and a number of each query.

        A kernel of torch merges its parts, so "products" keeps nothing of attention.
        """
        if not self.active(run):
            yield from tensors
            return
        for tensor in tensors:
            if not tensor.core:
                yield tensor.divided(self.axis, (Dim.SEQUENCE, Dim.POSITION, Dim.TOKEN))
        model, work = run.model, run.work
        if run.task.documents:
            depths, samples = (1, model.num_layers + 1), (work.microbatch_size, work.seq_len)
            yield SavedTensor(BEGINS, samples, (Dim.SAMPLE, Dim.WHOLE), "int64", depths, once=True)
            # A compiled block is cut at this attention, so it keeps all that it was given.
            numbers = (work.microbatch_size * FEW_DOCUMENTS + 1,)
            more: dict[str, Any] = {"on": COMPILED, "under": BLOCK_INPUTS, "once": True}
            yield SavedTensor(OFFSETS, numbers, (Dim.WHOLE,), "int32", depths, **more)
        heads, groups = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
        widths = {"queries": heads, "keys and values": groups, "output": heads}
        lse, degree = ("log-sum-exp", model.num_heads, WIDE[work.precision]), run.mesh.cp
        for blocks, window in runs_of(model.windows):
            # What a fused kernel computes is what the next matrix keeps. Without such a kernel it is done by tiles.
            tiled = model.dropout > 0 or run.task.documents or model.score_cap > 0 or 0 < window < work.seq_len
            on = {"queries": "", "keys and values": "", "output": "" if tiled or model.values < heads else CPU}
            found = [(what, width, work.precision, on[what], work.seq_len) for what, width in widths.items()]
            found.append((*lse, CPU, work.seq_len))
            rounds = is_memory_efficient(work.precision) and not tiled
            found.append((*lse, CUDA, rounded_up(work.seq_len // degree) * degree if rounds else work.seq_len))
            for what, width, dtype, device, positions in found:
                shape, dims = (work.microbatch_size, positions, width), (Dim.SAMPLE, Dim.POSITION, Dim.COLUMN)
                whole = SavedTensor(f"attn {what}", shape, dims, dtype, blocks, on=device, under=("none", "selective"))
                yield whole.divided(self.axis, (Dim.POSITION,))

    def operators(self, operators: Sequence[LayerOperator], run: Candidate | Plan) -> Iterator[LayerOperator]:
        """Divide positions. Of attention those of the queries: each rank has as many pairs.

        No kernel computes attention as a whole, so it is computed again with whole blocks, and with nothing else.
        """
        for operator in operators:
            again = ("products", "full") if operator.shared else operator.again
            yield replace(operator, again=again).divided(self.axis, (Dim.SEQUENCE, Dim.POSITION))

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Let the part read only this rank's positions, let its attention exchange keys and values, and let a head that
        compares answers add their parts."""
        from codescent.strategies.causal_tiles import balanced_positions  # noqa: PLC0415 - keeps torch out of planning
        from codescent.strategies.ring import Gather, Ring, split_attention  # noqa: PLC0415
        from codescent.strategies.sequence import SplitSamples  # noqa: PLC0415

        plan, index = this_rank.plan, this_rank.coordinates[self.axis]
        reading = cast(Any, part)
        reading.sample_sums = SplitSamples(this_rank.groups[self.axis])
        reading.tokens_T = reading.rows_T = balanced_positions(plan.work.seq_len, plan.mesh.cp, index)
        exchange = (Ring if plan.layout.context == "ring" else Gather)(this_rank.groups[self.axis])
        for layer in part.modules():
            if hasattr(layer, "core"):
                cast(Any, layer).core = partial(split_attention, exchange=exchange)
