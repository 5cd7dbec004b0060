"""In: files of runs and studies with damage that their format allows. Out: one sentence that names the place.
Does not damage at random: the fuzzer does."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reported import make_run
from runs import called, environment, make_project

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.visible import visible
from codescent.hub.errors import brief
from codescent.record import RunFolder
from codescent.report.style import no_matplotlib
from codescent.results import open_run, open_runs
from codescent.results.typical import rows_of
from codescent.study import open_study
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


def _changed(file: Path, line: int, **values: Any) -> None:
    """Give values to a line of a file of JSON lines."""
    lines = file.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **values})
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "nan", 1e-13, 1e13, "abc", [1]])
def test_a_step_that_took_no_time_or_for_ever_is_named(value: Any, tmp_path: Path) -> None:
    """Divided by, such seconds ended commands with a ZeroDivisionError, or stood in tables."""
    folder = make_run(tmp_path / "a", steps=3)
    _changed(folder.path / "metrics.jsonl", 2, step_s=value)
    said = r"metrics\.jsonl line 2: not a row of \d+ numbers \(step_s: given .*; must be seconds above 0"
    with pytest.raises(UserError, match=said):
        _ = open_run(folder.path).columns


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"step": 10**30}, f"step: given '{10**30}'; must be a whole number"),
        ({"step": "x"}, "step: given 'x'; must be a whole number"),
        ({"step": 1.5}, "step: given '1.5'; must be a whole number"),
        ({"forward_s": math.nan}, "forward_s: given 'nan'; must be a finite number"),
        ({"train_loss": "abc"}, "train_loss: given 'abc'; must be a number"),
    ],
)
def test_a_number_of_the_metrics_that_none_can_be_is_named(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=3)
    _changed(folder.path / "metrics.jsonl", 3, **values)
    with pytest.raises(UserError, match=rf"metrics\.jsonl line 3: .*\({said}"):
        _ = open_run(folder.path).columns


def test_a_loss_may_be_no_number(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=3)
    _changed(folder.path / "metrics.jsonl", 2, train_loss="nan", grad_norm="inf")
    columns = open_run(folder.path).columns
    assert math.isnan(columns["train_loss"][1])
    assert columns["grad_norm"][1] == math.inf


def test_damage_of_ranks_csv_is_named(tmp_path: Path) -> None:
    """Rows of another run, or with a NaN, were read in silence. A run that is continued may have had more ranks."""
    folder = make_run(tmp_path / "a", 2)
    file = folder.path / "ranks.csv"
    whole = file.read_text()
    file.write_text(whole.replace("\n20,1,", "\n20,9,"))
    with pytest.raises(UserError, match=r"ranks\.csv line 5: rank 9 of a run of 2 ranks"):
        _ = open_run(folder.path).ranks
    folder.event("resume", step=20)
    assert len(open_run(folder.path).ranks) == 8
    (folder.path / "events.jsonl").write_text('{"kind": "start"}\n')
    (folder.path / "plan.json").write_text('{"work": {}}')  # of an older version
    (folder.path / "environment.json").unlink()
    assert len(open_run(folder.path).ranks) == 8, "the number of ranks is not known"
    file.write_text(whole.replace("0.02", "nan", 1))
    with pytest.raises(UserError, match=r"ranks\.csv line 2: .*\(forward_s: given nan; must be a finite number\)"):
        _ = open_run(folder.path).ranks


def test_a_cut_last_row_of_a_run_that_has_ended_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was killed may have one: that is no damage."""
    for name, events in (("done", (("end", {}),)), ("killed", ())):
        file = make_run(tmp_path / name, steps=3, events=events).path / "metrics.jsonl"
        file.write_text(file.read_text()[:-9])
        caplog.clear()
        assert open_run(file.parent).steps == 2
        said = f"{file}: its last row is cut short and left out, though the run has ended: copy the file again"
        assert [record.getMessage() for record in caplog.records] == [said] * (name == "done")


def test_unknown_keys_of_a_config_are_said_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "a", keys="[model]\nfoo = 1\nnum_layers = 4\n[bar]\nx = 1\n")
    open_run(folder.path)
    keys = open_run(folder.path).keys
    assert (keys["model.num_layers"], {"model.foo", "bar.x"} & keys.keys()) == (4, set())
    file = folder.path / "config.toml"
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: model.foo is left out: this version has no such key",
        f"{file}: [bar] is left out: this version has no such section",
    ]


def test_an_environment_without_facts_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder.path / "environment.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match=r"environment\.json: has no torch: restore the file, or delete it"):
        open_run(folder.path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[]", "not a JSON object"),
        (b"", "empty"),
        (b"\xb7a", "not UTF-8 text from byte 0 on"),
        (b'{"format": 1,\n"name', "cut short at line 2 column 1"),
        (b'{"format": 1.', "cut short at column 13"),
        (b'{"format": tru', "cut short at column 12"),
        (b'{"format": true, x', "wrong at column 18"),
        (b'{"format" 1}', "wrong at column 11"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": ' + b"1" * 5000 + b"}", "a number has too many digits"),
    ],
)
def test_damaged_json_is_said_in_plain_words(text: bytes, said: str, tmp_path: Path) -> None:
    """Not in those of Python's readers. All files of JSON are read so."""
    file = _studied(tmp_path / "s").path / "study.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as caught:
        StudyFolder.open(file.parent)
    assert str(caught.value) == f"{file}: not readable as the definition of a study ({said})"


def test_a_file_that_cannot_be_opened_is_said_without_numbers_of_python() -> None:
    error = OSError(-2, "Name or service not known")
    assert json_problem(error) == brief(error) == "Name or service not known"


def test_a_bad_run_says_how_its_study_goes_on(tmp_path: Path) -> None:
    """Without rows, or with a damaged one, it stopped the whole study, without a word on what to do."""
    folder = _studied(tmp_path / "s")
    file = make_run(folder.run_path(SPEC, 1), steps=4).path / "metrics.jsonl"
    whole = file.read_text()
    going_on = f"delete {file.parent}, and the study goes on without this run"
    for text, said in (
        ("", f"{file.parent}: has no step after the 1 of the warm-up; {going_on}"),
        (whole.replace('"step_s": 0', '"step_s": -1'), f"mend the file, or {going_on}"),
        (whole.replace('"step_s"', '"before"'), f"{file}: a row after the warm-up has no step_s; {going_on}"),
    ):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            open_study(folder.path)
        assert said in str(caught.value)


def test_runs_of_other_models_are_named(tmp_path: Path) -> None:
    folder = _studied(tmp_path / "s")
    for number in (1, 2):
        make_run(folder.run_path(SPEC, number), keys=f"[model]\nnum_layers = {number}\n")
    with pytest.raises(UserError, match=r"different models, such as .*/1 and .*/2, which differ in model.num_layers"):
        open_study(folder.path)


def test_a_report_without_a_row_of_metrics_says_so(tmp_path: Path) -> None:
    """A plot has nothing to draw then, and is refused. A report says why there is nothing."""
    make_run(tmp_path / "empty", losses=[], steps=0, events=(("error", {"problems": ["the disk is full"]}),))
    done = called(tmp_path, "report", "empty", "--markdown")
    assert (done.returncode, done.stderr) == (0, "empty: has no row of metrics yet\n")
    assert "No step was measured: empty." in done.stdout
    assert "the disk is full" in done.stdout


def test_a_study_that_has_lost_its_definition_is_named(tmp_path: Path) -> None:
    folder = _studied(tmp_path / "s")
    (folder.path / "study.json").rename(folder.path / "study.csv")
    for verb in ("report", "study"):
        done = called(tmp_path, verb, "s")
        assert done.returncode == 2
        assert "s: " in done.stderr
        assert "study.json" in done.stderr


@pytest.mark.parametrize("verb", ["study", "report"])
def test_formulas_are_listed_as_they_are_written(verb: str, tmp_path: Path) -> None:
    done = called(tmp_path, verb, "s", "--formula", "foo")
    assert done.returncode == 2
    assert "invalid choice: 'foo' (choose from " in done.stderr
    assert "FlopFormula" not in done.stderr
