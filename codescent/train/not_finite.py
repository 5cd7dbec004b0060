"""In: a step that was skipped. Out: which ranks had gradients that are not finite, and their first tensor.
Does not skip a step (optimize.py does) and does not look at samples (skips.py does)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from codescent.base.agreement import together
from codescent.base.errors import UserError

if TYPE_CHECKING:
    from codescent.train.execute import Executor
    from codescent.train.optimize import Optimizer

LISTED = 8
"""Largest number of ranks in a line. The event has all of them."""


@dataclass(frozen=True)
class BadGradient:
    """What a rank computed that is not finite, before the sum over ranks.

    Attributes:
        rank, host: of it; -1 and "": no rank knows who it was.
        tensor: the first one, in the order of the plan.
        tensors: how many there are.
    """

    rank: int
    host: str
    tensor: str
    tensors: int

    def __str__(self) -> str:
        more = f" and {self.tensors - 1} more" if self.tensors > 1 else ""
        return (
            f"{f'rank {self.rank} ({self.host})' if self.host else 'an unknown rank'}: gradient of {self.tensor}{more}"
        )


def bad_gradients(executor: Executor, step: int) -> list[BadGradient]:
    """The ranks whose gradients of step `step` (from 1) were not finite. Collective."""
    optimizer = cast("Optimizer", executor.coupling.optimizer)
    names = [weight.name for weight in optimizer.weights]
    summed = [names[index] for index in optimizer.not_finite]
    own = executor.gradients.not_finite(step - 1)
    found = summed if own is None else [names[index] for index in own]
    rank = executor.world.this_rank.rank

    def tell() -> dict[str, Any]:
        return {"rank": rank, "host": socket.gethostname(), "own": found, "summed": summed}

    ranks = together(UserError, tell)
    everywhere = list(dict.fromkeys(chain.from_iterable(one["summed"] for one in ranks)))
    named = [_of_rank(one, set(everywhere)) for one in ranks if one["own"]]
    return named or ([BadGradient(-1, "", everywhere[0], len(everywhere))] if everywhere else [])


def _of_rank(told: dict[str, Any], summed: set[str]) -> BadGradient:
    """What a rank has told. Of a unit of tensors, those count that are not finite in the sum."""
    tensors = [name for name in told["own"] if name in summed] or told["own"]
    return BadGradient(told["rank"], told["host"], tensors[0], len(tensors))


def named_gradients(found: Sequence[BadGradient]) -> str:
    """For a line; "": nothing was found."""
    more = len(found) - LISTED
    return "; ".join([*map(str, found[:LISTED]), *([f"and {more} more ranks"] if more > 0 else [])])
