"""In: ranks that are left, what they hold in memory. Out: what the next generation of ranks has loaded from it.
Does not assert anything: test_checkpoint_memory does. The ranks are real; who was lost is played."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoint_ranks import make_tensors
from rank_server import Place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from codescent.base.call import Call
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.checkpoint import checkpoints, reshard
from codescent.checkpoint.box import Box
from codescent.checkpoint.checkpoints import Checkpoints, Saved
from codescent.checkpoint.held import HeldTensors, MemoryCheckpoint, find, whole_tensors
from codescent.checkpoint.manifest import StoredTensor
from codescent.config.load import load
from codescent.train import open as opening
from codescent.train.generation import Generation
from codescent.train.hang_up import Alarm, Regroup
from codescent.train.loop import train
from codescent.train.open import OpenRun
from codescent.train.trainer import Trainer

Tensors = dict[str, torch.Tensor | Box]


def whole_model(step: int) -> dict[str, torch.Tensor]:
    """Tensors of many kinds. No two steps have equal elements in one place."""
    kinds = {
        "model.bool": torch.arange(90).reshape(9, 10).add(step).remainder(2).bool(),
        "model.transposed": torch.arange(600.0).reshape(20, 30).add(step / 8).t(),
        "model.deep": torch.arange(7 * 5 * 6, dtype=torch.float64).reshape(7, 5, 6) * step,
        "model.bytes": torch.arange(250, dtype=torch.uint8).reshape(10, 25) + step,
    }
    return make_tensors(step) | kinds


def divided(tensors: Mapping[str, torch.Tensor], part: int, parts: int, dim: int = 0) -> Tensors:
    """The part of a rank: rows (or columns) of each tensor with two dims or more; small tensors whole."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            found[name] = tensor.clone()
            continue
        size = -(-tensor.shape[dim] // parts)
        first = min(part * size, tensor.shape[dim])
        local = tensor.narrow(dim, first, min(size, tensor.shape[dim] - first)).clone()
        offsets = tuple(first if number == dim else 0 for number in range(tensor.dim()))
        found[name] = Box(local, tensor.shape, offsets)
    return found


def local(tensor: torch.Tensor | Box) -> torch.Tensor:
    return (tensor.local if isinstance(tensor, Box) else tensor).detach()


def spoiled(tensors: Tensors) -> Tensors:
    """The same places with other values."""
    return {
        name: Box(torch.full_like(one.local, 9), one.shape, one.offsets)
        if isinstance(one, Box)
        else one.new_full(one.shape, 9)
        for name, one in tensors.items()
    }


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names of the tensors that differ in a bit."""
    pairs = {name: (local(found[name]), local(tensor)) for name, tensor in expected.items()}
    return [name for name, (one, other) in pairs.items() if one.dtype != other.dtype or not raw(one).equal(raw(other))]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def described(tensors: Mapping[str, torch.Tensor], *more: str) -> dict[str, StoredTensor]:
    """What `whole_tensors` has found in the generation before; `more`: names of states of one rank."""
    known = whole_tensors_alone(dict(tensors))
    return known | {name: StoredTensor("F32", (3,), ()) for name in more}


def whole_tensors_alone(tensors: Tensors) -> dict[str, StoredTensor]:
    with patch("codescent.base.agreement.alone", lambda: True):
        return whole_tensors(tensors)


def pieces_of(bytes_: int) -> None:
    """At most so many bytes in a message and in a round; noted are the bytes that each round sends or receives."""
    reshard.PIECE_BYTES = bytes_
    whole = dist.batch_isend_irecv

    def noted(messages: list[dist.P2POp]) -> list[dist.Work]:
        for way in (dist.isend, dist.irecv):
            MOVED.append(sum(one.tensor.nbytes for one in messages if one.op is way))
        return whole(messages)

    dist.batch_isend_irecv = noted


MOVED: list[int] = []

Row = Sequence[Any]
"""What a rank holds: its step, its part and the number of parts; nothing: it holds nothing."""


def recovered(
    place: Place, rows: Sequence[Row], dim: int = 0, own: Sequence[str] = (), wants: str = ""
) -> dict[str, Any]:
    """Find a step in what the ranks hold, and load it into a layout of rows.

    Args:
        place: of this rank.
        rows: what each rank holds.
        dim: along which the tensors were divided before; now they are divided by rows.
        own: names of states of one rank that the ranks had before; each of the first ranks holds one of them.
        wants: a name for which this rank asks beside, such as its own state.
    """
    place.join()
    pieces_of(4096)
    held = None
    if row := rows[place.rank]:
        step, part, parts = row
        tensors = divided(whole_model(step), part, parts, dim)
        tensors |= {name: torch.full((3,), float(place.rank)) for name in own[place.rank : place.rank + 1]}
        known = described(whole_model(step), *own)
        held = HeldTensors(step, {"step": step, "of": place.rank}, tensors, known, 0.5)
    reasons: list[str] = []
    found = find(held, place.folder, reasons.append)
    answer: dict[str, Any] = {"reasons": reasons, "left": 0 if held is None else len(held.tensors)}
    if found is None:
        return answer
    expected = divided(whole_model(found.step), place.rank, place.ranks)
    expected |= {name: torch.full((3,), float(place.rank)) for name in own[place.rank : place.rank + 1]}
    target = spoiled(expected | ({wants.format(place.rank): torch.zeros(3)} if wants else {}))
    answer |= {"step": found.step, "where": found.where, "loss": found.validation_loss, "refused": []}
    try:
        answer["state"] = found.load(target)
    except UserError as error:
        return answer | {"refused": list(error.problems)}
    answer["differ"] = differing(target, expected)
    return answer | {"left": len(found.held.tensors), "largest": max(MOVED, default=0), "moved": sum(MOVED)}


def interrupted(place: Place) -> dict[str, Any]:
    """Three ranks hold all; a fourth one has come. While it is filled rank 1 dies. The others find the step again."""
    place.join()
    pieces_of(4096)
    expected: Tensors = dict(whole_model(5))
    known = described(whole_model(5))
    held = None if place.rank == 3 else HeldTensors(5, {}, dict(whole_model(5)), known)
    found = find(held, place.folder, lambda _: None)
    assert found is not None
    if place.rank == 1:
        die_in_round(2)
    answer: dict[str, Any] = {}
    try:
        found.load(spoiled(expected))
    except RuntimeError as error:
        answer["lost"] = type(error).__name__
        answer["held"] = len(found.held.tensors)
    dist.destroy_process_group()
    store = f"file://{place.folder}/store_again"
    dist.init_process_group("gloo", init_method=store, rank=[0, 2, 3].index(place.rank), world_size=3)
    again = find(found.held, place.folder, lambda _: None)
    assert again is not None
    target = spoiled(expected)
    again.load(target)
    return answer | {"differ": differing(target, expected), "left": len(again.held.tensors)}


def die_in_round(number: int) -> None:
    """This rank dies in a round of the exchange."""
    whole, rounds = reshard._send_and_receive, [0]

    def send_and_receive(*arguments: Any) -> None:
        rounds[0] += 1
        if rounds[0] == number:
            os._exit(0)
        whole(*arguments)

    reshard._send_and_receive = send_and_receive


def regrouped(place: Place, before: int, lost: int, words: list[str], then: list[str]) -> dict[str, Any] | None:
    """Train on `before` ranks, lose one, and go on with what the others hold, on all that are left and the new ones.

    Args:
        place: of this rank.
        before: number of ranks before; later ones are new.
        lost: number of the lost rank; -1: none.
        words, then: of the config, before and after.
    """
    held = first_run(place, before, words) if place.rank < before else None
    if place.rank == lost:
        return None
    living = [rank for rank in range(place.ranks) if rank != lost]
    return second_run(place, living, then, held)


def first_run(place: Place, before: int, words: list[str]) -> HeldTensors:
    """The run before. Returns what this rank holds at its end, with the tensors of its trainer."""
    ended: list[HeldTensors] = []
    whole = Generation.close

    def close(self: Generation) -> None:
        step, tensors = self.run.config.train.num_steps, self.trainer.tensors()
        ended.append(HeldTensors(step, self.run.state(step), tensors, whole_tensors(tensors)))
        whole(self)

    with patch.object(Generation, "close", close):
        take(place, "first", place.rank, before, words, resume=False)
    return ended[0]


def second_run(place: Place, living: list[int], words: list[str], held: HeldTensors | None) -> dict[str, Any]:
    """The run after. Its tensors are loaded from memory, then compared with those that the disk gives."""
    answer: dict[str, Any] = {"reasons": []}
    of_disk, load_ = opening.newest, OpenRun.load

    def newest(of_run: Checkpoints, *arguments: Any, **more: Any) -> Saved | None:
        answer["memory"] = None
        saved.append(of_disk(of_run, *arguments, **more))
        found = find(held, of_run.folder, answer["reasons"].append)
        return saved[0] if found is None else found

    saved: list[Saved | None] = []

    def loaded(self: OpenRun, trainer: Trainer) -> None:
        load_(self, trainer)
        if not isinstance(self.saved, MemoryCheckpoint):
            return
        tensors, disk = trainer.tensors(), saved[0]
        assert disk is not None
        assert (disk.step, disk.state) == (self.saved.step, self.saved.state)
        of_memory: Tensors = {name: local(one).clone() for name, one in tensors.items()}
        with torch.no_grad():
            for one in tensors.values():
                local(one).fill_(9)
        self.checkpoints.load(disk, tensors)
        found: Tensors = {name: local(one) for name, one in tensors.items()}
        answer.update(memory=self.saved.step, tensors=len(found), differ=differing(found, of_memory))
        answer["left"] = len(self.saved.held.tensors)

    with patch.object(opening, "newest", newest), patch.object(OpenRun, "load", loaded):
        take(place, "second", living.index(place.rank), len(living), words, resume=True)
    return answer


class Rung:
    """An alarm that rings: each error is that of a lost rank. `held`: what this rank had then."""

    rings, asks, call = True, False, Call()

    def __init__(self, held: HeldTensors | None) -> None:
        self.held = held


def interrupted_load(place: Place, words: list[str], then: list[str], source: str) -> dict[str, Any]:
    """A run goes on from memory or from the disk, and loses a rank while it loads. What is held then, and of what use.

    Args:
        place: of this rank. Who is lost is played: both ranks live.
        words, then: of the config, before and after.
        source: "memory" or "disk".
    """
    held = first_run(place, place.ranks, words)
    breaks = patch.object(reshard, "_send_and_receive", broken(reshard._send_and_receive, 2))
    if source == "disk":
        breaks = patch.object(checkpoints, "read_into", broken(checkpoints.read_into, 1))
    reshard.PIECE_BYTES = 4096
    with patch.object(Alarm, "current", Rung(held if source == "memory" else None)), breaks:
        try:
            take(place, "broken", place.rank, place.ranks, then, resume=True)
        except Regroup as error:
            found = error.held
    answer = {"held": None if found is None else [found.step, len(found.tensors)]}
    return answer | second_run(place, [*range(place.ranks)], then, found)


def flipped(place: Place, words: list[str], then: list[str]) -> None:
    """A run goes on from the memory of its ranks, in which rank 2 has another value than the others."""
    held = first_run(place, place.ranks, words)
    if place.rank == 2:
        with torch.no_grad():
            local(held.tensors["model.tok.weight"]).view(-1)[3] += 1
    with patch.object(Alarm, "current", Rung(held)):
        take(place, "second", place.rank, place.ranks, then, resume=True)


def broken(whole: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The same function; in one of its calls a rank is lost when it has done its work."""
    calls = [0]

    def act(*arguments: Any) -> Any:
        calls[0] += 1
        result = whole(*arguments)
        if calls[0] == call:
            raise RuntimeError("a rank is lost")
        return result

    return act


def take(place: Place, name: str, number: int, ranks: int, words: list[str], *, resume: bool) -> None:
    """One run of this process, as one of so many ranks. Rank 0 listens at a port of its own."""
    noted = place.folder / f"port-{name}-{place.number}"
    store_fd = None
    if number == 0:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        part = noted.with_suffix(".part")
        part.write_text(str(listener.getsockname()[1]))
        part.rename(noted)
        store_fd = os.dup(listener.fileno())
        listener.close()
    wait_until(noted.exists)
    rank = Rank(number, number, ranks, ranks, "127.0.0.1", int(noted.read_text()), store_fd=store_fd)
    config = load("run.toml", [*words, f"parallel.ranks={ranks}"]).config
    assert train(config, rank, resume=resume).exit_code == 0


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of_a_mesh(place: Place) -> str:
    """How a DTensor is refused."""
    place.join()
    spread = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    try:
        HeldTensors(1, {}, {"model.weight": spread}, described({"model.weight": torch.zeros(4, 2)}))
    except TypeError as error:
        return str(error)
    return ""


def disagreeing(place: Place) -> list[str]:
    """Ranks whose tensors of one name have other shapes: how that is refused."""
    place.join()
    try:
        whole_tensors({"model.weight": torch.zeros(3 + place.rank)})
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return []
