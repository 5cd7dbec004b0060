"""In: the table of `make mutants`; a small checkout with faults. Out: the table fits the code; verdicts are right.
Does not plant a fault of the table: `make mutants` does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutants.plant import ROOT, TABLE, faults, main, problems
from mutants.plant import __file__ as PLANT

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
    assert main(["any", "none", "nobody"], checkout) == 2
    assert capsys.readouterr().err.splitlines() == [f"no fault has {name} in its name" for name in ("none", "nobody")]


@pytest.mark.parametrize("content", ["no JSON", '[{"name": "any"}]', "[3]"])
def test_wrong_words_are_all_refused_before_a_fault_is_planted(
    checkout: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (checkout / TABLE).write_text(fault("any", "number * 2", "number + 2"))
    results, table = tmp_path / "results.json", tmp_path / "absent" / "table.md"
    results.write_text(content)
    assert main(["none", "--results", str(results), "--markdown", str(table)], checkout) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["no fault has none in its name", f"--markdown {table}: there is no folder {table.parent}"]
    assert [line.startswith(f"--results {results}: not the outcomes of faults") for line in said[2:]] == [True]
    assert results.read_text() == content
    with pytest.raises(SystemExit, match="2"):
        main(["--jobs", "0"], checkout)
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_interrupted_leaves_no_test_and_no_copy(
    checkout: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (checkout / TABLE).write_text(fault("any", "number * 2", "number + 2"))
    shutil.copy(PLANT, checkout / "tests" / "mutants")
    begun, tests, copies = tmp_path / "begun", checkout / "tests" / "test_sums.py", tmp_path / "copies"
    tests.write_text(
        f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    copies.mkdir()
    words = [sys.executable, str(checkout / "tests" / "mutants" / "plant.py")]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(copies)}, stderr=subprocess.PIPE, text=True) as run:
        while not (begun.exists() and begun.read_text()):
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(number)
        said = run.communicate(timeout=50)[1]
    assert run.returncode == 128 + number
    assert said.splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in said
    assert not Path(f"/proc/{begun.read_text()}").exists()
    assert not list(copies.iterdir())
