"""In: own loops that torchrun and mpirun have started, of which a rank stands still or dies. Out: what is said of it.
Nothing is patched. The supervisor is a process that the first rank starts; no trace of it stays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
from runs import environment, make_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory by /proc"),
]

LOOP = """
import os, sys, time
import torch
import codescent

ranks = codescent.init("cpu", timeout_s=60)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
codescent.distribute(model, optimizer)

def step():
    model(torch.ones(4, 64) + ranks.rank).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def of_this_rank_alone():
    time.sleep(12)

for number in range(800):
    step()
    time.sleep(0.01)
if ranks.rank == 1:
    of_this_rank_alone() if sys.argv[1] == "hang" else os.kill(os.getpid(), 9)
step()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command to its end. No process of a supervisor is left a second later."""
    (folder / "loop.py").write_text(LOOP)
    env = environment(TMPDIR=str(folder))
    done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=200, check=False)
    left = [one for one in psutil.process_iter(["cmdline"]) if _is_supervisor(one, folder)]
    _, alive = psutil.wait_procs(left, timeout=1.0)
    assert alive == []
    return done


def _is_supervisor(process: psutil.Process, folder: Path) -> bool:
    try:
        return "codescent.launch.supervise" in process.cmdline() and process.cwd() == str(folder)
    except psutil.Error:
        return False


def torchrun(*words: str) -> list[str]:
    return [f"{sysconfig.get_path('scripts')}/torchrun", "--standalone", "--nproc-per-node", "2", *words]


def mpirun(*words: str) -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    variables = [part for name in ("PYTHONPATH", "TMPDIR") if name in os.environ for part in ("-x", name)]
    return ["mpirun", *root, "--oversubscribe", *variables, "-np", "2", sys.executable, *words]


@pytest.mark.parametrize("launcher", [torchrun, mpirun])
def test_a_hang_under_another_launcher(tmp_path: Path, launcher: object) -> None:
    """Fault: ranks that we have not started are not watched: nobody knows their pages, processes or stacks."""
    assert callable(launcher)
    done = run(tmp_path, *launcher("loop.py", "hang"))
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout  # mpirun may send both to one place
    assert said.count("likely cause:") == 1
    assert "likely cause: rank 1 does something that the others do not" in said
    assert re.search(r"loop.py:\d+ in of_this_rank_alone\n", said)
    assert re.search(r"^codescent:   0 of 2 .* 801 +steps .* in \w+ \d+ over ", said, re.MULTILINE)
    (path,) = re.findall(r"all stacks: (\S+)", said)
    assert Path(path).read_text().count("Current thread") == 2


def test_f1_a_crash_under_torchrun(tmp_path: Path) -> None:
    """Fault: torchrun says an exit code, and the survivor blames itself; nobody says that rank 1 ended first."""
    done = run(tmp_path, *torchrun("loop.py", "die"))
    assert done.returncode != 0
    assert re.search(r"codescent: rank 1 of 2 \(pid \d+ on \S+\) has ended in step 801, in steps, without", done.stderr)
    consequence = r"codescent: rank 0 of 2 \(.*\) ends as a consequence: rank 1 of 2 \(pid \d+\) has ended in step 801 "
    assert re.search(consequence, done.stderr)
    assert "rank 0 failed" not in done.stderr
    assert list(tmp_path.glob("codescent-hang-*")) == [], "the folder for verdicts is removed"


def test_a_stopped_rank_under_torchrun_is_ended(tmp_path: Path) -> None:
    """Fault: with another launcher than ours parallel.stopped_s has no effect, and nobody says so."""
    make_project(tmp_path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "codescent", "train"]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *words, "run.toml", "run.name=a", "train.num_steps=100000", "parallel.stopped_s=3"],
            cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), stdout=err, stderr=err,
        )  # fmt: skip
        try:
            torchrun, end_s = psutil.Process(process.pid), time.monotonic() + 100
            while not any(_is_supervisor(one, tmp_path) for one in torchrun.children(recursive=True)):
                assert time.monotonic() < end_s
                time.sleep(0.1)
            (victim,) = [one for one in torchrun.children() if one.environ().get("RANK") == "1"]
            victim.suspend()
            assert process.wait(60) != 0
        finally:
            process.kill()
            process.wait()
    said = (tmp_path / "err").read_text()
    how = rf"rank 1 of 2 \(pid {victim.pid}\) is stopped \(SIGCONT continues it\)"
    assert re.search(
        rf"codescent: {how}: the others wait for it for 3 s \(parallel.stopped_s\), then it is ended", said
    )
    assert re.search(rf"codescent: {how}, and is ended now \(parallel.stopped_s\)", said)
