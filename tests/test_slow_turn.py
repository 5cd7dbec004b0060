"""In: slow tests with their seconds, changed files, turns. Out: what CI runs of them, and that none is forgotten.
Does not run slow tests."""

from __future__ import annotations

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from slow import choose as slow
from slow.choose import FOLDER, ROOT, TURNS, affected, choose, measured, rooms_of, split

SECONDS = {f"tests/test_{number % 17}.py::test_{number}": float(1 + number % 90) for number in range(300)}
TABLE = tomllib.loads((FOLDER / "rooms.toml").read_text(encoding="utf-8"))


def test_each_slow_test_runs_in_ten_turns_whatever_rooms_change_and_however_little_time_there_is() -> None:
    for spend, touched in ((0.0, []), (100.0, list(SECONDS)[:200]), (600.0, [])):
        ran = {name for turn in range(7, 7 + TURNS) for name in choose(SECONDS, touched, turn, spend, 3).all}
        assert ran == set(SECONDS)
    fewer = dict(list(SECONDS.items())[::2])  # tests that stay are in the same part, so none misses its turn
    assert all(set(kept) <= set(before) for kept, before in zip(split(fewer), split(SECONDS), strict=True))


def test_tests_of_changed_rooms_come_before_others_and_the_time_is_kept() -> None:
    touched = [name for name in SECONDS if name.startswith("tests/test_3.py")]
    for turn in range(TURNS):
        found = choose(SECONDS, touched, turn, 1500.0, 2)
        assert len(found.all) == len(set(found.all))
        assert set(touched) <= {*found.due, *found.touched}
        assert found.others
        assert sum(map(SECONDS.__getitem__, found.all)) <= 3000
    assert choose(SECONDS, touched, 2, 1500.0).others != choose(SECONDS, touched, 3, 1500.0).others


def test_changed_files_lead_to_tests_by_the_table() -> None:
    files = [
        "codescent/jobs/room.py",
        "codescent/preflight.py",
        "codescent/__init__.py",
        "tests/test_lora.py",
        "README.md",
    ]
    assert rooms_of(files) == ["jobs", "preflight"]
    names = ["tests/test_jobs_runs.py::test_a", "tests/test_lora.py::test_b", "tests/test_muon.py::test_c"]
    assert affected(files, names, TABLE) == names[:2]


def test_the_table_has_each_room_and_leads_to_each_file_with_slow_tests() -> None:
    rooms = {path.stem for path in (ROOT / "codescent").iterdir() if path.stem[0] != "_" and path.stem != "py"}
    assert set(TABLE) == rooms
    files = [path for folder in ("tests", "tests/faults") for path in (ROOT / folder).glob("test_*.py")]
    stems = [path.stem for path in files]
    patterns = [pattern for row in TABLE.values() for pattern in row]
    assert [pattern for pattern in patterns if not any(fnmatch(stem, pattern) for stem in stems)] == []
    lines = (FOLDER / "listed.txt").read_text(encoding="utf-8").splitlines()
    has_slow = {Path(line.partition("::")[0]).stem for line in lines if not line.startswith("#")}
    has_slow |= {path.stem for path in files if "mark.slow" in path.read_text(encoding="utf-8")}
    has_slow -= {Path(__file__).stem}
    assert [stem for stem in has_slow if not any(fnmatch(stem, pattern) for pattern in patterns)] == []


def test_the_script_of_ci_can_be_read() -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], check=True)


def test_each_line_of_the_list_names_a_function_that_is_there() -> None:
    lines = (FOLDER / "listed.txt").read_text(encoding="utf-8").splitlines()
    names = {line.partition("[")[0].partition("::")[::2] for line in lines if not line.startswith("#")}
    gone = [
        f"{file}::{name}" for file, name in names if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert not gone


def test_seconds_are_summed_over_the_cases_of_a_function(tmp_path: Path) -> None:
    case = '<testcase classname="tests.test_x" name="test_y[{}]" time="1.5">{}</testcase>'
    cases = [case.format("a", ""), case.format("b::c", ""), case.format("d", "<skipped/>")]
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert measured([tmp_path / "report.xml"]) == {"tests/test_x.py::test_y": 3.0}


def test_the_choice_is_printed_with_its_table_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["tests/test_jobs_runs.py::test_a", "tests/test_lora.py::test_b", "tests/test_muon.py::test_c"]
    monkeypatch.setattr(slow, "slow_tests", lambda: names)
    monkeypatch.setattr(slow, "changed_files", lambda since: ["codescent/jobs/room.py"])
    monkeypatch.setattr(slow, "read_seconds", lambda: {names[0]: 40.0, names[1]: 900.0})
    turn = next(number for number in range(TURNS) if not any(name in split(names)[number] for name in names))
    assert slow.main(["--turn", str(turn), "--spend", "100", "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text().splitlines() == [names[0], names[2]]
    said = capsys.readouterr().out
    assert f"jobs         {' '.join(TABLE['jobs'])}" in said
    assert "of changed rooms: 1 tests, 40 s\nothers: 1 tests, 30 s" in said
    monkeypatch.setattr(slow, "changed_files", lambda since: None)
    slow.main(["--turn", "0"])
    assert "git names no commits" in capsys.readouterr().out
