"""In: a project, words of a config, a fault. Out: one rank of a real run, with the fault planted in it.
Does not assert anything (the tests do) and starts no process (rank_server does)."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rank_server import Place
from torch.distributed.tensor import DTensor

from codescent.base.rank import Rank
from codescent.base.stopwatch import Laps, Stopwatch
from codescent.checkpoint import parts, save_beside, storage
from codescent.checkpoint.box import Box
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.manifest import CheckpointError
from codescent.config.load import load
from codescent.coupling.averaging import Averaging
from codescent.data import verified
from codescent.data.loader import Loader, Portion
from codescent.data.order import AheadOrder, batch_of
from codescent.data.text import dataset
from codescent.operators.linear import Linear
from codescent.strategies import shards
from codescent.strategies.fully_shard import send_ourselves
from codescent.train import loop, machine, profile, range_test, validate, verification, world
from codescent.train.execute import Executor
from codescent.train.loop import train
from codescent.train.result import Pending


def run(place: Place, words: list[str], resume: bool, fault: str = "", any_device: bool = False) -> None:
    """`codescent train run.toml WORDS` as one rank; the last rank has the fault. Ends with the run's exit code.

    With `any_device` a layout that needs CUDA is not refused on a CPU.
    """
    if any_device:
        machine.refuse_device = lambda plan, device, **asked: None
    store_fd = os.dup(place.listener.fileno()) if place.rank == 0 else None
    port = place.listener.getsockname()[1]
    place.listener.close()
    kind, _, rest = fault.partition(" ")
    if kind == "late":  # all ranks, beside another fault
        Pending.is_late = property(lambda _: True)  # type: ignore[assignment, method-assign]
        fault = rest
    if fault.startswith("spike "):  # all ranks; more words are a fault of the last one
        _, batch, *more = fault.split()
        spike(int(batch))
        fault = " ".join(more)
    if fault.startswith("paced "):  # all ranks, the last one slower by a ratio
        _, seconds, ratio = fault.split()
        paced(float(seconds) * (float(ratio) if place.rank == place.ranks - 1 else 1.0))
    elif fault and place.rank == place.ranks - 1:
        name, *arguments = fault.split()
        FAULTS[name](*arguments)
    config = load("run.toml", [*words, *MORE_WORDS, f"parallel.ranks={place.ranks}"]).config
    rank = Rank(place.rank, place.rank, place.ranks, place.ranks, "127.0.0.1", port, store_fd=store_fd)
    raise SystemExit(train(config, rank, resume=resume).exit_code)


def losses_at_rates(place: Place, words: list[str], steps: int) -> list[list[float]]:
    """The learning rates and the losses of a range test of so many steps, as one rank."""
    range_test.STEPS = steps
    store_fd = os.dup(place.listener.fileno()) if place.rank == 0 else None
    port = place.listener.getsockname()[1]
    place.listener.close()
    config = load("run.toml", [*words, f"parallel.ranks={place.ranks}"]).config
    rank = Rank(place.rank, place.rank, place.ranks, place.ranks, "127.0.0.1", port, store_fd=store_fd)
    found = range_test.range_test(config, rank)
    return [found.rates, found.losses]


MORE_WORDS: list[str] = []
"""Words of this rank alone (`other_value`)."""


def has_cuda(place: Place) -> bool:
    """Whether a rank would find a CUDA device."""
    return torch.cuda.is_available()


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
    """In step 3 one element of the gradient of each plain linear layer's weight is infinite, on the last rank alone.

    Or in the first later step that this rank computes: asynchronous ranks take what is left.
    """
    now = {"is_due": False, "was": False}
    whole_step = Executor._walk

    def step(self: Executor, number: int) -> None:
        now["is_due"] = number >= 2 and not now["was"]
        now["was"] |= now["is_due"]
        whole_step(self, number)

    def product(self: Linear, x_BTI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = Infinite.apply(self.weight) if now["is_due"] else self.weight
        return torch.nn.functional.linear(x_BTI, weight, bias_O)

    Executor._walk = step  # type: ignore[method-assign]
    Linear._product = product  # type: ignore[method-assign]


def earlier_fingerprint() -> None:
    """Shards of others have the fingerprint that earlier versions gave them."""
    whole = dataset.open_foreign

    def opened(found: Any) -> dataset.Dataset:
        made = whole(found)
        assert made.earlier is not None
        return dataclasses.replace(made, fingerprint=made.earlier)

    dataset.open_foreign = opened


def all_data_is_large() -> None:
    """No data is small enough to be read before a run."""
    verification.SMALL_BYTES, verification.SHARE = 0, 0.0


def reads_no_file_whole() -> None:
    """The last rank fails where it hashes a file of the dataset by itself."""

    def read(path: Path, advance: Any) -> Any:
        raise AssertionError(f"{path} was read")

    verified._read = read


def flip(*names: str) -> None:
    """After step 3 one bit of each tensor is another: of a checkpoint's names, or "read.NAME", which forward reads."""
    whole_step = Executor.launch

    def step(self: Executor, number: int, rate: float) -> Any:
        result = whole_step(self, number, rate)
        if number == 2:
            flip_bits(self, names)
        return result

    Executor.launch = step  # type: ignore[method-assign]


def flip_at_step(step: str, *names: str) -> None:
    """As `flip`, in another step."""
    at_step(int(step), "_step", lambda executor: flip_bits(executor, names))


def flip_at_start(*names: str) -> None:
    """As `flip`, before the first step."""
    whole_init = Executor.__init__

    def init(self: Executor, *arguments: Any) -> None:
        whole_init(self, *arguments)
        flip_bits(self, names)

    Executor.__init__ = init  # type: ignore[method-assign]


def flip_bits(executor: Executor, names: Sequence[str]) -> None:
    """Change the lowest bit of the byte in the middle of each tensor."""
    tensors = dict(executor.coupling.optimizer.tensors())
    for chunk in executor.chunks:
        tensors |= {f"read.{of}": parameter.detach() for of, parameter in chunk.part.named_parameters()}
    for name in names:
        found = tensors[name]
        found = found.local if isinstance(found, Box) else found
        data = (found.to_local() if isinstance(found, DTensor) else found).view(-1).view(torch.uint8)
        data[data.numel() // 2] ^= 1


def reductions_of_fully_shard() -> None:
    """The last rank's fully_shard waits for its reductions, as on CUDA, and strategies/overlap has nothing to do."""
    shards._overlap = lambda module, *arguments: send_ourselves(module)


def at_step(number: int, method: str, act: Callable[[Executor], None]) -> None:
    """Act before a method of the executor, in one step."""
    whole = getattr(Executor, method)

    def patched(self: Executor, *arguments: Any) -> Any:
        if self.number == number - 1:
            act(self)
        return whole(self, *arguments)

    setattr(Executor, method, patched)


def other_value(word: str) -> None:
    """The last rank has another value of a key."""
    MORE_WORDS.append(word)


def other_code() -> None:
    """The last rank has another version of the package."""
    world.code_digest = lambda: "other"


def infinite_loss(step: str = "3") -> None:
    """In a step the loss is infinite, its gradients are not."""
    at_step(int(step), "_reduce", lambda executor: executor.loss_sum.fill_(torch.inf) and None)


def not_finite(name: str) -> None:
    """In step 3 one element of a whole tensor is NaN."""
    at_step(
        3,
        "_forward",
        lambda executor: cast(torch.Tensor, executor.coupling.optimizer.tensors()[name])[:1].fill_(torch.nan),
    )


def infinite_state() -> None:
    """In step 3 the optimizer's state is infinite, and so are the weights that it updates."""

    def fill(executor: Executor) -> None:
        optimizer = executor.coupling.optimizer
        optimizer.torch.state[optimizer.masters[0]]["exp_avg"].fill_(torch.inf)

    at_step(3, "_reduce", fill)


def asked_to_stop(step: str = "10") -> None:
    """SIGTERM in a step, or in the first later one that this rank computes: asynchronous ranks take what is left."""
    whole, asked = Executor._reduce, list[int]()

    def patched(self: Executor, *arguments: Any) -> Any:
        if self.number >= int(step) - 1 and not asked:
            asked.append(self.number)
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, *arguments)

    Executor._reduce = patched  # type: ignore[method-assign]


def asked_to_stop_in_validation() -> None:
    """SIGTERM when the first validation has ended."""
    whole, asked = loop.Validations.add, list[int]()

    def patched(self: loop.Validations, step: int, loss: float) -> None:
        whole(self, step, loss)
        if not asked:
            asked.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    loop.Validations.add = patched  # type: ignore[method-assign]


def without_losses() -> None:
    """Replicas count no loss of a step, as if all its targets were masked."""
    whole = Averaging.stepped
    Averaging.stepped = lambda self, number, *_: whole(self, number, 0, 0)  # type: ignore[method-assign]


def other_clock() -> None:
    """The last rank is on another machine, as far as clocks go."""
    profile.clock_of = lambda: "another machine"


def spike(number: int) -> None:
    """The batch of this number (from 0) has a loss and gradients that are a thousand times as large."""
    whole = Loader._read

    def read(self: Loader, first: int, count: int) -> list[Portion]:
        ahead = self._sampler._ahead if isinstance(self._sampler, AheadOrder) else ()
        found = enumerate(whole(self, first, count), first)
        return [
            dataclasses.replace(portion, losses=portion.losses / 1000) if batch_of(step, ahead) == number else portion  # type: ignore[arg-type]
            for step, portion in found
        ]

    Loader._read = read  # type: ignore[method-assign]


def ruined(step: str) -> None:
    """The update of a step makes the weights a hundred times as large."""
    whole = Executor._step

    def patched(self: Executor, *arguments: Any) -> None:
        whole(self, *arguments)
        if self.number == int(step) - 1:
            for weight in self.coupling.optimizer.weights:  # type: ignore[attr-defined]
                weight.master.detach().mul_(100)

    Executor._step = patched  # type: ignore[method-assign]


def killed_in_rollback() -> None:
    """SIGKILL when a rollback is recorded, and the later checkpoints are still there."""

    def kill(*_: Any) -> list[Path]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    Checkpoints.delete_after = kill  # type: ignore[method-assign]


def paced(seconds: float) -> None:
    """Forward and backward passes each take so many seconds longer."""
    for method in ("_forward", "_backward"):
        setattr(Executor, method, slowed(getattr(Executor, method), seconds))


def slowed(whole: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def patched(*arguments: Any) -> Any:
        time.sleep(seconds)
        return whole(*arguments)

    return patched


def slow_asked_to_stop(seconds: str, step: str) -> None:
    """SIGTERM in a step, while files of checkpoints take longer."""
    slow_write(seconds)
    asked_to_stop(step)


def killed(step: str) -> None:
    """SIGKILL in a step."""
    at_step(int(step), "_reduce", lambda executor: os.kill(os.getpid(), signal.SIGKILL))


def validation_without_a_number() -> None:
    """The first validation loss is NaN."""
    whole, seen = validate.loss_on_all_ranks, []

    def patched(*arguments: Any) -> float:
        seen.append(whole(*arguments))
        return seen[-1] if len(seen) > 1 else torch.nan

    validate.loss_on_all_ranks = patched


def little_memory(more: str) -> None:
    """From the first step on, the process may take so many MiB of address space more than it has."""
    step = Executor.launch

    def limited(executor: Executor, number: int, rate: float) -> Any:
        if number == 0:
            has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + (int(more) << 20), resource.RLIM_INFINITY))
        return step(executor, number, rate)

    Executor.launch = limited  # type: ignore[method-assign]


def failing_write(step: str) -> None:
    """The disk refuses the files of a step's checkpoint."""
    whole = parts.write_part

    def write(order: parts.SaveOrder, *arguments: Any) -> Any:
        if order.step == int(step):
            raise CheckpointError(f"{order.folder}: Input/output error: this checkpoint cannot be written")
        return whole(order, *arguments)

    storage.write_part = write


def slow_failing_write(seconds: str, step: str) -> None:
    """The same, after so many seconds."""
    failing_write(step)
    slow_write(seconds)


def error_in_save(seconds: str, step: str) -> None:
    """A step fails, with a save under way that takes longer."""
    slow_write(seconds)
    at_step(int(step), "_reduce", lambda executor: executor.gradients.no_such_method())  # type: ignore[attr-defined]


def slow_write(seconds: str) -> None:
    """Each file of a checkpoint takes so many seconds longer."""
    storage.write_part = slowed(storage.write_part, float(seconds))


def slow_copy(seconds: str) -> None:
    """Each tensor that is copied for a save beside training takes so many seconds longer. The first of them waits until
    the next step has summed its gradients, if it does within 0.2 s."""
    summed, begin = threading.Event(), save_beside.Staging.copy
    copy, reduce = slowed(save_beside._copy, float(seconds)), Executor._reduce

    def begin_late(*arguments: Any) -> save_beside.Snapshot:
        summed.clear()
        threading.Timer(0.2, summed.set).start()
        return begin(*arguments)

    def reduced(*arguments: Any) -> None:
        reduce(*arguments)
        summed.set()

    save_beside.Staging.copy = begin_late  # type: ignore[method-assign]
    save_beside._copy = lambda pair: summed.wait() and copy(pair)
    Executor._reduce = reduced  # type: ignore[method-assign]


def renamed_in_save(step: str) -> None:
    """The run folder has another name before a file of a step's checkpoint is written. The second step after it waits
    until this save has failed."""
    whole, failed = parts.write_part, threading.Event()

    def write(order: parts.SaveOrder, *arguments: Any) -> Any:
        run = order.folder.parent.parent
        if order.step == int(step) and run.exists():
            run.rename(run.with_name(f"{run.name}-moved"))
        try:
            return whole(order, *arguments)
        finally:
            failed.set()

    storage.write_part = write
    at_step(int(step) + 2, "_reduce", lambda _: failed.wait(10) and time.sleep(0.1))


def cut_checkpoint(step: str, saved: str) -> None:
    """In a step a file of a checkpoint has lost its end."""
    done: list[int] = []

    def cut(executor: Executor) -> None:
        if done:  # the step is taken again after a rollback
            return
        done.append(executor.number)
        (file,) = (path for path in Path("runs").glob(f"*/checkpoints/step_{int(saved):08d}/rank_00000_*"))
        os.truncate(file, file.stat().st_size - 9)

    at_step(int(step), "_reduce", cut)


def renamed(step: str, name: str) -> None:
    """The run folder has another name from a step on."""

    def rename(_: Executor) -> None:
        if run.exists():  # the step is taken again after a rollback
            run.rename(run.with_name(f"{run.name}-moved"))

    run = Path("runs") / name
    at_step(int(step), "_reduce", rename)


def killed_in_save(step: str) -> None:
    """SIGKILL when a step begins, with an endless save under way."""
    slow_write("60")
    killed(step)


def late_failure(*words: str) -> None:
    """When the instructions of the first step have ended, an error with these words comes, as CUDA's errors do."""

    def fail(watch: Stopwatch) -> Laps:
        raise RuntimeError(" ".join(words))

    Stopwatch.stop = fail  # type: ignore[method-assign]


FAULTS: dict[str, Callable[..., None]] = {
    fault.__name__: fault
    for fault in (
        infinite_gradient,
        infinite_loss,
        infinite_state,
        asked_to_stop,
        asked_to_stop_in_validation,
        killed,
        other_clock,
        without_losses,
        validation_without_a_number,
        earlier_fingerprint,
        reads_no_file_whole,
        all_data_is_large,
        flip,
        not_finite,
        flip_at_start,
        flip_at_step,
        reductions_of_fully_shard,
        other_value,
        other_code,
        little_memory,
        failing_write,
        slow_failing_write,
        error_in_save,
        slow_write,
        slow_copy,
        ruined,
        slow_asked_to_stop,
        killed_in_save,
        renamed_in_save,
        renamed,
        cut_checkpoint,
        killed_in_rollback,
        late_failure,
    )
}
"""Faults that `run` plants in the last rank before it begins; words after the name are arguments."""
