"""In: the messages between pipeline stages, a cluster. Out: the seconds of each, by the link over which it leaves.
Does not say when they leave (lanes.py and simulate.py do)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.collective_time import INSIDE, seconds
from codescent.plan import SENDS, Mesh, Traffic, Verb


class Transfer(NamedTuple):
    """The messages from a stage to a neighbour. `link`: that of the longest one (collective_time.py). `seconds`: of
    that one, latency included; 0: nothing leaves."""

    link: str
    seconds: float


def link_of(stage: int, stages: int, *, forward: bool) -> int:
    """The link over which a stage sends activations (`forward`) or gradients. Of two stages one link carries both."""
    return 2 * stage + (stages > 2 and not forward)


def transfers(records: Iterable[Traffic], mesh: Mesh, cluster: Cluster, software: Software) -> list[Transfer]:
    """The messages between stages, by `link_of`. Two stages on one node exchange inside of it.

    `records`: of a step. Others than messages between stages do not count.
    """
    found, ranks = [Transfer(INSIDE, 0.0)] * (2 * mesh.pp), _unlike(mesh, cluster.devices)
    for record in records:
        if record.verb in SENDS:
            stage = mesh.coordinates(mesh.group(record.axis, 0)[0])["pp"]
            number = link_of(stage, mesh.pp, forward=record.verb is Verb.SEND_ACTIVATION)
            those = (Transfer(*seconds(record, mesh, rank, cluster, software)) for rank in ranks)
            found[number] = max(found[number], *those, key=lambda one: one.seconds)
    return found


def between_neighbours(record: Traffic, stages: int) -> list[Traffic]:
    """Messages like this one from each stage to the one behind it and back, and between the last and the first one."""
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages)]
    there = [replace(record, axis=f"pp[{one},{other}]", verb=Verb.SEND_ACTIVATION) for one, other in pairs]
    return [*there, *(replace(record, axis=f"pp[{other},{one}]", verb=Verb.SEND_GRADIENT) for one, other in pairs)]


def _unlike(mesh: Mesh, devices: int) -> Sequence[int]:
    """Ranks of the first stage whose messages may cross other links. Where stages do not fill nodes, some leave the
    node and others do not."""
    stage = mesh.world_size // mesh.pp
    return range(stage) if stage < devices and devices % stage else range(1)
