"""In: process groups. Out: the seconds of each collective over sizes, and of products while a collective runs.
Does not fit latency and bandwidth (fit.py does), and does not compare pairs of ranks (pairs.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from codescent.measure.items import ALONE, BESIDE, CONTENTION, Item
from codescent.measure.spread import Spread
from codescent.measure.timer import LEAST, MOST, TOO_LONG, Timer
from codescent.plan import Collective
from codescent.strategies import collectives

PAYLOAD_BYTES: Mapping[str, tuple[int, ...]] = {
    "cpu": (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20),
    "cuda": (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 512 << 20),
}
NEEDED = 2
FP32_BYTES = 4
BESIDE_BYTES: Mapping[str, int] = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Of the all-reduce beside which products are computed."""
BESIDE_SIDE: Mapping[str, int] = {"cpu": 256, "cuda": 4096}
"""Rows and columns of these products."""
TRIED, COVERED = 4, 0.7
"""Products of the trial, and the share of the collective's time that they take alone."""
Call = Callable[[], object]


def measure(timer: Timer, groups: Mapping[str, dist.ProcessGroup], share_s: float) -> Iterator[Item]:
    """Repeat each collective of each group at all sizes, from small to large; all groups at the same time. Collective.

    A size that takes too long is left out, with the larger ones; two sizes tell latency from bandwidth.
    """
    sizes = PAYLOAD_BYTES[timer.kernels]
    each_s = share_s / max(1, len(groups) * len(CALLS) * len(sizes))
    for link, group in groups.items():
        for collective, prepare in CALLS.items():
            found: list[tuple[int, float]] = []
            for size in sizes:
                numbers = size // FP32_BYTES // group.size() * group.size()  # each rank has a part of the same size
                if not numbers:
                    continue
                if len(found) >= NEEDED and LEAST * timer.together(_expected_s(found, size)) > TOO_LONG * each_s:
                    break
                seconds = timer.of_slowest(prepare(numbers, group, timer.device), each_s, group)
                found.append((numbers * FP32_BYTES, seconds.median))
                yield Item(str(collective), link, (numbers * FP32_BYTES,), float(numbers * FP32_BYTES), seconds)


def _expected_s(found: Sequence[tuple[int, float]], size: int) -> float:
    """The seconds of a larger payload, on the line through the last two."""
    (first, first_s), (second, second_s) = found[-2:]
    return second_s + max(0.0, second_s - first_s) / (second - first) * (size - second)


def _values(numbers: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(numbers, device=device)  # sums of zeros stay so, however often they are summed


def _all_reduce(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    values = _values(numbers, device)
    return lambda: collectives.all_reduce(values, group=group)


def _all_gather(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    gathered, own = _values(numbers, device), _values(numbers // group.size(), device)
    return lambda: collectives.all_gather_into(gathered, own, group=group)


def _reduce_scatter(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    summands, part = _values(numbers, device), _values(numbers // group.size(), device)
    return lambda: collectives.reduce_scatter_into(part, summands, group=group)


def _all_to_all(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    given, received = _values(numbers, device), _values(numbers, device)
    return lambda: collectives.all_to_all(received, given, group=group)


def _broadcast(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    values = _values(numbers, device)
    return lambda: collectives.broadcast(values, group_src=0, group=group)


def _send(numbers: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Each rank sends to the next one."""
    sent, received = _values(numbers, device), _values(numbers, device)
    return lambda: exchange(sent, received, (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size(), group)


def exchange(sent: torch.Tensor, received: torch.Tensor, to: int, source: int, group: dist.ProcessGroup | None) -> None:
    """Send to a rank of a group, and receive from one, at the same time."""
    messages = [
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


CALLS: Mapping[Collective, Callable[[int, dist.ProcessGroup, torch.device], Call]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.SEND: _send,
}
"""As a run calls them: over gloo some are messages (strategies/by_messages.py). The payload is that of `Traffic`."""


def beside(timer: Timer, group: dist.ProcessGroup, share_s: float) -> Iterator[Item]:
    """Products alone, and while an all-reduce runs beside them, which takes longer than they do alone. Collective.

    Nothing, where an all-reduce takes too long.
    """
    side, size = BESIDE_SIDE[timer.kernels], BESIDE_BYTES[timer.kernels]
    left, right = (torch.ones(side, side, device=timer.device) for _ in range(2))
    result = torch.empty_like(left)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=result)

    tried = [_reduced(timer, group, part, share_s / 8) for part in (size // 64, size // 16)]
    if LEAST * timer.together(_expected_s(tried, size)) > TOO_LONG * share_s / 4:
        return
    whole_s = timer.together(_reduced(timer, group, size, share_s / 4)[1])
    compute(TRIED)
    one_s = timer.together(timer.once(lambda: compute(TRIED)) / TRIED)
    times = max(1, int(COVERED * whole_s / one_s))
    values, alone, with_messages = _values(size // FP32_BYTES, timer.device), list[float](), list[float]()
    for _ in range(min(MOST, max(LEAST, int(share_s / (4 * whole_s))))):  # in turns: other programs slow both
        timer.together()
        alone.append(timer.once(lambda: compute(times)))
        timer.together()
        work = collectives.start_all_reduce(values, group=group)
        with_messages.append(timer.once_on_stream(lambda: compute(times)))
        work.wait()
    for name, found in ((ALONE, alone), (BESIDE, with_messages)):
        yield Item(CONTENTION, name, (side, times), 2.0 * side**3 * times, Spread.of(found))


def _reduced(timer: Timer, group: dist.ProcessGroup, size: int, share_s: float) -> tuple[int, float]:
    """A payload, and the seconds of its all-reduce."""
    return size, timer.of_slowest(_all_reduce(size // FP32_BYTES, group, timer.device), share_s, group).median
