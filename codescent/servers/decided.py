"""In: pushes in the order in which the first server applies them. Out: those that another server has not heard of yet.
Does not hold gradients: a server applies a push whose part it has received from the worker."""

from __future__ import annotations

from collections.abc import Iterable


class Decided:
    """The order that the first of several servers decides, and the others follow.

    Each server has its part of a push before the first one decides about it. So all servers apply a push or none does,
    in one order, whoever loses a connection or dies meanwhile. This is a commit in two phases (Gray 1978, "Notes on
    data base operating systems", 5.8.3.3), with the first server as its coordinator.

    Args:
        first: number of pushes that were applied before.
        followers: the other servers.
    """

    def __init__(self, first: int, followers: Iterable[int]) -> None:
        self._first = first
        self._known = dict.fromkeys(followers, first)  # pushes that each of them has heard of
        self._pushes: list[tuple[int, int]] = []  # worker and number

    def append(self, worker: int, number: int) -> None:
        """The next push is that one."""
        if self._known:
            self._pushes.append((worker, number))

    def after(self, follower: int, pushes: int) -> list[tuple[int, int]]:
        """Workers and numbers after the first `pushes`, which this follower knows. What all know is forgotten."""
        self._known[follower] = pushes
        known = min(self._known.values())
        del self._pushes[: known - self._first]
        self._first = max(self._first, known)
        return self._pushes[pushes - self._first :]
