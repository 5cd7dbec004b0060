"""In: scripts of `codescent launch --to slurm`. Out: a real SLURM of three nodes starts them, ends them, starts them again.
Skips without root or SLURM's programs (tests/slurm_cluster.py says what to install). F18 of the fault tests is here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import places
import pytest
import slurm_cluster
from runs import losses, make_project, train
from scripts import script_of
from slurm_cluster import Cluster

from codescent.record import RunFolder

SITE = ("site.time=00:10:00", "site.devices=none")
TWO = (*SITE, "--to", "slurm", "--nodes", "2", "--devices", "1")
EXACT = 1e-10
LONG = (
    "run.toml", "run.name=long", "train.precision=fp64", "train.num_steps=1000000", "optimizer.decay_steps=100",
    "train.eval_every=0", "log.metrics_every=1", "train.global_batch_size=32", "model.hidden_dim=64",
)  # fmt: skip
"""A run that does not end by itself. A step takes about 10 ms."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    cluster.called("scancel", "--user=root")
    cluster.wait(lambda: cluster.called("squeue", "--noheader") == "", "the end of all jobs")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    places.make_program(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    """A script, in a file."""
    path = folder / "job.sbatch"
    path.write_text(script_of(words, capsys))
    return path


def log_of(folder: Path, name: str, job: str) -> str:
    return (folder / f"{name}-{job}.log").read_text()


def steps_done(folder: Path, name: str = "long") -> int:
    csv = folder / "runs" / name / "metrics.csv"
    return csv.read_text().count("\n") - 1 if csv.exists() else 0


def trains(slurm: Cluster, project: Path, job: str, steps: int) -> None:
    """Wait until the run `long` has done more than so many steps."""

    def holds() -> bool:
        state = slurm.field(job, "JobState")
        assert state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), (state, log_of(project, "long", job))
        return state == "RUNNING" and steps_done(project) > steps

    slurm.wait(holds, f"step {steps}")


def as_one_process(project: Path, words: tuple[str, ...], name: str) -> None:
    """The losses of a run are those of one process that does as many steps."""
    found = losses(RunFolder.open(project / "runs" / name))
    words = tuple(word for word in words if not word.startswith(("run.name", "train.num_steps", "run.toml")))
    alone = train(project, "alone", *words, f"train.num_steps={len(found)}")
    assert found == pytest.approx(losses(alone), rel=EXACT, abs=0)


# places


def test_each_rank_has_its_place(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["places.py", *SITE, "site.before=[\"export TMPDIR='/tmp'\"]", "--to", "slurm", "--nodes", "3", "--devices", "2"]
    script = saved(project, capsys, *words, "--", "a b", "$c", "it's")
    job = slurm.submit(script)
    assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "places", job)
    assert log_of(project, "places", job) == ""
    found = places.taken(project, 6)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        (f"host{host}", local, 2) for host in range(3) for local in range(2)
    ]
    assert {(one["launcher"], one["master_addr"], one["job"]) for one in found} == {("srun", "host0", f"srun {job}.0")}
    assert {one["CODESCENT_MARK"] for one in found} == {str(project / "places.py")}
    assert [one["words"] for one in found] == [["a b", "$c", "it's"]] * 6


def test_sbatch_finds_nothing_wrong(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = saved(project, capsys, "places.py", *TWO)
    assert "to start at" in slurm.tried("sbatch", "--test-only", str(script)).stderr
    assert slurm.called("squeue", "--noheader") == ""


# runs


def test_losses_are_those_of_one_process(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("run.toml", "run.name=real", "train.precision=fp64")
    job = slurm.submit(saved(project, capsys, *run, *TWO))
    assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "real", job)
    as_one_process(project, run, "real")


def test_f18_a_signal_saves_and_the_job_starts_again(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGUSR1, as before a time limit: saved, requeued, continued at the same step in the same log; scancel: saved."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    slurm.called("scancel", "--signal=USR1", job)
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1", "the requeue")
    stopped = steps_done(project)
    trains(slurm, project, job, stopped + 5)
    slurm.called("scancel", job)
    assert slurm.ended(job)[0] == "CANCELLED"
    log = log_of(project, "long", job)
    assert log.count("by SIGUSR1; saved in") == log.count("by SIGTERM; saved in") == 1, log
    assert f"at step {stopped}" in log
    as_one_process(project, LONG, "long")
