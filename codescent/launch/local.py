"""In: a command and a number of ranks. Out: that many processes on this machine, watched until the last is gone.
Does not know what the ranks do and imports no torch; restarts nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from codescent.base.cores import available_cores, threads_per_rank
from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK
from codescent.launch.environment import STORE_FD
from codescent.launch.signals import SignalQueue

SETTLE_S = 1.0  # after a failure: how long the other ranks have to fail by themselves, which tells whose fault it was
STOP_S = 10.0  # after SIGTERM: how long they have to go before SIGKILL
REPEAT_S = 0.5  # a second SIGINT this soon is the first, passed on by a wrapper of ours (make, uv) as well
SHOWN_BYTES = 20_000  # of the log of a rank that crashed

USER_ERROR = 2
ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAN_STOPS = {0, *(128 + number for number in ASKED_TO_STOP), *(-number for number in ASKED_TO_STOP)}

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_ranks(command: Sequence[str], ranks: int, env: Mapping[str, str]) -> int:
    """Run `command` in `ranks` processes of this machine and wait for all of them.

    Every rank finds torchrun's variables in its environment. Rank 0 also finds CODESCENT_STORE_FD, a listening
    socket on 127.0.0.1 at MASTER_PORT, on which to serve the store. Rank 0's stdout is this process's; what the
    others print, and every rank's stderr, goes to log files, of which is shown what explains a failure.

    SIGINT, SIGTERM and SIGHUP are passed on to the ranks once, and they are awaited; a second SIGINT kills them. When a
    rank fails, the others are stopped. No process is left when this returns; on Linux the ranks die with this process
    even if it is killed.

    Args:
        command: the program and its arguments, the same for every rank.
        ranks: at least 1.
        env: environment of the ranks; what is set here (threads, network interfaces) is kept.

    Returns:
        0 when every rank returned 0; else the exit code of the first rank that failed, 128 + the signal's number
        where a signal killed it; 128 + the signal's number where this process was asked to stop and the ranks did.

    Raises:
        UserError: the machine does not let so many processes start.
        OSError: the command cannot be started at all.
    """
    signals = [*ASKED_TO_STOP, signal.SIGCHLD, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        signals.remove(signal.SIGHUP)
    with SignalQueue(signals) as queue, _Ranks(command, ranks, env) as processes:
        code = processes.watch(queue)
        processes.report()
    return code


def rank_environment(rank: int, ranks: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set for `rank` of `ranks` on one machine, and what one machine makes possible."""
    loopback_interface = "lo" if sys.platform == "linux" else "lo0"
    own = {
        "OMP_NUM_THREADS": str(threads_per_rank(available_cores(), ranks)),
        "GLOO_SOCKET_IFNAME": loopback_interface,  # what listens without a password listens on this machine only
        "NCCL_SOCKET_IFNAME": loopback_interface,
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves the Python stack in the rank's log
    }
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
    }
    inherited = {
        name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_") and name != STORE_FD
    }
    return own | inherited | {name: str(value) for name, value in place.items()}


class _Ranks:
    """The processes of one launch, their logs, and how each of them ended."""

    def __init__(self, command: Sequence[str], ranks: int, env: Mapping[str, str]) -> None:
        self._command, self._num_ranks, self._env = list(command), ranks, env
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: set[int] = set()
        self._failed: dict[int, int] = {}  # rank to return code, in the order noticed, until others were stopped
        self._asked: int | None = None  # the first signal that asked to stop
        self._interrupted_s: float | None = None  # when the first SIGINT came
        self._killed = False
        self._stopping = False  # what ranks return from here on is no failure of theirs
        self._escalation: list[tuple[float, signal.Signals]] = []  # what to send the ranks, and when, earliest first

    def __enter__(self) -> _Ranks:
        self._logs = Path(tempfile.mkdtemp(prefix="codescent-ranks-"))
        sys.stdout.flush()  # before rank 0 writes to the same place
        try:
            with socket.create_server((LOOPBACK, 0), backlog=max(128, self._num_ranks)) as listener:
                for rank in range(self._num_ranks):
                    self._start(rank, listener)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended:
                _kill_group(process)
                process.wait()
        if not self._crashed():
            shutil.rmtree(self._logs, ignore_errors=True)

    def _start(self, rank: int, listener: socket.socket) -> None:
        env = rank_environment(rank, self._num_ranks, listener.getsockname()[1], self._env)
        passed: tuple[int, ...] = ()
        if rank == 0:
            env[STORE_FD] = str(listener.fileno())
            passed = (listener.fileno(),)
        with self._log(rank).open("wb") as log:
            try:
                self._processes.append(
                    subprocess.Popen(
                        self._command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=None if rank == 0 else log,
                        stderr=log,
                        pass_fds=passed,
                        process_group=0,  # the terminal's Ctrl-C reaches this process alone, which passes it on
                        preexec_fn=_die_with_parent(),
                    )
                )
            except BlockingIOError as error:
                raise UserError(f"cannot start rank {rank} of {self._num_ranks}: {error.strerror}") from error

    def watch(self, queue: SignalQueue) -> int:
        """Wait until every rank is gone, passing signals on and stopping the others when one fails."""
        while len(self._ended) < self._num_ranks:
            next_s = self._escalation[0][0] if self._escalation else time.monotonic() + 1.0
            for number in queue.wait(next_s - time.monotonic()):
                self._on_signal(number)
            self._collect()
            while self._escalation and self._escalation[0][0] <= time.monotonic():
                self._stopping = True
                self._send(self._escalation.pop(0)[1])
        if self._killed:
            return 128 + signal.SIGINT
        if self._failed:
            return _exit_code(self._failed[self._culprit()])
        return 0 if self._asked is None else 128 + self._asked

    def _on_signal(self, number: int) -> None:
        now_s = time.monotonic()
        if number == signal.SIGTSTP:
            self._pause()
        elif number == signal.SIGINT and self._interrupted_s is not None:
            if now_s - self._interrupted_s > REPEAT_S:
                self._killed = self._stopping = True
                self._send(signal.SIGKILL)
        elif number in ASKED_TO_STOP:
            if number == signal.SIGINT:
                self._interrupted_s = now_s
                _say("codescent: waiting for the ranks to save and stop; Ctrl-C once more kills them")
            if self._asked is None:  # a scheduler may ask twice; a rank that is saving needs to hear it once
                self._asked = number
                self._send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _collect(self) -> None:
        """Notice the ranks that have ended; on the first failure set out how the others are stopped."""
        for rank, process in enumerate(self._processes):
            if rank in self._ended or (code := process.poll()) is None:
                continue
            self._ended.add(rank)
            _kill_group(process)  # what the rank itself started
            if code == 0 or self._stopping or (self._asked is not None and code in CLEAN_STOPS):
                continue
            if not self._failed:
                stop_s = time.monotonic() + SETTLE_S
                self._escalation = [(stop_s, signal.SIGTERM), (stop_s + STOP_S, signal.SIGKILL)]
            self._failed[rank] = code

    def _send(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended:
                if number == signal.SIGKILL:
                    _kill_group(process)
                else:
                    process.send_signal(number)

    def _pause(self) -> None:
        """Ctrl-Z: the ranks stop with this process, and go on with it."""
        running = [process for rank, process in enumerate(self._processes) if rank not in self._ended]
        for process in running:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in running:
            process.send_signal(signal.SIGCONT)

    def _culprit(self) -> int:
        """The failed rank that the others failed after: of near ones, what cannot be a consequence goes first."""

        def order(rank: int) -> int:
            code = self._failed[rank]
            return 0 if code == -signal.SIGKILL else 1 if code == USER_ERROR else 2 if code < 0 else 3

        return min(self._failed, key=order)  # the first noticed among equals

    def _crashed(self) -> bool:
        return bool(self._failed) and self._failed[self._culprit()] != USER_ERROR and not self._killed

    def report(self) -> None:
        """Show the log of the rank that failed, and say which that was; where none did, rank 0's warnings."""
        if self._killed:
            _say("codescent: the ranks were killed")
        elif not self._failed:
            if self._processes[0].returncode >= 0:  # else its log says only that the signal interrupted it
                _say(_tail(self._log(0)))
        elif not self._crashed():
            _say(_tail(self._log(self._culprit())))
        else:
            culprit = self._culprit()
            _say(_tail(self._log(culprit)))
            pid = self._processes[culprit].pid
            _say(f"codescent: rank {culprit} of {self._num_ranks} (pid {pid}) {_ending(self._failed[culprit])}")
            after = [f"rank {rank} {_ending(code)}" for rank, code in self._failed.items() if rank != culprit]
            if after:
                _say(f"codescent: probably as a consequence: {'; '.join(after)}")
            _say(f"codescent: what each rank printed is kept in {self._logs}")

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"


def _die_with_parent() -> Callable[[], None] | None:
    """What a rank does between fork and exec: ask the kernel to be killed when its parent dies (Linux only).

    Two system calls, found before the fork: nothing that another thread of the parent could have locked.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before it was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank, where it still runs, and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "signal"
    hint = "; if nobody sent it, the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"was killed by {name} ({-code}){hint}"


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - SHOWN_BYTES))
        text = file.read().decode("utf-8", errors="replace").rstrip("\n")
    return text if size <= SHOWN_BYTES else f"[... {size - SHOWN_BYTES} bytes before this]\n{text}"


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
