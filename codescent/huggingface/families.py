"""In: nothing. Out: the families of transformers that are codescent's Llama with other traits, as `Kind`s.
Does not say which tensor is which parameter (llama.py does), and does not read or write files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from codescent.huggingface import rope
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings, is_true
from codescent.huggingface.llama import axes, rows
from codescent.models.llama.declare import LlamaShape


@dataclass(frozen=True)
class Family:
    """What tells a family of transformers from the others.

    Attributes:
        model_type, architecture: its names in config.json.
        traits: the fields of `LlamaShape` that all its models have so.
        missing: values of keys that a config.json does not have, by the class of transformers: our size -> the value.
        head_dim: likewise of the key head_dim; None: hidden_size / num_attention_heads.
        fixed: keys with one supported value, beside those of all families.
        windows: whether attention may see a window of positions only: "always" by sliding_window, "chosen" by
            use_sliding_window and the types of layers; "": it never does.
        inert: see `Kind`.
    """

    model_type: str
    architecture: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: str = ""
    inert: str = ""

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """See `Kind.read`: traits, tied head, head size, and rotary positions."""
        found, problems = rope.read(settings)
        tied, channels = is_true(settings, "tie_word_embeddings"), settings.get("head_dim", self.head_dim)
        found |= {"tie_head": tied, **self.traits}
        if channels is not None and (type(channels) is not int or channels < 1):
            problems.append(f"head_dim = {channels!r}: not a size")
        elif channels is not None:
            found["head_dim"] = channels
        window, wrong = self._window(settings)
        return found | ({"window": window} if window else {}), problems + wrong

    def _window(self, settings: Settings) -> tuple[int, list[str]]:
        """The window of all layers, 0 if there is none, and error messages."""
        width, layers = settings.get("sliding_window", _WINDOW), settings.get("num_hidden_layers") or 0
        windowed = layers if self.windows else 0  # how many layers have it
        if self.windows == "chosen":
            types = settings.get("layer_types")
            if types is None:
                windowed = max(0, layers - settings.get("max_window_layers", 28))
            else:
                windowed = sum(one == "sliding_attention" for one in types)
                if unknown := sorted({*types} - {"sliding_attention", "full_attention"}):
                    return 0, [f"layer_types: {', '.join(unknown)}: codescent has no such attention"]
                if len(types) != layers:
                    return 0, [f"layer_types: of {len(types)} layers, but num_hidden_layers = {layers}"]
            windowed = windowed if is_true(settings, "use_sliding_window") else 0
        if not windowed or width is None:
            return 0, []
        if type(width) is not int or width < 1:
            return 0, [f"sliding_window = {json.dumps(width)}: not a size"]
        if windowed != layers:
            return 0, [
                f"{windowed} of {layers} layers have a sliding window: codescent has windows on all layers or on none"
            ]
        return width, []

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """See `Kind.write`."""
        positions = rope.write(shape.rope_theta, shape.rope_scaling)
        found = positions | {"head_dim": shape.head_dim, "tie_word_embeddings": shape.tie_head}
        if self.windows:
            found["sliding_window"] = shape.window or None
        if self.windows == "chosen":
            found |= {
                "use_sliding_window": shape.window > 0,
                "max_window_layers": 0 if shape.window else shape.num_layers,
            }
        return found

    def fits(self, shape: LlamaShape) -> bool:
        """Whether transformers computes a model of this shape by this family."""
        plain = {name: LlamaShape.__dataclass_fields__[name].default for name in TRAITS}
        alike = all(getattr(shape, name) == value for name, value in (plain | dict(self.traits)).items())
        return alike and bool(self.windows or not shape.window)

    def words(self) -> str:
        """The traits in words, for messages."""
        return ", ".join(f"{name} = {value}" for name, value in self.traits.items()) or "none of them"

    def defaults(self, settings: Settings) -> dict[str, Any]:
        """See `Kind.defaults`. Where transformers reads null as the number of heads, a missing key may be another."""
        found = {"num_kv_heads": settings.get("num_attention_heads"), "norm_eps": 1e-6, **self.missing}
        if "num_key_value_heads" in settings:
            found["num_kv_heads"] = settings.get("num_attention_heads")
        return found

    @property
    def kind(self) -> Kind:
        """The family as reading and writing know it."""
        return Kind(
            name="llama",
            model_type=self.model_type,
            architectures=lambda _: (self.architecture,),
            prefix="model.",
            sizes=_SIZES,
            fixed={"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,), **self.fixed},
            ignored=COMMON_IGNORED + "pretraining_tp",
            rows=rows,
            axes=axes,
            read=self.read,
            write=self.write,
            handled=(*rope.HANDLED, "head_dim", "tie_word_embeddings", *_WINDOW_KEYS[self.windows]),
            fits=self.fits,
            defaults=self.defaults,
            buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
            tied={"lm_head.weight": "model.embed_tokens.weight"},
            fresh=("head.weight",),
            free=("dropout", "seq_len"),
            inert=self.inert,
            neutral=_NEUTRAL,
        )


TRAITS: Collection[str] = ("qkv_bias", "qk_norm", "norm")
"""The fields of `LlamaShape` in which families differ."""
_SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),  # true: the channels of a pair are adjacent, as in our own order
    "partial_rotary_factor": (1.0, None),
    "layer_types": (None,),
    "use_mrope": (False,),  # positions of pictures, in old Qwen
}
_WINDOW = 4096
"""Of the classes of transformers, where a config.json does not say sliding_window."""
_WINDOW_KEYS: Mapping[str, Collection[str]] = {
    "": (),
    "always": ("sliding_window",),
    "chosen": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
_OLD_LLAMA = "is_decoder is_llama_config resid_pdrop embd_pdrop"
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}

# Each default is that of the family's config class in transformers 5.23.
FAMILIES = (
    Family("llama", "LlamaForCausalLM", fixed={**_NO_BIAS, "mlp_bias": (False,)}, inert=_OLD_LLAMA),
    Family("mistral", "MistralForCausalLM", missing={"num_kv_heads": 8}, windows="always"),
    Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}, missing={"num_kv_heads": 32}, windows="chosen"),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {"qk_norm": "head"},
        {"num_kv_heads": 32},
        head_dim=128,
        fixed=_NO_BIAS,
        windows="chosen",
    ),
    Family("olmo2", "Olmo2ForCausalLM", {"qk_norm": "all", "norm": "output"}, {"norm_eps": 1e-5}, fixed=_NO_BIAS),
)
"""Export writes the first one that fits a shape."""
