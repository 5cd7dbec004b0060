"""In: a JSON object. Out: a file of it with its own sha256, and the object again, if no bit of the file has changed.
Does not protect against a person: whoever changes a file can seal it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.base.durable import write_json

SEAL = "digest"


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, fields: Mapping[str, Any]) -> None:
    """Replace a JSON file; its field SEAL is the digest of the others."""
    values = {name: value for name, value in fields.items() if name != SEAL}
    write_json(path, {**values, SEAL: digest(values)})


def is_sealed(fields: Mapping[str, Any]) -> bool:
    """Whether the field SEAL is the digest of the others."""
    return fields.get(SEAL) == digest({name: value for name, value in fields.items() if name != SEAL})


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The object that `write_sealed` wrote; None: no such file, it cannot be read, or it has changed."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and is_sealed(fields) else None
