"""In: real runs whose output goes to full disks, closed pipes, closed files and closed terminals. Out: whole runs.
Does not mock a stream: /dev/full, os.pipe and os.openpty are real."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from disks import small_disk
from runs import environment

from codescent.record import RunFolder

STEPS = 6


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def begin(
    project: Path, words: list[str], out: int | None, err: int | None, *, shielded: bool = False, **extra: str
) -> subprocess.Popen[bytes]:
    """`codescent WORDS`, with these as its standard output and error; None: closed. `shielded`: as nohup does."""
    closed = " ".join(name for name, number in ((">&-", out), ("2>&-", err)) if number is None)
    line = f"exec {shlex.join([sys.executable, '-m', 'codescent', *words])} {closed}"
    shield = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN) if shielded else None
    env = environment(**extra)
    process = subprocess.Popen(["sh", "-c", line], cwd=project, env=env, stdout=out, stderr=err, preexec_fn=shield)
    for number in {out, err} - {None}:
        assert number is not None
        os.close(number)
    return process


def train(name: str, *more: str) -> list[str]:
    return ["train", "run.toml", f"run.name={name}", f"train.num_steps={STEPS}", "log.every=1", *more]


def lost(project: Path, name: str, process: subprocess.Popen[bytes]) -> list[tuple[int | None, str, str]]:
    """What the run says that it lost; it must be whole, and have ended as any other."""
    assert process.wait(timeout=150) == 0
    run = RunFolder.open(project / "runs" / name)
    assert [row["step"] for row in run.iter_metrics()] == list(range(1, STEPS + 1))
    assert len(list(run.checkpoints.iterdir())) == 1
    events = run.read_events()
    assert "end" in [event["kind"] for event in events]
    return [(event["rank"], event["stream"], event["why"]) for event in events if event["kind"] == "output_lost"]


WAYS: dict[str, tuple[Callable[[], int] | None, str | None]] = {
    "full": (full, "No space left on device"),
    "pipe": (nobody_reads, "Broken pipe"),
    "closed": (None, None),
}


@pytest.mark.parametrize(
    ("way", "ranks"),
    [pytest.param(*one, marks=pytest.mark.slow) for one in (("full", 1), ("closed", 2), ("pipe", 1), ("closed", 1))],
)
def test_output_that_cannot_be_written_is_not_worth_a_run(project: Path, way: str, ranks: int) -> None:
    make, why = WAYS[way]
    name = f"{way}-{ranks}"
    words = train(name, *(["--ranks", "2"] if ranks > 1 else ["log.sample_tokens=5"]))
    process = begin(project, words, make and make(), make and make())
    assert lost(project, name, process) == ([(0, "standard output", why)] if why else [])


def test_a_terminal_that_is_closed_does_not_end_a_run_that_nohup_shields(project: Path) -> None:
    ours, theirs = pty.openpty()
    process = begin(project, train("terminal"), theirs, os.dup(theirs), shielded=True)
    assert os.read(ours, 1)
    os.close(ours)
    assert lost(project, "terminal", process) == [(0, "standard output", "Input/output error")]


def test_a_reader_that_comes_late_to_a_pipe_that_does_not_block_misses_nothing(project: Path) -> None:
    """What `print` raises BlockingIOError for: the pipe is full, and its reader has set it not to block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * (size - 512))  # room for what a run says before its first step
    process = begin(project, train("late"), writer, os.open(os.devnull, os.O_WRONLY))
    while size - int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder) >= 80:
        assert process.poll() is None
        time.sleep(0.05)
    said = b""
    while piece := os.read(reader, 65536):
        said += piece
    os.close(reader)
    assert lost(project, "late", process) == []
    assert b"The run is in runs/late" in said
    assert said.count(b"step ") >= STEPS


def test_a_disk_that_fills_up_loses_output_alone(project: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        process = begin(
            project,
            train("filled"),
            os.open(disk / "out", os.O_WRONLY | os.O_CREAT),
            os.open(disk / "err", os.O_WRONLY | os.O_CREAT),
        )
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(b"x" * 512):
                pass
        assert lost(project, "filled", process) == [(0, "standard output", "No space left on device")]


def test_ranks_whose_logs_are_swept_away_train_on(project: Path, tmp_path: Path) -> None:
    process = begin(project, train("swept", "--ranks", "2"), full(), full(), TMPDIR=str(tmp_path))
    while not (logs := list(tmp_path.glob("codescent-ranks-*/rank-1.log"))):
        assert process.poll() is None
        time.sleep(0.02)
    shutil.rmtree(logs[0].parent)
    found = [(0, "standard output", "No space left on device")]
    # of the process that has started the ranks
    nobody = [(None, f"standard {stream}", "No space left on device") for stream in ("output", "error")]
    assert lost(project, "swept", process) == [*found, *nobody]


def test_a_run_that_fails_says_why_in_its_record(project: Path) -> None:
    words = ["optimizer.kind=sgd", "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=0", "train.eval_every=0"]
    steps = ["train.num_steps=30", "optimizer.warmup_steps=0"]
    process = begin(project, train("diverged", *words, *steps), full(), full())
    assert process.wait(timeout=150) == 1
    events = RunFolder.open(project / "runs" / "diverged").read_events()
    (failed,) = [event for event in events if event["kind"] in ("failed", "error")]
    assert (failed["kind"], "not finite" in failed["reason"]) == ("failed", True)


@pytest.mark.parametrize(("make", "code"), [(full, 2), (nobody_reads, 141)])
def test_other_verbs_end_where_nobody_can_read_them(project: Path, make: Callable[[], int], code: int) -> None:
    process = begin(project, ["data", "corpus.txt"], make(), os.open(os.devnull, os.O_WRONLY))
    assert process.wait(timeout=60) == code


@pytest.mark.parametrize("make", [full, nobody_reads, None])
def test_a_refusal_that_cannot_be_printed_is_still_a_refusal(project: Path, make: Callable[[], int] | None) -> None:
    for words in (["config", "absent.toml"], ["train", "absent.toml"]):
        process = begin(project, words, os.open(os.devnull, os.O_WRONLY), make and make())
        assert process.wait(timeout=60) == 2
