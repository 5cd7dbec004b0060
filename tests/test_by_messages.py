"""In: parts of 2, 3 and 4 ranks over gloo. Out: their reduce-scatter and all-gather by messages, bit for bit.
Does not count bytes: test_counted_bytes does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forker import Forker
from rank_server import Place

from codescent.strategies import collectives

NUMEL = 1000
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def summands(rank: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a rank whose sum in fp32, and so in bf16, depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(ranks * NUMEL, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (3 - 2 * rank)).to(dtype)


def in_rank_order(rank: int, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part of the sum, added from rank 0 on in fp32 at least."""
    parts = [summands(each, ranks, dtype).view(ranks, -1)[rank] for each in range(ranks)]
    total = parts[0].to(torch.promote_types(dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def summed(place: Place) -> dict[str, bool]:
    """By way and dtype, whether each part has the bits of the sum in rank order, and the summands are as before."""
    group, found = place.join(), dict[str, bool]()

    def by_compiler(part: torch.Tensor, whole: torch.Tensor) -> None:
        collectives.reduce_scatter_into(part, whole, group=group)

    ways: dict[str, Any] = {
        "waits": lambda part, whole: collectives.reduce_scatter_into(part, whole, group=group),
        "started": lambda part, whole: collectives.start_reduce_scatter(part, whole, group=group).wait(),
    }
    if place.ranks == 3:  # the compiler is slow to import
        ways["compiled"] = torch.compile(by_compiler, backend="aot_eager", fullgraph=True)
    for name, way in ways.items():
        for dtype in DTYPES:
            whole = summands(place.rank, place.ranks, dtype)
            part = torch.full((NUMEL,), float("nan"), dtype=dtype)
            way(part, whole)
            same = torch.equal(part, in_rank_order(place.rank, place.ranks, dtype))
            found[f"{name} {dtype}"] = same and torch.equal(whole, summands(place.rank, place.ranks, dtype))
    dist.barrier()
    return found


def two_under_way(place: Place) -> list[bool]:
    """Two sums that begin before the first ends, awaited in the other order, the first one twice."""
    group, parts = place.join(), [torch.empty(NUMEL) for _ in range(2)]
    wholes = [summands(place.rank, place.ranks, torch.float32) * factor for factor in (1, 2)]
    works = [collectives.start_reduce_scatter(*both, group=group) for both in zip(parts, wholes, strict=True)]
    for work in (works[1], works[0], works[0]):
        work.wait()
    dist.barrier()
    expected = in_rank_order(place.rank, place.ranks, torch.float32)
    return [torch.equal(part, expected * factor) for part, factor in zip(parts, (1, 2), strict=True)]


def gathered(place: Place) -> list[bool]:
    """All parts in the order of the ranks: from memory elsewhere, from their place, and of no elements."""
    group, found = place.join(), []
    expected = torch.cat([torch.full((NUMEL,), float(rank)) for rank in range(place.ranks)])
    own = torch.full((NUMEL,), float(place.rank))
    for in_place in (False, True):
        whole = torch.full((place.ranks * NUMEL,), -1.0)
        mine = whole.view(place.ranks, -1)[place.rank] if in_place else own
        mine.copy_(own)
        collectives.all_gather_into(whole, mine, group=group)
        found.append(torch.equal(whole, expected))
    collectives.all_gather_into(torch.empty(0), torch.empty(0), group=group)
    dist.barrier()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sum_has_the_bits_of_the_rank_order(forker: Forker, tmp_path: Path, ranks: int) -> None:
    for found in forker.call(f"{__name__}:summed", tmp_path, ranks):
        assert [name for name, same in found.items() if not same] == []
        assert len(found) == (3 if ranks == 3 else 2) * len(DTYPES)


def test_the_order_of_addition_decides_the_bits() -> None:
    """Else the test above would say nothing of it."""
    first, *others = [summands(rank, 3, torch.float32) for rank in range(3)]
    assert not torch.equal(first + others[0] + others[1], others[1] + others[0] + first)


@pytest.mark.parametrize("function", ["two_under_way", "gathered"])
def test_messages_of_several_collectives_arrive_where_they_belong(
    forker: Forker, tmp_path: Path, function: str
) -> None:
    for ranks in (2, 3):
        for found in forker.call(f"{__name__}:{function}", tmp_path, ranks):
            assert found == [True, True]
