"""In: a command and a number of ranks. Out: runs the ranks on this machine, stops all if one fails; an exit code.
Does not know what the ranks do, does not import torch, and restarts only ranks without which the run goes on."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from codescent.base.call import SURVIVES
from codescent.base.early import first_signal
from codescent.base.errors import UserError
from codescent.base.messages import detail
from codescent.base.output import new_line, warn
from codescent.base.progress import ENDED, PROGRESS_FD, Pages, shared_memory
from codescent.base.stopping import EXIT_FILE, SAVING, STOPPING, exit_code_of, reported
from codescent.base.temporary_folder import TemporaryFolder
from codescent.base.token import TOKEN
from codescent.launch.endings import Endings
from codescent.launch.environment import LATE, STORE_FD
from codescent.launch.group import Group
from codescent.launch.hang_record import HangRecord
from codescent.launch.logs import tail
from codescent.launch.memory_kills import evidence, is_suspected, memory_kills
from codescent.launch.other_hosts import OtherHosts
from codescent.launch.places import LossPolicy, Places
from codescent.launch.rank_output import RankOutput
from codescent.launch.roles import Roles, die_with_parent, ended_by
from codescent.launch.signals import SignalQueue
from codescent.launch.stacks import Stacks
from codescent.launch.supervisor import Stopped, Supervisor, host, where_of
from codescent.transport.sockets import listen_at

LOOK_EVERY_S = 1.0
EXTRA_PAGES = 64
"""Pages of processes that wait for a place (survive.on_loss)."""
KEPT_COUNTS = 6  # counts of out-of-memory kills: one each LOOK_EVERY_S
ANSWER_S = 3.0  # after a stop request: ranks that cannot run by then never stop, so all are killed
SETTLE_S = 1.0  # time after a failure for other ranks to fail; the first failure is probably the cause
STOP_S = 10.0  # time between SIGTERM and SIGKILL
REPEAT_S = 0.5  # a second SIGINT within this time is a repetition by a wrapper (make, uv)
RUN_FAILED, USER_ERROR = 1, 2  # a Python crash also exits with 1, but prints a traceback
STOP_SIGNALS = (*STOPPING, *SAVING)
CLEAN_STOPS = {0, *map(exit_code_of, STOP_SIGNALS), *(-number for number in STOPPING)}
"""How ranks end after a request. One that SAVING has killed did not listen, and has saved nothing."""


def run_ranks(
    command: Sequence[str],
    ranks: int | Group,
    env: Mapping[str, str],
    *,
    saves: bool = True,
    of_memory: Callable[[int], Sequence[str]] = lambda rank: (),
    roles: Roles | None = None,
    blocked: Collection[int] = (),
    reports: bool = False,
    stopped: Stopped | None = None,
    survive: LossPolicy | None = None,
) -> int:
    """Run `command` in `ranks` processes of this machine and wait for all of them.

    Every rank gets torchrun's environment variables, the token of the run, and shared memory for its progress
    (base/progress.py). Rank 0 also gets CODESCENT_STORE_FD: a socket for the store that listens at MASTER_PORT.
    Rank 0 writes to this process's stdout (rank_output.py). All other output goes to log files. After a failure the log
    of the failed rank is printed.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the ranks once. A second SIGINT kills the ranks. After
    one that has come before (base/early.py) no rank is started. When a rank fails, the
    other ranks are stopped. Messages name a rank that is stopped, frozen or far behind the others. All processes have
    ended when this function returns. On Linux they also end if this process is killed.

    Args:
        command: the program and its arguments, the same for every rank.
        ranks: at least 1; a Group: where the run has ranks on other machines too.
        env: environment of the ranks. Its numbers of threads and network interfaces override our defaults.
        saves: whether the ranks save when they are asked to stop, for the message.
        of_memory: called with a rank that the kernel has probably killed for lack of memory; returns lines to print.
        roles: what ranks are in messages, and which of them the run can lose.
        blocked: signals that wait until a rank listens to them (base/early.py), for ranks that do.
        stopped: how long the ranks wait for one that is stopped or frozen; None: as long as their collectives wait.
        survive: what is done about ranks that die; None: a death ends the run. Else every rank is on this machine.
        reports: whether this process obeys EXIT_FILE (base/stopping.py) after a stop on request.

    Returns:
        0 if every rank returned 0. Otherwise the exit code of the first rank that failed; or 128 + the number of the
        signal that killed this rank or stopped the run.

    Raises:
        UserError: the machine cannot start this many processes, or rank 0 cannot listen.
        OSError: the command cannot be started.
    """
    signals = [*STOP_SIGNALS, signal.SIGCHLD, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        signals.remove(signal.SIGHUP)
    group = ranks if isinstance(ranks, Group) else Group(ranks)
    env = {**env}
    exit_file = {EXIT_FILE: env.pop(EXIT_FILE, "")} if reports else {}  # ranks report to this process
    with SignalQueue(signals) as queue:
        if (early := first_signal()) is not None:
            warn(f"codescent: {signal.Signals(early).name}: no rank is started")
            return reported(exit_code_of(early), exit_file)
        with _Ranks(
            command, group, env, roles or Roles(), stopped or Stopped(), survive, saves=saves, blocked=blocked
        ) as processes:
            code = processes.watch(queue)
            if (killed := processes.report()) is not None:
                for line in of_memory(killed):
                    _say(line)
    return reported(code, exit_file) if processes.stopped else code


class _Ranks:
    """The processes of one launch, their logs and their exit codes."""

    def __init__(
        self,
        command: Sequence[str],
        group: Group,
        env: Mapping[str, str],
        roles: Roles,
        stopped: Stopped,
        survive: LossPolicy | None,
        *,
        saves: bool,
        blocked: Collection[int],
    ) -> None:
        self._blocked, self._places = blocked, None if survive is None else Places(group.count, survive)
        self._roles, self._group = roles, group
        self._command, self._num_ranks = list(command), group.world_size
        self._env, self._does = {**env}, "save and stop" if saves else "stop"
        self._progress = shared_memory(self._num_ranks + (EXTRA_PAGES if survive else 0))
        self._stacks, self._stopped = Stacks(), stopped
        self._kills = deque([memory_kills()], maxlen=KEPT_COUNTS)  # a killed process ends some seconds later
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._slots: dict[int, subprocess.Popen[bytes]] = {}  # by number of the start: of ranks, and of those that wait
        self._output, self._endings = RankOutput(), Endings()
        self._paths: dict[int, Path] = {}  # of the log of each process
        self._port = 0
        self._restarts: Counter[int] = Counter()  # how often a rank was started again
        self._restarts_of_waiting = 0  # processes that died while they waited for a place
        self._joining: set[int] = set()  # ranks that the others let in at the end of a step
        self._ended: set[int] = set()
        self._failed: dict[int, int] = {}  # rank to return code, in order of detection
        self._named = False  # whether the first rank that failed is named
        self._stop_signal: int | None = None  # the first stop request
        self._interrupted_s: float | None = None  # time of the first SIGINT
        self._killed = False
        self._unsaved = False  # ranks that did not react to a stop request were killed
        self._stopping = False  # True: later exits of ranks are not failures
        self._stop_code = 0  # exit code of ranks that another process asked to stop
        self._over = ""  # why the death of a rank has ended the run
        self._halted: dict[int, str] = {}  # ranks that could not run when a rank failed, and why
        self._answer_s = math.inf  # time limit for ranks to react to a stop request
        self._look_s = 0.0
        self._escalation: list[tuple[float, signal.Signals]] = []  # time and signal to send, earliest first

    def __enter__(self) -> _Ranks:
        try:
            self._folder = TemporaryFolder("codescent-ranks-")  # ends with this process, and so do the ranks
        except OSError as error:
            raise UserError(f"the ranks' logs: {error.strerror}; set TMPDIR to a folder with free space") from error
        self._logs, self._env = self._folder.path, {**self._env, **self._folder.mark}
        pages, is_whole = Pages.of({PROGRESS_FD: str(self._progress)}), self._group.is_local
        assert pages is not None
        self._others = OtherHosts(pages, {**self._env, **({TOKEN: self._group.token} if self._group.token else {})})
        known = self._stacks, HangRecord(pages, self._logs), self._others
        self._supervisor = Supervisor(pages, self._num_ranks, self._stopped, *known, is_whole=is_whole)
        sys.stdout.flush()  # rank 0 writes to the same stdout
        try:
            listener = self._group.listen()
            if not (is_whole or self._group.first):
                self._others.serve(listen_at(self._group.address, 0, self._num_ranks))
            with listener or contextlib.nullcontext():
                self._port = self._group.port if listener is None else listener.getsockname()[1]
                for rank in self._group.ranks:
                    self._start(rank, listener)
            self._start_spares()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = [process for rank, process in self._processes.items() if rank not in self._ended]
        for process in [*running, *self._waiting().values()]:
            _kill_group(process)
            self._endings.wait(process)
        os.close(self._progress)
        self._stacks.close()
        self._others.close()
        self._folder.close(keep=self._crashed())

    def _start(
        self, rank: int, listener: socket.socket | None, *, late: bool = False, slot: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a rank. `listener`: for the store, which rank 0 serves. `late`: it has died, and starts again. `slot`:
        of a process that waits for a place, and will be any rank."""
        env = self._group.environment(rank, self._port, self._env)
        stacks, named = self._stacks.environment(rank if slot is None else slot)
        passed = [self._progress, stacks]
        env |= {PROGRESS_FD: str(self._progress), **named}
        if self._group.token:
            env[TOKEN] = self._group.token
        if self._places is not None:
            env[SURVIVES] = "0" if slot is None else f"{self._places.number + 1} {self._page_of(slot)}"
        if late:
            env[LATE] = "1"
        elif rank == 0 and listener is not None:
            passed.append(listener.fileno())
            env[STORE_FD] = str(listener.fileno())
        path = self._logs / (f"rank-{rank}.log" if slot is None else f"start-{slot}.log")
        with path.open("ab") as log:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)  # a process inherits the mask
            try:
                process = subprocess.Popen(
                    self._command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log if rank and self._places is None else self._output.target,  # each may become rank 0
                    stderr=log,
                    pass_fds=passed,
                    process_group=0,  # only this process receives the terminal's Ctrl-C, and forwards it
                    preexec_fn=die_with_parent(),
                )
            except BlockingIOError as error:
                raise UserError(f"cannot start rank {rank} of {self._num_ranks}: {error.strerror}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._output.follow(process.stdout)
        self._paths[process.pid], self._slots[rank if slot is None else slot] = path, process
        if slot is None:
            self._processes[rank] = process
        detail(f"rank {rank} is process {process.pid}, its log {path}" if slot is None else f"{process.pid} waits")
        return process

    @property
    def stopped(self) -> bool:
        """Whether the ranks have ended on request, by themselves."""
        return not (self._failed or self._killed or self._unsaved)

    def watch(self, queue: SignalQueue) -> int:
        """Wait until every rank has ended. Forward signals; stop all ranks when one fails. Returns the exit code."""
        while len(self._ended) < self._group.count:
            next_s = self._escalation[0][0] if self._escalation else math.inf
            for number in queue.wait(min(next_s - time.monotonic(), LOOK_EVERY_S)):
                self._on_signal(number)
            self._collect()
            self._look()
            while self._escalation and self._escalation[0][0] <= time.monotonic():
                self._stopping = True
                self._send(self._escalation.pop(0)[1])
        self._output.finish()
        if self._killed:
            return 128 + signal.SIGINT
        if self._failed:
            code = self._failed[self._culprit()]
            return (code or RUN_FAILED) if code >= 0 else 128 - code
        if self._unsaved and self._stop_signal in SAVING:
            return 128 + signal.SIGKILL  # LATER would say that the run is saved
        return self._stop_code if self._stop_signal is None else exit_code_of(self._stop_signal)

    def _look(self) -> None:
        """Print messages about ranks that make no progress. After a stop request, kill ranks that do not react."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_EVERY_S
        self._kills.append(memory_kills())
        running = {rank: process.pid for rank, process in self._processes.items() if rank not in self._ended}
        for words in self._supervisor.look(running):
            _say(f"codescent: {words}")
        for rank in () if self._stopping else self._supervisor.overdue():
            how = f"rank {rank} of {self._num_ranks} (pid {running[rank]}) {self._supervisor.stuck[rank]}"
            _say(f"codescent: {how}, and is ended now (parallel.stopped_s)")
            _kill_group(self._processes[rank])
        if self._supervisor.stuck and now_s >= self._answer_s:
            ranks = ", ".join(f"rank {rank} {how}" for rank, how in self._supervisor.stuck.items())
            _say(f"codescent: {ranks}, and does not react: all ranks are killed; resume from the last checkpoint")
            self._stopping = self._unsaved = True
            self._send(signal.SIGKILL)

    def _on_signal(self, number: int) -> None:
        now_s = time.monotonic()
        if number == signal.SIGTSTP:  # Ctrl-Z: suspend and continue the ranks together with this process
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
        elif number == signal.SIGINT and self._interrupted_s is not None:
            if now_s - self._interrupted_s > REPEAT_S:
                self._killed = self._stopping = True
                self._send(signal.SIGKILL)
        elif number in STOP_SIGNALS:
            if number == signal.SIGINT:
                self._interrupted_s = now_s
            if self._stop_signal is None:  # forward once, although a scheduler may send SIGTERM twice
                self._stop_signal = number
                more = "; Ctrl-C once more kills them" if number == signal.SIGINT else ""
                name = signal.Signals(number).name
                _say(f"{new_line()}codescent: {name}: waiting for the ranks to {self._does}{more}")
                self._send(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
                self._send(signal.SIGCONT)  # all ranks stop together, so wake a suspended rank
                self._answer_s = now_s + ANSWER_S

    def _collect(self) -> None:
        """Record the ranks that have ended. At the first failure schedule the stop of the others."""
        again: list[int] = []
        lost: dict[int, int] = {}
        for rank, process in self._processes.items():
            if rank in self._ended or (code := self._endings.code(process)) is None:
                continue
            self._ended.add(rank)
            _kill_group(process)  # processes that the rank started
            if self._stopping or (self._stop_signal is not None and code in CLEAN_STOPS):
                continue
            who = f"codescent: rank {rank} of {self._num_ranks} (a worker, pid {process.pid})"
            if code < 0 and self._can_lose(rank):
                position = self._supervisor.pages.lose(rank, time.monotonic()).position
                _say(f"{who} {ended_by(code)} in step {int(position) + 1}: the others go on without it")
                again.append(rank)
                continue
            if self._supervisor.pages.read(rank).died_s > 0:
                how = ended_by(code) if code < 0 else f"ended with exit code {code}"
                _say(f"{tail(self._log(rank))}\n{who} {how} before it joined the others")
                again.append(rank)
                continue
            if code == 0 and not self._supervisor.ended_early(rank):
                continue
            if code > 0 and code in CLEAN_STOPS and self._supervisor.has_ended(rank):  # another process asked for it
                self._stop_code = code
                continue
            if self._places is not None and self._is_survived(rank, code, lost):
                lost[rank] = code
                continue
            if not self._failed:
                self._stop_others()
            if code < 0 and not self._failed:
                living = {one for one in self._processes if not self._is_dead(one)}
                met = self._supervisor.meets(rank)
                self._over = self._roles.over(rank, 128 - code, living, met=met)
            self._failed[rank] = code
        if self._places is not None:
            self._survive(lost, self._places)
        self._name_killed()
        for rank in again:
            self._start_again(rank)
        late = {*self._restarts, *self._joining} - self._ended
        if late and not self._stopping and len(late) + len(self._ended) == self._group.count:
            self._end_late(late)

    def _stop_others(self) -> None:
        """A rank has failed: stop the others soon."""
        self._halted = self._supervisor.stuck
        stop_s = time.monotonic() + SETTLE_S
        self._escalation = [(stop_s, signal.SIGTERM), (stop_s + STOP_S, signal.SIGKILL)]

    def _is_survived(self, rank: int, code: int, lost: Collection[int]) -> bool:
        """Whether the run may go on after the end of a rank: it has no error of its own, and nobody ends it."""
        have_ended = self._ended.difference(lost, [rank]) or self._supervisor.has_ended(rank)
        ends = bool(self._failed or have_ended or self._stop_signal is not None)
        return not (ends or self._gave_reason(rank, code))

    def _survive(self, lost: Mapping[int, int], places: Places) -> None:
        """Ranks have died, or processes that wait for a place, or some of these are ready: call all ranks together."""
        for slot, process in self._waiting().items():
            if (code := self._endings.code(process)) is not None:
                places.forget(slot)
                self._restarts_of_waiting += 1
                _say(tail(self._paths[process.pid]))
                _say(f"codescent: pid {process.pid}, which waited for a place, has ended with exit code {code}")
                if self._restarts_of_waiting <= places.survive.losses.most:
                    self._start_spares(lost)
        places.became_ready(slot for slot in [*places.waiting] if self._is_ready(slot))
        if not lost:
            over = self._stopping or self._stop_signal is not None or self._ended
            if not over and not any(map(self._supervisor.has_ended, self._processes)) and places.grows():
                self._call(places, is_urgent=False)
            return
        if self._failed:  # another rank has an error of its own: its message counts
            return self._failed.update(lost)
        pages = [self._supervisor.pages.read(rank) for rank in self._processes]
        step = max((page.step for page in pages if page.position and page.step is not None), default=None)
        progressed, losses = any(page.took.steps for page in pages), places.survive.losses
        for rank, code in lost.items():
            self._say_lost(rank, ended_by(code) if code < 0 else f"ended with exit code {code}")
        if why := losses.add(time.monotonic(), step=step, progressed=progressed):
            self._over, self._failed, self._named = f"the run ends: {why}", {**lost}, True
            return self._stop_others()
        self._ended -= set(lost)
        self._start_spares(lost)
        if not places.after_loss(lost):
            self._over, self._failed, self._named = "the run ends: no process can be started", {**lost}, True
            return self._stop_others()
        self._call(places, is_urgent=True)
        _say(f"codescent: start {losses.count + 1}, with {len(places.ranks)} of {places.wanted} ranks")

    def _say_lost(self, rank: int, ending: str) -> None:
        """Name a rank that has died, and that the run survives."""
        process, page = self._processes[rank], self._supervisor.pages.read(rank)
        _say(tail(self._log(rank)) if (process.returncode or 0) > 0 else "")
        who = f"rank {rank} of {self._num_ranks} ({self._roles.of(rank)}pid {process.pid} on {host()})"
        _say(f"codescent: {who} {ending} {where_of(page)}")
        self._supervisor.record_crash(rank, process.pid, ending)

    def _start_spares(self, lost: Collection[int] = ()) -> None:
        """Start processes that wait for a place: as many as are missing of the ranks and the spares that are wanted."""
        if (places := self._places) is None:
            return
        there = len(places.ranks) - len(lost) + len(places.waiting) + len(places.ready)
        for _ in range(places.wanted + places.survive.spares - there):
            (slot,) = places.new_slots(1)
            self._supervisor.pages.clear(self._page_of(slot))
            try:
                self._start(self._num_ranks - 1, None, slot=slot)  # it gets its number when it is called
            except (UserError, OSError) as error:
                places.forget(slot)
                return _say(f"codescent: no process is started in place of one that has died: {error}")

    def _call(self, places: Places, *, is_urgent: bool) -> None:
        """Give each process its place, and tell all of them."""
        before, pages = self._num_ranks, self._supervisor.pages
        for rank in range(max(before, len(places.ranks)) if is_urgent else 0):
            pages.clear(rank)
        took_part = {*self._processes.values()}
        self._processes = {rank: self._slots[slot] for rank, slot in enumerate(places.ranks)}
        self._joining = {rank for rank, one in self._processes.items() if not (is_urgent or one in took_part)}
        self._ended.clear()
        self._num_ranks = len(places.ranks)
        self._group = replace(self._group, count=self._num_ranks)
        self._stacks.renumber(places.ranks)
        self._supervisor.begin_anew(self._num_ranks)
        pages.call = places.call({slot: process.pid for slot, process in self._slots.items()}, is_urgent=is_urgent)
        places.taken()
        for note in places.layout.notes:
            _say(f"codescent: {note}")

    def _waiting(self) -> dict[int, subprocess.Popen[bytes]]:
        """The processes without a rank, by slot."""
        if self._places is None:
            return {}
        return {slot: self._slots[slot] for slot in (*self._places.waiting, *self._places.ready)}

    def _page_of(self, slot: int) -> int:
        """The page on which a process beats that waits for a place: behind those of the ranks that the user wants."""
        assert self._places is not None
        return self._places.wanted + slot % EXTRA_PAGES

    def _is_ready(self, slot: int) -> bool:
        """Whether a process that waits has imported what a rank needs."""
        return self._supervisor.pages.read(self._page_of(slot)).beat_s > 0

    def _name_killed(self) -> None:
        """Name the first rank that a signal has killed, at once: the others may take seconds to end."""
        if self._named or not self._failed:
            return
        self._named, rank = True, self._culprit()
        if (code := self._failed[rank]) >= 0 or self._gave_reason(rank, code):
            return
        where = where_of(self._supervisor.pages.read(rank))
        who = f"rank {rank} of {self._num_ranks} ({self._roles.of(rank)}pid {self._processes[rank].pid} on {host()})"
        _say(f"codescent: {who} {ended_by(code)} {where}: the other ranks are stopped")

    def _start_again(self, rank: int) -> None:
        """Start a rank that has died, and without which the others go on, unless that was done often enough."""
        if self._restarts[rank] == self._roles.restarts or self._failed or self._stop_signal is not None:
            return
        self._restarts[rank] += 1
        number = f"{self._restarts[rank]} of {self._roles.restarts}"
        try:
            self._start(rank, None, late=True)
        except (UserError, OSError) as error:
            _say(f"codescent: rank {rank} is not started again ({number}): {error}")
            return
        self._ended.discard(rank)
        _say(f"codescent: rank {rank} is started again ({number}), as pid {self._processes[rank].pid}")

    def _end_late(self, late: Collection[int]) -> None:
        """All others have ended: end the ranks that were started again, but too late to join them."""
        if not any(self._supervisor.has_ended(rank) for rank in late):
            ranks = ", ".join(f"rank {rank}" for rank in sorted(late))
            _say(f"codescent: {ranks} came too late to join the others, which have ended")
            self._stopping = True
            self._send(signal.SIGKILL)

    def _is_dead(self, rank: int) -> bool:
        """Whether a rank has died, and has not joined the others again."""
        return bool(self._processes[rank].poll()) or self._supervisor.pages.read(rank).died_s > 0

    def _can_lose(self, rank: int) -> bool:
        """Whether the run goes on without a rank that was killed: a worker that has begun to train. No rank waits for
        it in a collective."""
        page = self._supervisor.pages.read(rank)
        trains = 0 < page.position < ENDED and not page.died_s  # else it has died before, and has not joined again
        return rank in self._roles.spare and trains and not self._supervisor.meets(rank) and not self._failed

    def _send(self, number: signal.Signals) -> None:
        for rank, process in self._processes.items():
            if rank not in self._ended:
                if number == signal.SIGKILL:
                    _kill_group(process)
                else:
                    process.send_signal(number)

    def _culprit(self) -> int:
        """The rank that probably caused the failure: by the kind of exit, then by the order of detection.

        First a SIGKILL, then an error message, then another signal, then other codes: these may be consequences. Among
        equals the first error counts, by the ranks' pages; a rank that only lost another one comes last.
        """

        def order(rank: int) -> tuple[int, bool, float]:
            code, failed_s = self._failed[rank], self._supervisor.pages.read(rank).failed_s
            kind = 0 if code == -signal.SIGKILL else 1 if self._gave_reason(rank, code) else 2 if code < 0 else 3
            return kind, failed_s < 0, abs(failed_s) if kind else 0.0

        return min(self._failed, key=order)  # among equals the first detected

    def _crashed(self) -> bool:
        if not self._failed or self._killed:
            return False
        return not self._gave_reason(culprit := self._culprit(), self._failed[culprit])

    def _gave_reason(self, rank: int, code: int) -> bool:
        """Whether a failed rank printed the reason itself: wrong input, or a run that cannot continue."""
        if code != RUN_FAILED:
            return code == USER_ERROR
        lines = tail(self._log(rank)).splitlines()
        return any(line.startswith("error: ") for line in lines) and "Traceback (most recent call last):" not in lines

    def report(self) -> int | None:
        """Print the log of the rank that caused the failure. Without a failure print the warnings of the first rank.

        Returns the rank if it was killed, and probably for lack of memory.
        """
        if self._killed:
            _say("codescent: the ranks were killed")
        elif not self._failed:
            first = self._group.first
            if self._processes[first].returncode >= 0:  # after a signal the log only says "interrupted"
                _say(tail(self._log(first)))
        else:
            culprit = self._culprit()
            _say(tail(self._log(culprit)))
            if not self._crashed():
                return None
            for rank, how in self._halted.items():
                _say(f"codescent: the cause: rank {rank} (pid {self._processes[rank].pid}) {how}")
            pid, ending = self._processes[culprit].pid, self._ending(culprit)
            _say(f"codescent: rank {culprit} of {self._num_ranks} ({self._roles.of(culprit)}pid {pid}) {ending}")
            if after := [f"rank {rank} {self._ending(rank)}" for rank in self._failed if rank != culprit]:
                _say(f"codescent: probably as a consequence: {'; '.join(after)}")
            self._supervisor.record_crash(culprit, pid, ending)
            _say(f"codescent: the output of each rank is in {self._logs}")
            _say(f"codescent: {self._over}" if self._over else "")
            if self._failed[culprit] == -signal.SIGKILL and is_suspected(ending):
                return culprit
        return None

    def _ending(self, rank: int) -> str:
        """How a failed rank ended, in words."""
        code = self._failed[rank]
        if code >= 0:
            early = " in the middle of its steps" if self._supervisor.ended_early(rank) and code == 0 else ""
            return f"ended with exit code {code}{early}"
        return f"{ended_by(code)}{evidence(self._kills[0]) if code == -signal.SIGKILL else ''}"

    def _log(self, rank: int) -> Path:
        return self._paths[self._processes[rank].pid]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


def _say(text: str) -> None:
    if text:
        warn(text)
