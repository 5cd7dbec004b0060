"""In: a collective, the ranks of its group, a cluster. Out: the seconds that it takes, and the link that it crosses.
Does not say what waits for it (stage_time.py does) and does not measure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

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

    Latency and bytes add up (Hockney 1994, "The communication challenge for MPP"). What a rank sends is what the ring
    algorithms send (`Traffic.wire_bytes`).
    """
    if not record.axis:
        name, link = (BUS, cluster.bus) if record.collective is Collective.COPY else (INSIDE, cluster.inside)
        return name, link.latency_s + record.inside_bytes / link.bytes_per_s
    group = group_of(mesh, record.axis, rank, cluster.devices)
    if group.ranks == 1:
        return INSIDE, 0.0
    latency_s = messages * (software.collective_s + _latency_s(record, group, cluster, software))
    return group.link, latency_s + _bytes_s(record, group, cluster, software)


def _bytes_s(record: Traffic, group: RankGroup, cluster: Cluster, software: Software) -> float:
    """Seconds of the bytes."""
    sent = record.wire_bytes(group.ranks)
    if group.nodes == 1 or record.collective not in (Collective.SEND, Collective.ALL_TO_ALL):
        return sent / _ring_bytes_per_s(cluster, group, software)
    inside = cluster.inside.bytes_per_s * software.inside_efficiency
    card = cluster.between.bytes_per_s * software.between_efficiency
    if record.collective is Collective.SEND:  # one rank of each group on a node sends to the next node, over one card
        return sent / min(inside, card * min(1.0, cluster.cards / group.groups))
    others = (group.ranks - group.members) / group.ranks * record.payload_bytes
    return max(sent / inside, others / (card * cluster.cards / (group.members * group.groups)))


def _ring_bytes_per_s(cluster: Cluster, group: RankGroup, software: Software) -> float:
    """Bytes per second that each rank of a ring sends.

    Between nodes a group makes as many rings as it has ranks on a node, and each has its share of the cards (NVIDIA
    2018, "Massively scale your deep learning training with NCCL 2.4"). A group with one rank on each node has the share
    of one device: the groups of the other devices send at the same time.
    """
    inside = cluster.inside.bytes_per_s * software.inside_efficiency
    if cluster.shares_inside:
        inside /= group.members * group.groups
    if group.nodes == 1:
        return inside
    cards = cluster.cards / group.groups
    cards = min(cards, float(software.rings or cards))
    return min(inside, cluster.between.bytes_per_s * cards * software.between_efficiency)


def _latency_s(record: Traffic, group: RankGroup, cluster: Cluster, software: Software) -> float:
    """Messages of a ring follow one another. A sum may go up and down a tree between nodes instead (Sanders et al.
    2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan")."""
    inside_s, between_s = (link.latency_s + software.hop_s for link in (cluster.inside, cluster.between))
    hop_s = between_s if group.nodes > 1 else inside_s
    if record.collective in (Collective.SEND, Collective.BROADCAST):
        return hop_s
    ring_s = (group.ranks - 1) * hop_s
    if record.collective is not Collective.ALL_REDUCE:
        return ring_s
    tree_s = (group.members - 1) * inside_s + math.ceil(math.log2(group.nodes)) * between_s
    return 2 * min(ring_s, tree_s)
