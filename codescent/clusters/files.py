"""In: the name or the path of a cluster file, what-ifs. Out: `Cluster`, or one error with all problems.
Does not read TOML (read.py does), define the keys (sections.py does) or write files (described.py does)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.described import LINKS, cluster_of, from_spec, problems_of, spec_named
from codescent.clusters.read import CLUSTERS, SPEC, ClusterFile, content_of, shipped_clusters, unknown_key
from codescent.clusters.sections import FROM_SPEC, SECTIONS, SOFTWARE, WHAT, SoftwareKeys, TopKeys, known_key
from codescent.config.given import Given, Problem, read_override, shown, wrong_values
from codescent.config.keys import AUTO, Section
from codescent.config.words import Key

__all__ = ["OWN", "load_cluster", "shipped_clusters", "software_of"]

LINK_KEYS = tuple(f"links.{name}" for name in LINKS)
OWN = "codescent"
"""The software of a file that is this product."""


def load_cluster(name: Path | str, changes: Sequence[str] = ()) -> Cluster:
    """Read a cluster file.

    Args:
        name: of a shipped cluster, or the path of a file. A file may stand on another one (`base`).
        changes: what-ifs KEY=VALUE, such as "links.between=50GB/s,5us". They replace values; the last one wins.

    Raises:
        UserError: all problems of all files and changes, each with its origin and what would be right.
    """
    problems: list[Problem] = []
    files = CLUSTERS.read(name, problems)
    not_read = bool(problems)
    chain = [content_of(file, problems) for file in files]
    known = {full.split(".")[1] for file in chain for full in file.values if full.startswith(f"{SOFTWARE}.")}
    chain.append(_changed(changes, known, problems))
    if not_read:
        raise UserError(*dict.fromkeys(map(str, problems)))
    merged = reduce(_on_top, chain)
    checked = _Checked(str(name), merged.values, problems)
    if problems:
        raise UserError(*dict.fromkeys(map(str, problems)))
    sources = {**checked.published, **merged.sources}
    return cluster_of(Path(name).stem, checked.values, checked.software, sources)


def software_of(cluster: Cluster, name: str | None = None) -> Software:
    """A software of a cluster file. None, or OWN: codescent, as the file has it, else with the global constants.

    Raises UserError, with the nearest name: the file has no such software.
    """
    if name is None or (name == OWN and OWN not in cluster.software):
        return cluster.software.get(OWN, Software())
    if name in cluster.software:
        return cluster.software[name]
    hint = _near_software(name, {OWN, *cluster.software})
    raise UserError(f"cluster {cluster.name}: software {shown(name)}: the file has none of this name; {hint}")


def _changed(changes: Sequence[str], known: set[str], problems: list[Problem]) -> ClusterFile:
    """What-ifs as if they were a file. `known`: names of software."""

    def key_of(name: str) -> Key | str:
        if (key := known_key(name)) is None:
            return unknown_key(name)
        if not (software := name.split(".")[1:-1]) or software[0] in {OWN, *known}:
            return key
        return f"the file has no software {shown(software[0])}; {_near_software(software[0], {OWN, *known})}"

    found = ClusterFile({}, {})
    for change in changes:
        found.values.update(read_override(change, key_of, "links.between=50GB/s,5us", problems))
    return found


def _near_software(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"


def _on_top(below: ClusterFile, file: ClusterFile) -> ClusterFile:
    """A file on top of another one. Another published device or link replaces what was said of the one before.

    The source of a value for which the file names none is its line.
    """
    gone = set(FROM_SPEC if SPEC in file.values else ())
    gone |= {f"{name}_curve" for name in file.values if name in LINK_KEYS}
    values = {name: one for name, one in below.values.items() if name not in gone} | file.values
    gone |= set(file.values)
    sources = {name: source for name, source in below.sources.items() if name not in gone}
    lines = {name: one.origin for name, one in file.values.items() if name not in (SPEC, WHAT) and one.value != AUTO}
    return ClusterFile(values, {**sources, **lines, **file.sources})


def _described(name: str) -> Key:
    key = known_key(name)
    assert key is not None
    return key


class _Checked:
    """The values of a cluster: checked, with defaults, and with those of a published device.

    Attributes:
        values: by "section.key"; those that are None are left out.
        software: the values of each software by its name.
        published: the source of each value that is of a published device.
    """

    def __init__(self, where: str, given: Mapping[str, Given], problems: list[Problem]) -> None:
        self._where, self._given, self._problems = where, given, problems
        self._wrong: set[str] = set()
        self.values = self._section("", TopKeys)
        for section, model in SECTIONS.items():
            self.values |= self._section(section, model)
        names = dict.fromkeys(full.split(".")[1] for full in given if full.startswith(f"{SOFTWARE}."))
        found = {name: self._section(f"{SOFTWARE}.{name}", SoftwareKeys) for name in names}
        self.software = {
            name: {full.rpartition(".")[2]: value for full, value in values.items()} for name, values in found.items()
        }
        self.published = self._publish()
        if SPEC not in self._wrong:
            missing = [(name, text) for name, text in problems_of(self.values) if name not in self._wrong]
            problems += [Problem(where, name, text) for name, text in missing]

    def _refuse(self, name: str, text: str) -> None:
        origin = self._given[name].origin if name in self._given else self._where
        self._wrong.add(name)
        self._problems.append(Problem(origin, name, text))

    def _section(self, section: str, model: type[Section]) -> dict[str, Any]:
        """The values of a section by their whole names. Each wrong one is a problem, and has none."""
        full = {key: f"{section}.{key}" if section else key for key in model.model_fields}
        values = {key: self._given[name].value for key, name in full.items() if name in self._given}
        wrong = wrong_values(model, values, lambda key: _described(full[key]))
        for key, text in wrong.items():
            self._refuse(full[key], text)
        if wrong:
            return {full[key]: value for key, value in values.items() if key not in {*wrong, AUTO}}
        return {
            full[key]: value for key, value in model.model_validate(values).model_dump().items() if value is not None
        }

    def _publish(self) -> dict[str, str]:
        """Add what a published device says and the file does not. Returns its source for each value."""
        if SPEC not in self.values:
            return {}
        try:
            spec = spec_named(self.values[SPEC])
        except ValueError as error:
            self._refuse(SPEC, f"given {shown(self.values[SPEC])}; {error}")
            return {}
        added = {name: value for name, value in from_spec(spec).items() if name not in self.values}
        self.values |= added
        return dict.fromkeys(added, spec.source)
