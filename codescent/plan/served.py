"""In: a plan with parameter servers. Out: which rows of which tensors each server holds, and its bytes.
Does not hold values and does not decide who is a server (plan.py does)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from codescent.base.dtypes import DTYPE_BYTES
from codescent.plan.layout import Layout
from codescent.plan.shard import TensorPlan


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a trained tensor, all of whose elements one server holds.

    `index`: of the tensor, among the trained ones.
    """

    index: int
    first: int
    stop: int
    row_numel: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return (self.stop - self.first) * self.row_numel


def pieces_of(tensors: Sequence[TensorPlan], servers: int) -> tuple[tuple[Piece, ...], ...]:
    """Cut the trained tensors over servers: in their order, at rows, into parts of nearly equal bytes.

    Server k has the rows that begin before the share (k + 1) / n of all elements and not before k / n. Li et al. 2014,
    "Scaling distributed machine learning with the parameter server", 4.3, cuts ranges of keys alike.
    """
    total = sum(tensor.parameter.numel for tensor in tensors)
    ends = [total * (server + 1) / servers for server in range(servers)]
    found: list[list[Piece]] = [[] for _ in range(servers)]
    begin, server = 0, 0
    for index, tensor in enumerate(tensors):
        rows, row_numel = tensor.parameter.shape[0], math.prod(tensor.parameter.shape[1:])
        first = 0
        while first < rows:
            while begin + first * row_numel >= ends[server] and server + 1 < servers:
                server += 1
            room = math.ceil((ends[server] - begin) / row_numel)
            stop = rows if server + 1 == servers else min(rows, max(first + 1, room))
            found[server].append(Piece(index, first, stop, row_numel))
            first = stop
        begin += rows * row_numel
    return tuple(map(tuple, found))


def pushes_together(layout: Layout, workers: int) -> int:
    """Pushes that an update adds: those of a step, or each alone."""
    return workers if layout.in_steps else 1


def momentum_every(layout: Layout, workers: int) -> int:
    """Updates of the weights from one update of the outer momentum to the next. 1: servers add the pushes of a round
    before they update."""
    return 1 if layout.in_steps else layout.momentum_every or workers


def outer_tensors(layout: Layout, workers: int) -> int:
    """Tensors that the outer optimizer of a server keeps for each weight: the momentum, and the sum that it waits for.

    Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (arXiv 2401.09135), algorithm 3.
    """
    if layout.outer_optimizer == "none" or layout.outer_momentum == 0:
        return 0
    return 1 if momentum_every(layout, workers) == 1 else 2


def served_bytes(tensors: Sequence[TensorPlan], pieces: Sequence[Piece], layout: Layout, workers: int) -> int:
    """Bytes of weights (in the optimizer's dtype) and optimizer state of one server."""
    found = 0
    for piece in pieces:
        tensor = tensors[piece.index]
        state = outer_tensors(layout, workers) if layout.served_rounds else tensor.optimizer_tensors
        found += piece.numel * (1 + state) * DTYPE_BYTES[tensor.optimizer_dtype]
    return found
