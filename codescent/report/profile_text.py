"""In: a ProfileReport. Out: tables and sentences for a terminal of 80 columns.
Does not compute what they say (profile.py does)."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from codescent.base.amounts import of_rate, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.device_kinds import kind_of
from codescent.report.profile import ProfileReport
from codescent.report.profile_collectives import CollectiveRow
from codescent.trace.operators import DEVICE

MOST_OPERATORS = 10
MOST_RANKS = 8
NAME_WIDTH = 50
SMALL = 0.05
"""A part of a step that is smaller than this share is not worth a look."""


def tables(report: ProfileReport) -> Iterator[Table | str]:
    """The report: a heading, tables, and at the end what to look at."""
    first, last = report.ranks[0].head.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"{steps} of {counted(len(report.ranks), 'rank')}, a mean step of {of_seconds(report.step_s)}"
    if not report.ranks[0].head.complete:
        yield "the run ended within the window"
    more = [str(number) for number in report.windows if number != report.window]
    if more:
        yield f"window {report.window}; others: --window {', '.join(more)}"
    if error := max(one.head.error_s for one in report.ranks):
        yield f"the clocks of the ranks were compared to {of_seconds(error)}: a smaller skew means nothing"
    yield _ranks(report)
    yield from _collectives(report)
    yield _operators(report)
    yield from sentences(report)


def sentences(report: ProfileReport) -> list[str]:
    """What to look at first, what it would bring, who is slow."""
    top, step_s = report.candidates[0], report.step_s
    look, gain_s = top.name, top.gain_s
    if gain_s < SMALL * step_s and report.operators:
        first = report.operators[0]
        share = first.self_s / sum(row.self_s for row in report.operators)
        look = f"computation: {first.operator} takes {of_share(share)} of it, and all waiting is small"
        gain_s = min(step_s, first.self_s / len(report.ranks[0].steps) / len(report.ranks))
    left_s = max(0.0, step_s - gain_s)
    bring = f"at most {of_share(gain_s / step_s)} of a step: from {of_seconds(step_s)} to {of_seconds(left_s)}"
    return [f"Look first at {look}.", f"It would bring {bring}.", f"{_who(report)}."]


def _who(report: ProfileReport) -> str:
    if len(report.ranks) == 1:
        return "There is one rank, so none is slow"
    if report.slow:
        said = (
            f"ank {one.rank} {'is' if one.is_sure else 'may be'} slow: it works {one.ratio:.2f} times as long as "
            f"{one.others}"
            for one in report.slow
        )
        return f"R{'; r'.join(said)}"
    busy = [one.busy_s for one in report.ranks]
    longest = busy.index(max(busy))
    return f"No rank is slow: the longest work is that of rank {longest}, {of_seconds(max(busy))} of a step"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )


def _ranks(report: ProfileReport) -> Table:
    """A row for each rank; of many those that work longest."""
    many = len(report.ranks) > MOST_RANKS
    shown = sorted(report.ranks, key=lambda one: -one.busy_s)[:MOST_RANKS] if many else report.ranks
    of = f", the {MOST_RANKS} of {len(report.ranks)} ranks that work longest" if many else ""
    table = _table(f"Where a step goes{of}")
    host = bool(kind_of(report.ranks[0].head.device).activity)
    of_host = ["for the host"] if host else []
    for heading in ("rank", "step", "works", "waits for ranks", "for data", *of_host):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in shown:
        waits = [one.waiting_s, one.data_s, *([one.host_s] if host else [])]
        shares = [f"{of_seconds(part)} {of_share(part / one.step_s):>5}" for part in (one.busy_s, *waits)]
        table.add_row(str(one.head.rank), of_seconds(one.step_s), *shares)
    if not host:
        table.caption = "on a CPU the device is the host, and does not wait for it"
        table.caption_justify = "left"
    return table


def _collectives(report: ProfileReport) -> Iterator[Table | str]:
    if not report.collectives:
        return
    table = _table("Collectives of a step")
    table.add_column("collective", no_wrap=True)
    table.add_column("axis", overflow="fold")
    for heading in ("calls", "sent", "on wire", "busbw", "skew", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.collectives:
        table.add_row(row.kind, Text(row.axis), *_cells(row))
    yield table
    if report.bubble_s is not None:
        busiest = f"rank {report.busiest.head.rank}, which works longest"
        yield f"The bubble of the pipeline is {of_seconds(report.bubble_s)} of a step on {busiest}."
    for row in report.collectives:
        if row.calls != row.planned:
            said = (
                f"{row.kind} over {row.axis}: {row.calls:.3g} calls were seen in a step, {row.planned:.3g} are planned"
            )
            yield f"{said}; those in code that torch.compile compiles are not seen."
    compiled = max(one.compiled_s for one in report.ranks)
    if compiled:
        yield f"Compiled code waited {of_seconds(compiled)} of a step for its collectives, which counts as work."


def _cells(row: CollectiveRow) -> list[str]:
    bus = "" if row.bus_bytes_per_s is None else of_rate(row.bus_bytes_per_s, "B/s")
    skew = "" if row.skew_s is None else of_seconds(row.skew_s)
    hidden = "" if row.hidden is None else f"{of_share(row.hidden)}"
    wire = of_seconds(row.wire_s) if row.calls else ""
    return [f"{row.calls:.3g}", of_rate(row.sent_bytes, "B"), wire, bus, skew, hidden]


def _operators(report: ProfileReport) -> Table:
    """The operators with most self time; those of the device, if there are any."""
    device = [row for row in report.operators if row.where == DEVICE]
    rows = device or report.operators
    if not rows:
        return _table("No operators")
    total, steps = sum(row.self_s for row in rows), len(report.ranks[0].steps) * len(report.ranks)
    table = _table("Kernels" if device else "Operators, without waiting")
    table.add_column("name", overflow="ellipsis", no_wrap=True, max_width=NAME_WIDTH)
    if any(row.shapes for row in rows):
        table.add_column("shapes", overflow="fold", max_width=24)
    for heading in ("calls", "self time", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:MOST_OPERATORS]:
        shapes = [row.shapes] if any(one.shapes for one in rows) else []
        cells = [f"{row.calls / steps:.3g}", of_seconds(row.self_s / steps), f"{of_share(row.self_s / total)}"]
        table.add_row(Text(row.operator), *map(Text, shapes), *cells)
    return table
