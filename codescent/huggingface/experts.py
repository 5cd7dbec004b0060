"""In: the keys of config.json on experts, names of tensors. Out: our sizes of experts, and back; the rows of a table.
Does not name a family of transformers: families.py says by which keys and names each of them says it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from codescent.huggingface.correspond import Row, Theirs, same
from codescent.huggingface.kind import Settings, is_true
from codescent.models.llama.declare import LlamaShape

_INERT = ("output_router_logits", "router_aux_loss_coef")
"""Keys that change no logit: [train] has the coefficients of a run."""


@dataclass(frozen=True)
class ExpertKeys:
    """By which keys a family says its experts, and by which names a folder has them.

    Attributes:
        sizes: our size -> its key, and the value of a missing key.
        other: another name of the key of num_experts, as older and newer versions of transformers write it; "": none.
        normed: whether a token's weights are divided by their sum, or the key that says it.
        chosen: whether the keys decoder_sparse_step and mlp_only_layers say which layers have experts.
        layer: name of a layer of experts in a block.
        names: in it, those of the gate, the up and the down matrix of an expert.
    """

    sizes: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    other: str = ""
    normed: bool | str = True
    chosen: bool = False
    layer: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def handled(self) -> tuple[str, ...]:
        """The keys that it reads."""
        if not self.sizes:
            return ()
        keys = [key for key, _ in self.sizes.values()] + [self.other] * bool(self.other)
        keys += [self.normed] if isinstance(self.normed, str) else []
        return (*keys, *_INERT, *(("decoder_sparse_step", "mlp_only_layers") if self.chosen else ()))

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """Our sizes, and error messages."""
        if not self.sizes:
            return {}, []
        found, problems = dict[str, Any](), list[str]()
        for size, (key, missing) in self.sizes.items():
            name = self.other if size == "num_experts" and key not in settings and self.other in settings else key
            value = settings.get(name, missing)
            if type(value) is not int or value < 1:
                problems.append(f"{name} = {json.dumps(value)}: not a number above 0")
            found[size] = value
        normed = self.normed if isinstance(self.normed, bool) else is_true(settings, self.normed)
        if not normed:
            found["route_norm"] = False
        if self.chosen and not problems:
            layers, more = self._layers(settings)
            return found | layers, more
        return found, problems

    def _layers(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """Which layers have experts."""
        every, dense = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers") or []
        if type(every) is not int or every < 1:
            return {}, [f"decoder_sparse_step = {json.dumps(every)}: not a number above 0"]
        if dense != list(range(len(dense))):
            return {}, [
                f"mlp_only_layers = {json.dumps(dense)}: codescent has layers without experts at the beginning alone, "
                "such as [0, 1]"
            ]
        return {"expert_every": every} | ({"dense_layers": len(dense)} if dense else {}), []

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """The keys that say the experts of a shape."""
        found: dict[str, Any] = {
            key: shape.inner_dim if size == "expert_dim" else getattr(shape, size)
            for size, (key, _) in self.sizes.items()
        }
        if isinstance(self.normed, str):
            found[self.normed] = shape.route_norm
        if self.chosen:
            found |= {"decoder_sparse_step": shape.expert_every, "mlp_only_layers": list(range(shape.dense_layers))}
        return found

    def fits(self, shape: LlamaShape) -> bool:
        """Whether these keys can say the experts of a shape. A capacity is a matter of training."""
        if not self.sizes or not shape.num_experts:
            return bool(self.sizes) == bool(shape.num_experts)
        plain = shape.route_scores == "softmax" and not shape.route_bias and shape.route_groups < 2
        if not plain or shape.shared_dim or shape.route_scale != 1.0:
            return False
        normed = isinstance(self.normed, str) or shape.route_norm == self.normed
        inner = "expert_dim" in self.sizes or shape.inner_dim == shape.ffn_dim
        return normed and inner and (self.chosen or all(shape.routed))

    def words(self) -> Iterator[str]:
        """What it allows, for messages."""
        if self.sizes:
            yield "num_experts above 0" + ("" if self.chosen else " in every layer")
            if not isinstance(self.normed, str):
                yield f"route_norm = {str(self.normed).lower()}"

    def rows(self, shape: LlamaShape, ours: str, theirs: str) -> Iterator[Row]:
        """The rows of the table of experts: each is three matrices there. `ours`, `theirs`: names of a block."""
        if not self.sizes or not shape.num_experts:
            return
        gate, up, down = self.names
        layer = f"{theirs}.{self.layer}"
        yield same(f"{ours}.mlp.router.weight", f"{layer}.gate.weight", "n d")
        every = range(shape.num_experts)

        def of(expert: int, name: str, dims: str, **some: tuple[int, int]) -> Theirs:
            return Theirs(f"{layer}.experts.{expert}.{name}.weight", dims, {"n": (expert, expert + 1), **some})

        halves = tuple(
            of(expert, name, "f d", u=(half, half + 1)) for expert in every for half, name in enumerate((gate, up))
        )
        yield Row(f"{ours}.mlp.experts.gate_up.weight", "f n u d", halves)
        yield Row(f"{ours}.mlp.experts.down.weight", "f n d", tuple(of(expert, down, "d f") for expert in every))


@dataclass(frozen=True)
class DeepSeekKeys(ExpertKeys):
    """Experts as DeepSeek-V3 has them: sigmoids, biases, groups, a factor, shared experts, first layers without any.

    `more`: its other keys with the value of a missing key; None: it must be there. `sigmoid`: whether scores are
    sigmoids, with biases and groups; else they are those of a softmax, without (DeepSeek-V2).
    """

    more: Mapping[str, float | None] = field(default_factory=dict)
    sigmoid: bool = True

    @property
    def handled(self) -> tuple[str, ...]:
        """See ExpertKeys."""
        return (*super().handled, *self.more)

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """See ExpertKeys."""
        if self._is_dense(settings):
            return {}, []
        found, problems = super().read(settings)
        values: dict[str, Any] = {key: settings.get(key) for key in self.more}
        for key in (name for name in self.more if name != "routed_scaling_factor"):
            least = 0 if key == "first_k_dense_replace" else 1
            values[key] = self.more[key] if values[key] is None else values[key]
            if type(values[key]) is not int or values[key] < least:
                problems.append(f"{key} = {json.dumps(values[key])}: not a number of at least {least}")
        scale = values["routed_scaling_factor"]
        scale = self.more["routed_scaling_factor"] if scale is None else scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
            problems.append(f"routed_scaling_factor = {json.dumps(scale)}: not a number above 0")
        if problems:
            return found, problems
        found |= {
            "route_scale": float(scale),
            **({"route_scores": "sigmoid", "route_bias": True} if self.sigmoid else {}),
        }
        found["shared_dim"] = found["expert_dim"] * values["n_shared_experts"]
        if self.sigmoid and values["n_group"] > 1:
            found |= {"route_groups": values["n_group"], "groups_per_token": values["topk_group"]}
        if values["first_k_dense_replace"]:
            found["dense_layers"] = values["first_k_dense_replace"]
        return found, problems

    def _is_dense(self, settings: Settings) -> bool:
        """Whether all layers are first layers, without experts."""
        dense, layers = settings.get("first_k_dense_replace"), settings.get("num_hidden_layers")
        return type(dense) is int and type(layers) is int and dense >= layers

    def write(self, shape: LlamaShape) -> dict[str, Any]:
        """See ExpertKeys."""
        if not shape.num_experts:
            return {"first_k_dense_replace": shape.num_layers}
        groups = {"n_group": shape.route_groups or 1, "topk_group": shape.groups_per_token or 1}
        return super().write(shape) | {
            **(groups if self.sigmoid else {}),
            "n_shared_experts": shape.shared_dim // shape.inner_dim,
            "first_k_dense_replace": shape.dense_layers,
            "routed_scaling_factor": shape.route_scale,
        }

    def fits(self, shape: LlamaShape) -> bool:
        """See ExpertKeys."""
        if not shape.num_experts:
            return True
        shared = shape.shared_dim > 0 and shape.shared_dim % shape.inner_dim == 0
        return self._of_router(shape) and shared and shape.expert_every == 1

    def _of_router(self, shape: LlamaShape) -> bool:
        if self.sigmoid:
            return shape.route_scores == "sigmoid" and shape.route_bias
        return shape.route_scores == "softmax" and not (shape.route_bias or shape.route_groups or shape.route_norm)

    def words(self) -> Iterator[str]:
        """See ExpertKeys."""
        yield f'no num_experts, or with route_scores = "{"sigmoid" if self.sigmoid else "softmax"}"'
        yield "route_bias = true" if self.sigmoid else "route_norm = false"
        yield "shared_dim a multiple of expert_dim"

    def rows(self, shape: LlamaShape, ours: str, theirs: str) -> Iterator[Row]:
        """See ExpertKeys."""
        yield from super().rows(shape, ours, theirs)
        if not shape.num_experts:
            return
        layer = f"{theirs}.{self.layer}"
        yield same(f"{ours}.mlp.router.bias", f"{layer}.gate.e_score_correction_bias", "n")
        gate, up, down = self.names
        halves = tuple(
            Theirs(f"{layer}.shared_experts.{name}.weight", "f d", {"u": (half, half + 1)})
            for half, name in enumerate((gate, up))
        )
        yield Row(f"{ours}.mlp.shared.gate_up.weight", "f u d", halves)
        yield same(f"{ours}.mlp.shared.down.weight", f"{layer}.shared_experts.{down}.weight", "o i")


DOTS = DeepSeekKeys(
    {
        "num_experts": ("n_routed_experts", None),
        "experts_per_token": ("num_experts_per_tok", None),
        "expert_dim": ("moe_intermediate_size", 1408),
    },
    other="num_local_experts",
    normed="norm_topk_prob",
    more={
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
)
DEEPSEEK = DeepSeekKeys(
    {
        "num_experts": ("n_routed_experts", 256),
        "experts_per_token": ("num_experts_per_tok", 8),
        "expert_dim": ("moe_intermediate_size", 2048),
    },
    other="num_local_experts",
    normed="norm_topk_prob",
    more={
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
)
DEEPSEEK_V2 = DeepSeekKeys(
    {
        "num_experts": ("n_routed_experts", 64),
        "experts_per_token": ("num_experts_per_tok", None),
        "expert_dim": ("moe_intermediate_size", 1407),
    },
    other="num_experts",
    normed=False,
    more={"n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    sigmoid=False,
)
NONE = ExpertKeys()
"""A family without experts."""
MIXTRAL = ExpertKeys(
    {"num_experts": ("num_local_experts", 8), "experts_per_token": ("num_experts_per_tok", 2)},
    layer="block_sparse_moe",
    names=("w1", "w3", "w2"),
)
QWEN = ExpertKeys(
    {
        "num_experts": ("num_experts", 128),
        "experts_per_token": ("num_experts_per_tok", 8),
        "expert_dim": ("moe_intermediate_size", 768),
    },
    other="num_local_experts",
    normed="norm_topk_prob",
    chosen=True,
)
OLMOE = ExpertKeys(
    {"num_experts": ("num_experts", 64), "experts_per_token": ("num_experts_per_tok", 8)},
    other="num_local_experts",
    normed="norm_topk_prob",
)
