"""In: ids.toml, the files of tests/. Out: each id has tests that exist, or says what is missing; none is forgotten.
Does not run them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
IDS = [*(f"F{number}" for number in range(1, 25)), *(f"S{number}" for number in range(1, 7))]
NAMED = re.compile(r"^def (test_((?:[fs]\d+_)+)\w+)\(", re.MULTILINE)
SCORES = "test_evaluate.py"
"""F1 is a score there."""


def read() -> dict[str, dict[str, object]]:
    return tomllib.loads((Path(__file__).parent / "ids.toml").read_text(encoding="utf-8"))


def test_each_fault_has_a_test_that_exists_or_says_what_is_missing() -> None:
    """Fault: a test is renamed or removed, and nobody sees that a fault has none any more."""
    table = read()
    assert list(table) == IDS
    problems = []
    for name, row in table.items():
        tests = row["tests"]
        assert isinstance(tests, list)
        for test in tests:
            file, _, function = test.partition("::")
            if not ((TESTS / file).is_file() and f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")):
                problems.append(f"{name}: there is no {test}")
        if not (tests or row.get("missing")):
            problems.append(f"{name}: has no test, and does not say why")
    assert not problems


def test_each_test_that_is_named_after_a_fault_stands_in_the_table() -> None:
    """Fault: a test of a fault is written, and the table goes on saying that something is missing."""
    table, problems = read(), []
    for path in sorted([*TESTS.glob("test_*.py"), *(TESTS / "faults").glob("test_*.py")]):
        if path.name == SCORES:
            continue
        for name, ids in NAMED.findall(path.read_text(encoding="utf-8")):
            test = f"{path.relative_to(TESTS).as_posix()}::{name}"
            tests = [(one, table[one]["tests"]) for one in ids.upper().strip("_").split("_")]
            problems += [f"{one}: {test} is not in the table" for one, known in tests if test not in str(known)]
    assert not problems
