"""In: real torchrun on one machine; ranks that fail, alone or all. Out: what it prints: the cause once, with rank and
host, pid and step; the log of each rank in the run folder. Does not test our own launcher: test_launch_local does."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import environment, make_project

from codescent.base import cause
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.coupling.lost_peer import is_lost_peer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FAILS = """
import torch
import codescent

with codescent.init("cpu", timeout_s=60) as ranks:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(5):
        optimizer.step()
        ranks.mean(step)
        if step == 2 and ranks.rank == 1:
            raise ValueError("no such sample")
"""


SECRET = "a token that no file and no command line has"


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = environment(CODESCENT_TOKEN=SECRET)
    return subprocess.run(
        [*TORCHRUN, *words], cwd=folder, env=env, text=True, capture_output=True, timeout=150, check=False
    )


def summary(said: str) -> str:
    """What torchrun says of the first failure."""
    return said.partition("Root Cause (first observed failure):")[2]


def test_torchruns_summary_names_the_rank_that_failed_first_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FAILS)
    done = torchrun(tmp_path, "loop.py")
    assert done.returncode == 1
    root = summary(done.stderr)
    assert re.search(rf"rank 1 of 2 \(pid \d+ on {socket.gethostname()}, after step 3\) failed\n", root), done.stderr
    assert "ValueError: no such sample" in root
    assert "error_file: <N/A>" not in root
    before = done.stderr.partition("Root Cause")[0]
    assert before.count('    raise ValueError("no such sample")') == 1
    assert re.search(r"codescent: rank 1 failed: ValueError: no such sample \(pid \d+ on \S+, after step 3\)", before)


def test_wrong_input_of_all_ranks_is_printed_once_before_they_meet(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = torchrun(tmp_path, "-m", "codescent", "train", "run.toml", "train.precison=fp64")
    assert done.returncode == 1
    before, _, root = done.stderr.partition("Traceback")  # of torchrun, with its summary
    assert len(re.findall(r"^error: .*precison", before, re.MULTILINE)) == 1, done.stderr
    assert "precison" in root
    assert "error_file: <N/A>" not in root
    assert not (tmp_path / "runs").exists()


def test_wrong_input_of_all_ranks_is_printed_once_after_they_have_met(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = torchrun(tmp_path, "-m", "codescent", "train", "run.toml", "data.corpus=nothing.txt")
    assert done.returncode == 1
    before, _, root = done.stderr.partition("Traceback")
    assert len(re.findall(r"^error: .*nothing\.txt", before, re.MULTILINE)) == 1, done.stderr
    assert "nothing.txt" in root


def test_s5_each_rank_has_a_log_in_the_run_folder_and_no_file_has_the_token(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ["run.name=logs", "train.num_steps=4", "train.eval_every=0", "log.metrics_every=1"]
    done = torchrun(tmp_path, "-m", "codescent", "train", "run.toml", *words)
    assert done.returncode == 0, done.stderr
    first, other = ((tmp_path / "runs/logs/logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert first.startswith("task    lm:")  # printed before there was a folder
    assert "step 4/4" in first
    assert "step 4/4" not in other
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in done.stdout + done.stderr


# without processes


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    process = cause._Process()
    process.rank = Rank(1, 1, 2, 2)
    monkeypatch.setattr(cause, "process", process)


@pytest.mark.usefixtures("second_of_two")
def test_the_error_file_has_the_form_of_torchs_own(tmp_path: Path) -> None:
    cause.process.position = 11.5
    path = tmp_path / "error.json"
    for error in (UserError("a: wrong", "b: wrong"), ValueError("bad")):
        cause.write_error_file(error, {cause.ERROR_FILE: str(path)})
        message = json.loads(path.read_text())["message"]
        assert message["message"].startswith(f"rank 1 of 2 (pid {os.getpid()} on {socket.gethostname()}, in step 12) f")
        assert message["extraInfo"]["timestamp"].isdigit()
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: bad")
    cause.write_error_file(ValueError("bad"), {})  # no torchrun


@pytest.mark.usefixtures("second_of_two")
def test_a_consequence_never_comes_before_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = []
    for now_s, consequence in ((10.90, False), (10.95, True)):
        monkeypatch.setattr("codescent.base.cause.time.time", lambda now_s=now_s: now_s)
        cause.is_consequence(consequence)
        cause.write_error_file(ValueError("bad"), {cause.ERROR_FILE: str(tmp_path / "error.json")})
        seconds.append(json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["timestamp"])
    assert seconds == ["10", "11"]
    (line,) = cause.last_words(ValueError("bad"), {})
    assert line.endswith("ends as a consequence: another rank does not answer")


def test_an_error_of_this_rank_is_no_consequence() -> None:
    with pytest.raises(RuntimeError, match="eth9") as caught:
        dist.ProcessGroupGloo.create_device(interface="eth9")
    assert not is_lost_peer(caught.value)
    for said in ("CUDA error", "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed"):
        assert is_lost_peer(dist.DistBackendError(said)) == (said == "CUDA error")
    assert is_lost_peer(dist.DistBackendError("ncclRemoteError: the other side has ended"))
    at = "/gloo/transport/tcp/pair.cc:538]"
    assert is_lost_peer(RuntimeError(f"[{at} Connection closed by peer [127.0.0.1]:4711"))
    assert is_lost_peer(RuntimeError(f"[enforce fail at {at} . writev [127.0.0.1]:4711: Broken pipe"))


@pytest.mark.usefixtures("second_of_two")
def test_an_error_of_all_ranks_is_printed_by_the_first() -> None:
    error = UserError("wrong")
    assert cause.prints(error, {})
    assert cause.last_words(error, {})
    error.everywhere = True
    assert not cause.prints(error, {})
    assert cause.prints(error, {"CODESCENT_PROGRESS_FD": "3"})  # our launcher prints the log of the first that fails
    assert cause.last_words(error, {}) == []


FAILING = """
import os, signal, time
from codescent.base import ending
ending.fail(RuntimeError("the cause"))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
ending.end()
"""


def test_a_rank_that_ends_by_an_error_is_not_one_that_was_stopped() -> None:
    """Its launcher ends all ranks when another one has ended. 143 would say that it was stopped, and saved."""
    assert subprocess.run([sys.executable, "-c", FAILING], timeout=60, check=False).returncode == 1
