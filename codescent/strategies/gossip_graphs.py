"""In: the name of a graph, a number of replicas, a round. Out: the mixing matrix: who reads whom, how much.
Does not send anything (mixing.py does) and does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from codescent.plan import Plan

AXIS = "dp_replicate"
SYMMETRIC = ("ring", "complete")
"""Graphs that are the same in every round, with a symmetric matrix."""
DRAWN = ("pairs", "push-sum")
"""Graphs whose neighbours are drawn in each round."""

Row = Mapping[int, float]


@dataclass(frozen=True)
class Graph:
    """Who exchanges with whom. All replicas compute the same matrices, from the same numbers.

    Attributes:
        kind: ring, pairs, complete, exponential or push-sum.
        replicas: their number, at least 2.
        seed: of what is drawn.
        rate: how far an exchange goes: the matrix is (1 - rate) I + rate W.
    """

    kind: str
    replicas: int
    seed: int = 0
    rate: float = 1.0

    def matrix(self, round_number: int) -> list[Row]:
        """Row i: by replica, its weight in the new weights of replica i; itself included, in ascending order.

        Each column sums to 1, so the sum over replicas stays. Each row does, too, but for push-sum.
        """
        sources = self._sources(round_number)
        share = self._share
        rows: list[Row] = []
        for index, others in enumerate(sources):
            kept = share if others or self.kind == "push-sum" else 1.0
            own = (1.0 - self.rate) + self.rate * kept  # with rate 1 exactly the share of the others
            rows.append(dict(sorted({**dict.fromkeys(others, self.rate * share), index: own}.items())))
        return rows

    def targets(self, round_number: int, replica: int) -> list[int]:
        """The replicas to which a replica sends, in ascending order."""
        sources = self._sources(round_number)
        return [index for index, others in enumerate(sources) if replica in others]

    @property
    def messages(self) -> int:
        """The most messages that a replica sends in a round."""
        return {"ring": min(2, self.replicas - 1), "complete": self.replicas - 1}.get(self.kind, 1)

    @property
    def turn(self) -> int:
        """Rounds after which the same neighbours come again. Those that are drawn have no turn: 1."""
        return max(1, (self.replicas - 1).bit_length()) if self.kind == "exponential" else 1

    @property
    def resting(self) -> int:
        """Replicas that have no partner in a round."""
        return self.replicas % 2 if self.kind == "pairs" else 0

    @property
    def _share(self) -> float:
        """The weight of each other replica: equal weights of all neighbours and itself."""
        return 1.0 / (self.messages + 1)

    def _sources(self, round_number: int) -> list[list[int]]:
        """By replica: those of which it receives."""
        n, everyone = self.replicas, range(self.replicas)
        if self.kind == "complete":
            return [[other for other in everyone if other != index] for index in everyone]
        if self.kind == "ring":
            return [sorted({(index - 1) % n, (index + 1) % n}) for index in everyone]
        if self.kind == "exponential":
            hop = 1 << round_number % self.turn
            return [[(index - hop) % n] for index in everyone]
        sources: list[list[int]] = [[] for _ in everyone]
        for sender, receiver in self._drawn(round_number):
            sources[receiver].append(sender)
        return sources

    def _drawn(self, round_number: int) -> Iterator[tuple[int, int]]:
        """The messages of a round of pairs or of push-sum."""
        n = self.replicas
        if self.kind == "pairs":
            order = sorted(range(n), key=lambda index: self._number(round_number, index))
            for one, other in zip(order[::2], order[1::2]):
                yield from ((one, other), (other, one))
        else:
            for index in range(n):
                yield index, (index + 1 + self._number(round_number, index) % (n - 1)) % n

    def _number(self, round_number: int, index: int) -> int:
        """A pseudo-random number, the same with every version of Python."""
        text = f"{self.seed} {round_number} {index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@dataclass(frozen=True)
class GossipPairs:
    """Who averages with whom in asynchronous gossip. Replicas of even index are active: they begin an average.

    The others are passive: they answer. Of an odd number of replicas the last one is passive, too.

    Attributes:
        kind: ring or pairs.
        replicas: their number, at least 2; even in a ring.
        seed: of what is drawn.
    """

    kind: str
    replicas: int
    seed: int = 0

    def is_active(self, replica: int) -> bool:
        """Whether a replica begins averages."""
        return replica % 2 == 0 and replica + 1 < self.replicas

    def partners(self, replica: int) -> list[int]:
        """The replicas with which it may average, in ascending order."""
        if self.kind == "ring":
            return sorted({(replica - 1) % self.replicas, (replica + 1) % self.replicas})
        active = self.is_active(replica)
        return [other for other in range(self.replicas) if self.is_active(other) != active]

    def partner(self, replica: int, begin: int, number: int) -> int:
        """With whom an active replica averages.

        Args:
            replica: the active one.
            begin: number of steps that were complete when all ranks last agreed.
            number: of its averages since then.
        """
        passive = self.partners(replica)
        text = f"{self.seed} {begin} {number} {replica}"
        return passive[int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % len(passive)]


def graph_of(plan: Plan) -> Graph:
    """Who exchanges with whom in a plan with gossip."""
    return Graph(plan.layout.gossip, plan.mesh.degree(AXIS), plan.seed, plan.layout.gossip_rate)


def pairs_of(plan: Plan) -> GossipPairs:
    """The pairs of a plan with asynchronous gossip."""
    return GossipPairs(plan.layout.gossip, plan.mesh.degree(AXIS), plan.seed)
