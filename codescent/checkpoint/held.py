"""In: what the ranks that are left hold in memory of a step. Out: a checkpoint in memory, which any layout loads.
Does not know a model, a layout or who was lost (train/ does), and reads no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from codescent.base.agreement import decided, rank, together
from codescent.base.torch_dtypes import CODE_DTYPES, DTYPE_CODES
from codescent.checkpoint.areas import Area, cover, whole
from codescent.checkpoint.box import Box
from codescent.checkpoint.checkpoints import Checkpoints, Saved
from codescent.checkpoint.judged import misfits, refuse
from codescent.checkpoint.manifest import CheckpointError, StoredTensor
from codescent.checkpoint.reshard import Has, Move, area_of, fill, has, moves_for


@dataclass
class HeldTensors:
    """What a rank keeps in memory of a step, to give it to the next generation.

    Attributes:
        step: number of steps done.
        state: JSON data, as of a checkpoint.
        tensors: of this rank by name, in the layout that it had. References: nothing is copied.
        whole: dtype and shape of all tensors of all ranks: see `whole_tensors`.
        validation_loss: of the step, as of a checkpoint.

    Raises TypeError: a tensor is a LazyTensor or a DTensor. Raises ValueError: a tensor is not one of `whole`.
    """

    step: int
    state: Mapping[str, Any]
    tensors: dict[str, torch.Tensor | Box]
    whole: Mapping[str, StoredTensor]
    validation_loss: float | None = None

    def __post_init__(self) -> None:
        self.tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            area_of(name, tensor)
            if (known := self.whole.get(name)) != _described(tensor):
                raise ValueError(f"{name}: {_described(tensor)} in memory, {known} among the tensors of all ranks")


def whole_tensors(tensors: Mapping[str, torch.Tensor | Box]) -> dict[str, StoredTensor]:
    """Dtype and shape of the tensors of all ranks, by name. Collective.

    To be asked while all ranks live: those that are left cannot know which tensors a lost one had alone.

    Raises RanksFailed: ranks have tensors of one name with other dtypes or shapes.
    """

    def describe() -> list[list[Any]]:
        return [[name, one.dtype, one.shape] for name, one in _all_described(tensors).items()]

    return _whole_of_json(decided(CheckpointError, describe, _merged))


def _merged(ranks: Sequence[Sequence[Sequence[Any]]]) -> list[Sequence[Any]]:
    found: dict[str, Sequence[Any]] = {}
    for number, row in ((number, row) for number, rows in enumerate(ranks) for row in rows):
        if found.setdefault(row[0], row) != row:
            raise ValueError(f"{row[0]}: rank {number} holds it in another shape or dtype")
    return [row for _, row in sorted(found.items())]


@dataclass(frozen=True)
class MemoryCheckpoint(Saved):
    """A checkpoint that is in the memory of several ranks. `path`: where it would be on the disk; nothing is there.

    Attributes:
        held: what this rank has of it. While it is loaded, the loaded tensors take the place of those before, so after
            another loss it is held for the next generation. When it is loaded, nothing is held.
    """

    held: HeldTensors
    _ranks: Sequence[Sequence[Has]] = field(repr=False)  # what each rank has; on rank 0

    @property
    def where(self) -> str:
        """See Saved."""
        return f"the memory of the ranks at step {self.step}"

    def load_into(self, tensors: Mapping[str, torch.Tensor | Box], checkpoints: Checkpoints) -> None:
        """See Saved. No file is read."""
        self.load(tensors)

    def load(self, tensors: Mapping[str, torch.Tensor | Box]) -> dict[str, Any]:
        """Load all tensors in place, in their current layout. Collective, once. See `Checkpoints.load`.

        Raises CheckpointError on every rank: tensors are missing, extra, or have another shape or dtype.
        """
        known = self.held.whole
        wanted = {*chain.from_iterable(together(CheckpointError, lambda: list(tensors)))}
        problems = together(CheckpointError, lambda: misfits(known, tensors, wanted))
        refuse(f"{self.where}: of another model or config:", problems)
        rows = decided(CheckpointError, lambda: has(tensors), self._moves)
        fill(tensors, self.held.tensors, [Move.of_json(row) for row in rows], partial(_item_bytes, known))
        together(CheckpointError, lambda: None)  # no rank needs what others hold
        self.held.tensors.clear()
        return self.state

    def _moves(self, wanted: Sequence[Sequence[Sequence[Any]]]) -> list[Move]:
        wishes = [[Has.of_json(row) for row in rows] for rows in wanted]
        return moves_for(self._ranks, wishes, partial(_item_bytes, self.held.whole))


def find(held: HeldTensors | None, folder: Path, tell: Callable[[str], object]) -> MemoryCheckpoint | None:
    """The newest step of which the ranks hold every tensor whole, the same on every rank. Collective.

    None: there is none. What is held of other steps is let go.

    Args:
        held: what this rank holds; None: nothing.
        folder: of the run's checkpoints.
        tell: is called on rank 0 with the reason why a step, or all, cannot be taken.
    """
    of_ranks: list[list[Has]] = []

    def describe() -> dict[str, Any] | None:
        if held is None:
            return None
        known = [[name, one.dtype, one.shape] for name, one in sorted(held.whole.items())]
        facts = {"step": held.step, "validation_loss": held.validation_loss, "state": dict(held.state)}
        return {**facts, "whole": known, "has": has(held.tensors)}

    def choose(ranks: list[dict[str, Any] | None]) -> dict[str, Any]:
        steps = {one["step"] for one in ranks if one is not None}
        reasons = [] if steps else ["no rank holds its tensors in memory"]
        for step in sorted(steps, reverse=True):
            holders = [one if one is not None and one["step"] == step else None for one in ranks]
            of_ranks[:] = [[Has.of_json(row) for row in ([] if one is None else one["has"])] for one in holders]
            first = next(one for one in holders if one is not None)
            why = _lacking([one["whole"] for one in holders if one is not None], of_ranks)
            if not why:
                return {**first, "has": None, "reasons": reasons}
            reasons.append(f"step {step} is not whole in memory: {why}")
        return {"step": None, "reasons": reasons}

    found = decided(CheckpointError, describe, choose)
    for reason in found["reasons"] if rank() == 0 else ():
        tell(reason)
    step = found["step"]
    if held is not None and held.step != step:
        held.tensors.clear()
    if step is None:
        return None
    state, loss, known = found["state"], found["validation_loss"], _whole_of_json(found["whole"])
    if held is None or held.step != step:
        held = HeldTensors(step, state, {}, known, loss)
    return MemoryCheckpoint(step, folder / f"step_{step:08d}", loss, state, held, of_ranks)


def _lacking(known: Sequence[Sequence[Sequence[Any]]], ranks: Sequence[Sequence[Has]]) -> str:
    """Why tensors are not whole, in words; "": they are. `known`: their names, dtypes and shapes, by each rank."""
    if any(rows != known[0] for rows in known):
        return "the ranks had different tensors"
    areas: dict[str, list[Area]] = {name: [] for name, _, _ in known[0]}
    for row in chain.from_iterable(ranks):
        areas[row.name].append(row.area)
    lacking = [name for name, _, shape in known[0] if cover(whole(shape), tuple(dict.fromkeys(areas[name]))) is None]
    more = f" and of {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
    return f"no rank that is left has all of {lacking[0]}{more}" if lacking else ""


def _described(tensor: torch.Tensor | Box) -> StoredTensor:
    """Dtype and shape of the whole tensor. Raises TypeError: a checkpoint cannot have this dtype."""
    if tensor.dtype not in DTYPE_CODES:
        raise TypeError(f"{tensor.dtype}: not one of {', '.join(map(str, DTYPE_CODES))}")
    return StoredTensor(DTYPE_CODES[tensor.dtype], tuple(tensor.size()), ())


def _all_described(tensors: Mapping[str, torch.Tensor | Box]) -> dict[str, StoredTensor]:
    for name, tensor in tensors.items():
        area_of(name, tensor)
    return {name: _described(tensor) for name, tensor in sorted(tensors.items())}


def _whole_of_json(rows: Sequence[Sequence[Any]]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(dtype, tuple(shape), ()) for name, dtype, shape in rows}


def _item_bytes(known: Mapping[str, StoredTensor], name: str) -> int:
    return CODE_DTYPES[known[name].dtype].itemsize
