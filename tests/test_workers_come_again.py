"""In: asynchronous runs whose workers die by kill -9, with parallel.restarts. Out: they come again, and train on.
Does not test runs without restarts (test_parameter_server_faults and test_late_workers do)."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import called, start
from test_parameter_server_faults import rank_of
from test_train_resume import wait_for_step

from codescent.record import RunFolder, order

WORDS = ("train.precision=fp64", "parallel.updates=asynchronous", "checkpoint.every=100", "train.eval_every=100")
STEPS = ("train.num_steps=400", "optimizer.decay_steps=400")
LIMIT_S = 100


def until(process: subprocess.Popen[str], run: Path, step: int) -> None:
    wait_for_step(process, run, step)


def another(process: subprocess.Popen[str], rank: int, before: int) -> int:
    """The id of the process of a rank that was started again after `before`."""
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end_s:
        found = [one for one in _children(process) if one != before and _rank(one) == str(rank)]
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} was not started again")


def _children(process: subprocess.Popen[str]) -> list[int]:
    import psutil

    return [one.pid for one in psutil.Process(process.pid).children()]


def _rank(pid: int) -> str | None:
    import psutil

    try:
        return psutil.Process(pid).environ().get("RANK")
    except psutil.Error:
        return None


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder.open(run).read_events() if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_comes_again(project: Path) -> None:
    words = (*WORDS, *STEPS, "train.global_batch_size=12", "parallel.servers=2", "parallel.restarts=1")
    process = start(project, "train", "run.toml", "run.name=again", *words, "--ranks", "5")
    run = project / "runs" / "again"
    until(process, run, 20)
    rank_of(process, 1).send_signal(signal.SIGKILL)
    summary, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    print(summary, said)
    print(events(run, "worker_lost"), events(run, "worker_joined"))
    (joined,) = events(run, "worker_joined")
    for server in (0, 1):
        rows = order.read(run, server, 1200)
        print(server, Counter(row.worker for row in rows), [r.number for r in rows if r.worker == 1][-3:])
        assert Counter((row.step, row.part) for row in rows) == Counter((s, p) for s in range(400) for p in range(3))
