"""In: a sequence split over ranks, in one process. Out: attention by one fused call per rank is one device's attention.
Does not run a CUDA kernel: the pair of CPU kernels proves the sums, the meta device counts what CUDA would launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ring_ranks
import torch
from device_spy import META, DeviceSpy
from ring_ranks import BATCH, DTYPES, HEAD_DIM, relative, values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.operators.fused_attention import EFFICIENT, FLASH, FOR_CPU, fused_attention_for
from codescent.strategies.causal_sources import CausalSources
from codescent.strategies.causal_tiles import CausalTiles, balanced_positions
from codescent.strategies.ring import AddGradient, Exchange, FusedSplitAttention, SplitAttention, split_attention

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 3e-2}


class Here(Exchange):
    """The keys and values of all ranks, in this process. `sums` has the gradients that the ranks have added so far."""

    def __init__(self, kv: list[Tensor], index: int, sums: list[Tensor]) -> None:
        super().__init__(cast(Any, SimpleNamespace(size=lambda: len(kv), rank=lambda: index)))
        self.kv, self.sums = kv, sums

    def visits(self, kv_2BGTK: Tensor) -> Iterator[tuple[int, Tensor]]:
        degree, index = self.group.size(), self.group.rank()
        assert kv_2BGTK.is_meta or torch.equal(kv_2BGTK, self.kv[index])
        for hop in range(degree):
            yield (index - hop) % degree, self.kv[(index - hop) % degree]

    def gradient(self, kv_2BGTK: Tensor, add: AddGradient) -> Tensor:
        for source, visitor_2BGTK in self.visits(kv_2BGTK):
            add(source, visitor_2BGTK, self.sums[source])
        return self.sums[self.group.rank()]


def of_all_ranks(function: Any, degree: int, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """y, d_q, d_k and d_v of the whole sequence. `function` is given rank and length, and makes the last argument."""
    seq_len, wide = inputs[0].shape[2], torch.promote_types(inputs[0].dtype, torch.float32)
    places = [balanced_positions(seq_len, degree, index, upstream.device) for index in range(degree)]
    kv = [torch.stack([inputs[1][:, :, here], inputs[2][:, :, here]]) for here in places]
    sums = [torch.zeros_like(one, dtype=wide) for one in kv]
    y, d_q, d_k, d_v = whole = [torch.zeros_like(one, dtype=torch.float64) for one in (upstream, *inputs)]
    for index, here in enumerate(places):
        local = [one[:, :, here].requires_grad_() for one in inputs]
        kind, last = function(index, len(here))
        y_here = kind.apply(*local, Here(kv, index, sums), last)
        y[:, :, here] = y_here.detach().double()
        d_q[:, :, here] = torch.autograd.grad(y_here, local, upstream[:, :, here])[0].double()
    for (d_k_here, d_v_here), here in zip(sums, places, strict=True):
        d_k[:, :, here], d_v[:, :, here] = d_k_here.double(), d_v_here.double()
    return whole


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", DTYPES)
def test_one_call_for_each_rank_gives_the_attention_of_one_device(degree: int, precision: str) -> None:
    dtype = DTYPES[precision]
    for (heads, kv_heads), part in product(((3, 3), (4, 2), (4, 1)), (1, 3, 8)):
        seq_len = 2 * degree * part
        inputs = [values(number, seed, dtype, seq_len) for seed, number in enumerate((heads, kv_heads, kv_heads))]
        upstream = values(heads, 9, dtype, seq_len)
        exact = [one.double().requires_grad_() for one in inputs]
        y = ring_ranks.one_device(*exact, 0.0)
        reference = [y.detach(), *torch.autograd.grad(y, exact, upstream.double())]
        fused = of_all_ranks(
            lambda index, length: (FusedSplitAttention, CausalSources(FOR_CPU, index, length)), degree, inputs, upstream
        )
        tiled = of_all_ranks(
            lambda index, length: (SplitAttention, CausalTiles(degree, index, length)), degree, inputs, upstream
        )
        assert max(relative(fused, reference)) < TOLERANCE[precision], (heads, kv_heads, part)
        assert max(relative(fused, tiled)) < 2 * TOLERANCE[precision], (heads, kv_heads, part)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_a_source_is_one_tile_of_what_a_causal_mask_lets_be_seen(degree: int) -> None:
    length = 6
    for index, source in product(range(degree), range(degree)):
        mine, keys = (balanced_positions(degree * length, degree, one) for one in (index, source))
        tile = CausalSources(FOR_CPU, index, length).tile(source)
        ones = torch.ones(tile.queries.stop - tile.queries.start, tile.keys.stop, dtype=torch.int64)
        seen = torch.zeros(length, length, dtype=torch.int64)
        seen[tile.queries, tile.keys] = ones.tril_() if tile.causal else ones
        assert torch.equal(seen, (keys[None, :] <= mine[:, None]).long())


class Named(TorchDispatchMode):
    """Counts operators by name, and notes the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        self.largest = max(
            [self.largest, *(one.numel() for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, Tensor))]
        )
        return out


@pytest.mark.parametrize(("precision", "kernel"), [("bf16", "flash"), ("fp32", "efficient")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_on_a_device_a_source_is_one_kernel_there_and_one_back(
    precision: str, kernel: str, heads: int, kv_heads: int
) -> None:
    degree, length, dtype = 4, 64, DTYPES[precision]
    q, k, v = (
        torch.empty(BATCH, length, number, HEAD_DIM, dtype=dtype, device=META) for number in (heads, kv_heads, kv_heads)
    )
    local = [one.transpose(1, 2).requires_grad_() for one in (q, k, v)]
    kv = [torch.empty(2, BATCH, kv_heads, length, HEAD_DIM, dtype=dtype, device=META) for _ in range(degree)]
    sums = [torch.zeros_like(one, dtype=torch.float32) for one in kv]
    with DeviceSpy() as spy, Named() as named:
        y = split_attention(*local, Here(kv, 1, sums))
        d_q, d_k, d_v = torch.autograd.grad(y, local, torch.empty_like(y))
    assert not spy.waits
    assert [one.shape for one in (y, d_q, d_k, d_v)] == [one.shape for one in (local[0], *local)]
    assert {one.dtype for one in (y, d_q, d_k, d_v)} == {dtype}
    assert y.transpose(1, 2).is_contiguous()  # so the heads join without a copy
    name = f"_scaled_dot_product_{kernel}_attention"
    assert (named.calls[name], named.calls[f"{name}_backward"]) == (degree, degree)
    shared = heads != kv_heads and kernel == "efficient"  # which needs a key and a value for each head
    assert spy.launches <= 31 + 24 * shared
    assert named.largest <= max(sums[0].numel(), BATCH * heads * length * HEAD_DIM)  # so no mask, and no scores


def test_the_kernel_follows_dtype_head_and_device() -> None:
    def found(dtype: torch.dtype, head_dim: int, device: str = "meta") -> object:
        return fused_attention_for(torch.empty(1, 2, 4, head_dim, dtype=dtype, device=device))

    assert found(torch.bfloat16, 128) is found(torch.bfloat16, 8) is FLASH
    assert found(torch.float32, 64) is found(torch.float32, 12) is EFFICIENT
    assert found(torch.bfloat16, 12) is found(torch.bfloat16, 264) is found(torch.float32, 6) is None
    assert found(torch.float64, 64) is found(torch.bfloat16, 64, "cpu") is None
