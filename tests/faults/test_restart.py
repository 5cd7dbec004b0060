"""In: runs with survive.on_loss, whose ranks are killed or stopped. Out: they go on, with the losses of a run alone.
Who takes which rank is tested in test_survival.py, without processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import codescent, environment, losses, make_project
from surviving import WORDS, Started

from codescent.record import RunFolder

pytestmark = pytest.mark.timeout(240)


def test_f2_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    """Fault: the run ends; the rank that lives dies, too; it goes on from other weights, or repeats samples."""
    run = Started(tmp_path, 2)
    run.until(lambda: run.rows() > 12)
    lives, dies = run.pid_of(0), run.pid_of(1)
    os.kill(dies, signal.SIGKILL)
    run.until(lambda: bool(run.events("resume")))
    assert Path(f"/proc/{lives}").exists(), "its process stays"
    run.is_like_a_run_alone()
    (crash,) = run.events("crash")
    assert (crash["rank"], crash["process"]) == (1, dies)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("parallel.dp_shard=3",), ("parallel.pp=3",), ("parallel.dp_replicate=3",)])
def test_f2_any_rank_of_any_layout(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Fault: rank 0 is special (it serves the store and writes the folder), or a layout waits for messages for ever."""
    run = Started(tmp_path, 3, "model.num_layers=3", *layout)
    for rank in range(3):
        before = len(run.events("resume")) if rank else 0
        run.until(lambda rank=rank: run.rows() > 8 * (rank + 1))  # type: ignore[misc]
        run.kill(rank)
        run.until(lambda before=before: len(run.events("resume")) > before)  # type: ignore[misc]
        run.until(lambda rank=rank: run.rows() > 8 * (rank + 1))  # type: ignore[misc]
    code, said = run.end()
    assert code == 0, said
    alone = codescent(tmp_path, "train", *WORDS, "run.name=alone", "model.num_layers=3")
    assert alone.returncode == 0
    expected = losses(RunFolder.open(tmp_path / "runs" / "alone"))
    assert losses(RunFolder.open(run.folder)) == pytest.approx(expected, rel=1e-4), said
    assert len(run.events("crash")) == 3


@pytest.mark.slow
def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    """Fault: a spare waits for ever, or stays as an orphan when the run ends."""
    run = Started(tmp_path, 2, "survive.spares=1")
    run.until(lambda: run.rows() > 12)
    children = run.children()
    assert len(children) == 3
    run.kill(0)
    run.is_like_a_run_alone()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.slow
def test_two_losses_within_one_recovery(tmp_path: Path) -> None:
    """Fault: a rank that dies while the others meet leaves them at the meeting until parallel.meet_s."""
    run = Started(tmp_path, 3, "survive.max_restarts=5")
    run.until(lambda: run.rows() > 12)
    run.kill(2)
    time.sleep(0.5)
    run.kill(1)
    run.is_like_a_run_alone()


@pytest.mark.slow
def test_a_loss_before_the_first_step(tmp_path: Path) -> None:
    """Fault: a rank that dies while the run begins leaves a folder that the next start refuses."""
    run = Started(tmp_path, 2)
    run.until(lambda: (run.folder / "environment.json").exists())
    run.kill(1)
    run.is_like_a_run_alone()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("section", "rank"), [("save", 0), ("save", 1), ("validation", 0), ("validation", 1)])
def test_a_loss_during_a_save_or_a_validation(tmp_path: Path, section: str, rank: int) -> None:
    """Fault: half a checkpoint is taken for a whole one, a validation is missing or there twice, or the others wait."""
    run = Started(tmp_path, 2, "parallel.dp_shard=2", "train.eval_every=5")
    run.until(lambda: run.rows() > 6)
    pid, pages = run.pid_of(rank), run.pages()
    while True:  # a rank that was stopped within the section is killed within it
        while pages.read(rank).section != section:
            assert run.process.poll() is None, run.end()
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)
        if pages.read(rank).section == section:
            break
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: bool(run.events("resume")))
    run.is_like_a_run_alone("train.eval_every=5")
    (crash,) = run.events("crash")
    assert crash["rank"] == rank
    found, expected = (
        [
            (row["step"], row["val_loss"])
            for row in RunFolder.open(run.place / "runs" / name).read_metrics()
            if row["val_loss"]
        ]
        for name in ("a", "alone")
    )
    assert [step for step, _ in found] == [step for step, _ in expected] == [*range(5, 61, 5)]
    assert dict(found) == pytest.approx(dict(expected), rel=1e-5)
    assert not list((run.folder / "checkpoints").glob(".partial*"))


@pytest.mark.slow
def test_a_rank_that_fails_at_every_start(tmp_path: Path) -> None:
    """Fault: a rank that dies in the same place each time is started again until somebody looks."""
    run = Started(tmp_path, 2, "survive.max_restarts=50")
    run.until(lambda: run.rows() > 2)
    first = run.pid_of(0)
    while run.process.poll() is None:
        for pid in run.children():
            if pid != first:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    found, said = run.end()
    assert found == 128 + signal.SIGKILL, said
    assert "2 starts in a row lost ranks before they had done a step" in said


@pytest.mark.slow
def test_f3_a_stopped_rank_is_replaced(tmp_path: Path) -> None:
    """Fault: a rank that SIGSTOP has stopped is ended (parallel.stopped_s), and the run with it."""
    run = Started(tmp_path, 2, "parallel.stopped_s=2")
    run.until(lambda: run.rows() > 12)
    run.kill(1, signal.SIGSTOP)
    run.is_like_a_run_alone()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_after_a_loss(tmp_path: Path) -> None:
    """Fault: a flipped bit of the newest checkpoint ends a run that nobody watches. By hand it is refused."""
    run = Started(tmp_path, 2, "parallel.dp_shard=2", "checkpoint.keep_last=9", "checkpoint.every=4")
    run.until(lambda: run.rows() > 12)
    pids = [run.pid_of(rank) for rank in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # else they save another one
    newest = max((run.folder / "checkpoints").glob("step_*"))
    file = max(newest.glob("rank_*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[0], signal.SIGCONT)
    run.is_like_a_run_alone()
    (aside,) = run.events("checkpoint_set_aside")
    assert aside["step"] == int(newest.name.partition("_")[2])


@pytest.mark.slow
def test_too_many_losses_end_the_run(tmp_path: Path) -> None:
    """Fault: max_restarts is not obeyed, or the end names no step."""
    run = Started(tmp_path, 2, "survive.max_restarts=1")
    run.until(lambda: run.rows() > 8)
    run.kill(1)
    run.until(lambda: bool(run.events("resume")))
    run.until(lambda: run.rows() > 20)
    run.kill(0)
    code, said = run.end()
    assert code == 128 + signal.SIGKILL, said
    assert "the run ends: survive.max_restarts = 1: it is one loss of ranks more within 3600 s; step" in said


@pytest.mark.slow
def test_other_launchers_are_refused(tmp_path: Path) -> None:
    """Fault: under torchrun the key is without effect, in silence."""
    make_project(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "codescent", "train"]
    words = [*torchrun, *WORDS, "survive.on_loss=restart"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert 'error: survive.on_loss = "restart": only `codescent train --ranks` starts ranks' in done.stderr
