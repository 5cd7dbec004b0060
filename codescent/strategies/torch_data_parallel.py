"""In: a number of devices of one process. Out: torch's DataParallel: forward passes scattered over copies of the model.
Does not use ranks (replicate does; this is here to be compared with it) and copies nothing itself: `scattered` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codescent.plan import AXES, DTYPE_BYTES, WIDE, Collective, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 8
"""Of an int64: tokens, targets."""


@dataclass(frozen=True)
class DataParallelOptions:
    """`data_parallel`: devices that a rank computes on. `recompute`: how its blocks make activations again."""

    data_parallel: int
    recompute: str


class DataParallel:
    """One process, several devices: the first holds all; in each forward pass its weights are copied to the others and
    the micro-batch is scattered, in each backward pass the gradients are added on the first (torch.nn.DataParallel; Li
    et al. 2020, "PyTorch Distributed", VLDB 13(12), section 2.2).

    Devices that are not there are refused when the device is known, in train/machine.
    """

    axis = ""
    Options = DataParallelOptions
    # None for `prove` to try: its layouts run on any machine, and without CUDA this is refused.
    variants: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, options: DataParallelOptions) -> None:
        self.devices = options.data_parallel
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """More than one rank, samples that do not reach every device, blocks that are tied to the first device."""
        if self.devices == 1:
            return
        mesh, size, key = ask.mesh, ask.work.microbatch_size, f"parallel.data_parallel = {self.devices}"
        if mesh.world_size > 1:
            axes = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1)
            yield (
                f"{key}: torch.nn.DataParallel is one process with all the devices, but the run has {axes} = "
                f"{mesh.world_size} ranks; leave it out: dp_replicate gives each device a rank of its own"
            )
        if size < self.devices:
            yield (
                f"{key}: micro-batches of {size} sample(s) do not reach {self.devices} devices; nearest that would do: "
                f"data_parallel = {size}, or train.microbatch_size = {self.devices}"
            )
        if ask.work.beside:
            yield (
                f"{key}: what this task's samples have beside tokens (lengths) is not scattered; leave it out: "
                "dp_replicate gives each device a rank of its own"
            )
        if self.options.recompute == "full":
            yield (
                f'{key}: parallel.recompute = "full" makes blocks again with the weights of the first device; take '
                'recompute = "selective", or dp_replicate instead of data_parallel'
            )

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """The first device holds everything; copies on the others are there from a forward pass to its backward pass,
        like activations."""
        return tensor

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """A step is the same list: copies travel inside FORWARD and BACKWARD."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """In every micro-batch weights out, samples out, losses in, gradients in; all of it is waited for."""
        if self.devices == 1:
            return
        work = plan.work
        weights_bytes = plan.num_parameters * DTYPE_BYTES[work.precision]
        samples_bytes = 2 * TOKEN_BYTES * work.microbatch_size * work.seq_len
        wide = WIDE[work.precision]
        losses_bytes = self.devices * DTYPE_BYTES[wide]
        forward, backward, precision = Verb.FORWARD, Verb.BACKWARD, work.precision
        for collective, payload_bytes, dtype, verb, what in (
            (Collective.BROADCAST, weights_bytes, precision, forward, "weights"),
            (Collective.SCATTER, samples_bytes, "int64", forward, "tokens and targets"),
            (Collective.GATHER, losses_bytes, wide, forward, "losses"),
            # Zeros for weights that are not trained, too: torch's Broadcast knows no gradient that there is not.
            (Collective.REDUCE, weights_bytes, precision, backward, "gradients"),
        ):
            times, devices = work.num_microbatches, self.devices
            yield Traffic(collective, "", payload_bytes, dtype, verb, None, what, times, devices=devices)

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """The chunk's forward pass becomes one on every device."""
        if self.devices > 1:
            from codescent.strategies.scattered import scatter_  # noqa: PLC0415 - keeps torch out of planning

            scatter_(part, self.devices)

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """They arrive at the first device's weights like those of one device: another strategy's."""
        return None
