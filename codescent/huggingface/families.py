"""In: nothing. Out: the families of transformers that are codescent's Llama with other traits, as `Kind`s.
Does not say which tensor is which parameter (llama.py does), and does not read or write files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from codescent.huggingface.experts import DEEPSEEK, DEEPSEEK_V2, DOTS, MIXTRAL, OLMOE, QWEN, ExpertKeys
from codescent.huggingface.experts import NONE as NO_EXPERTS
from codescent.huggingface.kind import COMMON_IGNORED, Kind, Settings, is_true
from codescent.huggingface.latents import LATENT_POSITIONS, LATENTS, NO_LATENTS, PREDICTING, LatentKeys
from codescent.huggingface.llama import axes, rows
from codescent.huggingface.positions import LONG_WAVES, PARTIAL, PLAIN, TWO_BASES, RotaryKeys
from codescent.huggingface.windows import ALL_CHOSEN, ALWAYS, BY_TYPE, CHOSEN, NEVER, Windows, alternating
from codescent.models.llama.declare import LlamaShape


@dataclass(frozen=True)
class Family:
    """What tells a family of transformers from the others.

    Attributes:
        model_type, architecture: its names in config.json.
        traits: the fields of `LlamaShape` that all its models have so.
        missing: values of keys that a config.json does not have, by the class of transformers: our size -> the value.
        head_dim: likewise of the key head_dim; None: hidden_size / num_attention_heads.
        tied: likewise of the key tie_word_embeddings.
        sized: our size -> its key in config.json, where null is 0, and the value of a missing key.
        fixed: keys with one supported value, beside those of all families.
        windows: which layers have a sliding window.
        positions: how config.json says rotary positions.
        experts: how it says experts.
        latents: how it says latents of keys and values.
        inert: see `Kind`.
    """

    model_type: str
    architecture: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    tied: bool = False
    sized: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Windows = NEVER
    positions: RotaryKeys = PLAIN
    experts: ExpertKeys = NO_EXPERTS
    latents: LatentKeys = NO_LATENTS
    inert: str = ""

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """See `Kind.read`: traits, tied head, head size, windows, and rotary positions."""
        windows, problems = self.windows.read(settings)
        experts, more = self.experts.read(settings)
        latents, others = self.latents.read(settings)
        problems += [*more, *others]
        channels = latents.get("head_dim") or settings.get("head_dim", self.head_dim)
        tied = is_true(settings, "tie_word_embeddings") if "tie_word_embeddings" in settings else self.tied
        found = {"tie_head": tied, **self.traits, **windows, **experts, **latents}
        if channels is not None and (type(channels) is not int or channels < 1):
            problems.append(f"head_dim = {channels!r}: not a size")
        elif channels is not None:
            found["head_dim"] = channels
        for size, (key, missing) in self.sized.items():
            value = settings.get(key, missing)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
                problems.append(f"{key} = {json.dumps(value)}: not a number above 0")
            elif value is not None:
                found[size] = value
        if problems:
            return found, problems
        heads = settings.get("num_attention_heads") or 1
        positions, problems = self.positions.read(
            settings, channels or (settings.get("hidden_size") or 0) // heads, windowed="window" in windows
        )
        return found | positions, problems

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """See `Kind.write`."""
        found = {"tie_word_embeddings": shape.tie_head, **self.positions.write(shape)}
        found |= self.latents.write(shape) | self.experts.write(shape)
        found |= {key: _written(getattr(shape, size)) for size, (key, _) in self.sized.items()}
        if "score_dim" in self.sized:
            found[self.sized["score_dim"][0]] = shape.score_dim or shape.head_dim
        if self.windows is not NEVER:
            found["sliding_window"] = shape.window or None
        return found | self.windows.write(shape)

    def fits(self, shape: LlamaShape) -> bool:
        """Whether transformers computes a model of this shape by this family."""
        given = {name: LlamaShape.__dataclass_fields__[name].default for name in TRAITS if name not in self.sized}
        given |= self.traits
        windows = (self.windows.some or not shape.full_every) and (self.windows is not NEVER or not shape.window)
        alike = all(getattr(shape, name) == value for name, value in given.items())
        parts = self.positions.fits(shape), self.experts.fits(shape), self.latents.fits(shape)
        return alike and windows and all(parts)

    def words(self) -> str:
        """The traits in words, for messages."""
        return ", ".join(self._words()) or "none of them"

    def _words(self) -> Iterator[str]:
        yield from (f"{name} = {value}" for name, value in self.traits.items())
        yield from (f"any {name}" for name in self.sized)
        yield from self.latents.words()
        yield from self.experts.words()

    def defaults(self, settings: Settings) -> dict[str, Any]:
        """See `Kind.defaults`. Where transformers reads null as the number of heads, a missing key may be another."""
        found = {"num_kv_heads": settings.get("num_attention_heads"), "norm_eps": 1e-6, **self.missing}
        if "num_key_value_heads" in settings:
            found["num_kv_heads"] = settings.get("num_attention_heads")
        return found

    @property
    def kind(self) -> Kind:
        """The family as reading and writing know it."""
        windows = () if self.windows is NEVER else ("sliding_window", *self.windows.keys)
        sized = (key for key, _ in self.sized.values())
        return Kind(
            name="llama",
            model_type=self.model_type,
            architectures=lambda _: (self.architecture,),
            prefix="model.",
            sizes=_SIZES,
            fixed={**_SILU, "attention_dropout": (0.0,), **self.fixed},
            ignored=COMMON_IGNORED + "pretraining_tp",
            rows=partial(rows, experts=self.experts),
            axes=axes,
            read=self.read,
            write=self.write,
            handled=(
                *self.positions.handled,
                "head_dim",
                "tie_word_embeddings",
                *sized,
                *windows,
                *self.experts.handled,
                *self.latents.handled,
            ),
            fits=self.fits,
            defaults=self.defaults,
            buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
            tied={"lm_head.weight": "model.embed_tokens.weight"},
            fresh=("head.weight",),
            free=("dropout", "seq_len", "fused", "capacity_factor", "mtp_layers"),
            spare=self.latents.spare,
            held=self.latents.modules,
            inert=self.inert,
            neutral=_NEUTRAL,
        )


def _written(size: float) -> float | None:
    """A size as config.json has it: null is none."""
    return size or None


TRAITS: Collection[str] = (
    "qkv_bias",
    "qk_norm",
    "norm",
    "norm_plus_one",
    "activation",
    "scale_embedding",
    "score_cap",
    "logit_cap",
    "score_dim",
    "fused",
)
"""The fields of `LlamaShape` in which families differ, beside windows and rotary positions."""
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
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_OLD_LLAMA = "is_decoder is_llama_config resid_pdrop embd_pdrop"
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}

_GEMMA_2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    {"norm": "both", "norm_plus_one": True, "activation": "gelu", "scale_embedding": True},
    {"num_kv_heads": 4},
    head_dim=256,
    tied=True,
    sized={
        "score_dim": ("query_pre_attn_scalar", 256),
        "score_cap": ("attn_logit_softcapping", 50.0),
        "logit_cap": ("final_logit_softcapping", 30.0),
    },
    fixed={
        **_NO_BIAS,
        "hidden_act": ("gelu_pytorch_tanh",),  # its classes read the key below alone
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
    },
    windows=alternating(2),
    inert="cache_implementation",
)

# Each default is that of the family's config class in transformers 5.23.
FAMILIES = (
    Family("llama", "LlamaForCausalLM", fixed={**_NO_BIAS, "mlp_bias": (False,)}, inert=_OLD_LLAMA),
    Family("mistral", "MistralForCausalLM", missing={"num_kv_heads": 8}, windows=ALWAYS),
    Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}, missing={"num_kv_heads": 32}, windows=CHOSEN),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {"qk_norm": "head"},
        {"num_kv_heads": 32},
        head_dim=128,
        fixed=_NO_BIAS,
        windows=CHOSEN,
    ),
    Family("olmo2", "Olmo2ForCausalLM", {"qk_norm": "all", "norm": "output"}, {"norm_eps": 1e-5}, fixed=_NO_BIAS),
    _GEMMA_2,
    replace(
        _GEMMA_2,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        traits={**_GEMMA_2.traits, "qk_norm": "head"},
        sized={
            "score_dim": ("query_pre_attn_scalar", 256),
            "score_cap": ("attn_logit_softcapping", None),
            "logit_cap": ("final_logit_softcapping", None),
        },
        windows=alternating(6, "sliding_window_pattern", "_sliding_window_pattern"),
        positions=TWO_BASES,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        {"fused": True},
        missing={"norm_eps": 1e-5},
        fixed={**_NO_BIAS, "resid_pdrop": (0.0,), "embd_pdrop": (0.0,), "mlp_bias": (False,), "lm_head_bias": (False,)},
        windows=replace(ALWAYS, default=None),
        positions=PARTIAL,
        inert="full_attn_mod interpolate_factor",
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        missing={"num_kv_heads": 8, "norm_eps": 1e-5},
        fixed={"router_jitter_noise": (0.0,)},
        windows=replace(ALWAYS, default=None),
        positions=LONG_WAVES,
        experts=MIXTRAL,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"qk_norm": "head"},
        {"num_kv_heads": 4},
        fixed=_NO_BIAS,
        windows=ALL_CHOSEN,
        experts=QWEN,
        inert="max_window_layers",
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        {"qk_norm": "head"},
        {"num_kv_heads": 32},
        fixed=_NO_BIAS,
        windows=BY_TYPE,
        experts=DOTS,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        missing={"num_kv_heads": 128},
        fixed={
            **_NO_BIAS,
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        positions=LATENT_POSITIONS,
        experts=DEEPSEEK,
        latents=PREDICTING,
        inert="ep_size aux_loss_alpha seq_aux",
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        fixed={
            **_NO_BIAS,
            "mlp_bias": (False,),
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy",),
            "moe_layer_freq": (1,),
        },
        positions=LATENT_POSITIONS,
        experts=DEEPSEEK_V2,
        latents=LATENTS,
        inert="ep_size aux_loss_alpha seq_aux n_group topk_group",
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        {"qk_norm": "all"},
        missing={"norm_eps": 1e-5},
        fixed={**_NO_BIAS, "clip_qkv": (None,)},
        experts=OLMOE,
    ),
)
"""Export writes the first one that fits a shape."""
