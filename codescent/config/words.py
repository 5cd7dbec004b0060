"""In: the config sections of sections.py. Out: documentation of each key: valid values in words, default, description.
Does not read a file and does not check values."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from codescent.base.own_names import FORM
from codescent.config.keys import AUTO, OWN_SCHEMA, only_of
from codescent.config.sections import SECTIONS


@dataclass(frozen=True)
class Key:
    """One config key, as shown in documentation and error messages."""

    section: str
    name: str
    wanted: str  # valid values, in words
    default: str  # as TOML; empty: the key has none
    description: str


def keys_markdown() -> str:
    """All keys as Markdown, with a heading and a table for each section."""
    text = ""
    for section, model in SECTIONS.items():
        text += f"### `[{section}]`\n\n{model.__doc__}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
        for key in KEYS.values():
            if key.section == section:
                text += f"| `{key.name}` | {key.wanted} | `{key.default}` | {key.description} |\n"
        text += "\n"
    return text.removesuffix("\n")


def toml_value(value: object) -> str:
    """A value as TOML, in one line. None becomes "auto", because TOML has no None."""
    if value is None:
        return f'"{AUTO}"'
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return tomli_w.dumps({"v": str(value) if isinstance(value, Path) else value}).removeprefix("v = ").rstrip("\n")


LISTED = {str: "strings", list[str]: "pairs of strings"}


def key_of(section: str, name: str, field: FieldInfo) -> Key:
    """A key from its field of a section."""
    default = "" if field.is_required() else toml_value(field.default)
    return Key(section, name, _wanted(field), default, _description(field))


def _wanted(field: FieldInfo) -> str:
    kind = field.annotation
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    choices = [choice for one in kinds if one is not type(None) for choice in _choices(one, field)]
    if type(None) in kinds:
        choices.append(f'"{AUTO}"')
    return " or ".join([*([", ".join(choices[:-1])] if choices[:-1] else []), choices[-1]])


def _choices(kind: typing.Any, field: FieldInfo) -> list[str]:
    bounds = list(field.metadata)
    while typing.get_origin(kind) is Annotated:
        kind, *metadata = typing.get_args(kind)
        if OWN_SCHEMA in metadata:
            return [FORM]
        bounds += [item for found in metadata for item in getattr(found, "metadata", ())]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [choice for one in typing.get_args(kind) for choice in _choices(one, field)]
    if typing.get_origin(kind) is Literal:
        return [toml_value(choice) for choice in typing.get_args(kind)]
    if typing.get_origin(kind) is tuple:
        return ["list of tables"]
    if typing.get_origin(kind) is list:
        return [f"list of {LISTED.get(typing.get_args(kind)[0], 'numbers')}"]
    names = {bool: "true or false", int: "whole number", float: "number", str: "string", Path: "path"}
    return [names[kind] + (_bounds(bounds) if kind in (int, float) else "")]


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(item, name)}" for item in metadata for name, sign in signs.items() if hasattr(item, name)
    ]
    return f" {' and '.join(found)}" if found else ""


def _description(field: FieldInfo) -> str:
    only = only_of(field)
    return f"{field.description}{'' if only is None else f'; needs {only.words}'}"


KEYS: Mapping[str, Key] = {
    f"{section}.{name}": key_of(section, name, field)
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
}
"""All keys by "section.key", in order. docs/config.md and `codescent config --keys` are generated from them."""
