"""In: an all-gather or all-to-all of many bytes over gloo. Out: the same values, sent in pieces.
Does not decide what is sent. Other backends, which cut messages themselves, get the whole call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from codescent.plan.wire import PIECE_BYTES, PIECES_AT_ONCE


def all_gather_in_pieces(collective: Callable[..., Any], start: Callable[..., Any]) -> Callable[..., None]:
    """A function of (received, sent, group=...) that returns at its end. `received` has a row for each rank.

    Args:
        collective: returns at its end.
        start: returns a handle that can be waited for.
    """

    def run(received: torch.Tensor, sent: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        rows, row = received.view(group.size(), -1), sent.reshape(-1)
        step = _step(row, group)
        if step >= len(row):
            collective(received, sent, group=group)
            return
        pieces = _Pieces()
        for into, part in zip(torch.split(rows, step, 1), torch.split(row, step)):
            found = row.new_empty(into.shape)
            pieces.add(start(found.view(-1), part, group=group), part, found, into)
        pieces.land(0)

    return run


def all_to_all_in_pieces(collective: Callable[..., Any], start: Callable[..., Any]) -> Callable[..., None]:
    """See all_gather_in_pieces. Here `sent` has a row for each rank, too."""

    def run(received: torch.Tensor, sent: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        rows, leaving = received.view(group.size(), -1), sent.view(group.size(), -1)
        step = _step(leaving[0], group)
        if step >= leaving.shape[1]:
            collective(received, sent, group=group)
            return
        pieces = _Pieces()
        for into, part in zip(torch.split(rows, step, 1), torch.split(leaving, step, 1)):
            part, found = part.contiguous(), rows.new_empty(into.shape)
            pieces.add(start(found, part, group=group), part, found, into)
        pieces.land(0)

    return run


class _Pieces:
    """Pieces under way, with the memory that they need."""

    def __init__(self) -> None:
        self._flying: deque[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]] = deque()

    def add(self, work: Any, part: torch.Tensor, found: torch.Tensor, into: torch.Tensor) -> None:
        """A piece has begun that sends `part` and receives `found`, whose place is `into`."""
        self._flying.append((work, part, found, into))
        self.land(PIECES_AT_ONCE - 1)

    def land(self, most: int) -> None:
        """Wait until at most so many are under way."""
        while len(self._flying) > most:
            work, _, found, into = self._flying.popleft()
            work.wait()
            into.copy_(found)


def _step(row: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Elements of a piece: all of them where the backend is not gloo."""
    is_gloo = row.device.type == "cpu" and dist.get_backend(group) == "gloo"
    return PIECE_BYTES // row.element_size() if is_gloo else max(1, len(row))
