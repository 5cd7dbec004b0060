"""In: a divided chunk of the model, the plan's tensors. Out: its quantized matrices, with their values.
Does not know the number format (operators/nf4.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.huggingface.initial import InitialValues, is_finite
from codescent.operators.nf4 import packed
from codescent.plan import TensorPlan
from codescent.strategies import ThisRank


def make_room_(part: nn.Module, tensors: Iterable[TensorPlan]) -> None:
    """Replace quantized matrices of a chunk on the meta device, so that none gets the memory of its wide values."""
    present = dict(part.named_parameters())
    for tensor in tensors:
        name = tensor.parameter.name
        if tensor.parameter.quantized and name in present:
            *rows, columns = present[name].shape
            owner, _, leaf = name.rpartition(".")
            values = torch.empty(*rows, columns // 2, dtype=torch.uint8, device="meta")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))


def quantize_(parts: Sequence[nn.Module], this_rank: ThisRank) -> list[str]:
    """Write the values of all quantized matrices, one whole matrix at a time. Returns those that are not finite.

    Raises:
        UserError: the library is not installed; see also `InitialValues`.
    """
    plan = this_rank.plan
    tensors = {t.parameter.name: t for t in this_rank.tensors if t.parameter.quantized}
    if not tensors:
        return []
    initial, wrong = InitialValues(plan.seed, plan.model, plan.work.precision), list[str]()
    dtype = TORCH_DTYPE[plan.work.precision]
    for part in parts:
        for name, held in part.named_parameters():
            if name not in tensors:
                continue
            tensor = tensors[name]
            shape, owner = tensor.parameter.shape, cast(Any, part.get_submodule(name.rpartition(".")[0]))
            whole = initial.box(tensor.parameter, tuple(slice(0, size) for size in shape)).to(held.device, dtype)
            if not is_finite(whole):
                wrong.append(name)
                continue
            box = tensor.weights.box(shape, plan.mesh, this_rank.rank)
            values, owner.packed = packed(
                whole, tensor.parameter.alternating, tuple(slice(start, stop) for start, stop in box), dtype
            )
            held.data.copy_(values)
    return wrong
