"""In: command lines. Out: systems that take turns: told over a pipe (peers), or stopped and continued (codescent).
Does not compute ratios and knows no peer."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import SystemFailed

MARK = "benchmark:"
"""What begins a line that a told program says to the harness; it may print what it likes besides."""

POLL_S = 0.004
"""How often a metrics file is looked at: the error of a turn's time, whatever the number of its steps."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: the signal that a process gets when its parent dies."""


def die_with_parent() -> None:
    """Runs in the child: it is killed when the harness dies, also while it is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Started:
    """A process with a log, its memory, and its end."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._argv, self._env = list(argv), {**env, "TMPDIR": str(folder)}
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._peaks_bytes: dict[int, int] = {}

    def _launch(self) -> subprocess.Popen[str]:
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._speaks else log,
                stderr=log,
                env=self._env,
                cwd=self._folder,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self._process

    _speaks = False

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise SystemFailed(f"{self.name} is not running")
        return self._process

    def _failure(self) -> SystemFailed:
        code = self._running.wait()
        said = "\n  ".join(self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:])
        return SystemFailed(f"{self.name} ended with exit code {code}; the end of what it said:\n  {said}")

    def processes(self) -> list[int]:
        """The process and all its descendants."""
        return descendants(self._running.pid)

    def resting_bytes(self) -> int:
        """Resident memory now, of the process and its descendants together."""
        return sum(status_bytes(pid, "VmRSS") for pid in self.processes())

    def peaks_bytes(self) -> list[int]:
        """Largest resident memory that each of its processes ever had (each rank is one)."""
        if self._process is not None and self._process.poll() is None:
            self._peaks_bytes |= {pid: status_bytes(pid, "VmHWM") for pid in self.processes()}
        return list(self._peaks_bytes.values())

    def stop(self) -> None:
        """Kills the process and all its descendants."""
        if self._process is None:
            return
        self.peaks_bytes()
        if self._process.poll() is None:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None


class Told(Started):
    """A program that says "benchmark: ready", reads a number of steps from its input, takes them, and says the seconds
    of one of them, on average, in one line; it waits, asleep, for the next number, and ends where its input ends."""

    _speaks = True

    def start(self) -> None:
        """Launches it and waits until it is ready: it does its own warm-up before it says so."""
        self._launch()
        self._answer()

    def tell(self, words: int | str) -> None:
        """Writes one line to it, such as a number of steps, without waiting for the answer."""
        pipe = self._running.stdin
        assert pipe is not None
        try:
            pipe.write(f"{words}\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def number(self) -> float:
        """Its answer: the seconds of a step."""
        return float(self._answer()[0])

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps now; seconds of one, on average, by the program's own clock."""
        self.tell(num_steps)
        return self.number()

    def _answer(self) -> list[str]:
        pipe = self._running.stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith(MARK):
                return line[len(MARK) :].split()
        raise self._failure()


class ToldTogether:
    """Several told programs that are the ranks of one job: a step of theirs takes as long as the slowest rank's."""

    def __init__(self, name: str, ranks: Sequence[Told]) -> None:
        self.name, self._ranks = name, list(ranks)

    def start(self) -> None:
        """Launches all, then waits for all: they need one another to become ready."""
        for rank in self._ranks:
            rank._launch()
        for rank in self._ranks:
            rank._answer()

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps now; seconds of one, on average, of the slowest rank."""
        for rank in self._ranks:
            rank.tell(num_steps)
        return max(rank.number() for rank in self._ranks)

    def resting_bytes(self) -> int:
        """Resident memory now, of all ranks together."""
        return sum(rank.resting_bytes() for rank in self._ranks)

    def peaks_bytes(self) -> list[int]:
        """Largest resident memory that each rank ever had."""
        return [peak for rank in self._ranks for peak in rank.peaks_bytes()]

    def stop(self) -> None:
        """Kills all ranks."""
        for rank in self._ranks:
            rank.stop()


class Watched(Started):
    """A training program that knows nothing of the harness: it is stopped (SIGSTOP) when its turn is over and continued
    at the next, and its steps are timed from outside, by when their rows appear in its metrics file.

    The step in which it was stopped is left out. Nothing of the program is replaced: batch, step, metrics, log and all
    else that it does between two steps count.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        metrics: Path,
        num_warmup: int,
    ) -> None:
        super().__init__(name, argv, env, folder)
        self._metrics, self._num_warmup = metrics, num_warmup
        self._size_bytes, self._num_lines = 0, 0
        self.rows: list[dict[str, str]] = []

    def start(self) -> None:
        """Launches it, lets it take its warm-up steps, and stops it."""
        self._launch()
        self._wait_for(self._num_warmup)
        self._freeze()

    def turn(self, num_steps: int) -> float:
        """Continue it for one step that is not counted and `num_steps` that are; seconds of one, on average."""
        first = len(self._read()) + 1
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)
        begun = self._wait_for(first)
        ended = self._wait_for(first + num_steps)
        self._freeze()
        self.rows += self._read()[first : first + num_steps]
        return (ended - begun) / num_steps

    def _wait_for(self, num_rows: int) -> float:
        """Wait until the metrics file has `num_rows` rows; the moment when that was seen, in seconds."""
        while self._num_rows() < num_rows:
            if self._running.poll() is not None:
                raise self._failure()
            time.sleep(POLL_S)
        return time.perf_counter()

    def _num_rows(self) -> int:
        """Rows in the file now. Only what is new is read: the one that looks must not disturb the one that works."""
        if self._metrics.exists() and self._metrics.stat().st_size > self._size_bytes:
            with self._metrics.open("rb") as file:
                file.seek(self._size_bytes)
                new = file.read()
            self._size_bytes += len(new)
            self._num_lines += new.count(b"\n")
        return max(0, self._num_lines - 1)

    def _read(self) -> list[dict[str, str]]:
        with self._metrics.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _freeze(self) -> None:
        """Stop it and return when all its processes stand still."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)
        while any(state(pid) not in "TtZ" for pid in self.processes()):
            time.sleep(0.001)


def descendants(pid: int) -> list[int]:
    """`pid` and every process under it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found, unseen = [], [pid]
    while unseen:
        found.append(unseen.pop())
        unseen += children.get(found[-1], [])
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the second field, the name, may hold anything)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state(pid: int) -> str:
    """One letter, as ps shows it; Z where it is gone."""
    try:
        return _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def status_bytes(pid: int, key: str) -> int:
    """A size of /proc/PID/status (VmRSS: now, VmHWM: at most so far); 0 where the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
