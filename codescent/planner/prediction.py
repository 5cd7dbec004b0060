"""In: a plan, a cluster; or JSON. Out: the prediction as JSON, with its bands; what is wrong with such JSON.
Does not run and does not compare it with what was measured (beside.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from codescent.base.amounts import of_bytes, of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.device_kinds import AUTO, kernels_of
from codescent.base.errors import UserError
from codescent.base.typed import Kind, is_number, mistyped
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.files import OWN, load_cluster, software_of
from codescent.config.decided import compiles
from codescent.config.sections import Config
from codescent.cost.price import Price
from codescent.cost.stage_memory import PARTS, Fitting
from codescent.cost.time_parts import NAMES
from codescent.cost.update_time import NO_HOST
from codescent.plan import Plan
from codescent.plan.activations import CPU
from codescent.planner.bands import Band, falls, grows

COMPILED = 0.6
"""Of their bytes, and of their launches, element-wise operators keep so many once they are compiled into one another:
an H100 took 34.7 ms for a step of GPT-2 124M, which is predicted so to 3 %."""
NUMBERS: Mapping[str, Kind] = {
    "cluster": str,
    "step_s": float,
    "tokens_per_s": float,
    "memory_bytes": list,
    "device_kind": str,
}
"""Values of a prediction that other files read, and their types."""
NEEDED = ("cluster", "step_s", "band_s", "parts", "memory_bytes", "band_bytes")
ADDED_PARTS = {"data_s": 0.0}
"""Predictions of earlier versions do not have them."""
HELD = (*PARTS, "total")
LEAST_STEP_S = 1e-9
"""No step takes less. FLOPs of a step divided by it are finite."""
PEAK: Mapping[str, Kind] = {"stage": int, "at": str, "said": str}
"""Where memory is highest (cost/peak.py): the stage, the instruction as in memory.csv, and in words."""


def has_common_step(plan: Plan) -> bool:
    """Whether all ranks take the same steps. Else each is given portions of work, and all of them are simulated."""
    return not plan.layout.hands_out


def not_there(plan: Plan, cluster: Cluster, device: str) -> Iterator[str]:
    """Why a plan cannot run on a cluster. `device`: train.device."""
    ranks, each = plan.world_size * plan.devices, cluster.devices
    if cluster.nodes is not None and ranks > cluster.nodes * each:
        have = f"{counted(cluster.nodes, 'node')} of {counted(each, 'device')}"
        yield f"{cluster.name} has {have}, {cluster.nodes * each} in all; the plan has {ranks:,}"
    if device != AUTO and kernels_of(device) != cluster.device.kind:
        yield f'train.device = "{device}": the devices of {cluster.name} are "{cluster.device.kind}"'


def not_priced(plan: Plan, cluster: Cluster, device: str) -> Iterator[str]:
    """Why a plan has no price on a cluster. `device`: train.device."""
    ranks, each = plan.world_size * plan.devices, cluster.devices
    yield from not_there(plan, cluster, device)
    if ranks > each and ranks % each:
        near = sorted({ranks // each * each, -(-ranks // each) * each})
        words = " or ".join(map(str, near))
        yield f"{ranks:,} devices do not fill nodes of {each}; {words} do, or another node.devices of the cluster"
    yield from without_step(plan)
    if plan.layout.offload != "none":
        if cluster.device.kind == CPU:
            yield f"parallel.offload: the memory of the devices of {cluster.name} is that of their host"
        elif cluster.host_bytes_per_s is None:
            yield f"parallel.offload: {NO_HOST}"


def without_step(plan: Plan) -> Iterator[str]:
    """Why the ranks of a plan have no step together, if they have none."""
    if not has_common_step(plan):
        yield "ranks that are given portions of work have no common step; codescent plan --cluster simulates them"


def as_run(software: Software, config: Config, device: str) -> Software:
    """The software as a config runs it: compiled blocks join their element-wise operators, and launch fewer.

    A model that is compiled as a whole counts as if it kept what operators keep.
    """
    compiled = compiles(config, device)
    if compiled == "none":
        return software
    fused, host_s = min(software.fused, COMPILED), software.host_s * COMPILED
    return replace(software, fused=fused, host_s=host_s, compiles=compiled == "blocks" and device != CPU)


def own_as_run(software: Software, name: str | None, config: Config, cluster: Cluster) -> Software:
    """The software of a cluster as a config runs it. That of another program is as its file says.

    `name`: of the command line; None: codescent.
    """
    return as_run(software, config, cluster.device.kind) if name in (None, OWN) else software


def software_of_run(cluster: Cluster, config: Config, name: str | None = None) -> Software:
    """A software of a cluster, `own_as_run`. Raises UserError: the cluster file has none of this name."""
    return own_as_run(software_of(cluster, name), name, config, cluster)


def cluster_of_run(config: Config) -> Cluster | None:
    """The cluster that run.cluster names; None: it names none. Raises UserError: all problems of the cluster file."""
    if config.run.cluster is None:
        return None
    try:
        return load_cluster(config.run.cluster)
    except UserError as error:
        raise UserError(*(f"run.cluster: {problem}" for problem in error.problems)) from error


def price_json(found: Price) -> dict[str, Any]:
    """A price as JSON: seconds, bytes, shares."""
    flops, band = found.plan.flops(), found.software.band
    mfu, hfu = found.utilization(flops.total_flops), found.utilization(flops.hardware_flops)
    return {
        "cluster": found.cluster.name,
        "fitted_on": found.software.fitted_on,
        "step_s": found.step_s,
        "band_s": list(grows(found.step_s, band)),
        "parts": {name: float(getattr(found.parts, name)) for name in NAMES},
        "tokens_per_s": found.tokens_per_s,
        "band_tokens_per_s": list(falls(found.tokens_per_s, band)),
        "mfu": mfu,
        "band_mfu": list(falls(mfu, band)),
        "hfu": hfu,
        "band_hfu": list(falls(hfu, band)),
        "peak_flops_per_s": found.peak_flops_per_s,
        "memory_bytes": [{**held.parts(), "total": held.total} for held in found.memory],
        "band_bytes": [list(grows(held.total, found.software.memory_band)) for held in found.memory],
        "peak": found.peak and {"stage": found.peak.stage, "at": str(found.peak.instruction), "said": found.peak.words},
        "device_kind": found.cluster.device.kind,
        "device_bytes": found.cluster.device.memory_bytes,
        "verdict": str(found.verdict),
        "fits": found.verdict is not Fitting.TOO_LARGE,
    }


def said_before(prediction: Mapping[str, Any]) -> str:
    """What a run says of its prediction before the first step."""
    sizes = [stage["total"] for stage in prediction["memory_bytes"]]
    fullest = max(range(len(sizes)), key=sizes.__getitem__)
    step, tokens, memory = (
        Band(*prediction["band_s"]).words(of_seconds),
        Band(*prediction["band_tokens_per_s"]).words(of_number),
        Band(*prediction["band_bytes"][fullest]).words(of_bytes),
    )
    return (
        f"predicted on {prediction['cluster']}: {of_seconds(prediction['step_s'])} a step ({step}), "
        f"{of_number(prediction['tokens_per_s'])} tokens/s ({tokens}), {of_bytes(sizes[fullest])} on the fullest "
        f"device ({memory}); in brackets what 8 of 10 such runs measure"
    )


def problem_of(prediction: Mapping[str, Any], stages: int) -> str:
    """Why JSON is no prediction of a plan with so many stages; empty: it is one."""
    if problem := mistyped(prediction, NUMBERS):
        return problem
    if missing := [name for name in NEEDED if prediction.get(name) is None]:
        return f"has no {', no '.join(missing)}"

    if not prediction["step_s"] >= LEAST_STEP_S:
        return f"step_s: must be above 0, at least {LEAST_STEP_S:g}"
    if problem := _peak_problem(prediction.get("peak")):
        return problem
    memory, bands = prediction["memory_bytes"], prediction["band_bytes"]
    if len(memory) != stages or not isinstance(bands, list) or len(bands) != stages:
        return f"memory_bytes, band_bytes: must be lists of {counted(stages, 'stage')}, as the plan has"
    found = [("band_s", prediction["band_s"]), *((f"band_bytes {stage}", band) for stage, band in enumerate(bands))]
    problems = [_band_problem(name, band) for name, band in found]
    problems.append(_sizes_problem("parts", _with_added(prediction["parts"]), NAMES))
    problems += [_sizes_problem(f"memory_bytes {stage}", held, HELD) for stage, held in enumerate(memory)]
    return next(filter(None, problems), "")


def _peak_problem(peak: Any) -> str:
    """None: of an older version, or not known."""
    if peak is None:
        return ""
    wrong = mistyped(peak, PEAK) or next((f"has no {name}" for name in PEAK if peak.get(name) is None), "")
    return wrong and f"peak: {wrong}"


def _band_problem(name: str, band: Any) -> str:
    if isinstance(band, list) and len(band) == 2 and all(map(_is_size, band)) and band[0] <= band[1]:
        return ""
    return f"{name}: given {str(band)[:40]}; must be two numbers, the smaller one first"


def _with_added(parts: Any) -> Any:
    return {**ADDED_PARTS, **parts} if isinstance(parts, Mapping) else parts


def _sizes_problem(name: str, values: Any, wanted: Sequence[str]) -> str:
    if not isinstance(values, Mapping):
        return f"{name}: given {str(values)[:40]}; must be an object"
    wrong = next((one for one in wanted if not _is_size(values.get(one))), None)
    return (
        "" if wrong is None else f"{name}: {wrong}: given {str(values.get(wrong))[:40]}; must be a number, at least 0"
    )


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0
