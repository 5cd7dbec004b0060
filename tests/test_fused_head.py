"""In: the head as devices other than a CPU compute it. Out: losses and gradients of the CPU's head; sizes of products.
Does not run on such a device (test_cuda does), and does not divide the vocabulary (test_tensor_operators does)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.operators import compiled, fused_softmax, head, products
from codescent.plan.objective import CROSS_ENTROPY, Objective

OBJECTIVES = (CROSS_ENTROPY, Objective(0.1), Objective(z_loss=1e-2), Objective(0.1, 1e-2))
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_softmax(function: Callable[..., Tensor], vocab: int, dtype: torch.dtype, objective: Objective) -> None:
    """The losses and gradients of the CPU's softmax, also of tokens without a target; what is beside stays."""
    buffer_NC, targets_N = 3.0 * draw(7, vocab + 5, dtype=dtype), torch.arange(7) * 13 % vocab
    targets_N[2] = -1
    mine_NC, wide = buffer_NC.clone(), torch.promote_types(dtype, torch.float32)
    before = head._skipping(head._with_objective(head._softmax_gradient_, objective))
    for wants in (False, True):
        expected_N1 = before(buffer_NC[:, :vocab], targets_N, wide, wants)
        found_N1 = function(mine_NC[:, :vocab], targets_N, wide, wants, objective)
        torch.testing.assert_close(found_N1, expected_N1, rtol=BOUND[wide], atol=10 * BOUND[wide])
        torch.testing.assert_close(mine_NC, buffer_NC, rtol=BOUND[dtype], atol=BOUND[dtype])
    assert not mine_NC[2, :vocab].any()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_fused_softmax_is_that_of_the_cpu(dtype: torch.dtype, objective: Objective) -> None:
    for vocab in (3, 2999):  # the CPU has two ways
        check_softmax(fused_softmax.whole_, vocab, dtype, objective)


def test_a_token_outside_the_vocabulary_has_no_finite_loss() -> None:
    losses_N1 = fused_softmax.whole_(draw(2, 5), torch.tensor([4, 5]), torch.float32, True, Objective())
    assert losses_N1.isfinite().tolist() == [[True], [False]]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_softmax_is_that_of_the_cpu_and_one_graph(backend: str) -> None:
    torch.compiler.reset()
    whole_: Any = torch.compile(fused_softmax.whole_, backend=backend, fullgraph=True)
    check_softmax(whole_, 2999, torch.bfloat16, Objective(0.1, 1e-2))
    torch.compiler.reset()


def test_the_softmax_is_compiled_in_the_head_and_only_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiling(function: Callable[..., Any]) -> Callable[..., Any]:
        calls.append(function.__name__)
        return function

    monkeypatch.setattr(compiled, "alone", compiling)
    monkeypatch.setattr(compiled, "_used", False)
    for wanted in (False, True):
        compiled.use(wanted)
        for device in ("cpu", "meta"):
            x_ND, weight_VD = (draw(size, 4).to(device).requires_grad_() for size in (6, 9))
            targets_N = torch.zeros(6, dtype=torch.int64, device=device)
            head.head_loss(x_ND, weight_VD, targets_N, 4, skip_negative=True).backward()
            assert calls == (["whole_"] * 2 if wanted and device == "meta" else [])


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_a_rounded_up_vocabulary_has_the_same_loss_and_gradients(dtype: torch.dtype, biased: bool, chunk: int) -> None:
    losses_ = partial(fused_softmax.whole_, objective=Objective(0.1, 1e-2))
    given = draw(8, 16, dtype=dtype), draw(97, 16, dtype=dtype, seed=1), torch.arange(8) % 97, chunk, 0.25, True
    wide, bias_V = torch.promote_types(dtype, torch.float32), draw(97, dtype=dtype, seed=2) if biased else None
    expected, found = (
        head._loss_and_gradients(*given, wide, losses_, bias_V, biased, rounds_up) for rounds_up in (False, True)
    )
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            torch.testing.assert_close(mine, other, rtol=2 * BOUND[dtype], atol=4 * BOUND[dtype])


class Sizes(TorchDispatchMode):
    """The sizes of all products: rows, inner dimension, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            a, b = args[-2:] if args[-1:] and isinstance(args[-1], Tensor) else args[-3:-1]
            self.found.append((*a.shape, b.shape[1]))
        return func(*args, **(kwargs or {}))


def test_off_the_cpu_all_sizes_of_the_products_are_aligned() -> None:
    x_ND, weight_VD = (
        torch.empty(size, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for size in (256, 50257)
    )
    products.sums(weight_VD.device)  # its trial is a product, too
    with Sizes() as sizes:
        head.head_loss(x_ND, weight_VD, torch.empty(256, dtype=torch.int64, device="meta"), 128).backward()
    assert sizes.found == [(128, 64, 50304), (128, 50304, 64), (50304, 128, 64)] * 2
    assert weight_VD.grad is not None
    assert (weight_VD.grad.shape, weight_VD.grad.dtype) == (weight_VD.shape, torch.bfloat16)


@pytest.mark.parametrize("how", ["fused", "wide"])
def test_products_of_chunks_are_added_in_fp32_and_rounded_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """torch's CPU has no product of bf16 with a result in fp32: here is one."""
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert out_dtype == torch.float32
        return mm(a.float(), b.float())

    def wide_addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor, **scales: float) -> Tensor:
        assert out_dtype == total.dtype == torch.float32
        return addmm(total, a.float(), b.float(), out=out, **scales)

    monkeypatch.setattr(products, "sums", lambda _: how)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    a, b = draw(9, 400, dtype=torch.bfloat16), draw(400, 5, dtype=torch.bfloat16, seed=1)
    total: Tensor | None = None
    for start in range(0, 400, 100):
        part = slice(start, start + 100)
        total = products.add_product(total, a[:, part], b[part], torch.float32, 0.5)
    assert total is not None
    exact = 0.5 * (a.double() @ b.double())
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    assert float((_rounded_each(a, b) - exact).abs().max()) > 1e-3  # what this avoids


def _rounded_each(a: Tensor, b: Tensor) -> Tensor:
    parts = [products.mm(a[:, start : start + 100], b[start : start + 100]) for start in range(0, 400, 100)]
    return 0.5 * sum(part.double() for part in parts)


def test_the_way_of_a_device_is_found_by_a_trial() -> None:
    products._sums.cache_clear()
    assert products.sums(torch.device("cpu")) == "apart"
    fused = "wide" if torch.__version__ < (2, 12) else "fused"  # torch 2.11 has no fused one for meta tensors
    assert products.sums(torch.device("meta")) == fused
