"""In: a JSON object. Out: a JSON file with a checksum; reading returns the object, or None if the file was changed.
Does not protect against an attacker, who can write a new checksum. The checksum is the SHA-256 of all other fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.base.durable import write_json
from codescent.base.reading import read_json

SEAL = "digest"


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, fields: Mapping[str, Any], within: Path | None = None) -> None:
    """Replace a JSON file atomically; `within`: see writing.py. Its field SEAL is the digest of the other fields."""
    values = {name: value for name, value in fields.items() if name != SEAL}
    write_json(path, {**values, SEAL: digest(values)}, within)


def is_sealed(fields: Mapping[str, Any]) -> bool:
    """Whether the field SEAL equals the digest of the other fields."""
    return fields.get(SEAL) == digest({name: value for name, value in fields.items() if name != SEAL})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Read a file of `write_sealed`. None: the file is missing, unreadable or changed."""
    try:
        fields = read_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and is_sealed(fields) else None
