"""In: requests, a JSON line each: a project, ranks, words of a config. Out: the run, done by ranks forked for it.
Does not assert anything: the tests do. One process imports torch, once; a rank of a run is a fork of it."""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 100.0
PATIENCE_S = 20.0
"""For the other ranks, after one has failed."""


@dataclass(frozen=True)
class Done:
    """How the ranks of a run ended (0, 2 for a UserError, 1 for anything else, None: it hung), and what they said."""

    codes: list[int | None]
    said: str


class Forker:
    """The process that forks ranks, as tests see it."""

    def __init__(self) -> None:
        repository = Path(__file__).resolve().parent.parent
        python_path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONPATH": python_path}
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, folder: Path, ranks: int, words: Sequence[str], *, resume: bool = False, fault: str = "") -> Done:
        """`codescent train run.toml WORDS` in `folder`, as so many ranks. `fault` is one of FAULTS."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"folder": str(folder), "ranks": ranks, "words": list(words), "resume": resume, "fault": fault}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Done(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def serve() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        print(json.dumps(asdict(answer(**json.loads(line)))), flush=True)


def answer(folder: str, ranks: int, words: list[str], resume: bool, fault: str) -> Done:
    """Fork the ranks, wait for them, put an end to those that hang."""
    os.chdir(folder)
    said = Path(folder) / "said.txt"
    said.write_text("")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        pids = [
            fork(lambda rank=rank: work(rank, ranks, words, resume, fault, listener), said) for rank in range(ranks)
        ]
    return Done(join(pids), said.read_text()[-6000:])


def work(rank: int, ranks: int, words: list[str], resume: bool, fault: str, listener: socket.socket) -> int:
    """What one rank does."""
    from codescent.configfile import load
    from codescent.place import Place
    from codescent.train.loop import train

    store_fd = os.dup(listener.fileno()) if rank == 0 else None
    place = Place(rank, rank, ranks, ranks, "127.0.0.1", listener.getsockname()[1], store_fd=store_fd)
    listener.close()
    if fault:
        FAULTS[fault](rank, ranks)
    config = load("run.toml", [*words, f"parallel.ranks={ranks}"]).config
    return train(config, place, lambda _: 1.0, resume=resume).exit_code


def fork(act: Callable[[], int], said: Path) -> int:
    """Start `act` in a process of its own, which appends to `said` what it prints."""
    from codescent.errors import UserError

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with said.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = act()
    except UserError as error:
        code = 2
        print(*(f"error: {problem}" for problem in error.problems), sep="\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # without the interpreter's end, where gloo's threads may abort


def join(pids: list[int]) -> list[int | None]:
    """Their exit codes, None of those that had to be killed."""
    descriptors = {os.pidfd_open(pid): pid for pid in pids}
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while descriptors:
        ready, _, _ = select.select(list(descriptors), [], [], max(0.0, deadline - time.monotonic()))
        for descriptor in ready or list(descriptors):
            pid = descriptors.pop(descriptor)
            os.close(descriptor)
            if not ready:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pid] = code if ready else None
            if code:
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
    return [codes[pid] for pid in pids]


def infinite_gradient(rank: int, ranks: int) -> None:
    """On the last rank alone, in step 3, one element of the gradient of each plain linear layer's weight is infinite."""
    import torch

    from codescent.models.linear import Linear
    from codescent.train.execute import Executor

    if rank != ranks - 1:
        return
    now = {"step": -1}

    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[0, 0] = torch.inf
            return gradient

    def product(self: Linear, x_BTI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = Infinite.apply(self.weight) if now["step"] == 2 else self.weight
        return torch.nn.functional.linear(x_BTI, weight, bias_O)

    whole_step = Executor.step

    def step(self: Executor, number: int, rate: float) -> Any:
        now["step"] = number
        return whole_step(self, number, rate)

    Linear._product = product  # type: ignore[method-assign]
    Executor.step = step  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int, int], None]] = {"infinite_gradient": infinite_gradient}


def prepare() -> None:
    """What every fork would do again: imports, a measurement that only `mfu` needs, a look at all these objects."""
    for module in ("torch._dynamo", "torch.utils.checkpoint", "numpy.ma"):
        importlib.import_module(module)
    for module in ("models.gpt2", "strategies.shards", "strategies.ring", "strategies.vocabulary", "train.loop"):
        importlib.import_module(f"codescent.{module}")
    machine = importlib.import_module("codescent.train.machine")
    machine.peak_flops_per_s = lambda *_: 1e9
    gc.freeze()


if __name__ == "__main__":
    prepare()
    serve()
