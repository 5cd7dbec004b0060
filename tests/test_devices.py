"""In: the program behind `make cuda`. Out: that it refuses a machine without a device, and reports what was skipped.
Does not need a device: the tests marked cuda skip here, and no benchmark runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from devices import run


@pytest.mark.parametrize(("lacks", "expected"), [([], "no CUDA device here"), (["torch"], "lacks torch, torch;")])
def test_without_a_device_or_a_package_nothing_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: list[str], expected: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
        patch.setattr(run, "run", lambda *_: pytest.fail("something was run"))
        if lacks:
            patch.setattr(run, "missing", lambda names: ["torch", "torch"])
        assert run.main() == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_packages_are_looked_for_by_their_names() -> None:
    assert run.missing(["torch", "no-such-package"]) == ["no-such-package"]
    assert {"torch", "pydantic", "tomli-w"} <= set(run.dependencies())


def test_each_skipped_test_is_told_with_its_reason(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        """<testsuites><testsuite><testcase classname="tests.test_a" name="test_x[1]" time="0.5" />
        <testcase classname="tests.test_a" name="test_y" time="0"><skipped message="needs 2 CUDA devices" /></testcase>
        <testcase classname="tests.test_b" name="test_z" time="2"><failure message="assert 1&#10;more">...</failure>
        </testcase></testsuite></testsuites>"""
    )
    found = list(run.outcomes(report))
    assert [(one["test"], one["outcome"], one["why"]) for one in found] == [
        ("test_a::test_x[1]", "passed", ""),
        ("test_a::test_y", "skipped", "needs 2 CUDA devices"),
        ("test_b::test_z", "failure", "assert 1"),
    ]


def test_a_part_that_does_not_end_is_interrupted() -> None:
    assert run.run("tests", [sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert run.run("tests", [sys.executable, "-c", "import time; time.sleep(1000)"], 0.5) is None


@pytest.mark.slow
def test_tests_that_skip_are_in_the_json(tmp_path: Path) -> None:
    """The real tests, on a machine that hides its devices."""
    passed, skipped = run.run_tests(tmp_path, 1)
    found = json.loads((tmp_path / "tests.json").read_text())
    assert passed
    assert len(skipped) == len(found["tests"]) > 50
    assert {one["outcome"] for one in found["tests"]} == {"skipped"}
    assert any("needs 4 CUDA devices" in line for line in skipped)
