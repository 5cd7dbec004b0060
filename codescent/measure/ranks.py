"""In: this process among the ranks. Out: on rank 0 what all ranks have found, while all of them were busy.
Does not write it into a file (verbs/measure.py does)."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from codescent.base.agreement import together
from codescent.base.cores import memory_bytes
from codescent.base.device import num_units
from codescent.base.device_kinds import CPU, kernels_of
from codescent.base.errors import UserError
from codescent.measure import exchanges, host, memory, operators, pairs, products, trial_runs, waiting
from codescent.measure.groups import make_groups
from codescent.measure.items import Item, joined
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.placement import RankPlacement, placement
from codescent.measure.spread import Spread
from codescent.measure.startup import seconds_since_start
from codescent.measure.timer import Timer
from codescent.measure.trial_runs import HeldBesides
from codescent.operators import products as operator_products
from codescent.train import machine
from codescent.train.threads import Load, used_by_others
from codescent.train.world import World

BUSY = 0.3
"""Cores of a machine that other programs use before it is said."""


class Shares(NamedTuple):
    """Seconds of each part of the measurements."""

    products: float
    copies: float
    operators: float
    collectives: float
    waiting: float
    pairs: float

    @classmethod
    def of(cls, seconds: float) -> Shares:
        """Of all of them together."""
        return cls(*(seconds * share for share in (0.35, 0.08, 0.1, 0.3, 0.1, 0.07)))


def measure(world: World, seconds: float, tell: Callable[[str], None]) -> MachineFindings | None:
    """Measure for about so many seconds. Returns the findings on rank 0, None on the others. Collective.

    `tell`: is called on rank 0 with each part that begins.

    Raises UserError: the ranks do not lie on nodes as a price takes them to (`placement`).
    """
    started_s, load = seconds_since_start(), Load()
    hosts = together(UserError, socket.gethostname)
    where = placement(hosts, world.leaders)
    device, timer = world.device, Timer(world.device)
    own: dict[str, Any] = {
        "device": machine.describe(device, 1, 1)["processor" if device.type == CPU else "device"],
        "started_s": started_s,
        "held_bytes": memory.held_bytes(device),
        "fragments": memory.fragments(device),  # before others have filled the allocator
    }
    of_runs = _trial_runs(world, seconds, tell)
    wide = _choose_kernels(world)
    shares, groups = Shares.of(seconds), make_groups(where, world.this_rank.rank, world.timeout)
    items: list[Item] = []
    for what, part in _parts(timer, groups, shares):
        tell(what)
        items += part
    tell("pairs of ranks")
    names = pairs.names_of(where)
    of_pairs = pairs.measure(timer, world.this_rank.rank, names, shares.pairs)
    own |= {
        "pairs": [[*pair, *found] for pair, found in of_pairs.items()],
        "items": [one.to_json() for one in items],
        "load": (torch.get_num_threads(), load.end()),
    }
    everyone = together(UserError, lambda: own)
    return _found(world, where, names, everyone, wide, of_runs) if world.is_first else None


def _trial_runs(world: World, seconds: float, tell: Callable[[str], None]) -> HeldBesides | None:
    """What a run holds beside its tensors, which rank 0 tries on a CPU. None: the time is too short. Collective."""
    if world.device.type != CPU or seconds < trial_runs.LEAST_S:
        return None
    tell("the memory of short runs")
    everyone = together(UserError, lambda: trial_runs.measure() if world.is_first else (0, 0.0))
    return HeldBesides(*everyone[0])


def _parts(
    timer: Timer, groups: dict[str, torch.distributed.ProcessGroup], shares: Shares
) -> Iterator[tuple[str, Iterator[Item]]]:
    """What is measured, in this order. A part begins when its items are asked for."""
    yield "products of matrices", products.measure(timer, shares.products)
    copy_s = shares.copies / 3
    copies = memory.copies(timer, copy_s), memory.bus(timer, copy_s), host.copies(timer, copy_s)
    yield "copies", chain(*copies)
    each_s = shares.operators / 3
    parts = (
        operators.launches(timer, each_s),
        operators.elementwise(timer, each_s),
        operators.attention(timer, each_s),
    )
    yield "operators", chain(*parts)
    if groups:
        nearest = next(iter(groups.values()))
        yield "collectives", exchanges.measure(timer, groups, 0.8 * shares.collectives)
        yield "products beside a collective", exchanges.beside(timer, nearest, 0.2 * shares.collectives)
        yield "waiting for the slowest rank", waiting.measure(timer, shares.waiting)


def _choose_kernels(world: World) -> str:
    """Compute as a run does (train/choices.py). Returns what computes bf16 products. Collective."""
    operator_products.sum_wide()
    kernels = machine.try_matmul("auto", world.device)["choice"]
    machine.use_matmul("fast" if world.all_agree(kernels == "fast") else "exact")
    trial = machine.try_bf16(world.device, "bf16")
    widens = not world.all_agree(trial is None or trial["choice"] == "bf16")
    operator_products.widen_bf16(widens)
    return "bf16 products in fp32" if widens else ""


def _found(
    world: World,
    where: RankPlacement,
    names: Sequence[str],
    everyone: Sequence[dict[str, Any]],
    wide: str,
    of_runs: HeldBesides | None,
) -> MachineFindings:
    """The findings of all ranks. `everyone`: of each rank, as JSON data."""
    device = world.device
    items = joined([[Item.from_json(one) for one in rank["items"]] for rank in everyone])
    of_pairs = {(one, other): pairs.PairTime(*time) for rank in everyone for one, other, *time in rank["pairs"]}
    starts = [rank["started_s"] for rank in everyone]
    return MachineFindings(
        device=everyone[0]["device"],
        kind=kernels_of(device.type),
        threads=torch.get_num_threads(),
        units=num_units(device),
        memory_bytes=memory.total_bytes(device, memory_bytes(), where.devices),
        held_bytes=of_runs.held_bytes if of_runs else int(statistics.median(rank["held_bytes"] for rank in everyone)),
        fragments=of_runs.fragments if of_runs else statistics.median(rank["fragments"] for rank in everyone),
        has_trained=of_runs is not None,
        start_s=None if None in starts else Spread.of(starts),
        placement=where,
        items=tuple(items),
        outliers=(*pairs.outlying_ranks(items, names), *pairs.outlying_pairs(of_pairs, names, where)),
        notes=tuple(_notes(everyone, on_cpu=device.type == CPU)),
        software=", ".join(filter(None, (f"torch {torch.__version__}", wide))),
    )


def _notes(everyone: Sequence[dict[str, Any]], *, on_cpu: bool) -> Iterator[str]:
    """What makes the numbers less good."""
    kinds = list(dict.fromkeys(rank["device"] for rank in everyone))
    if len(kinds) > 1:
        yield f"the ranks have different devices ({', '.join(kinds)}); the file has the name of the first"
    if on_cpu and (others := used_by_others([rank["load"] for rank in everyone]))["used"] >= BUSY:
        yield (
            f"other programs used {others['used']:.1f} of {others['cores']:.0f} cores meanwhile; measure again when "
            "the machine is idle"
        )
