"""In: nothing. Out: the sections of a cluster file: each key with its type, default and meaning; the table of the docs.
Does not read a file (files.py does) and does not check a value alone (values.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from typing import Any, Literal

from pydantic import Field

from codescent.clusters.cluster import Software
from codescent.clusters.values import (
    Band,
    Bandwidth,
    CardCurve,
    CardLink,
    Memory,
    NodeCurve,
    NodeLink,
    NumberFormat,
    Overlaps,
    Peak,
)
from codescent.config.keys import Section, Text, auto, key
from codescent.config.words import Key, key_of


def _given(meaning: str, **bounds: Any) -> Any:
    """A key without a default: each cluster says it."""
    return Field(description=meaning, **bounds)


class TopKeys(Section):
    """Above all sections."""

    what: Text | None = auto("the machines, in words")


class DeviceKeys(Section):
    """What computes: a GPU as torch counts devices, or the CPU of a machine. All are alike."""

    spec: Text | None = auto(
        'a device of the table of published ones, such as "A100 SXM4 80 GB": kind, name, memory, bandwidth and peaks '
        "are its own, as far as the file gives no others"
    )
    name: Text | None = auto("what it is called")
    kind: Literal["cuda", "cpu"] | None = auto("which kernels it has: those of a GPU, or of a CPU")
    memory: Memory | None = auto('size of its memory, such as "80GB" or "16GiB"')
    bandwidth: Bandwidth | None = auto('of its memory, such as "2039GB/s"')
    sustained: float = key(1.0, "share of a peak that the largest products reach in training", gt=0, le=1)
    units: int = key(0, "parts of a product that it computes at a time (streaming multiprocessors); 0: unknown", ge=0)
    price_per_hour: float | None = auto("of one device, in any currency", ge=0)
    watts: float | None = auto("of one device under load, with its share of the node", ge=0)


class PeakKeys(Section):
    """FLOP/s of products, dense and summed in fp32 or wider. A number format without one is converted to the next
    wider one: fp8 and fp16 to bf16, bf16 and tf32 to fp32."""

    fp64: Peak | None = auto("double precision")
    fp32: Peak | None = auto("single precision, without TF32")
    tf32: Peak | None = auto("single precision with inputs rounded to TF32")
    bf16: Peak | None = auto("bfloat16")
    fp16: Peak | None = auto("half precision")
    fp8: Peak | None = auto("8 bits")


class NodeKeys(Section):
    """Devices that share a host."""

    devices: int = _given("devices of a node", ge=1, le=4096)
    cards: int = _given("network cards of a node, which its devices share", ge=1, le=4096)
    nodes: int | None = auto("how many nodes there are", ge=1)
    host_bandwidth: Bandwidth | None = auto(
        'of the memory of a node\'s host, which its devices share, such as "400GB/s"; needed to price parallel.offload'
    )


class LinkKeys(Section):
    """Bandwidth of one direction, and latency of a message."""

    inside: NodeLink = _given('of a device to the others of its node, such as "300GB/s,3us"')
    between: CardLink = _given('of a network card to other nodes, such as "25GB/s,5us"')
    bus: NodeLink = _given("of a device to the memory of its host")
    inside_curve: NodeCurve = key(
        [], 'messages that were measured, with their bandwidth, such as [["64KiB", "1GB/s"], ["1MiB", "5GB/s"]]'
    )
    between_curve: CardCurve = key([], "the same of a network card")
    bus_curve: NodeCurve = key([], "the same of the link to the host")
    shared: bool = key(False, "devices of a node cannot reach each other's memory: all send through one bus")


_D = Software()


class SoftwareKeys(Section):
    """A program on these machines: constants, and traits that no config says. `codescent` is this product."""

    product_efficiency: float = key(
        _D.product_efficiency, "share of `device.sustained` that the largest products reach", gt=0, le=4
    )
    attention_efficiency: float = key(
        _D.attention_efficiency, "share of this that products inside of attention reach", gt=0, le=4
    )
    memory_efficiency: float = key(
        _D.memory_efficiency, "share of the memory's bandwidth that copies reach", gt=0, le=4
    )
    inside_efficiency: float = key(
        _D.inside_efficiency, "share of a link's bandwidth that messages inside of a node reach", gt=0, le=4
    )
    between_efficiency: float = key(
        _D.between_efficiency, "share of a card's bandwidth that messages between nodes reach", gt=0, le=4
    )
    collective_s: float = key(_D.collective_s, "seconds of a collective beside its messages", ge=0, le=10)
    hop_s: float = key(_D.hop_s, "seconds of latency of a message, beside that of the link", ge=0, le=10)
    host_s: float = key(_D.host_s, "seconds in which a host launches one operator", ge=0, le=10)
    microbatch_s: float = key(_D.microbatch_s, "seconds of a micro-batch beside its operators and messages", ge=0)
    step_s: float = key(_D.step_s, "seconds of a step beside its micro-batches", ge=0)
    load_s: float = key(_D.load_s, "seconds of a read of samples beside its bytes", ge=0, le=10)
    load_bytes_per_s: float = key(
        _D.load_bytes_per_s, "bytes of batches (int64, fp32) that a rank's loader makes of cached files in a second",
        gt=0,
    )  # fmt: skip
    contention: float = key(_D.contention, "how many times longer a computation takes beside a collective", gt=0)
    imbalance: float = key(
        _D.imbalance, "how many times the mean of the ranks the slowest one computes, with the same work", ge=1, le=100
    )
    held_bytes: float = key(_D.held_bytes, "memory that an empty rank holds", ge=0)
    fragments: float = key(_D.fragments, "share by which an allocator holds more than is in use", ge=0, le=10)
    precision: NumberFormat = key(_D.precision, "number format of products; empty: that of the run")
    block_products: NumberFormat = key(_D.block_products, "that of the products of blocks; empty: that of the others")
    fused: float = key(
        _D.fused, "seconds of element-wise operators for one second of moving their bytes; fused: below 1", gt=0, le=100
    )
    logit_bytes: int = key(
        _D.logit_bytes, "bytes of a logit, if the loss is computed for all tokens at once; 0: in chunks", ge=0, le=64
    )
    joins_outputs: bool = key(
        _D.joins_outputs, "with a pipeline the logits of all micro-batches are kept and joined; needs logit_bytes"
    )
    overlaps: Overlaps = key(
        list(_D.overlaps), "what is sent while it computes: gathers, sums, layers (tensor parallelism in pieces)"
    )
    rings: int = key(_D.rings, "most cards of a node that a collective uses; 0: those of all its ranks there", ge=0)
    by_tensor: bool = key(_D.by_tensor, "weights and gradients are sent tensor by tensor, each with its latency")
    units: Literal["", "again", "kept"] = key(
        _D.units, "gathered weights: again: let go of after each micro-batch; kept: for all of them; empty: as the plan"
    )
    second_products: bool = key(
        _D.second_products, 'with parallel.recompute = "products" every second product of a block is kept'
    )
    compiles: bool = key(_D.compiles, "torch.compile compiles the blocks, which on CUDA keep what the compiler chooses")
    shards_over_cp: bool = key(
        _D.shards_over_cp, "ranks that divide a sequence divide the state, too, if dp_shard divides it"
    )
    gradient_bytes: int = key(_D.gradient_bytes, "bytes of a gradient in memory; 0: as the plan says", ge=0, le=64)
    band: Band = key(list(_D.band), "10 and 90 % quantiles of measured time, relative to predicted")
    memory_band: Band = key(list(_D.memory_band), "the same of measured memory")
    fitted_on: str = key(_D.fitted_on, "the runs on which the constants were fitted; empty: none")


SECTIONS: Mapping[str, type[Section]] = {"device": DeviceKeys, "peaks": PeakKeys, "node": NodeKeys, "links": LinkKeys}
SOFTWARE = "software"
SOURCES = "sources"
WHAT = "what"
FROM_SPEC = (
    "device.name",
    "device.kind",
    "device.memory",
    "device.bandwidth",
    *(f"peaks.{p}" for p in PeakKeys.model_fields),
)
"""Keys whose values `device.spec` gives, where nothing else does."""

KEYS: Mapping[str, Key] = {WHAT: key_of("", WHAT, TopKeys.model_fields[WHAT])} | {
    f"{section}.{name}": key_of(section, name, field)
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
}
"""The keys of each file by "section.key", without those of software."""
SOFTWARE_KEYS: Mapping[str, Key] = {
    name: key_of(SOFTWARE, name, field) for name, field in SoftwareKeys.model_fields.items()
}


def known_key(name: str) -> Key | None:
    """The key of a name such as "links.inside" or "software.NAME.host_s". None: there is none."""
    if name.startswith(f"{SOFTWARE}.") and name.count(".") == 2:
        return SOFTWARE_KEYS.get(name.rpartition(".")[2])
    return KEYS.get(name)


def keys_markdown() -> str:
    """All keys as Markdown, with a heading and a table for each section."""
    titles: Mapping[str, type[Section]] = {**SECTIONS, f"{SOFTWARE}.NAME": SoftwareKeys}
    return "\n\n".join(
        "\n".join([f"### `[{title}]`", "", cleandoc(model.__doc__ or ""), "", *_rows(title, model)])
        for title, model in titles.items()
    )


def _rows(title: str, model: type[Section]) -> list[str]:
    keys = [known_key(f"{title}.{name}") for name in model.model_fields]
    rows = [f"| `{one.name}` | {one.wanted} | {_default(one)} | {one.description} |" for one in keys if one is not None]
    return ["| key | value | default | meaning |", "|---|---|---|---|", *rows]


def _default(of: Key) -> str:
    """In one line: TOML writes a list on several."""
    if not of.default:
        return "needed"
    return f"`{' '.join(of.default.split()).replace('[ ', '[').replace(', ]', ']')}`"
