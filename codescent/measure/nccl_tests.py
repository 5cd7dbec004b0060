"""In: what a program of nccl-tests has printed. Out: the collective of its table, with seconds by payload.
Does not run these programs (https://github.com/NVIDIA/nccl-tests) and fits nothing (fit.py does)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.reading import read_text
from codescent.config.given import shown
from codescent.measure.fit import TimedCollective
from codescent.plan import Collective

NAMES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "sendrecv": Collective.SEND,
}
"""Programs of nccl-tests, without _perf, whose link a price can use."""
KNOWN = ", ".join(f"{name}_perf" for name in NAMES)
_RANK = re.compile(r"#\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\b")
_BEGINS = re.compile(r"#.*?\b(\w+)_perf\b")
_COLUMNS = re.compile(r"#\s+size\s+count\s+type\b.*\btime\b")
MOST_BYTES = 16 << 20
LISTED = 4
"""So many wrong lines are named."""
DIGIT = 0.005
"""Both bandwidths are printed in GB/s with two digits."""


@dataclass(frozen=True)
class NcclTable:
    """A table: of one program, with the hosts of its ranks."""

    measured: tuple[TimedCollective, ...]
    ranks: int
    hosts: int

    @property
    def link(self) -> str:
        """The slowest link that its ranks cross."""
        return self.measured[0].link

    @property
    def collective(self) -> Collective:
        """Of all rows."""
        return self.measured[0].collective


class _TableRow(NamedTuple):
    """A row: its out-of-place columns. `root`: below 0 there is none."""

    size_bytes: int
    seconds: float
    algorithm: float
    bus: float
    root: int
    sums: bool


def read_table(path: Path) -> NcclTable:
    """Read the output of a program of nccl-tests: the lines that name its ranks, and the out-of-place columns.

    A line that begins neither with # nor with a number is another program's, such as a launcher's.

    Raises UserError: it cannot be read, or is no such output; a row is damaged, or says that results were wrong.
    """
    try:
        lines = read_text(path, MOST_BYTES).splitlines()
    except OSError as error:
        raise UserError(f"--nccl-tests {path}: {in_words(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--nccl-tests {path}: is no text; give what a program of nccl-tests has printed") from error
    return _Reader(path, lines).table()


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path, lines: Sequence[str]) -> None:
        self.where, self.lines = f"--nccl-tests {path}", lines
        self.hosts: dict[int, str] = {}  # by rank
        self.columns: list[str] = []
        self.name = ""

    def table(self) -> NcclTable:
        """See `read_table`."""
        rows = list(self._rows())
        if not rows:
            raise UserError(f"{self.where}: has no row of a table; give what {KNOWN} has printed, with all its lines")
        if not self.hosts:
            raise UserError(
                f'{self.where}: no line names the ranks ("#  Rank  0 ... on HOST device 0"); give the whole output'
            )
        if len(self.hosts) == 1:
            raise UserError(f"{self.where}: is of one rank, which sends nothing; give a table of several ranks")
        if len({row.size_bytes for row in rows}) < 2:
            raise UserError(
                f"{self.where}: has one size alone, and nothing tells latency from bandwidth; give a table of several "
                "sizes, such as -b 1K -e 1G -f 2"
            )
        collective, ranks, hosts = (
            self._collective(rows, len(self.hosts)),
            len(self.hosts),
            len(set(self.hosts.values())),
        )
        devices, left = divmod(ranks, hosts)
        if left:
            raise UserError(f"{self.where}: {ranks} ranks on {hosts} hosts; a price needs as many on each host")
        measured = [TimedCollective(collective, row.size_bytes, ranks, devices, row.seconds) for row in rows]
        return NcclTable(tuple(measured), ranks, hosts)

    def _rows(self) -> Iterator[_TableRow]:
        problems = list[str]()
        for number, line in enumerate(self.lines, 1):
            if found := _RANK.search(line):
                self.hosts[int(found[1])] = found[2]
            elif _COLUMNS.match(line.strip()):
                self.columns = line.replace("#wrong", "wrong").strip(" #").split()
            elif (found := _BEGINS.match(line)) and not self.name:
                self.name = found[1]
            elif line.split() and line.split()[0].isdecimal():
                try:
                    yield self._row(line.split())
                except ValueError as error:
                    problems.append(f"{self.where}, line {number}: {error}: {shown(line.strip())}")
        if problems:
            more = len(problems) - LISTED
            raise UserError(*problems[:LISTED], *([f"{self.where}: and {more} more lines"] if more > 0 else []))

    def _row(self, words: Sequence[str]) -> _TableRow:
        """A row of the table. Raises ValueError: what is wrong with it."""
        if not self.columns:
            raise ValueError('comes before the line that names the columns ("#  size  count  type ...")')
        if len(words) < len(self.columns):
            raise ValueError(f"has {len(words)} columns; must have {len(self.columns)}")
        # The columns come twice, out-of-place and in-place: the first ones count.
        cell = dict(zip(reversed(self.columns), reversed(words[: len(self.columns)]), strict=True))
        wrong = cell.get("wrong", "0")
        if wrong != "N/A" and _number(wrong, "#wrong"):
            raise ValueError(f"{wrong} results were wrong, so its time says nothing; look at this link first")
        size, micros = (_number(cell[name], name) for name in ("size", "time"))
        if not (size and micros):
            raise ValueError("size and time must be above 0")
        algorithm, bus = (_number(cell[name], name) for name in ("algbw", "busbw"))
        sums = cell.get("redop", "none") != "none"
        return _TableRow(int(size), micros * 1e-6, algorithm, bus, int(cell.get("root", "-1")), sums)

    def _collective(self, rows: Sequence[_TableRow], ranks: int) -> Collective:
        """By the name of the program where it is said; else by what tells the tables apart."""
        if self.name:
            if self.name not in NAMES:
                raise UserError(
                    f"{self.where}: is of {self.name}_perf, from which no link follows; give one of {KNOWN}"
                )
            return NAMES[self.name]
        row = max(rows, key=lambda one: one.bus)  # its digits say most
        share = (ranks - 1) / ranks
        likely = {
            (True, False): {Collective.ALL_REDUCE: 2 * share, Collective.REDUCE_SCATTER: share},
            (False, False): {Collective.ALL_GATHER: share, Collective.SEND: 1.0},  # all-to-all: as all-gather
            (False, True): {Collective.BROADCAST: 1.0},
            (True, True): {},  # reduce
        }[row.sums, row.root >= 0]
        quotient = row.bus / row.algorithm if row.algorithm else math.nan
        rounding = DIGIT / row.algorithm + DIGIT / row.bus if row.algorithm and row.bus else math.nan
        near = [one for one, factor in likely.items() if abs(quotient / factor - 1.0) <= rounding]
        if not near:
            raise UserError(
                f"{self.where}: the columns algbw and busbw are those of none of {KNOWN} on {ranks} ranks; give the "
                "whole output of one of them, with a line for each rank"
            )
        return min(near, key=lambda one: abs(quotient / likely[one] - 1.0))


def _number(text: str, name: str) -> float:
    """A finite number of at least 0. Raises ValueError: it is none."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} is {shown(text)}; must be a number")
    return found
