"""In: a link, how many cards a host has. Out: `Card`: when they are free again, and the pieces that wait for them.
Does not say what is sent (network.py does)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from codescent.clusters.link import Link
from codescent.cost.events import Event

Queue = dict[int, "WaitingPiece"]
"""Pieces by number: those that wait longest have the smallest."""


@dataclass
class Card:
    """The network cards of a host, or what a rank has for messages inside it. Each sends one message at a time, and
    receives one at a time.

    Attributes:
        link: of each of them.
        cards: how many there are.
        together: all of them as one link.
        sends_free, receives_free: when each is free again.
        sending_s, receiving_s: how long they were busy, in the mean.
        sends, receives: pieces that wait for one.
    """

    link: Link
    cards: int = 1
    together: Link = field(init=False)
    sends_free: list[float] = field(init=False)
    receives_free: list[float] = field(init=False)
    sending_s: float = 0.0
    receiving_s: float = 0.0
    sends: Queue = field(default_factory=dict)
    receives: Queue = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.together = self.link.shared(self.cards)
        self.sends_free, self.receives_free = [0.0] * self.cards, [0.0] * self.cards

    @property
    def sends_free_s(self) -> float:
        """When one of them is free to send."""
        return min(self.sends_free)

    @property
    def receives_free_s(self) -> float:
        """When one of them is free to receive."""
        return min(self.receives_free)


@dataclass
class WaitingPiece:
    """A piece of a message that waits until both cards are free.

    Attributes:
        share: of the message.
        leaves: happens when it begins to cross the cards.
        end_s: when it has crossed them.
    """

    sender: int
    receiver: int
    payload_bytes: float
    share: float
    out: Card
    into: Card
    leaves: Event = field(default_factory=Event)
    end_s: float = math.nan


def keep_busy(free: list[float], until_s: float, *, all_of_them: bool) -> None:
    """Keep all cards of a host busy, or the one that is free first."""
    if all_of_them:
        free[:] = [until_s] * len(free)
    else:
        free[free.index(min(free))] = until_s
