"""In: rows of published measurements. Out: predictions of time, memory, collectives and orders, each with its error.
Does not read files (published_rows.py does) and does not print (prediction_error.py does)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from published_rows import Row, UnusableRows, row_of

from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.clusters.link import Link
from codescent.cost.collective_time import seconds
from codescent.cost.lanes import Kind, lanes_of
from codescent.cost.price import Price, memory_of, price
from codescent.cost.simulate import Costs, simulate
from codescent.cost.stage_memory import Fitting
from codescent.plan import Instruction, Mesh, Plan, Traffic, Verb
from codescent.plan.pipeline import pipeline
from codescent.plan.traffic import Collective
from codescent.planner.fitted import CONSTANTS, Constant, Fitted, MeasuredRun, changed, fit, most_telling

FEWEST, MOST_CONSTANTS, ROWS_EACH = 4, 8, 3
"""Groups of fewer rows are not calibrated. A constant needs ROWS_EACH rows, but two are always fitted."""
DIFFERENT = 0.03
"""Measured times that differ by less have no order."""
SAME = 1e-3
"""A training row whose time differs by less from that of a candidate is the same run."""
MEBI = 2**20
EXACT = 1e-6
"""Makespans must agree to it."""


@dataclass(frozen=True)
class Error:
    """A prediction beside a measurement.

    Attributes:
        kind: "time, uncalibrated", "memory", ...
        weight: 0: shown and not scored.
    """

    kind: str
    group: str
    name: str
    measured: float
    predicted: float
    weight: float = 1.0

    @property
    def relative(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0


@dataclass
class Priced:
    """A row with the plan that it most likely means: the fastest one that fits, with constants of the start."""

    row: Row
    plan: Plan
    first: Price
    run: MeasuredRun | None


def priced(row: Row) -> Priced:
    """Choose a plan. What was measured has no part in it."""
    found = [(price(plan, row.cluster, row.software), plan) for plan in row.plans]
    fitting = [one for one in found if one[0].verdict is not Fitting.TOO_LARGE]
    best, plan = min(fitting or found, key=lambda one: one[0].step_s if fitting else one[0].memory[0].total)
    step_s, weight = row.step_s, 1.0 if row.weight else 0.0
    run = None if step_s is None else MeasuredRun(plan, row.cluster, row.software, step_s, weight)
    return Priced(row, plan, best, run)


def by_group(rows: Sequence[Priced]) -> dict[tuple[str, str], list[Priced]]:
    """Rows that share constants."""
    found: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for one in rows:
        found[one.row.group].append(one)
    return found


def constants_of(runs: Sequence[MeasuredRun]) -> tuple[Constant, ...]:
    """Those that are fitted to so many runs: no more than a third as many."""
    return most_telling(runs, max(2, min(MOST_CONSTANTS, len(runs) // ROWS_EACH)))


def uncalibrated(rows: Sequence[Priced], *, tuned: bool) -> Iterator[Error]:
    """Times with constants of the start; `tuned`: with those that all other groups give."""
    with_times = [one for one in rows if one.run is not None]
    scored = [one for one in with_times if one.row.weight and not one.row.relative]
    fitted = fit([one.run for one in scored if one.run is not None]) if tuned and scored else None
    for one in with_times:
        predicted_s, run = one.first.step_s, one.run
        assert run is not None
        if fitted is not None:
            mine = [number for number, other in enumerate(scored) if other.row.group[1] == one.row.group[1]]
            predicted_s = run.priced(fitted.without(mine), CONSTANTS).step_s
        kind = "time, tuned on other groups" if tuned else "time, uncalibrated"
        yield _time(kind, one, predicted_s)


def _time(kind: str, one: Priced, predicted_s: float) -> Error:
    assert one.run is not None
    weight = 0.0 if one.row.relative else one.row.weight
    return Error(kind, " ".join(one.row.group), one.row.name, one.run.step_s, predicted_s, weight)


def relative(errors: Sequence[Error], rows: Sequence[Priced]) -> Iterator[Error]:
    """Rows of which only ratios count: each relative to the first of its group."""
    names = {one.row.name for one in rows if one.row.relative and one.row.weight}
    groups: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        if error.name in names:
            groups[error.group].append(error)
    for found in groups.values():
        first = found[0]
        for other in found[1:]:
            ratios = other.measured / first.measured, other.predicted / first.predicted
            yield Error("ratio of times", other.group, f"{other.name} / {first.name}", *ratios)


def calibrated(rows: Sequence[Priced], known: Sequence[Priced] | None = None) -> Iterator[Error]:
    """Times with constants of the row's group, fitted without the row; or on the rows `known`."""
    fitted = {name: _group(found) for name, found in by_group(rows if known is None else known).items()}
    for name, members in by_group([one for one in rows if one.run is not None]).items():
        group = fitted.get(name)
        for one in members:
            assert one.run is not None
            predicted_s = one.first.step_s
            if group is not None:
                found, order = group
                left_out = [order[one.row.name]] if known is None and one.row.name in order else []
                predicted_s = one.run.priced(found.without(left_out), found.constants).step_s
            yield _time("time, calibrated", one, predicted_s)


def _group(members: Sequence[Priced]) -> tuple[Fitted, dict[str, int]] | None:
    """The constants of a group, and the place of each row in the fit; None: it has too few rows."""
    scored = [one for one in members if one.run is not None and one.row.weight and not one.row.relative]
    if len(scored) < FEWEST:
        return None
    runs = [one.run for one in scored if one.run is not None]
    return fit(runs, constants_of(runs)), {one.row.name: number for number, one in enumerate(scored)}


def memory(rows: Sequence[Priced], known: Sequence[Priced] | None = None) -> Iterator[Error]:
    """Bytes of the stage that was measured. A group has one constant more: bytes that each device holds besides. They
    are not negative: what a plan holds is there."""
    with_memory = by_group([one for one in rows if one.row.memory_bytes])
    source = with_memory if known is None else by_group([one for one in known if one.row.memory_bytes])
    for name, members in with_memory.items():
        besides = {one.row.name: one.row.memory_bytes - _measured_stage(one) for one in source.get(name, [])}  # type: ignore[operator]
        for one in members:
            others = [size for row, size in besides.items() if known is not None or row != one.row.name]
            enough = len(besides) >= FEWEST
            held = max(0.0, statistics.median(others)) if enough else one.row.software.held_bytes
            kind, predicted = f"memory, {'' if enough else 'un'}calibrated", _measured_stage(one) + held
            assert one.row.memory_bytes is not None
            yield Error(kind, " ".join(name), one.row.name, one.row.memory_bytes, predicted, one.row.weight)


def _measured_stage(one: Priced) -> float:
    """Bytes of the stage that was measured, without those that a device holds besides."""
    stages = _stages(one)
    return stages[0] if one.row.of_rank_0 else max(stages)


def _stages(one: Priced) -> list[float]:
    software = replace(one.row.software, held_bytes=0.0)
    return [stage.total for stage in memory_of(one.plan, one.row.cluster, software)]


def fits(rows: Sequence[Priced], errors: Sequence[Error]) -> Iterator[tuple[str, bool, str]]:
    """Rows that ran out of memory must be said not to fit, and no row that ran may be. The fullest stage decides."""
    predicted = {error.name: error.predicted for error in errors}
    for one in rows:
        size = one.row.cluster.device.memory_bytes
        if one.row.ran_out:
            most = max(stage.total for stage in one.first.memory)
            yield one.row.name, most >= size, f"ran out; predicted {most / 1e9:.0f} of {size / 1e9:.0f} GB"
        elif one.row.name in predicted and one.row.weight:
            most = predicted[one.row.name] - _measured_stage(one) + max(_stages(one))
            yield one.row.name, most <= 1.05 * size, f"ran; predicted {most / 1e9:.0f} of {size / 1e9:.0f} GB"


def collectives(rows: Sequence[Mapping[str, Any]]) -> Iterator[Error]:
    """Times of collectives, by the price of collectives: three constants that the other rows of the hardware give.

    Rows that have no other row of their hardware are not predicted.
    """
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["type"] == "collective":
            groups[row["hardware"]["name"]].append(row)
    for name, members in groups.items():
        terms = np.array([_terms(row) for row in members])
        times = np.array([float(row["measured"]["time_us"]) * 1e-6 for row in members])
        for number, row in enumerate(members if len(members) > 1 else []):
            others = np.arange(len(members)) != number
            found = _not_negative(terms[others] / times[others, None], np.ones(len(members) - 1))
            size = "from 16 MiB" if row["bytes"] >= 16 * MEBI else "from 1 MiB" if row["bytes"] >= MEBI else "smaller"
            kind, predicted_s = f"collective, {size}", float(terms[number] @ found)
            yield Error(kind, name, row["id"], float(times[number]), predicted_s)


def _terms(row: Mapping[str, Any]) -> list[float]:
    """What `collective_time.seconds` counts: collectives, latencies, and seconds at 1 TB/s.

    Raises UnusableRows: the row has another operation than ours, or lacks a number.
    """
    try:
        operation = Collective(row.get("op", "all_reduce"))
        ranks, each = int(row["hardware"]["gpus"]), int(row["hardware"]["gpus_per_node"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableRows([f"row {row['id']}: {error}"]) from error
    record = Traffic(operation, "dp_replicate", int(row["bytes"]), "bf16", Verb.REDUCE, None, "")
    device = ClusterDevice("", "cuda", 1, 1.0, {"bf16": 1.0})

    def seconds_with(constant_s: float, latency_s: float, bytes_per_s: float) -> float:
        link = Link(bytes_per_s, latency_s)
        cluster = Cluster("", "", device, each, each, link, Link(bytes_per_s / each, latency_s), link)
        software = Software(collective_s=constant_s, hop_s=0.0, inside_efficiency=1.0, between_efficiency=1.0)
        return seconds(record, Mesh(dp_replicate=ranks), 0, cluster, software)[1]

    endless = 1e30
    return [seconds_with(1.0, 0.0, endless), seconds_with(0.0, 1.0, endless), seconds_with(0.0, 0.0, 1e12)]


def _not_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares whose solution has no negative number: the best of all choices of columns."""
    best, least = np.zeros(matrix.shape[1]), math.inf
    columns = range(matrix.shape[1])
    for some in itertools.chain.from_iterable(
        itertools.combinations(columns, size) for size in range(1, len(best) + 1)
    ):
        chosen = list(some)
        solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        left = float(np.sum((matrix[:, chosen] @ solution - wanted) ** 2))
        if (solution >= 0).all() and left < least - 1e-12:
            best, least = np.zeros(matrix.shape[1]), left
            best[chosen] = solution
    return best


@dataclass(frozen=True)
class Order:
    """Candidates in the order of a prediction: how much slower the first one is than the best, and Kendall's tau."""

    name: str
    regret: float
    tau: float
    candidates: int


def orders(rows: Sequence[Mapping[str, Any]], known: Sequence[Priced]) -> Iterator[Order]:
    """The choice between layouts, with constants of the start, or of the framework's group where it has enough rows."""
    for row in rows:
        if row["type"] != "ranking":
            continue
        group = next((part for part in ("vtrain_multi", "bloom_sweep") if part.split("_")[0] in row["id"]), "")
        fitted = _group([one for one in known if one.row.group[1] == group and not _is_in(one, row)])
        measured, predicted = [], []
        for number, candidate in enumerate(row["candidates"]):
            layout = {**row["fixed"], "attention": "unfused", **candidate}
            data = {**row, "type": "train_step", "group": group, "layout": layout, "id": f"{row['id']} {number}"}
            try:
                one = row_of({**data, "measured": {"step_s": candidate["step_s"]}})
            except (KeyError, TypeError, ValueError, UserError) as error:
                raise UnusableRows([f"row {row['id']}, candidate {number}: {error}"]) from error
            software: Software = one.software
            if fitted is not None:
                software = changed(software, fitted[0].changes, fitted[0].constants)
            samples = float(layout["global_batch"])
            measured.append(candidate["step_s"] / samples)
            predicted.append(price(one.plans[0], one.cluster, software).step_s / samples)
        yield Order(row["id"], _regret(measured, predicted), tau(measured, predicted), len(measured))


def _is_in(one: Priced, row: Mapping[str, Any]) -> bool:
    """Whether a training row is one of the candidates: then nothing may be fitted on it."""
    return any(math.isclose(one.row.step_s or 0.0, other["step_s"], rel_tol=SAME) for other in row["candidates"])


def _regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    return measured[int(np.argmin(predicted))] / min(measured) - 1.0


def tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's tau over pairs that differ by more than DIFFERENT."""
    pairs = [
        math.copysign(1.0, (measured[a] - measured[b]) * (predicted[a] - predicted[b]))
        for a, b in itertools.combinations(range(len(measured)), 2)
        if abs(measured[a] - measured[b]) > DIFFERENT * min(measured[a], measured[b])
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def makespans(rows: Sequence[Mapping[str, Any]]) -> Iterator[Error]:
    """Schedules with given times: the simulators must have the same makespan to 1e-6."""
    for row in rows:
        if row["type"] == "pipeline_dag":
            kind = {"interleaved_1f1b": "interleaved"}.get(row["schedule"], row["schedule"])
            schedule = pipeline(kind, row["p"], row["m"], row["virtual_stages"])
            forward, backward = (_seconds(row[key]) for key in ("tf_per_stage", "tb_per_stage"))
            costs = Costs(forward_s=forward, backward_s=backward, transfer_s=float(row["p2p"]))
            found = simulate(schedule, costs).makespan_s
            fast, _ = lanes_of(schedule).run(partial(_of_lane, costs), [float(row["p2p"])] * 2 * row["p"])
            found = found if abs(fast - found) < EXACT else math.nan
            yield Error("makespan", row["group"], row["id"], row["expected_makespan"], found)


def _of_lane(costs: Costs, kind: Kind, at: Instruction) -> float:
    return costs.compute_s(kind[0], at, kind[0])


def _seconds(value: Any) -> float | tuple[float, ...]:
    return tuple(float(one) for one in value) if isinstance(value, list) else float(value)
