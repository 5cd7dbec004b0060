"""In: codescent.train, plan and Run in this process. Out: that they do what the commands do and leave no trace.
Does not test what a run or a plan is: the tests of the commands do."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import called, environment, make_project

import codescent

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


def test_a_second_run_in_the_process_equals_the_first_and_nothing_of_them_stays(project: Path) -> None:
    """Catches state of a run that reaches the next one, or the program: handlers, threads, variables."""
    before = traces()
    wanted = {"num_steps": 4, "num_threads": 1, "deterministic": True}
    first = codescent.train("run.toml", run={"name": "one"}, train=wanted)
    second = codescent.train(first.config, run={"name": "two", "folder": None}, train={"deterministic": False})
    assert traces() == before
    assert first.state == second.state == "done"
    assert first.steps == 4
    assert np.array_equal(first.metrics["train_loss"], second.metrics["train_loss"])
    assert second.path == Path("runs/two")
    assert first.config["train"]["deterministic"] is True


def test_the_run_goes_on_draws_writes_and_reports(project: Path) -> None:
    run = codescent.train("run.toml", run={"name": "one"}, train=SHORT)
    assert "4" in repr(run)
    assert "<td>done</td>" in run._repr_html_()
    again = run.resume(train={"num_steps": 6})
    assert (again.path, run.steps, again.events[-1]["kind"]) == (run.path, 6, "end")
    assert run.sample("many", tokens=3) == run.sample("many", tokens=3)
    assert run.sample("many", tokens=3).startswith("many")
    assert vars(run.plot("steps"))["_repr_png_"]().startswith(b"\x89PNG")
    report = run.report()
    assert "&lt;html" in report._repr_html_()
    assert report.save("one.html").read_text() == report.html
    assert report.save("one.md").read_text() == report.markdown
    with pytest.raises(codescent.UserError, match="nowhere"):
        codescent.Run("nowhere")
    for call in (lambda: run.plot("hours"), lambda: run.sample(tokens=0), lambda: report.save("one.pdf")):
        with pytest.raises(codescent.UserError):
            call()


def test_it_trains_beside_an_event_loop_and_outside_of_the_main_thread(project: Path) -> None:
    """Catches what a notebook would break: a kernel runs cells in a loop, and signals belong to the main thread."""

    async def cell() -> codescent.Run:
        return codescent.train("run.toml", run={"name": "loop"}, train=SHORT)

    found = [asyncio.run(cell())]
    thread = threading.Thread(
        target=lambda: found.append(codescent.train("run.toml", run={"name": "thread"}, train=SHORT))
    )
    thread.start()
    thread.join()
    assert [run.state for run in found] == ["done", "done"]
    assert np.array_equal(found[0].metrics["train_loss"], found[1].metrics["train_loss"])


def test_several_ranks_are_processes_with_the_same_losses(project: Path) -> None:
    config = {"base": "run.toml", "train": SHORT}
    one = codescent.train(config, run={"name": "one"})
    two = codescent.train(config, run={"name": "two"}, parallel={"ranks": 2})
    assert np.allclose(one.metrics["train_loss"], two.metrics["train_loss"], rtol=1e-5)
    assert [len(run.environment["ranks"]) for run in (one, two)] == [1, 2]


def test_a_signal_saves_and_is_answered_as_the_command_answers(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the cell, not the notebook. Other signals end the program, with the exit code of the command."""
    for asked, code in (("SIGINT", None), ("SIGTERM", 143), ("SIGUSR1", 75)):
        monkeypatch.setenv("ASKED", asked)
        keys: dict[str, Any] = {"run": {"name": asked}, "log": {"to": "stopper:asks"}}
        if code is None:
            assert codescent.train("run.toml", **keys).state == "stopped"
        else:
            with pytest.raises(SystemExit) as ended:
                codescent.train("run.toml", **keys)
            assert ended.value.code == code
        run = codescent.Run(f"runs/{asked}")
        assert (run.state, run.steps < 20) == ("stopped", True)
        assert run.resume(log={"to": None}).state == "done"  # and the signal of this run is forgotten


def test_begin_or_continue(project: Path) -> None:
    keys: dict[str, Any] = {"resume": True, "run": {"name": "one"}}
    assert codescent.train("run.toml", train=SHORT, **keys).steps == 4
    assert codescent.train("run.toml", train={"num_steps": 6}, **keys).steps == 6
    with pytest.raises(codescent.UserError, match="runs/one"):
        codescent.train("run.toml", run={"name": "one"})


def test_every_problem_is_in_one_error_with_its_place(project: Path) -> None:
    def problems(*config: Any, **keywords: Any) -> tuple[str, ...]:
        with pytest.raises(codescent.UserError) as refused:
            codescent.plan(*config, **keywords)
        return refused.value.problems

    (unknown,) = problems(train={"num_step": 3})
    assert unknown == "keywords: train.num_step: unknown key in [train]; did you mean train.num_steps?"
    wrong = problems({"train": {"num_step": 3, "seed": object()}})
    assert len(wrong) == 1
    assert wrong[0].startswith("config: train.seed: given <object")
    both = problems({"train": {"num_step": 3, "num_steps": "many"}})
    assert [one.split(":")[:2] for one in both] == [["config", " train.num_step"], ["config", " train.num_steps"]]
    forms = problems(**{"train.num_steps": 3, "trian": {}, "model": 3})
    assert forms == (
        "keywords: train.num_steps: write train={'num_steps': 3}",
        "keywords: trian: unknown section; did you mean [train]?",
        'keywords: model: given 3; must be a dict of its keys, such as train={"num_steps": 20}',
    )
    assert not (project / "runs").exists()


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


def test_planning_and_reading_runs_import_no_torch(project: Path) -> None:
    """Catches an import that makes a notebook wait; and a room that hides the function of its name, or the reverse."""
    program = """
import sys, codescent
from codescent.plan import Plan
assert isinstance(codescent.plan("run.toml").plan, Plan)
codescent.Run
assert "torch" not in sys.modules
import codescent.train.loop
assert callable(codescent.train)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(inspect.signature(codescent.train).parameters) == ["config", "resume", "overrides"]
