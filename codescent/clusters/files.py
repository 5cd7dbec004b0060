"""In: the name or the path of a cluster file, what-ifs. Out: `Cluster`, or one error with all problems.
Does not read TOML (read.py does), define the keys (sections.py does) or write files (described.py does)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.described import LINKS, cluster_of, from_spec, problems_of, spec_named
from codescent.clusters.read import SPEC, ClusterFile, read_chain, shipped_clusters, unknown_key
from codescent.clusters.sections import FROM_SPEC, SECTIONS, SOFTWARE, WHAT, SoftwareKeys, TopKeys, known_key
from codescent.config.given import Given, override_value, shown, value_problem
from codescent.config.keys import AUTO, Section

__all__ = ["OWN", "load_cluster", "shipped_clusters", "software_of"]

COMMAND_LINE = "command line"
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
    problems: list[str] = []
    chain = read_chain(name, problems)
    known = {full.split(".")[1] for file in chain for full in file.values if full.startswith(f"{SOFTWARE}.")}
    chain.append(_changed(changes, known, problems))
    if len(chain) == 1:  # no file could be read
        raise UserError(*dict.fromkeys(problems))
    merged = chain[0]
    for file in chain[1:]:
        merged = _on_top(merged, file)
    checked = _Checked(str(name), merged.values, problems)
    if problems:
        raise UserError(*dict.fromkeys(problems))
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
    known = sorted({OWN, *cluster.software})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"cluster {cluster.name}: software {shown(name)}: the file has none of this name; {hint}")


def _changed(changes: Sequence[str], known: set[str], problems: list[str]) -> ClusterFile:
    """What-ifs as if they were a file. `known`: names of software."""
    found = ClusterFile({}, {})
    for change in changes:
        name, equals, text = (part.strip() for part in change.partition("="))
        key = known_key(name)
        if not equals:
            problem = "write KEY=VALUE, such as links.between=50GB/s,5us"
        elif key is None:
            problem = unknown_key(name)
        elif (software := name.split(".")[1:-1]) and software[0] not in {OWN, *known}:
            near = difflib.get_close_matches(software[0], {OWN, *known}, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted({OWN, *known}))}"
            problem = f"the file has no software {shown(software[0])}; {hint}"
        else:
            found.values[name] = Given(override_value(text, key), COMMAND_LINE)
            continue
        problems.append(f"{COMMAND_LINE}: {name}: {problem}")
    return found


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


class _Checked:
    """The values of a cluster: checked, with defaults, and with those of a published device.

    Attributes:
        values: by "section.key"; those that are None are left out.
        software: the values of each software by its name.
        published: the source of each value that is of a published device.
    """

    def __init__(self, where: str, given: Mapping[str, Given], problems: list[str]) -> None:
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
            problems += [f"{where}: {name}: {text}" for name, text in missing]

    def _refuse(self, name: str, text: str) -> None:
        origin = self._given[name].origin if name in self._given else self._where
        self._wrong.add(name)
        self._problems.append(f"{origin}: {name}: {text}")

    def _section(self, section: str, model: type[Section]) -> dict[str, Any]:
        """The values of a section by their whole names. Each wrong one is a problem, and has none."""
        names = {f"{section}.{key}" if section else key: key for key in model.model_fields}
        values = {key: self._given[name].value for name, key in names.items() if name in self._given}
        full = {key: name for name, key in names.items()}
        wrong = {key for key, value in values.items() if isinstance(value, int) and not -(2**63) <= value < 2**63}
        for key in wrong:
            self._refuse(full[key], f"given {shown(values[key])}; a whole number has at most 64 bits")
        try:
            checked = model.model_validate({key: value for key, value in values.items() if key not in wrong})
        except ValidationError as error:
            details = {str(detail["loc"][0]): detail for detail in reversed(error.errors(include_url=False))}
            for key in [key for key in names.values() if key in details and key not in wrong]:
                described = known_key(full[key])
                assert described is not None
                if key not in values:
                    self._refuse(full[key], f"is missing: {described.description}")
                else:
                    reason = details[key].get("ctx", {}).get("error")
                    self._refuse(full[key], value_problem(values[key], described, reason))
            return {full[key]: value for key, value in values.items() if key not in {*details, *wrong, AUTO}}
        return {full[key]: value for key, value in checked.model_dump().items() if value is not None}

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
