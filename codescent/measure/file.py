"""In: what the ranks have found, or a cluster; tables of nccl-tests. Out: the cluster, and the text of its file.
Does not measure and does not write the file (verbs/measure.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from codescent.base.amounts import of_bytes, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.device_kinds import CPU
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.described import to_toml
from codescent.clusters.files import OWN
from codescent.clusters.link import CurvePoint, Link
from codescent.cost.collective_time import BETWEEN, INSIDE
from codescent.cost.update_time import HOST_KEY
from codescent.measure import constants
from codescent.measure.constants import MeasuredNumber
from codescent.measure.fit import DIGITS, LinkFit, fit, on_curve
from codescent.measure.host_rate import host_bandwidth
from codescent.measure.items import ATTENTION, CONTENTION, PRODUCT, OfAllRanks
from codescent.measure.machine_findings import MachineFindings
from codescent.measure.nccl_tests import NcclTable

NO_LINK = "not measured: "


def cluster_of(name: str, found: MachineFindings) -> Cluster:
    """The cluster of the machines that were measured. `name`: of its file."""
    peaks = {key: _rounded(one) for key, one in constants.peaks(found).items()}
    device = constants.device_of(found, peaks)
    moved = _rounded(constants.bandwidth(found))
    device = replace(device, memory_bytes_per_s=moved.value)
    software = {key: _rounded(one) for key, one in constants.software_of(found, device).items()}
    links, of_links = _links(found, moved.value)
    placement, host = found.placement, host_bandwidth(found)
    sources = {
        "device.name": f"measured on {found.where}",
        "device.memory": "torch says it" if found.kind != CPU else "a rank's share of the memory of its machine",
        "device.bandwidth": moved.source,
        **{f"peaks.{key}": one.source for key, one in peaks.items()},
        "node.devices": "ranks of a node while it was measured",
        "node.cards": "all cards of a node as one",
        **({HOST_KEY: host.source} if host else {}),
        **of_links,
        f"software.{OWN}": "the global constants of codescent, where no other source is named",
        **{f"software.{OWN}.{key}": one.source for key, one in software.items()},
    }
    own = replace(Software(), **{key: one.value for key, one in software.items()})  # type: ignore[arg-type]
    nodes = 1 if placement.nodes == 1 else None  # of several, more may be like them
    return Cluster(
        name, f"measured by codescent measure on {found.where}", device, placement.devices, 1, *links, nodes=nodes,
        host_bytes_per_s=rounded(host.value) if host else None, software={OWN: own}, sources=sources,
    )  # fmt: skip


def _rounded(one: MeasuredNumber) -> MeasuredNumber:
    return one._replace(value=rounded(one.value))


def rounded(number: float) -> float:
    """A number with as many digits as a measurement has."""
    return float(f"{number:.{DIGITS}g}")


def _links(found: MachineFindings, moved: float) -> tuple[tuple[Link, Link, Link], dict[str, str]]:
    """The links inside of nodes, between them, and to the host's memory; where each is from.

    A price needs all three. One that no rank could measure is like the next faster one, and its source says so: the
    file is of as many ranks and nodes as were measured, so no plan on them crosses it.
    """
    copied = Link(rounded(moved / 2))
    bus = constants.of_bus(found)
    sources = {"links.bus": "measured: copies" if bus else "a CPU's memory is that of its host: copies in it"}
    of_inside, of_between = (constants.of_link(found, link) for link in (INSIDE, BETWEEN))
    inside = copied if of_inside is None else of_inside.link
    sources["links.inside"] = (
        f"{NO_LINK}no collective of several ranks on a node; copies in memory stand for it"
        if of_inside is None
        else f"measured: collectives of {found.placement.devices} ranks, {_errors(of_inside)}"
    )
    if of_between is None:
        between = inside
        sources["links.between"] = f"{NO_LINK}no collective of several nodes; the link inside of a node stands for it"
    else:  # the ranks of a node sent at the same time, so each had a share of its cards
        between = of_between.link.shared(found.placement.devices)
        words = f"measured: collectives of {found.placement.nodes} nodes, {found.placement.devices} at the same time"
        sources["links.between"] = f"{words}, {_errors(of_between)}"
    links = _link(inside), _link(between), _link(bus or copied)
    return links, sources | _of_curves({"links.inside": links[0], "links.between": links[1]}, sources)


def _link(found: Link) -> Link:
    curve = [CurvePoint(float(round(one.message_bytes)), rounded(one.bytes_per_s)) for one in found.curve]
    return on_curve(Link(rounded(found.bytes_per_s), rounded(found.latency_s)), curve)


def _of_curves(links: Mapping[str, Link], sources: Mapping[str, str]) -> dict[str, str]:
    """The sources of curves: those of their links."""
    return {f"{key}_curve": sources[key] for key, link in links.items() if link.curve}


def _errors(found: LinkFit) -> str:
    large = "" if math.isnan(found.worst_large) else f", {of_share(found.worst_large)} at most from 1 MiB"
    how = "a curve of messages, because a line is far from some, with" if found.link.curve else "fitted with"
    return f"{how} an error of {of_share(found.median)} in the middle, {of_share(found.worst)} at most{large}"


def refuse_tables(tables: Mapping[str, NcclTable], devices: int, link: str) -> None:
    """Raise UserError: tables are of hosts with more ranks than a node has, or of another link than is said.

    Args:
        tables: by the path of each.
        devices: of a node.
        link: INSIDE or BETWEEN; empty: that which the ranks of a table cross.
    """
    problems = []
    for path, table in tables.items():
        if link and link != table.link:
            hosts = "one host" if table.hosts == 1 else f"{table.hosts} hosts"
            problems.append(f"--{link} --nccl-tests {path}: its {table.ranks} ranks are on {hosts}; leave out --{link}")
        if (each := table.ranks // table.hosts) > devices:
            problems.append(
                f"--nccl-tests {path}: its hosts have {each} ranks each, and a node has {counted(devices, 'device')} "
                "here: it is of other machines; give --cluster NAME with a file of them, or --ranks"
            )
    if problems:
        raise UserError(*problems)


def with_tables(cluster: Cluster, tables: Mapping[str, NcclTable]) -> Cluster:
    """The cluster with links from tables of nccl-tests, by the path of each (`refuse_tables`).

    Raises UserError: times of a table do not grow with its sizes.
    """
    of_link: dict[str, list[str]] = {}
    for path, table in tables.items():
        of_link.setdefault(table.link, []).append(path)
    for crossed in (one for one in (INSIDE, BETWEEN) if one in of_link):  # what is inside counts between, too
        measured = [one for path in of_link[crossed] for one in tables[path].measured]
        try:
            found = fit(measured, cluster.inside)
        except ValueError as error:
            paths = ", ".join(of_link[crossed])
            raise UserError(f"--nccl-tests {paths}: {error}; give a table up to larger sizes, such as -e 1G") from error
        new = _link(found.link)
        if crossed == BETWEEN:  # a ring that enters a node has all of its cards
            new = _link(new.shared(1 / cluster.cards))
        names = ", ".join(dict.fromkeys(str(tables[path].collective) for path in of_link[crossed]))
        ranks = " and ".join(f"{tables[path].ranks} ranks on {tables[path].hosts} hosts" for path in of_link[crossed])
        source = f"nccl-tests: {names} of {ranks}, {_errors(found)}"
        kept = {key: one for key, one in cluster.sources.items() if key != f"links.{crossed}_curve"}
        named = {f"links.{crossed}": source}
        cluster = replace(cluster, sources={**kept, **named, **_of_curves({f"links.{crossed}": new}, named)})
        cluster = replace(cluster, between=new, nodes=None) if crossed == BETWEEN else replace(cluster, inside=new)
    return cluster


def text_of(cluster: Cluster, found: MachineFindings | None) -> str:
    """The text of a cluster file. Comments at its end have all that was measured, with its spread."""
    return to_toml(cluster) + "".join(f"# {line}\n" if line else "#\n" for line in _comments(found))


def _comments(found: MachineFindings | None) -> Iterator[str]:
    if found is None:
        return
    yield f"What was measured: {found.where}."
    yield "Seconds of one repeat: median (10 to 90 %), repeats; with the rate."
    yield from table_of(found.items)
    if found.start_s is not None:
        yield f"start of a rank: {_seconds(found.start_s.median, found.start_s.low, found.start_s.high)}"
    yield f"memory of {'a small run' if found.has_trained else 'an empty rank'}: {of_bytes(found.held_bytes)}"
    yield from (*found.outliers, *found.notes)


def table_of(items: Sequence[OfAllRanks]) -> Iterator[str]:
    """A line for each item."""
    for one in items:
        item, seconds = one.item, one.seconds
        what = " ".join(filter(None, (item.kind, item.name, "x".join(map(str, item.sizes)))))
        times = _seconds(seconds.median, seconds.low, seconds.high)
        per_second = ""
        if item.amount > 1:
            show = constants.flops if item.kind in (PRODUCT, ATTENTION, CONTENTION) else constants.rate
            per_second = f"; {show(one.rate.median)}"
        yield f"{what}: {times}, {seconds.repeats}{per_second}"


def _seconds(median: float, low: float, high: float) -> str:
    return f"{of_seconds(median)} ({of_seconds(low)} to {of_seconds(high)})"
