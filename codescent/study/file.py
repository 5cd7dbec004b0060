"""In: a study file (TOML). Out: its frozen pydantic class: base config, kind, axes, explicit points, baseline.
Does not make points of axes (points.py does) and does not know what a config refuses (build does)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.config.keys import FolderName
from codescent.config.load import shipped
from codescent.config.mixture import place_of, place_problem
from codescent.config.sections import SECTIONS
from codescent.config.toml_file import read_toml
from codescent.config.words import KEYS
from codescent.study.result import Kind

SHORT: Mapping[str, str] = {
    "ranks": "parallel.ranks",
    "threads": "train.num_threads",
    "batch": "train.global_batch_size",
    "tokens": "train.global_batch_tokens",
    "sequence": "data.seq_len",
}
"""Short names of axes, and the config keys that they set."""

NODES, LAYOUT = "nodes", "layout"
"""Axes that set no single key: machines that share the ranks; several keys of [parallel], as in `prove --layouts`."""

WORKERS: Mapping[Kind, str] = {Kind.STRONG: "ranks", Kind.WEAK: "ranks", Kind.THREADS: "threads"}
"""The axis that grows. The other kinds have none."""

OWN_KEYS = ("run.folder", "run.name", "train.num_steps", "train.num_epochs")
"""Keys that the study sets for each run."""

Scalar = bool | int | float | str
Choice = Mapping[str, Scalar]


class StudyKeys(BaseModel):
    """The section [study]."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: FolderName = Field(description="name of the study, and of its folder")
    config: str = Field(description="base config: a path relative to the study file, or the name of a shipped config")
    kind: Annotated[Kind, Field(strict=False)] = Field(description="what stays constant: see below")
    baseline: dict[str, Any] = Field(
        default_factory=dict,
        description="values of axes that name the point to which speed-up refers; of widths, the base of mu-P",
    )
    repeats: int = Field(5, ge=1, le=1000, description="runs of each point")
    steps: int = Field(20, ge=1, description="measured steps of each run")
    warmup: int = Field(5, ge=0, description="steps before them, which are left out")
    oversubscribe: bool = Field(
        True, description="run points that want more cores than this machine has, and mark them; false: refuse them"
    )


class StudyFile(BaseModel):
    """A study file. Axes and points have short names where there are such; tables are flat: "section.key".

    Attributes:
        fixed: [set]: values for all points.
        axes: for each axis its values; or, for an axis of choices, the keys that each choice sets.
        points: explicit points; each is combined with each combination of the axes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    study: StudyKeys
    fixed: dict[str, Scalar] = Field(default_factory=dict, alias="set")
    axes: dict[str, list[Scalar] | dict[str, dict[str, Scalar]]] = Field(default_factory=dict)
    points: list[dict[str, Scalar]] = Field(default_factory=list)

    @property
    def axis_names(self) -> list[str]:
        """All axes: those of [axes], then those of [[points]]."""
        return list(dict.fromkeys([*self.axes, *(name for point in self.points for name in point)]))


def read_study(file: Path) -> StudyFile:
    """Read a study file. `config` becomes a path that holds from here, or stays the name of a shipped config.

    Raises UserError: every problem of the file, with its line.
    """
    table, lines = read_toml(file)
    dissolve = {"set": _full, "axes": _flat}
    flat = {**table, **{name: how(table[name]) for name, how in dissolve.items() if isinstance(table.get(name), dict)}}
    if isinstance(given := flat.get("points"), list):
        flat["points"] = [_flat(point) if isinstance(point, dict) else point for point in given]
    try:
        study = StudyFile.model_validate(flat)
    except ValidationError as error:
        found = [_wrong(detail) for detail in error.errors(include_url=False)]
        raise UserError(*dict.fromkeys(f"{_at(file, lines, path)}{text}" for path, text in found)) from error
    baseline = _flat(study.study.baseline)
    if problems := list(_problems(study, baseline)):
        raise UserError(*(f"{_at(file, lines, path)}{text}" for path, text in problems))
    try:
        config = _config(file, study.study.config)
    except UserError as error:
        raise UserError(*(f"{_at(file, lines, ('study', 'config'))}{text}" for text in error.problems)) from error
    keys = study.study.model_copy(update={"config": config, "baseline": baseline})
    return study.model_copy(update={"study": keys})


def config_named(config: str) -> str:
    """The base config of a study in words: its path, or its name with the word shipped."""
    return f"{config} (shipped)" if config in shipped() else config


def value_problem(key: str, value: Any) -> str:
    """Why a key of the config cannot have a value, in words; "": it can."""
    if (place := place_of(key)) is not None:
        return place_problem(place, value)
    section, _, name = key.partition(".")
    try:
        SECTIONS[section].model_validate({name: value})
    except ValidationError:
        return f"given {value!r}; must be {KEYS[key].wanted}"
    return ""


def _problems(study: StudyFile, baseline: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong in a file whose types are right: the path of the key, and the problem."""
    names = study.axis_names
    for name, values in study.axes.items():
        if isinstance(values, dict):
            for choice, keys in values.items():
                for key, value in keys.items():
                    yield from _key_problems(("axes", name), f"axis {name}, {choice}: ", key, [value])
        else:
            yield from _axis_problems(("axes", name), name, values)
        if not values:
            yield ("axes", name), f"axis {name}: has no value"
    for point in study.points:
        for name, value in point.items():
            yield from _axis_problems(("points",), name, [value])
        if point.keys() != study.points[0].keys():
            yield ("points",), f"every point needs the same axes: {_listed(point)} beside {_listed(study.points[0])}"
        if twice := sorted(point.keys() & study.axes.keys()):
            yield ("points",), f"{_listed(twice)}: is an axis of [axes] already"
    for key, value in study.fixed.items():
        yield from _key_problems(("set", key), "[set] ", key, [value])
    if not names:
        yield (), "no axis: write [axes] and a list of values for a key, such as ranks = [1, 2, 4]"
    wanted = WORKERS.get(study.study.kind)
    if names and wanted and wanted not in names:
        kinds = [*(kind for kind, axis in WORKERS.items() if axis in names), Kind.GRID]
        others = " or ".join(f'kind = "{kind}"' for kind in kinds)
        yield ("study", "kind"), f'kind = "{study.study.kind}": needs the axis {wanted}; or write {others}'
    if not baseline:
        first = names[0] if names else "ranks"
        yield (
            ("study", "baseline"),
            f"baseline: not given; name the point to which speed-up refers, such as baseline = {{ {first} = 1 }}",
        )
    for name in baseline:
        if names and name not in names:
            yield ("study", "baseline"), f"baseline: {name} is no axis of this study; its axes are {_listed(names)}"


def _axis_problems(path: tuple[str, ...], name: str, values: list[Scalar]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Problems of an axis whose values are those of a key."""
    if name == NODES:
        for value in values:
            if type(value) is not int or value < 1:
                yield path, f"axis {name}: given {value!r}; must be a number of machines, at least 1"
    elif name == LAYOUT:
        for value in values:
            try:
                keys = layout_keys(str(value))
            except UserError as error:
                yield from ((path, problem) for problem in error.problems)
            else:
                for key, one in keys.items():
                    yield from _key_problems(path, f"axis {name}: ", key, [one])
    else:
        yield from _key_problems(path, "axis ", SHORT.get(name, name), values, shown=name)
    if len(set(map(str, values))) < len(values):
        yield path, f"axis {name}: has a value twice"


def _key_problems(
    path: tuple[str, ...], where: str, key: str, values: list[Scalar], shown: str = ""
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Problems of a key and of values of it. A degree may be the word "ranks"."""
    shown = shown or key
    if key not in KEYS and not place_of(key):
        near = difflib.get_close_matches(key, [*SHORT, NODES, LAYOUT, *KEYS], n=1)
        near = near or [name for name in KEYS if name.endswith(f".{key}")][:1]
        hint = f"did you mean {near[0]}?" if near else f"an axis is {', '.join([*SHORT, NODES, LAYOUT])}, or any key"
        yield path, f"{where}{shown}: is no key of a config; {hint}"
        return
    if key in OWN_KEYS:
        yield path, f"{where}{shown}: the study sets it for each run; steps and warmup of [study] give the steps"
        return
    for value in values:
        is_degree = value == "ranks" and key.startswith("parallel.")
        if problem := "" if is_degree else value_problem(key, value):
            yield path, f"{where}{shown}: {problem}"


def layout_keys(text: str) -> dict[str, Scalar]:
    """The keys of a layout such as "dp_shard=ranks, zero_stage=2". Raises UserError: a part is not key=value."""
    keys: dict[str, Scalar] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and value):
            raise UserError(f"axis layout: {part!r} is not key=value, such as dp_shard=2")
        keys[f"parallel.{name}"] = _parsed(value)
    return keys


def _parsed(text: str) -> Scalar:
    """A value out of the words of a layout."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the tables of sections dissolved, and with short names of keys where there are such.

    A table of tables is an axis of choices, whatever its name.
    """
    short = {key: name for name, key in SHORT.items()}
    found: dict[str, Any] = {}
    for name, value in table.items():
        has_tables = isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())
        if name in SECTIONS and isinstance(value, dict) and not has_tables:
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif isinstance(value, dict):
            found[name] = {choice: _full(keys) if isinstance(keys, dict) else keys for choice, keys in value.items()}
        else:
            found[name] = value
    return {short.get(name, name): value for name, value in found.items()}


def _full(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a choice sets, by their full names."""
    return {SHORT.get(name, name): value for name, value in _flat(table).items()}


def _wrong(detail: Any) -> tuple[tuple[str, ...], str]:
    """The path of a key that pydantic refuses, and the problem in words."""
    path = tuple(str(part) for part in detail["loc"])
    name = path[1] if len(path) > 1 else path[0]
    where = f"[{path[0]}] {path[1]}" if len(path) > 1 else f"[{path[0]}]"
    if detail["type"] == "missing":
        text = "not given"
        if name == "baseline":
            text += "; name the point to which speed-up refers, such as baseline = { ranks = 1 }"
        return path[:1], f"{where}: {text}"
    if detail["type"] == "extra_forbidden":
        known = list(StudyKeys.model_fields) if len(path) > 1 else ["study", "set", "axes", "points"]
        near = difflib.get_close_matches(name, known, n=1)
        return path, f"{where}: unknown; {f'did you mean {near[0]}?' if near else f'known are {_listed(known)}'}"
    if path[0] == "axes":
        wanted = "must be a list of values, or a table of choices, each a table of keys"
        return path[:2], f"axis {name}: {wanted}"
    if name == "kind":
        return path[:2], f"{where}: given {detail['input']!r}; must be {' or '.join(Kind)}"
    return path[:2], f"{where}: given {detail['input']!r}; {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _at(file: Path, lines: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> str:
    """The beginning of a message about a key: the file and its line."""
    known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    return f"{file}:{lines[known]}: " if known else f"{file}: "


def _config(file: Path, given: str) -> str:
    """The base config as a path from the working directory, or the name of a shipped config.

    Only a bare name means a shipped config, and only where no such file is beside the study file.
    Raises UserError: there is no such config.
    """
    found, own = Path(os.path.normpath(file.parent / expanded(Path(given)))), shipped()
    if found.is_file():
        is_own = os.path.realpath(found) == os.path.realpath(own.get(found.stem, ""))
        return found.stem if is_own else str(found)
    name = given.removesuffix(".toml")
    if name in own:
        return name
    near = difflib.get_close_matches(name, own)
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped configs are {', '.join(own)}"
    raise UserError(f"[study] config: {found} does not exist, and no shipped config has the name {given!r}; {hint}")


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"
