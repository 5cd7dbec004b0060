"""In: intervals of time. Out: their union, their intersection, their length. Times are microseconds, as in traces.
Does not know what happens in an interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch. The result is sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that are in both. Arguments and result are results of `union`."""
    found: list[Interval] = []
    one, other = 0, 0
    while one < len(first) and other < len(second):
        start, end = max(first[one][0], second[other][0]), min(first[one][1], second[other][1])
        if start < end:
            found.append((start, end))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return found


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that are in the first and not in the second. Arguments and result are results of `union`."""
    found: list[Interval] = []
    other = 0
    for start, end in first:
        while other < len(second) and second[other][1] <= start:
            other += 1
        at = other
        while at < len(second) and second[at][0] < end:
            if start < second[at][0]:
                found.append((start, second[at][0]))
            start = max(start, second[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def seconds(merged: Iterable[Interval]) -> float:
    """The length of a result of `union`, in seconds."""
    return sum(end - start for start, end in merged) / 1e6
