"""In: the name of a shipped cluster or the path of a file. Out: its values by key, with their lines, and their sources.
Does not check values and does not make a cluster (files.py does)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.visible import is_one_line
from codescent.clusters.sections import KEYS, SECTIONS, SOFTWARE, SOFTWARE_KEYS, SOURCES, known_key
from codescent.config.given import Given, shown
from codescent.config.toml_file import read_toml

_NAME = re.compile(r"[\w-]+", re.ASCII)
_LAST = {key.rpartition(".")[2]: [key] for key in KEYS}
BASE = "base"
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


def find_cluster(name: Path | str) -> Path:
    """The file that a name or a path means. Raises UserError, with the nearest name: there is none."""
    path, own = expanded(name), shipped_clusters()
    if not str(name).strip():
        raise UserError(f"cluster {shown(str(name))}: give a name or a file; the shipped clusters are {', '.join(own)}")
    try:
        if path.is_file():
            return path
        if path.name == str(path) and path.suffix in ("", ".toml") and path.stem in own:
            return own[path.stem]
        is_there = path.exists()
        siblings = sorted(filter(Path.is_file, path.parent.glob("*.toml"))) if path.parent.is_dir() else []
    except (OSError, ValueError) as error:  # a name that is too long; a NUL in it
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cluster {shown(str(name))}: {reason}; give the name of a cluster, or a file") from error
    if is_there:
        raise UserError(f"cluster {shown(str(name))}: is no regular file; give a TOML file")
    names = {sibling.stem: str(sibling) for sibling in siblings} | {stem: stem for stem in own}
    near = difflib.get_close_matches(path.stem.lower().replace("_", "-"), names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}?" if near else f"the shipped clusters are {', '.join(own)}"
    raise UserError(f"cluster {shown(str(name))}: there is no such file and no shipped cluster of this name; {hint}")


def read_chain(name: Path | str, problems: list[str]) -> list[ClusterFile]:
    """A file and those below it (`base`), the last base first. What is wrong is added to `problems`."""
    chain: list[ClusterFile] = []
    seen: dict[Path, str] = {}
    wanted: Path | str | None = name
    origin = ""
    while wanted is not None:
        try:
            file = find_cluster(wanted)
            if file.resolve() in seen:
                raise UserError(f"{file} is its own base: {' -> '.join([*seen.values(), str(file)])}")
            seen[file.resolve()] = str(file)
            table, lines = read_toml(file)
        except UserError as error:
            problems += [f"{origin}{text}" for text in error.problems]
            return []
        base = table.pop(BASE, None)
        origin = f"{_at(file, lines.get((BASE,)))}: {BASE}: "
        if base is not None and not (isinstance(base, str) and base.strip()):
            problems.append(f"{origin}given {shown(base)}; must be the name of a cluster or a path, in quotes")
            return []
        chain.insert(0, _content(table, file, lines, problems))
        wanted = None if base is None else _base(file, base)
    return chain


def _base(file: Path, base: str) -> Path | str:
    """A path is relative to the file; without such a file it is the name of a shipped cluster."""
    found = file.parent / base
    return base if base.startswith("~") or (base in shipped_clusters() and not found.is_file()) else found


def _at(file: Path, line: int | None) -> str:
    own = file in shipped_clusters().values()
    return f"{file.name if own else file}{'' if line is None else f':{line}'}{' (shipped)' * own}"


def _content(
    table: Mapping[str, Any], file: Path, lines: Mapping[tuple[str, ...], int], problems: list[str]
) -> ClusterFile:
    """The known keys of a file, and its sources. All others are added to `problems`."""
    content = ClusterFile({}, {})
    for path, value in _leaves(table):
        full = ".".join(path)
        line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
        if problem := _source_problem(path, value) if path[0] == SOURCES else _key_problem(path, value):
            problems.append(f"{_at(file, line)}: {full}: {problem}")
        elif path[0] == SOURCES:
            content.sources[full.removeprefix(f"{SOURCES}.")] = value
        else:
            content.values[full] = Given(value, _at(file, line))
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
