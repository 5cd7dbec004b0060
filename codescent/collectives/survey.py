"""In: a number of ranks. Out: by backend and device, what each collective does on real ranks; timings; holdings.
Does not print, and does not call a collective itself: it starts a fresh set of ranks whenever the last one is spent."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from codescent.base.device import count, found_kind
from codescent.base.device_kinds import CPU, CUDA, GPUS, KINDS
from codescent.base.errors import RunFailed, UserError
from codescent.base.published import NO_SPACE, in_words
from codescent.base.stopping import exit_code_of
from codescent.base.temporary_folder import temporary_folder
from codescent.collectives.task import (
    BF16,
    CRASHES,
    EXPLAIN,
    FP32,
    GROUP,
    PROBE,
    TIME,
    YES,
    Line,
    Task,
    lines,
    name_of,
)
from codescent.launch.local import STOP_SIGNALS, run_ranks

RANK = (sys.executable, "-P", "-m", "codescent.collectives")
SHOWN_BACKENDS = ("gloo", "mpi", "nccl")
"""Shown also where torch lacks them. Other backends of this torch are shown beside them."""
DEVICES: Mapping[str, str] = {kind: "CPU" if kind == CPU else "GPU" for kind in KINDS}
"""What a column is called. A backend has one for the CPU, and one for the kind of GPU that is there."""
COLUMNS = 2
NOT_REAL = ("undefined", "fake")
"""Names in torch's list of backends that send nothing."""
NEEDED = ("batch_isend_irecv", "all_reduce")
"""Calls without which our all-reduce cannot be compared."""

LEAST_FREE_BYTES = 4096
"""With less, ranks that failed have probably failed to write what they found."""
ELSEWHERE = "set TMPDIR to a folder with free space"


class RanksEnded(Exception):
    """The ranks have ended before their task, and have said why on the standard error. `code`: for this command."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class CallOutcome:
    """What a call does: YES, NO, WRONG, HANGS or CRASHES; and why, in torch's words."""

    state: str
    why: str = ""


@dataclass
class BackendSupport:
    """A backend on a device.

    Attributes:
        backend, device: names in torch.
        absent: why nothing was tried; "" otherwise.
        outcomes: by call and dtype (`task.name_of`). bf16 is missing where fp32 does not work.
    """

    backend: str
    device: str
    absent: str = ""
    outcomes: dict[str, CallOutcome] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people, such as "gloo on CPU"."""
        return f"{self.backend} on {DEVICES[self.device]}"

    def offers(self, call: str, dtype: str = FP32) -> bool:
        """Whether a call works."""
        return self.outcomes.get(name_of(call, dtype)) == CallOutcome(YES)


def columns() -> list[BackendSupport]:
    """A column for each backend and device, without outcomes. Those that cannot be tried say why."""
    others = [name for name in dist.Backend.backend_list if name not in (*SHOWN_BACKENDS, *NOT_REAL)]
    shown = [*SHOWN_BACKENDS, *(name for name in others if dist.is_backend_available(name))]
    return [
        BackendSupport(backend, device, _absent(backend, device)) for backend in shown for device in (CPU, gpu_kind())
    ]


def _absent(backend: str, device: str) -> str:
    if not dist.is_backend_available(backend):
        return "not in this torch"
    return f"no {KINDS[device].label}" if device != CPU and not gpus() else ""


def gpu_kind() -> str:
    """The kind of GPU whose backends are asked: the one that this process sees, if it has a backend; else CUDA."""
    return found if (found := found_kind()) in GPUS and KINDS[found].backend else CUDA


def gpus() -> int:
    """The number of GPUs of this kind that this process sees."""
    return count(gpu_kind())


class Survey:
    """Asks sets of ranks of this machine.

    Args:
        ranks: of each set, at least 2.
        limit_s: seconds after which a call is ended.
        command: of a rank. The folder of its task is added.
    """

    def __init__(self, ranks: int, limit_s: float, command: Sequence[str] = RANK) -> None:
        self.ranks, self.limit_s, self.command = ranks, limit_s, command

    def probe(self, column: BackendSupport, calls: Sequence[str]) -> None:
        """Try the calls and fill in the column's outcomes. Raises RanksEnded."""
        left = list(calls)
        while left:
            found = self._ask(Task(PROBE, column.backend, column.device, self.limit_s, tuple(left)))
            group = found.pop(GROUP)
            if group.state != YES:
                column.outcomes |= {name_of(call, FP32): CallOutcome(group.state, group.why) for call in left}
                return
            column.outcomes |= {name: CallOutcome(line.state, line.why) for name, line in found.items()}
            before, left = left, [call for call in left if not self._is_settled(column, call)]
            assert len(left) < len(before), found

    def time(self, column: BackendSupport, size_bytes: int, rounds: int, budget_s: float) -> list[dict[str, Any]]:
        """Time both all-reduces: for each rank what `timing.measure` returns. Raises RanksEnded, RunFailed."""
        task = Task(TIME, column.backend, column.device, self.limit_s + budget_s, (), size_bytes, rounds, budget_s)
        return self._answers(task, column.name)

    def explain(self) -> list[list[dict[str, Any]]]:
        """For each rank what `holdings.record` returns, of gloo on CPUs. Raises RanksEnded, RunFailed."""
        return self._answers(Task(EXPLAIN, limit_s=self.limit_s), "gloo on CPU")

    @staticmethod
    def _is_settled(column: BackendSupport, call: str) -> bool:
        first = column.outcomes.get(name_of(call, FP32))
        return first is not None and (first.state != YES or name_of(call, BF16) in column.outcomes)

    @staticmethod
    def _write(task: Task, folder: Path) -> None:
        """Give the ranks their task. Raises UserError: the folder for temporary files is full."""
        try:
            task.write(folder)
        except OSError as error:
            raise UserError(f"{folder}: {in_words(error)}; {ELSEWHERE}") from error

    def _answers(self, task: Task, where: str) -> list[Any]:
        """What each rank found in a task other than PROBE."""
        answers: list[Any] = []
        for name, line in self._ask(task, answers).items():
            if line.state != YES:
                raise RunFailed(f"{where}: {name}: {line.state}: {line.why}")
        return answers

    def _ask(self, task: Task, answers: list[Any] | None = None) -> dict[str, Line]:
        """Let a fresh set of ranks do a task. Returns what they found, by name; adds each rank's data to `answers`.

        Raises:
            RanksEnded: the ranks were stopped, or failed elsewhere than in what they tried.
            UserError: the folder for temporary files is full.
        """
        names = [GROUP, *(name_of(call, dtype) for call in task.calls for dtype in (FP32, BF16))]
        names += [task.does] if task.does != PROBE else []
        with temporary_folder("codescent-collectives-") as folder:
            self._write(task, folder)
            env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
            code = run_ranks([*self.command, str(folder)], self.ranks, env, saves=False)
            if code in map(exit_code_of, STOP_SIGNALS):
                raise RanksEnded(code)
            if code and shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
                raise UserError(f"{folder}: {NO_SPACE}; {ELSEWHERE}")
            said = [{line.name: line for line in lines(folder, rank)} for rank in range(self.ranks)]
        found = dict(_merged(names, said, code))
        if GROUP not in found or (code and all(line.state == YES for line in found.values())):
            raise RanksEnded(code or 1)
        if answers is not None:
            answers += [one[task.does].found for one in said if task.does in one]
        return found


def _merged(names: Sequence[str], said: Sequence[Mapping[str, Line]], code: int) -> Iterator[tuple[str, Line]]:
    """One line for each thing that was tried, in order. The rank that failed first says why.

    `code`: the exit code of the set. Above 128 a signal has ended a rank, in what it has not written a line about.
    """
    for name in names:
        mine = [one[name] for one in said if name in one]
        failed = [line for line in mine if line.state != YES]
        if len(mine) < len(said) and code > 128:
            yield name, Line(name, CRASHES, f"a rank was ended by {_signal(code - 128)}")
            return
        if failed:
            yield name, min(failed, key=lambda line: line.seconds)
        elif len(mine) == len(said):
            yield name, mine[0]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
