"""In: a folder of prepared samples. Out: what its description says, checked; whether its files are as they were.
Does not know what is in the files: the source of each task does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from codescent.base.errors import UserError
from codescent.data.text.request import DESCRIPTION

AGAIN = "delete this folder and prepare it again"


def is_described(path: Path, form: str) -> bool:
    """Whether a folder says that it is of this form, its `format`."""
    try:
        description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return False
    return isinstance(description, dict) and description.get("format") == form


def described(folder: Path, model: type[BaseModel], what: str) -> dict[str, Any]:
    """What a folder says of itself.

    Args:
        folder: of prepared samples.
        model: what it must say.
        what: what it should hold, in words.

    Raises:
        UserError: it is none, or damaged: every field that is wrong.
    """
    path = folder / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model.model_validate(description)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, detail['loc'])) or 'the whole'}: {detail['msg']}" for detail in error.errors()]
        raise UserError(f"{path}: not {what}, or damaged: {'; '.join(wrong)}: {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}: {AGAIN}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: {AGAIN}") from error
    return description


def fingerprint_of(folder: Path, files: Mapping[str, str]) -> str:
    """A hash of all files, each of which is compared with the sha256 that is known of it.

    Raises:
        UserError: all that are not as they were made.
    """
    problems = []
    for name, expected in files.items():
        try:
            with (folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected:
                problems.append(f"{folder / name}: changed or cut short: sha256 {found}, expected {expected}")
        except OSError as error:
            problems.append(f"{folder / name}: cannot be read: {error.strerror}")
    if problems:
        raise UserError(*problems, f"{folder}: damaged: {AGAIN}")
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()
