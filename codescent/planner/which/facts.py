"""In: a config, its devices. Out: `RunFacts`: the numbers by which the five questions of docs/which.md are answered.
Does not choose a layout (layout_rules.py does) and builds no plan of several ranks (trials.py does)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.errors import UserError
from codescent.base.nearest import divisors
from codescent.base.refusal import Change, Value
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.build.resolve import resolve
from codescent.config.decided import with_samples
from codescent.config.effects import value_of
from codescent.cost.activations import activations_bytes, is_known
from codescent.cost.stage_memory import FITS, block_bytes
from codescent.plan import AXES, Mesh, Placement, Plan
from codescent.plan.activations import CPU, CUDA
from codescent.plan.state import StateBytes, state_bytes

if TYPE_CHECKING:
    from codescent.config.sections import Config

NARROW_BYTES = 2
"""F/W counts two bytes and two FLOPs a parameter. In fp32 messages are twice as large (docs/which.md, "Old cards")."""
NVLINK_BYTES_PER_S = 1e11
"""In one direction. NVLink of a V100 carries 150 GB/s, PCIe 5.0 x16 carries 63 GB/s (their specifications)."""
MICROBATCH = "train.microbatch_size"
RECOMPUTE, OFFLOAD = "parallel.recompute", "parallel.offload"


@dataclass(frozen=True)
class Devices:
    """The machines of a run, in a few numbers. All are alike.

    Attributes:
        memory_bytes: of a device.
        per_host: devices of a host.
        flops_per_s: that a device really computes: F of docs/which.md.
        link_bytes_per_s: of a host to others, in one direction. Its ranks share it.
        inside_bytes_per_s: of a device to the others of its host. None: what stays in a host takes no time.
    """

    memory_bytes: float
    per_host: int
    flops_per_s: float
    link_bytes_per_s: float
    inside_bytes_per_s: float | None = None

    @property
    def usable_bytes(self) -> float:
        """What an estimate may take of the memory."""
        return FITS * self.memory_bytes


@dataclass(frozen=True)
class RankHolds:
    """Bytes of a rank: `together` and `activations` of `codescent plan`, and a block that is computed again."""

    state: float
    activations: float
    block: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.activations + self.block


@dataclass(frozen=True)
class OneDevice:
    """The run on one device, with a micro-batch of one sample.

    Attributes:
        kept: without recompute; None: build refuses one rank, so nothing is known.
        again: with recompute = "full".
        weights, gradients, optimizer: of one micro-batch, which has the smallest gradients.
        matrices: weights and gradients of the largest block.
    """

    kept: RankHolds | None = None
    again: RankHolds | None = None
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    matrices: float = 0.0


@dataclass(frozen=True)
class RunFacts:
    """The numbers by which the questions are answered.

    Attributes:
        devices: of the run.
        ranks, samples, sample_tokens: of the run, of a step, of a sample.
        layers, precision: of the model, of the run.
        kind: of the devices, whose activations count.
        given: keys that keep their value, with it.
        seldom: replicas send seldom or by themselves, by keys of the config: no network is too slow for them.
        one: the run on one device.
    """

    devices: Devices
    ranks: int
    samples: int
    sample_tokens: int
    layers: int
    precision: str
    kind: str
    given: Mapping[str, Value]
    seldom: bool
    one: OneDevice

    @property
    def per_host(self) -> int:
        """Ranks of a host: G of docs/which.md."""
        return min(self.devices.per_host, self.ranks)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.per_host

    @property
    def widths(self) -> float:
        """How many times two bytes a number has."""
        return DTYPE_BYTES[self.precision] / NARROW_BYTES

    @property
    def between_need(self) -> float:
        """F/W between hosts: tokens of a micro-batch that hide what is sent (question 4)."""
        each = self.devices.link_bytes_per_s / self.per_host
        return self.widths * self.devices.flops_per_s / each

    @property
    def inside_need(self) -> float:
        """F/W inside a host. 0: its link is not given."""
        inside = self.devices.inside_bytes_per_s
        return self.widths * self.devices.flops_per_s / inside if inside else 0.0

    @property
    def rank_tokens(self) -> float:
        """Tokens of a step on a rank. With fewer samples than ranks tp lets several ranks of a host work on one."""
        several = [degree for degree in sorted(divisors(self.per_host)) if self.samples * degree >= self.ranks]
        return self.samples * self.sample_tokens * (several or [self.per_host])[0] / self.ranks

    @property
    def few_samples(self) -> bool:
        """Whether not every rank has a sample of its own (question 5)."""
        return self.samples % self.ranks != 0

    @property
    def is_fast(self) -> bool:
        """Whether the network between hosts is fast for this run (question 4)."""
        return self.hosts == 1 or self.seldom or self.rank_tokens >= self.between_need

    @property
    def has_nvlink(self) -> bool:
        """Whether tp may divide the work of a host."""
        inside = self.devices.inside_bytes_per_s
        return inside is None or inside >= NVLINK_BYTES_PER_S

    @property
    def has_slow_bus(self) -> bool:
        """Whether devices of a host are to each other as hosts on a slow network."""
        return self.per_host > 1 and not self.has_nvlink and self.rank_tokens < self.inside_need

    @property
    def least_tp(self) -> int:
        """Over so many ranks of a host a single block must be divided (question 2). 1: it fits.

        More than a host has: no layout of the page serves, because tp stays inside of hosts.
        """
        room = self.devices.usable_bytes
        enough = (degree for degree in sorted(divisors(self.per_host)) if self.one.matrices / degree <= room)
        return next(enough, max(2, math.ceil(self.one.matrices / room)))

    def least_bytes(self, mesh: Mesh, stage: int, *, offload: bool) -> float:
        """A rank holds at least so much: state and activations divided equally over all that divide them.

        `stage`: zero_stage. Gradients of stage 1 and weights of stages 1 and 2 are whole on each shard.
        """
        one, parts = self.one, mesh.tp * mesh.pp
        sharded = one.optimizer * (not offload) + one.gradients * (stage > 1) + one.weights * (stage > 2)
        whole = one.gradients * (stage <= 1) + one.weights * (stage <= 2)
        again = one.again.activations if one.again else 0.0
        return sharded / (parts * mesh.dp_shard) + whole / parts + again / (parts * mesh.cp)


def facts_of(
    config: Config, vocab_size: int | None, ranks: int, devices: Devices, given: Collection[str], one: OneDevice
) -> RunFacts:
    """The facts of a run. `config`: with defaults for what is not given.

    Raises UserError: model or task have problems.
    """
    resolved, parallel = resolve(config, vocab_size), config.parallel
    return RunFacts(
        devices=devices,
        ranks=ranks,
        samples=with_samples(config, resolved.sample_tokens).train.global_batch_size,
        sample_tokens=resolved.sample_tokens,
        layers=resolved.model.num_layers,
        precision=config.train.precision,
        kind=kind_of(config),
        given={key: value_of(config, key) for key in given},
        seldom=bool(parallel.average_every) or parallel.gossip != "none",
        one=one,
    )


def kind_of(config: Config) -> str:
    """The kind of the run's devices. A device that is not said is a GPU, as on docs/which.md."""
    return CPU if config.train.device == CPU else CUDA


def held_by(plan: Plan, kind: str) -> RankHolds:
    """What the fullest rank holds. What is not declared on a GPU counts as on a CPU (`is_known`)."""
    kind = kind if is_known(plan, kind) else CPU
    firsts = [plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp)]
    again = max(block_bytes(plan, stage, rank, kind) for stage, rank in enumerate(firsts))
    return RankHolds(state_bytes(plan).device_bytes, activations_bytes(plan, kind), again)


def on_one_device(config: Config, vocab_size: int | None) -> OneDevice:
    """The run on one device. `config`: with defaults for what is not given, whose degrees become 1."""
    whole: dict[str, Value] = {**{f"parallel.{axis}": 1 for axis in AXES}, MICROBATCH: 1}
    kind = kind_of(config)

    def planned(values: Mapping[str, Value]) -> Plan | None:
        try:
            return build(changed(config, Change({**whole, **values})), vocab_size, 1)
        except (UserError, ValueError):  # one rank is refused, such as by parallel.cut; then each plan is tried
            return None

    kept, again, least = (planned(values) for values in ({RECOMPUTE: "none"}, {RECOMPUTE: "full"}, {MICROBATCH: None}))
    state = StateBytes(0, 0, 0) if least is None else state_bytes(least)
    return OneDevice(
        None if kept is None else held_by(kept, kind),
        None if again is None else held_by(again, kind),
        state.weights_bytes,
        state.gradients_bytes,
        state.optimizer_bytes,
        0.0 if kept is None else _largest_block(kept),
    )


def _largest_block(plan: Plan) -> float:
    """Bytes of the weights and gradients of the largest block."""
    sizes = dict.fromkeys(range(1, plan.model.num_layers + 1), 0.0)
    for tensor in plan.tensors:
        depth, *others = tensor.parameter.depths
        if not others and depth in sizes:
            gradient = DTYPE_BYTES[tensor.gradient_dtype] if tensor.parameter.trained else 0
            weights = replace(tensor, weights=Placement()).weights_bytes(Mesh())
            sizes[depth] += weights + tensor.parameter.numel * gradient
    return max(sizes.values())
