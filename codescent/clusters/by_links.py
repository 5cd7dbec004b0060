"""In: links of hosts, such as the text "49mbit,0.2ms; 3: 10mbit,5ms", or a device. Out: a `Cluster` of which only that
is known.
Does not read a cluster file (files.py does) and does not measure a link."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from codescent.base.device_kinds import kernels_of
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.clusters.link import AT_ONCE, Link

SUCH_AS = "such as 49mbit,0.2ms; 3: 10mbit,5ms"
UNKNOWN = Software(held_bytes=0.0, fragments=0.0)
"""A program of which nothing is known: no memory beside that of tensors."""
_HOST = re.compile(r"\d{1,9}\s*", re.ASCII)


def of_device(kind: str, name: str = "", memory_bytes: int = 0) -> Cluster:
    """A cluster of which only the device is known: its kind, such as "cuda" or "cpu", and perhaps the size of its
    memory. All that is sent is there at once."""
    device = ClusterDevice(name or kind, kernels_of(kind), memory_bytes, math.inf, {})
    return Cluster(name, "", device, devices=1, cards=1, inside=AT_ONCE, between=AT_ONCE, bus=AT_ONCE)


def of_links(
    between: Link,
    hosts: Mapping[int, Link] | None = None,
    *,
    inside: Link = AT_ONCE,
    devices: int = 1,
    kind: str = "cpu",
) -> Cluster:
    """A cluster of which only the links are known.

    Args:
        between: the card of each host.
        hosts: by host, cards of single ones.
        inside: of a rank to the others of its host, and to the memory of the host.
        devices: ranks of a host.
        kind: of the devices.
    """
    device = ClusterDevice(kind, kind, 0, math.inf, {})
    return Cluster("", "", device, devices, 1, inside, between, bus=inside, hosts=hosts or {})


def cluster_of_text(text: str) -> Cluster:
    """Read a text such as "49mbit,0.2ms" or "49mbit,0.2ms; 3: 10mbit,5ms": the link of all hosts, and of single ones.

    A host's link without a latency has the common one. Raises UserError: every part that is wrong.
    """
    parts = [part for part in map(str.strip, text.split(";")) if part] or [text]
    common = [part for part in parts if ":" not in part]
    problems: list[str] = []
    if not common:
        problems.append(f"the link of the other hosts is missing: one without a host, {SUCH_AS}")
    if len(common) > 1:
        several = " and ".join(f"'{part}'" for part in common)
        problems.append(f"{several} are without a host: one link is that of all other hosts, {SUCH_AS}")
    links = [link for part in common if (link := link_of(part, 0.0, "", problems)) is not None]
    latency_s = links[0].latency_s if links else 0.0
    own: dict[int, Link] = {}
    named: set[int] = set()
    for host, _, size in (part.partition(":") for part in parts if ":" in part):
        if not _HOST.fullmatch(host):
            problems.append(f"'{host}:{size}' is not a host and its link, {SUCH_AS}")
            continue
        if int(host) in named:
            problems.append(f"host {int(host)} is named twice")
        named.add(int(host))
        if (link := link_of(size.strip(), latency_s, f"host {int(host)}: ", problems)) is not None:
            own[int(host)] = link
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return of_links(links[0], own)


def link_of(text: str, latency_s: float, where: str, problems: list[str]) -> Link | None:
    """Read a link. What is no link is a problem; `where` names it."""
    try:
        return Link.parse(text, latency_s)
    except ValueError as error:
        problems.append(f"{where}{error}")
        return None
