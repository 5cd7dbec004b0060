"""In: a TOML file, its base files, overrides. Out: the config and the origin of each value; else one error.
Does not define keys (sections.py does), does not parse TOML (toml_file.py does). The error lists all problems."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from codescent.base.errors import UserError
from codescent.base.own_names import add_folders
from codescent.base.reading import read_text
from codescent.config import effects
from codescent.config.contradictions import INSTEAD, contradictions
from codescent.config.given import COMMAND_LINE as COMMAND_LINE
from codescent.config.given import Given, Problem, read_override, shown, wrong_values
from codescent.config.keys import AUTO, Section
from codescent.config.mixture import MIXTURE, flattened, place_of, with_place
from codescent.config.named_files import NamedFiles, TomlFile
from codescent.config.own_keys import own_names_in
from codescent.config.sections import SECTIONS, Config, Model
from codescent.config.unknown_key import unknown_key, unknown_section
from codescent.config.unseen_file import name_of
from codescent.config.words import KEYS, Key, toml_value

DEFAULT = "default"
PRESET = "model.preset"
PRESET_DECIDES = frozenset(
    f"model.{name}" for name, field in Model.model_fields.items() if field.default is None
).difference((PRESET, "model.weights", "model.adapters"))
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
    problems: list[Problem] = []
    given: dict[str, Given] = {}
    replaced: list[str] = []
    not_read: list[Problem] = []
    files = CONFIGS.read(path, not_read)
    for values in [dict(_values(file, problems)) for file in reversed(files)][::-1]:  # problems in the order of reading
        given = _replace(given, values, replaced)
    problems += not_read
    on_command_line: dict[str, Given] = {}
    for override in overrides:
        on_command_line |= read_override(override, _key_of, "train.num_steps=20", problems)
    patches = {name: value for name, value in on_command_line.items() if place_of(name)}
    keys = {name: value for name, value in on_command_line.items() if name not in patches}
    given = _replace(given, keys, replaced)
    given = _patched(given, patches, problems)
    sections = {name: _validate(name, model, given, problems) for name, model in SECTIONS.items()}
    if not not_read:
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


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A config with other values of some keys, by "section.key", as `flat` returns them."""
    sections = config.model_dump(mode="json")
    for key, value in values.items():
        section, name = key.split(".")
        sections[section][name] = value
    return Config.model_validate(sections) if values else config


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


CONFIGS = NamedFiles(shipped, lambda: f"shipped configs are {', '.join(shipped())}")


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


def _values(file: TomlFile, problems: list[Problem]) -> Iterator[tuple[str, Given]]:
    """The values of the known keys of a file. Unknown keys are added to `problems`."""

    def refuse(text: str, *path: str) -> None:
        problems.append(Problem(file.origin(*path), ".".join(path), text))

    for section, values in file.table.items():
        if section not in SECTIONS:
            refuse(unknown_section(section) if isinstance(values, dict | list) else unknown_key("", section), section)
        elif not isinstance(values, dict):
            refuse(f"given {shown(values)}, but it is a section: write [{section}] and its keys below", section)
        else:
            for key, value in values.items():
                if f"{section}.{key}" in KEYS:
                    yield f"{section}.{key}", Given(value, file.origin(section, key))
                else:
                    refuse(unknown_key(section, key), section, key)


def _patched(given: Mapping[str, Given], patches: Mapping[str, Given], problems: list[Problem]) -> dict[str, Given]:
    """The given values with overrides of single values of a mixture, such as data.mixture.wiki.weight."""
    found = dict(given)
    for name, patch in patches.items():
        place, before = place_of(name), found.get(MIXTURE, Given(None, ""))
        assert place is not None
        try:
            found[MIXTURE] = Given(with_place(before.value, place, patch.value), patch.origin)
        except ValueError as error:
            problems.append(Problem(patch.origin, name, str(error)))
    return found


def _key_of(name: str) -> Key | str:
    """The key that an override means, or what is wrong with its name."""
    section, dot, key = name.partition(".")
    if not dot:
        return unknown_key("", name)
    if section not in SECTIONS:
        return unknown_section(section, key)
    return KEYS.get(MIXTURE if place_of(name) else name) or unknown_key(section, key)


# Step 2: validate the given values; build the sections


def _validate(name: str, model: type[Section], given: Mapping[str, Given], problems: list[Problem]) -> Section:
    """Build a section. Each wrong value is added to `problems`, and its key gets the default."""
    values = {key: given[f"{name}.{key}"].value for key in model.model_fields if f"{name}.{key}" in given}
    wrong = wrong_values(model, values, lambda key: KEYS[f"{name}.{key}"])
    problems += [Problem(given[f"{name}.{key}"].origin, f"{name}.{key}", text) for key, text in wrong.items()]
    return model.model_validate({key: value for key, value in values.items() if key not in wrong})


def _contradictions(sections: Mapping[str, Section], given: Mapping[str, Given], wrong: set[str]) -> Iterator[Problem]:
    """Problems of values that are valid alone but contradict each other."""
    values: dict[str, Any] = dict(sections)
    for names, problem in contradictions(Config.model_construct(None, **values)):
        if wrong.isdisjoint(names):
            yield Problem(next(given[name].origin for name in names if name in given), names[0], problem)
