"""In: the table of `make mutants`; a small checkout with faults. Out: the table fits the code; verdicts are right.
Does not plant a fault of the table: `make mutants` does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mutants import plant
from mutants.plant import ROOT, TABLE, faults, main, problems

ROOMS = {"plan", "strategies", "train", "operators", "checkpoint", "base", "data", "tasks"}

CODE = """
def double(number):
    return number * 2


def half(number):
    return number / 2
"""
TESTS = """
import subprocess, sys
from codescent.sums import double

def test_double():
    assert double(3) == 6

def test_a_child_has_the_same_package():
    program = "from codescent.sums import half; print(half(3))"
    said = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=True).stdout
    assert said == "1.5\\n"

def test_of_nobody():
    assert "sound" != "un" + "sound"
"""
FAULT = """
[[fault]]
name = "{name}"
file = "sums.py"
old = '''{old}'''
new = '''{new}'''
does = "Sums are wrong."
tests = ["{test}"]
"""


def fault(name: str, old: str, new: str, test: str = "test_sums.py") -> str:
    return FAULT.format(name=name, old=old, new=new, test=test)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in {"codescent/__init__.py": "", "codescent/sums.py": CODE, "tests/test_sums.py": TESTS}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / TABLE).parent.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def test_every_fault_of_the_table_can_be_planted() -> None:
    found = faults()
    assert problems(found, ROOT) == []
    assert len(found) >= 60
    assert {fault.file.split("/")[0] for fault in found} >= ROOMS


def test_what_is_caught_and_what_is_not(checkout: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = fault("caught", "number * 2", "number + 2", "test_sums.py::test_double")
    table += fault("in-a-child", "number / 2", "number // 2")
    table += fault("not-likely", "number / 2", "number - 2", "test_sums.py::test_double")
    (checkout / TABLE).write_text(table)
    results, words = tmp_path / "results.json", ["--results", str(tmp_path / "results.json"), "--jobs", "2"]
    assert main([*words, "--likely-only"], checkout) == 1
    assert "66.7% of 3 faults are caught" in capsys.readouterr().out
    assert main([*words, "--markdown", str(tmp_path / "table.md")], checkout) == 0  # tries only what is left
    child = "tests/test_sums.py::test_a_child_has_the_same_package"
    tests = {row["name"]: (row["test"], row["whole_suite"]) for row in json.loads(results.read_text())}
    double = ("tests/test_sums.py::test_double", False)
    assert tests == {"caught": double, "in-a-child": (child, False), "not-likely": (child, True)}
    assert "3 of 3 faults are caught." in (tmp_path / "table.md").read_text()
    assert (checkout / "codescent" / "sums.py").read_text() == CODE


def test_a_test_that_fails_without_a_fault_catches_none(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / TABLE).write_text(fault("any", "number * 2", "number + 2", "test_sums.py::test_of_nobody"))
    tests = checkout / "tests" / "test_sums.py"
    tests.write_text(tests.read_text().replace("!=", "=="))
    assert main([], checkout) == 2
    assert "these tests fail without a fault" in capsys.readouterr().err
    (checkout / "pytest.ini").write_text("[pytest]\naddopts = -k double\n")
    assert main([], checkout) == 2  # deselected, as a slow test is
    assert "test_of_nobody ended with 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (fault("gone", "number * 3", "number"), "gone: its text occurs 0 times in codescent/sums.py"),
        (fault("twice", "number", "n"), "twice: its text occurs 4 times"),
        (fault("broken", "number * 2", "number *"), "broken: codescent/sums.py does not compile with it"),
        (fault("nothing", "number * 2", "(number * 2)"), "nothing: it changes nothing in codescent/sums.py"),
        (
            fault("untested", "number * 2", "0", "test_sums.py::test_half"),
            "tests/test_sums.py::test_half does not exist",
        ),
        (fault("same", "number * 2", "0") + fault("same", "number / 2", "0"), "same: this name occurs more than once"),
    ],
)
def test_a_table_that_has_rotted_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], row: str, said: str
) -> None:
    (checkout / TABLE).write_text(row)
    assert main([], checkout) == 2
    assert said in capsys.readouterr().err


def test_a_name_that_no_fault_has_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / TABLE).write_text(fault("any", "number * 2", "number + 2"))
    assert main(["none"], checkout) == 2
    assert "no fault has none in its name" in capsys.readouterr().err


ENDLESS = """
import os, time
from pathlib import Path

def test_endless():
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_signal_ends_the_tests_and_leaves_no_folder(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "test_sums.py").write_text(ENDLESS)
    (checkout / TABLE).write_text(fault("one", "number * 2", "0") + fault("two", "number / 2", "0"))
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    for folder in (pids, temporary):
        folder.mkdir()
    program = shutil.copy(plant.__file__, checkout / "tests" / "mutants")
    env = {**os.environ, "PIDS": str(pids), "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, program, "--jobs", "2"], env=env)
    while len(list(pids.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    assert not [pid for pid in pids.iterdir() if psutil.pid_exists(int(pid.name))]
    assert not list(temporary.iterdir())
