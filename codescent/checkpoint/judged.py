"""In: a manifest, tensors or files beside it. Out: what does not fit, in sentences; a refusal that all ranks raise.
Does not read tensors and does not delete a checkpoint (checkpoints.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch

from codescent.base.agreement import alone, rank, shortened, together, world_size
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.checkpoint.box import Box
from codescent.checkpoint.manifest import CheckpointError, Manifest, NoRoom, StoredTensor


def misfits(
    known: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor | Box], wanted: set[str]
) -> list[str]:
    """Sentences on missing tensors, on another shape or dtype, and on extra tensors of the checkpoint (`known`)."""
    problems = []
    for name, tensor in sorted(tensors.items()):
        stored = known.get(name)
        if stored is None:
            problems.append(f"{name}: not in the checkpoint")
            continue
        saved, needed = (
            f"{list(shape)} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in ((stored.shape, CODE_DTYPES[stored.dtype]), (tensor.shape, tensor.dtype))
        )
        if saved != needed:
            problems.append(f"{name}: {saved} in the checkpoint, {needed} in this run")
    extra = sorted(set(known) - wanted)
    return problems + [f"{name}: in the checkpoint, but not in this run" for name in extra]


def refuse(title: str, by_rank: list[list[str]], advice: str = "") -> None:
    """Raise CheckpointError on every rank if a rank has found problems. `by_rank`: those of each rank."""
    if problems := list(dict.fromkeys(chain.from_iterable(by_rank))):  # each once, although several ranks report it
        raise CheckpointError(*filter(None, [title, *shortened(problems), advice]))


def share_of(manifest: Manifest) -> list[str]:
    """The files that this rank verifies. Files are assigned by size, each to the rank with the fewest bytes so far."""
    loads = [0] * world_size()
    mine = []
    for name, file in sorted(manifest.files.items(), key=lambda pair: (-pair[1].size_bytes, pair[0])):
        chosen = loads.index(min(loads))
        loads[chosen] += file.size_bytes
        if chosen == rank():
            mine.append(name)
    return mine


def lacks_room(error: CheckpointError) -> bool:
    """Whether a save that was refused on every rank failed for want of room, and for nothing else. Collective."""
    own = error if alone() else error.__cause__  # None: this rank did not fail
    return all(together(CheckpointError, lambda: own is None or isinstance(own, NoRoom)))
