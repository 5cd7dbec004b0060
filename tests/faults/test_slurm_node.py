"""In: a job of SLURM whose first node is cut off, with rank 0. Out: it goes on elsewhere; what is left writes nothing.
Skips without root or SLURM's programs (tests/slurm_cluster.py says what to install)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import host_ranks
import marked
import pytest
import slurm_cluster
from runs import losses, make_project, train
from scripts import script_of
from slurm_cluster import Cluster

from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SILENT_S, LEASE_S, TIMEOUT_S = 10, 3, 150
WORDS = (
    "run.toml", "run.name=cut", "train.precision=fp64", "train.num_steps=1000000", "optimizer.decay_steps=100",
    "train.eval_every=0", "log.metrics_every=1", "train.global_batch_size=32", "model.hidden_dim=64",
    "checkpoint.every=20", f"survive.lease_s={LEASE_S}",
)  # fmt: skip
"""A run that does not end by itself."""
SCRIPT = ("site.time=00:10:00", "site.devices=none", "--to", "slurm", "--nodes", "2", "--devices", "1")
CUT = 0
"""The host of rank 0, and of the batch script."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    make_project(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cluster(tmp_path: Path, project: Path) -> Iterator[Cluster]:
    """The first host has a mount of its own of the project: locks of files do not reach the others."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        pytest.skip("needs bindfs and /dev/fuse: apt-get install bindfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["bindfs", project, disk], check=True)
    try:
        with Cluster(tmp_path, SILENT_S, {CUT: (disk, project)}) as made:
            yield made
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def steps_done(project: Path) -> int:
    file = project / "runs" / "cut" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def of_host(cluster: Cluster, project: Path) -> list[int]:
    """The ranks on the host that is cut off."""
    here = set(cluster.processes(CUT))
    return [pid for pid in marked.ranks(project) if pid in here]


def writers(project: Path) -> list[object]:
    events = RunFolder.open(project / "runs" / "cut").read_events()
    return [one["writer"] for one in events if one["kind"] in ("start", "resume")]


@pytest.mark.parametrize("stands_still", [True, False], ids=["the host stands still", "its link is cut"])
def test_f19_a_node_that_is_cut_off_writes_nothing_while_its_job_goes_on_elsewhere(
    cluster: Cluster, project: Path, capsys: pytest.CaptureFixture[str], stands_still: bool
) -> None:
    """Fault: SLURM starts the job again while rank 0 of the first start lives; both write, or the new one gives up.

    A host that stands still renews no lease, and comes back when others have the run. One whose link alone is cut waits
    in a collective (parallel.timeout_s), and renews its lease until then.
    """
    words = (*WORDS, *(() if stands_still else (f"parallel.timeout_s={TIMEOUT_S}",)))
    (project / "job.sbatch").write_text(script_of((*words, *SCRIPT), capsys))
    job = cluster.submit(project / "job.sbatch")
    cluster.wait(lambda: steps_done(project) > 50, "step 50")
    assert cluster.field(job, "BatchHost") == f"host{CUT}"
    (orphan,) = of_host(cluster, project)
    if stands_still:
        os.kill(orphan, signal.SIGSTOP)
    host_ranks.cut(cluster.hosts, CUT)
    cut_at = steps_done(project)
    cluster.wait(lambda: cluster.field(job, "Restarts") == "1", "the requeue", 120)
    assert of_host(cluster, project) == [orphan], "it lives while the job begins again"
    cluster.wait(lambda: len(writers(project)) == 2, "the next start", TIMEOUT_S + 90)
    if stands_still:
        assert of_host(cluster, project) == [orphan]
        os.kill(orphan, signal.SIGCONT)
    cluster.wait(lambda: of_host(cluster, project) == [], "the end of the orphan")
    resumed_at = steps_done(project)
    cluster.wait(lambda: steps_done(project) > max(cut_at, resumed_at) + 20, "more steps", 120)
    cluster.called("scancel", job)
    assert cluster.ended(job)[0] == "CANCELLED"
    assert writers(project) == [1, 2]
    log = (project / f"cut-{job}.log").read_text()
    assert f"process {orphan} on host{CUT} has written this run and may still do: wait" in log
    run = RunFolder.open(project / "runs" / "cut")
    steps = [row["step"] for row in run.read_metrics()]
    assert steps == list(range(1, len(steps) + 1)), log
    assert not list((run.path / "checkpoints").glob(".partial*"))
    found = losses(run)
    same = [word for word in WORDS if not word.startswith(("run.", "train.num_steps", "checkpoint."))]
    alone = train(project, "alone", *same, f"train.num_steps={len(found)}")
    assert found == pytest.approx(losses(alone), rel=1e-10, abs=0), log
