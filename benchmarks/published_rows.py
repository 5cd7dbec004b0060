"""In: rows of a file of published measurements. Out: for each training row its plan, cluster and software.
Does not price and does not fit (prediction_error.py does). What a config cannot say becomes a trait of the software."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_programs import cut_of, is_of_rank_0, software_of
from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.build import build
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.clusters.link import Link
from codescent.config.sections import Config
from codescent.plan import Plan

FORMAT = "ddt-validation/1"
GIGA = 1e9
INSIDE_S, BETWEEN_S, BUS = 3e-6, 8e-6, Link(25e9, 10e-6)
"""Latency of a link inside a node and between nodes, and the bus of a device: of data sheets, they name no row."""
PCIE_SHARED = 12e9
"""Bytes per second of a PCIe 3 bus, where a row does not know its link."""
LAYER_KINDS = ("llama", "bert")


@dataclass(frozen=True)
class Silicon:
    """What data sheets say of a device, beside what a row says. `sustained`, `units`: see `ClusterDevice`.

    `summing`: how many times faster a sum inside of a node is, because the switches add (NVLink SHARP): its nccl-tests
    reach 0.9 of the link, and those of older switches 0.75.
    """

    fp32: float
    tf32: float | None
    fp8: float | None
    sustained: float
    units: int
    summing: float = 1.0


DEVICES: dict[str, Silicon] = {
    "A100-PCIE": Silicon(19.5e12, 156e12, None, 0.72, 108),
    "A100": Silicon(19.5e12, 156e12, None, 0.775, 108),
    "H100-SXM-96GB": Silicon(67e12, 494e12, 1979e12, 0.55, 132, 1.2),
    "H100": Silicon(67e12, 494e12, 1979e12, 0.635, 132, 1.2),
    "H200": Silicon(67e12, 494e12, 1979e12, 0.635, 132, 1.2),
    "B200": Silicon(80e12, 1100e12, 4500e12, 0.6, 148, 1.2),
    "RTX 3090": Silicon(35.6e12, 35.6e12, None, 0.8, 82),
    "Quadro P4000": Silicon(5.3e12, None, None, 0.8, 14),
    "V100": Silicon(15.7e12, None, None, 0.66, 80),
}
"""By the begin of a name; longer names come first. `sustained` is that of the cluster files. With a power
cap of 500 W it is less, in proportion to the power. It was chosen with the published rows in view, and so were
FRAMEWORKS."""


class UnusableRows(Exception):
    """The file, or rows of it, cannot be used. `problems`: each one."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Row:
    """A training row.

    Attributes:
        data: as in the file.
        plans: those that it may mean: what it does not say may be searched over.
        cluster, software: of its hardware and framework.
    """

    data: Mapping[str, Any]
    plans: tuple[Plan, ...]
    cluster: Cluster
    software: Software
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Its id."""
        return str(self.data["id"])

    @property
    def group(self) -> tuple[str, str]:
        """Hardware and framework: rows that share constants."""
        return str(self.data["hardware"]["name"]), str(self.data["group"])

    @property
    def weight(self) -> float:
        """0: shown and not scored."""
        return float(self.data.get("weight", 1))

    @property
    def relative(self) -> bool:
        """Whether only ratios to other rows of its group count."""
        return self.data.get("score") == "relative"

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step; None: the row has none."""
        measured = self.data["measured"]
        for key in ("step_s", "step_s_derived", "step_s_fit"):
            if measured.get(key):
                return float(measured[key])
        return None

    @property
    def memory_bytes(self) -> float | None:
        """Measured bytes of the fullest device, or of rank 0 (`of_rank_0`); None: the row has none."""
        memory = self.data["measured"].get("memory_gb")
        unit = 2**30 if "GiB" in str(self.data["measured"].get("memory_kind")) else GIGA
        return None if memory is None else float(memory) * unit

    @property
    def of_rank_0(self) -> bool:
        """Whether `memory_bytes` are those of rank 0."""
        return is_of_rank_0(self.data)

    @property
    def ran_out(self) -> bool:
        """Whether the run did not fit in its devices."""
        return bool(self.data["measured"].get("oom"))


def read(file: Path) -> list[dict[str, Any]]:
    """All rows of a file. Raises UnusableRows: it is no such file, or a row lacks what each row has."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableRows([f"{file}: {error}"]) from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise UnusableRows([f'{file}: is no file of the format "{FORMAT}": it has no list "rows"'])
    problems = [
        f"{file}: row {number}: needs id, type and group"
        for number, row in enumerate(found["rows"])
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("id", "type", "group"))
    ]
    if problems:
        raise UnusableRows(problems)
    return list(found["rows"])


def training_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of type train_step and feasibility. Raises UnusableRows: each row that makes no plan, and why."""
    found, problems = [], []
    for data in rows:
        if data["type"] not in ("train_step", "feasibility"):
            continue
        try:
            found.append(row_of(data))
        except (KeyError, TypeError, ValueError, UserError) as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"row {data['id']}: {said}")
    if problems:
        raise UnusableRows(problems)
    return found


def row_of(data: Mapping[str, Any]) -> Row:
    """A training row. Raises KeyError, TypeError, ValueError or UserError: it makes no plan."""
    plans = []
    for config, ranks in configs(data):
        try:
            plans.append(build(config, None, ranks))
        except UserError:
            if not plans and (config, ranks) == list(configs(data))[-1]:
                raise
    if not plans:
        layout = data["layout"]
        words = f"its {layout['global_batch']} samples are not dp = {layout.get('dp') or 1} times whole micro-batches"
        raise ValueError(f"{words} of {layout.get('micro_batch') or '1, 2 or 4'}")
    row = Row(data, tuple(plans), cluster_of(data["hardware"]), software_of(data))
    if row.step_s is None and row.memory_bytes is None and not row.ran_out and row.weight and not _job(data):
        raise ValueError("has no measured step_s, step_s_derived or memory_gb")
    return row


def _job(data: Mapping[str, Any]) -> bool:
    """Whether the row has the time of a whole job alone."""
    return "job_minutes" in data["measured"]


def configs(data: Mapping[str, Any]) -> Iterator[tuple[Config, int]]:
    """The configs that a row may mean, with their number of ranks."""
    layout = data["layout"]
    sizes = [layout["micro_batch"]] if layout.get("micro_batch") else [1, 2, 4]
    pipeline, model = int(layout.get("pp") or 1), data["model"]
    each = int(model["layers"]) // pipeline
    unknown = str(layout.get("schedule")).endswith(("?", "or_interleaved"))
    chunks = [layout.get("virtual_stages") or 1]
    if unknown and pipeline > 1 and chunks == [1]:
        chunks = [1, *(number for number in (2, 3, 4, 6) if each % number == 0)]
    share, left = divmod(int(layout["global_batch"]), int(layout.get("dp") or 1))
    if left:
        return
    if str(data["group"]).startswith("torchtitan") and pipeline > 1 and not layout.get("micro_batch"):
        sizes = [share // pipeline]  # its default: as many micro-batches as stages
    for size in sizes:
        for chunk in chunks:
            if share % size == 0 and (chunk == 1 or share // size % pipeline == 0):
                yield _config(data, int(size), int(chunk))


def _config(data: Mapping[str, Any], microbatch: int, chunks: int) -> tuple[Config, int]:
    model, layout = data["model"], data["layout"]
    kind = next((one for one in LAYER_KINDS if one in model["arch"]), "gpt2")
    sizes: dict[str, Any] = {
        "kind": kind,
        "num_layers": model["layers"],
        "hidden_dim": model["hidden"],
        "num_heads": model["heads"],
        "ffn_dim": model["ffn"],
        "vocab_size": model["vocab"],
        "seq_len": model["seq"],
    }
    if kind == "llama":
        sizes |= {"num_kv_heads": model["kv_heads"], "tie_head": bool(model.get("tied_embeddings"))}
    elif _attention_is_unfused(layout):
        sizes["dropout"] = 0.1  # with dropout no kernel computes attention as a whole
    degrees = {axis: int(layout.get(axis) or 1) for axis in ("dp", "tp", "pp", "cp")}
    parallel: dict[str, Any] = {axis: degrees[axis] for axis in ("tp", "pp", "cp")}
    parallel |= _zero(layout, degrees["dp"], data["hardware"]) | {"recompute": _recompute(layout)}
    if str(data["group"]).startswith("torchtitan") and parallel.get("dp_shard", 1) > 1:
        parallel["reduce_dtype"] = "fp32"  # its default
    if degrees["tp"] > 1:
        parallel["sequence_parallel"] = bool(layout.get("sp"))
    if degrees["pp"] > 1:
        parallel |= {"schedule": "interleaved", "virtual_stages": chunks} if chunks > 1 else {"schedule": "1f1b"}
        parallel |= {"cut": cut_of(data, degrees["pp"] * chunks)}
    precision = "fp32" if str(layout.get("precision")).startswith(("fp32", "tf32")) else "bf16"
    train = {"global_batch_size": layout["global_batch"], "microbatch_size": microbatch, "precision": precision}
    sections = {"model": sizes, "data": {"corpus": "synthetic"}, "train": train, "parallel": parallel}
    try:
        return Config.model_validate(sections), math.prod(degrees.values())
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        raise ValueError(wrong) from error


def _zero(layout: Mapping[str, Any], replicas: int, hardware: Mapping[str, Any]) -> dict[str, Any]:
    stage = layout.get("zero") or 0
    if stage == "hsdp":
        inside = min(replicas, int(hardware["gpus_per_node"]))
        return {"dp_replicate": replicas // inside, "dp_shard": inside}
    if not stage or replicas == 1:
        return {"dp_replicate": replicas}
    return {"dp_replicate": 1, "dp_shard": replicas, "zero_stage": int(stage)}


def _attention_is_unfused(layout: Mapping[str, Any]) -> bool:
    attention = str(layout.get("attention"))
    return attention.startswith("unfused") and "SDPA" not in attention


def _recompute(layout: Mapping[str, Any]) -> str:
    """torchtitan's "selective_op" computes every second product again; "products" is nearest. What Megatron's
    "selective" computes again is a part of attention, less than any of our kinds computes."""
    words = str(layout.get("recompute")).split("(")[0].strip(" ?")
    return {"full": "full", "selective_op": "products"}.get(words, "none")


def cluster_of(hardware: Mapping[str, Any]) -> Cluster:
    """The machines of a row. Raises KeyError: its device is not known."""
    name = str(hardware["name"])
    found = next((one for begin, one in DEVICES.items() if name.startswith(begin)), None)
    if found is None:
        raise ValueError(f"hardware {name!r} is not known; those that are: {', '.join(DEVICES)}")
    peaks = {"fp32": found.fp32, "tf32": found.tf32, "fp8": found.fp8}
    if hardware.get("peak_bf16_tflops"):
        peaks["bf16"] = float(hardware["peak_bf16_tflops"]) * 1e12
    memory, moved = float(hardware["mem_gb"]) * GIGA, float(hardware["hbm_gbs"]) * GIGA
    known = {precision: peak for precision, peak in peaks.items() if peak}
    device = ClusterDevice(name, "cuda", round(memory), moved, known, found.sustained, found.units)
    each, links = int(hardware["gpus_per_node"]), hardware["links"]
    inside = float(links["intra"].get("GBps_per_gpu_unidir") or PCIE_SHARED / GIGA) * GIGA * found.summing
    between = float(links["inter"].get("GBps_per_gpu_unidir") or 1.0) * GIGA
    if "fits" in str(links["inter"].get("type")):  # it was measured with messages: that is what reaches
        between /= Software().between_efficiency
    shares = "no P2P" in str(links["intra"].get("type"))
    link = Link(inside, INSIDE_S), Link(between, BETWEEN_S), BUS
    return Cluster(name, "", device, each, each, *link, shares_inside=shares)
