"""In: what was found. Out: the lines that people read, in 80 columns, and JSON data for programs.
Does not print and does not judge."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.amounts import NOTHING, of_bytes, of_rate, of_seconds
from codescent.base.counted import counted
from codescent.doctor.facts import Host
from codescent.doctor.finding import WARNING, WRONG, Finding, exit_code, listed
from codescent.doctor.judge_network import Pair
from codescent.doctor.network import PairMeasurements, mapping_of

WIDTH = 80
FORMAT = 1
"""Of the JSON data."""


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        world_size: ranks that were expected.
        hosts: with their ranks and facts.
        findings: what is wrong first.
        measured: between pairs of hosts.
        notes: what could not be found out.
        seconds: from the moment when all ranks were there.
        listens: address and port of rank 0.
    """

    world_size: int
    hosts: Sequence[Host]
    findings: Sequence[Finding]
    measured: PairMeasurements
    notes: Sequence[str]
    seconds: float
    listens: str

    @property
    def exit_code(self) -> int:
        """0: nothing; 1: warnings; 2: something is wrong."""
        return exit_code(self.findings)

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "world_size": self.world_size,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
            "hosts": [{"name": host.name, "ranks": list(host.facts)} for host in self.hosts],
            "pairs": mapping_of(self.measured),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """The report for people."""
        ranks = sum(len(host.ranks) for host in self.hosts)
        where = f", rank 0 at {self.listens}" if self.world_size > 1 else ""
        yield f"{counted(ranks, 'rank')} on {counted(len(self.hosts), 'host')}{where}"
        yield ""
        yield from self._hosts()
        yield from self._pairs()
        for note in self.notes:
            yield from textwrap.wrap(note, WIDTH)
        yield ""
        for finding in self.findings:
            yield from _told(finding)
        yield self._end()

    def _hosts(self) -> Iterator[str]:
        """The map: a table, or where it is too wide a paragraph for each host."""
        rows = list(map(_row, self.hosts))
        table = list(_table([_HEADER, *rows]))
        if max(map(len, table)) <= WIDTH:
            yield from table
            return
        for row in rows:
            told = ", ".join(f"{title} {cell}" for title, cell in zip(_HEADER[1:], row[1:], strict=True))
            yield from textwrap.wrap(f"{row[0]}: {told}", WIDTH, subsequent_indent="    ")

    def _pairs(self) -> Iterator[str]:
        """Latency and bandwidth: a table of all pairs, the range alone where it is too wide."""
        for title, values, shown in (
            ("latency", self.measured.latencies, of_seconds),
            ("bandwidth", self.measured.rates, _rate),
        ):
            if not values:
                continue
            yield ""
            low, high = min(values.values()), max(values.values())
            yield f"{title} from each host to each other: {shown(low)} to {shown(high)}"
            table = list(_table(_square([host.name for host in self.hosts], values, shown)))
            if len(self.hosts) > 2 and max(map(len, table)) <= WIDTH:
                yield from table

    def _end(self) -> str:
        wrong = sum(finding.severity == WRONG for finding in self.findings)
        warnings = sum(finding.severity == WARNING for finding in self.findings)
        parts = [f"{wrong} wrong"] * (wrong > 0) + [counted(warnings, "warning")] * (warnings > 0)
        return f"{', '.join(parts) or 'nothing is wrong'}; checked in {of_seconds(self.seconds)}"


def _rate(number: float | None) -> str:
    return of_rate(number, "B/s")


_HEADER = ("host", "ranks", "address", "interface", "MTU", "cores", "memory", "devices")


def _row(host: Host) -> tuple[str, ...]:
    first = host.first
    used = next((one["name"] for one in first["interfaces"] if first["address"] in one["addresses"]), NOTHING)
    cores = {core for one in host.facts for core in one["mask"]}
    uuids = {one["device"]["uuid"]: one["device"]["name"] for one in host.facts if one["device"]}
    names = [f"{list(uuids.values()).count(name)} {name}" for name in dict.fromkeys(uuids.values())]
    memory = of_bytes(first["memory_bytes"]).replace(".00", "")
    return (
        host.name, _span(host.ranks), first["address"], used, str(host.mtu or NOTHING),
        _span(sorted(cores)) if cores else str(first["cores"]), memory, listed(names, 1) or NOTHING,
    )  # fmt: skip


def _span(numbers: Sequence[int]) -> str:
    """Such as "0-3", "0,2", "5"."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return listed(numbers, 4).replace(", ", ",")


def _square(names: Sequence[str], values: Mapping[Pair, float], shown: Any) -> list[Sequence[str]]:
    rows = [["", *names]]
    for name in names:
        rows.append([name, *(shown(values[name, other]) if (name, other) in values else "" for other in names)])
    return [*rows]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _told(finding: Finding) -> Iterator[str]:
    """A finding in lines: where and what, then what is expected, then what mends it."""
    yield from textwrap.wrap(
        f"{finding.severity}: {listed(finding.where)}: {finding.check}: {finding.what}", WIDTH,
        subsequent_indent="    ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    for word, text in (("expected", finding.expected), ("mend", finding.mend)):
        yield from textwrap.wrap(
            f"{word}: {text}", WIDTH, initial_indent="    ", subsequent_indent="      ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
