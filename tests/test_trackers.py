"""In: configs with log.wandb, log.mlflow, log.trackio; the real packages offline, where they are installed. Out: runs
there have the rows, and a tracker that fails ends no run. Does not send anything to a server."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import called, codescent, make_project

from codescent.base.errors import UserError
from codescent.config.sections import Log
from codescent.record import RunFolder
from codescent.train import trackers
from codescent.train.loggers import END, METRICS, START, Failure, Logger, Loggers
from codescent.train.trackers import STARTED, TRACKERS, Tracker, continue_in, find_packages, tracked, trackers_of

RUN = {
    "name": "mine",
    "config": {"train": {"num_steps": 4}, "log": {"to": None}},
    "plan": {"parameters": 10_960, "ranks": 2},
    "first_step": 0,
}
ABSENT = "{0} is not installed: what log.{0} does with it is not tried"
INSTALLED = [one.package for one in TRACKERS if importlib.util.find_spec(one.package) is not None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which all trackers write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


Rows = dict[int, float]


def of_mlflow(folder: Path, run: str) -> tuple[Rows, dict[str, str]]:
    """The losses by step, and the parameters that the files of a run have."""
    (path,) = (folder / "mlruns").glob(f"*/{run}")
    lines = (path / "metrics" / "train_loss").read_text().splitlines()
    rows = {int(step): float(value) for _, value, step in map(str.split, lines)}
    return rows, {file.name: file.read_text() for file in (path / "params").iterdir()}


def of_trackio(folder: Path, run: str) -> tuple[Rows, dict[str, str]]:
    """The same of the database."""
    with sqlite3.connect(folder / "trackio" / "p.db") as database:
        metrics = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run,)).fetchall()
        (config,) = database.execute("SELECT config FROM configs WHERE run_name = ?", (run,)).fetchone()
    found = json.loads(config)
    sections = {name: keys for name, keys in found.items() if isinstance(keys, dict)}
    flat = {f"{section}.{name}": str(value) for section, keys in sections.items() for name, value in keys.items()}
    return {step: json.loads(text)["train_loss"] for step, text in metrics}, flat


def parts_of(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind a head of 7 bytes: blocks of 32 KiB, records in pieces."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield whole
            whole = b""


def of_wandb(folder: Path, run: str) -> tuple[Rows, dict[str, str]]:
    """The same of the files that `wandb sync` would send."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows, flat = Rows(), dict[str, str]()
    for file in sorted(folder.glob(f"**/wandb/offline-run-*-{run}*/*.wandb")):
        for data in parts_of(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            items = {
                item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item
            }
            if "train_loss" in items:
                rows[int(items["step"])] = json.loads(items["train_loss"])
            for item in record.run.config.update:
                value = json.loads(item.value_json)
                keys = value.items() if isinstance(value, dict) else ()
                flat |= {f"{item.key}.{name}": str(one) for name, one in keys}
    return rows, flat


READ: Mapping[str, Callable[[Path, str], tuple[Rows, dict[str, str]]]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


@pytest.mark.parametrize("package", [one.package for one in TRACKERS])
def test_a_tracker_has_rows_config_and_plan_and_goes_on_in_its_run(folder: Path, package: str) -> None:
    """The real package, offline. It would catch a second run after --resume, and steps that are lost."""
    pytest.importorskip(package, reason=ABSENT.format(package))
    failures: list[Failure] = []
    events: list[dict[str, Any]] = []
    for start in (0, 2):
        loggers = tracked(Log(**{package: "p"}))
        (tracker,) = trackers_of(loggers)
        continue_in([tracker], events)
        both = Loggers(loggers, failures.append)
        both.send(START, {**RUN, "folder": str(folder / "run"), "first_step": start})
        events.append({"kind": STARTED, "logger": package, "project": "p", "id": tracker.id})
        for step in (start + 1, start + 2):
            both.send(METRICS, {"step": step, "train_loss": 5.0 - step, "val_loss": None})
        both.send(END, {"problem": None})
    assert failures == []
    assert len({event["id"] for event in events}) == 1
    wanted, end_s = {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, time.monotonic() + 20
    while (found := READ[package](folder, events[0]["id"]))[0] != wanted and time.monotonic() < end_s:
        time.sleep(0.1)  # the service of wandb writes its file after `finish` has returned
    rows, config = found
    assert rows == wanted
    assert config.items() >= {"train.num_steps": "4", "plan.parameters": "10960", "plan.ranks": "2"}.items()


class Recorder:
    """A package that records how it is used, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[tuple[str, Any]]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            self.calls.append((name, named or words))
            if name == self.fails:
                raise ConnectionError("no server")
            return self

        return call


def send(fails: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[list[str], list[Failure]]:
    """Log three rows to a wandb that fails somewhere: the calls that it got, and what is reported."""
    package = Recorder(fails)
    monkeypatch.setitem(sys.modules, "wandb", package)  # type: ignore[arg-type]
    monkeypatch.setattr(trackers, "find_packages", lambda log: None)
    failures: list[Failure] = []
    loggers = Loggers(tracked(Log(wandb="p")), failures.append)
    loggers.send(START, {**RUN, "folder": str(folder)})
    for step in range(3):
        loggers.send(METRICS, {"step": step, "train_loss": 1.0})
    loggers.send("event", {"kind": "save"})
    loggers.send(END, {"problem": "stopped"})
    return [name for name, _ in package.calls if name != "Settings"], failures


def test_a_failure_is_reported_once_and_a_tracker_that_cannot_begin_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, failures = send("init", monkeypatch, folder)
    assert calls == ["init"]
    assert [(one.logger, one.call, one.given_up) for one in failures] == [("wandb", "start", True)]
    assert failures[0].problem.startswith("ConnectionError: no server")
    calls, failures = send("log", monkeypatch, folder)
    assert calls == ["init", "define_metric", "log", "log", "log", "finish"]
    assert [(one.call, one.given_up) for one in failures] == [("metrics", False)]


@pytest.mark.parametrize(
    ("environ", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "x"}, "", "disabled"),
        ({"WANDB_API_KEY": "x"}, "", "online"),
        ({}, "machine api.wandb.ai login user password x\n", "online"),
        ({"WANDB_BASE_URL": "https://wandb.lab"}, "machine api.wandb.ai login user password x\n", "offline"),
    ],
)
def test_wandb_is_online_only_with_an_account(tmp_path: Path, environ: dict[str, str], netrc: str, mode: str) -> None:
    """Without one it would ask for a key, and wait."""
    (tmp_path / "netrc").write_text(netrc)
    assert trackers._mode({"NETRC": str(tmp_path / "netrc"), **environ}) == mode


def test_a_package_that_is_missing_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tmp_path)
    monkeypatch.setattr(trackers, "is_installed", lambda package: False)
    done = called(tmp_path, "train", "run.toml", "log.wandb=p", "log.trackio=q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f'error: log.{name} = "{project}": the package {name} is not installed: '
        f'pip install "codescent[{name}]", or leave log.{name} out'
        for name, project in (("wandb", "p"), ("trackio", "q"))
    ]
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_the_packages_name_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb makes a folder `wandb` where it runs, and Python could import it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(UserError, match="the package mlflow is not installed"):
        find_packages(Log(mlflow="p"))
    find_packages(Log())


def test_no_password_of_an_address_is_shown_or_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of MLflow's database has one; it would be in the output of a job, and in events.jsonl."""
    address = "postgresql://me:hun@ter2@host/runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    tracker, failures = trackers.Mlflow("p"), list[Failure]()
    monkeypatch.setattr(tracker, "_new", lambda run: "r")
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace())
    tracker.begin(RUN, SimpleNamespace(MlflowClient=lambda tracking_uri: tracking_uri))
    assert tracker.where == "postgresql://host/runs, run r"

    def fails(*, kind: str, data: dict[str, Any]) -> None:
        raise ConnectionError(f"cannot reach {address}")

    Loggers([Logger("mlflow", fails, "mlflow", needs_start=True)], failures.append).send(START, RUN)
    assert failures[0].problem.startswith("ConnectionError: cannot reach postgresql://host/runs")


def test_only_a_run_of_the_same_project_is_continued() -> None:
    one, other = Tracker("p"), Tracker("q")
    events = [{"kind": STARTED, "logger": "", "project": "p", "id": name} for name in ("first", "last")]
    continue_in([one, other], [{"kind": "save", "step": 3}, *events])
    assert (one.id, other.id) == ("last", "")


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_in_each_tracker(folder: Path) -> None:
    if not INSTALLED:
        pytest.skip("none of wandb, mlflow, trackio is installed")
    make_project(folder)
    words = ("train", "run.toml", "optimizer.decay_steps=9", *(f"log.{package}=p" for package in INSTALLED))
    codescent(folder, *words, "train.num_steps=6")
    done = codescent(folder, *words, "train.num_steps=9", "--resume")
    run = RunFolder.open(folder / "runs" / "default")
    started = {event["logger"]: event["id"] for event in run.read_events() if event["kind"] == STARTED}
    assert list(started) == INSTALLED
    expected = {int(row["step"]): row["train_loss"] for row in run.read_metrics()}
    for package, key in started.items():
        assert f"metrics also go to {package}, project p: " in done.stdout
        rows, config = READ[package](folder, key)
        assert rows == pytest.approx(expected)
        assert config["train.num_steps"] in ("6", "9")
        assert config["plan.tokens_per_step"] == "128"


@pytest.mark.slow
def test_a_server_that_is_not_there_does_not_stop_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=ABSENT.format("mlflow"))
    make_project(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = codescent(folder, "train", "run.toml", "train.num_steps=3", "log.mlflow=p")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("warning: log.")]
    assert len(said) == 1
    assert said[0].startswith("warning: log.mlflow failed at start: MlflowException: ")
    assert said[0].endswith("the run goes on, it is not called any more")
    assert len(RunFolder.open(folder / "runs" / "default").read_metrics()) == 3
