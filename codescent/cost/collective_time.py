"""In: a collective, the ranks of its group, a cluster. Out: the seconds that it takes, and the link that it crosses.
Does not say what waits for it (stage_time.py does) and does not measure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from codescent.clusters.cluster import Cluster, Software
from codescent.plan import Collective, Mesh, Traffic

INSIDE, BETWEEN, BUS = "inside", "between", "bus"
"""Links: of a device to the others of its node, of a node to other nodes, of a device to its host's memory."""


@dataclass(frozen=True)
class RankGroup:
    """How the ranks of a group lie on nodes.

    Attributes:
        ranks: of the group.
        nodes: on which they are.
        members: the most of them on one node.
        groups: those of the same axis that share the cards of a node: all send at the same time.
    """

    ranks: int
    nodes: int
    members: int
    groups: int

    @property
    def link(self) -> str:
        """The slowest link that the group crosses."""
        return BETWEEN if self.nodes > 1 else INSIDE


@lru_cache(maxsize=16384)
def group_of(mesh: Mesh, axis: str, rank: int, devices: int) -> RankGroup:
    """The group of a rank on an axis, on nodes of so many devices. Neighbouring ranks share a node."""
    ranks = mesh.group(axis, rank)
    on = Counter(one // devices for one in ranks)
    members = max(on.values())
    return RankGroup(len(ranks), len(on), members, max(1, min(devices, mesh.world_size) // members))


def seconds(
    record: Traffic, mesh: Mesh, rank: int, cluster: Cluster, software: Software, messages: int = 1
) -> tuple[str, float]:
    """The link and the seconds of one run of a collective. `messages`: into which it is divided.

    Latency and bytes add up (Hockney 1994, "The communication challenge for MPP"); a link with a curve says what a
    message of each size takes. What a rank sends is what the ring algorithms send (`Traffic.wire_bytes`).
    """
    if not record.axis:
        name, link = (BUS, cluster.bus) if record.collective is Collective.COPY else (INSIDE, cluster.inside)
        return name, link.seconds(record.inside_bytes)
    group = group_of(mesh, record.axis, rank, cluster.devices)
    if group.ranks == 1:
        return INSIDE, 0.0
    return group.link, collective_s(record, group, cluster, software, messages)


def collective_s(record: Traffic, group: RankGroup, cluster: Cluster, software: Software, messages: int = 1) -> float:
    """The seconds of one run of a collective of a group of several ranks. See `seconds`."""
    inside_sent, between_sent = _sent(record, group, cluster, software)

    def way_s(way: CollectiveWay) -> float:
        steps = messages * way.steps
        moved_s = cluster.inside.moved_s(inside_sent, steps)
        if between_sent:
            moved_s = max(moved_s, cluster.between.moved_s(between_sent, steps))
        return messages * (software.collective_s + way.latency_s) + moved_s

    return min(map(way_s, _ways(record, group, cluster, software)))


def _sent(record: Traffic, group: RankGroup, cluster: Cluster, software: Software) -> tuple[float, float]:
    """The bytes of each rank, as if the link inside of its node and a card were its own, and whole: with half of a card
    it sends twice as many. 0 between nodes: nothing goes there.

    Between nodes a group makes as many rings as it has ranks on a node, and each has its share of the cards (NVIDIA
    2018, "Massively scale your deep learning training with NCCL 2.4"). A group with one rank on each node has the share
    of one device: the groups of the other devices send at the same time.
    """
    sent = record.wire_bytes(group.ranks)
    by_pairs = group.nodes > 1 and record.collective in (Collective.SEND, Collective.ALL_TO_ALL)
    sharers = group.members * group.groups if cluster.shares_inside and not by_pairs else 1
    inside = sent * sharers / software.inside_efficiency
    if group.nodes == 1:
        return inside, 0.0
    cards = cluster.cards / group.groups
    if record.collective is Collective.SEND:  # one rank of each group on a node sends to the next node, over one card
        cards = min(1.0, cards)
    elif record.collective is Collective.ALL_TO_ALL:
        cards /= group.members
        sent = (group.ranks - group.members) / group.ranks * record.payload_bytes
    else:
        cards = min(cards, float(software.rings or cards))
    return inside, sent / (cards * software.between_efficiency)


class CollectiveWay(NamedTuple):
    """A way of a collective: how many messages follow one another on its slowest link, and the latency of all."""

    steps: int
    latency_s: float


def _ways(record: Traffic, group: RankGroup, cluster: Cluster, software: Software) -> list[CollectiveWay]:
    """Messages of a ring follow one another. A sum may go up and down a tree between nodes instead (Sanders et al.
    2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan")."""
    inside_s, between_s = (link.latency_s + software.hop_s for link in (cluster.inside, cluster.between))
    hop_s = between_s if group.nodes > 1 else inside_s
    if record.collective in (Collective.SEND, Collective.BROADCAST):
        return [CollectiveWay(1, hop_s)]
    hops = group.ranks - 1
    if record.collective is not Collective.ALL_REDUCE:
        return [CollectiveWay(hops, hops * hop_s)]
    ring = CollectiveWay(2 * hops, 2 * hops * hop_s)
    if group.nodes == 1:
        return [ring]
    levels = math.ceil(math.log2(group.nodes))
    return [ring, CollectiveWay(2 * levels, 2 * ((group.members - 1) * inside_s + levels * between_s))]
