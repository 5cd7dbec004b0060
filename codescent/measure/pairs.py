"""In: the ranks, and where they are. Out: latency and bandwidth of pairs of ranks; ranks that are slower than others.
Does not measure machines before a run (doctor/ does, by its own connections): these are messages of torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from codescent.base.amounts import of_rate, of_seconds
from codescent.cost.collective_time import INSIDE
from codescent.doctor.judge_network import Pair, blamed, either, late_pairs, slow_pairs
from codescent.doctor.network import MOST_ROUNDS, tournament
from codescent.measure.exchanges import FP32_BYTES, exchange
from codescent.measure.items import COPY, PRODUCT, OfAllRanks
from codescent.measure.placement import RankPlacement
from codescent.measure.timer import Timer

SHORT = 1
"""Numbers of a short message."""
LONG_BYTES = (64 << 10, 1 << 20)
"""The least and the most bytes of a long message."""
REPEATS = 5
SLOWER = 1.25
"""A rank is named that takes this many times as long as others, in the median, with products or with copies."""


class PairTime(NamedTuple):
    """What two ranks measured: the seconds of a short exchange, and the bytes per second of a long one."""

    latency_s: float
    bytes_per_s: float


def measure(timer: Timer, rank: int, names: Sequence[str], share_s: float) -> dict[Pair, PairTime]:
    """Exchange messages with one rank after another; all pairs of a round do so at the same time. Collective.

    Each rank has at most MOST_ROUNDS others. Messages are as long as the time allows. Returns the pairs of which this
    rank is the first.
    """
    number = {name: index for index, name in enumerate(names)}
    rounds = list(tournament(names))[:MOST_ROUNDS]
    found: dict[Pair, PairTime] = {}
    size = LONG_BYTES[0]
    for done, pairs in enumerate(rounds):
        mine = next((pair for pair in pairs if names[rank] in pair), None)
        other = None if mine is None else number[mine[1] if mine[0] == names[rank] else mine[0]]
        if not done:  # the first round says how long messages may be
            tried_s = timer.together(0.0 if other is None else _exchanged_s(timer, other, size))
            affordable = size * share_s / (len(rounds) * (REPEATS + 1) * max(tried_s, 1e-9))
            size = int(min(LONG_BYTES[1], max(LONG_BYTES[0], affordable)))
        timer.together()
        if mine is not None and other is not None:
            short_s, long_s = _exchanged_s(timer, other, FP32_BYTES * SHORT), _exchanged_s(timer, other, size)
            if mine[0] == names[rank]:
                found[mine] = PairTime(short_s, size / max(long_s - short_s, 1e-9))
    return found


def _exchanged_s(timer: Timer, other: int, size: int) -> float:
    """The least seconds in which this rank and another one send each other so many bytes. A repeat that was disturbed
    is no reason to name a rank."""
    sent, received = (torch.zeros(size // FP32_BYTES, device=timer.device) for _ in range(2))
    exchange(sent, received, other, other, None)  # connects them
    return min(timer.once(lambda: exchange(sent, received, other, other, None)) for _ in range(REPEATS))


def names_of(found: RankPlacement) -> list[str]:
    """Of the ranks, in sentences."""
    hosts = found.hosts if found.nodes > 1 else [""] * len(found.hosts)
    return [f"rank {rank}{f' on {host}' if host else ''}" for rank, host in enumerate(hosts)]


def outlying_pairs(found: Mapping[Pair, PairTime], names: Sequence[str], placement: RankPlacement) -> Iterator[str]:
    """Ranks whose messages are slow beside those of others, over the same link, in a sentence each."""
    number = {name: index for index, name in enumerate(names)}
    for link in placement.links:
        over = {
            pair: one
            for pair, one in found.items()
            if (number[pair[0]] // placement.devices == number[pair[1]] // placement.devices) == (link == INSIDE)
        }
        rates = {pair: one.bytes_per_s for pair, one in over.items()}
        latencies = {pair: one.latency_s for pair, one in over.items()}
        yield from _named(slow_pairs(rates), rates, "B/s")
        yield from _named(late_pairs(latencies), latencies, "s")


def _named(outlying: Sequence[Pair], values: Mapping[Pair, float], unit: str) -> Iterator[str]:
    usual = [value for pair, value in values.items() if pair not in outlying]
    for where, pairs in blamed(outlying):
        pair = (min if unit == "B/s" else max)(pairs, key=lambda one: values[one])
        shown = [
            of_seconds(one) if unit == "s" else of_rate(one, unit) for one in (values[pair], statistics.median(usual))
        ]
        yield f"{' and '.join(where)}: {shown[0]} between {pair[0]} and {pair[1]}, others {shown[1]}{either(where)}"


def outlying_ranks(items: Sequence[OfAllRanks], names: Sequence[str]) -> Iterator[str]:
    """Ranks that compute or copy more slowly than others, in a sentence each."""
    for kind, what in ((PRODUCT, "products"), (COPY, "copies")):
        of_kind = [one.of_ranks for one in items if one.item.kind == kind]
        if not of_kind:
            continue
        shares = [
            statistics.median(of_ranks[rank] / statistics.median(of_ranks) for of_ranks in of_kind)
            for rank in range(len(names))
        ]
        for rank, share in enumerate(shares):
            others = statistics.median(shares[:rank] + shares[rank + 1 :]) if len(shares) > 1 else share
            if share > SLOWER * others:
                yield f"{names[rank]}: {what} take {share / others:.2f} times as long as on the other ranks"
