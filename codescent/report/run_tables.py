"""In: the numbers of runs. Out: tables: overview, differing keys, parts, slow ranks, the Plan, memory, machines.
Does not compute the numbers (summary.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.amounts import of_bytes, of_number, of_rate, of_seconds, of_share
from codescent.base.counted import counted
from codescent.cost.lengths import lengths
from codescent.cost.simulate import Costs, simulate
from codescent.plan import Plan
from codescent.report import findings
from codescent.report.content import NO_CELL, Cell, Column, Table, Words
from codescent.report.style import MEMORY, PARTS
from codescent.report.summary import Summary
from codescent.results import Interval, Parts, State, differing
from codescent.study.result import Study

NAME = Column("run")
MOST_VALUE = 60
"""Characters of a config value that a table shows."""
MOST_RUNS_ACROSS = 6
"""Runs that are columns of a table; more become rows."""
MORE_SHARES = {
    "mfu_spec": "share of the peak that the maker of the device publishes",
    "hfu": "share of the measured peak, with the FLOPs that are recomputed",
}
"""Columns of the metrics that a table shows beside mfu, if they say something else."""


BETWEEN_RANKS = ("communication_s", "bubble_s")
"""Parts of a step that one rank does not have."""


def number(value: float | None, text: str, *, odd: bool = False) -> Cell:
    """A cell that is sorted by its number."""
    return NO_CELL if value is None or not math.isfinite(value) else Cell(text, float(value), odd)


def seconds(value: float | None) -> Cell:
    """Seconds as a cell."""
    return number(value, of_seconds(value))


def size(value: float | None) -> Cell:
    """Bytes as a cell."""
    return number(value, of_bytes(value))


def share(value: float | None, *, odd: bool = False) -> Cell:
    """A share as a cell."""
    return number(value, of_share(value), odd=odd)


def rate(value: float | None, unit: str) -> Cell:
    """A speed as a cell."""
    return number(value, of_rate(value, unit))


def interval(found: Interval | None) -> Cell:
    """Seconds with the half width of their interval."""
    if found is None:
        return NO_CELL
    if math.isnan(found.low) or not found.value:
        return seconds(found.value)
    half = (found.high - found.low) / 2 / found.value
    return number(found.value, f"{of_seconds(found.value)} ± {of_share(half)}")


def overview(known: Sequence[Summary]) -> Table:
    """A row for each run: state, layout, speed, shares, losses. A share that says nothing new has no column."""
    shares = {
        name: explained
        for name, explained in MORE_SHARES.items()
        if any(one.rate(name) > 0 and one.rate(name) != one.rate("mfu") for one in known)
    }
    columns = [
        NAME,
        Column("state"),
        Column("layout", "axes with several ranks"),
        Column("ranks"),
        Column("steps", "steps done"),
        Column("step", "median time of a step, and half of its 95 % interval"),
        Column("tokens/s", "tokens of a step / its median time, all ranks"),
        Column("FLOP/s", "model FLOPs of a step / its median time, all ranks"),
        Column("mfu", "share of the measured peak"),
        *(Column(name, explained) for name, explained in shares.items()),
        Column("computing", "share of forward and backward passes in a step"),
        Column("train loss", "mean of the last rows, nats per token"),
        Column("val loss", "the lowest, nats per token"),
    ]
    rows = [
        [
            Cell(one.name),
            Cell(str(one.run.state), odd=one.run.state is not State.DONE),
            Cell(one.layout),
            number(one.run.num_ranks, f"{one.run.num_ranks:,}"),
            number(one.steps, f"{one.steps:,}"),
            interval(one.step_s),
            number(one.rate("tokens_per_s"), of_number(one.rate("tokens_per_s"))),
            rate(one.rate("flops_per_s"), ""),
            share(one.rate("mfu"), odd=one.rate("mfu") > 1),
            *(share(one.rate(name)) for name in shares),
            share(one.compute_share),
            number(one.train_loss, f"{one.train_loss:.4f}"),
            number(one.val_loss, f"{one.val_loss:.4f}"),
        ]
        for one in known
    ]
    return Table(columns, rows)


def differences(known: Sequence[Summary]) -> Iterator[Table | Words]:
    """The keys with different values: a row for each key, or for many runs a row for each run."""
    if len(known) < 2:
        return
    found = differing([one.run for one in known])
    if not found:
        yield Words([f"The configs of the {len(known)} runs are the same, except for names and folders."])
    elif len(known) <= MOST_RUNS_ACROSS:
        columns = [Column("key"), *(Column(one.name) for one in known)]
        yield Table(columns, [[Cell(key), *map(_value, values)] for key, values in found.items()])
    else:
        columns = [NAME, *(Column(key) for key in found)]
        rows = [[Cell(one.name), *(_value(values[i]) for values in found.values())] for i, one in enumerate(known)]
        yield Table(columns, rows)


def _value(value: Any) -> Cell:
    """A value of a config."""
    if value is None:
        return NO_CELL
    text = str(value).lower() if isinstance(value, bool) else str(value)
    shown = text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 1]}…"
    return Cell(shown, float(value) if isinstance(value, int | float) and math.isfinite(value) else None)


def parts(known: Sequence[Summary]) -> Iterator[Table | Words]:
    """The share of each part in the step of each run."""
    measured = [one for one in known if one.shares]
    if measured:
        columns = [NAME, Column("step", "mean over ranks that compute"), *(Column(name) for name, _ in PARTS.values())]
        rows = [
            [
                Cell(one.name),
                seconds(sum(rank.step_s for rank in one.ranks) / len(one.ranks)),
                *(
                    NO_CELL if one.run.num_ranks == 1 and name in BETWEEN_RANKS else share(one.shares[name])
                    for name in PARTS
                ),
            ]
            for one in measured
        ]
        rows += [
            [Cell(f"{one.name}, rank {server.rank}: server"), seconds(server.step_s), *_shares_of(server)]
            for one in measured
            for server in one.servers
        ]
        yield Table(columns, rows, "Shares of a step, means over all ranks that compute.")
    if said := [_beside_said(one) for one in known if one.beside]:
        yield Words(said[:MOST_RUNS_ACROSS], listed=True)
    if without := [one.name for one in known if not one.shares]:
        yield Words([f"Without ranks.csv, so that parts of the step are unknown: {', '.join(without)}."])


def _shares_of(parts: Parts) -> list[Cell]:
    """The share of each part in the step of one rank."""
    return [share(getattr(parts, name) / parts.step_s if parts.step_s else None) for name in PARTS]


def _beside_said(one: Summary) -> str:
    """What a run has done beside its steps: it is in no step, and in no speed."""
    each = ", ".join(f"{what} {of_seconds(spent)}" for what, spent in one.beside.items())
    return f"{one.name}: {of_seconds(sum(one.beside.values()))} beside its steps: {each}."


def stragglers(known: Sequence[Summary]) -> Table | None:
    """A row for each slow rank; None: there is none."""
    columns = [
        NAME,
        Column("rank"),
        Column("host"),
        Column("slower by", "how much longer its passes take than expected, in the mean"),
        Column("its passes", "seconds of forward and backward in a step"),
        Column("others wait longer by", "seconds a step, median"),
        Column("in rows", "share of the rows of ranks.csv in which it is slow"),
        Column("compared with"),
    ]
    rows = [
        [
            Cell(one.name),
            number(slow.rank, str(slow.rank)),
            Cell(slow.host),
            share(slow.slower, odd=True),
            seconds(slow.compute_s),
            seconds(slow.waited_s),
            share(slow.rows),
            Cell("the FLOPs of the Plan" if slow.planned else "ranks of the same part"),
        ]
        for one in known
        for slow in findings.stragglers(one)
    ]
    return Table(columns, rows) if rows else None


def prediction(known: Sequence[Summary]) -> Iterator[Table]:
    """What the Plan says of each run, beside what was measured."""
    planned = [(one, one.run.plan) for one in known if one.run.plan is not None]
    if not planned:
        return
    columns = [
        NAME,
        Column("FLOPs of a step", "Plan: model FLOPs, all ranks"),
        Column("at the peak", "Plan: FLOPs / the measured peak of all ranks"),
        Column("step", "measured: median"),
        Column("bubble, planned", "Plan: if all ranks are equally fast and messages take no time"),
        Column("bubble, measured", "share of a step, mean over ranks"),
        Column("sent", "Plan: bytes that the busiest rank sends in a step"),
        Column("communication", "measured: seconds a step in which a rank waits for it, mean"),
        Column("state", "Plan: weights, gradients and optimizer state of the fullest rank"),
        Column("peak memory", "measured: the fullest rank, with activations and libraries"),
    ]
    yield Table(columns, [_predicted(one, plan) for one, plan in planned])


def _predicted(one: Summary, plan: Plan) -> list[Cell]:
    flops = plan.flops().total_flops
    peak = one.run.environment.get("peak_flops_per_s")
    at_peak = None
    if isinstance(peak, int | float) and peak > 0 and math.isfinite(one.rate("mfu")):  # else the peak was slowed
        at_peak = flops / (peak * one.run.num_workers)
    several = one.run.num_ranks > 1
    waits = [rank.communication_s for rank in one.ranks if several]
    return [
        Cell(one.name),
        rate(flops, ""),
        seconds(at_peak),
        seconds(None if one.step_s is None else one.step_s.value),
        share(planned_bubble(plan) if plan.mesh.pp > 1 else 0.0 if several else None),
        share(one.shares.get("bubble_s") if several else None),
        size(one.wire_bytes if several else None),
        seconds(sum(waits) / len(waits) if waits else None),
        size(one.state_bytes.total_bytes if one.state_bytes else None),
        size(max(one.memory_bytes, default=None)),
    ]


def planned_bubble(plan: Plan) -> float:
    """The share of its step that a stage waits for others, the mean over stages, by the FLOPs of the plan."""
    costs = lengths(plan).costs
    passes = {
        name: getattr(costs, name) for name in ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
    }
    simulation = simulate(plan.schedule, Costs(**passes))
    waits = [stage.data_wait_s + stage.idle_end_s for stage in simulation.stages]
    return sum(waits) / len(waits) / simulation.makespan_s if simulation.makespan_s else 0.0


def memory(known: Sequence[Summary]) -> Iterator[Table]:
    """Memory of the fullest rank of each run: what the Plan declares, and what was measured."""
    columns = [
        NAME,
        Column("peak", "CPU: resident set of the process; CUDA: allocated by torch"),
        Column("rank", "the fullest"),
        Column("peak rose at", "step and instruction"),
        *(Column(name, MEMORY_MEANING.get(name, "")) for name, _ in MEMORY.values()),
        *(Column(f"{name}, planned", "Plan: of the fullest rank") for name in ("weights", "gradients", "optimizer")),
        Column("peak, emptiest rank"),
    ]
    rows = [_memory_row(one) for one in known if one.state_bytes or one.memory_bytes]
    if rows:
        yield Table(columns, rows)


MEMORY_MEANING = {
    "weights": "measured, when most was counted",
    "activations": "what autograd keeps for backward",
    "buckets and gathered units": "of gradients and of weights on their way between ranks",
    "the rest": "the peak less all parts: libraries, kernels, what was freed",
}


def _memory_row(one: Summary) -> list[Cell]:
    peaks = one.memory_bytes
    rank = max(one.memory, key=lambda rank: one.memory[rank]["peak_bytes"] or 0) if one.memory else None
    row = {} if rank is None else one.memory[rank]
    where = f"step {row['peak_step']}, {row['peak_at']}" if row else ""
    if rank is None and peaks:
        rank = peaks.index(max(peaks))
    planned = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    return [
        Cell(one.name),
        size(row.get("peak_bytes", max(peaks, default=None))),
        number(rank, f"{rank}"),
        Cell(where) if where else NO_CELL,
        *(size(row.get(name)) for name in MEMORY),
        *(size(getattr(one.state_bytes, name, None)) for name in planned),
        size(min(peaks, default=None)),
    ]


def machine(environment: Mapping[str, Any]) -> str:
    """The machine of a run in a line."""
    cores = environment.get("cores")
    processor = str(environment.get("processor", "unknown processor"))
    device = environment.get("device")
    what = [processor + (f" with {counted(cores, 'core')}" if isinstance(cores, int) else "")]
    what += [f"device {device}"] if device else []
    what += [f"torch {environment['torch']}"] if "torch" in environment else []
    what += [f"codescent {environment['codescent']}"] if "codescent" in environment else []
    return ", ".join(what)


FACTS = {
    "host": "host",
    "processor": "processor",
    "cores": "cores",
    "memory_bytes": "memory",
    "device": "device",
    "num_threads": "threads of a rank",
    "system": "system",
    "python": "Python",
    "torch": "torch",
    "codescent": "codescent",
    "peak_flops_per_s": "measured peak of a rank",
}
"""Keys of environment.json that are shown, and their titles."""


def machines(known: Sequence[Summary], study: Study | None) -> Iterator[Table]:
    """A column for each different machine and software, and the runs on it."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for one in known:
        facts = {**one.run.environment, "host": _hosts(one)}
        key = repr([facts.get(name) for name in FACTS if name != "peak_flops_per_s"])
        found.setdefault(key, (facts, []))[1].append(one.name)
    if not known and study is not None and study.machine:
        found["study"] = (study.machine, [study.name])
    shown = list(found.values())[:MOST_RUNS_ACROSS]
    if not shown:
        return
    columns = [Column("what"), *(Column(_names(names)) for _, names in shown)]
    rows = [[Cell(title), *(_fact(key, facts.get(key)) for facts, _ in shown)] for key, title in FACTS.items()]
    more = (
        f"{len(found) - len(shown)} more kinds of machine or software are left out." if len(found) > len(shown) else ""
    )
    yield Table(columns, rows, more)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _hosts(one: Summary) -> str:
    """The hosts of a run with the number of ranks on each."""
    hosts = one.run.hosts
    return ", ".join(f"{host} ({counted(hosts.count(host), 'rank')})" for host in dict.fromkeys(hosts) if host)


def _fact(key: str, value: Any) -> Cell:
    if value is None or value == "":
        return NO_CELL
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key == "memory_bytes":
            return size(value)
        if key == "peak_flops_per_s":
            return rate(value, "FLOP/s")
    return Cell(str(value))
