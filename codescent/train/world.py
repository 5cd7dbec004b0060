"""In: a rank's environment, the mesh. Out: this rank's device and process groups, and what ranks send each other.
Does not start processes (launch does) and moves no gradient or activation (strategies do)."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from codescent.base.agreement import from_first
from codescent.base.cores import available_cores, threads_per_rank
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.plan import AXES, Mesh, Plan
from codescent.train.devices import choose_device, name_of
from codescent.train.messages import Messages
from codescent.train.rendezvous import compare, meet

T = TypeVar("T")

DATASET_WAIT = timedelta(days=2)
"""Preparing a large corpus takes hours; ranks wait for it at the store, where no collective can time out."""


class World:
    """The ranks of a run as one of them sees them: device, store, and a process group for each axis of the mesh.

    Raises:
        UserError: the device is not there, or the ranks do not find each other.
    """

    def __init__(self, place: Rank, device: str, num_threads: int | None, timeout_s: float) -> None:
        self.place = place
        self.is_first = place.rank == 0  # prints and writes the run folder
        self.device = choose_device(device, place)
        self.timeout = timedelta(seconds=timeout_s)
        self.store = meet(place, self.timeout)
        neighbours = compare(self.store, place, device, name_of(self.device))
        self.leaders = neighbours.leaders
        self.num_threads = num_threads or _threads(neighbours.sharing)
        torch.set_num_threads(self.num_threads)
        _name_interface(place)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self.store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.mesh = Mesh(dp_replicate=place.world_size)
        self.groups: dict[str, dist.ProcessGroup] = {}

    def divide(self, plan: Plan) -> None:
        """Lay the mesh over the ranks: from here on there is a process group for each axis that the plan sends over."""
        world = dist.group.WORLD
        assert world is not None
        self.mesh, this_rank = plan.mesh, self.place.rank
        made = {tuple(range(self.mesh.world_size)): world}
        axes = dict.fromkeys([*AXES, *(record.axis for record in plan.traffic if record.axis)])
        # Every rank makes as many groups as every other, or torch would name the same group differently on two ranks.
        for axis in axes:
            ranks = self.mesh.group(axis, this_rank)
            if "[" not in axis:  # axes with the same ranks share a group
                if ranks not in made:
                    made[ranks] = self._new_group(ranks)
                self.groups[axis] = made[ranks]
            elif this_rank in ranks:
                self.groups[axis] = self._new_group(ranks)
            else:
                self._new_group((this_rank,))

    def messages(self, dtype: torch.dtype, shape: tuple[int, int]) -> Messages:
        """Point-to-point messages of this rank's pipeline stage."""
        return Messages(self.stage, self.groups, self.mesh.group("pp", self.place.rank), dtype, self.device, shape)

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank: which of the plan's programs it walks."""
        return self.mesh.coordinates(self.place.rank)["pp"]

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), self.timeout, use_local_synchronization=True)
        return group

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0 (JSON data), on every rank; what it raises there is raised on every rank."""
        return from_first(UserError, make)

    def all_agree(self, mine: bool) -> bool:
        """Whether `mine` is True on every rank."""
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def sum_over(self, values: torch.Tensor, axis: str) -> torch.Tensor:
        """`values` summed over the ranks of an axis, in place."""
        if self.mesh.degree(axis) > 1:
            dist.all_reduce(values, group=self.groups[axis])
        return values

    def in_turn(self, work: Callable[[], object]) -> None:
        """`work` on rank 0 first, then on the first rank of every other machine, then on the rest.

        On a shared file system the others find the files of rank 0. The ranks wait at the store, not in a collective,
        so that no timeout cuts long work short.

        Raises:
            UserError: on every rank, where one of those that work before others raises it.
        """
        for turn in ([0], [rank for rank in self.leaders if rank != 0]):
            keys = [f"in_turn{rank}" for rank in turn]
            if self.place.rank in turn:
                self.store.set(f"in_turn{self.place.rank}", json.dumps(_problems_of(work)))
            self.store.wait(keys, DATASET_WAIT)
            found = self.store.multi_get(keys) if keys else []
            problems = [problem for one in found for problem in json.loads(one)]
            if problems:
                raise UserError(*dict.fromkeys(problems))
        work()

    def close(self) -> None:
        """Destroy the process groups."""
        self.groups.clear()
        gc.collect()  # what still holds a group in a cycle, so that its threads end with it
        dist.destroy_process_group()
        del self.store  # rank 0's port is closed: a program that comes after this one may meet there


def _problems_of(work: Callable[[], object]) -> tuple[str, ...]:
    try:
        work()
    except UserError as error:
        return error.problems
    return ()


def _name_interface(place: Rank) -> None:
    """Have gloo use loopback where all ranks are on this machine; else it goes by the address of the host's name.

    Raises:
        UserError: ranks are on several machines, and the name is one of loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if place.local_world_size == place.world_size:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if os.uname().sysname == "Darwin" else "lo"
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"nothing ({error})"
    if address.startswith(("127.", "nothing")):
        raise UserError(
            f"rank {place.rank} of {place.world_size}: the ranks are on several machines, and the name of this one, "
            f"{name}, stands for {address}, where no other reaches it; set GLOO_SOCKET_IFNAME (with CUDA "
            "NCCL_SOCKET_IFNAME, too) to the network interface between them, such as eth0, for every rank"
        )


def _threads(sharing: int) -> int:
    """Threads of this rank: OMP_NUM_THREADS where it is set, else its share of the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    given = int(wanted) if wanted.isdigit() else 0
    return given or threads_per_rank(available_cores(), sharing)
