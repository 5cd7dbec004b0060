"""In: nothing. Out: the dataclasses of what a search has found.
Does not search (best.py does) and puts nothing into words (words.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from codescent.base.refusal import Change
from codescent.cost.price import Price
from codescent.cost.stage_memory import Fitting, StageMemory
from codescent.planner.search.space import LayoutFrame, Options, Space


class LayoutChoice(NamedTuple):
    """A combination of all searched keys."""

    frame: LayoutFrame
    options: Options


@dataclass(frozen=True)
class Found:
    """A layout and what it costs.

    Attributes:
        layout: in the space.
        change: of the config.
        price: of its plan.
        memory: of the fullest stage.
        fitting: whether it fits.
    """

    layout: LayoutChoice
    change: Change
    price: Price
    memory: StageMemory
    fitting: Fitting

    @property
    def order(self) -> tuple[float, float]:
        """The faster of two comes first, then the one that holds less."""
        return self.price.step_s, self.memory.total

    @property
    def over_bytes(self) -> float:
        """By how much it does not fit; below 0: what is left."""
        return self.memory.total - self.price.cluster.device.memory_bytes


@dataclass
class Counts:
    """Numbers of combinations.

    Attributes:
        combinations: that the ranks and the batch admit.
        refused: those that build refuses.
        other_losses: those that would change the losses.
        unpriced: those of which cost/ says that it cannot price them.
        admissible: the others.
        unfit: those too large for a device, by a lower bound or by their plan.
        simulated: those that fit and whose step is priced.
    """

    combinations: int = 0
    refused: int = 0
    other_losses: int = 0
    unpriced: int = 0
    admissible: int = 0
    unfit: int = 0
    simulated: int = 0

    @property
    def ruled_out(self) -> int:
        """Those of which a lower bound says that enough others are faster."""
        return self.admissible - self.unfit - self.simulated


@dataclass(frozen=True)
class Searched:
    """What a search has found.

    Attributes:
        space: in which it was.
        best: the fastest that fit, in order.
        least: the one with the least memory, whether it fits or not.
        first_unfit: about the fastest of those that do not fit; None: none has been found.
        counts: of combinations.
    """

    space: Space
    best: tuple[Found, ...]
    least: Found
    first_unfit: Found | None
    counts: Counts
