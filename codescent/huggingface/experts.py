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
