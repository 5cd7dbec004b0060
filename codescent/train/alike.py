"""In: tensors that several ranks hold as copies. Out: nothing if all copies are equal; else an error names the ranks.
Does not repair a difference (heal.py does), and does not check a tensor that only one rank holds."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from codescent.base.agreement import rank, world_size
from codescent.base.dtensors import is_dtensor
from codescent.base.errors import RunFailed
from codescent.checkpoint.box import Box
from codescent.plan import Plan, TensorPlan
from codescent.train.tensor_hash import tensor_hash

if TYPE_CHECKING:
    from codescent.train.optimize import Optimizer

Copies = dict[str, dict[str, torch.Tensor]]
"""Tensors of this rank: {part of the model: {name: tensor}}. Ranks that have a part with the same name hold copies of
its tensors."""

LISTED = 8
"""Largest number of ranks, and of tensors, that a message names. The event in the run folder names all tensors."""


@dataclass(frozen=True)
class Difference:
    """Ranks whose copies of some tensors differ.

    Attributes:
        ranks: those whose values differ from the majority's; every rank with a copy if there is no majority.
        hosts: host names of the first LISTED ranks of `ranks`.
        tensors: names of the tensors that differ; empty if no tensor differed when each was hashed alone.
        majority: more than half of the ranks with a copy, all with equal values; empty if no such group exists.
        devices: of the first LISTED ranks of `ranks`, such as "cuda:1".
        part: number of the part of the model.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    tensors: tuple[str, ...]
    majority: tuple[int, ...]
    devices: tuple[str, ...] = ()
    part: int = 0

    def __str__(self) -> str:
        devices = [f", {device}" if device not in ("", "cpu") else "" for device in self.devices or [""] * LISTED]
        places = zip(self.ranks, self.hosts, devices, strict=False)
        names = [f"rank {number} ({host}{device})" for number, host, device in places]
        who, what = _listed(names, len(self.ranks)), _listed(self.tensors[:LISTED], len(self.tensors))
        what = what or "an unknown tensor (a second comparison, one tensor at a time, found no difference)"
        if self.majority:
            majority = _listed(list(map(str, self.majority[:LISTED])), len(self.majority))
            return f"{who}: values differ from those of the majority (ranks {majority}): {what}"
        of_two = "; two copies have no majority: with three the odd one is known" if len(self.ranks) == 2 else ""
        return f"{who}: values differ, and no majority of ranks shows which are right: {what}{of_two}"


class Diverged(RunFailed):
    """Ranks hold different values of a tensor that should be equal on them. Every rank raises it with the same text."""

    def __init__(self, where: str, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        super().__init__(
            f"{where}: copies of the same tensors have diverged, and nothing is saved",
            *map(str, differences),
            "a likely cause is a fault of memory or processor, or machines of different kinds, which round "
            "differently: remove that machine and continue from the last checkpoint",
        )


def compare(copies: Copies, where: str) -> None:
    """Compare, by hash, the tensors that several ranks hold as copies. Collective.

    Args:
        copies: tensors of this rank. All ranks with a part of one name have the same tensor names in it.
        where: the run and step (or the call) that the error message begins with.

    Raises:
        Diverged: on every rank. heal.py copies the values of a majority.
    """
    if world_size() == 1:
        return
    mine = by_device(copies)
    ranks_by_hash: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, rows in enumerate(_all_gather(_hashes(mine))):
        for part, hashed in rows:
            ranks_by_hash[part][hashed].append(number)
    differing = {part: list(by_hash.values()) for part, by_hash in ranks_by_hash.items() if len(by_hash) > 1}
    if differing:
        raise Diverged(where, [_difference(part, groups, mine.get(part, {})) for part, groups in differing.items()])


def replicated_tensors(plan: Plan, this_rank: int, parts: Iterable[nn.Module], optimizer: Optimizer) -> Copies:
    """The tensors of this rank that other ranks hold too: weights, master weights, optimizer state.

    With weights sharded by ZeRO only the shards are compared: gathered weights do not exist between steps.
    """
    mesh, place = plan.mesh, plan.mesh.coordinates(this_rank)
    planned = {tensor.parameter.name: tensor for tensor in plan.held_by(plan.role(this_rank))}
    copies: Copies = defaultdict(dict)
    if plan.layout.served:  # one server holds each piece, and all workers fetch it
        return copies

    def add(tensor: TensorPlan, divided: Sequence[str], name: str, value: torch.Tensor) -> None:
        stages = plan.stages_of(tensor)
        agrees = name.startswith("model.") and plan.layout.agrees_at_ends
        own = [*divided, *(axis for axis in tensor.apart if not agrees)]
        if plan.copies(tensor, own) > 1:
            copies[f"stages {stages} {[(axis, place[axis]) for axis in own]}"][name] = value

    for weight, name, value in optimizer.named_state():
        tensor = planned[weight.name]
        boxed = isinstance(weight.named(value), Box)
        add(tensor, tensor.optimizer.axes(mesh) if boxed else (), name, value)
        if weight.tensor is not weight.master:
            add(tensor, tensor.weights.axes(mesh), f"model.{weight.name} ({tensor.weight_dtype})", weight.tensor)
    for name, parameter in (found for part in parts for found in part.named_parameters()):
        if not planned[name].parameter.trained:
            add(planned[name], planned[name].weights.axes(mesh), f"model.{name} (frozen)", parameter)
    return copies


def by_device(copies: Copies) -> dict[int, dict[str, torch.Tensor]]:
    """Local tensors by part and device type, which one 64-bit number identifies; tensors are in the order of names."""
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for part, tensors in copies.items():
        for name, tensor in sorted(tensors.items()):
            mine = tensor.to_local() if is_dtensor(tensor) else tensor
            found[_number(f"{part} {mine.device.type}")][name] = mine.detach()
    return found


def _hashes(parts: Mapping[int, Mapping[str, torch.Tensor]]) -> list[tuple[int, int]]:
    """The number and the hash of each part. The hash covers its tensors' names, shapes, dtypes and values.

    All hashes are launched before the first is read, so that the host waits for the device once.
    """
    running = [(part, _hash_of_names(tensors), tensor_hash(list(tensors.values()))) for part, tensors in parts.items()]
    return [(part, names ^ int(hashed)) for part, names, hashed in running]


def _hash_of_names(tensors: Mapping[str, torch.Tensor]) -> int:
    return _number(json.dumps([[name, *tensor.shape, str(tensor.dtype)] for name, tensor in tensors.items()]))


def _number(text: str) -> int:
    """A 64-bit hash of a text, as a signed integer that fits torch's int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _all_gather(rows: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
    """The rows of every rank, padded with zeros to the largest number of rows. Collective."""
    most = torch.tensor(len(rows))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    mine = torch.tensor([*rows, *[(0, 0)] * (int(most) - len(rows))], dtype=torch.int64).view(-1, 2)
    table = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(table, mine)
    return [one.tolist() for one in table]


def _difference(part: int, groups: list[list[int]], tensors: Mapping[str, torch.Tensor]) -> Difference:
    """Find which ranks, and which tensors of one part, differ. Collective.

    Args:
        part: its number.
        groups: the ranks that hold the part; ranks with equal hashes are in one list.
        tensors: this rank's tensors of the part, by name; empty if this rank does not hold the part.
    """
    largest, holders = max(groups, key=len), sorted(number for group in groups for number in group)
    majority = tuple(largest) if 2 * len(largest) > len(holders) else ()
    minority = [number for number in holders if number not in majority]
    senders = dict.fromkeys([*minority[:LISTED], largest[0]])
    mine: dict[str, Any] = {}
    if rank() in senders:
        mine = {"host": socket.gethostname(), "device": str(next(iter(tensors.values())).device)}
        mine["hashes"] = {name: _hashes({0: {name: tensor}})[0][1] for name, tensor in tensors.items()}
    received = {number: json.loads(_broadcast(number, json.dumps(mine).encode())) for number in senders}
    hashes = [one["hashes"] for one in received.values()]
    names = dict.fromkeys(name for one in hashes for name in one)
    differing = tuple(name for name in names if len({one.get(name) for one in hashes}) > 1)
    hosts = tuple(received[number]["host"] for number in minority[:LISTED])
    devices = tuple(received[number]["device"] for number in minority[:LISTED])
    return Difference(tuple(minority), hosts, differing, majority, devices, part)


def _broadcast(sender: int, data: bytes) -> bytes:
    """The `data` of rank `sender`, on every rank. Collective."""
    size = torch.tensor(len(data))
    dist.broadcast(size, sender)
    buffer = torch.frombuffer(bytearray(data.ljust(int(size)))[: int(size)], dtype=torch.uint8)
    dist.broadcast(buffer, sender)
    return buffer.numpy().tobytes()


def _listed(names: Sequence[str], total: int) -> str:
    """The names, separated by commas, then "and N more" if `total` is larger than their number."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
