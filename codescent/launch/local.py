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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from codescent.base.call import AGAIN, SURVIVES
from codescent.base.early import first_signal
from codescent.base.errors import UserError
from codescent.base.messages import detail
from codescent.base.output import new_line, warn
from codescent.base.page import Took
from codescent.base.progress import ENDED, PROGRESS_FD, Pages, shared_memory
from codescent.base.stopping import EXIT_FILE, SAVING, STOPPING, exit_code_of, reported
from codescent.base.temporary_folder import TemporaryFolder
from codescent.base.token import TOKEN
from codescent.launch.deciding import deciding
from codescent.launch.endings import Endings
from codescent.launch.environment import LATE, STORE_FD
from codescent.launch.group import Group
from codescent.launch.hang_record import HangRecord
from codescent.launch.logs import tail
from codescent.launch.losses import LossCount
from codescent.launch.memory_kills import evidence, is_suspected, memory_kills
from codescent.launch.other_hosts import OtherHosts
from codescent.launch.places import LossPolicy
from codescent.launch.rank_output import RankOutput
from codescent.launch.roles import Roles, die_with_parent, ended_by
from codescent.launch.signals import SignalQueue
from codescent.launch.stacks import Stacks
from codescent.launch.supervisor import Stopped, Supervisor, host, where_of
from codescent.launch.survivors import WAITING_PAGES, Survivors
from codescent.transport.sockets import listen_at

LOOK_EVERY_S = 1.0
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
        self._blocked, self._policy = blocked, survive
        self._survivors: Survivors | None = None
        self._roles, self._group = roles, group
        self._command, self._num_ranks = list(command), group.world_size
        self._env, self._does = {**env}, "save and stop" if saves else "stop"
        self._progress = shared_memory(self._num_ranks + (WAITING_PAGES if survive else 0))
        self._stacks, self._stopped = Stacks(), stopped
        self._kills = deque([memory_kills()], maxlen=KEPT_COUNTS)  # a killed process ends some seconds later
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._output, self._endings = RankOutput(), Endings()
        self._paths: dict[int, Path] = {}  # of the log of each process
        self._port = 0
        self._losses: dict[int, LossCount] = {}  # of each rank that has died, and that the run can lose
        self._took: dict[int, Took] = {}  # what its page had then
        self._late: set[int] = set()  # ranks that were started again, while the others went on
        self._joining: frozenset[int] = frozenset()  # ranks that the others let in at the end of a step
        self._ended: set[int] = set()
        self._failed: dict[int, int] = {}  # rank to return code, in order of detection
        self._named = False  # whether the first rank that failed is named
        self._stop_signal: int | None = None  # the first stop request
        self._interrupted_s: float | None = None  # time of the first SIGINT
        self._killed = False
        self._unsaved = False  # ranks that did not react to a stop request were killed
        self._stopping = False  # True: later exits of ranks are not failures
        self._stop_code = 0  # exit code of ranks that another process asked to stop
        self._over, self._over_code = "", 0  # why the death of a rank has ended the run
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
        self._others = OtherHosts(pages, self._known_token())
        known = self._stacks, HangRecord(pages, self._logs), self._others
        self._supervisor = Supervisor(pages, self._num_ranks, self._stopped, *known, is_whole=is_whole)
        sys.stdout.flush()  # rank 0 writes to the same stdout
        try:
            listener, hub = self._group.listen(), None
            if not (is_whole or self._group.first):
                self._others.serve(listen_at(self._group.address, 0, self._num_ranks))
                if self._policy is not None:  # the other agents know this port alone
                    listener, hub = listen_at(self._group.address, 0, self._num_ranks), listener
            with listener or contextlib.nullcontext():
                self._port = self._group.port if listener is None else listener.getsockname()[1]
                if self._policy is None:
                    for rank in self._group.ranks:
                        self._processes[rank] = self._start(rank, listener)
                else:
                    self._survivors = self._surviving(self._policy, listener, hub)
                    self._survive({})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = [process for rank, process in self._processes.items() if rank not in self._ended]
        for process in [*running, *(self._survivors.waiting if self._survivors else ())]:
            _kill_group(process)
            self._endings.wait(process)
        if self._survivors:
            self._survivors.close()
        os.close(self._progress)
        self._stacks.close()
        self._others.close()
        self._folder.close(keep=self._crashed())

    def _surviving(self, policy: LossPolicy, listener: socket.socket | None, hub: socket.socket | None) -> Survivors:
        """What goes on after losses. It starts the ranks. `listener`: of rank 0; `hub`: where other agents come."""
        ranks, served = self._group, None if hub is None else (hub, self._port)
        decides = deciding(ranks, policy, self._supervisor, self._known_token(), served, _say)

        def start(slot: int, survives: str) -> subprocess.Popen[bytes]:
            self._port = decides.port or self._port
            if slot < ranks.world_size:
                return self._start(slot, listener, survives=survives)
            return self._start(ranks.ranks[-1], None, survives=survives, log=f"start-{slot}.log", stacks=slot)

        own = self._supervisor, self._stacks, self._endings, start, _say
        return Survivors(ranks.world_size, decides, *own, lambda process: tail(self._paths[process.pid]))

    def _known_token(self) -> dict[str, str]:
        """The environment, with the token of the run."""
        return {**self._env, **({TOKEN: self._group.token} if self._group.token else {})}

    def _start(
        self,
        rank: int,
        listener: socket.socket | None,
        *,
        late: bool = False,
        survives: str = "",
        log: str = "",
        stacks: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a rank.

        Args:
            rank: its number.
            listener: for the store, which rank 0 serves; None: others train already.
            late: it has died, and starts again.
            survives: see SURVIVES; "": a loss ends the run.
            log: the name of its log; "": that of the rank.
            stacks: the number of its file for stacks; None: that of the rank.
        """
        env = self._group.environment(rank, self._port, self._env)
        file, named = self._stacks.environment(rank if stacks is None else stacks)
        passed = [self._progress, file]
        env |= {PROGRESS_FD: str(self._progress), **named}
        if self._group.token:
            env[TOKEN] = self._group.token
        if survives:
            env[SURVIVES] = survives
        if self._roles.spare and self._roles.losses().most:
            env[AGAIN] = "1"
        if late:
            env[LATE] = "1"
        elif rank == 0 and listener is not None:
            passed.append(listener.fileno())
            env[STORE_FD] = str(listener.fileno())
        path = self._logs / (log or f"rank-{rank}.log")
        with path.open("ab") as output:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)  # a process inherits the mask
            try:
                process = subprocess.Popen(
                    self._command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output if rank and not survives else self._output.target,  # each may become rank 0
                    stderr=output,
                    pass_fds=passed,
                    process_group=0,  # only this process receives the terminal's Ctrl-C, and forwards it
                    preexec_fn=die_with_parent(),
                )
            except BlockingIOError as error:
                raise UserError(f"cannot start rank {rank} of {self._num_ranks}: {error.strerror}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._output.follow(process.stdout)
        self._paths[process.pid] = path
        detail(f"{f'{process.pid} waits' if log else f'rank {rank} is process {process.pid}'}, its log {path}")
        return process

    @property
    def stopped(self) -> bool:
        """Whether the ranks have ended on request, by themselves."""
        return not (self._failed or self._killed or self._unsaved or self._over_code)

    def watch(self, queue: SignalQueue) -> int:
        """Wait until every rank has ended. Forward signals; stop all ranks when one fails. Returns the exit code."""
        while len(self._ended) < len(self._processes) or self._waits_for_ranks():
            next_s = self._escalation[0][0] if self._escalation else math.inf
            every_s = self._survivors.every_s if self._survivors else LOOK_EVERY_S
            for number in queue.wait(min(next_s - time.monotonic(), every_s)):
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
        if self._over_code:
            return self._over_code
        return self._stop_code if self._stop_signal is None else exit_code_of(self._stop_signal)

    def _waits_for_ranks(self) -> bool:
        """Whether no rank of this host runs, and one may come. If it never had one, a stop request ends it at once."""
        if self._survivors is None or (self._stop_signal is not None and not self._processes):
            return False
        return self._survivors.is_needed

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
            if self._survivors and self._is_survived(rank, code, lost):
                lost[rank] = code
                continue
            if not self._failed:
                self._stop_others()
            if code < 0 and not self._failed:
                living = {one for one in self._processes if not self._is_dead(one)}
                met = self._supervisor.meets(rank)
                self._over = self._roles.over(rank, 128 - code, living, met=met)
            self._failed[rank] = code
        if self._survivors:
            self._survive(lost)
        self._name_killed()
        for rank in again:
            self._start_again(rank)
        late = {*self._late, *self._joining} - self._ended
        over = bool(self._ended) or (self._survivors is not None and self._survivors.orders.done)
        if late and over and not self._stopping and len(late) + len(self._ended) == len(self._processes):
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

    def _survive(self, lost: Mapping[int, int]) -> None:
        """Ranks have died, or processes that wait for a place, or some of these are ready: do what is decided."""
        assert self._survivors is not None
        if self._over:
            return self._failed.update(lost)
        if self._failed:  # another rank has an error of its own: its message counts
            self._failed.update(lost)
            culprit = self._culprit()
            who = f"rank {culprit} of {self._num_ranks} on {host()} {self._ending(culprit)}: see its message"
            code = self._failed[culprit]
            self._survivors.look({}, ends=True, failed=who, code=(code or RUN_FAILED) if code >= 0 else 128 - code)
            return None
        has_ended = bool(self._ended.difference(lost)) or any(map(self._supervisor.has_ended, self._processes))
        ends = bool(self._processes) and (self._stopping or self._stop_signal is not None or has_ended)
        called = self._survivors.look(lost, ends=ends)
        orders = self._survivors.orders
        if orders.over:
            self._over, self._over_code, self._failed, self._named = orders.over, orders.code, {**lost}, True
            self._stop_others()
            if orders.kills:
                self._stopping = True
                self._send(signal.SIGKILL)
            return None
        if called is not None:
            self._processes, self._joining = {**called.processes}, called.joining
            self._num_ranks = called.ranks
            self._ended.clear()
        return None

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
        losses = self._losses.setdefault(rank, self._roles.losses())
        if not losses.most or self._failed or self._stop_signal is not None:
            return
        page, before = self._supervisor.pages.read(rank), self._took.get(rank, Took())
        self._took[rank] = page.took
        if why := losses.add(time.monotonic(), step=page.step, progressed=page.took != before):
            return _say(f"codescent: rank {rank} is not started again: {why}")
        try:
            self._processes[rank] = self._start(rank, None, late=True)
        except (UserError, OSError) as error:
            return _say(f"codescent: rank {rank} is not started again ({losses}): {error}")
        self._ended.discard(rank)
        self._late.add(rank)
        _say(f"codescent: rank {rank} is started again ({losses}), as pid {self._processes[rank].pid}")

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
            _say(f"codescent: {self._over}" if self._over else "")
            first = min(self._processes, default=None)
            if (
                first is not None and (self._processes[first].returncode or 0) >= 0
            ):  # after a signal the log only says "interrupted"
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
            self._supervisor.record_crash(culprit, pid, ending, self._supervisor.pages.read(culprit).step)
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
