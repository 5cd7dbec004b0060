"""In: a checked Hugging Face folder, the name of one of our parameters, one slice per dim. Out: the values of the
slices. Any rank or thread may call it: a file is memory-mapped only for one read.
Does not check the folder (folder.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from safetensors import safe_open

from codescent.base.reading import refuse_unreadable
from codescent.base.torch_dtypes import CODE_DTYPES
from codescent.huggingface.correspond import Index, TheirTensor
from codescent.huggingface.folder import Stored


class Readable(Protocol):
    """A checked folder: the tensors of each of our parameters, and the file of each tensor."""

    @property
    def parts(self) -> Mapping[str, tuple[TheirTensor, ...]]:
        """Their tensors, by our parameter's name."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Where each tensor is, by its name."""


def box(folder: Readable, name: str, slices: Sequence[slice]) -> torch.Tensor:
    """Values of a box (one slice per dim) of one of our parameters, in the folder's number format.

    Args:
        folder: a folder that has the parameter.
        name: name of the parameter.
        slices: one slice of step 1 for each dim.
    """
    parts = folder.parts[name]
    ours = [np.arange(*part.indices(size)) for part, size in zip(slices, parts[0].parameter.shape, strict=True)]
    stored = [folder.tensors[part.tensor] for part in parts]
    dtypes = {CODE_DTYPES[one.dtype] for one in stored}
    wide = dtypes.pop() if len(dtypes) == 1 else torch.float32 if torch.float64 not in dtypes else torch.float64
    out = torch.empty([len(indices) for indices in ours], dtype=wide)
    for part, one in zip(parts, stored, strict=True):
        _fill(out, ours, part, one)
    return out


def take(tensor: torch.Tensor, dim: int, indices: Index) -> torch.Tensor:
    """Select indices of a dim, in the given order. The result is a view if the indices are consecutive."""
    first, count = int(indices[0]), len(indices)
    if indices[-1] - first == count - 1 and bool(np.all(np.diff(indices) == 1)):
        return tensor.narrow(dim, first, count)
    return tensor.index_select(dim, torch.from_numpy(indices))


def _fill(out: torch.Tensor, ours: Sequence[Index], part: TheirTensor, stored: Stored) -> None:
    """Write into `out` the elements of the box that the tensor `part` holds."""
    found = [part.to_theirs(dim, indices) for dim, indices in enumerate(ours)]
    if any(len(positions) == 0 for positions, _ in found):
        return
    at = [found[dim][1] + (part.first if number == 0 else 0) for number, dim in enumerate(part.ours_of)]
    refuse_unreadable(stored.file)
    with safe_open(stored.file, framework="pt") as opened:  # mapped while it is open
        mapped = opened.get_slice(stored.name)[tuple(slice(int(i.min()), int(i.max()) + 1) for i in at)]
        for dim, indices in enumerate(at):
            mapped = take(mapped, dim, indices - indices.min())
        # Permute to the order of our dims. Dims that their tensor lacks are first, with one index.
        absent = [dim for dim in range(len(ours)) if dim not in part.ours_of]
        values = mapped[(None,) * len(absent)]
        order = [*absent, *part.ours_of]
        values = values.permute([order.index(dim) for dim in range(len(ours))])
        _put(out, [positions for positions, _ in found], values)


def _put(out: torch.Tensor, positions: Sequence[Index], values: torch.Tensor) -> None:
    """out[positions of each dim] = values. In at most one dim the positions are not consecutive."""
    scattered = None
    for dim, indices in enumerate(positions):
        if len(indices) == indices[-1] - indices[0] + 1:
            out = out.narrow(dim, int(indices[0]), len(indices))
        else:
            assert scattered is None, "parts that are scattered over two dims"
            scattered = dim
    if scattered is None:
        out.copy_(values)
    else:
        out.index_copy_(scattered, torch.from_numpy(positions[scattered]), values.to(out.dtype))
