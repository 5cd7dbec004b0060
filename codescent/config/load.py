"""In: a TOML file, those it is based on, overrides. Out: the config with the origin of each value; and a file of it.
Does not define a key (config does), read TOML (tomlfile does), or stop at the first problem."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.config.contradictions import contradictions
from codescent.config.sections import SECTIONS, Config, Section
from codescent.config.toml_file import read_toml
from codescent.config.words import Key, keys, toml_value

COMMAND_LINE = "command line"
DEFAULT = "default"

KEYS: Mapping[str, Key] = {f"{key.section}.{key.name}": key for key in keys()}

FOREIGN_NAMES: Mapping[str, str] = {
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_dim",
    "d_model": "model.hidden_dim",
    "block_size": "model.seq_len",
    "context": "model.seq_len",
    "batch_size": "train.global_batch_size",
    "max_iters": "train.num_steps",
    "steps": "train.num_steps",
    "dtype": "train.precision",
    "eval_interval": "train.eval_every",
    "gradient_accumulation_steps": "train.microbatch_size",
    "lr": "optimizer.learning_rate",
    "grad_clip": "optimizer.max_grad_norm",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_decay_iters": "optimizer.decay_steps",
    "min_lr": "optimizer.min_learning_rate",
    "out_dir": "run.folder",
    "dataset": "data.corpus",
}
"""What other trainers call our keys: too far from ours for a comparison of spellings to find them."""


@dataclass(frozen=True)
class Resolved:
    """A config, and for each "section.key" where its value is from: "default", "FILE:LINE" or "command line"."""

    config: Config
    origins: Mapping[str, str]


class Described(NamedTuple):
    """One line of `codescent config FILE`; `value` is written as a file would."""

    section: str
    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class _Given:
    value: Any
    origin: str


@dataclass(frozen=True)
class _Problem:
    origin: str
    key: str  # "" where the problem is with the file as a whole
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.text) if part)


_OF_A_FILE = ("", "base")
"""Keys of problems that hide values: what contradicts what is unknown until they are solved."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> Resolved:
    """Read a run's file, the files it is based on, and overrides of the form section.key=value.

    Args:
        path: a file, or the name of a shipped config ("default", with or without ".toml").
        overrides: later ones win; a value is TOML, or a bare word, which is a string.

    Raises:
        UserError: with every problem of all the files and overrides, each with its place and what would be right.
    """
    problems: list[_Problem] = []
    given: dict[str, _Given] = {}
    for file_given in _read_chain(path, problems):
        given |= file_given
    files_are_whole = not any(problem.key in _OF_A_FILE for problem in problems)
    for override in overrides:
        given |= _read_override(override, problems)
    sections = {name: _validate(name, model, given, problems) for name, model in SECTIONS.items()}
    if files_are_whole:
        problems += _contradictions(sections, given, {problem.key for problem in problems})
    if problems:
        raise UserError(*dict.fromkeys(map(str, problems)))
    origins = {name: given[name].origin if name in given else DEFAULT for name in KEYS}
    return Resolved(Config(**sections), origins)


def to_toml(config: Config) -> str:
    """The whole config as TOML; `load` gives an equal one back. None is left out: it is every such key's default."""
    return tomli_w.dumps(
        {
            section: {
                name: str(value) if isinstance(value, Path) else value
                for name, value in getattr(config, section)
                if value is not None
            }
            for section in SECTIONS
        }
    )


def describe(resolved: Resolved) -> list[Described]:
    """Every key with its value and the value's origin, in order."""
    return [
        Described(key.section, key.name, toml_value(_value(resolved.config, name)), resolved.origins[name])
        for name, key in KEYS.items()
    ]


def shipped() -> dict[str, Path]:
    """The configs that come with codescent, by name: beside this file in a wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def _value(config: Config, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


# From files and the command line to what was given, by "section.key"


def _read_chain(path: Path | str, problems: list[_Problem]) -> list[dict[str, _Given]]:
    """What the file and the files it is based on give, the deepest base first."""
    chain: list[dict[str, _Given]] = []
    seen: dict[Path, str] = {}
    wanted: Path | None = Path(path)
    origin, key = "", ""
    while wanted is not None:
        try:
            file = _find(wanted)
            if file.resolve() in seen:
                names = " -> ".join([*seen.values(), str(file)])
                raise UserError(f"{file} is based on itself: {names}")
            seen[file.resolve()] = str(file)
            table, lines = read_toml(file)
        except UserError as error:
            problems += [_Problem(origin, key, text) for text in error.problems]
            break
        base = table.pop("base", None)
        origin, key = f"{file}:{lines.get(('base',), 1)}", "base"
        if base is not None and not (isinstance(base, str) and base.strip()):
            problems.append(_Problem(origin, key, f"given {_shown(base)}; must be the path of a file, in quotes"))
            base = None
        chain.insert(0, dict(_flatten(table, file, lines, problems)))
        wanted = None if base is None else _base_path(file, base)
    return chain


def _base_path(file: Path, base: str) -> Path:
    """A base is relative to the file that names it; a bare name may be that of a shipped config."""
    beside = file.parent / base
    return Path(base) if not beside.exists() and Path(base).stem in shipped() and Path(base).name == base else beside


def _find(path: Path) -> Path:
    """The file that `path` means. Raises UserError with the nearest names where there is none."""
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
    hint = f"did you mean {_either(near)}?" if near else f"shipped configs are {', '.join(own)}"
    reason = "no such file" if path.parent.is_dir() else f"no such file: there is no folder {path.parent}"
    raise UserError(f"{path}: {reason}; {hint}")


def _flatten(
    table: Mapping[str, Any], file: Path, lines: Mapping[tuple[str, ...], int], problems: list[_Problem]
) -> Iterator[tuple[str, _Given]]:
    """The known keys of a file's table; all else becomes a problem."""

    def origin(*path: str) -> str:
        return f"{file}:{lines[path]}" if path in lines else str(file)

    for section, values in table.items():
        if section not in SECTIONS:
            text = _unknown_section(section) if isinstance(values, dict | list) else _unknown_key("", section)
            problems.append(_Problem(origin(section), section, text))
        elif not isinstance(values, dict):
            text = f"given {_shown(values)}, but it is a section: write [{section}] and its keys below"
            problems.append(_Problem(origin(section), section, text))
        else:
            for key, value in values.items():
                if f"{section}.{key}" in KEYS:
                    yield f"{section}.{key}", _Given(value, origin(section, key))
                else:
                    text = _unknown_key(section, key)
                    problems.append(_Problem(origin(section, key), f"{section}.{key}", text))


def _read_override(override: str, problems: list[_Problem]) -> dict[str, _Given]:
    name, equals, text = override.partition("=")
    name, text = name.strip(), text.strip()
    section, dot, key = name.partition(".")
    if not equals:
        problem = _Problem(
            COMMAND_LINE, override, "not an override; write section.key=value, such as train.num_steps=20"
        )
    elif not dot:
        problem = _Problem(COMMAND_LINE, name, _unknown_key("", name))
    elif section not in SECTIONS:
        problem = _Problem(COMMAND_LINE, name, _unknown_section(section, key))
    elif name not in KEYS:
        problem = _Problem(COMMAND_LINE, name, _unknown_key(section, key))
    else:
        return {name: _Given(_override_value(text, KEYS[name]), COMMAND_LINE)}
    problems.append(problem)
    return {}


def _override_value(text: str, key: Key) -> Any:
    """TOML where it parses; else, and where the key holds text, the characters themselves, since shells eat quotes."""
    try:
        table = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    if len(table) != 1 or (key.wanted.startswith(("string", "path")) and not isinstance(table["v"], str)):
        return text
    return table["v"]


# From what was given to sections, or problems in the user's words


def _validate(name: str, model: type[Section], given: Mapping[str, _Given], problems: list[_Problem]) -> Section:
    """The section, with the default for every value that is a problem."""
    values = {key: given[f"{name}.{key}"].value for key in model.model_fields if f"{name}.{key}" in given}
    wrong: dict[str, str] = {
        key: f"given {_shown(value)}; a whole number has at most 64 bits"
        for key, value in values.items()
        if isinstance(value, int) and not -(2**63) <= value < 2**63
    }
    try:
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = str(detail["loc"][0])
            wrong.setdefault(
                key, _value_problem(values[key], KEYS[f"{name}.{key}"], detail.get("ctx", {}).get("error"))
            )
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    finally:
        problems += [_Problem(given[f"{name}.{key}"].origin, f"{name}.{key}", text) for key, text in wrong.items()]


def _value_problem(value: Any, key: Key, reason: object) -> str:
    if reason is not None:  # one of config's own checks
        return f"given {_shown(value)}; {reason}"
    wanted = key.wanted if key.wanted.startswith(('"', "true", "1")) else f"a {key.wanted}"
    choices = re.findall(r'"(\w+)"', key.wanted)
    hint = ""
    if isinstance(value, str) and key.wanted.startswith('"'):
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
    elif isinstance(value, str) and value.lower() in ("true", "false") and key.wanted.startswith("true"):
        hint = f"; write {value.lower()}, without quotes or capitals"
    elif isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value):
        hint = "; leave out the quotes"
    elif isinstance(value, float) and not math.isfinite(value):
        hint = "; must be finite"
    elif isinstance(value, float) and value.is_integer() and key.wanted.startswith("whole"):
        hint = f"; write {int(value)}"
    return f"given {_shown(value)}; must be {wanted}{hint}"


def _contradictions(
    sections: Mapping[str, Section], given: Mapping[str, _Given], wrong: set[str]
) -> Iterator[_Problem]:
    """Values that contradict one another, where none of them is a problem already."""
    values: dict[str, Any] = dict(sections)
    for contradiction in contradictions(Config.model_construct(None, **values)):
        if wrong.isdisjoint(contradiction.keys):
            origin = next(given[name].origin for name in contradiction.keys if name in given)
            yield _Problem(origin, contradiction.keys[0], contradiction.problem)


def _shown(value: Any) -> str:
    """A value as the user wrote it, short enough for one line."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = toml_value(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)


def _unknown_section(section: str, key: str = "") -> str:
    near = difflib.get_close_matches(section.lower(), SECTIONS, n=1)
    owners = [name for name in KEYS if key and name.endswith(f".{key}")]
    if owners:
        return f"unknown section; did you mean {_either(owners)}?"
    hint = f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(SECTIONS)}"
    return f"unknown section; {hint}"


def _unknown_key(section: str, key: str) -> str:
    """Says what was probably meant; `section` is "" for a key above the first section."""
    lowered = key.lower().replace("-", "_")
    owners = [name for name in KEYS if name.endswith(f".{lowered}")]
    if owners and not section:
        return f"is outside a section; did you mean {_either(owners)}?"
    if owners:
        return f"unknown key in [{section}]; did you mean {_either(owners)}?"
    own = {name.partition(".")[2]: name for name in KEYS if name.startswith(f"{section}.")}
    every = {name.partition(".")[2]: name for name in KEYS}
    near = [FOREIGN_NAMES[lowered]] if lowered in FOREIGN_NAMES else []
    near = near or [own[name] for name in difflib.get_close_matches(lowered, own, n=1)]
    near = near or [every[name] for name in difflib.get_close_matches(lowered, every, n=1, cutoff=0.75)]
    what = f"unknown key in [{section}]" if section else "unknown key"
    if near:
        return f"{what}; did you mean {near[0]}?"
    if section:
        return f"{what}; its keys are {', '.join(own)}"
    return f"{what}; at the top of a file stands only base, everything else in a section: {', '.join(SECTIONS)}"
