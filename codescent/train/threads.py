"""In: sizes of a micro-batch, the largest number of threads. Out: seconds of the same work with several numbers of
threads, and the number to use.
Does not change the number during a run: another number adds in another order, so the losses would change."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from codescent.base.agreement import together
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.operators import products
from codescent.plan import Plan

ROWS, WIDTH = 256, 1024
"""Largest number of tokens and channels of the trial: more would not change which number of threads is best."""

TURN_S = 0.02
"""Seconds of one turn: some time slices of the system's scheduler (3 ms)."""

TURNS, FEWEST_TURNS, TRIAL_S = 7, 3, 0.7
"""Turns of each number; the fewest, and the seconds after which no further round begins."""

CLEARLY = 1.2
"""A smaller number of threads is chosen if it is this many times as fast as a larger one. Less may be noise."""

BUSY = 0.5
"""Cores by which the threads of all programs exceed the cores before it is said. Less is the system's own work."""

STAT = Path("/proc/stat")


def candidates(most: int) -> list[int]:
    """The numbers of threads to try, from 1 to `most`: at most five."""
    return sorted({1, max(1, most // 2), max(1, most * 3 // 4), max(1, most - 1), most})


def try_threads(plan: Plan, most: int) -> dict[int, float]:
    """Seconds of a part of a micro-batch with each number of `candidates`; the median of turns of 0.02 s.

    The numbers take turns, so that other programs slow all of them. At the end torch uses as many threads as before.
    """
    work, before = _micro_batch(plan), torch.get_num_threads()
    turns: dict[int, list[float]] = {number: [] for number in candidates(most)}
    begin = time.perf_counter()
    for turn in range(TURNS):
        if turn >= FEWEST_TURNS and time.perf_counter() - begin > TRIAL_S:
            break
        for number in turns if turn % 2 == 0 else reversed(turns):
            torch.set_num_threads(number)
            turns[number].append(_turn(work))
    torch.set_num_threads(before)
    return {number: statistics.median(seconds) for number, seconds in turns.items()}


def _micro_batch(plan: Plan) -> Callable[[], object]:
    """A function that computes what a feed-forward layer does to a micro-batch: products and element-wise operators."""
    dtype = TORCH_DTYPE[plan.work.precision]
    rows, width = min(plan.work.microbatch_size * plan.work.seq_len, ROWS), min(plan.model.hidden_dim, WIDTH)
    sizes = ((rows, width), (4 * width, width), (width, 4 * width))
    x_ND, up_FD, down_DF = (torch.ones(*size, dtype=dtype) for size in sizes)

    def compute() -> None:
        h_NF = F.gelu(products.mm(F.layer_norm(x_ND, (width,)), up_FD.t()), approximate="tanh")
        y_ND = products.mm(h_NF, down_DF.t())
        products.mm(y_ND.t(), h_NF)

    return compute


def _turn(work: Callable[[], object]) -> float:
    """Mean seconds of the work, repeated for TURN_S."""
    work()  # starts the threads
    begin, count = time.perf_counter(), 0
    while True:
        work()
        count += 1
        spent = time.perf_counter() - begin
        if spent >= TURN_S:
            return spent / count


def of_slowest_rank(mine: Mapping[int, float]) -> dict[int, float]:
    """By number of threads: the most seconds of any rank that tried the same numbers as this one. Collective.

    Ranks wait for the slowest. Ranks that tried the same numbers choose the same one.
    """
    trials = together(UserError, lambda: {str(number): seconds for number, seconds in mine.items()})
    alike = [trial for trial in trials if list(map(int, trial)) == list(mine)]
    return {number: max(trial[str(number)] for trial in alike) for number in mine}


def fastest(seconds: Mapping[int, float]) -> int:
    """The number of threads to use: the largest that is not clearly slower than another."""
    best = min(seconds.values())
    return max(number for number, spent in seconds.items() if spent <= CLEARLY * best)


class Load:
    """Measures how busy the cores of this process are, from now until `end`. Without /proc/stat they are idle."""

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self.begin = self._now()

    def end(self) -> tuple[str, int, float, float]:
        """The cores' name, equal on ranks that share them; their number; those in use; those that this process uses."""
        clock_s, all_s, own_s = (now - begin for now, begin in zip(self._now(), self.begin, strict=True))
        name = f"{socket.gethostname()} {self.cores}"
        return name, len(self.cores), all_s / clock_s, own_s / clock_s

    def _now(self) -> tuple[float, float, float]:
        """The clock, the time in which the cores were busy, and the time of this process on them; in seconds."""
        lines = STAT.read_text().splitlines() if STAT.is_file() else []
        fields = {name: numbers for name, *numbers in map(str.split, filter(None, lines))}
        # https://docs.kernel.org/filesystems/proc.html#miscellaneous-kernel-statistics-in-proc-stat
        ticks = [list(map(int, fields[name])) for core in self.cores if (name := f"cpu{core}") in fields]
        busy = sum(sum(numbers[:8]) - numbers[3] - numbers[4] for numbers in ticks)  # without idle, iowait
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def used_by_others(ranks: Sequence[tuple[int, Sequence[Any]]]) -> dict[str, float]:
    """The cores that other programs use, of the cores that lack most for the threads of their ranks.

    Args:
        ranks: threads of each rank, and `Load.end`.

    Returns:
        "cores", "used" by others, and "wanted" by the threads of the ranks.
    """
    found = []
    for name, cores, _, _ in {load[0]: load for _, load in ranks}.values():
        sharing = [(number, load) for number, load in ranks if load[0] == name]
        used = max(load[2] for _, load in sharing) - sum(load[3] for _, load in sharing)
        found.append({"cores": cores, "used": round(used, 2), "wanted": sum(number for number, _ in sharing)})
    return max(found, key=lambda one: one["used"] + one["wanted"] - one["cores"])


def is_slowed(others: Mapping[str, float] | None) -> bool:
    """Whether other programs used cores that the threads of the ranks wanted, by `used_by_others`.

    A product waits for its slowest thread, so a peak that was measured then may be ten times too low.
    """
    if not others or others["used"] < BUSY:
        return False
    return others["used"] + others["wanted"] > others["cores"] + BUSY


def busy_said(machine: Mapping[str, Any]) -> str:
    """What other programs used while the peak of products was measured; "": hardly anything, or unknown.

    `machine`: environment.json.
    """
    others = machine.get("peak_others")
    if not others or others["used"] < BUSY:
        return ""
    lacks = ": too many for an MFU" if is_slowed(others) else ""
    return f" while other programs used {others['used']:.1f} of {counted(int(others['cores']), 'core')}{lacks}"


def said(chosen: Mapping[str, Any]) -> list[str]:
    """A line for people if the trial at the start of a run chose fewer threads than the cores allow, or if it chose all
    of them although other programs use some.

    `chosen`: "choice", "most", "trial" and "others" of environment.json.
    """
    now, most, trial, others = chosen["choice"], chosen["most"], chosen["trial"], chosen.get("others")
    if now == most and others and is_slowed(others):
        were = f"{counted(now, 'thread')} per rank {'was' if now == 1 else 'were'}"
        return [
            f"other programs use about {others['used']:.1f} of {others['cores']} cores; {were} still the fastest, but "
            "steps take longer than alone; train.num_threads sets another number"
        ]
    if now == most or not isinstance(trial, Mapping):
        return []
    times = trial[str(most)] / trial[str(now)]
    return [
        f"{counted(now, 'thread')} per rank: the same work takes {times:.1f} times as long with {most}, as other "
        "programs use these cores; train.num_threads sets another number"
    ]
