"""In: the keys of config.json for rotary positions, of transformers 4 or 5. Out: our sizes rope_*, and back.
Does not compute frequencies and does not name a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from codescent.huggingface.kind import Settings
from codescent.models.llama.rope import READS, ROPE
from codescent.plan.model import RopeScaling

LENGTH = "original_max_position_embeddings"
NO_OBJECT = 'rope_scaling (or rope_parameters) must be an object, such as {"rope_type": "linear", "factor": 2.0}'
HANDLED = ("rope_theta", "rope_scaling", "rope_parameters", LENGTH)
"""The keys of config.json that `read` reads."""

_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    LENGTH: "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
"""Key of the rotary scaling in config.json to the field of `RopeScaling`."""
_SIZE_OF = {field: size for size, field in ROPE.items()}
_LISTS = ("short_factors", "long_factors")
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
_REASONS = {"dynamic": ": its frequencies change with the length of each text, so no cached key would stay right"}


def given_in(settings: Settings) -> dict[str, Any] | None:
    """What a config.json says of the rotation, as a new dict; None: it is no object."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    return dict(given) if isinstance(given, Mapping) else None


def read(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """The base of the frequencies and their scaling, and error messages."""
    rope = given_in(settings)
    if rope is None:
        return {}, [NO_OBJECT]
    found: dict[str, Any] = {"rope_theta": float(rope.pop("rope_theta", settings.get("rope_theta", 10_000.0)))}
    method = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope.get("partial_rotary_factor") == 1.0:  # all channels are turned
        del rope["partial_rotary_factor"]
    problems: list[str] = []
    if method in READS:
        sizes, problems = _scaling(method, rope, settings)
        found |= sizes
    elif method != "default":
        known = ", ".join(f'"{name}"' for name in ("default", *sorted(READS)))
        problems = [f'rotary positions of the type "{method}"{_REASONS.get(method, "")}: codescent has {known}']
        rope = {}
    problems += [f"rotary positions with {name} = {value}: unknown to codescent" for name, value in rope.items()]
    return found, problems


def _scaling(method: str, rope: dict[str, Any], settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """The sizes of a scaling, and error messages. Removes from `rope` what it reads."""
    given = {field: rope.pop(theirs, None) for theirs, field in _KEYS.items() if field in READS[method]}
    if "original_seq_len" in given:  # transformers takes these then; phi3 has the first beside the others
        lengths = settings.get(LENGTH), given["original_seq_len"], settings.get("max_position_embeddings")
        given["original_seq_len"] = next((length for length in lengths if length is not None), None)
    if method in ("yarn", "longrope") and given["factor"] is None and _is_number(given["original_seq_len"]):
        given["factor"] = settings.get("max_position_embeddings", 0) / given["original_seq_len"]
    if method == "yarn":
        scales = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if given["attention_factor"] is None and all(map(_is_number, scales)) and _is_number(given["factor"]):
            over, under = (1.0 + 0.1 * scale * math.log(max(1.0, given["factor"])) for scale in scales)
            given["attention_factor"] = over / under
    given = {name: value for name, value in given.items() if value is not None or name not in _OPTIONAL}
    wrong = {
        theirs: given[field] for theirs, field in _KEYS.items() if field in given and not _fits(field, given[field])
    }
    if wrong:
        shown = ", ".join(f"{theirs} = {json.dumps(value)}" for theirs, value in wrong.items())
        return {}, [f"rotary scaling with {shown}: {method} needs a number above 0 for each; {LENGTH} is whole"]
    return {"rope_type": method, **{_SIZE_OF[name]: _size(name, value) for name, value in given.items()}}, []


def _fits(field: str, value: object) -> bool:
    if field == "truncate":
        return isinstance(value, bool)
    if field in _LISTS:
        return isinstance(value, list) and all(map(_is_number, value))
    return _is_number(value) and (field != "original_seq_len" or float(value).is_integer())


def _size(field: str, value: Any) -> Any:
    """A value of config.json as the size of [model] has it."""
    if field in _LISTS:
        return ", ".join(repr(float(one)) for one in value)
    if field in ("truncate", "original_seq_len"):
        return value if field == "truncate" else int(value)
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf


def write(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of config.json, in the words of transformers 4, which 5 reads, too."""
    values: Mapping[str, Any] | None = None
    if scaling is not None:
        found = {theirs: getattr(scaling, field) for theirs, field in _KEYS.items() if field in READS[scaling.method]}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        values = {"rope_type": scaling.method} | {name: value for name, value in plain.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": values}
