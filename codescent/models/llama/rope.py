"""In: the sizes rope_* that a user gives. Out: a checked `RopeScaling`; the fields of one, for a plan.
Does not compute frequencies (operators/frequencies.py does) and does not read a config.json (huggingface does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from codescent.plan.model import RopeScaling

ROPE = {
    "rope_type": "method",
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_seq_len",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_attention_factor": "attention_factor",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_short_factors": "short_factors",
    "rope_long_factors": "long_factors",
}
"""Our sizes for the scaling of rotary frequencies, and the field of `RopeScaling` that each of them sets."""

READS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_seq_len"),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_seq_len",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale_all_dim",
    ),
    "longrope": ("factor", "original_seq_len", "short_factors", "long_factors", "attention_factor"),
}
"""Each method, and the fields of `RopeScaling` that it reads. The first is that of a scaling without a method."""

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("factor",),
    "linear": ("factor",),
    "yarn": ("factor", "original_seq_len"),
    "longrope": ("factor", "original_seq_len", "short_factors", "long_factors"),
}
_LISTS = ("short_factors", "long_factors")
_SIZE_OF = {field: size for size, field in ROPE.items()}


def scaling_of(sizes: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling of `rope_scaling` (a `RopeScaling`, or its fields), after sizes of ROPE have replaced its fields.

    Another `rope_type` replaces all of them. None: no scaling is given.
    """
    given = {field: sizes[size] for size, field in ROPE.items() if sizes.get(size) is not None}
    if not (given or sizes.get("rope_scaling")):
        return None
    fields = _before(sizes) | given
    return RopeScaling(**fields | {name: numbers(fields[name]) for name in _LISTS if name in fields})


def _before(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `rope_scaling`; none, if the sizes name another method."""
    found = sizes.get("rope_scaling")
    fields = dict(found) if isinstance(found, Mapping) else {} if found is None else asdict(found)
    method = fields.get("method", next(iter(READS)))
    return fields if sizes.get("rope_type") in (None, method) else {}


def numbers(given: Any) -> tuple[float, ...]:
    """The numbers of a list, or of a text that has commas between them.

    Raises:
        ValueError: a part of the text is no number.
    """
    return tuple(float(one) for one in (given.split(",") if isinstance(given, str) else given))


def fields_of(scaling: RopeScaling) -> dict[str, Any]:
    """What a plan says of a scaling: the fields that its method reads; the method, if it is not llama3."""
    fields = {name: getattr(scaling, name) for name in READS[scaling.method]}
    named = {} if scaling.method == next(iter(READS)) else {"method": scaling.method}
    return named | {name: value for name, value in fields.items() if value is not None}


def wrong_scaling(full: Mapping[str, Any], where: str) -> Iterator[str]:
    """Error messages for the sizes of ROPE among the sizes of a model."""
    given = [size for size in ROPE if full.get(size) is not None]
    before = _before(full)
    method = full.get("rope_type") or before.get("method", next(iter(READS)))
    if not given or method not in READS:  # words of a size are checked by `Kind.resolve`
        return
    for size in given:
        if size != "rope_type" and ROPE[size] not in READS[method]:
            reads = ", ".join(_SIZE_OF[field] for field in READS[method])
            yield f'{where}.{size}: {where}.rope_type = "{method}" does not read it; it reads {reads}'
    lacking = [_SIZE_OF[name] for name in _NEEDS[method] if name not in before and full.get(_SIZE_OF[name]) is None]
    if lacking:
        yield (
            f"{where}.{given[0]}: given without {', '.join(f'{where}.{size}' for size in lacking)}, "
            f'which {where}.rope_type = "{method}" needs; give both'
        )
    yield from _wrong_lists(full, method, where)
    low, high = (full.get(f"rope_{end}_freq_factor", before.get(f"{end}_freq_factor", 1.0)) for end in ("low", "high"))
    if method == "llama3" and not low < full.get("rope_high_freq_factor", before.get("high_freq_factor", 4.0)):
        yield f"{where}.rope_low_freq_factor = {low}: must be below {where}.rope_high_freq_factor = {high}"
    if method == "yarn" and not full.get("rope_theta", 10_000.0) > 1.0:
        yield f'{where}.rope_theta = {full["rope_theta"]}: must be above 1 for {where}.rope_type = "yarn"'


def _wrong_lists(full: Mapping[str, Any], method: str, where: str) -> Iterator[str]:
    """Error messages for the lists of longrope: a number above 0 for each pair of channels of a head."""
    channels = full.get("head_dim") or full.get("hidden_dim", 0) // max(1, full.get("num_heads", 1))
    pairs = (full.get("rotary_dim") or channels) // 2
    for name in _LISTS if method == "longrope" else ():
        size = _SIZE_OF[name]
        try:
            found = numbers(full.get(size) or ())
        except ValueError as error:
            yield f"{where}.{size}: {error}; it is a number for each pair of channels, with commas between them"
            continue
        if found and (len(found) != pairs or not all(0.0 < one < math.inf for one in found)):
            yield f"{where}.{size}: {len(found)} numbers; give {pairs} above 0, one for each pair of channels of a head"
