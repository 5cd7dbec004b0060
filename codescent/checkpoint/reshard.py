"""In: which areas of tensors the ranks have in memory, and which ones they want. Out: the wanted tensors, filled.
Each part comes from this rank, or from one other. Does not choose a step (held.py does). Sends bytes, no pickle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from codescent.base.agreement import rank
from codescent.base.dtensors import is_dtensor
from codescent.base.ranges import begins
from codescent.checkpoint.areas import Area, cover, pieces, shared
from codescent.checkpoint.box import Box, LazyTensor, box_of

PIECE_BYTES = 64 << 20
"""Most bytes of a message, and of what a rank sends or receives at a time."""
TAG = 0x5E1D
"""No other messages of the default group have this tag."""
HOST = "cpu"

ItemBytes = Callable[[str], int]
"""Bytes of an element of a tensor, by its name."""


class Has(NamedTuple):
    """A part of a tensor that a rank has, or wants: the tensor's name, and the kind of the device with its memory."""

    name: str
    area: Area
    device: str

    @classmethod
    def of_json(cls, row: Sequence[Any]) -> Has:
        """Read what `json` has made of it."""
        name, area, device = row
        return cls(name, _area_of_json(area), device)


class Move(NamedTuple):
    """A part of a tensor that one rank sends to another one. `via`: the kind of device whose memory is sent from."""

    source: int
    target: int
    name: str
    area: Area
    via: str

    @classmethod
    def of_json(cls, row: Sequence[Any]) -> Move:
        """Read what `json` has made of it."""
        source, target, name, area, via = row
        return cls(source, target, name, _area_of_json(area), via)


def _area_of_json(row: Sequence[Sequence[int]]) -> Area:
    offsets, sizes = row
    return Area(tuple(offsets), tuple(sizes))


def area_of(name: str, tensor: torch.Tensor | Box) -> Area:
    """The part of the whole tensor that is in memory here. Raises TypeError: a kind of tensor that is not held so."""
    if isinstance(tensor, LazyTensor):
        raise TypeError(f"{name}: its values are computed while they are written, so they are in no memory")
    if is_dtensor(tensor):  # else the groups of a lost rank would live as long as the tensor
        raise TypeError(f"{name}: a DTensor keeps the process groups of its mesh; its part as a Box keeps none")
    return box_of(tensor).area


def has(tensors: Mapping[str, torch.Tensor | Box]) -> list[Has]:
    """What a rank with these tensors has, or wants. Parts without elements are left out."""
    rows = []
    for name, tensor in sorted(tensors.items()):
        area = area_of(name, tensor)
        if area.numel:
            rows.append(Has(name, area, box_of(tensor).local.device.type))
    return rows


def moves_for(ranks: Sequence[Sequence[Has]], wanted: Sequence[Sequence[Has]], item_bytes: ItemBytes) -> list[Move]:
    """Which rank sends what to whom, so that every rank gets what it wants. What it has itself is not sent.

    Of several ranks with a part, the one sends that has the fewest bytes to send so far. Together the ranks must have
    every element that is wanted.

    Args:
        ranks: what each rank has.
        wanted: what each rank wants.
        item_bytes: of a tensor.
    """
    holders: dict[str, dict[Area, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    own: dict[tuple[str, int], Area] = {}
    for holder, rows in enumerate(ranks):
        for name, area, device in rows:
            holders[name][area][holder], own[name, holder] = device, area
    sent_bytes, moves = [0] * len(ranks), list[Move]()
    wishes = [
        (target, row) for target, rows in enumerate(wanted) for row in rows if own.get((row.name, target)) != row.area
    ]
    for target, (name, area, device) in sorted(wishes, key=lambda wish: -wish[1].area.numel * item_bytes(wish[1].name)):
        first = own.get((name, target))
        areas = (*([] if first is None else [first]), *holders[name])
        parts = cover(area, areas)
        assert parts is not None, f"{name}: no rank has all of it"
        for index, part in parts:
            of = holders[name][areas[index]]
            if target not in of:
                source = min(of, key=lambda one: (sent_bytes[one], one))
                sent_bytes[source] += part.numel * item_bytes(name)
                moves.append(Move(source, target, name, part, device if of[source] == device else HOST))
    return sorted(moves, key=lambda one: (one.name, one.target, one.area))


@torch.no_grad()
def fill(
    tensors: Mapping[str, torch.Tensor | Box],
    held: dict[str, torch.Tensor | Box],
    moves: Sequence[Move],
    item_bytes: ItemBytes,
) -> None:
    """Fill the tensors of this rank, in place. Every rank calls it with the same moves.

    Args:
        tensors: of this rank, by name.
        held: what this rank has. A tensor is taken out as soon as it has been given, so that its memory is free, and
            the one that was filled takes its place. So a rank that is interrupted still has what it had.
        moves: of `moves_for`, of all ranks.
        item_bytes: of a tensor.
    """
    rounds = list(_rounds(moves, item_bytes))
    last = {piece.name: number for number, one in enumerate(rounds) for piece in one}
    ready: dict[int, list[str]] = defaultdict(list)  # by round: the names of which nothing is sent any more
    for name in sorted({*held, *tensors}):
        ready[last.get(name, -1)].append(name)
    for number in range(-1, len(rounds)):
        if number >= 0:
            _send_and_receive([one for one in rounds[number] if rank() in (one.source, one.target)], held, tensors)
        for name in ready[number]:
            _keep(name, held, tensors)


def _rounds(moves: Sequence[Move], item_bytes: ItemBytes) -> Iterator[list[Move]]:
    """Cut moves into pieces, and pieces into rounds, in which no rank sends or receives more than PIECE_BYTES."""
    now, busy = list[Move](), Counter[tuple[str, int]]()
    for move in moves:
        for area in pieces(move.area, max(1, PIECE_BYTES // item_bytes(move.name))):
            size, ends = area.numel * item_bytes(move.name), (("sends", move.source), ("receives", move.target))
            if now and any(busy[end] + size > PIECE_BYTES for end in ends):
                yield now
                now, busy = [], Counter()
            busy.update(dict.fromkeys(ends, size))
            now.append(move._replace(area=area))
    if now:
        yield now


def _send_and_receive(
    round_: Sequence[Move], held: Mapping[str, torch.Tensor | Box], tensors: Mapping[str, torch.Tensor | Box]
) -> None:
    """Send and receive this rank's pieces of a round. All receives are posted before the first send, for gloo."""
    for via in sorted({one.via for one in round_}):
        receives, sends, places = list[dist.P2POp](), list[dist.P2POp](), list[tuple[torch.Tensor, torch.Tensor]]()
        for one in (one for one in round_ if one.via == via):
            if one.target == rank():
                place = box_of(tensors[one.name]).values(one.area)
                direct = place.is_contiguous() and place.device.type == via
                memory = place if direct else torch.empty(place.shape, dtype=place.dtype, device=_device(place, via))
                receives.append(dist.P2POp(dist.irecv, _bytes(memory), one.source, tag=TAG))
                places.append((place, memory))
            else:
                part = box_of(held[one.name]).values(one.area)
                memory = part.to(_device(part, via)).contiguous()
                sends.append(dist.P2POp(dist.isend, _bytes(memory), one.target, tag=TAG))
        messages = [*receives, *sends]
        begins("send", memory=messages[0].tensor)
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for place, memory in places:
            if memory is not place:
                place.copy_(memory)


def _keep(name: str, held: dict[str, torch.Tensor | Box], tensors: Mapping[str, torch.Tensor | Box]) -> None:
    """Copy what this rank has of a tensor to its new place, and keep the new one in place of the old one."""
    old, new = held.pop(name, None), tensors.get(name)
    if new is None:
        return
    if old is not None and (both := shared(area_of(name, old), area_of(name, new))) is not None:
        box_of(new).values(both).copy_(box_of(old).values(both))
    held[name] = new


def _device(tensor: torch.Tensor, via: str) -> torch.device:
    return tensor.device if tensor.device.type == via else torch.device(via)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: backends lack some dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
