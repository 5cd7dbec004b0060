"""In: tensors of each rank, by the part of the model that they are. Out: nothing, or which ranks' copies differ.
Does not mend a difference, and cannot see one in what a single rank holds."""

from __future__ import annotations

import hashlib
import json
import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from codescent.base.agreement import rank, world_size
from codescent.base.errors import RunFailed
from codescent.checkpoint.box import Box
from codescent.plan import AXES, Plan, TensorPlan
from codescent.train.tensor_hash import tensor_hash

if TYPE_CHECKING:
    from codescent.train.optimize import Optimizer

Held = dict[str, dict[str, torch.Tensor]]
"""Tensors of this rank by name, by the part of the model that they are. Ranks with equal parts hold them alike."""

LISTED = 8
"""Ranks and tensors that a message names; the event in the run folder has all the tensors."""


@dataclass(frozen=True)
class Difference:
    """Ranks that do not hold some tensors as others do.

    `hosts` are those of the first ranks of `ranks`. `majority`: ranks that hold them alike, more than half of those
    that hold them; empty: there is no majority, and `ranks` are all of them. `tensors` may be empty: when each was read
    by itself there was no difference any more.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    tensors: tuple[str, ...]
    majority: tuple[int, ...]

    def __str__(self) -> str:
        names = [f"rank {number} ({host})" for number, host in zip(self.ranks, self.hosts, strict=False)]
        who, what = _listed(names, len(self.ranks)), _listed(self.tensors[:LISTED], len(self.tensors))
        what = what or "some tensor, which had the same bits when it was read again"
        if self.majority:
            those = _listed(list(map(str, self.majority[:LISTED])), len(self.majority))
            return f"{who}: other values than on the ranks that hold the same ({those}): {what}"
        return f"{who}: different values, and no majority says which ones are right: {what}"


class Diverged(RunFailed):
    """Ranks hold different values of what they should hold alike. Raised on every rank, with the same words."""

    def __init__(self, where: str, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            f"{where}: copies of the same tensors have diverged, and nothing is saved",
            *map(str, differences),
            "a fault of memory or processor does this, or machines of different kinds, which round differently: leave "
            "that machine out, and continue from the last checkpoint",
        )


def compare(held: Held, where: str) -> None:
    """Compare what the ranks hold alike, by its hash. Collective.

    Args:
        held: this rank's; the ranks with a part of that name hold tensors of the same names in it.
        where: what is being done, for the message.

    Raises:
        Diverged: on every rank.
    """
    if world_size() == 1:
        return
    mine = _by_device(held)
    ranks_by_hash: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, rows in enumerate(_gathered(_hashes(mine))):
        for part, hashed in rows:
            ranks_by_hash[part][hashed].append(number)
    differing = {part: list(camps.values()) for part, camps in ranks_by_hash.items() if len(camps) > 1}
    if differing:
        raise Diverged(where, [_difference(camps, mine.get(part, {})) for part, camps in differing.items()])


def held_alike(plan: Plan, this_rank: int, parts: Iterable[nn.Module], optimizer: Optimizer) -> Held:
    """What this rank of a run holds and others hold too: weights, master weights, the optimizer's state.

    Where zero shards, forward reads weights that are gathered for the step: between steps there are the shards alone.
    """
    mesh, place = plan.mesh, plan.mesh.coordinates(this_rank)
    planned = {tensor.parameter.name: tensor for tensor in plan.held_by(place["pp"])}
    held: Held = defaultdict(dict)

    def hold(tensor: TensorPlan, divided: Sequence[str], name: str, value: torch.Tensor) -> None:
        stages = plan.stages_of(tensor)
        copies = math.prod(mesh.degree(axis) for axis in AXES if axis not in ("pp", *divided)) * len(stages)
        if copies > 1:
            held[f"stages {stages} {[(axis, place[axis]) for axis in divided]}"][name] = value

    for weight, name, value in optimizer.held():
        tensor = planned[weight.name]
        boxed = isinstance(weight.named(value), Box)
        hold(tensor, tensor.optimizer.axes(mesh) if boxed else (), name, value)
        if weight.tensor is not weight.master:
            hold(tensor, tensor.weights.axes(mesh), f"model.{weight.name} ({tensor.weight_dtype})", weight.tensor)
    for name, parameter in (found for part in parts for found in part.named_parameters()):
        if not planned[name].parameter.trained:
            hold(planned[name], planned[name].weights.axes(mesh), f"model.{name} (frozen)", parameter)
    return held


def _by_device(held: Held) -> dict[int, dict[str, torch.Tensor]]:
    """This rank's memory of each part on each kind of device, by a number; its tensors are in the order of names."""
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for part, tensors in held.items():
        for name, tensor in sorted(tensors.items()):
            mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found[_number(f"{part} {mine.device.type}")][name] = mine.detach()
    return found


def _hashes(parts: Mapping[int, Mapping[str, torch.Tensor]]) -> list[tuple[int, int]]:
    """The hash of each part, which its tensors' names and shapes are in; a device is waited for once they all run."""
    running = [(part, _names(tensors), tensor_hash(list(tensors.values()))) for part, tensors in parts.items()]
    return [(part, names ^ int(hashed)) for part, names, hashed in running]


def _names(tensors: Mapping[str, torch.Tensor]) -> int:
    return _number(json.dumps([[name, *tensor.shape, str(tensor.dtype)] for name, tensor in tensors.items()]))


def _number(text: str) -> int:
    """64 bits that stand for a text, as torch's int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _gathered(rows: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
    """The rows of every rank, filled up with zeros to as many as the longest has."""
    most = torch.tensor(len(rows))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    mine = torch.tensor([*rows, *[(0, 0)] * (int(most) - len(rows))], dtype=torch.int64).view(-1, 2)
    table = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(table, mine)
    return [one.tolist() for one in table]


def _difference(camps: list[list[int]], tensors: Mapping[str, torch.Tensor]) -> Difference:
    """Find the ranks and the tensors of one part. Collective; `tensors` are this rank's, if it has that part.

    Args:
        camps: the ranks that hold the part, together where their hashes are equal.
        tensors: by name.
    """
    largest, holders = max(camps, key=len), sorted(number for camp in camps for number in camp)
    majority = tuple(largest) if 2 * len(largest) > len(holders) else ()
    odd = [number for number in holders if number not in majority]
    speakers = dict.fromkeys([*odd[:LISTED], largest[0]])
    mine: dict[str, Any] = {}
    if rank() in speakers:
        mine = {"host": socket.gethostname()}
        mine["hashes"] = {name: _hashes({0: {name: tensor}})[0][1] for name, tensor in tensors.items()}
    said = {number: json.loads(_heard(number, json.dumps(mine).encode())) for number in speakers}
    hashes = [one["hashes"] for one in said.values()]
    names = dict.fromkeys(name for one in hashes for name in one)
    differing = tuple(name for name in names if len({one.get(name) for one in hashes}) > 1)
    return Difference(tuple(odd), tuple(said[number]["host"] for number in odd[:LISTED]), differing, majority)


def _heard(speaker: int, data: bytes) -> bytes:
    """What one rank hands in, on every rank."""
    size = torch.tensor(len(data))
    dist.broadcast(size, speaker)
    buffer = torch.frombuffer(bytearray(data.ljust(int(size)))[: int(size)], dtype=torch.uint8)
    dist.broadcast(buffer, speaker)
    return buffer.numpy().tobytes()


def _listed(names: Sequence[str], total: int) -> str:
    """Names, and how many more there are."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
