"""In: nothing. Out: the dataclasses of a cluster: device, node, links, software, with what each number is.
Does not read files (files.py does) and does not compute a time (cost does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from codescent.base.errors import UserError
from codescent.clusters.link import Link

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
"""Number formats of products."""

SLOWER = {"fp8": "bf16", "fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}
"""Where a device has no rate for a number format, it has that of this one: it converts."""

OVERLAPS = ("gathers", "sums", "layers")
"""What a program may send while it computes. "gathers": the weights of the next block, the gradients of the last one.
"sums": gradients that all replicas sum. "layers": what ranks of a layer sum or gather, cut into pieces."""

UNITS = ("", "again", "kept")
"""Values of `Software.units`."""


@dataclass(frozen=True)
class ClusterDevice:
    """What computes: a GPU as torch counts devices, or the CPU of a machine.

    Attributes:
        name: such as "A100 SXM4 80 GB".
        kind: which kernels it has: "cpu", or "cuda", whose kernels all GPUs have (base/device_kinds.py).
        memory_bytes, memory_bytes_per_s: size and bandwidth of its memory.
        peaks: FLOP/s of dense products, by number format (PRECISIONS).
        sustained: the share of a peak that the largest products reach in training: the clock falls under load.
        units: how many parts of a product it computes at a time (streaming multiprocessors); 0: not known.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    peaks: Mapping[str, float]
    sustained: float = 1.0
    units: int = 0

    def peak(self, precision: str) -> float:
        """FLOP/s of products in a number format, or in the one to which it is converted.

        Raises UserError: neither is known.
        """
        return self.peaks[self.format_of(precision)]

    def format_of(self, precision: str) -> str:
        """The number format in which it computes another one. Raises UserError: see `peak`."""
        found = precision
        while found not in self.peaks and found in SLOWER:
            found = SLOWER[found]
        if found not in self.peaks:
            known = ", ".join(self.peaks)
            raise UserError(f"{self.name}: FLOP/s in {precision} are not known, only in {known}; give peaks.{found}")
        return found


@dataclass(frozen=True)
class Software:
    """What a program makes of a machine: constants, and traits that no config says.

    The defaults of the constants are global, the same for each device: docs/prices.md has the source of each. Those of
    the traits are what codescent does.

    Attributes:
        product_efficiency: the share of what a device sustains that products in a step reach.
        attention_efficiency: the same of products inside of attention, relative to other products.
        memory_efficiency: the share of a memory's bandwidth that copies reach.
        inside_efficiency, between_efficiency: the share of a link's bandwidth that messages reach, inside of a node and
            between nodes.
        collective_s: seconds of a collective beside its messages.
        hop_s: seconds of latency of a message, beside that of the link.
        host_s: seconds in which a host launches one operator.
        microbatch_s: seconds of a micro-batch beside its operators and messages, on each stage.
        step_s: seconds of a step beside its micro-batches.
        load_s: seconds of a read of a rank's loader beside its bytes.
        load_bytes_per_s: bytes of batches that a rank's loader makes out of files in the page cache, in a second.
        contention: how many times longer a computation takes while a collective runs beside it.
        imbalance: how many times as long as the mean of the ranks the slowest one computes, with the same work.
        held_bytes: memory of a device that holds nothing yet: context, libraries, communicators.
        fragments: the share by which an allocator holds more than is in use.
        precision: number format of products; "": that of the run.
        block_products: that of the matrices of blocks; "": that of other products.
        fused: seconds of element-wise operators for one second of moving their bytes: less than 1 where they are
            compiled into one another, more where their arithmetic takes longer.
        logit_bytes: bytes of a logit while the loss is computed, if it is computed for all tokens at once; 0: in
            chunks, as the plan says.
        joins_outputs: with a pipeline the last stage keeps the logits of all micro-batches until the step ends, and
            joins them then. Only logits that are computed at once can be kept (`logit_bytes`).
        overlaps: which of OVERLAPS it does.
        rings: how many cards of a node a collective uses at most; 0: those of all its ranks on the node.
        by_tensor: gradients are summed, and weights gathered, tensor by tensor: each has the latency of its own.
        units: what becomes of weights that dp_shard divides, once they are gathered. "": what the plan says. "again":
            they are let go of after each micro-batch, and gradients scattered. "kept": they stay for all micro-batches,
            and so do whole gradients in fp32.
        second_products: where parallel.recompute is "products", every second product of a block is kept, and the
            others are computed again. The product itself keeps those before attention and activation.
        compiles: torch.compile compiles the blocks. On CUDA they then keep what the compiler chooses.
        shards_over_cp: ranks that divide a sequence also divide the state of what dp_shard divides.
        gradient_bytes: bytes of each gradient that a device holds; 0: those of the plan. With sums in fp32 beside
            gradients in bf16 they are 6. With zero_stage 1 they are then whole, for one micro-batch, too.
        band: the 10 and 90 % quantiles of measured time, relative to predicted, of the runs it was fitted on.
        memory_band: the same of measured memory.
        fitted_on: those runs, in words.
    """

    product_efficiency: float = 1.0
    attention_efficiency: float = 0.65
    memory_efficiency: float = 0.8
    inside_efficiency: float = 0.75
    between_efficiency: float = 0.75
    collective_s: float = 1e-5
    hop_s: float = 4e-6
    host_s: float = 3e-5
    microbatch_s: float = 1e-3
    step_s: float = 1e-3
    load_s: float = 5e-4
    load_bytes_per_s: float = 2.3e9
    contention: float = 1.15
    imbalance: float = 1.0
    held_bytes: float = 1.5e9
    fragments: float = 0.03
    precision: str = ""
    block_products: str = ""
    fused: float = 1.0
    logit_bytes: int = 0
    joins_outputs: bool = False
    overlaps: tuple[str, ...] = ("gathers", "sums")
    rings: int = 0
    by_tensor: bool = False
    units: str = ""
    second_products: bool = False
    compiles: bool = False
    shards_over_cp: bool = False
    gradient_bytes: int = 0
    band: tuple[float, float] = (0.92, 1.32)
    memory_band: tuple[float, float] = (0.88, 1.24)
    fitted_on: str = ""


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Attributes:
        name: of its file.
        what: in words.
        device: each one is like it.
        devices: of a node.
        cards: network cards of a node. Its devices share them.
        inside: a device's link to the others of its node. Bytes are those of one direction.
        between: a card's link to other nodes.
        bus: a device's link to the memory of its host.
        shares_inside: the devices of a node send through one bus, because they cannot reach each other's memory.
        nodes: how many there are; None: not said.
        device_hour: the price of a device for an hour; None: not said.
        watts: of a device under load, with its share of the node; None: not said.
        software: by name.
        sources: where each value is from, by key.
        hosts: by node, the cards of single nodes that have other ones than `between`.
        host_bytes_per_s: bandwidth of the memory of a node's host, which its devices share; None: not said.
    """

    name: str
    what: str
    device: ClusterDevice
    devices: int
    cards: int
    inside: Link
    between: Link
    bus: Link
    shares_inside: bool = False
    nodes: int | None = None
    device_hour: float | None = None
    watts: float | None = None
    software: Mapping[str, Software] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[int, Link] = field(default_factory=dict)
    host_bytes_per_s: float | None = None

    def card_of(self, node: int) -> Link:
        """Each network card of a node."""
        return self.hosts.get(node, self.between)

    def reached(self, software: Software) -> Cluster:
        """The same machines, with the links as a program reaches them: the bandwidth of its messages, and the latency
        of each."""
        inside, between = software.inside_efficiency, software.between_efficiency
        return replace(
            self,
            inside=_reached(self.inside, inside, software.hop_s),
            between=_reached(self.between, between, software.hop_s),
            hosts={node: _reached(card, between, software.hop_s) for node, card in self.hosts.items()},
        )


def _reached(link: Link, efficiency: float, hop_s: float) -> Link:
    share = link.shared(efficiency)
    curve = tuple(one.later(hop_s) for one in share.curve)
    return replace(share, latency_s=link.latency_s + hop_s, curve=curve)
