"""In: files of runs and studies with damage that their format allows. Out: one sentence that names the place.
Does not damage at random: the fuzzer does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reported import make_run
from runs import called, environment, make_project

from codescent.base.errors import UserError
from codescent.base.visible import visible
from codescent.record import RunFolder
from codescent.report.style import no_matplotlib
from codescent.results import open_run, open_runs
from codescent.results.typical import rows_of
from codescent.study.folder import Definition, StudyFolder
from codescent.study.points import Spec
from codescent.study.result import Kind

SPEC = Spec("ranks=1", "ranks-1", {"ranks": 1}, {"parallel.ranks": 1}, 1)


def _studied(path: Path) -> StudyFolder:
    given: dict[str, Any] = {"baseline": {"ranks": 1}, "axes": ["ranks"], "specs": [SPEC], "refused": {}}
    return StudyFolder.create(path, Definition("a", Kind.STRONG, "run.toml", 2, 3, 1, **given))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("cores", "many", "cores: given 'many'; must be a whole number"),
        ("load", float("nan"), "load: given 'nan'; must be a number"),
        ("ranks", [1], "ranks: given '[1]'; must be a list of objects"),
        ("world_size", 10**400, "world_size: given"),
    ],
)
def test_facts_of_another_type_are_named(name: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    file = folder.path / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(UserError, match=r"environment\.json: ") as caught:
        open_run(folder.path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ['{"step": 1}', '{"kind": []}', '{"kind": "stop", "wall_time": "inf"}', '{"kind": "profile", "steps": [1, "x"]}'],
)
def test_a_line_that_is_no_event_is_named(line: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    with (folder.path / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"events.jsonl line 3: not an event: "):
        open_run(folder.path)


def test_events_without_a_time_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder.path / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "end"}\n')
    assert len(rows_of(open_run(folder.path), 5)) == 35


def test_an_empty_field_of_ranks_csv_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    with (folder.path / "ranks.csv").open("a") as file:
        file.write("50,0,10,,0,0,0,0,0,0,1\n")
    with pytest.raises(UserError, match=r"ranks.csv line 6: not a row of 11 numbers"):
        list(folder.iter_ranks())


def test_a_number_of_a_table_that_no_float_holds_is_named(tmp_path: Path) -> None:
    """A traceback of a report, where bytes are compared with those that were predicted."""
    folder = make_run(tmp_path / "a")
    with (folder.path / "ranks.csv").open("a") as file:
        file.write(f"50,0,10,0,0,0,0,0,0,0,{'9' * 400}\n")
    with pytest.raises(UserError, match=r"ranks.csv line 6: .* \(peak_memory_bytes: more than 64 bits\)"):
        list(folder.iter_ranks())


def test_a_plan_with_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    file = make_run(tmp_path / "a").path / "plan.json"
    data = json.loads(file.read_text())
    data["tensors"][0]["weight_dtype"] = {"": ""}
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"plan.json: not a plan .*is not str"):
        assert open_run(file.parent).plan


@pytest.mark.parametrize("place", [("work", "seq_len"), ("model", "dropout"), ("model", "forward_flops", 0)])
def test_a_number_of_a_plan_that_no_float_holds_is_named(place: tuple[str | int, ...], tmp_path: Path) -> None:
    """A traceback where a report or a price computes with it."""
    file = make_run(tmp_path / "a").path / "plan.json"
    data = json.loads(file.read_text())
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = 10**400
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"plan.json: not a plan .*is too large"):
        assert open_run(file.parent).plan


@pytest.mark.parametrize("text", ["[]", '"10"', "[" * 100_000, "{", '{"wall_s": "x"}', '{"why": 5}', "\x00"])
def test_a_damaged_record_of_a_repeat_is_named(text: str, tmp_path: Path) -> None:
    folder = _studied(tmp_path / "s")
    (folder.path / "ranks-1").mkdir()
    (folder.path / "ranks-1" / "1.json").write_text(text)
    with pytest.raises(UserError, match=r"ranks-1/1.json: .*delete the file, and the study goes on without it"):
        folder.attempts(SPEC)


@pytest.mark.parametrize(
    ("name", "value"),
    [("repeats", "two"), ("specs", [5]), ("specs", None), ("axes", 1), ("kind", "x"), ("baseline", []), ("refused", 3)],
)
def test_a_damaged_definition_is_named(name: str, value: Any, tmp_path: Path) -> None:
    file = _studied(tmp_path / "s").path / "study.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(UserError, match=rf"study.json: not readable as the definition of a study \({name}"):
        StudyFolder.open(file.parent)


def test_a_definition_names_no_folder_elsewhere(tmp_path: Path) -> None:
    file = _studied(tmp_path / "s").path / "study.json"
    file.write_text(file.read_text().replace('"slug": "ranks-1"', '"slug": "../../home"'))
    with pytest.raises(UserError, match="must be the name of a folder"):
        StudyFolder.open(file.parent)


def test_a_run_that_still_trains_is_not_removed(tmp_path: Path) -> None:
    folder = _studied(tmp_path / "s")
    writer = RunFolder.create(folder.run_path(SPEC, 1), "", {})
    writer.hold()
    with pytest.raises(UserError, match="is being written by process"):
        folder.forget(SPEC, 1)
    writer.release()
    folder.forget(SPEC, 1)
    assert not writer.path.exists()


def test_the_definition_of_a_study_that_runs_stays(tmp_path: Path) -> None:
    folder = _studied(tmp_path / "s")
    before = (folder.path / "study.json").read_bytes()
    given: dict[str, Any] = {"baseline": {"ranks": 1}, "axes": ["ranks"], "specs": [SPEC], "refused": {}}
    with folder.hold():
        _studied(folder.path)
        with pytest.raises(UserError, match="another process runs this study"):
            StudyFolder.create(folder.path, Definition("a", Kind.STRONG, "run.toml", 3, 3, 1, **given))
    assert (folder.path / "study.json").read_bytes() == before


def test_names_that_are_not_utf8_can_be_printed() -> None:
    assert visible(b"runs/\xff".decode("utf-8", "surrogateescape")) == r"runs/\udcff"


def test_a_circle_of_links_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop: is a file, not a run folder"):
        open_runs([tmp_path / "loop"])
    end = called(tmp_path, "compare", "loop", "loop")
    assert (end.returncode, "Traceback" in end.stderr) == (2, False)


def test_a_matplotlib_that_cannot_be_imported_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "cannot be imported" in no_matplotlib()


def test_a_stream_of_another_encoding_gets_escapes(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    command = [sys.executable, "-m", "codescent", "report", "a", "--markdown"]
    end = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONIOENCODING="ascii"), capture_output=True)
    assert end.returncode == 0, end.stderr
    assert end.stdout.isascii()


def test_a_run_ends_with_the_command_that_waits_for_it(tmp_path: Path) -> None:
    """A command that is killed with -9 cannot stop its run."""
    script = "import os; from codescent.base.parent import end_with_command; end_with_command(); import time; {}"
    child = script.format("print('ready', flush=True); time.sleep(60)")
    parent = (
        "import os, subprocess, sys; from codescent.base.parent import PARENT; os.environ[PARENT] = str(os.getpid());"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == b"ready\n"
        started.kill()
        assert b"because its parent process" in started.stderr.read()  # up to the end of the child, which has it open


def test_a_name_is_one_line_and_its_folder_fits_a_disk(tmp_path: Path) -> None:
    """`--list` prints names as comments for a shell: a line end in one would be a command."""
    make_project(tmp_path)
    names = ("a\\nrm -rf x", "é" * 200)
    axes = "".join(f'[axes.io."{name}"]\ntrain.global_batch_size = {8 * at}\n' for at, name in enumerate(names, 1))
    keys = f'name = "a"\nconfig = "run.toml"\nkind = "grid"\nbaseline = {{ io = "{names[1]}" }}\n'
    (tmp_path / "study.toml").write_text(f"[study]\n{keys}{axes}")
    end = called(tmp_path, "study", "study.toml", "--list")
    assert (end.returncode, end.stderr.count("error")) == (0, 0)
    assert [line.split()[0] for line in end.stdout.splitlines()] == ["#", *["#", "for"] * 2]
