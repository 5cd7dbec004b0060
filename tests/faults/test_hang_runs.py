"""In: real runs and own loops on two ranks, of which one stands still. Out: the verdict of the launcher, by itself.
Nothing is patched: deadlines and floors are those of users."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import environment, make_project, start, started_by

from codescent.record import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc"),
]

LOGGER = """
import time
from pathlib import Path

def sleeps(kind, data):
    if kind == "metrics" and data["step"] == 30:
        Path("begun").write_text(str(time.monotonic()))
        time.sleep(25)
"""
LAUNCH = """
import os, sys
from codescent.launch.local import run_ranks
sys.exit(run_ranks([sys.executable, "loop.py"], 2, os.environ))
"""
LOOP = """
import sys, time
import torch
import codescent

ranks = codescent.init("cpu")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
codescent.distribute(model, optimizer)

def of_this_rank_alone():
    time.sleep(25)

def step():
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

for number in range(300):
    step()
    time.sleep(0.01)
with ranks.section("validation"):  # its first time: five minutes are allowed
    time.sleep(9)
if ranks.rank == 1:
    of_this_rank_alone()
step()
"""


def hang_of(folder: Path, said: str) -> dict[str, object]:
    found: list[dict[str, object]] = [one for one in RunFolder.open(folder).read_events() if one["kind"] == "hang"]
    assert len(found) == 1, said
    return found[0]


def test_work_of_rank_0_alone_in_a_run(tmp_path: Path) -> None:
    """Fault: with real steps, collectives and a real logger the verdict comes late, or blames rank 1, which waits."""
    make_project(tmp_path)
    (tmp_path / "own_logger.py").write_text(LOGGER)
    words = ["run.toml", "run.name=a", "parallel.ranks=2", "train.num_steps=40", "log.to=own_logger:sleeps"]
    out, err = start(tmp_path, "train", *words).communicate(timeout=200)
    folder = tmp_path / "runs" / "a"
    event = hang_of(folder, out + err)
    assert (event["cause"], event["ranks"]) == ("first_alone", [0]), out + err
    assert re.search(r"^codescent:   0 of 2 .* 31 +loggers .* before \w+ \d+ over dp_replicate", err, re.MULTILINE)
    assert re.search(r"^codescent:   1 of 2 .* in \w+ \d+ over dp_replicate", err, re.MULTILINE)
    assert "own_logger.py:8 in sleeps\n" in err
    waited_s = float(str(event["monotonic_s"])) - float((tmp_path / "begun").read_text())
    assert 6.0 <= waited_s < 10.0 + 5.0, "10 s, and what a machine that does other work takes"
    assert re.search(r"codescent: the ranks go on after \d\d s\n", err)
    text = (folder / "hang.txt").read_text()
    assert text.count("Current thread") == 2
    assert " in _read_ahead\n" in text.replace('"', " "), "the reader's thread, too"


def test_f3_a_stopped_rank(tmp_path: Path) -> None:
    """Fault: a rank that SIGSTOP has stopped is named, but not where it stood and who waits for it; or it stays."""
    make_project(tmp_path)
    words = ["run.toml", "run.name=a", "parallel.ranks=2", "train.num_steps=100000", "parallel.stopped_s=14"]
    run = start(tmp_path, "train", *words)
    assert run.stderr is not None
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 20_000:
        assert run.poll() is None
        time.sleep(0.1)
    victim = started_by(run.pid)[1].pid
    os.kill(victim, signal.SIGSTOP)
    stopped_s = time.monotonic()
    _, err = run.communicate(timeout=100)
    event = hang_of(tmp_path / "runs" / "a", err)
    assert (event["cause"], event["ranks"]) == ("stopped", [1])
    assert float(str(event["monotonic_s"])) - stopped_s < 15.0
    assert f"what to do: kill -CONT {victim} continues" in err
    assert re.search(
        rf"^codescent:   1 of 2  {victim}  stopped .* (before|in|in or after) \w+ \d+ over \w+", err, re.MULTILINE
    )
    assert f"(pid {victim}) is stopped (SIGCONT continues it), and is ended now (parallel.stopped_s)" in err
    assert run.returncode == 128 + signal.SIGKILL


def test_an_own_loop_is_watched_and_its_named_parts_have_their_time(tmp_path: Path) -> None:
    """Fault: an own loop is not watched; a named part counts as a hang; without collectives of ours nobody is named."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "launch.py").write_text(LAUNCH)
    done = subprocess.run(
        [sys.executable, "launch.py"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("likely cause:") == 1, "none in the section"
    assert "likely cause: rank 1 does something that the others do not" in done.stderr
    assert re.search(r"loop.py:\d+ in of_this_rank_alone\n", done.stderr)
    assert re.search(r"^codescent:   1 of 2  \d+  sleeping +301 +steps", done.stderr, re.MULTILINE)
