"""In: a machine with CUDA. Out: what only CUDA computes: one fused call per source, compiled dropout and turns, BERT's
rows. They are what the CPU computes.
Does not train (test_cuda does). The same functions are tested on CPU and meta device elsewhere; this runs kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ring_ranks import values
from test_causal_sources import of_all_ranks
from torch import Tensor

from codescent.models.bert.module import as_many_rows
from codescent.operators import compiled
from codescent.operators.dropout import drop, sample_keys
from codescent.operators.fused_attention import fused_attention_for
from codescent.operators.rotary import every_turn, turn
from codescent.strategies.causal_sources import CausalSources
from codescent.strategies.causal_tiles import CausalTiles
from codescent.strategies.ring import FusedSplitAttention, SplitAttention
from codescent.train import compiling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda")
ROUNDING = {torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-12}


@pytest.fixture
def compiles() -> Iterator[None]:
    compiled.use(not compiling.broken("cuda"))
    yield
    compiled.use(False)


def near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        error = (one.cpu().double() - other.cpu().double()).abs().max() / other.abs().max().cpu()
        assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_one_call_for_each_rank(compiles: None, degree: int, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Slices of 5 positions and of 64: full blocks of the kernels, and blocks that are not full."""
    kernel = fused_attention_for(torch.empty(1, 1, 1, 8, dtype=dtype, device=CUDA))
    assert kernel is not None

    def fused(index: int, length: int) -> tuple[type[FusedSplitAttention], CausalSources]:
        return FusedSplitAttention, CausalSources(kernel, index, length)

    def tiled(index: int, length: int) -> tuple[type[SplitAttention], CausalTiles]:
        return SplitAttention, CausalTiles(degree, index, length)

    for part in (5, 64):
        seq_len = 2 * degree * part
        inputs = [
            values(number, seed, torch.float64, seq_len) for seed, number in enumerate((heads, kv_heads, kv_heads))
        ]
        upstream = values(heads, 9, torch.float64, seq_len)
        exact = of_all_ranks(tiled, degree, inputs, upstream)
        there = [one.to(CUDA, dtype) for one in inputs]
        found = of_all_ranks(fused, degree, there, upstream.to(CUDA, dtype))
        near(found, exact, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_dropout_has_the_bits_of_the_cpu(compiles: None, dtype: torch.dtype) -> None:
    x, keys_B = values(5, 0, dtype).flatten(2), sample_keys(3, 5, torch.arange(2))
    rows_R = torch.tensor([3, 0, 99, 7, 2])
    for options in ({}, {"rows_R": rows_R, "first_column": 13}):
        there = {name: one.to(CUDA) if isinstance(one, Tensor) else one for name, one in options.items()}
        y = drop(x, keys_B, 0.3, **options)  # type: ignore[arg-type]
        x_there = x.to(CUDA).requires_grad_()
        y_there = drop(x_there, keys_B.to(CUDA), 0.3, **there)  # type: ignore[arg-type]
        (d_x,) = torch.autograd.grad(y_there, x_there, x_there.detach())
        assert torch.equal(y_there.cpu(), y)
        assert torch.equal(d_x.cpu(), y)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_turns_are_those_of_the_cpu(compiles: None, dtype: torch.dtype) -> None:
    qkv = values(12, 0, dtype).transpose(1, 2).unflatten(2, (3, 4)).contiguous()
    turns_TC2 = every_turn(qkv.shape[1], 8, 10000.0).to(torch.promote_types(dtype, torch.float32))
    there = qkv.to(CUDA).requires_grad_()
    y = turn(there, turns_TC2.to(CUDA))
    (d_qkv,) = torch.autograd.grad(y, there, y.detach())
    near([y.detach(), d_qkv], [turn(qkv, turns_TC2), qkv], ROUNDING[dtype])  # turned and turned back


def test_rows_with_a_target_are_selected_without_a_wait() -> None:
    targets_BT = torch.where(torch.arange(60).view(3, 20) % 7 == 0, 5, -1)
    expected = as_many_rows(targets_BT, 3)
    there = targets_BT.to(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = as_many_rows(there, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
