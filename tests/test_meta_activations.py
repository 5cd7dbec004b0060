"""In: every kind of model, precision, recompute and layout, on the meta device. Out: CUDA would keep for backward what
the plan declares.
Does not compute a number and needs no device. test_activations does the same on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_spy import DeviceSpy, fused_kernels, make_tables
from test_meta_device import BATCH, KINDS, Case, all_cases, batch, numbers, parts_of
from torch import Tensor

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.cost.activations import bytes_by_chunk, deferred_by_chunk, is_known
from codescent.models.part import Part
from codescent.operators import kept
from codescent.plan.activations import CUDA

SEEDS = (torch.uint64, torch.int64)
"""Dtypes of the random state of fused kernels, one or two numbers. It is not declared."""


class RMSNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: its input, and a number of each row. The meta device has a formula instead."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D: Tensor) -> Tensor:
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        ctx.save_for_backward(x_BTD, weight_D, x_BTD.new_empty(*x_BTD.shape[:-1], 1, dtype=wide))
        return torch.empty_like(x_BTD)

    @staticmethod
    def backward(ctx: Any, *d_y_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, weight_D, _ = ctx.saved_tensors
        return torch.empty_like(x_BTD), torch.empty_like(weight_D)


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Kernels that keep what those of CUDA keep. Flash attention reads the keys of groups of heads as they are."""
    by_formula = F.scaled_dot_product_attention  # which torch takes for meta tensors
    with fused_kernels(), pytest.MonkeyPatch.context() as patch:
        attention = F.scaled_dot_product_attention

        def grouped(q: Tensor, k: Tensor, v: Tensor, *others: Any, enable_gqa: bool = False, **more: Any) -> Tensor:
            if enable_gqa and q.dtype != torch.bfloat16:
                return by_formula(q, k, v, *others, enable_gqa=True, **more)
            if enable_gqa:
                y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
                return y
            return attention(q, k, v, *others, **more)

        patch.setattr(F, "scaled_dot_product_attention", grouped)
        patch.setattr(F, "rms_norm", lambda x, shape, weight, eps: RMSNorm.apply(x, weight))
        yield


def kept_by(part: Part, x: Tensor, given: tuple[Tensor, ...], more: dict[str, Any]) -> tuple[int, Tensor]:
    """Bytes that a forward pass keeps, and its output."""
    found: dict[int, torch.UntypedStorage] = {}
    left = [*part.parameters(), *(one for one in (part.tokens_T, part.rows_T) if one is not None)]
    left += [tensor for table in part.tables for tensor in table.tensors()]
    places = {tensor.untyped_storage()._cdata for tensor in left}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in places and not (tensor.numel() <= len(SEEDS) and tensor.dtype in SEEDS):
            found[storage._cdata] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), kept.noted(pack):
        y: Tensor = part(x, *given, **more)
    for tensor in ([] if part.embeds else [x]) + ([] if part.ends else [y]):
        pack(tensor)
    return sum(storage.nbytes() for storage in found.values()), y


def waiting_after(part: Part, x: Tensor, y: Tensor) -> int:
    """Bytes that wait after the input part of a backward pass, as `train/chunk.py` computes it."""
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    wanted = weights if part.embeds else [x, *weights]
    found = torch.autograd.grad(y, wanted, None if part.ends else torch.empty_like(y), allow_unused=True)
    held = [gradient for gradient in found[-len(weights) :] if gradient is not None]
    held += [tensor for _, compute in part.deferred or () for tensor in compute.args]
    storages = {(storage := tensor.untyped_storage())._cdata: storage.nbytes() for tensor in held}
    return sum(storages.values())


def differing(cases: Iterable[Case]) -> dict[Case, tuple[list[int], list[int]]]:
    """The cases whose chunks keep other bytes than those declared, with both."""
    wrong = {}
    for case in cases:
        plan = case.plan()
        counts = (bytes_by_chunk, deferred_by_chunk) if plan.deferred else (bytes_by_chunk,)
        declared = [size for stage in range(plan.mesh.pp) for count in counts for size in count(plan, stage, CUDA)]
        inputs, targets, extras = batch(case.kind, TORCH_DTYPE[case.precision])
        sizes, x = [], inputs
        with parts_of(plan) as parts, kernels_of_cuda():
            for part in parts:
                make_tables(part, plan)
            with DeviceSpy():
                for part in parts:
                    part.set_dropout_context(1, 2, numbers(BATCH))
                    x = x if part.embeds else x.detach().requires_grad_()
                    size, y = kept_by(
                        part,
                        x,
                        (targets,) if part.ends else (),
                        {**extras, **({"loss_scale": 0.25} if part.ends else {})},
                    )
                    sizes += [size, waiting_after(part, x, y)] if plan.deferred else [size]
                    x = y
        if sizes != declared:
            wrong[case] = (sizes, declared)
    return wrong


def known(case: Case) -> bool:
    """Whether it is declared what CUDA keeps."""
    return not case.lora and case.has_a_plan() and is_known(case.plan(), CUDA)


QUICK = [
    Case("gpt2", "fp32", "selective", "", ""),
    Case("gpt2-dropout", "bf16", "none", "", "cp ring"),
    Case("llama", "bf16", "none", "", "tp"),
    Case("llama", "bf16", "products", "", "zero-bubble"),
    Case("llama", "fp32", "selective", "", "tp"),  # torch has a formula, and no kernel, for groups of heads
    Case("gpt2", "fp64", "products", "", "tp"),
    Case("gpt2-documents", "bf16", "none", "", "cp ring"),
    Case("gpt2-documents", "bf16", "products", "", "tp"),
    Case("gpt2-documents", "fp32", "selective", "", ""),
    Case("pairs", "fp64", "none", "", "zero-bubble"),
    Case("pairs", "fp32", "products", "", ""),
    Case("mlm", "bf16", "none", "", "tp whole"),
    Case("qa", "fp32", "full", "", "tp"),
]


def test_cuda_would_keep_what_is_declared() -> None:
    assert not differing(QUICK)
    assert not known(Case("llama", "fp64", "none", "", "cp ring"))
    assert all(map(known, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_would_keep_what_is_declared_in_all_cases(kind: str) -> None:
    assert not differing(case for case in all_cases() if case.kind == kind and known(case))
