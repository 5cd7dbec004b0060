"""In: files that the last day's commits changed, the number of a turn, seconds to spend. Out: slow tests to run now.
Does not run them: `make turn` does. In ten turns each slow test is chosen at least once."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from zlib import crc32

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
TURNS = 10
"""After so many turns each slow test has run at least once."""
SLOW = "slow and not cuda"
UNMEASURED_S = 30.0
"""Seconds that are assumed for a test that no measurement knows."""


@dataclass(frozen=True)
class Choice:
    """Names of test functions, such as tests/test_x.py::test_y, and why each group was taken."""

    due: tuple[str, ...]
    touched: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def all(self) -> list[str]:
        """All names, each once."""
        return [*self.due, *self.touched, *self.others]


def choose(seconds: Mapping[str, float], touched: Iterable[str], turn: int, spend_s: float, jobs: int = 1) -> Choice:
    """Choose slow tests: those whose turn it is, then those of touched rooms, then others, while they fit.

    Those whose turn it is are taken in any case.

    Args:
        seconds: of each slow test function, all its cases together.
        touched: those of them that test a room which has changed.
        turn: the part of this number (modulo TURNS) is due.
        spend_s: so many seconds may pass.
        jobs: tests that run at a time.
    """
    parts = split(seconds)
    order = [name for number in range(TURNS) for name in parts[(turn + number) % TURNS]]
    due = parts[turn % TURNS]
    left = spend_s * jobs - sum(seconds[name] for name in due)
    first = set(touched)
    taken: dict[bool, list[str]] = {True: [], False: []}
    for is_touched in (True, False):
        for name in order[len(due) :]:
            if (name in first) == is_touched and seconds[name] <= left:
                taken[is_touched].append(name)
                left -= seconds[name]
    return Choice(tuple(due), tuple(taken[True]), tuple(taken[False]))


def split(names: Iterable[str]) -> list[list[str]]:
    """TURNS parts. A test stays in its part when other tests come and go, so no turn passes it over."""
    parts: list[list[str]] = [[] for _ in range(TURNS)]
    for name in sorted(names):
        parts[crc32(name.encode()) % TURNS].append(name)
    return parts


def rooms_of(files: Iterable[str]) -> list[str]:
    """The rooms of codescent/ that these files are in."""
    inside = (file.split("/") for file in files if file.startswith("codescent/"))
    return sorted({parts[1].removesuffix(".py") for parts in inside if not parts[1].startswith("_")})


def affected(files: Sequence[str], names: Iterable[str], table: Mapping[str, Sequence[str]]) -> list[str]:
    """Of `names`, the tests of rooms with a changed file, and of test files that have changed themselves."""
    patterns = [pattern for room in rooms_of(files) for pattern in table.get(room, ())]
    changed = {Path(file).stem for file in files if file.startswith(("tests/test_", "tests/faults/test_"))}
    stems = {name: Path(name.partition("::")[0]).stem for name in names}
    return [
        name for name, stem in stems.items() if stem in changed or any(fnmatch(stem, pattern) for pattern in patterns)
    ]


def changed_files(since: str) -> list[str] | None:
    """Files that commits since then have changed; None: git cannot say."""
    words = ["git", "log", f"--since={since}", "--name-only", "--format="]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return sorted(set(filter(None, done.stdout.splitlines()))) if done.returncode == 0 else None


def slow_tests() -> list[str]:
    """The slow test functions, as pytest collects them. Ends the program if a line of listed.txt names no test."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "-m",
        SLOW,
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    cases = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    names = list(dict.fromkeys(case.partition("[")[0] for case in cases))
    if not names:
        raise SystemExit(f"pytest collects no slow test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = (FOLDER / "listed.txt").read_text(encoding="utf-8").splitlines()
    if dead := {line for line in lines if not line.startswith("#")} - {*cases, *names}:
        raise SystemExit("\n".join(["tests/slow/listed.txt names no test:", *sorted(dead)]))
    return names


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds of each test function in reports that `pytest --junitxml` wrote, all its cases together."""
    found: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("skipped") is None and "classname" in case.attrib:  # without one: pytest was interrupted
                file = case.attrib["classname"].replace(".", "/")
                found[f"{file}.py::{case.attrib['name'].partition('[')[0]}"] += float(case.attrib["time"])
    return dict(found)


def read_seconds() -> dict[str, float]:
    """What seconds.toml says."""
    return dict(tomllib.loads((FOLDER / "seconds.toml").read_text(encoding="utf-8")))


def write_seconds(found: Mapping[str, float]) -> None:
    """Write seconds.toml."""
    head = "# Seconds of the slow tests, all cases of a function together: choose.py --measured REPORT.xml writes it.\n"
    lines = "".join(f'"{name}" = {value:.1f}\n' for name, value in sorted(found.items()))
    (FOLDER / "seconds.toml").write_text(head + lines, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Choose the slow tests of one run of the CI.")
    parser.add_argument("--spend", type=float, default=900, help="seconds that may pass (default 900)")
    parser.add_argument("--jobs", type=int, default=3, help="tests that run at a time (default 3)")
    parser.add_argument("--turn", type=int, default=None, help="number of the turn (default: tests/slow/turn)")
    parser.add_argument("--since", default="1 day ago", help='commits that count as new (default "1 day ago")')
    parser.add_argument("--out", type=Path, help="write the names into this file, one a line")
    parser.add_argument(
        "--measured", type=Path, nargs="+", help="reports of --junitxml: write their seconds down; no choice"
    )
    given = parser.parse_args(words)
    names = slow_tests()
    if given.measured:
        known = {**read_seconds(), **measured(given.measured)}
        write_seconds({name: known[name] for name in names if name in known})
        return 0
    known = read_seconds()
    seconds = {name: known.get(name, UNMEASURED_S) for name in names}
    turn = int((FOLDER / "turn").read_text(encoding="utf-8")) if given.turn is None else given.turn
    table = tomllib.loads((FOLDER / "rooms.toml").read_text(encoding="utf-8"))
    files = changed_files(given.since)
    choice = choose(seconds, affected(files or [], names, table), turn, given.spend, given.jobs)
    print_choice(choice, seconds, files, table, turn)
    if given.out:
        given.out.write_text("".join(f"{name}\n" for name in choice.all), encoding="utf-8")
    return 0


def print_choice(
    choice: Choice,
    seconds: Mapping[str, float],
    files: Sequence[str] | None,
    table: Mapping[str, Sequence[str]],
    turn: int,
) -> None:
    """Say what was chosen, and why."""
    if files is None:
        print("git names no commits: no room counts as changed")
    for room in rooms_of(files or []):
        print(f"{room:12} {' '.join(table.get(room, ['no tests are named']))}")
    said = (("due", choice.due), ("of changed rooms", choice.touched), ("others", choice.others))
    for why, names in said:
        print(f"{why}: {len(names)} tests, {sum(map(seconds.__getitem__, names)):.0f} s")
    left = len(seconds) - len(choice.all)
    print(f"turn {turn} of {TURNS}: {len(choice.all)} of {len(seconds)} slow tests; {left} wait for another turn")


if __name__ == "__main__":
    raise SystemExit(main())
