"""In: the environment variables of a launcher; without a launcher, the process is the only rank.
Out: this process's rank, device and process group; a device mesh for a given number of replicas.
Does not start processes and does not change a module (distribute.py does)."""

from __future__ import annotations

import atexit
import math
import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from codescent.base.agreement import alone, together
from codescent.base.counted import counted
from codescent.base.device_kinds import NAMES, kind_of
from codescent.base.ending import end, is_failing
from codescent.base.errors import UserError
from codescent.base.progress import ENDED, OwnPage
from codescent.base.rank import Rank
from codescent.launch import environment
from codescent.own import registry as _registry  # noqa: F401 - from now on wrappers of torch are noticed
from codescent.own import steps as _steps  # from now on the steps of optimizers are counted
from codescent.own.arguments import COUNT, SECONDS, TEXT, number, public, shown
from codescent.own.failure import ErrorHook, watch
from codescent.own.gather import gathered
from codescent.own.stopping import Stopping
from codescent.own.waits import Waits
from codescent.train.world import MEET_S, World

if TYPE_CHECKING:
    from codescent.own.average import AveragedGradients
    from codescent.own.batches import Batches
    from codescent.own.rounds import Rounds


class Ranks:
    """This process's rank and device, as `codescent.init` returns them. `with` closes the process group at its end.

    Attributes:
        rank: number of this process, from 0; 0 without a launcher.
        world_size: number of processes; 1 without a launcher.
        local_rank: number of this process among those of its machine.
        device: the device on which this rank computes: `module.to(ranks.device)`.
        devices: with `devices_per_rank` all devices of this rank; `device` is the first.
        is_first: whether this is rank 0, which prints.
    """

    def __init__(
        self, this_rank: Rank, device: str, timeout_s: float, meet_s: float, listen: str | None, devices_per_rank: int
    ) -> None:
        # A single process does not change the number of threads.
        num_threads = torch.get_num_threads() if this_rank.world_size == 1 else None
        self.world = World(
            this_rank, device, num_threads, timeout_s, shards_alone=True, meet_s=meet_s, listen=listen,
            devices_per_rank=devices_per_rank,
        )  # fmt: skip
        self.rank, self.world_size, self.local_rank = this_rank.rank, this_rank.world_size, this_rank.local_rank
        self.device, self.devices = self.world.device, self.world.devices
        # Wait until all ranks are connected: rank 0 might end at once, and the store ends with it.
        dist.all_reduce(torch.zeros(1))
        self.is_first = self.world.is_first
        self.closing: WeakSet[AveragedGradients | Batches | Rounds] = WeakSet()
        self._meshes: dict[int, DeviceMesh] = {}
        self._stopping = Stopping(self.world)
        self._has_failed = False  # an exception has left the `with` block
        self._hook = ErrorHook(this_rank, self.world.store, self.world.give_up)
        self._waits = Waits(self.world.store, this_rank)
        _steps.show_on(OwnPage.current)
        atexit.register(self._at_exit)

    @public("codescent: ranks.mean")
    def mean(self, value: float | torch.Tensor, count: float | torch.Tensor = 1) -> float:
        """The mean of one number over all ranks. Collective.

            ranks.mean(loss, count=len(targets))

        Args:
            value: of this rank. If it is a mean itself, such as a loss, give `count`.
            count: of how many samples (or tokens) it is the mean, on this rank. A rank with count 0 is left out,
                whatever its value. With unequal counts the result is the mean over all samples.

        Raises:
            UserError: on every rank: on one of them `value` or `count` is not one number, or `count` is negative or not
                finite; or all counts are 0.
        """
        mine, weight = number(value), number(count)
        wrong = mine is None or weight is None
        mine, weight = mine or 0.0, weight or 0.0
        weight = weight if 0 <= weight < math.inf else math.nan
        sums = torch.tensor([mine * weight if weight else 0.0, weight, wrong], dtype=torch.float64)
        dist.all_reduce(sums)
        if sums[2]:
            together(UserError, lambda: _refuse_no_number(value=value, count=count))
        if not sums[1] > 0:
            raise UserError("codescent: ranks.mean: count must be at least 0 on every rank, and above 0 on one")
        return float(sums[0] / sums[1])

    @public("codescent: ranks.gather")
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks along their first dim, in rank order, on every rank. Collective.

            predictions = ranks.gather(torch.cat(predictions_of_this_rank))

        The first dim may differ between ranks, and be 0. A number (a tensor without dims) counts as one row. With
        `codescent.validation_sampler`, one call after the loop gives the rows in the order of the dataset.

        Args:
            tensor: of any dtype, on the CPU or on this rank's device.

        Returns:
            A new tensor on the same device, without gradient.

        Raises:
            UserError: on every rank: dtypes or the other dims differ.
        """
        return gathered(tensor)

    @public("codescent: ranks.stopping")
    def stopping(self) -> bool:
        """Whether a signal or the time limit of the job asks this run to save and to stop. Collective.

            optimizer.step()
            if ranks.stopping():
                codescent.save("run/last", model, optimizer, epoch=epoch)
                ranks.stop()

        Every rank gets the same answer, also if one rank alone has received the signal. A call costs an all-reduce of
        one number between the hosts' processors. The first call begins to listen: before it signals do what they did
        before `init`, and most of them end the process. Afterwards they do nothing but being recorded.

        Raises:
            UserError: on every rank: it is first called in another thread than the main one, or CODESCENT_STOP_AT is no
                time.
        """
        return self._stopping.asked()

    @public("codescent: ranks.stop")
    def stop(self) -> NoReturn:
        """End this process after `stopping` was True and the script has saved. Every rank calls it.

        It raises SystemExit. The exit code is 75 if the job should be started again (SIGUSR1, SIGUSR2, the time limit),
        and 128 + the signal's number after another signal. Where CODESCENT_EXIT_FILE is set, the exit code is 0, and
        the file has this number.

        Raises:
            UserError: nothing has asked the ranks to stop.
        """
        self._stopping.stop()

    @public("codescent: ranks.section", name=TEXT)
    def section(self, name: str) -> AbstractContextManager[None]:
        """Name a part of the script. Not collective.

            with ranks.section("validation"):
                evaluate(model)

        Where the ranks are started by codescent, the launcher watches them. It learns how long steps and each named
        part take, and says who holds up the others if none moves for much longer. Name what takes longer than steps.

        Args:
            name: is shown up to its 24th byte.
        """
        return _steps.section(name)

    def print(self, *words: object) -> None:
        """Print on rank 0 only."""
        if self.is_first:
            print(*words, flush=True)

    @public("codescent: ranks.mesh", replicas=COUNT)
    def mesh(self, replicas: int) -> DeviceMesh:
        """A device mesh with `replicas` rows. The model is sharded over each row. One row gives a mesh of one dim."""
        if not kind_of(self.device.type).backend:
            raise UserError(
                f"codescent: ranks.mesh: {kind_of(self.device.type).label}s have no collectives in torch, so nothing "
                'is sharded there; leave out sharding, or call codescent.init("cpu")'
            )
        if self.world_size % replicas:
            raise UserError(
                f"codescent: ranks.mesh: replicas = {replicas}: must divide {counted(self.world_size, 'rank')}"
            )
        if replicas not in self._meshes:
            sizes = {"dp_replicate": replicas, "dp_shard": self.world_size // replicas}
            if replicas == 1:
                del sizes["dp_replicate"]
            kind, shape = self.device.type, tuple(sizes.values())
            self._meshes[replicas] = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
        return self._meshes[replicas]

    def close(self) -> None:
        """Close the process group. The end of the process calls it, too; a second call does nothing.

        Under NCCL it waits until all ranks call it, except while an exception is handled: then other ranks may go on.
        """
        global _ranks
        if _ranks is not self or is_failing():
            return
        _ranks = None
        atexit.unregister(self._at_exit)
        self._stopping.retire(fails=self._has_failed or hasattr(sys, "last_type"))  # an error that nobody has caught
        self._hook.retire()
        self._waits.close()
        _steps.show_on(None)
        fails = self._has_failed or sys.exc_info()[0] is not None
        if not fails and not hasattr(sys, "last_type"):
            self.world.at(ENDED)
        if self._stopping.is_obeyed and dist.is_initialized():
            self.world.leave()
        for user in self.closing:
            user.close()
        self.closing.clear()
        self._meshes.clear()
        if dist.is_initialized():  # the user's script may have destroyed the process group already
            self.world.close(alone=fails and not self._stopping.is_obeyed)

    def _at_exit(self) -> None:
        """The interpreter ends: after an error at once, without the other ranks."""
        end()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._stopping.is_obeyed:  # after an error, the hook first sends it to the other ranks
            self.close()
        self._has_failed = kind is not None and not self._stopping.is_obeyed


_ranks: Ranks | None = None


@public("codescent.init", device=TEXT, timeout_s=SECONDS, meet_s=SECONDS, listen=TEXT.or_none(), devices_per_rank=COUNT)
def init(
    device: str = "auto",
    timeout_s: float = 600.0,
    meet_s: float = MEET_S,
    listen: str | None = None,
    devices_per_rank: int = 1,
) -> Ranks:
    """Connect to the other ranks. Call it first. Without a launcher this process is the only rank.

    It reads the launcher's variables (torchrun, srun, mpirun and others: `codescent docs launch`), chooses the device,
    and creates the process group. A second call returns the same object. The process group is closed when the process
    ends. If an exception ends a rank, all ranks print which rank failed.

    Args:
        device: "cpu", "cuda", "xpu", "mps" or "auto". "auto" is the first kind of GPU that the machine has, one device
            for each local rank; else the CPU (`codescent docs devices`).
        timeout_s: how long a collective waits for the other ranks.
        meet_s: how long to wait until all ranks are there.
        listen: the network interface at which rank 0 listens, such as "eth0", or "all". None: loopback where all ranks
            are on one machine, else the interface of the route to MASTER_ADDR.
        devices_per_rank: GPUs of each rank, for a module that lies on several: `ranks.devices`. Local rank 0 has the
            first ones of the machine, local rank 1 the next. On the CPU each of them is the CPU.

    Raises:
        UserError: the launcher's variables contradict each other, the ranks cannot connect, the device does not exist,
            or there is a process group already.
    """
    global _ranks
    if _ranks is not None:
        if device not in ("auto", _ranks.device.type):
            raise UserError(f'codescent.init: device "{device}": an earlier call has chosen {_ranks.device.type}')
        if devices_per_rank not in (1, len(_ranks.devices)):
            raise UserError(
                f"codescent.init: devices_per_rank = {devices_per_rank}: an earlier call has chosen "
                f"{len(_ranks.devices)}"
            )
        return _ranks
    if dist.is_initialized():
        raise UserError(
            "codescent.init: there is a process group already: call it instead of "
            "torch.distributed.init_process_group, not after it"
        )
    hook = watch()
    this_rank = hook.this_rank = environment.read(os.environ) or Rank()
    if device not in NAMES:
        raise UserError(f'codescent.init: device "{device}"; must be one of {", ".join(NAMES)}')
    try:
        _ranks = Ranks(this_rank, device, timeout_s, meet_s, listen, int(devices_per_rank))
    except UserError as error:  # a user of `init` has no config: name its argument, not the config's key
        refused = UserError(*map(_in_words_of_init, error.problems))
        refused.everywhere = error.everywhere
        raise refused from error
    hook.retire()
    return _ranks


def _in_words_of_init(problem: str) -> str:
    for key, argument in {"train.device": "device", "parallel.meet_s": "meet_s", "parallel.listen": "listen"}.items():
        problem = problem.replace(key, f"codescent.init: {argument}")
    return problem


def joined(caller: str) -> Ranks:
    """The object that `init` has returned. Raises UserError, with the name of the caller, if `init` was not called."""
    if _ranks is None:
        raise UserError(f"codescent.{caller}: the ranks are not connected: call codescent.init() first")
    return _ranks


def joined_or_alone(caller: str) -> None:
    """Raise UserError if a launcher has started several ranks and `init` was not called: each would count as rank 0."""
    if _ranks is None and alone() and (place := environment.read(os.environ)) and place.world_size > 1:
        joined(caller)


def _refuse_no_number(**given: object) -> None:
    wrong = {name: value for name, value in given.items() if number(value) is None}
    if wrong:
        raise UserError(*(f"codescent: ranks.mean: {n}: must be one number, not {shown(v)}" for n, v in wrong.items()))


def everywhere(*tensors: torch.Tensor) -> None:
    """Copy rank 0's values into these tensors on every rank. Two elements of a tensor must not share memory."""
    if dist.get_world_size() == 1:  # on a GPU a message would start its backend
        return
    with torch.no_grad():
        for tensor in tensors:
            sent = tensor.detach().contiguous()  # backends need contiguous memory
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)  # as bytes: backends do not know every dtype
            if not tensor.is_contiguous():
                tensor.detach().copy_(sent)
