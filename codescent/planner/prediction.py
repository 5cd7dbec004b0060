"""In: a plan, a cluster; later what a run has measured. Out: the prediction as JSON, and both side by side in words.
Does not run and does not read a run folder (those that call it do)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from codescent.base.amounts import of_bytes, of_change, of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.files import OWN, load_cluster, software_of
from codescent.config.decided import compiles
from codescent.config.sections import Config
from codescent.cost.price import Price
from codescent.cost.stage_memory import Fitting
from codescent.cost.time_parts import NAMES
from codescent.plan import Plan

COMPILED = 0.6
"""Of their bytes, and of their launches, element-wise operators keep so many once they are compiled into one another:
an H100 took 34.7 ms for a step of GPT-2 124M, which is predicted so to 3 %."""
WARM_UP = 2
"""First steps of a process, which also allocate memory and choose kernels."""
MEMORY_PARTS = {"weights": "weights_bytes", "gradients": "gradients_bytes", "optimizer": "optimizer_bytes"}
"""Parts of a prediction, and the columns of memory.csv that count the same."""


def not_priced(plan: Plan, cluster: Cluster, device: str) -> Iterator[str]:
    """Why a plan has no price on a cluster. `device`: train.device."""
    ranks, each = plan.world_size * plan.devices, cluster.devices
    if cluster.nodes is not None and ranks > cluster.nodes * each:
        have = f"{counted(cluster.nodes, 'node')} of {counted(each, 'device')}"
        yield f"{cluster.name} has {have}, {cluster.nodes * each} in all; the plan has {ranks:,}"
    if ranks > each and ranks % each:
        near = sorted({ranks // each * each, -(-ranks // each) * each})
        words = " or ".join(map(str, near))
        yield f"{ranks:,} devices do not fill nodes of {each}; {words} do, or another node.devices of the cluster"
    if device not in ("auto", cluster.device.kind):
        yield f'train.device = "{device}": the devices of {cluster.name} are "{cluster.device.kind}"'
    if plan.layout.hands_out:
        yield "ranks that are given portions of work have no common step; codescent plan --link simulates them"
    if plan.layout.offload != "none":
        yield "parallel.offload: how long the update in host memory takes is not known"


def cluster_of_run(config: Config) -> Cluster | None:
    """The cluster that run.cluster names; None: it names none. Raises UserError: all problems of the cluster file."""
    if config.run.cluster is None:
        return None
    try:
        return load_cluster(config.run.cluster)
    except UserError as error:
        raise UserError(*(f"run.cluster: {problem}" for problem in error.problems)) from error


def software_of_run(cluster: Cluster, config: Config, name: str | None = None) -> Software:
    """A software of a cluster as a config runs it: in codescent compiled blocks join their element-wise operators, and
    launch fewer.

    `name`: see `software_of`; None: codescent. Raises UserError: the cluster file has no software of this name.
    """
    software = software_of(cluster, name)
    if name not in (None, OWN) or not compiles(config, cluster.device.kind):
        return software
    return replace(software, fused=min(software.fused, COMPILED), host_s=software.host_s * COMPILED)


def price_json(found: Price) -> dict[str, Any]:
    """A price as JSON: seconds, bytes, shares."""
    flops = found.plan.flops()
    return {
        "cluster": found.cluster.name,
        "fitted_on": found.software.fitted_on,
        "step_s": found.step_s,
        "band_s": [share * found.step_s for share in found.software.band],
        "parts": {name: float(getattr(found.parts, name)) for name in NAMES},
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.utilization(flops.total_flops),
        "hfu": found.utilization(flops.hardware_flops),
        "peak_flops_per_s": found.peak_flops_per_s,
        "memory_bytes": [{**vars(held), "total": held.total} for held in found.memory],
        "device_bytes": found.cluster.device.memory_bytes,
        "verdict": str(found.verdict),
        "fits": found.verdict is not Fitting.TOO_LARGE,
    }


def said_before(prediction: Mapping[str, Any]) -> str:
    """What a run says of its prediction before the first step."""
    low, high = prediction["band_s"]
    most = max(stage["total"] for stage in prediction["memory_bytes"])
    return (
        f"predicted on {prediction['cluster']}: {of_seconds(prediction['step_s'])} a step ({of_seconds(low)} to "
        f"{of_seconds(high)}), {of_number(prediction['tokens_per_s'])} tokens/s, {of_bytes(most)} on the fullest device"
    )


def beside(
    prediction: Mapping[str, Any], steps_s: Sequence[float], memory: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    """Predicted, measured, and the error of the prediction: of the median step, and of the memory by part.

    Args:
        prediction: of the run.
        steps_s: seconds of the steps of this process, from its first one on.
        memory: by stage, a row of memory.csv: of the rank whose peak is the highest.
    """
    measured = steps_s[WARM_UP:] or steps_s
    if measured:
        yield "step: " + _pair(prediction["step_s"], statistics.median(measured), of_seconds)
    if not memory:
        return
    stage = max(memory, key=lambda one: float(memory[one]["peak_bytes"] or 0))
    counts, held = memory[stage], prediction["memory_bytes"][stage]
    total = float(held["total"])
    if counts["reserved_bytes"]:  # on CUDA the peak is what tensors take
        total -= held["device"] + held["fragments"]
    if peak := float(counts["peak_bytes"] or 0):
        yield "memory: " + _pair(total, peak, of_bytes)
    for part, column in MEMORY_PARTS.items():
        if size := float(counts[column] or 0):
            yield f"  {part}: " + _pair(held[part], size, of_bytes)


def _pair(predicted: float, measured: float, words: Any) -> str:
    return f"predicted {words(predicted)}, measured {words(measured)}: {of_change(predicted / measured - 1.0)}"
