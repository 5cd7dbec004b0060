"""In: a `with` block around steps of a user's loop. Out: a trace per rank for ui.perfetto.dev; seconds of computation,
of communication, and of exposed communication (while nothing is computed).
Does not time operators itself: torch's profiler does."""

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
from codescent.own.arguments import PATH, public
from codescent.own.session import joined_or_alone

Interval = tuple[float, float]


@dataclass
class Profile:
    """Seconds of one rank in the `with` block. The values are set when the block ends.

    Attributes:
        wall_s: from the begin of the first recorded event to the end of the last one.
        compute_s: time in which a kernel (on a CUDA device) or an operator (on a CPU) ran.
        communication_s: time in which a collective ran; on a CUDA device this includes waiting for other ranks.
        exposed_s: the part of communication_s in which the rank computed nothing.
        trace: the path of the trace.
    """

    wall_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    trace: str = ""


@public("codescent.profile", collective=True, folder=PATH)
@contextmanager
def profile(folder: str | PathLike[str], **options: Any) -> Iterator[Profile]:
    """Record the operators and kernels of the `with` block on every rank. Collective.

        with codescent.profile("traces"):
            for _ in range(3):
                step()

    Leave out the first steps: they allocate and compile. At the end each rank writes `folder/rank_00000.json` (with its
    own number) for ui.perfetto.dev. Rank 0 prints each rank's seconds of computation, communication and exposed
    communication.

    Args:
        folder: created if it does not exist.
        options: for torch.profiler.profile, such as record_shapes=True, with_stack=True.

    Raises:
        UserError: an option is unknown, or a trace cannot be written.
    """
    joined_or_alone("profile")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    result = Profile()
    try:
        recorder = torch.profiler.profile(**{"activities": activities, **options})
    except TypeError as error:
        raise UserError(f"codescent.profile: torch.profiler.profile refuses the options: {error}") from error
    with recorder as recorded:
        yield result
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the trace has all kernels of the block

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
                f"{of['communication_s']:.3f}, of which exposed {of['exposed_s']:.3f}: {of['trace']}",
                flush=True,
            )


def measure(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Compute a Profile from the events of a trace in torch's Chrome format, whose times are microseconds."""
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
    """Merge intervals that overlap or touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _seconds(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union) / 1e6
