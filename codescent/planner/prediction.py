"""In: a plan, a cluster; later what a run has measured. Out: the prediction as JSON, and both side by side in words.
Does not run and does not read a run folder (those that call it do)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_bytes, of_change, of_number, of_seconds
from codescent.cost.price import Price
from codescent.cost.stage_memory import Fitting
from codescent.cost.time_parts import NAMES
from codescent.plan import Plan

WARM_UP = 2
"""First steps of a process, which also allocate memory and choose kernels."""
MEMORY_PARTS = {"weights": "weights_bytes", "gradients": "gradients_bytes", "optimizer": "optimizer_bytes"}
"""Parts of a prediction, and the columns of memory.csv that count the same."""


def not_priced(plan: Plan) -> str:
    """Why a plan has no price; "": it has one."""
    if plan.layout.hands_out:
        return "ranks that are given portions of work have no common step; codescent plan --link simulates them"
    return ""


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
    prediction: Mapping[str, Any], steps_s: Sequence[float], memory: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Predicted, measured, and the error of the prediction: of the median step, and of the memory by part.

    Args:
        prediction: of the run.
        steps_s: seconds of the steps of this process, from its first one on.
        memory: the last row of memory.csv of each rank.
    """
    measured = steps_s[WARM_UP:] or steps_s
    if measured:
        yield "step: " + _pair(prediction["step_s"], statistics.median(measured), of_seconds)
    if not memory:
        return
    fullest = max(memory, key=lambda row: float(row["peak_bytes"] or 0))
    stage = max(prediction["memory_bytes"], key=lambda held: float(held["total"]))
    peak = float(fullest["peak_bytes"] or 0)
    if peak:
        yield "memory: " + _pair(stage["total"], peak, of_bytes)
    for part, column in MEMORY_PARTS.items():
        if counted := float(fullest[column] or 0):
            yield f"  {part}: " + _pair(stage[part], counted, of_bytes)


def _pair(predicted: float, measured: float, words: Any) -> str:
    return f"predicted {words(predicted)}, measured {words(measured)}: {of_change(predicted / measured - 1.0)}"
