"""In: parallel.data_parallel, a number of devices. Out: torch.nn.DataParallel as a strategy, to compare it with DDP.
Does not start a rank per device: one process uses all devices. `data_parallel_forward` runs the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from codescent.base.counted import counted
from codescent.base.nearest import divisors
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import AXES, DTYPE_BYTES, WIDE, Collective, Plan, Traffic, Verb
from codescent.plan.activations import CPU, CUDA, SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.operators import LayerOperator
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 8
"""Bytes of an int64: a token, a target."""


class DataParallel(Strategy):
    """One process with several devices. The first device holds weights, gradients and optimizer state.

    Each forward pass copies the weights to the other devices and scatters the micro-batch. Each backward pass sums the
    gradients on the first device and frees the copies (Li et al. 2020, "PyTorch Distributed", VLDB 13(12), section
    2.2). train/machine refuses devices that do not exist, so there are no variants for `prove`.
    """

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.data_parallel is above 1."""
        return run.layout.data_parallel > 1

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse several ranks, fewer samples than devices, extra inputs, and recomputation of whole blocks."""
        devices = candidate.layout.data_parallel
        if devices == 1:
            return
        without = Change({"parallel.data_parallel": 1})
        mesh, size, key = candidate.mesh, candidate.work.microbatch_size, f"parallel.data_parallel = {devices}"
        if mesh.world_size > 1:
            axes = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1)
            yield Refusal(
                f"{key}: torch.nn.DataParallel is one process with all the devices, but the run has {axes} = "
                f"{mesh.world_size} ranks; dp_replicate gives each device its own rank",
                [without],
            )
        elif size < devices:
            enough = [number for number in divisors(candidate.work.global_batch_size) if number >= devices]
            larger = each("train.microbatch_size", [min(enough)]) if enough and candidate.whole_samples else []
            yield Refusal(
                f"{key}: micro-batches of {counted(size, 'sample')} do not reach {devices} devices",
                [Change({"parallel.data_parallel": size}), *larger],
            )
        if candidate.task.extras:
            yield Refusal(
                f"{key}: this task's samples have more than tokens (such as lengths), which is not scattered; "
                "dp_replicate gives each device its own rank",
                [without],
            )
        if candidate.layout.computes_blocks_again:
            yield Refusal(
                f'{key}: parallel.recompute = "{candidate.layout.recompute}" recomputes blocks with the weights of the '
                "first device",
                [Change({"parallel.recompute": "selective"}), without],
            )

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Each micro-batch: weights and samples to the devices, losses and gradients back. None of it overlaps."""
        work, devices, precision = plan.work, plan.layout.data_parallel, plan.work.precision
        weights_bytes, wide = plan.num_parameters * DTYPE_BYTES[precision], WIDE[precision]
        samples_bytes = 2 * TOKEN_BYTES * work.microbatch_size * work.seq_len
        for collective, payload_bytes, dtype, verb, what in (
            (Collective.BROADCAST, weights_bytes, precision, Verb.FORWARD, "weights"),
            (Collective.SCATTER, samples_bytes, "int64", Verb.FORWARD, "tokens and targets"),
            (Collective.GATHER, devices * DTYPE_BYTES[wide], wide, Verb.FORWARD, "losses"),
            # torch's Broadcast sends a gradient for every weight: zeros for those that are not trained.
            (Collective.REDUCE, weights_bytes, precision, Verb.BACKWARD, "gradients"),
        ):
            times = work.num_microbatches
            yield Traffic(collective, "", payload_bytes, dtype, verb, None, what, times, devices=devices)

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Divide samples over the devices. The first one has the most. On a CPU there is one device."""
        devices = run.layout.data_parallel
        for tensor in tensors:
            if devices == 1 or Dim.SAMPLE not in tensor.dims or tensor.on == CPU:
                yield tensor
                continue
            if not tensor.on:
                yield replace(tensor, on=CPU)
            at = tensor.dims.index(Dim.SAMPLE)
            share = -(-tensor.shape[at] // devices)
            yield replace(tensor, on=tensor.on or CUDA, shape=(*tensor.shape[:at], share, *tensor.shape[at + 1 :]))

    def operators(self, operators: Sequence[LayerOperator], run: Candidate | Plan) -> Iterator[LayerOperator]:
        """The samples of the first device, which has the most."""
        for operator in operators:
            at = next((number for number, dim in enumerate(operator.dims) if dim is Dim.SAMPLE), None)
            sizes = list(operator.shape)
            if at is not None:
                sizes[at] = -(-sizes[at] // run.layout.data_parallel)
            yield replace(operator, shape=tuple(sizes))

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Replace the part's forward pass by one that runs on all devices."""
        from codescent.strategies.data_parallel_forward import DataParallelForward  # noqa: PLC0415 - needs torch

        parallel, changed = DataParallelForward(part, this_rank.plan.layout.data_parallel), cast(Any, part)
        changed.forward, changed.set_dropout_context = parallel.forward, parallel.set_dropout_context
