"""In: configs whose log.to names functions, good and bad. Out: they get what the run folder gets, and end no run.
Does not test TensorBoard's reader, only that its files hold the rows."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from runs import called, codescent, make_project
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from codescent.base.errors import UserError
from codescent.base.own_names import add_folders
from codescent.record import RunFolder
from codescent.train.board import Board
from codescent.train.loggers import FAILURES_ALLOWED, Failure, Logger, Loggers, find, load

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "log_to_sqlite.py"
WRITES = """
import json, os
def log(kind, data):
    with open("got.jsonl", "a") as file:
        file.write(json.dumps([os.getpid(), kind, data]) + "\\n")
"""
FAILS = """
def log(kind, data):
    if kind == "metrics" and data["step"] != 2:
        raise ConnectionError(f"no server at step {data['step']}")
"""
SHORT = ("train.num_steps=15", "train.eval_every=10")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project. Modules that a test imports, and their folders, are forgotten."""
    make_project(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mine", "good"):
        sys.modules.pop(name, None)


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    return run.read_metrics()


def test_functions_get_what_the_run_folder_gets_on_rank_0_alone(project: Path, forker: Forker) -> None:
    (project / "writes.py").write_text(WRITES)
    words = (*SHORT, "run.name=run", "log.to=writes:log", "checkpoint.every=10")
    assert forker.run(project, 2, (*words, "train.num_steps=12", "optimizer.decay_steps=15")).codes == [0, 0]
    more = (*words, "optimizer.decay_steps=15")
    done = forker.run(project, 2, more, resume=True)
    assert done.codes == [0, 0], done.said
    assert done.said.count(f"metrics and events also go to writes:log ({project / 'writes.py'})") == 1
    run = RunFolder.open(project / "runs" / "run")
    got = [json.loads(line) for line in (project / "got.jsonl").read_text().splitlines()]
    processes = [pid for pid, kind, _ in got if kind == "start"]
    assert len(processes) == len(set(processes)) == 2
    assert [pid for pid, _, _ in got] == sorted((pid for pid, _, _ in got), key=processes.index)
    assert [data for _, kind, data in got if kind == "metrics"] == rows_of(run)
    assert [data for _, kind, data in got if kind == "event"] == run.read_events()
    kinds = [kind for _, kind, _ in got]
    assert (kinds[0], kinds[-1], kinds.count("start"), kinds.count("end")) == ("start", "end", 2, 2)
    begun = [data for _, kind, data in got if kind == "start"]
    assert [data["first_step"] for data in begun] == [0, 12]
    assert (begun[0]["name"], begun[0]["folder"]) == ("run", str(run.path))
    assert begun[1]["config"]["log"]["to"] == "writes:log"
    assert begun[1]["environment"]["world_size"] == 2
    assert [data for _, kind, data in got if kind == "end"] == [{"problem": None, "goes_on": False}] * 2


def test_an_exception_is_said_once_and_ends_no_run(project: Path, forker: Forker) -> None:
    (project / "fails.py").write_text(FAILS)
    (project / "writes.py").write_text(WRITES)
    done = forker.run(project, 1, ("train.num_steps=10", "run.name=run", "log.to=fails:log, writes:log"))
    assert done.codes == [0], done.said
    said = [line for line in done.said.splitlines() if line.startswith("warning: log.to")]
    place = f"({project / 'fails.py'}, line 4)"
    assert said == [
        "warning: log.to = fails:log failed at metrics: ConnectionError: no server at step 1 "
        f"{place}; the run goes on, it is called again, and this is not repeated"
    ]
    run = RunFolder.open(project / "runs" / "run")
    assert len(rows_of(run)) == 10
    (failed,) = [event for event in run.read_events() if event["kind"] == "logger_failed"]
    assert (failed["logger"], failed["call"], failed["given_up"]) == ("fails:log", "metrics", False)
    got = [json.loads(line) for line in (project / "got.jsonl").read_text().splitlines()]
    assert [data for _, kind, data in got if kind == "metrics"] == rows_of(run)


def test_a_function_that_always_fails_is_given_up() -> None:
    calls: list[str] = []
    failures: list[Failure] = []

    def function(kind: str, data: dict[str, Any]) -> None:
        calls.append(kind)
        data.clear()  # not the data of others
        if len(calls) > 3:
            raise SystemExit(3)

    whole: list[dict[str, Any]] = []
    others = Logger("m:g", lambda kind, data: whole.append(data), "m.py")
    loggers = Loggers([Logger("m:f", function, "m.py"), others], failures.append)
    for step in range(40):
        loggers.send("metrics", {"step": step})
    assert len(calls) == 3 + FAILURES_ALLOWED
    assert [(failure.given_up, failure.problem.split(" (")[0]) for failure in failures] == [
        (False, "SystemExit: 3"),
        (True, "SystemExit: 3"),
    ]
    assert whole == [{"step": step} for step in range(40)]


SENDS = """
import json
def send(data):
    return json.loads("{")
def log(kind, data):
    send(data)
"""


def test_a_failure_names_the_line_of_the_users_file(project: Path) -> None:
    (project / "mine.py").write_text(SENDS)
    add_folders([project / "run.toml"])
    failures: list[Failure] = []
    Loggers(load("mine:log"), failures.append).send("metrics", {})
    assert failures[0].problem.endswith(f"({project / 'mine.py'}, line 4)")  # not a line of json
    (project / "mine.py").write_text("import json\njson.loads('{')\ndef log(kind, data): ...\n")
    del sys.modules["mine"]
    with pytest.raises(UserError) as told:
        load("mine:log")
    assert str(told.value).endswith(f"({project / 'mine.py'}, line 2)")


def test_finding_a_module_runs_no_code(project: Path) -> None:
    for folder in ("good", "good/inner", "bare", "empty"):
        (project / folder).mkdir()
    for file in ("good/__init__.py", "good/inner/__init__.py", "good/inner/log.py"):
        (project / file).write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    (project / "bare" / "log.py").write_text("")  # of a package without __init__.py
    (project / "empty" / "__init__.py").write_text("\n")
    (project / "mine.py").write_text("")
    add_folders([project / "run.toml"])
    find("good.inner.log:log, bare.log:log, os.path:join")
    find("good.absent:log")  # good's code may add it: `load` tells
    for name in ("empty.log", "bare.absent", "absent.log", "mine.json", "absent"):
        with pytest.raises(UserError, match=f"there is no module {name} in the working directory"):
            find(f"{name}:log")
    assert not list(project.rglob("ran"))
    with pytest.raises(UserError, match=r"there is no module good\.absent in the working directory"):
        load("good.absent:log")
    assert list(project.rglob("ran")) == [project / "good" / "ran"]


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (
            "absent:log",
            "",
            "there is no module absent in the working directory, in the folder of the config, or among ",
        ),
        ("absent.inner:log", "", "there is no module absent.inner in the working directory"),
        ("mine:lag", "def log(kind, data): ...", "/mine.py has no function lag; did you mean mine:log?"),
        ("mine:log", "log = 3", "must be a function of kind and data: def log(kind, data)"),
        ("mine:log", "def log(record): ...", "must be a function of kind and data: def log(kind, data)"),
        ("os:system", "", "must be a function of kind and data: def system(kind, data)"),
        ("mine:log", "import not_there", "importing mine raised ModuleNotFoundError: No module named 'not_there' ("),
        ("mine:log", "def log(:", "importing mine raised SyntaxError: invalid syntax (mine.py, line 1)"),
        ("mine:log", "raise SystemExit('no')", "importing mine raised SystemExit: no ("),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(project: Path, value: str, code: str, said: str) -> None:
    if code:
        (project / "mine.py").write_text(code + "\n")
    done = called(project, "train", "run.toml", f"log.to={value}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    line = done.stderr
    assert line.startswith(f"error: log.to = {value}: ")
    assert said in line
    assert not (project / "runs").exists()


def test_a_value_that_names_no_function_is_refused(project: Path) -> None:
    for value in ("mylog", "mylog.py:log", "a:b,", ":log", "a:b.c", "../mylog:log"):
        done = called(project, "plan", "run.toml", f"log.to={value}")
        assert done.returncode == 2
        assert 'log.to: given "' in done.stderr
        assert 'must be "module:function"' in done.stderr


def test_only_train_imports_it_and_never_from_a_run_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(project / "runs" / "run", '[log]\nto = "evil:log"\n', {})
    (run.path / "evil.py").write_text("import pathlib; pathlib.Path('ran').touch()\ndef log(kind, data): ...\n")
    monkeypatch.chdir(project)
    for words in (["plan", "runs/run/config.toml"], ["config", "runs/run/config.toml"]):
        called(project, *words)
    done = called(project, "train", "--resume", "runs/run")
    assert (done.returncode, done.stderr[:50]) == (2, "error: log.to = evil:log: there is no module evil ")
    assert not (project / "ran").exists()
    inner = project / "inner"
    inner.mkdir()
    (inner / "good.py").write_text("def log(kind, data): ...\n")
    add_folders([inner / "run.toml"])
    assert load("good:log")[0].file == str(inner / "good.py")
    with pytest.raises(UserError, match="there is no module evil"):
        load("evil:log")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_example_writes_every_row(project: Path, forker: Forker, ranks: int) -> None:
    words = ("train.num_steps=5", "log.to=log_to_sqlite:log", "run.name=run")
    (project / EXAMPLE.name).write_text(EXAMPLE.read_text())
    if ranks == 1:
        done = forker.run(project, 1, words)
        assert done.codes == [0], done.said
    else:
        started = codescent(project, "train", "run.toml", "--ranks", "2", *words)
        assert started.returncode == 0, started.stderr
    run = RunFolder.open(project / "runs" / "run")
    with sqlite3.connect(project / "metrics.sqlite") as file:
        found = file.execute("SELECT step, name, value FROM metrics").fetchall()
        assert file.execute("SELECT name, folder, problem FROM runs").fetchall() == [("run", str(run.path), None)]
        kinds = [kind for (kind,) in file.execute("SELECT kind FROM events")]
    rows = [(row["step"], name, value) for row in run.read_metrics() for name, value in row.items() if name != "step"]
    assert sorted(found) == sorted(each for each in rows if each[2] is not None)
    assert kinds == [event["kind"] for event in run.read_events()]


def test_rows_reach_tensorboard(tmp_path: Path) -> None:
    board = Board(tmp_path, 0, wanted=True)
    for step in (1, 2):
        row = {"step": step, "train_loss": 3.0 - step, "val_loss": 4.0 if step == 2 else None}
        assert board.write(row) == ""
    board.close()
    assert not board.missing
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/train_loss")] == [(1, 2.0), (2, 1.0)]
    assert [(event.step, event.value) for event in read.Scalars("validation/loss")] == [(2, 4.0)]


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_are_repeated(tmp_path: Path) -> None:
    for first_step, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        board = Board(tmp_path, first_step, wanted=True)
        assert [board.write({"step": step, "loss": first_step, "val_loss": None}) for step in steps] == [""] * len(
            steps
        )
        board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 0.0), (2, 0.0), (3, 2.0)]


def test_tensorboard_writes_through_no_link(tmp_path: Path) -> None:
    """Its own writer opens its file by name at each flush: whoever may write in the folder replaces it by a link."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    (tmp_path / "run").mkdir()
    board = Board(tmp_path / "run", 0, wanted=True)
    board.write({"step": 1, "loss": 1.0, "val_loss": None})
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to(mine)
    assert board.write({"step": 2, "loss": 1.0, "val_loss": None}) == (
        f"no more TensorBoard files: {file}: the file was deleted"
    )
    board.close()
    file.parent.rename(tmp_path / "elsewhere")
    file.parent.symlink_to(tmp_path / "elsewhere")
    board = Board(tmp_path / "run", 0, wanted=True)
    said = board.write({"step": 1, "val_loss": None})
    assert said.startswith(f"no more TensorBoard files: {file.parent}: is a symbolic link")
    assert board.write({"step": 2, "val_loss": None}) == ""
    assert mine.read_text() == "kept"
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_folder_that_moves_keeps_its_board_and_one_that_goes_ends_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    board = Board(old, 0, wanted=True)
    row: dict[str, Any] = {"train_loss": 1.0, "val_loss": None}
    assert board.write({"step": 1, **row}) == ""
    old.rename(new)
    assert [board.write({"step": step, **row}) for step in (2, 3)] == ["", ""]
    read = EventAccumulator(str(new / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("train/train_loss")] == [1, 2, 3]
    shutil.rmtree(new)
    assert board.write({"step": 4, **row}).startswith("no more TensorBoard files: ")
    assert board.write({"step": 5, **row}) == ""
    board.close()


def test_a_machine_without_tensorboard_says_so_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = {"tensorboard"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))
    words = ("train", "run.toml", "train.num_steps=2", "train.eval_every=0")
    install = 'pip install "codescent[tensorboard]"'
    said = f"no TensorBoard files, because tensorboard is not installed; to write them: {install}; "
    for value, times in (("auto", 1), ("false", 0)):
        done = called(project, *words, f"log.tensorboard={value}", f"run.name={value}")
        assert (done.returncode, done.stdout.count(said)) == (0, times), done.stderr
        assert not (project / "runs" / value / "tensorboard").exists()
    done = called(project, *words, "log.tensorboard=true", "run.name=wanted")
    refused = (
        f"log.tensorboard = true: the package tensorboard is not installed: {install}, or leave log.tensorboard out"
    )
    assert (done.returncode, done.stderr) == (2, f"error: {refused}\n")
    assert not (project / "runs" / "wanted").exists()
