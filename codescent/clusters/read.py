"""In: a cluster file. Out: its values by key, with their lines, and their sources; which clusters are shipped.
Does not check values and does not make a cluster (files.py does)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base.visible import is_one_line
from codescent.clusters.sections import KEYS, SECTIONS, SOFTWARE, SOFTWARE_KEYS, SOURCES, known_key
from codescent.config.given import Given, Problem, shown
from codescent.config.named_files import NamedFiles, TomlFile

_NAME = re.compile(r"[\w-]+", re.ASCII)
_LAST = {key.rpartition(".")[2]: [key] for key in KEYS}
SPEC = "device.spec"


class ClusterFile(NamedTuple):
    """What one file says.

    Attributes:
        values: by key, such as "links.inside", "software.NAME.host_s".
        sources: where a value is from, by its key. That of "software.NAME" holds for all keys of it.
    """

    values: dict[str, Given]
    sources: dict[str, str]


@cache
def shipped_clusters() -> dict[str, Path]:
    """The shipped cluster files by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


CLUSTERS = NamedFiles(
    shipped_clusters, lambda: f"the shipped clusters are {', '.join(shipped_clusters())}", option="cluster"
)


def content_of(file: TomlFile, problems: list[Problem]) -> ClusterFile:
    """The known keys of a file, and its sources. All others are added to `problems`."""
    content = ClusterFile({}, {})
    for path, value in _leaves(file.table):
        full = ".".join(path)
        if problem := _source_problem(path, value) if path[0] == SOURCES else _key_problem(path, value):
            problems.append(Problem(file.origin(*path), full, problem))
        elif path[0] == SOURCES:
            content.sources[full.removeprefix(f"{SOURCES}.")] = value
        else:
            content.values[full] = Given(value, file.origin(*path))
    return content


def _leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values of a file by path. A table without keys is one, too: a software with the defaults, or a mistake."""
    for name, value in table.items():
        path = (*above, name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        elif value != {} or ".".join(path) not in (*SECTIONS, SOFTWARE, SOURCES):
            yield path, value


def _key_problem(path: tuple[str, ...], value: Any) -> str:
    """What is wrong with a key of a file; empty: there is such a key."""
    name, is_software = ".".join(path), path[0] == SOFTWARE
    if is_software and len(path) > 1 and _NAME.fullmatch(path[1]) is None:
        return f"{shown(path[1])} is no name of a software: it has letters, digits, - and _"
    if any("." in part for part in path):
        return "is a name in quotes; write the section in brackets, and the key below"
    is_table = name in (*SECTIONS, SOFTWARE) or (is_software and len(path) == 2)
    if is_table and value != {}:
        header = f"{SOFTWARE}.NAME" if name == SOFTWARE else name
        return f"given {shown(value)}, but it is a section: write [{header}] and its keys below"
    return "" if is_table or known_key(name) else unknown_key(name)


def _source_problem(path: tuple[str, ...], value: Any) -> str:
    """What is wrong with a source; empty: it is the source of a key, or of all keys of a software."""
    name = ".".join(path[1:])
    if not name:
        return f"given {shown(value)}, but it is a section: write [{SOURCES}] and its keys below"
    if not (isinstance(value, str) and value.strip() and is_one_line(value)):
        return f"given {shown(value)}; must be text in quotes: where the value of {name} is from"
    if name == SPEC:
        return "the table of published devices has the source; leave it out"
    is_software = name.startswith(f"{SOFTWARE}.") and name.count(".") == 1
    return "" if is_software or known_key(name) else unknown_key(name)


def unknown_key(name: str) -> str:
    """What to say of a key that no cluster has: the one that was perhaps meant, or all of its section."""
    section, _, last = name.lower().replace("-", "_").rpartition(".")
    if name.startswith(f"{SOFTWARE}."):
        near = difflib.get_close_matches(last, SOFTWARE_KEYS, n=1)
        of = name.rpartition(".")[0] if name.count(".") == 2 else f"{SOFTWARE}.NAME"
        hint = f"did you mean {of}.{near[0]}?" if near else f"its keys are {', '.join(SOFTWARE_KEYS)}"
        return f"unknown key of a software; {hint}"
    same = [key for key in KEYS if key.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(f"{section}.{last}" if section else last, KEYS, n=1)
    near = near or [key for one in difflib.get_close_matches(last, _LAST, n=1, cutoff=0.75) for key in _LAST[one]]
    sections = f"the keys are {', '.join(KEYS)}, and those of [{SOFTWARE}.NAME]"
    meant = " or ".join(near)
    return f"unknown key of a cluster; {f'did you mean {meant}?' if near else sections}"
