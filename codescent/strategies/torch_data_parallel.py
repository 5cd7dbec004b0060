"""In: a number of devices of one process. Out: torch.nn.DataParallel: forward passes scattered over model replicas.
Does not use ranks (ddp does; this is here to be compared with it) and copies nothing: `data_parallel_forward` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from codescent.plan import AXES, DTYPE_BYTES, WIDE, Collective, Plan, Traffic, Verb
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 8
"""Bytes of an int64: a token, a target."""


class DataParallel(Strategy):
    """One process, several devices. The first holds everything. Each forward pass copies its weights to the others and
    scatters the micro-batch; each backward pass adds the gradients on the first and drops the copies (Li et al. 2020,
    "PyTorch Distributed", VLDB 13(12), section 2.2).

    train/machine refuses devices that are not there, so there are no variants for `prove`.
    """

    def serves(self, run: Candidate | Plan) -> bool:
        """Where parallel.data_parallel asks for several devices."""
        return run.layout.data_parallel > 1

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """More than one rank, samples that do not reach every device, blocks that are tied to the first device."""
        devices = candidate.layout.data_parallel
        if devices == 1:
            return
        mesh, size, key = candidate.mesh, candidate.work.microbatch_size, f"parallel.data_parallel = {devices}"
        if mesh.world_size > 1:
            axes = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1)
            yield (
                f"{key}: torch.nn.DataParallel is one process with all the devices, but the run has {axes} = "
                f"{mesh.world_size} ranks; leave it out: dp_replicate gives each device a rank of its own"
            )
        if size < devices:
            yield (
                f"{key}: micro-batches of {size} sample(s) do not reach {devices} devices; nearest that would do: "
                f"data_parallel = {size}, or train.microbatch_size = {devices}"
            )
        if candidate.task.extras:
            yield (
                f"{key}: what this task's samples have beside tokens (lengths) is not scattered; leave it out: "
                "dp_replicate gives each device a rank of its own"
            )
        if candidate.layout.recompute == "full":
            yield (
                f'{key}: parallel.recompute = "full" makes blocks again with the weights of the first device; take '
                'recompute = "selective", or dp_replicate instead of data_parallel'
            )

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """In every micro-batch weights out, samples out, losses in, gradients in; all of it is waited for."""
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

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """The chunk's forward pass becomes one on every device."""
        from codescent.strategies.data_parallel_forward import DataParallelForward  # noqa: PLC0415 - needs torch

        parallel, changed = DataParallelForward(part, this_rank.plan.layout.data_parallel), cast(Any, part)
        changed.forward, changed.set_dropout_context = parallel.forward, parallel.set_dropout_context
