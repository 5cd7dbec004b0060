"""In: a module whose ranks train apart or compress gradients, its optimizer state. Out: what a checkpoint has of each.
Does not write or read files (saved.py does)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codescent.base.agreement import rank, together, world_size
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES, TORCH_DTYPE
from codescent.own.average import wide_name
from codescent.own.registry import Distributed

Names = Mapping[Tensor, str]
SHARED = "outer."
"""Begin of the names of state that ranks hold alike: anchors and the outer momentum."""


def own_name(name: str, number: int | None = None) -> str:
    """The name in a checkpoint of a rank's own copy of a tensor (None: of this rank's)."""
    return f"replica.{rank() if number is None else number}.{name}"


def refuse_lent(known: Distributed | None, function: str) -> None:
    """Raise UserError if the module has means in the place of this rank's weights. `function`: the user's call."""
    if known is not None and known.rounds is not None and known.rounds.is_lent:
        raise UserError(
            f"codescent.{function}: inside of codescent.averaged the weights are means: end the `with` block first"
        )


@contextmanager
def as_means(known: Distributed, tensors: dict[str, Tensor], names: Names) -> Iterator[dict[str, Tensor]]:
    """While this context is open, `tensors` have their means over ranks; weights and buffers in place. Collective.

    So a plain tensor is the same on all ranks. Of state that is no floating-point number: the largest.

    Args:
        tensors: of a checkpoint, by name. Anchors and momentum are added; optimizer state is replaced.
        names: of the module's parameters and buffers, in `tensors`.

    Yields:
        This rank's own values where ranks may differ, by the names of `own_name`.

    Raises:
        UserError: on every rank: optimizer state of one name has another shape or dtype on another rank.
    """
    own, rounds = known.averaged.state(), known.rounds
    if rounds is None:
        yield {own_name(name): value for name, value in own.items()}
        return
    rounds.begin()
    own |= rounds.own()
    if world_size() > 1:
        states = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.")}
        own |= states
        tensors.update(_means(states))
    with rounds.lent() as values:
        own |= {names[tensor]: value for tensor, value in values.items() if names.get(tensor) in tensors}
        tensors.update(rounds.shared(_parameters(names)))
        yield {own_name(name): value for name, value in own.items()}


def record(known: Distributed, values: list[Any]) -> dict[str, Any]:
    """The JSON data of a checkpoint. `values`: of each rank, the optimizer state that is no tensor."""
    done = known.rounds.done if known.rounds is not None else 0
    return {"ranks": world_size(), "done": done, "options": known.options.described(), "values": values}


class Continued:
    """What a module takes from the checkpoint of ranks that train apart or compress gradients.

    Args:
        known: how the module is distributed; None: without options of this kind, or not at all.
        there: the `record` of the checkpoint; None: it has none.
        stored: the names of its tensors.
    """

    def __init__(self, known: Distributed | None, there: dict[str, Any] | None, stored: Collection[str]) -> None:
        self.known, self.there, self.stored = known, there, stored
        self.is_same = known is not None and there is not None and there["ranks"] == world_size()
        has_own = self.is_same and world_size() > 1 and known is not None and known.rounds is not None
        self.optimizer = own_name("optimizer.") if has_own else "optimizer."

    def refuse(self) -> None:
        """Raise UserError if module and checkpoint have options, which differ."""
        if self.known is None or self.there is None:
            return
        mine, theirs = self.known.options.described(), self.there["options"]
        if problems := [
            f"codescent.load: {name} = {mine[name]}, but {theirs[name]} in the checkpoint: give codescent.distribute "
            "the same, or load the weights alone (without the optimizer)"
            for name in mine
            if mine[name] != theirs[name]
        ]:
            raise UserError(*problems)

    def is_optional(self, name: str) -> bool:
        """Whether a tensor of the checkpoint may stay unread: there is no place for it here, or an own copy is read."""
        if self.there is None:
            return False
        own = (own_name(name, number) for number in range(self.there["ranks"] if self.is_same else 0))
        return name.startswith((SHARED, "replica.")) or any(one in self.stored for one in own)

    def name(self, name: str) -> str:
        """The name of what this rank loads: its own copy if there is one, else what all ranks share."""
        return own_name(name) if self.is_same and own_name(name) in self.stored else name

    def tensors(self, names: Names) -> dict[str, Tensor]:
        """Tensors of the module's rounds and wire to load into, by their names in the checkpoint."""
        if self.known is None or self.there is None:
            return {}
        rounds = self.known.rounds
        found = rounds.shared(_parameters(names)) if rounds is not None else {}
        if self.is_same:
            found |= {own_name(name): value for name, value in _unsent(self.known).items()}
        return {name: value for name, value in found.items() if name in self.stored}

    def values(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Optimizer state that is no tensor. `shared`: that of rank 0."""
        return dict(self.there["values"][rank()]) if self.there is not None and self.is_same else shared

    def end(self) -> None:
        """After the load: continue the round, or begin one."""
        if self.known is None:
            return
        has_anchors = any(name.startswith(SHARED) for name in self.stored)
        if (rounds := self.known.rounds) is not None:
            if self.there is None or (rounds.outer is not None and not has_anchors):
                rounds.restart()
            else:
                rounds.done, rounds.has_begun = self.there["done"], True
        if not self.is_same:
            for name, value in _unsent(self.known).items():
                if name.endswith("residual"):  # a projector of PowerSGD must not be 0
                    value.zero_()


def _parameters(names: Names) -> dict[Tensor, str]:
    """Names of a checkpoint's weights, without what says that they are weights."""
    return {tensor: name.removeprefix("model.") for tensor, name in names.items()}


def _unsent(known: Distributed) -> dict[str, Tensor]:
    """What the wire of weights or gradients keeps on this rank, by name."""
    return {**known.averaged.state(), **(known.rounds.own() if known.rounds is not None else {})}


def _means(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means over the ranks that have a tensor, by name; any of the ranks may lack some. Collective."""
    facts = {name: [list(t.shape), DTYPE_CODES[t.dtype], t.device.type] for name, t in mine.items()}
    everyone = together(UserError, lambda: facts)
    union: dict[str, list[Any]] = {}
    for one in everyone:
        for name, fact in one.items():
            if union.setdefault(name, fact) != fact:
                raise UserError(f"codescent.save: {name}: {union[name]} on one rank, {fact} on another")
    found: dict[str, Tensor] = {}
    here = next((tensor.device for tensor in mine.values() if tensor.device.type != "cpu"), torch.device("cpu"))
    for kind in dict.fromkeys((code, where) for _, code, where in union.values()):
        names = [name for name, (_, code, where) in union.items() if (code, where) == kind]
        dtype, device = CODE_DTYPES[kind[0]], here if kind[1] != "cpu" else torch.device("cpu")
        held = [mine[n] if n in mine else torch.zeros(union[n][0], dtype=dtype, device=device) for n in names]
        holders = [sum(name in one for one in everyone) for name in names]
        for name, tensor, count in zip(names, _combined(held), holders, strict=True):
            # Of equal numbers the mean over the holders is exact: such as the steps that Adam counts.
            found[name] = (tensor / count).to(dtype) if dtype.is_floating_point else tensor.to(dtype)
    return found


def _combined(tensors: list[Tensor]) -> list[Tensor]:
    """Sums over ranks in the wide dtype; of whole numbers, the largest."""
    floating = tensors[0].is_floating_point()
    wide = TORCH_DTYPE[wide_name(tensors[0].dtype)] if floating else torch.int64
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors])
    dist.all_reduce(flat, dist.ReduceOp.SUM if floating else dist.ReduceOp.MAX)
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
