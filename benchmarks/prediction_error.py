"""In: a file of published measurements. Out: how far the planner errs: by group, in all, and each residual.
Measures nothing, and reads nothing but the files that are named."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from identities import Identity, identities
from measure import finish, parser, say, table, write_json
from prediction_jobs import Jobs, jobs
from prediction_scores import (
    Error,
    Order,
    calibrated,
    collectives,
    fits,
    makespans,
    memory,
    orders,
    priced,
    relative,
    uncalibrated,
)
from published_programs import IN_BINARY, in_binary
from published_rows import UnusableRows, read, training_rows

MUST: tuple[tuple[str, str, float], ...] = (
    ("time, uncalibrated", "median", 0.12),
    ("time, uncalibrated", "p90", 0.40),
    ("time, tuned on other groups", "median", 0.12),
    ("time, tuned on other groups", "p90", 0.40),
    ("time, calibrated", "median", 0.06),
    ("time, calibrated", "mean", 0.09),
    ("time, calibrated", "p90", 0.20),
    ("memory, calibrated", "median", 0.05),
    ("memory, calibrated", "p90", 0.12),
    ("collective, from 16 MiB", "median", 0.10),
    ("collective, from 1 MiB", "median", 0.25),
    ("makespan", "worst", 1e-6),
)
"""What the planner must reach: a kind of prediction, a statistic of its errors, the most that it may be."""
MOST_UNDER = 0.08
"""No memory may be predicted by so much less than was measured."""
MOST_REGRET, LEAST_TAU = 0.10, 0.75
ENOUGH, MOST_OF_GROUP = 4, 0.12
"""No group of so many rows may have a larger median error."""
MOST_OF_JOB = 0.02
"""How far a whole job may be from what two others of its program say."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Compare the planner's predictions with published measurements.")
    parsed.add_argument("--rows", type=Path, required=True, metavar="FILE", help="rows that are predicted")
    parsed.add_argument(
        "--fit", type=Path, metavar="FILE", help="rows to fit constants on; the default: each row by all others"
    )
    parsed.add_argument("--markdown", type=Path, metavar="FILE", help="write the report, with every residual")
    parsed.add_argument("--plot", type=Path, metavar="FILE", help="write a scatter plot: predicted over measured")
    return parsed.parse_args()


class Scores:
    """Everything that is predicted of a file."""

    def __init__(self, rows: Sequence[dict[str, Any]], fitting: Sequence[dict[str, Any]] | None) -> None:
        self.rows = [priced(row) for row in training_rows(rows)]
        known = None if fitting is None else [priced(row) for row in training_rows(fitting)]
        first = list(uncalibrated(self.rows, tuned=False))
        self.errors: list[Error] = [*first, *relative(first, self.rows)]
        self.errors += uncalibrated(self.rows, tuned=True) if known is None else []
        self.errors += calibrated(self.rows, known)
        sizes = list(memory(self.rows, known))
        self.errors += [*sizes, *collectives(rows), *makespans(rows)]
        self.fits = list(fits(self.rows, sizes))
        others = [replace(one, row=replace(one.row, data=in_binary(one.row.data))) for one in self.rows]
        self.binary = list(memory(others, known)) if any(one.row.data["group"] in IN_BINARY for one in others) else []
        self.orders: list[Order] = list(orders(rows, self.rows if known is None else known))
        self.identities: list[Identity] = list(identities(rows))
        self.jobs: list[Jobs] = list(jobs(rows))

    def of(self, kind: str) -> list[Error]:
        """The errors of a kind that are scored."""
        return [error for error in self.errors if error.kind == kind and error.weight]


def statistics_of(errors: Sequence[Error]) -> dict[str, float]:
    """Median, mean, 90 % quantile and largest of the sizes of relative errors."""
    sizes = sorted(abs(error.relative) for error in errors)
    p90 = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return {"median": statistics.median(sizes), "mean": statistics.mean(sizes), "p90": p90, "worst": sizes[-1]}


def summary(scores: Scores) -> Iterator[list[str]]:
    """A line for each kind of prediction in all, and for each of its groups."""
    for kind in dict.fromkeys(error.kind for error in scores.errors):
        groups: dict[str, list[Error]] = defaultdict(list)
        for error in scores.of(kind):
            groups[error.group].append(error)
        everything = [error for members in groups.values() for error in members]
        if everything:
            yield _line(kind, "all", everything)
        if len(groups) > 1:
            for name, members in groups.items():
                yield _line("", name, members)


def _line(kind: str, name: str, errors: Sequence[Error]) -> list[str]:
    return [kind, name, str(len(errors)), *(f"{100 * value:.1f}" for value in statistics_of(errors).values())]


HEADER = ["prediction", "rows of", "n", "median %", "mean %", "p90 %", "worst %"]


def requirements(scores: Scores) -> Iterator[tuple[str, float, str, bool]]:
    """Each requirement: what, the value, the bound, whether it holds."""
    for kind, name, bound in MUST:
        if found := scores.of(kind):
            value = statistics_of(found)[name]
            yield f"{kind}: {name}", value, f"<= {100 * bound:g} %", value <= bound
    if sizes := scores.of("memory, calibrated"):
        under = max(-error.relative for error in sizes)
        yield "memory: most under", under, f"<= {100 * MOST_UNDER:g} %", under <= MOST_UNDER
    groups: dict[str, list[Error]] = defaultdict(list)
    for error in scores.of("time, calibrated"):
        groups[error.group].append(error)
    for name, members in groups.items():
        value = statistics_of(members)["median"]
        if len(members) >= ENOUGH and value > MOST_OF_GROUP:
            yield f"time, calibrated: median of {name}", value, f"<= {100 * MOST_OF_GROUP:g} %", False
    for order in scores.orders:
        yield f"{order.name}: regret", order.regret, f"<= {100 * MOST_REGRET:g} %", order.regret <= MOST_REGRET
        yield f"{order.name}: 1 - tau", 1 - order.tau, f"<= {100 * (1 - LEAST_TAU):g} %", order.tau >= LEAST_TAU
    wrong = sum(not one.holds for one in scores.identities)
    if scores.identities:
        yield f"identities of {len(scores.identities)} that fail", float(wrong), "0", not wrong
    for those in scores.jobs:
        for name, predicted_s, measured_s in () if those.inconsistent else those.predicted:
            off = abs(predicted_s / measured_s - 1)
            yield f"job {name}, by two other jobs", off, f"<= {100 * MOST_OF_JOB:g} %", off <= MOST_OF_JOB
    said = [name for name, holds, _ in scores.fits if not holds]
    if scores.fits:
        yield f"fits or not, of {len(scores.fits)}, wrong", float(len(said)), "0", not said


def in_other_units(scores: Scores) -> Iterator[str]:
    """What follows for memory if figures mean 2^30 bytes where their file says GB. It is told, and not scored."""
    found = [error for error in scores.binary if error.kind == "memory, calibrated" and error.weight]
    if found:
        most, numbers = min(found, key=lambda error: error.relative), statistics_of(found)
        under = f"most under {-100 * most.relative:.1f} % ({most.name})"
        yield (
            f"told: memory, calibrated, with GB of {' and '.join(IN_BINARY)} as 2^30 bytes: median "
            f"{100 * numbers['median']:.1f} %, p90 {100 * numbers['p90']:.1f} %, {under}"
        )


def report(scores: Scores, file: Path) -> str:
    """The report in Markdown."""
    lines = ["# Predicted beside measured", "", f"Rows of `{file.name}`. Errors are predicted / measured - 1.", ""]
    lines += _markdown(HEADER, list(summary(scores)))
    musts = [
        [what, f"{value:.3g}" if bound == "0" else f"{100 * value:.2g} %", bound, "yes" if holds else "NO"]
        for what, value, bound, holds in requirements(scores)
    ]
    lines += ["", "## Requirements", "", *_markdown(["what", "value", "bound", "holds"], musts)]
    lines += ["", *in_other_units(scores), "", "## Orders of layouts", ""]
    lines += _markdown(
        ["candidates", "n", "regret", "tau"],
        [[one.name, str(one.candidates), f"{one.regret:.1%}", f"{one.tau:.2f}"] for one in scores.orders],
    )
    lines += ["", "## Identities", ""]
    lines += _markdown(
        ["row", "what", "expected", "ours", "holds"],
        [[one.name, one.what, one.expected, one.ours, "yes" if one.holds else "NO"] for one in scores.identities],
    )
    lines += ["", "## Whole jobs", "", "Two jobs say the seconds of a step and the start-up of all.", ""]
    lines += _markdown(
        ["jobs", "step", "start-up", "others, predicted and measured"],
        [[f"{one.group}, {one.sharding}", f"{one.step_s:.4f} s", *_of_jobs(one)] for one in scores.jobs],
    )
    lines += ["", "## Fits or not", ""]
    lines += _markdown(
        ["row", "", "right"], [[name, words, "yes" if holds else "NO"] for name, holds, words in scores.fits]
    )
    lines += ["", "## Residuals", "", "Rows of weight 0 are shown and not scored.", ""]
    residuals = [
        [one.kind, one.group, one.name, f"{one.measured:.5g}", f"{one.predicted:.5g}", f"{one.relative:+.1%}",
         f"{one.weight:g}"]
        for one in scores.errors
    ]  # fmt: skip
    lines += _markdown(["prediction", "group", "row", "measured", "predicted", "error", "weight"], residuals)
    return "\n".join([*lines, ""])


def _of_jobs(one: Jobs) -> list[str]:
    if one.inconsistent:
        return ["none", f"inconsistent: {one.inconsistent}"]
    return [
        f"{one.start_s:.0f} s",
        ", ".join(
            f"{name}: {predicted_s:.0f} s, {measured_s:.0f} s ({predicted_s / measured_s - 1:+.1%})"
            for name, predicted_s, measured_s in one.predicted
        ),
    ]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows]]


def plot(scores: Scores, file: Path) -> None:
    """Predicted over measured seconds of a step, both logarithmic."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is asked for

    figure = Figure(figsize=(9.0, 6.5), layout="constrained")
    axes = figure.subplots()
    for kind, marker in (("time, uncalibrated", "o"), ("time, calibrated", "x")):
        found = scores.of(kind)
        axes.scatter([one.measured for one in found], [one.predicted for one in found], marker=marker, s=24, label=kind)
    ends = [one.measured for one in scores.of("time, uncalibrated")] or [1.0]
    line = [min(ends), max(ends)]
    axes.plot(line, line, color="grey", linewidth=1)
    for factor in (0.8, 1.25):
        axes.plot(line, [factor * end for end in line], color="grey", linewidth=0.6, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="measured seconds of a step", ylabel="predicted seconds of a step")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> int:
    """Score a file."""
    arguments = arguments_of()
    begun = time.perf_counter()
    try:
        rows = read(arguments.rows)
        fitting = None if arguments.fit is None else read(arguments.fit)
        scores = Scores(rows, fitting)
    except UnusableRows as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    say(f"{len(scores.rows)} training rows in {time.perf_counter() - begun:.0f} s")
    print(f"{table(HEADER, list(summary(scores)))}\n")
    for what, value, bound, holds in requirements(scores):
        shown = f"{value:g}" if bound == "0" else f"{100 * value:.1f} %"
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}: {shown} {bound}")
    for line in in_other_units(scores):
        print(line)
    if arguments.markdown is not None:
        arguments.markdown.write_text(report(scores, arguments.rows), encoding="utf-8")
    if arguments.plot is not None:
        plot(scores, arguments.plot)
    musts = [
        {"claim": what, "value": value, "bound": bound, "held": holds}
        for what, value, bound, holds in requirements(scores)
    ]
    write_json(arguments.json, {"benchmark": "prediction_error", "rows": arguments.rows.name, "musts": musts})
    return 0


if __name__ == "__main__":
    finish(main)
