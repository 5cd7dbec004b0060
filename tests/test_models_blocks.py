"""In: activations and weights. Out: what our CPU operators compute is what torch's own compute, values and gradients.
Does not test a whole model: test_models_gpt2 does, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators import activations, linear, products
from codescent.operators.activations import GELU, activated_linear_
from codescent.operators.attention import causal_attention

gelu_linear_ = partial(activated_linear_, GELU)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=["highest", "medium"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    upstream = values(*y.shape, dtype=y.dtype, seed=9)
    return [y.detach(), *torch.autograd.grad(y, inputs, upstream)]


def compare(mine: list[Tensor], reference: list[Tensor], dtype: torch.dtype, loose: float = 1.0) -> None:
    for one, other in zip(mine, reference, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        assert float(error) < TOLERANCE[dtype] * loose


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["made again", "kept"])
@pytest.mark.parametrize("width", [96, 3072, 4096])
@pytest.mark.parametrize("bias", [True, False])
def test_gelu_and_linear(
    dtype: torch.dtype, small_bytes: int, width: int, bias: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(activations, "_PIECE", 1000)  # several pieces, the last one shorter
    h = values(2, 5, width, dtype=dtype, seed=0) * 2
    inputs = [h, values(8, width, dtype=dtype, seed=1) / 8, values(8, dtype=dtype, seed=2)][: 3 if bias else 2]
    for tensor in inputs:
        tensor.requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = F.linear(F.gelu(exact[0], approximate="tanh"), exact[1], exact[2] if bias else None)
    mine = gelu_linear_(inputs[0] * 1.0, inputs[1], inputs[2] if bias else None)  # takes the memory of its own input
    # Where the processor has AMX, "medium" computes fp32 products in bf16.
    loose = 1e4 if dtype == torch.float32 and kernels == "medium" else 1.0
    compare(results(mine, inputs), results(y, exact), dtype, loose)


@pytest.mark.parametrize("width", [3072, 5120])
def test_rows_are_kept_apart_only_for_the_kernels_that_need_it(width: int, kernels: str) -> None:
    matrix = values(4, width, dtype=torch.float32, seed=0)
    apart = activations.with_padded_rows(matrix)
    assert torch.equal(apart, matrix)
    assert (apart.stride(0) % 1024 != 0) == (kernels == "medium")
    for other in (matrix[:, :96].contiguous(), matrix[:, :2048].contiguous(), matrix.double(), matrix.bfloat16()):
        assert activations.with_padded_rows(other) is other


def test_gelu_and_linear_without_gradients_leaves_its_input() -> None:
    h, weight = values(2, 3, 16, dtype=torch.float32, seed=0), values(4, 16, dtype=torch.float32, seed=1)
    before = h.clone()
    with torch.no_grad():
        y = gelu_linear_(h, weight, None)
    torch.testing.assert_close(y, F.linear(F.gelu(before, approximate="tanh"), weight))
    assert torch.equal(h, before)


def test_a_second_backward_pass_is_the_same_or_refused() -> None:
    h, weight = (values(*shape, dtype=torch.bfloat16, seed=0).requires_grad_() for shape in ((2, 3, 16), (4, 16)))
    y = gelu_linear_(h * 1.0, weight, None).sum()
    first, second = (torch.autograd.grad(y, [h, weight], retain_graph=number == 0) for number in range(2))
    for found, expected in zip(second, first, strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(y)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["made again", "kept"])
@pytest.mark.parametrize("length", [1, 7, 128, 129, 300])
def test_attention(dtype: torch.dtype, small_bytes: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    qkv = values(2, length, 3 * 48, dtype=dtype, seed=0).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.view(2, length, 3, 3, 16).permute(3, 0, 2, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, length, 48)
    compare(results(causal_attention(qkv.view(2, length, 3, 3, 16)), [qkv]), results(y, [exact]), dtype)


@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("length", [7, 129])
def test_attention_of_several_heads_that_read_one_key_as_blocks_keep_it(batch: int, groups: int, length: int) -> None:
    """One sample with one group: its queries are not copied, so their gradients are written where they belong."""
    qkv = values(batch, length, groups, 4, 16, dtype=torch.float32, seed=0).requires_grad_()
    y_BTD, _ = torch.ops.codescent.block_attention(qkv, 0)
    expected = results(causal_attention(qkv), [qkv])
    compare(results(y_BTD, [qkv]), expected, torch.float32)


@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("widens", [False, True])
def test_what_the_compiler_sees_of_attention_returns_memory_of_its_own(batch: int, groups: int, widens: bool) -> None:
    """With one sample or one group the projections laid out by head are where they were: a custom op has to copy.

    Their layout is the one that the compiler was promised.
    """
    qkv_BTGEK = torch.randn(batch, 4, groups, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    products.widen_bf16(widens)
    y_BTD, qkv_EPTK = torch.ops.codescent.block_attention(qkv_BTGEK, 0)
    expected = causal_attention(qkv_BTGEK)
    products.widen_bf16(False)
    assert qkv_EPTK.data_ptr() != qkv_BTGEK.data_ptr()
    assert qkv_EPTK.is_contiguous()
    assert y_BTD.is_contiguous()
    torch.testing.assert_close(y_BTD, expected)
