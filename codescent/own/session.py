"""In: the environment that a launcher has set, or none. Out: this process's place among the ranks, and what they share.
Does not start processes, and touches no module: `distribute` does."""

from __future__ import annotations

import atexit
import math
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.launch import environment
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.own.average import AveragedGradients

DEVICES = ("auto", "cpu", "cuda")
FAILED = "codescent_failed"
"""Key of the store under which the first rank that fails says why."""


class Ranks:
    """This process among the others: what `codescent.init` returns. May be used in `with`, which leaves the ranks.

    Attributes:
        rank, world_size: number of this process, from 0, and of processes; 0 of 1 where no launcher started it.
        local_rank: number of this process among those of its machine.
        device: where this rank computes: `module.to(ranks.device)`.
        is_first: whether this is rank 0, the one that prints.
    """

    def __init__(self, place: Rank, device: str, timeout_s: float) -> None:
        # One process alone keeps the threads that torch, or the user, has chosen.
        num_threads = torch.get_num_threads() if place.world_size == 1 else None
        self.world = World(place, device, num_threads, timeout_s)
        self.rank, self.world_size, self.local_rank = place.rank, place.world_size, place.local_rank
        self.device = self.world.device
        # All are connected when the first one goes on: it might end at once, and the store with it.
        dist.all_reduce(torch.zeros(1))
        self.is_first = self.world.is_first
        self.closing: WeakSet[AveragedGradients] = WeakSet()
        self._meshes: dict[int, DeviceMesh] = {}
        self._hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.close)

    def mean(self, value: float | torch.Tensor) -> float:
        """The mean over the ranks of one number of each. Collective: every rank calls it."""
        number = torch.tensor(float(value.detach() if isinstance(value, torch.Tensor) else value), dtype=torch.float64)
        dist.all_reduce(number)
        return float(number) / self.world_size

    def print(self, *words: object) -> None:
        """`print` on the first rank alone."""
        if self.is_first:
            print(*words, flush=True)

    def mesh(self, replicas: int) -> DeviceMesh:
        """The ranks as `replicas` rows, each of which divides one model; a single row is a mesh of one dim."""
        if replicas not in self._meshes:
            sizes = {"dp_replicate": replicas, "dp_shard": self.world_size // replicas}
            if replicas == 1:
                del sizes["dp_replicate"]
            kind, shape = self.device.type, tuple(sizes.values())
            self._meshes[replicas] = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
        return self._meshes[replicas]

    def close(self) -> None:
        """Leave the ranks. Called at the end of the process, if not before; a second call does nothing."""
        global _ranks
        if _ranks is not self:
            return
        _ranks = None
        atexit.unregister(self.close)
        if sys.excepthook == self._failed:
            sys.excepthook = self._hook
        for user in self.closing:
            user.close()
        self.closing.clear()
        self._meshes.clear()
        if dist.is_initialized():  # the user's script may have ended it by itself
            self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # with an error on its way, the others are to be told of it first
            self.close()

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error as ever, then which rank failed first.

        The other ranks end when this rank's sockets close; the error of gloo or NCCL names only an address.
        """
        self._hook(kind, error, trace)
        if self.world_size == 1 or issubclass(kind, KeyboardInterrupt):
            return
        mine = f"rank {self.rank} failed: {kind.__name__}: {error}"
        try:
            first = self.world.store.compare_set(FAILED, "", mine).decode()
            words = mine if first == mine else f"rank {self.rank} ends because {first}"
        except RuntimeError:  # the store is gone, and with it who serves it
            words = f"{mine}; rank 0 was gone before: look there, too"
        print(f"codescent: {words}", file=sys.stderr, flush=True)


_ranks: Ranks | None = None


def init(device: str = "auto", timeout_s: float = 600.0) -> Ranks:
    """Join the other ranks, or be one rank alone where no launcher started this process. Call it first.

    Reads what the launcher has set (torchrun, srun, mpirun and others: docs/launch.md), chooses the device, connects.
    A second call returns the same. The ranks are left when the process ends; after an exception all say whose it was.

    Args:
        device: "auto" takes CUDA where the machine has it, one device for each local rank; else "cpu" or "cuda".
        timeout_s: how long a collective waits for the other ranks.

    Raises:
        UserError: the launcher's variables contradict each other, the ranks do not meet, the device is not there, or
            there is a process group already.
    """
    global _ranks
    if device not in DEVICES:
        raise UserError(f'codescent.init: device "{device}"; must be one of {", ".join(DEVICES)}')
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UserError(f"codescent.init: timeout_s = {timeout_s}; must be a number of seconds above 0")
    if _ranks is not None:
        if device not in ("auto", _ranks.device.type):
            raise UserError(f'codescent.init: device "{device}": this rank has been on {_ranks.device.type} since')
        return _ranks
    if dist.is_initialized():
        raise UserError(
            "codescent.init: there is a process group already: call it instead of "
            "torch.distributed.init_process_group, not after it"
        )
    try:
        _ranks = Ranks(environment.read(os.environ) or Rank(), device, timeout_s)
    except UserError as error:  # who has no config has no key of it
        raise UserError(
            *(problem.replace("train.device", "codescent.init: device") for problem in error.problems)
        ) from error
    return _ranks


def joined(caller: str) -> Ranks:
    """What `init` has returned; UserError if it was not called."""
    if _ranks is None:
        raise UserError(f"codescent.{caller}: the ranks are not joined: call codescent.init() first")
    return _ranks


def everywhere(*tensors: torch.Tensor) -> None:
    """Rank 0's values of these tensors, on every rank, in place. No two elements of one may share memory."""
    with torch.no_grad():
        for tensor in tensors:
            sent = tensor.detach().contiguous()  # backends send memory as it lies, gaps and all
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)  # as bytes: not every dtype is one of theirs
            if not tensor.is_contiguous():
                tensor.detach().copy_(sent)
