"""In: the keys of config.json on multi-head latent attention, names of tensors. Out: our sizes of latents, and back;
the rows of a table; rotary positions whose scaling has a factor on scores.
Does not name a family of transformers: families.py says which of them has latents."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from codescent.huggingface import rope
from codescent.huggingface.correspond import Row, Theirs, same
from codescent.huggingface.kind import Settings
from codescent.huggingface.positions import RotaryKeys
from codescent.models.llama.declare import LlamaShape

KEYS: Mapping[str, int | None] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""The keys, each with what the class of transformers has where it is missing."""
DERIVED = ("head_dim", "qk_head_dim")
"""Keys that transformers writes beside them, and computes from them."""
PREDICTS = "num_nextn_predict_layers"
"""How many modules predict tokens behind the next one. Transformers writes it for folders without such modules, too."""
MOST_MODULES = 16
"""No published model has more of them."""
_MSCALE = "mscale_all_dim"


@dataclass(frozen=True)
class LatentKeys:
    """Whether a family has latents, and its keys for them. `predicts`: whether it has modules for more tokens."""

    has: bool = False
    predicts: bool = False

    @property
    def handled(self) -> tuple[str, ...]:
        """The keys that it reads."""
        return (*KEYS, *DERIVED, *([PREDICTS] if self.predicts else [])) if self.has else ()

    def spare(self, shape: LlamaShape) -> str:
        """Pattern of the tensors of modules that predict more tokens: they have the next numbers after the layers."""
        last = shape.num_layers + MOST_MODULES
        numbers = "|".join(map(str, range(shape.num_layers, last)))
        return rf"model\.layers\.({numbers})\..*" if self.predicts else r"(?!)"

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """Our sizes, and error messages."""
        if not self.has:
            return {}, []
        values: dict[str, Any] = {key: settings.get(key, missing) for key, missing in KEYS.items()}
        problems = [
            f"{key} = {json.dumps(value)}: not a size"
            for key, value in values.items()
            if (type(value) is not int or value < 1) and not (key == "q_lora_rank" and value is None)
        ]
        if problems:
            return {}, problems
        turning, still = values["qk_rope_head_dim"], values["qk_nope_head_dim"]
        for key, value in zip(DERIVED, (turning, turning + still), strict=True):
            if settings.get(key) not in (None, value):
                problems.append(f"{key} = {json.dumps(settings[key])}: by the other keys it is {value}")
        found = {"head_dim": turning + still, "rotary_dim": turning, "value_dim": values["v_head_dim"]}
        found |= {"kv_latent_dim": values["kv_lora_rank"]}
        return found | ({"q_latent_dim": values["q_lora_rank"]} if values["q_lora_rank"] else {}), problems

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """The keys that say the latents of a shape."""
        if not self.has:
            return {"head_dim": shape.head_dim}
        return {
            "kv_lora_rank": shape.kv_latent_dim,
            "q_lora_rank": shape.q_latent_dim or None,
            "qk_rope_head_dim": shape.rotary_dim,
            "qk_nope_head_dim": shape.head_dim - shape.rotary_dim,
            "v_head_dim": shape.value_dim,
            **({PREDICTS: shape.mtp_layers} if self.predicts else {}),
        }

    def fits(self, shape: LlamaShape) -> bool:
        """Whether the family has the attention of a shape."""
        return self.has == (shape.kv_latent_dim > 0) and (self.predicts or not shape.mtp_layers)

    def modules(self, shape: LlamaShape, model: Mapping[str, Any], tensors: Collection[str]) -> LlamaShape:
        """The shape with those modules of a run that a folder has: config.json may say some that are not there."""
        wanted = model.get("mtp_layers", 0) if self.predicts else 0
        numbers = range(shape.num_layers, shape.num_layers + wanted)
        there = takewhile(lambda number: f"model.layers.{number}.eh_proj.weight" in tensors, numbers)
        return replace(shape, mtp_layers=len(tuple(there)))

    def words(self) -> Iterator[str]:
        """What it allows, for messages."""
        if self.has:
            yield "kv_latent_dim above 0"


@dataclass(frozen=True)
class LatentPositions(RotaryKeys):
    """Rotary positions of a part of each key. With yarn `mscale_all_dim` is a factor on scores, too."""

    def read(self, settings: Settings, head_dim: int, *, windowed: bool) -> tuple[dict[str, Any], list[str]]:
        """See RotaryKeys."""
        found, problems = super().read(settings, head_dim, windowed=windowed)
        scale = (rope.given_in(settings) or {}).get(_MSCALE)
        if problems or not scale:  # null and 0 are 1, as in transformers
            return found, problems
        if (
            found.get("rope_type") != "yarn"
            or isinstance(scale, bool)
            or not isinstance(scale, int | float)
            or scale < 0
        ):
            return {}, [f"rotary scaling with {_MSCALE} = {json.dumps(scale)}: yarn alone has it, and it is a number"]
        return found | {"rope_mscale_all_dim": float(scale)}, []

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """See RotaryKeys."""
        found = super().write(shape)
        if shape.rope_scaling is not None and shape.rope_scaling.mscale_all_dim is not None:
            found["rope_scaling"] |= {_MSCALE: shape.rope_scaling.mscale_all_dim}
        return found

    def fits(self, shape: LlamaShape) -> bool:
        """See RotaryKeys."""
        return not shape.rope_local_theta


def rows(shape: LlamaShape, ours: str, theirs: str) -> Iterator[Row]:
    """The rows of attention with latents. `ours`, `theirs`: names of a block.

    Letters of dims: a all latents, h heads, k channels of a head's query, r a latent; others see `llama.rows`. In a
    head the channels that turn come first here, and last there; pairs are adjacent in both.
    """
    queries, total = shape.q_latent_dim, shape.q_latent_dim + shape.kv_latent_dim + shape.rotary_dim
    attn = f"{theirs}.self_attn"
    order = {"k": (*range(shape.rotary_dim, shape.head_dim), *range(shape.rotary_dim))}
    down = [Theirs(f"{attn}.kv_a_proj_with_mqa.weight", "a d", {"a": (queries, total)})]
    if queries:
        down.insert(0, Theirs(f"{attn}.q_a_proj.weight", "a d", {"a": (0, queries)}))
    yield Row(f"{ours}.attn.down.weight", "a d", tuple(down))
    name, of_theirs = ("q_up", "q_b_proj") if queries else ("q", "q_proj")
    yield Row(f"{ours}.attn.{name}.weight", "(h k) r", (Theirs(f"{attn}.{of_theirs}.weight", "(h k) r", order=order),))
    yield same(f"{ours}.attn.q_norm.weight", f"{attn}.q_a_layernorm.weight", "r")
    yield same(f"{ours}.attn.kv_norm.weight", f"{attn}.kv_a_layernorm.weight", "r")
    yield same(f"{ours}.attn.kv_up.weight", f"{attn}.kv_b_proj.weight", "o r")
    yield same(f"{ours}.attn.out.weight", f"{attn}.o_proj.weight", "o i")


NO_LATENTS = LatentKeys()
LATENTS = LatentKeys(has=True)
PREDICTING = LatentKeys(has=True, predicts=True)
"""DeepSeek-V3."""
LATENT_POSITIONS = LatentPositions()
