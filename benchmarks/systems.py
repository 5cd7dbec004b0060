"""In: command lines. Out: systems that take turns, controlled over a pipe (peers) or by SIGSTOP/SIGCONT (codescent).
Does not compute ratios, and does not know any peer."""

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
"""The beginning of each line that a program under control sends to the harness. Its other output is ignored."""

POLL_S = 0.004
"""Seconds between two reads of a metrics file. It is the error of a turn's time, for any number of steps."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: option that sets the signal for a process whose parent ends."""


def die_with_parent() -> None:
    """Call it in the child process: the kernel then kills the child when the harness ends, even a stopped child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Started:
    """A process that writes a log; with its memory, and a way to end it and its descendants."""

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
                stdout=subprocess.PIPE if self._answers else log,
                stderr=log,
                env=self._env,
                cwd=self._folder,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self._process

    _answers = False

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise SystemFailed(f"{self.name} is not running")
        return self._process

    def _failure(self) -> SystemFailed:
        code = self._running.wait()
        output = "\n  ".join(self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:])
        return SystemFailed(f"{self.name} ended with exit code {code}; the end of its output:\n  {output}")

    def processes(self) -> list[int]:
        """The process and all its descendants."""
        return descendants(self._running.pid)

    def resting_bytes(self) -> int:
        """Resident memory now, of the process and its descendants together."""
        return sum(status_bytes(pid, "VmRSS") for pid in self.processes())

    def peaks_bytes(self) -> list[int]:
        """Peak resident memory of each of its processes (each rank is a process)."""
        if self._process is not None and self._process.poll() is None:
            self._peaks_bytes |= {pid: status_bytes(pid, "VmHWM") for pid in self.processes()}
        return list(self._peaks_bytes.values())

    def stop(self) -> None:
        """Kill the process and all its descendants."""
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


class PipedProgram(Started):
    """A program that is controlled over a pipe.

    It prints "benchmark: ready" after its warm-up. For each number on its input it takes so many steps and prints the
    mean seconds of a step in one line. It sleeps between numbers, and ends when its input ends.
    """

    _answers = True

    def start(self) -> None:
        """Start the program and wait until it is ready, after its warm-up."""
        self._launch()
        self._answer()

    def send(self, words: int | str) -> None:
        """Write one line to the program, such as a number of steps, and do not wait for the answer."""
        pipe = self._running.stdin
        assert pipe is not None
        try:
            pipe.write(f"{words}\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def number(self) -> float:
        """Wait for the program's answer, a number."""
        return float(self._answer()[0])

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps. Returns the mean seconds of a step, by the program's own clock."""
        self.send(num_steps)
        return self.number()

    def _answer(self) -> list[str]:
        pipe = self._running.stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith(MARK):
                return line[len(MARK) :].split()
        raise self._failure()


class PipedRanks:
    """Several programs under control that are the ranks of one job. The slowest rank gives the time of a step."""

    def __init__(self, name: str, ranks: Sequence[PipedProgram]) -> None:
        self.name, self._ranks = name, list(ranks)

    def start(self) -> None:
        """Start all ranks, then wait for all: a rank becomes ready only together with the others."""
        for rank in self._ranks:
            rank._launch()
        for rank in self._ranks:
            rank._answer()

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps. Returns the mean seconds of a step of the slowest rank."""
        for rank in self._ranks:
            rank.send(num_steps)
        return max(rank.number() for rank in self._ranks)

    def resting_bytes(self) -> int:
        """Resident memory now, of all ranks together."""
        return sum(rank.resting_bytes() for rank in self._ranks)

    def peaks_bytes(self) -> list[int]:
        """Peak resident memory of each rank."""
        return [peak for rank in self._ranks for peak in rank.peaks_bytes()]

    def stop(self) -> None:
        """Kill all ranks."""
        for rank in self._ranks:
            rank.stop()


class Watched(Started):
    """An unchanged training program, which the harness stops (SIGSTOP) after its turn and continues at the next one.

    The harness times steps from outside: a step ends when its row appears in the metrics file. The step during which
    the program was stopped does not count. The time includes batch, step, metrics, log and all other work.
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
        """Start the program, wait for its warm-up steps, and stop it."""
        self._launch()
        self._wait_for(self._num_warmup)
        self._freeze()

    def turn(self, num_steps: int) -> float:
        """Continue for one step that does not count, and `num_steps` that do. Returns the mean seconds of a step."""
        first = len(self._read()) + 1
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)
        begun = self._wait_for(first)
        ended = self._wait_for(first + num_steps)
        self._freeze()
        rows = self._read()[first : first + num_steps]
        if [int(row["step"]) - int(rows[0]["step"]) for row in rows] != list(range(num_steps)):
            raise SystemFailed(f"{self.name}: its metrics have no row for some steps: they must have one for each step")
        self.rows += rows
        return (ended - begun) / num_steps

    def _wait_for(self, num_rows: int) -> float:
        """Wait until the metrics file has `num_rows` rows. Returns the time then, in seconds of perf_counter."""
        while self._num_rows() < num_rows:
            if self._running.poll() is not None:
                raise self._failure()
            time.sleep(POLL_S)
        return time.perf_counter()

    def _num_rows(self) -> int:
        """The number of rows in the file. Only new bytes are read, so that the measured program is hardly disturbed."""
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
        """Stop the program, and return when all its processes are stopped."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)
        while any(state(pid) not in "TtZ" for pid in self.processes()):
            time.sleep(0.001)


def descendants(pid: int) -> list[int]:
    """The process `pid` and all its descendants."""
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
    """The fields of /proc/PID/stat from the third on: state, parent, ... The second, a name, may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state(pid: int) -> str:
    """The state as one letter, as ps prints it; Z if the process has ended."""
    try:
        return _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def status_bytes(pid: int, key: str) -> int:
    """A size in /proc/PID/status (VmRSS: now, VmHWM: peak); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
