"""In: a rank, a number of ranks, a device. Out: the real World of that rank alone, on torch's fake process group.
Does not send anything. The device "meta" stands for one that is no CPU; torch's fully_shard takes it for such a one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
from torch.utils._pytree import tree_map_only

from codescent.base.rank import LOOPBACK, Rank
from codescent.meeting.compared import Topology
from codescent.meeting.rendezvous import Meeting
from codescent.meeting.store import LocalStore
from codescent.strategies import shards
from codescent.train import world

digest = functools.cache(world.code_digest)


class Stream:
    """What fully_shard asks of a stream. Nothing runs beside anything here."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def record_event(self) -> Event:
        """An event that has happened."""
        return Event()

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""


class Event:
    """What fully_shard asks of an event."""

    def record(self, stream: Stream | None = None) -> None:
        """It happens at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


STREAM = Stream()


@contextmanager
def _current(stream: Stream) -> Iterator[None]:
    yield


META_AS_A_DEVICE = SimpleNamespace(Stream=Stream, Event=Event, stream=_current, current_stream=lambda *_: STREAM)
"""In place of the module torch.cuda: fully_shard looks for `torch.meta`."""


COLLECTIVES = (
    "allreduce_",
    "broadcast_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "send",
    "recv_",
    "alltoall_base_",
)
"""torch's names of what the strategies and fully_shard send."""


@functools.cache
def kernels_for_meta() -> torch.library.Library:
    """torch has no kernels for meta tensors: they hand memory of the host to the process group."""
    library = torch.library.Library("c10d", "IMPL", "Meta")
    for name in COLLECTIVES:
        kernel = functools.partial(_collective, getattr(torch.ops.c10d, name))
        library.impl(name, kernel, allow_override=True)  # torch 2.11 has kernels that send nothing
    return library


def _collective(operator: Any, *arguments: Any) -> Any:
    given: dict[int, torch.Tensor] = {}

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        one = torch.empty(tensor.shape, dtype=tensor.dtype)
        given[id(one)] = tensor
        return one

    arguments = tree_map_only(torch.Tensor, on_host, arguments)
    return tree_map_only(torch.Tensor, lambda one: given[id(one)], operator(*arguments))


@contextmanager
def fake_world(rank: int, ranks: int, device: str) -> Iterator[world.World]:
    """A block with this World. Another one may follow it."""
    kernels_for_meta()
    this_rank = Rank(rank, rank, ranks, ranks, LOOPBACK)
    with patch.dict(dist.Backend.backend_capability, {dist.Backend.FAKE: ["cpu", "meta"]}):
        with patch.multiple(
            world,
            choose_devices=lambda *_, **__: (torch.device(device),),
            unique_name=lambda _: device,
            meet=lambda *_: Meeting(LocalStore(timedelta(seconds=60))),
            compare=lambda *_: Topology([0], 1),
            backends=lambda *_, **__: (dist.Backend.FAKE, None),
            code_digest=digest,
            watch=lambda *_: None,
        ):
            one = world.World(this_rank, "auto", torch.get_num_threads(), 60.0)
        try:
            yield one
        finally:
            one.close()


@contextmanager
def fully_shard_on_meta() -> Iterator[None]:
    """A block in which fully_shard works on the meta device as it does on CUDA: by its own collectives, on streams."""
    with (
        patch.object(torch, "meta", META_AS_A_DEVICE, create=True),
        patch.object(shards, "_streaming_kind", lambda: "cuda"),
        patch.object(_fully_shard, "_get_device_from_mesh", lambda _: torch.device("meta")),
        patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),  # no driver could lock pages here
    ):
        yield
