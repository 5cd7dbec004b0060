"""In: the keys of config.json for rotary positions, as a family has them. Out: our sizes for them, and back.
Does not know which family has which (families.py says it); rope.py knows the methods of scaling."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from codescent.huggingface import rope
from codescent.huggingface.kind import Settings
from codescent.models.llama.declare import LlamaShape

_LOCAL, _SHARE = "rope_local_base_freq", "partial_rotary_factor"
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
"""The bases of Gemma3TextConfig where config.json has none, by its words for a layer."""


@dataclass(frozen=True)
class RotaryKeys:
    """How a family says its rotary positions.

    Attributes:
        more: keys that it reads, beside those of `rope`.
        two_bases: whether layers with a window have a base of their own, and no scaling.
        partial: whether a part of each head's channels may turn. Then longrope is the only scaling.
        theta: the base where config.json has none; None: that of `LlamaShape`.
    """

    more: Collection[str] = ()
    two_bases: bool = False
    partial: bool = False
    theta: float | None = None

    @property
    def handled(self) -> Collection[str]:
        """The keys of config.json that `read` reads."""
        return (*rope.HANDLED, *self.more)

    def read(self, settings: Settings, head_dim: int, *, windowed: bool) -> tuple[dict[str, Any], list[str]]:
        """Our sizes, and error messages. `windowed`: whether a layer has a window."""
        given = rope.given_in(settings)
        if given is None:
            return {}, [rope.NO_OBJECT]
        found: dict[str, Any] = {}
        problems: list[str] = []
        theta = settings.get("rope_theta", self.theta)
        if self.two_bases:
            local = {"rope_theta": settings.get(_LOCAL, _THETAS["sliding_attention"])}
            if not given.keys().isdisjoint(_THETAS):  # transformers 5
                local |= given.get("sliding_attention") or {}
                given = dict(given.get("full_attention") or {})
            theta = _THETAS["full_attention"] if theta is None else theta
            if others := {name: value for name, value in local.items() if (name, value) != ("rope_type", "default")}:
                base = others.pop("rope_theta")
                problems += [f"layers with a window: {name} = {value}: unknown" for name, value in others.items()]
                found |= {"rope_local_theta": float(base)} if windowed else {}
        if self.partial:
            share = given.pop(_SHARE, settings.get(_SHARE, 1.0))
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
                return {}, [f"{_SHARE} = {json.dumps(share)}: not a share above 0 and up to 1"]
            found |= {"rotary_dim": int(head_dim * share)} if int(head_dim * share) != head_dim else {}
            for key in {"type", "rope_type"} & given.keys():  # as Phi3Config does, for older files
                given[key] = "longrope" if given[key] in ("su", "yarn") else given[key]
        bases = {} if theta is None else {"rope_theta": theta}
        others = {key: value for key, value in settings.items() if key not in ("rope_parameters", "rope_scaling")}
        positions, unlike = rope.read({**others, **bases, "rope_parameters": given})
        return found | positions, problems + unlike

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """The keys of config.json, in the words of transformers 4, which 5 reads, too."""
        found = rope.write(shape.rope_theta, shape.rope_scaling)
        if self.two_bases:
            found[_LOCAL] = shape.rope_local_theta or shape.rope_theta
        if self.partial:
            share = (shape.rotary_dim or shape.head_dim) / shape.head_dim
            exact = int(shape.head_dim * share) == (shape.rotary_dim or shape.head_dim)
            found[_SHARE] = share if exact else math.nextafter(share, 1.0)
            found |= {} if shape.rope_scaling is None else {rope.LENGTH: shape.rope_scaling.original_seq_len}
        return found

    def fits(self, shape: LlamaShape) -> bool:
        """Whether a shape's positions can be written."""
        scaling, windowed = shape.rope_scaling, shape.window > 0
        if scaling is not None and scaling.mscale_all_dim is not None:
            return False
        local = self.two_bases if shape.rope_local_theta else not (self.two_bases and windowed and scaling)
        return local and (self.partial or not shape.rotary_dim) and not (self.partial and _is_other(shape))


def _is_other(shape: LlamaShape) -> bool:
    return shape.rope_scaling is not None and shape.rope_scaling.method != "longrope"


PLAIN = RotaryKeys()
TWO_BASES = RotaryKeys((_LOCAL,), two_bases=True)
"""Gemma 3."""
PARTIAL = RotaryKeys((_SHARE,), partial=True)
"""Phi-3 and Phi-4."""
LONG_WAVES = RotaryKeys(theta=1_000_000.0)
"""Mixtral."""
