"""In: the sizes of a Llama. Out: presets; the sizes, checked; for each parameter its name, shape, role (how it may be
split over ranks) and standard deviation of initial values.
Does not import torch or allocate memory, because the planner reads this file. module.py builds the same parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from codescent.models.llama import experts, latents, multi_token, passes
from codescent.models.llama.passes import NORMS
from codescent.models.llama.rope import READS, ROPE, fields_of, scaling_of, wrong_scaling
from codescent.models.shape import WEIGHT_STD, Kind, Shape, linear, norm
from codescent.plan.model import RopeScaling
from codescent.plan.shard import Parameter, Role

_LLAMA_3: dict[str, Any] = {"num_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500_000.0, "norm_eps": 1e-5}
_8B = {"num_layers": 32, "num_heads": 32, "hidden_dim": 4096, "ffn_dim": 14336, **_LLAMA_3}
_70B = {"num_layers": 80, "num_heads": 64, "hidden_dim": 8192, "ffn_dim": 28672, **_LLAMA_3}
_405B = {"num_layers": 126, "num_heads": 128, "hidden_dim": 16384, "ffn_dim": 53248, **_LLAMA_3}
_TINY = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 128, "ffn_dim": 384}
_SHORT: dict[str, Any] = {"seq_len": 8192}
_LONG: dict[str, Any] = {"seq_len": 131072, "rope_scaling": RopeScaling()}

# Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and the released config.json of each.
# llama-tiny is ours, for trials.
PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _8B | _SHORT,
    "llama3-70b": _70B | _SHORT,
    "llama3.1-8b": _8B | _LONG,
    "llama3.1-70b": _70B | _LONG,
    "llama3.1-405b": _405B | _LONG,
    "llama-tiny": _TINY | {"vocab_size": 512, "seq_len": 256},
}

_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Sizes of a Llama, and the traits by which its relatives differ from it. It has no dropout.

    Attributes:
        rope_theta: base of the rotary frequencies.
        rope_scaling: how these frequencies are scaled down; None: they are not.
        norm_eps: added to the mean square in the norms.
        tie_head: whether the head reads `tok.weight`.
        head_dim: channels of a head; 0: hidden_dim / num_heads.
        qkv_bias: whether queries, keys and values have biases (Qwen 2). No other matrix has one.
        qk_norm: see `Shape`.
        window: see `Shape`.
        norm: "first": norms are before attention and feed-forward; "output": they are of their outputs (OLMo 2);
            "both": of inputs and outputs (Gemma 2).
        norm_plus_one: whether norms multiply by 1 + weight (Gemma).
        activation: of the gate: "silu" (SwiGLU) or "gelu" in its tanh form (GEGLU).
        scale_embedding: whether embeddings are multiplied by sqrt(hidden_dim) (Gemma); with mu-P by that of the base.
        full_every, score_cap, logit_cap, score_dim, mup_base_dim, mup_base_head_dim: see `Shape`.
        rope_local_theta: rope_theta of the layers with a window, where frequencies are not scaled; 0: theirs is the
            same as that of the others (Gemma 3 has two).
        rotary_dim: channels of a head that turn; 0: all (Phi-4 mini).
        kv_latent_dim, q_latent_dim: channels of the latents of keys and values, and of queries (multi-head latent
            attention, `operators.latent_attention`); 0: there are none.
        value_dim: channels of a value with such latents; 0: head_dim - rotary_dim.
        fused: whether a Hugging Face folder has one matrix of queries, keys and values, and one of gates and values
            (Phi-3). It changes nothing else.
        num_experts: experts of a layer that has them in place of one feed-forward; 0: no layer has (docs/experts.md).
        experts_per_token: of how many of them each token is computed.
        expert_dim: channels inside of an expert; 0: ffn_dim.
        dense_layers: so many first layers have no experts.
        expert_every: of the others every so-many-th has, counted from the first layer of all.
        route_norm: whether the weights of a token's experts are divided by their sum.
        route_scores, route_groups, groups_per_token, route_scale, route_bias: see `operators.routing.choose`.
        shared_dim: channels of a feed-forward beside the experts, which computes every token; 0: there is none.
        capacity_factor: see `RouterTraits.capacity`.
        mtp_layers: modules that predict tokens behind the next one, in training (`models.multi_token`); 0: none.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_head: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: str = "none"
    norm: str = "first"
    window: int = 0
    full_every: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    score_dim: int = 0
    norm_plus_one: bool = False
    activation: str = "silu"
    scale_embedding: bool = False
    rope_local_theta: float = 0.0
    rotary_dim: int = 0
    kv_latent_dim: int = 0
    q_latent_dim: int = 0
    value_dim: int = 0
    fused: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    dense_layers: int = 0
    expert_every: int = 1
    route_norm: bool = True
    route_scores: str = "softmax"
    route_bias: bool = False
    route_groups: int = 0
    groups_per_token: int = 0
    route_scale: float = 1.0
    shared_dim: int = 0
    capacity_factor: float = 0.0
    mtp_layers: int = 0
    bias: bool = False
    dropout: float = 0.0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    ffn_matrices: ClassVar[int] = 3

    def __post_init__(self) -> None:
        """Fill in head_dim, which plans of earlier versions do not have. Sizes that say the same are 0."""
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_dim // self.num_heads)
        for name in ("score_dim", "rotary_dim"):
            object.__setattr__(self, name, 0 if getattr(self, name) == self.head_dim else getattr(self, name))
        if self.kv_latent_dim:
            object.__setattr__(self, "value_dim", self.value_dim or self.head_dim - self.rotary_dim)

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> LlamaShape:
        """The shape with these fields. `rope_scaling` may be a mapping; a key of ROPE replaces one of its fields."""
        fields = {name: size for name, size in sizes.items() if name not in ROPE}
        return cls(**{**fields, "rope_scaling": scaling_of(sizes)})

    @property
    def norm_offset(self) -> float:  # type: ignore[override]
        """See `Shape`."""
        return 1.0 if self.norm_plus_one else 0.0

    @property
    def bases(self) -> tuple[bool, ...]:
        """Of each layer, whether its rotary positions have the base `rope_local_theta`."""
        return tuple(window > 0 and self.rope_local_theta > 0.0 for window in self.windows)

    @property
    def routed(self) -> tuple[bool, ...]:
        """Of each layer, whether it has experts."""
        return tuple(
            self.num_experts > 0 and layer > self.dense_layers and layer % self.expert_every == 0
            for layer in range(1, self.num_layers + 1)
        )

    def expert_rows(self, positions: int) -> int:
        """See `Shape`."""
        return experts.sizes_of(self).rows(positions) if self.num_experts else 0

    @property
    def inner_dim(self) -> int:
        """Channels inside of an expert."""
        return self.expert_dim or self.ffn_dim

    @property
    def score_width(self) -> float:
        """See `Shape`. With yarn as DeepSeek has it, scores have one more factor."""
        gain = latents.score_gain(self.rope_scaling)
        return super().score_width if gain == 1.0 else (super().score_width or self.head_dim) / gain**2

    @property
    def cached(self) -> int:  # type: ignore[override]
        """See `Shape`: a latent and the key that all heads share."""
        return self.kv_latent_dim + self.rotary_dim if self.kv_latent_dim else 0

    @property
    def uncompiled(self) -> str:  # type: ignore[override]
        """See `Shape`."""
        parts = (self.num_experts, experts), (self.kv_latent_dim, latents), (self.mtp_layers, multi_token)
        return next((part.UNCOMPILED for size, part in parts if size), "")

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        """See `Shape`."""
        return multi_token.REFUSED if self.mtp_layers else {}

    @property
    def refuses_values(self) -> Mapping[str, tuple[tuple[object, ...], str]]:  # type: ignore[override]
        """See `Shape`."""
        parts = (self.kv_latent_dim, latents.REFUSED), (self.num_experts, experts.REFUSED)
        every = (*parts, (self.mtp_layers, multi_token.REFUSED_VALUES))
        return {key: values for size, refused in every if size for key, values in refused.items()}

    def facts(self) -> dict[str, Any]:
        """See `Shape`. Of a scaling of frequencies a plan has what its method reads, and of experts what they read."""
        scaling, found = self.rope_scaling, super().facts()
        left_out = (*experts.EXPERTS * (not self.num_experts), *latents.LATENTS * (not self.kv_latent_dim))
        left_out += ("mtp_layers",) * (not self.mtp_layers)
        found = {name: value for name, value in found.items() if name not in left_out}
        return found | {"rope_scaling": None if scaling is None else fields_of(scaling)}


def _derived(full: Mapping[str, Any]) -> dict[str, int | None]:
    """Default sizes: `num_kv_heads` = num_heads, and `ffn_dim` = 8/3 hidden_dim, rounded up to a multiple of 64.

    Three matrices with 8/3 hidden_dim have as many elements as two with 4 hidden_dim (Shazeer 2020, "GLU Variants
    Improve Transformer"; Touvron et al. 2023, "LLaMA", section 2.2).
    """
    width = full.get("hidden_dim")
    ffn = None if width is None else -(-8 * width // 3 // _FFN_MULTIPLE) * _FFN_MULTIPLE
    return {"ffn_dim": ffn, "num_kv_heads": full.get("num_heads")}


def _wrong(full: Mapping[str, Any], bias: bool | None, dropout: float, where: str) -> Iterator[str]:
    if bias:
        yield f"{where}.bias = true: a llama has no biases but those of {where}.qkv_bias; leave it out"
    if dropout != 0.0:
        yield f"{where}.dropout = {dropout}: a llama has no dropout; leave it out"
    for name in ("rope_theta", "norm_eps", "score_cap", "logit_cap", "rope_local_theta", *ROPE):
        if isinstance(full.get(name), int | float) and not isinstance(full[name], bool) and not full[name] > 0.0:
            yield f"{where}.{name}: {full[name]} must be above 0"
    yield from experts.wrong(full, where)
    yield from latents.wrong(full, where)
    yield from multi_token.wrong(full, where)
    if full.get("full_every") and not full.get("window"):
        yield f"{where}.full_every: given without {where}.window, of which it makes exceptions; give both"
    if full.get("rope_local_theta") and not full.get("window"):
        yield f"{where}.rope_local_theta: given without {where}.window: it is that of the layers with one; give both"
    channels = full.get("head_dim") or full.get("hidden_dim", 0) // max(1, full.get("num_heads", 1))
    turned = full.get("rotary_dim") or channels
    if turned % 2 or turned > channels:
        yield f"{where}.rotary_dim: {turned} of {channels} channels cannot turn in pairs; give an even number of them"
    yield from wrong_scaling(full, where)


def parameters(shape: LlamaShape) -> Iterator[Parameter]:
    """Every parameter, in the order in which forward first reads it; with `tie_head` the head reads `tok.weight`.

    `mlp.gate_up` is [ffn_dim, 2, hidden_dim]: the gate row and the up row of a channel are adjacent. So a slice of dim
    0 contains whole channels.

    Initial values are normal with standard deviation 0.02; for the two projections that write to the residual
    stream 0.02 / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3; torchtitan, models/llama3, init_weights
    without depth_init). Norms are 1.
    """
    width, end = shape.hidden_dim, shape.num_layers + 1
    residual_std = WEIGHT_STD / math.sqrt(2 * shape.num_layers)
    vocabulary, reads = (shape.vocab_size, width), 1.0 + shape.mtp_layers
    tied: dict[str, Any] = {"depths": (0, end), "read_by": reads} if shape.tie_head else {"depths": (0,)}
    yield Parameter("tok.weight", vocabulary, Role.VOCAB, WEIGHT_STD, **tied)
    for layer in range(shape.num_layers):
        yield from _block(shape, residual_std, f"blocks.{layer}", shape.routed[layer], layer + 1)
    yield from norm("norm", width, shape.bias, end, mean=1.0 - shape.norm_offset)
    yield from multi_token.parameters(shape, partial(_block, shape, residual_std))
    if not shape.tie_head:
        yield Parameter("head.weight", vocabulary, Role.VOCAB, WEIGHT_STD, depths=(end,), read_by=reads)


def _block(shape: LlamaShape, residual_std: float, block: str, routed: bool, depth: int) -> Iterator[Parameter]:
    """The parameters of a block. `routed`: whether it has experts."""
    width, ffn, mean = shape.hidden_dim, shape.ffn_dim, 1.0 - shape.norm_offset
    attn = list(latents.parameters(f"{block}.attn", shape, residual_std, depth))
    mlp = list(experts.parameters(f"{block}.mlp", shape, residual_std, depth) if routed else ())
    if not mlp:
        options: dict[str, Any] = {"depths": (depth,), "alternating": (1, 1)}
        mlp = [Parameter(f"{block}.mlp.gate_up.weight", (ffn, 2, width), Role.COLUMN, WEIGHT_STD, **options)]
        mlp += linear(f"{block}.mlp.down", ffn, width, Role.ROW, residual_std, shape.bias, depth)
    for number, part in enumerate((attn, mlp), start=1):
        before, after = NORMS[shape.norm]
        for name in before:
            yield from norm(f"{block}.{name.format(number)}", width, shape.bias, depth, mean=mean)
        yield from part
        for name in after:
            yield from norm(f"{block}.{name.format(number)}", width, shape.bias, depth, mean=mean)


KIND = Kind(
    "llama",
    LlamaShape,
    "Llama",
    PRESETS,
    parameters,
    _derived,
    passes.saved,
    passes.operators,
    experts.forward_flops,
    wrong=_wrong,
    parts={"rope_scaling": tuple(ROPE)},
    words={
        "rope_type": tuple(READS),
        "qk_norm": ("none", "head", "all"),
        "norm": tuple(NORMS),
        "activation": ("silu", "gelu"),
        "route_scores": ("softmax", "sigmoid"),
    },
    options=(),
    head_multiple=2,
    generates=True,
    separates=True,
)
