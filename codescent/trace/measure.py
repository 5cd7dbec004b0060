"""In: the events of a trace. Out: seconds of computation, of communication, and of communication that nothing hides.
Does not read a file (chrome.py does) and knows no ranges of codescent: it serves loops of users (own/profile.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from codescent.trace.intervals import Interval, seconds, union


@dataclass
class Measured:
    """Seconds of one rank.

    Attributes:
        wall_s: from the begin of the first recorded event to the end of the last one.
        compute_s: time in which a kernel (on a CUDA device) or an operator (on a CPU) ran.
        communication_s: time in which a collective ran; on a CUDA device this includes waiting for other ranks.
        exposed_s: the part of communication_s in which the rank computed nothing.
    """

    wall_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


def measure(events: Iterable[Mapping[str, Any]]) -> Measured:
    """Measure the events of a trace in torch's Chrome format, whose times are microseconds."""
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
    computed, sent = union(computing), union(sending)
    both = seconds(computed) + seconds(sent) - seconds(union([*computed, *sent]))
    wall = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e6 if ends else 0.0
    return Measured(wall, seconds(computed), seconds(sent), min(seconds(sent), seconds(sent) - both))
