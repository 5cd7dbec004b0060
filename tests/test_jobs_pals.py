"""In: scripts of `codescent launch --to pbs`. Out: run as PBS runs them, with an mpiexec that does as PALS, they hold.
Neither is to be had here: tests/pals_mpiexec.py and a qsub that writes down its words stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import marked
import pals_mpiexec
import places
import pytest
from runs import environment, losses, make_project, train
from scripts import script_of

from codescent.record import RunFolder
from codescent.verbs import cli

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

SITE = ("site.time=00:10:00", "site.devices=none", "site.interface=eth0")
QSUB = """#!/bin/sh
# qsub: writes down how it was called, and answers with a number
for word in "$@"; do echo "$word"; done >>qsub.words
echo 4712.server
"""


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(3) as found:
        yield found


@pytest.fixture
def project(made: hosts.Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_project(tmp_path)
    places.make_program(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    mpiexec = Path(__file__).parent / "pals_mpiexec.py"
    texts = {"mpiexec": f'#!/bin/sh\nexec {sys.executable} {mpiexec} "$@"\n', "qsub": QSUB}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv(pals_mpiexec.PREFIX, made.name(0).removesuffix("0"))
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    marked.kill(tmp_path)


def ended(
    text: str, folder: Path, made: hosts.Hosts, nodes: int, ranks: int, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on its first node, as PBS does."""
    (folder / "script").write_text(text)
    (folder / "nodes").write_text("".join(f"{hosts.address(node)}\n" * ranks for node in range(nodes)))
    job = {"PBS_NODEFILE": str(folder / "nodes"), "PBS_JOBID": "4711.server", "PBS_O_WORKDIR": str(folder), **env}
    return subprocess.run(
        made.command(0, ["bash", str(folder / "script")]), cwd="/", check=False, text=True, capture_output=True,
        timeout=200, env=environment(**job),
    )  # fmt: skip


def test_each_rank_has_its_place(project: Path, made: hosts.Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["places.py", *SITE, "--to", "pbs", "--nodes", "3", "--devices", "2", "--", "a b", "$c", "it's"]
    done = ended(script_of(words, capsys), project, made, nodes=3, ranks=2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = places.taken(project, 6)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        (f"host{host}", local, 2) for host in range(3) for local in range(2)
    ]
    assert {(one["launcher"], one["master_addr"]) for one in found} == {("mpiexec of PALS", "10.77.0.1")}
    assert {one["GLOO_SOCKET_IFNAME"] for one in found} == {"eth0"}
    assert {one["CODESCENT_MARK"] for one in found} == {str(project / "runs" / "places")}
    assert {tuple(one["words"]) for one in found} == {("a b", "$c", "it's")}
    assert all(one["CODESCENT_STOP_AT"] and one["CODESCENT_TOKEN"] for one in found)


def test_losses_are_those_of_one_process(project: Path, made: hosts.Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("run.toml", "run.name=real", "train.precision=fp64", "train.num_steps=6", "train.eval_every=0")
    words = [*run, *SITE, "--to", "pbs", "--nodes", "2", "--devices", "1"]
    done = ended(script_of(words, capsys), project, made, nodes=2, ranks=1)
    assert done.returncode == 0, done.stderr
    alone = train(project, "alone", *run[2:])
    assert losses(RunFolder.open(project / "runs" / "real")) == pytest.approx(losses(alone), rel=1e-10, abs=0)


@pytest.mark.slow  # the run has half a minute, then it saves
def test_f18_saved_before_the_limit_and_submitted_again(
    project: Path, made: hosts.Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run.toml", "run.name=long", "train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0",
        *SITE, "site.time=00:01:30", "--to", "pbs", "--nodes", "2", "--devices", "1",
    ]  # fmt: skip
    capsys.readouterr()
    assert cli.run(["launch", *words, "site.environment=none", "--out", "job.pbs"]) == 0
    text = (project / "job.pbs").read_text()
    done = ended(text, project, made, nodes=2, ranks=1)
    assert done.returncode == 0, done.stderr
    assert "stopped at step" in done.stdout
    assert "by the time limit of the job (CODESCENT_STOP_AT=" in done.stdout
    submitted = (project / "qsub.words").read_text().splitlines()
    assert submitted[-1] == str(project / "job.pbs")
    (variable,) = [word for word in submitted if "CODESCENT_START=1" in word]
    done = ended(text, project, made, nodes=2, ranks=1, **dict([variable.split("=", 1)]))
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
