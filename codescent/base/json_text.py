"""In: values of Python: dataclasses, tuples with names, paths, numbers that may not be finite. Out: JSON text.
Does not decide which values are printed, and prints nothing."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any


def json_value(value: Any) -> Any:
    """A value as JSON data: fields by their names; null for a number that is not finite, as JSON has none.

    Raises TypeError: JSON has no such value.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): json_value(one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(one) for one in value]
    if hasattr(value, "item"):  # a number of numpy
        return json_value(value.item())
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def json_text(value: Any) -> str:
    """A value as JSON text of several lines. Raises TypeError: see `json_value`."""
    return json.dumps(json_value(value), indent=1, allow_nan=False)
