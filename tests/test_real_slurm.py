"""In: scripts of `codescent launch --to slurm`. Out: a real SLURM of three nodes starts and ends them, and again.
Skips without root or SLURM's programs (tests/slurm_cluster.py says what to install). F18 of the fault tests is here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import marked
import places
import pytest
import slurm_cluster
from remote_shell import make_ssh
from runs import losses, make_project, train
from scripts import script_of
from slurm_cluster import Cluster

from codescent.record import RunFolder
from codescent.verbs import cli

SITE = ("site.time=00:10:00", "site.devices=none")
TWO = (*SITE, "--to", "slurm", "--nodes", "2", "--devices", "1")
LIVES = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING")
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
        assert state in LIVES, (state, log_of(project, "long", job))
        return state == "RUNNING" and steps_done(project) > steps

    slurm.wait(holds, f"step {steps}")


def requeued(slurm: Cluster, project: Path, job: str, name: str = "long", seconds: float = 60) -> None:
    """Wait until a job has been started again, or waits for it."""

    def holds() -> bool:
        state = slurm.field(job, "JobState")
        assert state in (*LIVES, "REQUEUED"), log_of(project, name, job)
        return slurm.field(job, "Restarts") == "1"

    slurm.wait(holds, "the requeue", seconds)


def as_one_process(project: Path, words: tuple[str, ...], name: str) -> None:
    """The losses of a run are those of one process that does as many steps."""
    found = losses(RunFolder.open(project / "runs" / name))
    words = tuple(word for word in words if not word.startswith(("run.name", "train.num_steps", "run.toml")))
    alone = train(project, "alone", *words, f"train.num_steps={len(found)}")
    assert found == pytest.approx(losses(alone), rel=EXACT, abs=0)


# places


def test_each_rank_has_its_place(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "places.py",
        *SITE,
        "site.before=[\"export TMPDIR='/tmp'\"]",
        "--to",
        "slurm",
        "--nodes",
        "3",
        "--devices",
        "2",
    ]
    script = saved(project, capsys, *words, "--", "a b", "$c", "it's")
    job = slurm.submit(script)
    assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "places", job)
    assert log_of(project, "places", job) == ""
    found = places.taken(project, 6)
    assert [(one["host"], one["local_rank"], one["local_world_size"]) for one in found] == [
        (f"host{host}", local, 2) for host in range(3) for local in range(2)
    ]
    assert {(one["launcher"], one["master_addr"], one["job"]) for one in found} == {("srun", "host0", f"srun {job}.0")}
    assert {one["CODESCENT_MARK"] for one in found} == {str(project / "runs" / "places")}
    assert [one["words"] for one in found] == [["a b", "$c", "it's"]] * 6


def test_sbatch_finds_nothing_wrong(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = saved(project, capsys, "places.py", *TWO)
    assert "to start at" in slurm.tried("sbatch", "--test-only", str(script)).stderr
    assert slurm.called("squeue", "--noheader") == ""


# the doctor


def test_the_doctor_knows_its_own_job_and_an_earlier_start(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun and the script are no leftovers, though they are above no rank. The hosts of this test share all processes,
    also with other tests."""
    assert cli.run(["doctor", "run.toml", "--no-bandwidth", *TWO]) == 0
    path = project / "job.sbatch"
    path.write_text(capsys.readouterr().out)
    (mark,) = re.findall(r"export CODESCENT_MARK=(.*)", path.read_text())
    assert f"the run {mark} is still there" not in told(slurm, project, path)
    env = {**os.environ, "CODESCENT_MARK": mark, "CODESCENT_TOKEN": "of an earlier start"}
    with subprocess.Popen(["sleep", "600"], env=env) as left:
        said = told(slurm, project, path)
        left.kill()
    assert f"the run {mark} is still there: process {left.pid} (sleep 600) " in said


def told(slurm: Cluster, project: Path, script: Path) -> str:
    """What the doctor says as a job, in one line."""
    job = slurm.submit(script)
    slurm.ended(job)
    said = " ".join(next(project.glob(f"*-{job}.log")).read_text().split())
    assert said.startswith("2 ranks on 2 hosts")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [("--nodes", "1", "--devices", "4"), ("--nodes", "2", "--devices", "1")])
def test_a_config_that_is_refused_ends_the_job_with_2(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str], nodes: tuple[str, ...]
) -> None:
    """srun ends the ranks that are slower by SIGTERM, and ends with 143 itself. The message is printed once."""
    script = saved(project, capsys, "run.toml", "run.name=wrong", *SITE, "--to", "slurm", *nodes)
    config = (project / "run.toml").read_text()
    (project / "run.toml").write_text(f"{config}\n[nosuch]\nkey = 1\n")
    job = slurm.submit(script)
    state = slurm.ended(job)
    log = log_of(project, "wrong", job)
    assert state == ("FAILED", "2:0"), log
    assert log.count("error: run.toml") == 1, log


# runs


@pytest.mark.slow
def test_losses_are_those_of_one_process(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("run.toml", "run.name=real", "train.precision=fp64", "train.num_steps=6", "train.eval_every=0")
    job = slurm.submit(saved(project, capsys, *run, *TWO))
    assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "real", job)
    as_one_process(project, run, "real")


@pytest.mark.slow
def test_f18_a_signal_saves_and_the_job_starts_again(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGUSR1, as before a time limit: saved, requeued, continued at the same step in the same log; scancel: saved."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    slurm.called("scancel", "--signal=USR1", job)
    requeued(slurm, project, job)
    stopped = steps_done(project)
    trains(slurm, project, job, stopped + 5)
    slurm.called("scancel", job)
    assert slurm.ended(job)[0] == "CANCELLED"
    log = log_of(project, "long", job)
    assert log.count("by SIGUSR1; saved in") == log.count("by SIGTERM; saved in") == 1, log
    assert f"at step {stopped}" in log
    as_one_process(project, LONG, "long")


@pytest.mark.slow
def test_f18_a_higher_job_comes_first(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preemption: the ranks get SIGCONT and SIGTERM, save, and SLURM starts them again later."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    first = slurm.called(
        "sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 1"
    ).strip()
    assert slurm.ended(first)[0] == "COMPLETED"
    stopped = steps_done(project)
    trains(slurm, project, job, stopped + 5)
    slurm.called("scancel", job)
    slurm.ended(job)
    assert f"at step {stopped}" in log_of(project, "long", job)
    as_one_process(project, LONG, "long")


@pytest.mark.slow  # SLURM's smallest limit is a minute, and it is looked at twice a minute
def test_f18_the_time_limit_saves_and_the_job_starts_again(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of two minutes: one minute before, the run saves, by SIGUSR1 or by its own clock."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO, "site.time=00:02:00"))
    requeued(slurm, project, job, seconds=200)
    stopped = steps_done(project)
    trains(slurm, project, job, stopped + 5)
    log = log_of(project, "long", job)
    assert f"stopped at step {stopped} by" in log
    assert f"at step {stopped}" in log.partition("resumed from")[2]


@pytest.mark.slow
def test_f18_further_signals_change_nothing(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM twice and SIGCONT, while the run saves or before: it is saved once, and the job is not started again."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    for name in ("CONT", "TERM", "TERM", "CONT"):
        slurm.tried("scancel", f"--signal={name}", job)
    assert slurm.ended(job) == ("FAILED", "143:0"), log_of(project, "long", job)
    assert log_of(project, "long", job).count("by SIGTERM; saved in") == 1


# ends


ASKS = """
import os, sys
with open("starts", "a") as file:
    file.write(os.environ.get("SLURM_ARRAY_TASK_ID", "-") + os.environ.get("SLURM_RESTART_COUNT", "0") + "\\n")
sys.exit(75 if {condition} else 0)
"""
"""A script that wants to be started again."""


@pytest.mark.slow
def test_a_job_is_not_requeued_for_ever(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "asks.py").write_text(ASKS.format(condition="True"))
    one = ("--to", "slurm", "--nodes", "1", "--devices", "1")
    job = slurm.submit(saved(project, capsys, "asks.py", *SITE, "site.requeues=1", *one))
    assert slurm.ended(job) == ("FAILED", "75:0"), log_of(project, "asks", job)
    assert (project / "starts").read_text() == "-0\n-1\n"


@pytest.mark.slow
def test_an_element_of_an_array_is_requeued_alone(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = "os.environ['SLURM_ARRAY_TASK_ID'] == '2' and 'SLURM_RESTART_COUNT' not in os.environ"
    (project / "asks.py").write_text(ASKS.format(condition=condition))
    one = ("--to", "slurm", "--nodes", "1", "--devices", "1")
    array = slurm.submit(saved(project, capsys, "asks.py", *SITE, *one), "--array=1-3")
    for number in (1, 2, 3):
        assert slurm.ended(f"{array}_{number}") == ("COMPLETED", "0:0")
    assert sorted((project / "starts").read_text().split()) == ["10", "20", "21", "30"]


FAILS = """
import os, time
import torch
import codescent

run = codescent.init()
if run.rank == 1:
    raise RuntimeError("the cause")
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """srun ends the other rank, which waits. The exit code is that of a failure, the cause is first in the log."""
    (project / "fails.py").write_text(FAILS)
    job = slurm.submit(saved(project, capsys, "fails.py", *TWO))
    state, code = slurm.ended(job)
    log = log_of(project, "fails", job)
    assert (state, code) == ("FAILED", "1:0"), log
    assert log.splitlines()[0] == "[rank1]: Traceback (most recent call last):"
    assert "codescent: rank 1 failed: RuntimeError: the cause (pid " in log


CHAIN = """
import os, time
os.close(os.open("running", os.O_CREAT | os.O_EXCL))  # fails while another job runs
time.sleep(1)
os.remove("running")
"""


@pytest.mark.slow
def test_jobs_of_a_chain_follow_each_other(slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "chain.py").write_text(CHAIN)
    words = ("launch", "chain.py", "--to", "slurm", "--nodes", "1", "--devices", "1", "--times", "3", "--submit", *SITE)
    said = slurm.called("codescent", *words, "site.environment=none", cwd=project)
    jobs = [line.split()[1] for line in said.splitlines() if line.startswith("job ")]
    assert len(set(jobs)) == 3, said
    for job in jobs:
        assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "chain", job)


# the jobs of a run


def test_a_job_is_submitted_followed_and_cancelled(slurm: Cluster, project: Path) -> None:
    said = slurm.called("codescent", "launch", *LONG, *TWO, "--submit", "site.environment=none", cwd=project)
    job = said.split()[1]
    assert slurm.field(job, "JobName") == "long"
    trains(slurm, project, job, 5)
    state = slurm.called("codescent", "launch", "runs/long", "--status", cwd=project)
    assert state.startswith(f"slurm {job}, submitted ")
    assert "running, 0:" in state
    assert state.rstrip().endswith(f"long-{job}.log")
    follow = slurm.command(slurm_cluster.NODES, ["codescent", "launch", "runs/long", "--follow"])
    with subprocess.Popen(follow, env=slurm.env, cwd=project, text=True, stdout=-1, stderr=-1) as following:
        slurm.called("codescent", "launch", "runs/long", "--cancel", cwd=project)
        out, err = following.communicate(timeout=100)
    assert (following.returncode, err) == (0, "")
    assert slurm.ended(job)[0] == "CANCELLED"
    log = log_of(project, "long", job)
    assert out.startswith(log.rstrip("\n")[:400])
    assert "by SIGTERM; saved in" in out
    assert f"slurm {job}: cancelled" in out
    assert "cancelled" in slurm.called("codescent", "launch", "runs/long", "--status", cwd=project)
    assert slurm.called("codescent", "launch", "runs/long", "--cancel", cwd=project) == (
        "no job of this run waits or runs\n"
    )


def test_a_job_that_slurm_refuses_is_no_job_of_the_run(slurm: Cluster, project: Path) -> None:
    words = ("launch", *LONG, *TWO, "--submit", "site.environment=none", "site.partition=none_such")
    done = slurm.tried("codescent", *words, cwd=project)
    assert done.returncode == 2, done.stderr
    assert "invalid partition specified: none_such" in done.stderr
    assert not (project / "runs" / "long" / "jobs").exists()


LEAVES = """
import subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=-3, stderr=-3)
"""
"""A script that leaves a process on each node, as a data loader that was not ended."""


@pytest.mark.slow
def test_what_a_run_has_left_on_its_nodes_is_ended(slurm: Cluster, project: Path) -> None:
    """SLURM has ended the job by its process groups. The mark finds what is left."""
    (project / "leaves.py").write_text(LEAVES)
    said = slurm.called("codescent", "launch", "leaves.py", *TWO, "--submit", "site.environment=none", cwd=project)
    job, run = said.split()[1], said.split()[-2]
    assert slurm.ended(job) == ("COMPLETED", "0:0"), log_of(project, "leaves", job)
    make_ssh(project, slurm.hosts)
    assert len(list(marked.processes(project))) == 2
    path = f"{project}:{slurm.env['PATH']}"
    done = slurm.tried("codescent", "launch", run, "--kill", "--hosts", "host0,host1", cwd=project, PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(marked.processes(project)) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", ["slurmstepd", "srun"])
def test_f7_ranks_end_with_the_step_that_has_started_them(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    """Killed: the slurmstepd that has a node's ranks as its children, or the srun that has them started."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    ranks = marked.ranks(project)
    assert len(ranks) == 2
    if program == "slurmstepd":
        (second,) = [pid for pid in ranks if b"SLURM_PROCID=1" in marked.environment(pid)]
        victim = int(Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1])
    else:
        victim = min(pid for pid in marked.processes(project) if marked.program(pid) == "srun")
    assert marked.program(victim) == program
    os.kill(victim, signal.SIGKILL)
    marked.wait_for_none(lambda: marked.ranks(project))
    if program == "srun":  # without a node's slurmstepd, srun waits until the time limit; its option --wait ends that
        assert slurm.ended(job)[0] == "FAILED", log_of(project, "long", job)
    else:
        slurm.wait(lambda: "rank 1 (on host1)" in log_of(project, "long", job), "the cause in the log")


@pytest.mark.slow
def test_s1_s5_ranks_listen_on_their_interface_and_keep_the_token(
    slurm: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """slurmd and slurmstepd listen everywhere; a rank does not. No command line, file or log has the token."""
    job = slurm.submit(saved(project, capsys, *LONG, *TWO))
    trains(slurm, project, job, 5)
    token = marked.token(project)
    for pid in marked.ranks(project):
        listeners = marked.listeners(pid)
        assert {address for address, _ in listeners} <= {"10.77.0.1", "10.77.0.2", "127.0.0.1"}
    assert any(marked.listeners(pid) for pid in marked.ranks(project))
    shown = marked.command_lines_with(token)
    slurm.called("scancel", job)
    slurm.ended(job)
    assert shown == []
    assert marked.files_with(project, token) == []
