"""In: requests, a JSON line each: a project, ranks, words of a config. Out: the run, done by ranks forked for it.
Does not assert anything: the tests do. Tests ask through `forker`; a rank does not import torch again."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.checkpoint.box import Box
from codescent.config.load import load
from codescent.data import verified
from codescent.data.text import dataset
from codescent.operators.linear import Linear
from codescent.strategies import shards
from codescent.train import loop, machine
from codescent.train.execute import Executor
from codescent.train.loop import train

TIMEOUT_S = 100.0
PATIENCE_S = 20.0
"""For the other ranks, after one has failed."""


def prepare() -> None:
    """What every fork would do again: imports, a measurement that only `mfu` needs, a look at all these objects."""
    for module in ("torch._dynamo", "torch.utils.checkpoint", "numpy.ma"):
        importlib.import_module(module)
    for module in (
        "models.gpt2.module",
        "models.transformer.module",
        "strategies.shards",
        "strategies.ring",
        "strategies.vocabulary",
    ):
        importlib.import_module(f"codescent.{module}")
    machine.peak_flops_per_s = lambda device, precision: 1e9
    refuse_pickles()
    gc.freeze()


def refuse_pickles() -> None:
    """No rank opens a pickle of another: all of torch's collectives of objects go through these two."""

    def refuse(*_: object) -> None:
        raise AssertionError("a pickle is on its way between ranks")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse


def serve() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        number, request = json.loads(line)
        print(json.dumps([number, *answer(**request)]), flush=True)


def answer(folder: str, ranks: int, words: list[str], resume: bool, fault: str) -> tuple[list[int | None], str]:
    """Fork the ranks, wait for them, put an end to those that hang; their exit codes and what they said."""
    os.chdir(folder)
    said = Path(folder) / "said.txt"
    said.write_text("")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        acts = [partial(work, rank, ranks, words, resume, fault, listener) for rank in range(ranks)]
        codes = join([fork(act, said) for act in acts])
    return codes, said.read_text()[-6000:]


def work(rank: int, ranks: int, words: list[str], resume: bool, fault: str, listener: socket.socket) -> int:
    """What one rank does."""
    store_fd = os.dup(listener.fileno()) if rank == 0 else None
    place = Rank(rank, rank, ranks, ranks, "127.0.0.1", listener.getsockname()[1], store_fd=store_fd)
    listener.close()
    if fault and rank == ranks - 1:
        name, *arguments = fault.split()
        FAULTS[name](*arguments)
    config = load("run.toml", [*words, f"parallel.ranks={ranks}"]).config
    return train(config, place, resume=resume).exit_code


def fork(act: Callable[[], int], said: Path) -> int:
    """Start `act` in a process of its own, which appends to `said` what it prints."""
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
        code = error.exit_code
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


class Infinite(torch.autograd.Function):
    """The identity; one element of the gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = torch.inf
        return gradient


def infinite_gradient() -> None:
    """In step 3 one element of the gradient of each plain linear layer's weight is infinite, on the last rank alone."""
    now = {"step": -1}
    whole_step = Executor.step

    def step(self: Executor, number: int, rate: float) -> Any:
        now["step"] = number
        return whole_step(self, number, rate)

    def product(self: Linear, x_BTI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = Infinite.apply(self.weight) if now["step"] == 2 else self.weight
        return torch.nn.functional.linear(x_BTI, weight, bias_O)

    Executor.step = step  # type: ignore[method-assign]
    Linear._product = product  # type: ignore[method-assign]


def earlier_fingerprint() -> None:
    """Shards of others have the fingerprint that earlier versions gave them."""
    whole = dataset._open_foreign

    def opened(found: Any) -> dataset.Dataset:
        made = whole(found)
        assert made.earlier is not None
        return dataclasses.replace(made, fingerprint=made.earlier)

    dataset._open_foreign = opened


def reads_no_file_whole() -> None:
    """The last rank fails where it hashes a file of the dataset by itself."""

    def read(path: Path, advance: Any) -> Any:
        raise AssertionError(f"{path} was read")

    verified._read = read


def flip(*names: str) -> None:
    """After step 3 one bit of each tensor is another: of a checkpoint's names, or "read.NAME", which forward reads."""
    whole_step = Executor.step

    def step(self: Executor, number: int, rate: float) -> Any:
        result = whole_step(self, number, rate)
        if number == 2:
            flip_bits(self, names)
        return result

    Executor.step = step  # type: ignore[method-assign]


def flip_at_start(*names: str) -> None:
    """As `flip`, before the first step."""
    whole_init = Executor.__init__

    def init(self: Executor, *arguments: Any) -> None:
        whole_init(self, *arguments)
        flip_bits(self, names)

    Executor.__init__ = init  # type: ignore[method-assign]


def flip_bits(executor: Executor, names: Sequence[str]) -> None:
    """Change the lowest bit of the byte in the middle of each tensor."""
    tensors = dict(executor.optimizer.tensors())
    for chunk in executor.chunks:
        tensors |= {f"read.{of}": parameter.detach() for of, parameter in chunk.part.named_parameters()}
    for name in names:
        found = tensors[name]
        found = found.local if isinstance(found, Box) else found
        data = (found.to_local() if isinstance(found, DTensor) else found).view(-1).view(torch.uint8)
        data[data.numel() // 2] ^= 1


def reductions_of_fully_shard() -> None:
    """The last rank reduces gradients by fully_shard itself, as ranks on CUDA do, instead of by strategies/overlap."""
    shards._overlap = lambda *arguments: None


def at_step(number: int, method: str, act: Callable[[Executor], None]) -> None:
    """Act before a method of the executor, in one step."""
    whole = getattr(Executor, method)

    def patched(self: Executor, *arguments: Any) -> Any:
        if self.number == number - 1:
            act(self)
        return whole(self, *arguments)

    setattr(Executor, method, patched)


def infinite_loss() -> None:
    """In step 3 the loss is infinite, its gradients are not."""
    at_step(3, "_reduce", lambda executor: executor.loss_sum.fill_(torch.inf) and None)


def not_finite(name: str) -> None:
    """In step 3 one element of a whole tensor is NaN."""
    at_step(3, "_forward", lambda executor: cast(torch.Tensor, executor.optimizer.tensors()[name])[:1].fill_(torch.nan))


def infinite_state() -> None:
    """In step 3 the optimizer's state is infinite, and so are the weights that it updates."""

    def fill(executor: Executor) -> None:
        optimizer = executor.optimizer
        optimizer.torch.state[optimizer.masters[0]]["exp_avg"].fill_(torch.inf)

    at_step(3, "_reduce", fill)


def asked_to_stop() -> None:
    """SIGTERM in step 10."""
    at_step(10, "_reduce", lambda executor: os.kill(os.getpid(), signal.SIGTERM))


def validation_without_a_number() -> None:
    """The first validation loss is NaN."""
    whole, seen = loop.validation_loss, []

    def patched(*arguments: Any) -> float:
        seen.append(whole(*arguments))
        return seen[-1] if len(seen) > 1 else torch.nan

    loop.validation_loss = patched


FAULTS: dict[str, Callable[..., None]] = {
    fault.__name__: fault
    for fault in (
        infinite_gradient,
        infinite_loss,
        infinite_state,
        asked_to_stop,
        validation_without_a_number,
        earlier_fingerprint,
        reads_no_file_whole,
        flip,
        not_finite,
        flip_at_start,
        reductions_of_fully_shard,
    )
}
"""What is done to the last rank before it begins; words after the name are arguments."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    serve()
