"""In: a TOML file, its base files, overrides. Out: the config and the origin of each value; else one error.
Does not define keys (sections.py does), does not parse TOML (toml_file.py does). The error lists all problems."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.own_names import add_folders
from codescent.base.reading import read_text
from codescent.config import effects
from codescent.config.contradictions import INSTEAD, contradictions
from codescent.config.given import Given, override_value, shown, value_problem
from codescent.config.keys import AUTO, Section
from codescent.config.mixture import MIXTURE, flattened, place_of, with_place
from codescent.config.own_keys import own_names_in
from codescent.config.sections import SECTIONS, Config, Model
from codescent.config.toml_file import read_toml
from codescent.config.unknown_key import unknown_key, unknown_section
from codescent.config.unseen_file import name_of
from codescent.config.words import KEYS, toml_value

COMMAND_LINE = "command line"
DEFAULT = "default"
PRESET = "model.preset"
PRESET_DECIDES = frozenset(
    f"model.{name}" for name, field in Model.model_fields.items() if field.default is None
).difference((PRESET, "model.weights"))
"""The kind and the sizes of a model."""

STEPS = {"train.num_steps", "train.num_epochs"}
EXPECTED = "log.expected_minutes"


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and the origin of each "section.key": "default", "FILE:LINE" or "command line".

    `replaced` has a sentence for each preset that replaces sizes of earlier files.
    """

    config: Config
    origins: Mapping[str, str]
    replaced: tuple[str, ...] = ()


class DescribedKey(NamedTuple):
    """One line of the output of `codescent config FILE`. `value` is TOML."""

    section: str
    key: str
    value: str
    origin: str


class _Problem(NamedTuple):
    origin: str
    key: str  # "": the problem concerns the whole file
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


def load(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a config file, its base files, and overrides of the form section.key=value.

    A later file or the command line replaces single keys. If it gives a preset, this also replaces the kind and the
    sizes of the model in earlier files. Sizes beside the preset win over it. If it gives a key of a pair in INSTEAD,
    this replaces the other key of the pair. If it gives a number of steps, it replaces log.expected_minutes, which was
    for other steps. If a value names code of the user, Python will look for it in the folder of the file; it is not
    imported.

    Args:
        path: a file, or the name of a shipped config ("default", with or without ".toml").
        overrides: the last one wins. A value is TOML; a string needs no quotes.

    Raises:
        UserError: all problems of all files and overrides, each with its origin and the correct form.
    """
    problems: list[_Problem] = []
    given: dict[str, Given] = {}
    replaced: list[str] = []
    for file_given in _read_chain(path, problems):
        given = _replace(given, file_given, replaced)
    values_missing = any(problem.key in ("", "base") for problem in problems)  # a file could not be read
    on_command_line: dict[str, Given] = {}
    for override in overrides:
        on_command_line |= _read_override(override, problems)
    patches = {name: value for name, value in on_command_line.items() if place_of(name)}
    keys = {name: value for name, value in on_command_line.items() if name not in patches}
    given = _replace(given, keys, replaced)
    given = _patched(given, patches, problems)
    sections = {name: _validate(name, model, given, problems) for name, model in SECTIONS.items()}
    if not values_missing:
        problems += _contradictions(sections, given, {problem.key for problem in problems})
    if problems:
        raise UserError(*dict.fromkeys(map(str, problems)))
    origins = {name: given[name].origin if name in given else DEFAULT for name in KEYS}
    config = Config(**sections)
    _find_code(config, path, origins)
    return LoadedConfig(config, origins, tuple(replaced))


def _find_code(config: Config, path: Path | str, origins: Mapping[str, str]) -> None:
    """Let Python find the modules that a config names: in the folders of the config and of the file with the name."""
    if keys := [*own_names_in(config), *(["log.to"] if config.log.to is not None else [])]:
        given = origins if any(map(place_of, keys)) else keys  # one value of a mixture hides where the others are from
        files = [Path(word) for word in (str(path), *(origins[key].rpartition(":")[0] for key in given)) if word]
        add_folders(file for file in files if not (name_of(file) or file.is_dir()))


def to_toml(config: Config) -> str:
    """The config as TOML, which `load` reads back. Keys with the value None are omitted: None is their default. So are
    keys that another one decides.
    """
    sections = config.model_dump(mode="json", exclude_none=True)
    for (section, first), (_, second) in ((one.split("."), other.split(".")) for one, other in INSTEAD):
        if first in sections[section]:
            del sections[section][second]
    return tomli_w.dumps(sections)


def flat(config: Config) -> dict[str, Any]:
    """All values as JSON data, by "section.key"; see `flattened` for those of a mixture."""
    sections = config.model_dump(mode="json").items()
    return flattened({f"{section}.{key}": value for section, keys in sections for key, value in keys.items()})


def describe(resolved: LoadedConfig) -> list[DescribedKey]:
    """All keys in order, each with its value and the origin of the value: another key, if that one decides it."""
    decided = {second: first for first, second in INSTEAD if effects.value_of(resolved.config, first) is not None}
    return [
        DescribedKey(key.section, key.name, f'"{AUTO}"', decided[name])
        if name in decided
        else DescribedKey(key.section, key.name, toml_value(effects.value_of(resolved.config, name)), origin)
        for (name, key), origin in zip(KEYS.items(), resolved.origins.values(), strict=True)
    ]


@cache
def shipped() -> dict[str, Path]:
    """Paths of the shipped configs by name: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def about(path: Path) -> str:
    """The first sentence of the comment at the top of a config; "" without one."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    words = " ".join(line.lstrip("# ") for line in comment)
    return re.split(r"(?<=\.) (?=[A-Z0-9`(])", words, maxsplit=1)[0].removesuffix(".")


# Step 1: read files and overrides; collect the given values by "section.key"


def _replace(before: Mapping[str, Given], later: Mapping[str, Given], replaced: list[str]) -> dict[str, Given]:
    """The values of earlier files with those of a later one, and without what it replaces: the sizes of a model by a
    preset, a key of a pair in INSTEAD by the other key, and the minutes of the steps by other steps. Adds a sentence
    about the sizes to `replaced`.
    """
    given = {name for name, value in later.items() if value.value != AUTO}
    others = {name for pair in INSTEAD for name, other in (pair, pair[::-1]) if other in given}
    others |= {EXPECTED} if given & STEPS else set()
    before = {name: value for name, value in before.items() if name not in others}
    preset = later.get(PRESET)
    if preset is None or preset.value == AUTO:
        return {**before, **later}
    sizes = {name: size for name, size in before.items() if name in PRESET_DECIDES and name not in later}
    if sizes:
        listed = ", ".join(f"{name} = {shown(size.value)} ({size.origin})" for name, size in sizes.items())
        replaced.append(f"{preset.origin}: {PRESET} = {shown(preset.value)} replaces {listed}")
    return {**{name: value for name, value in before.items() if name not in sizes}, **later}


def _read_chain(path: Path | str, problems: list[_Problem]) -> list[dict[str, Given]]:
    """The values of the file and of its base files. The values of the last base come first."""
    chain: list[dict[str, Given]] = []
    seen: dict[Path, str] = {}
    wanted: Path | None = Path(path)
    origin, key = "", ""
    while wanted is not None:
        try:
            file = _find(expanded(wanted))
            if file.resolve() in seen:
                raise UserError(f"{file} is its own base: {' -> '.join([*seen.values(), str(file)])}")
            seen[file.resolve()] = str(file)
            table, lines = read_toml(file)
        except UserError as error:
            problems += [_Problem(origin, key, text) for text in error.problems]
            break
        base = table.pop("base", None)
        origin, key = _at(file, lines.get(("base",), 1)), "base"
        if base is not None and not (isinstance(base, str) and base.strip()):
            problems.append(_Problem(origin, key, f"given {shown(base)}; must be the path of a file, in quotes"))
            base = None
        chain.insert(0, dict(_flatten(table, file, lines, problems)))
        wanted = None if base is None else _base_path(file, base)
    return chain


def _base_path(file: Path, base: str) -> Path:
    """Path of a base file, relative to `file`. If it does not exist, a name without folder means a shipped config."""
    if base.startswith("~"):
        return Path(base)
    found = file.parent / base
    return Path(base) if not found.exists() and Path(base).stem in shipped() and Path(base).name == base else found


def _find(path: Path) -> Path:
    """The file or shipped config that `path` names. Raises UserError with similar names: there is none."""
    own = shipped()
    try:
        if path.is_file():
            return path
        if path.name == str(path) and path.suffix in ("", ".toml") and path.stem in own:
            return own[path.stem]
        if path.is_dir():
            inner = path / "config.toml"
            hint = f"did you mean {inner}?" if inner.is_file() else "give a TOML file"
            raise UserError(f"{path}: is a folder; {hint}")
        if path.exists():
            raise UserError(f"{path}: is a pipe or a device, but every rank reads the config again; save it as a file")
        siblings = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    names = {sibling.stem: str(sibling) for sibling in siblings}
    near = [names[name] for name in difflib.get_close_matches(path.stem, names)]
    near += [f"{name} (shipped)" for name in difflib.get_close_matches(path.stem, own)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped configs are {', '.join(own)}"
    reason = "no such file" if path.parent.is_dir() else f"no such file: there is no folder {path.parent}"
    raise UserError(f"{path}: {reason}; {hint}")


def _at(file: Path, line: int | None) -> str:
    """A file and a line of it, such as "run.toml:3", "default.toml:46 (shipped)"; without a line the file."""
    own = file in shipped().values()
    at = f"{file.name if own else file}{'' if line is None else f':{line}'}{' (shipped)' * own}"
    return name_of(file) or at


def _flatten(
    table: Mapping[str, Any], file: Path, lines: Mapping[tuple[str, ...], int], problems: list[_Problem]
) -> Iterator[tuple[str, Given]]:
    """The values of the known keys of a file. Unknown keys are added to `problems`."""

    def origin(*path: str) -> str:
        return _at(file, lines.get(path))

    def refuse(text: str, *path: str) -> None:
        problems.append(_Problem(origin(*path), ".".join(path), text))

    for section, values in table.items():
        if section not in SECTIONS:
            refuse(unknown_section(section) if isinstance(values, dict | list) else unknown_key("", section), section)
        elif not isinstance(values, dict):
            refuse(f"given {shown(values)}, but it is a section: write [{section}] and its keys below", section)
        else:
            for key, value in values.items():
                if f"{section}.{key}" in KEYS:
                    yield f"{section}.{key}", Given(value, origin(section, key))
                else:
                    refuse(unknown_key(section, key), section, key)


def _patched(given: Mapping[str, Given], patches: Mapping[str, Given], problems: list[_Problem]) -> dict[str, Given]:
    """The given values with overrides of single values of a mixture, such as data.mixture.wiki.weight."""
    found = dict(given)
    for name, patch in patches.items():
        place, before = place_of(name), found.get(MIXTURE, Given(None, ""))
        assert place is not None
        try:
            found[MIXTURE] = Given(with_place(before.value, place, patch.value), patch.origin)
        except ValueError as error:
            problems.append(_Problem(patch.origin, name, str(error)))
    return found


def _read_override(override: str, problems: list[_Problem]) -> dict[str, Given]:
    name, equals, text = override.partition("=")
    name, text = name.strip(), text.strip()
    section, dot, key = name.partition(".")
    if not equals:
        name, problem = override, "not an override; write section.key=value, such as train.num_steps=20"
    elif not dot:
        problem = unknown_key("", name)
    elif section not in SECTIONS:
        problem = unknown_section(section, key)
    elif name not in KEYS and not place_of(name):
        problem = unknown_key(section, key)
    else:
        return {name: Given(override_value(text, KEYS[MIXTURE if place_of(name) else name]), COMMAND_LINE)}
    problems.append(_Problem(COMMAND_LINE, name, problem))
    return {}


# Step 2: validate the given values; build the sections


def _validate(name: str, model: type[Section], given: Mapping[str, Given], problems: list[_Problem]) -> Section:
    """Build a section. Each wrong value is added to `problems`, and its key gets the default."""
    values = {key: given[f"{name}.{key}"].value for key in model.model_fields if f"{name}.{key}" in given}
    wrong: dict[str, str] = {
        key: f"given {shown(value)}; a whole number has at most 64 bits"
        for key, value in values.items()
        if isinstance(value, int) and not -(2**63) <= value < 2**63
    }
    try:
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    except ValidationError as error:
        found = [(detail, str(detail.get("ctx", {}).get("error", ""))) for detail in error.errors(include_url=False)]
        for detail, reason in sorted(found, key=lambda one: not one[1]):  # of a union: first what has a reason
            key = str(detail["loc"][0])
            wrong.setdefault(key, value_problem(values[key], KEYS[f"{name}.{key}"], reason or None))
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    finally:
        problems += [_Problem(given[f"{name}.{key}"].origin, f"{name}.{key}", text) for key, text in wrong.items()]


def _contradictions(sections: Mapping[str, Section], given: Mapping[str, Given], wrong: set[str]) -> Iterator[_Problem]:
    """Problems of values that are valid alone but contradict each other."""
    values: dict[str, Any] = dict(sections)
    for names, problem in contradictions(Config.model_construct(None, **values)):
        if wrong.isdisjoint(names):
            yield _Problem(next(given[name].origin for name in names if name in given), names[0], problem)
