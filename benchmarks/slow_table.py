"""In: recorded runs. Out: the numbers of each row, the table, the requirements.
Does not run anything and draws nothing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measure import ROOT, must, table
from slow_losses import Learnt, distances
from slow_methods import (
    EQUAL_LOSSES,
    GOALS,
    GOALS_MBIT,
    GPT2_SHARE,
    LAB_S,
    LAB_WITHIN,
    SERVERS,
    SERVERS_TIMES,
    SIMULATED_WITHIN,
    WINNERS,
    Goal,
)
from slow_runs import GPT2, Method, Recorded, whole_periods

sys.path.insert(0, str(ROOT))

from codescent.cost.walked import Walk

HEADER = (
    "method", "tokens/s", "x DDP", "ms a step", "exposed ms", "MB declared", "MB sent", "simulated", "off",
    "staleness", "simulated", "val loss", "over DDP",
)  # fmt: skip


@dataclass(frozen=True)
class Sitting:
    """All runs with the same hosts and link, which took turns.

    Attributes:
        hosts: number of hosts, with a rank each.
        mbit: wanted payload of the link.
        link: the calibrated link, as JSON data.
        tokens: of a step, over all ranks.
        times: the runs of each method, by name, one for each round.
        alone: for each round the runs without network, one for each rank.
        coding: by method the figures of `Coding`: how fast a rank codes, while all others do it too.
    """

    hosts: int
    mbit: float
    link: dict[str, Any]
    tokens: int
    times: dict[str, list[Recorded]]
    alone: list[list[Recorded]]
    coding: dict[str, list[float]] = field(default_factory=dict)

    def bound(self) -> float:
        """Tokens/s of ranks that compute at the same time and send nothing: the median of the rounds."""
        rounds = [
            sum(self.tokens / len(ranks) / statistics.mean(whole_periods(one.seconds, 1)) for one in ranks)
            for ranks in self.alone
        ]
        return statistics.median(rounds)


def row_of(method: Method, sitting: Sitting, losses: Sequence[Learnt], of_ddp: Sequence[Learnt]) -> dict[str, Any]:
    """The numbers of one method; medians over rounds, means over seeds. `losses`, `of_ddp`: a run for each seed."""
    runs = sitting.times[method.name]
    counted = slice(len(runs[0].seconds) - method.end_steps)
    steps_s = [statistics.mean(whole_periods(run.seconds[counted], method.period)) for run in runs]
    exposed_s = [statistics.mean(whole_periods(run.exposed_s[counted], method.period)) for run in runs]
    step_s = statistics.median(steps_s)
    ages = [run.staleness for run in runs if run.staleness is not None]
    return {
        "method": method.name,
        "family": method.family,
        "hosts": sitting.hosts,
        "mbit": sitting.mbit,
        "rounds_step_s": steps_s,
        "step_s": step_s,
        "median_step_s": statistics.median(second for run in runs for second in run.seconds[method.period :]),
        "tokens_per_s": sitting.tokens / step_s,
        "exposed_s": statistics.median(exposed_s),
        "declared_bytes": runs[0].declared_bytes,
        "sent_bytes": statistics.median(run.sent_bytes for run in runs),
        "staleness": statistics.mean(ages) if len(ages) == len(runs) else None,
        "learns_as": method.learns_as,
        **distances(losses, of_ddp),
    }


def rows_of(
    methods: Sequence[Method],
    sitting: Sitting,
    losses: dict[tuple[str, int], list[Learnt]],
    simulated: Mapping[str, Walk],
) -> list[dict[str, Any]]:
    """`row_of` each method, with its speed over that of the first, DDP.

    `losses`: by method and hosts. `simulated`: by method.
    """
    of_ddp = losses.get((methods[0].name, sitting.hosts), [])
    rows = [row_of(one, sitting, losses.get((one.learns_as or one.name, sitting.hosts), []), of_ddp) for one in methods]
    ddp = next(row for row in rows if row["method"] == methods[0].name)["tokens_per_s"]
    for row in rows:
        row["x_ddp"] = row["tokens_per_s"] / ddp
        found = simulated[row["method"]]
        row["simulated_tokens_per_s"] = found.tokens_per_s
        row["simulated_off"] = found.tokens_per_s / row["tokens_per_s"] - 1
        row["simulated_coding_s"] = max(rank.coding_s for rank in found.ranks)
        row["simulated_staleness"] = statistics.mean(found.staleness) if found.staleness else None
    return rows


def text_of(sitting: Sitting, rows: Sequence[dict[str, Any]]) -> str:
    """The table of one sitting, under a line about its link."""
    link, spread = sitting.link, rows[0]["ddp_spread"]
    lines = [
        f"{sitting.hosts} hosts, {sitting.mbit:g} Mbit/s: an all_reduce of two ranks carries "
        f"{link['payload_mbit'] / 8:.3f} MB/s (shaper at {link['shaper_mbit']:.2f} Mbit/s); "
        f"DDP's loss spreads over seeds by {_percent(spread)}"
    ]
    cells = [
        [
            row["method"], f"{row['tokens_per_s']:,.1f}", f"{row['x_ddp']:.2f}", f"{1e3 * row['step_s']:,.0f}",
            f"{1e3 * row['exposed_s']:,.0f}", f"{row['declared_bytes'] / 1e6:.2f}", f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['simulated_tokens_per_s']:,.1f}", _percent(row["simulated_off"]),
            _age(row["staleness"]), _age(row["simulated_staleness"]),
            _loss(row), _percent(row["over_ddp"]),
        ]
        for row in rows
    ]  # fmt: skip
    bound, ddp = sitting.bound(), rows[0]["tokens_per_s"]
    ms = 1e3 * sitting.tokens / bound
    cells.append(["without network", f"{bound:,.1f}", f"{bound / ddp:.2f}", f"{ms:,.0f}", *"---------"])
    return "\n".join([*lines, table(HEADER, cells)])


def _age(versions: float | None) -> str:
    return "-" if versions is None else f"{versions:.2f}"


def _loss(row: dict[str, Any]) -> str:
    if row["val_loss"] is None:
        return "-"
    return f"{row['val_loss']:.4f} ({'=' if row['learns_as'] else len(row['val_losses'])})"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:+.2f} %"


def musts_of(work: str, sitting: Sitting, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The requirements on one sitting: the lab's seconds, or those on the families and methods that were measured."""
    if sitting.mbit != GOALS_MBIT:
        return
    bound = sitting.bound() / rows[0]["tokens_per_s"]
    if work == GPT2:
        yield from _of_gpt2(sitting, rows, bound)
        return
    for goal in GOALS:
        mine = [row for row in rows if row["family"] == goal.family]
        if mine:
            yield of_goal(goal, mine, bound, sitting.hosts)
    speeds = {row["method"]: row["tokens_per_s"] for row in rows}
    if set(SERVERS) <= speeds.keys():
        times = speeds[SERVERS[1]] / speeds[SERVERS[0]]
        yield must(f"two servers on {sitting.hosts} hosts: tokens/s over those of one", times, SERVERS_TIMES)
    worst = max(rows, key=lambda row: abs(row["simulated_off"]))
    claim = f"simulated tokens/s on {sitting.hosts} hosts: largest distance from those measured ({worst['method']})"
    yield must(claim, abs(worst["simulated_off"]), SIMULATED_WITHIN, at_least=False)


def _of_gpt2(sitting: Sitting, rows: Sequence[dict[str, Any]], bound: float) -> Iterator[dict[str, Any]]:
    lab_s = LAB_S.get(sitting.hosts)
    if lab_s is not None:
        off = abs(rows[0]["median_step_s"] / lab_s - 1)
        claim = f"DDP on {sitting.hosts} hosts: distance from the lab's {lab_s:g} s a step"
        yield must(claim, off, LAB_WITHIN, at_least=False)
    for row in rows:
        if row["method"] == WINNERS.get(sitting.hosts):
            claim = f"{row['method']} on {sitting.hosts} hosts: share of the tokens/s without network"
            yield must(claim, row["x_ddp"] / bound, GPT2_SHARE)


def of_goal(goal: Goal, rows: Sequence[dict[str, Any]], bound: float, hosts: int) -> dict[str, Any]:
    """The best speed over DDP's of rows whose loss is near enough. `bound`: the speed without network, over DDP's."""
    near = [row["x_ddp"] for row in rows if row["over_ddp"] is not None and row["over_ddp"] <= goal.above]
    least = goal.times
    if goal.bound_share is not None and bound < 1.2 * goal.times:
        least = goal.bound_share * bound
    claim = f"{goal.family} on {hosts} hosts, loss at most {100 * goal.above:g} % above DDP's: tokens/s over DDP's"
    measured = any(row["over_ddp"] is not None for row in rows)
    return must(claim, max(near, default=0.0) if measured else None, least)


def unequal(shaped: Sequence[Recorded], unshaped: Learnt) -> int:
    """How many runs on shaped links have other first losses than the run on links without a limit, bit for bit."""
    first = unshaped.first_losses
    return sum(run.losses[:EQUAL_LOSSES] != first for run in shaped)
