"""In: the ranks, and where they are. Out: latency and bandwidth of pairs of ranks; ranks that are slower than others.
Does not measure machines before a run (doctor/ does, by its own connections): these are messages of torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from codescent.base.amounts import of_rate, of_seconds
from codescent.cost.collective_time import INSIDE
from codescent.doctor.judge_network import Pair, blamed, either, late_pairs, slow_pairs
from codescent.doctor.network import MOST_ROUNDS, tournament
from codescent.measure.exchanges import FP32_BYTES, exchange
from codescent.measure.items import COPY, PRODUCT, OfAllRanks
from codescent.measure.placement import RankPlacement
from codescent.measure.timer import Timer

SHORT, LONG_BYTES = 1, 1 << 20
"""Numbers of a short message, and bytes of a long one."""
REPEATS = 5
SLOWER = 1.25
"""A rank is named that takes this many times as long as others, in the median, with products or with copies."""
PairSeconds = dict[Pair, tuple[float, float]]
"""By the names of two ranks: seconds of a short exchange, and of a long one."""


def measure(timer: Timer, rank: int, names: Sequence[str], share_s: float) -> PairSeconds:
    """Exchange messages with one rank after another; all pairs of a round do so at the same time. Collective.

    Each rank has at most MOST_ROUNDS others. Where rounds take too long there are fewer, as many on each rank. Returns
    the pairs of which this rank is the first.
    """
    number = {name: index for index, name in enumerate(names)}
    found: PairSeconds = {}
    spent_s = longest_s = 0.0
    for rounds, pairs in enumerate(tournament(names)):
        longest_s = max(longest_s, timer.together(spent_s))
        if rounds >= MOST_ROUNDS or (rounds and longest_s * (rounds + 1) / rounds > share_s):
            break
        mine = next((pair for pair in pairs if names[rank] in pair), None)
        if mine is not None:
            other = number[mine[1] if mine[0] == names[rank] else mine[0]]
            seconds = _exchanged_s(timer, other, SHORT), _exchanged_s(timer, other, LONG_BYTES // FP32_BYTES)
            spent_s += REPEATS * sum(seconds)
            if mine[0] == names[rank]:
                found[mine] = seconds
    return found


def _exchanged_s(timer: Timer, other: int, numbers: int) -> float:
    """The median seconds in which this rank and another one send each other so many numbers."""
    sent, received = (torch.zeros(numbers, device=timer.device) for _ in range(2))
    exchange(sent, received, other, other, None)  # connects them
    return statistics.median(timer.once(lambda: exchange(sent, received, other, other, None)) for _ in range(REPEATS))


def names_of(found: RankPlacement) -> list[str]:
    """Of the ranks, in sentences."""
    hosts = found.hosts if found.nodes > 1 else [""] * len(found.hosts)
    return [f"rank {rank}{f' on {host}' if host else ''}" for rank, host in enumerate(hosts)]


def outlying_pairs(found: PairSeconds, names: Sequence[str], placement: RankPlacement) -> Iterator[str]:
    """Ranks whose messages are slow beside those of others, over the same link, in a sentence each."""
    number = {name: index for index, name in enumerate(names)}
    for link in placement.links:
        over = {
            pair: seconds
            for pair, seconds in found.items()
            if (number[pair[0]] // placement.devices == number[pair[1]] // placement.devices) == (link == INSIDE)
        }
        rates = {pair: LONG_BYTES / max(long_s - short_s, 1e-9) for pair, (short_s, long_s) in over.items()}
        latencies = {pair: short_s for pair, (short_s, _) in over.items()}
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
