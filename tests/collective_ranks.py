"""In: one rank of a gloo group. Out: what our all-reduce and the probed calls give on it.
Does not assert anything (test_collectives_command does) and starts no process (rank_server does)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_server import IN_ORDER, Place

from codescent.collectives import holdings
from codescent.collectives.calls import CALLS, Here
from codescent.collectives.probe import WrongResult, check, reason
from codescent.collectives.ring_all_reduce import RingStep, ring_all_reduce

SHAPES = ((), (1,), (2,), (3, 5), (1000,), (0,))  # also with fewer numbers than ranks
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, by the bits."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return every


def sums(place: Place) -> list[dict[str, Any]]:
    """For each shape and dtype: the error relative to the sum in fp64, and whether all ranks have the same bits."""
    place.join()
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            every = [given(rank, shape, dtype) for rank in range(place.ranks)]
            exact = torch.stack([one.double() for one in every]).sum(0)
            size = torch.stack([one.double().abs() for one in every]).sum(0)
            mine = every[place.rank].clone()
            ring_all_reduce(mine)
            errors = ((mine.double() - exact).abs() / size).flatten().tolist()
            same = all(torch.equal(mine, other) for other in gathered(mine))
            found.append({"dtype": str(dtype), "error": max(errors, default=0.0), "same": same})
    return found


def in_a_group(place: Place) -> Any:
    """The sum over ranks 3, 1 and 0 of 4, in this order of the ring; what one of them did in each step."""
    place.join()
    ranks = [3, 1, 0]
    group = dist.new_group(ranks, **IN_ORDER)
    if place.rank not in ranks:
        return None
    values, seen = torch.arange(7.0) + 10**place.rank, list[RingStep]()
    ring_all_reduce(values, group, after=seen.append)
    try:
        ring_all_reduce(torch.zeros(3, 2).t(), group)
    except ValueError as error:
        refused = str(error)
    return values.tolist(), [vars(one) for one in seen], refused


def steps(place: Place) -> list[dict[str, Any]]:
    """What `codescent collectives --explain` shows of this rank."""
    place.join()
    return holdings.record()


def called(place: Place) -> dict[str, str]:
    """Each call in each dtype: "" where its result is right."""
    place.join()
    return {f"{name} {dtype}": tried(place, name, dtype) for name in CALLS for dtype in DTYPES[1:3]}


def tried(place: Place, name: str, dtype: torch.dtype) -> str:
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        check(CALLS[name](Here(place.rank, place.ranks, torch.device("cpu"), dtype, store)), name)
    except WrongResult as error:
        return str(error)
    except Exception as error:
        return reason(error)
    return ""


def broken(place: Place) -> dict[str, str]:
    """Collectives that do nothing: what the check says on this rank."""
    place.join()
    found = {}
    for name in ("broadcast", "all_reduce", "barrier"):
        real = getattr(dist, name)
        setattr(dist, name, lambda *_: None)
        found[name] = tried(place, name, torch.float32)
        setattr(dist, name, real)
        dist.barrier()
    return found
