"""In: the pydantic classes of the sections. Out: the JSON Schema of a config file, for editors and other programs.
Does not check a config: load.py does. The schema knows no contradictions between keys, and no task or model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from codescent.config.keys import AUTO, only_of
from codescent.config.sections import SECTIONS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
BASE = "start from another file: a path relative to this one, or the name of a shipped config"
NULL = {"type": "null"}


def config_schema() -> dict[str, Any]:
    """The schema of a config file, in JSON Schema draft 2020-12: sections, keys, types, bounds, choices, meanings."""
    sections = {
        name: {
            "description": " ".join((model.__doc__ or "").split()),
            "type": "object",
            "additionalProperties": False,
            "properties": {key: _property(field) for key, field in model.model_fields.items()},
        }
        for name, model in SECTIONS.items()
    }
    return {
        "$schema": DIALECT,
        "title": "A config of codescent",
        "type": "object",
        "additionalProperties": False,
        "properties": {"base": {"type": "string", "minLength": 1, "description": BASE}, **sections},
    }


def key_schema(name: str) -> dict[str, Any]:
    """The schema of one "section.key"."""
    section, key = name.split(".")
    return _property(SECTIONS[section].model_fields[key])


def _property(field: FieldInfo) -> dict[str, Any]:
    """The schema of a key. A key without a default value has "auto" in files, where pydantic has None."""
    kind: Any = field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[(kind, *field.metadata)] if field.metadata else kind)
    found = _of_files(adapter.json_schema())
    only = only_of(field)
    found["description"] = f"{field.description}{'' if only is None else f'; needs {only.words}'}"
    if not field.is_required():
        default = field.get_default()
        plain = isinstance(default, bool | int | float)
        found["default"] = AUTO if default is None else default if plain else str(default)
    return found


def _of_files(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of pydantic, with "auto" for null, and without the names of formats that are not of JSON Schema."""
    found = {name: value for name, value in schema.items() if name not in ("title", "format")}
    if "anyOf" not in found:
        return found
    kinds = [{"const": AUTO} if one == NULL else _of_files(one) for one in found.pop("anyOf")]
    return {**found, "anyOf": kinds}
