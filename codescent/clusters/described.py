"""In: the values of a cluster file by key, or a `Cluster`. Out: the other one; `to_toml` writes a file of it.
Does not read a file and does not check single values (files.py does)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import tomli_w

from codescent.base.amounts import of_bytes, of_rate, of_seconds
from codescent.base.sizes import memory_size
from codescent.clusters.cluster import PRECISIONS, Cluster, ClusterDevice, Software
from codescent.clusters.link import Link, rate_text
from codescent.clusters.sections import SOFTWARE, SOURCES, WHAT
from codescent.clusters.values import curve_of
from codescent.plan.device_specs import SPECS, DeviceSpec, spec_of, specs_like

LINKS = ("inside", "between", "bus")
MOST_ABOVE = 4.0
"""No point of a curve is so many times as fast as its link."""
Values = Mapping[str, Any]
"""Values by "section.key", without those that are None."""


def spec_named(name: str) -> DeviceSpec:
    """The published device of this name: its own, or what torch calls it.

    Raises ValueError, with the names that were perhaps meant: there is none.
    """
    by_name = {spec.name.lower(): spec for spec in SPECS}
    if found := by_name.get(" ".join(name.split()).lower()) or spec_of(name):
        return found
    near = [spec.name for spec in specs_like(name)][:4]
    near = near or [by_name[one].name for one in difflib.get_close_matches(name.lower(), by_name, n=1)]
    hint = f"did you mean {' or '.join(near)}?" if near else "give name, kind, memory, bandwidth and peaks instead"
    raise ValueError(f"is no device of the table of published ones; {hint}")


def from_spec(spec: DeviceSpec) -> dict[str, Any]:
    """The values that a published device gives, by key. All of them are GPUs."""
    values: dict[str, Any] = {
        "device.name": spec.name,
        "device.kind": "cuda",
        "device.memory": _memory_text(spec.memory_bytes),
        "device.bandwidth": rate_text(spec.memory_bytes_per_s),
    }
    peaks = {f"peaks.{name}": getattr(spec, name) for name in ("fp64", "fp32", "tf32", "bf16")}
    return values | {name: peak for name, peak in peaks.items() if peak is not None}


def _memory_text(size_bytes: int) -> str:
    units = (("GB", 10**9), ("GiB", 2**30), ("B", 1))
    unit, size = next((name, size) for name, size in units if size_bytes % size == 0)
    return f"{size_bytes // size}{unit}"


def problems_of(values: Values) -> Iterator[tuple[str, str]]:
    """What is missing in values that are right alone: the key, and what to write."""
    needed = {"device.name": 'such as "A100"', "device.kind": '"cuda" or "cpu"', "device.memory": 'such as "80GB"'}
    needed["device.bandwidth"] = 'such as "2039GB/s"'
    for name, form in needed.items():
        if name not in values:
            yield name, f"is missing: {form}; or name a published device with device.spec"
    if not any(f"peaks.{name}" in values for name in PRECISIONS):
        yield "peaks", "no number format has FLOP/s; give one, such as fp32 = 19.5e12, or device.spec"
    yield from _curve_problems(values)


def _curve_problems(values: Values) -> Iterator[tuple[str, str]]:
    """Curves that cannot be those of their links: bits were taken for bytes, or a message is faster than any."""
    for link in LINKS:
        points, given = curve_of(values.get(f"links.{link}_curve", ())), values.get(f"links.{link}")
        if not points or given is None:
            continue
        fastest, line = max(point.bytes_per_s for point in points), Link.parse(given)
        if fastest > MOST_ABOVE * line.bytes_per_s:
            rates = f"{of_rate(fastest, 'B/s')} is more than {MOST_ABOVE:g} times {of_rate(line.bytes_per_s, 'B/s')}"
            yield f"links.{link}_curve", f"{rates} of links.{link}; are bits meant in one of them?"
        if (first := min(points, key=lambda point: point.seconds)).seconds < line.latency_s:
            found = f"{of_bytes(first.message_bytes)} take {of_seconds(first.seconds)}"
            yield (
                f"links.{link}_curve",
                f"{found}, less than the latency of links.{link}; lower its {of_seconds(line.latency_s)}",
            )


def cluster_of(name: str, values: Values, software: Mapping[str, Values], sources: Mapping[str, str]) -> Cluster:
    """The cluster of whole, checked values."""
    device = ClusterDevice(
        values["device.name"],
        values["device.kind"],
        memory_size(values["device.memory"]).size_bytes,
        Link.parse(values["device.bandwidth"]).bytes_per_s,
        {one: float(values[f"peaks.{one}"]) for one in PRECISIONS if f"peaks.{one}" in values},
        float(values["device.sustained"]),
        values["device.units"],
    )
    host = values.get("node.host_bandwidth")
    return Cluster(
        name,
        values.get(WHAT, ""),
        device,
        values["node.devices"],
        values["node.cards"],
        _link(values, "inside"),
        _link(values, "between"),
        _link(values, "bus"),
        shares_inside=values["links.shared"],
        nodes=values.get("node.nodes"),
        host_bytes_per_s=None if host is None else Link.parse(host).bytes_per_s,
        device_hour=values.get("device.price_per_hour"),
        watts=values.get("device.watts"),
        software={one: _software(given) for one, given in software.items()},
        sources=dict(sources),
    )


def _link(values: Values, name: str) -> Link:
    return replace(Link.parse(values[f"links.{name}"]), curve=curve_of(values[f"links.{name}_curve"]))


def _software(values: Values) -> Software:
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Software(**{**values, **lists})


def values_of(cluster: Cluster) -> dict[str, Any]:
    """The values of a cluster by "section.key", without software. What is not said has none."""
    device = cluster.device
    values: dict[str, Any] = {
        WHAT: cluster.what or None,
        "device.name": device.name,
        "device.kind": device.kind,
        "device.memory": _memory_text(device.memory_bytes),
        "device.bandwidth": rate_text(device.memory_bytes_per_s),
        "device.sustained": device.sustained,
        "device.units": device.units,
        "device.price_per_hour": cluster.device_hour,
        "device.watts": cluster.watts,
        **{f"peaks.{name}": device.peaks.get(name) for name in PRECISIONS},
        "node.devices": cluster.devices,
        "node.cards": cluster.cards,
        "node.nodes": cluster.nodes,
        "node.host_bandwidth": None if cluster.host_bytes_per_s is None else rate_text(cluster.host_bytes_per_s),
        **{f"links.{name}": getattr(cluster, name).text() for name in LINKS},
        **{f"links.{name}_curve": _curve(getattr(cluster, name)) for name in LINKS},
        "links.shared": cluster.shares_inside or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _curve(link: Link) -> list[list[str]] | None:
    return [[f"{point.message_bytes:.0f}B", rate_text(point.bytes_per_s)] for point in link.curve] or None


def to_toml(cluster: Cluster) -> str:
    """A cluster as the text of a file, which `load_cluster` reads as an equal one. Its name is that of the file.

    Raises ValueError: a link has `queue_s`, or a node has cards of its own, which no file says.
    """
    if cluster.hosts:
        raise ValueError("a cluster with cards of single nodes has no file")
    tables: dict[str, Any] = {}
    for full, value in values_of(cluster).items():
        section, _, name = full.rpartition(".")
        (tables.setdefault(section, {}) if section else tables)[name] = value
    tables[SOFTWARE] = {name: _written(one) for name, one in cluster.software.items()}
    tables[SOURCES] = dict(cluster.sources)
    return tomli_w.dumps({name: table for name, table in tables.items() if table != {}})


def _written(software: Software) -> dict[str, Any]:
    """All keys, also those with the default: constants are fitted together."""
    values = dataclasses.asdict(software)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
