"""In: the steps of a loop. Out: a trace of each rank for ui.perfetto.dev, and how much communication was not hidden.
Does not decide what is recorded: torch's profiler does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from codescent.base.agreement import rank, together
from codescent.base.errors import UserError

Interval = tuple[float, float]


@dataclass
class Profile:
    """Seconds of one rank inside `with`; complete when it is left.

    Attributes:
        wall_s: from the first to the last thing recorded.
        compute_s: when something was computed: a kernel on a CUDA device, an operator on CPUs.
        communication_s: when a collective was under way (on a CUDA device, waiting for the other ranks is part of it).
        exposed_s: the part of that in which nothing was computed.
        trace: the file.
    """

    wall_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    trace: str = ""


@contextmanager
def profile(folder: str | PathLike[str], **options: Any) -> Iterator[Profile]:
    """Record what happens inside, on every rank. Collective.

        with codescent.profile("traces"):
            for _ in range(3):
                step()

    Leave the first steps outside: they allocate and compile. At the end each rank writes `folder/rank_00000.json`, for
    ui.perfetto.dev, and the first prints each rank's seconds of computing, communicating, and not hidden communicating.

    Args:
        folder: made if need be.
        options: for torch.profiler.profile, such as record_shapes=True, with_stack=True.

    Raises:
        UserError: a trace cannot be written.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    result = Profile()
    with torch.profiler.profile(**{"activities": activities, **options}) as recorded:
        yield result
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is still under way belongs to it

    def write() -> dict[str, Any]:
        path = Path(folder) / f"rank_{rank():05d}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        except (OSError, RuntimeError) as error:
            raise UserError(f"codescent.profile: {path}: cannot be written: {error}") from error
        vars(result).update(asdict(measure(events)), trace=str(path))
        return asdict(result)

    everyone = together(UserError, write)
    if rank() == 0:
        for number, of in enumerate(everyone):
            print(
                f"rank {number}: {of['wall_s']:.3f} s, computing {of['compute_s']:.3f}, communicating "
                f"{of['communication_s']:.3f}, of which not hidden {of['exposed_s']:.3f}: {of['trace']}",
                flush=True,
            )


def measure(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Seconds from the events of a trace, in torch's Chrome format (microseconds)."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    of_device = any(event.get("cat") == "kernel" for event in spans)
    computing, sending = [], []
    ends: list[Interval] = []
    for event in spans:
        name, kind, start = str(event["name"]), event.get("cat"), float(event["ts"])
        interval = (start, start + float(event.get("dur", 0)))
        ends.append(interval)
        if name.startswith("gloo:") or (kind == "kernel" and name.startswith("nccl")):
            sending.append(interval)
        elif kind == "kernel" or (not of_device and kind == "cpu_op" and name.startswith("aten::")):
            computing.append(interval)
    computed, sent = _union(computing), _union(sending)
    both = _seconds(computed) + _seconds(sent) - _seconds(_union([*computed, *sent]))
    wall = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e6 if ends else 0.0
    return Profile(wall, _seconds(computed), _seconds(sent), min(_seconds(sent), _seconds(sent) - both))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _seconds(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union) / 1e6
