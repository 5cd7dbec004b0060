"""In: functions that CUDA compiles alone: dropout, rotary turns, merged attention. Out: compiled, the plain functions.
Does not generate code for CUDA: aot_eager traces them, and the slow tests let a C++ compiler make their loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from codescent.operators import compiled
from codescent.operators.compiled import compiled_off_cpu
from codescent.operators.dropout import drop, dropped_at, sample_keys
from codescent.operators.rotary import every_turn, turn
from codescent.strategies.causal_sources import _merge_

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WAYS = [(backend, dtype) for backend in ("aot_eager", "inductor") for dtype in DTYPES]
QUICK = ("aot_eager", torch.bfloat16)


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From the call on, the CPU does as CUDA does, with a backend of torch.compile."""

    def begin(backend: str) -> None:
        torch.compiler.reset()
        counters.clear()
        monkeypatch.setattr(compiled, "fuses", lambda device: True)
        monkeypatch.setattr(compiled, "alone", cache(lambda function: torch.compile(function, backend=backend)))

    return begin


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The result and the gradient of x."""
    x = x.detach().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, x, random(*y.shape, dtype=y.dtype, seed=9))]


def dropping(x_BRW: Tensor) -> list[Tensor]:
    """Whole rows, and a range of columns of chosen rows, as tensor parallelism has them."""
    keys_B, rows_R = sample_keys(3, 5, torch.arange(len(x_BRW))), torch.tensor([3, 0, 99, 7, 2])
    part = results(lambda x: drop(x, keys_B, 0.3, rows_R, first_column=13), x_BRW[:, :5])
    return [*results(lambda x: drop(x, keys_B, 0.3), x_BRW), *part]


def turning(x_BTW: Tensor) -> list[Tensor]:
    """Groups of 2 query heads of 8 channels, key and value; angles that samples share, and angles of each sample."""
    x_BTGEK = x_BTW.unflatten(2, (-1, 4, 8))
    batch, length = x_BTGEK.shape[:2]
    turns_TC2 = every_turn(64, 8, 10000.0).to(torch.promote_types(x_BTW.dtype, torch.float32))
    own_BTC2 = turns_TC2[torch.arange(batch * length).view(batch, length) % 50]
    return [*results(lambda x: turn(x, turns_TC2[:length]), x_BTGEK), *results(lambda x: turn(x, own_BTC2), x_BTGEK)]


def merging(x_BHT: Tensor) -> list[Tensor]:
    wide = torch.promote_types(x_BHT.dtype, torch.float32)
    y_BHTK, lse_BHT = random(*x_BHT.shape, 8, dtype=wide, seed=1), random(*x_BHT.shape, dtype=wide, seed=2)
    half, new_y_BHTK = x_BHT.shape[2] // 2, random(*x_BHT.shape, 8, dtype=x_BHT.dtype, seed=3)
    _merge_(y_BHTK[:, :, half:], lse_BHT[:, :, half:], new_y_BHTK[:, :, half:], x_BHT[:, :, half:].to(wide))
    return [y_BHTK, lse_BHT]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "dtype"), [pytest.param(*way, marks=[pytest.mark.slow] if way != QUICK else []) for way in WAYS]
)
@pytest.mark.parametrize("function", [dropping, turning, merging])
def test_compiled_alone_is_the_plain_function(
    as_cuda: Callable[[str], None], function: Callable[[Tensor], list[Tensor]], backend: str, dtype: torch.dtype
) -> None:
    x = random(3, 7, 64, dtype=dtype, seed=0)
    plain = function(x)
    as_cuda(backend)
    found = function(x)
    assert counters["stats"]["unique_graphs"] > 0
    if function is dropping:
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    for one, other in zip(found, plain, strict=True):  # torch multiplies complex numbers with other roundings
        torch.testing.assert_close(one, other)


def test_a_mask_is_the_one_that_attention_over_a_split_sequence_computes(as_cuda: Callable[[str], None]) -> None:
    keys_B, x_BRW = sample_keys(1, 2, torch.arange(2)), torch.ones(2, 6, 40)
    as_cuda("aot_eager")
    dropped_BRW = dropped_at(keys_B, torch.arange(6), torch.arange(40), 0.4)
    assert torch.equal(drop(x_BRW, keys_B, 0.4) == 0.0, dropped_BRW)


def test_sizes_that_change_compile_once_more_at_most(as_cuda: Callable[[str], None]) -> None:
    as_cuda("aot_eager")
    keys_B = sample_keys(1, 2, torch.arange(2))
    graphs = []
    for rows in (6, 9, 12, 7, 31):
        drop(torch.ones(2, rows, 40), keys_B, 0.4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 2  # of the rows' keys, and of the elements
    assert graphs[1:] == [4] * 4


def test_a_compiled_region_takes_the_plain_function_in(as_cuda: Callable[[str], None]) -> None:
    as_cuda("aot_eager")
    keys_B, x_BRW = sample_keys(1, 2, torch.arange(2)), torch.ones(2, 6, 40)
    around = torch.compile(lambda x: drop(x + 1, keys_B, 0.4) * 2, backend="aot_eager", fullgraph=True)
    y_BRW = around(x_BRW)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(y_BRW, drop(x_BRW + 1, keys_B, 0.4) * 2)


def test_nothing_is_compiled_unless_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_used", False)
    assert not compiled.fuses(torch.device("cuda"))
    compiled.use(True)
    assert compiled.fuses(torch.device("cuda"))
    assert not compiled.fuses(torch.device("cpu"))


def test_a_cpu_calls_the_plain_function() -> None:
    called = []
    double = compiled_off_cpu(lambda factor, x: called.append(torch.compiler.is_compiling()) or factor * x)
    assert double(2, torch.ones(1)).item() == 2.0
    assert called == [False]
