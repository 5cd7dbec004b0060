"""In: codescent.train, plan and Run in this process. Out: that they do what the commands do and leave no trace.
Does not test what a run or a plan is: the tests of the commands do."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from runs import called, environment, make_project

import codescent
from codescent.api.process import as_before
from codescent.base.output import warn
from codescent.base.stopping import EXIT_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SHORT = {"num_steps": 4}
STOPPER = """
import os, signal

def asks(kind, data):
    if kind == "metrics" and data["step"] == 2:
        os.kill(os.getpid(), getattr(signal, os.environ["ASKED"]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    (tmp_path / "stopper.py").write_text(STOPPER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    make_project(folder)
    with chdir(folder):
        codescent.train("run.toml", run={"name": "one"}, train={**SHORT, "ema": 0.5})
    return folder


@pytest.fixture
def run(project: Path, finished: Path) -> codescent.Run:
    shutil.copytree(finished, project, dirs_exist_ok=True)
    return codescent.Run("runs/one")


def traces() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - one test looks before torch is imported

    return {
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_run_in_the_process_equals_the_first_and_nothing_of_them_stays(
    project: Path, deterministic: bool
) -> None:
    """Catches state of a run that reaches the next one, or the program: handlers, threads, variables.

    And what a notebook would break: a kernel runs cells in an event loop, and signals belong to the main thread.
    """
    before, folders, shown = traces(), list(sys.path), list(warnings.filters)
    found: list[codescent.Run] = []

    async def cell() -> None:
        keys = {**SHORT, "num_threads": 1, "deterministic": deterministic}
        found.append(codescent.train({"base": "run.toml"}, run={"name": "one"}, train=keys))

    def thread() -> None:
        keys = {"deterministic": False}
        found.append(codescent.train(found[0].config, run={"name": "two", "folder": None}, train=keys))

    asyncio.run(cell())
    assert traces() == before
    other = threading.Thread(target=thread)
    other.start()
    other.join()
    assert traces() == before
    assert (sys.path, warnings.filters) == (folders, shown)
    first, second = found
    assert (first.state, second.state, first.steps) == ("done", "done", 4)
    assert np.array_equal(first.metrics["train_loss"], second.metrics["train_loss"])
    assert second.path == Path("runs/two")
    assert first.config["train"]["deterministic"] is deterministic


def test_the_run_goes_on_and_writes(run: codescent.Run) -> None:
    assert "4" in repr(run)
    assert ">done</td>" in run._repr_html_()
    again = run.resume(train={"num_steps": 6})
    assert (again.path, run.steps, again.events[-1]["kind"]) == (run.path, 6, "end")
    text = run.sample("many", tokens=9)
    assert text == run.sample("many", tokens=9) != run.sample("many", tokens=9, ema=True)
    assert text.startswith("many")
    with pytest.raises(codescent.UserError) as refused:
        run.sample(tokens=0, top_k=0, device="moon")
    problems = refused.value.problems
    assert [problem.split()[0] for problem in problems] == ["top_k", "tokens", "device"], "as a program names them"


@pytest.mark.slow
def test_the_run_is_drawn_and_reported(run: codescent.Run) -> None:
    assert vars(run.plot("steps"))["_repr_png_"]().startswith(b"\x89PNG")
    report = run.report()
    assert "&lt;html" in report._repr_html_()
    assert report.save("one.html").read_text() == report.html
    assert report.save("one.md").read_text() == report.markdown
    assert repr(report).startswith("ReportPage of one: ")
    for call in (lambda: run.plot("hours"), lambda: report.save("one.pdf")):
        with pytest.raises(codescent.UserError):
            call()


def test_a_folder_that_is_damaged_or_gone_is_an_error_but_has_a_text(run: codescent.Run) -> None:
    """Catches a notebook or a debugger that fails because it asks an object for its text."""
    with pytest.raises(codescent.UserError, match="nowhere: no such run folder"):
        codescent.Run("nowhere")
    events = run.path / "events.jsonl"
    events.write_text(events.read_text() + "[]\n{}\n")
    with pytest.raises(codescent.UserError, match=r"events.jsonl line \d+: not a JSON object"):
        _ = run.state
    assert repr(run).startswith("Run('runs/one': problem runs/one/events.jsonl line ")
    shutil.rmtree(run.path)
    assert "no such run folder" in run._repr_html_()


@pytest.mark.slow
def test_several_ranks_are_processes_with_the_same_losses(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they print where this program prints: a notebook has no descriptor 1. They find its modules, too."""
    (project / "beside").mkdir()
    (project / "beside" / "beside_the_script.py").write_text("def asks(kind, data):\n    pass\n")
    monkeypatch.syspath_prepend(project / "beside")
    config = {"base": "run.toml", "train": SHORT, "log": {"to": "beside_the_script:asks"}}
    one = codescent.train(config, run={"name": "one"})
    with redirect_stdout(io.StringIO()) as printed:
        two = codescent.train(config, run={"name": "two"}, parallel={"ranks": 2})
    assert np.allclose(one.metrics["train_loss"], two.metrics["train_loss"], rtol=1e-5)
    assert [len(run.environment["ranks"]) for run in (one, two)] == [1, 2]
    lines = printed.getvalue().splitlines()
    assert [line.split()[0] for line in lines if line][:3] == ["run", "data", "task"]
    assert lines[-1].startswith("The run is in runs/two")
    assert len(lines) == len(set(lines)), "nothing is printed twice"


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_saves_the_run_of_several_ranks_and_a_second_one_kills_them(project: Path, again: bool) -> None:
    rows = project / "runs" / "one" / "metrics.jsonl"

    def interrupts() -> None:
        while not rows.is_file() or not rows.stat().st_size:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        if again:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupts, daemon=True).start()
    keys: dict[str, Any] = {"run": {"name": "one"}, "train": {"num_steps": 100_000}, "parallel": {"ranks": 2}}
    with pytest.raises(KeyboardInterrupt):
        codescent.train("run.toml", **keys)
    assert not psutil.Process().children()
    if not again:
        assert codescent.Run("runs/one").state == "stopped"


@pytest.mark.slow
def test_an_exit_code_of_ranks_becomes_an_exception(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the sentences that a rank has printed, which are not printed again."""

    def ends(code: int) -> Callable[..., int]:
        def main(*_: object) -> int:
            warn("note: before\nerror: this\nerror: that" if code < 3 else "")
            return code

        return main

    kinds = {1: codescent.RunFailed, 2: codescent.UserError, 130: KeyboardInterrupt, 143: SystemExit, 75: SystemExit}
    for code, kind in kinds.items():
        monkeypatch.setattr(codescent.verbs.train, "main", ends(code))
        with pytest.raises(kind) as ended:
            codescent.train("run.toml", run={"name": "one"}, parallel={"ranks": 2})
        assert type(ended.value) is kind
        assert getattr(ended.value, "problems", ("this", "that")) == ("this", "that")
    monkeypatch.setattr(codescent.verbs.train, "main", ends(137))  # the kernel has killed a rank
    with pytest.raises(codescent.RunFailed, match="runs/one: a rank has ended the run"):
        codescent.train("run.toml", run={"name": "one"}, parallel={"ranks": 2})
    assert capsys.readouterr().err.split() == ["note:", "before"] * 2


def test_two_calls_at_a_time_are_refused(project: Path) -> None:
    """They would share random numbers, threads and variables of the process."""
    found: list[object] = []

    def asks(*_: object) -> None:
        with pytest.raises(codescent.UserError, match="another call of this process") as refused:
            codescent.train("run.toml", run={"name": "two"}, train=SHORT)
        found.append(refused.value)

    thread = threading.Thread(target=asks)
    with as_before(computes=True):
        thread.start()
        thread.join()
        asks()
    assert len(found) == 2
    with as_before(computes=False):  # and then it is free
        pass


def test_an_error_shows_the_line_of_the_caller(project: Path) -> None:
    with pytest.raises(codescent.UserError) as refused:
        codescent.train("run.toml", train={"num_step": 3})
    assert len(refused.traceback) <= 3
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("asked", "code"),
    [("SIGINT", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("SIGTERM", 143), ("SIGUSR1", 0)))],
)
def test_a_signal_saves_and_is_answered_as_the_command_answers(
    project: Path, monkeypatch: pytest.MonkeyPatch, asked: str, code: int | None
) -> None:
    """Ctrl-C ends the cell and its loops. Other signals end the program, with the exit code of the command.

    Catches a stop that is no exception, because a script of `codescent launch` wants the code in a file.
    """
    monkeypatch.setenv("ASKED", asked)
    if asked != "SIGTERM":
        monkeypatch.setenv(EXIT_FILE, str(project / "code"))
    keys: dict[str, Any] = {"run": {"name": asked}, "log": {"to": "stopper:asks"}}
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        codescent.train("run.toml", **keys)
    assert getattr(ended.value, "code", None) == code
    run = codescent.Run(f"runs/{asked}")
    assert (run.state, run.steps < 20) == ("stopped", True)
    assert (project / "code").is_file() is (asked == "SIGUSR1")
    if code is not None:
        assert run.resume(log={"to": None}).state == "done"  # and the signal of this run is forgotten


@pytest.mark.slow
def test_begin_or_continue(project: Path) -> None:
    keys: dict[str, Any] = {"resume": True, "run": {"name": "one"}}
    assert codescent.train("run.toml", train=SHORT, **keys).steps == 4
    assert codescent.train("run.toml", train={"num_steps": 6}, **keys).steps == 6
    with pytest.raises(codescent.UserError, match="runs/one"):
        codescent.train("run.toml", run={"name": "one"})


def test_a_rank_of_a_launcher_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would train a run of its own, in one folder."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(codescent.UserError, match="rank 0 of 2"):
        codescent.train("run.toml")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_cannot_go_on_raises_the_reason(project: Path, ranks: int) -> None:
    with pytest.raises(codescent.RunFailed, match="not finite"):
        codescent.train(
            "run.toml", run={"name": "failed"}, optimizer={"learning_rate": 1e300}, parallel={"ranks": ranks}
        )
    assert codescent.Run("runs/failed").state == "failed"


def test_a_plan_is_that_of_the_command(project: Path) -> None:
    words = ("plan", "run.toml", "parallel.ranks=2", "parallel.tp=2")
    found = codescent.plan("run.toml", parallel={"ranks": 2, "tp": 2})
    assert called(project, *words).stdout == f"{found.table}\n" == f"{found}\n"
    assert json.loads(called(project, *words, "--json").stdout) == json.loads(json.dumps(found.to_dict()))
    assert "<th" in found._repr_html_()
    assert found.step_s is None
    words = ("plan", "llama3_8b", "--cluster", "h100-sxm", "parallel.ranks=8", "parallel.dp_shard=8")
    priced = codescent.plan("llama3_8b", cluster="h100-sxm", parallel={"ranks": 8, "dp_shard": 8})
    assert called(project, *words).stdout == f"{priced.table}\n"
    assert priced.step_s is not None
    assert (found.fits, priced.fits) == (None, True)
    assert codescent.plan("llama3_70b", cluster="h100-sxm", parallel={"ranks": 8, "dp_shard": 8, "tp": 1}).fits is False


def test_numbers_of_numpy_and_paths_are_values_and_notes_name_the_dict(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches what notebooks hold: a value of a numpy array. And the name of a file that nobody has written."""
    given = {"num_steps": np.int64(7), "deterministic": np.bool_(True), "ema": np.float32(0.5)}
    found = codescent.plan({"base": Path("run.toml"), "train": {**given, "precision": None}})
    assert found.to_dict() == codescent.plan("run.toml", train=given).to_dict()
    unread = {"data": {"pairs": "copy"}, "optimizer": {"momentum": 0.5}}
    notes = codescent.plan({"base": "run.toml", **unread}, data={"prompt_key": "p"}).notes
    assert [note.split(":")[0] for note in notes] == ["keywords", "config", "config"], notes
    assert capsys.readouterr().err.splitlines() == list(notes)


def test_planning_and_reading_runs_import_no_torch(project: Path) -> None:
    """Catches an import that makes a notebook wait; and a room that hides the function of its name, or the reverse."""
    program = """
import sys, codescent
from codescent.plan import Plan
assert isinstance(codescent.plan("run.toml").plan, Plan)
codescent.Run
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    import_module("codescent.train.loop")
    assert list(inspect.signature(codescent.train).parameters) == ["config", "resume", "overrides"]
    assert codescent.train.getdoc().startswith("Train as `codescent train` does")
