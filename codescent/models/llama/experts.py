"""In: the sizes of a Llama with experts. Out: what is wrong with them; parameters, FLOPs, sizes of layers.
Does not import torch, and has nothing of other layers (declare.py has)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from codescent.base.counted import counted
from codescent.models.llama import multi_token
from codescent.models.llama.latents import flops_instead
from codescent.models.shape import WEIGHT_STD, flops_of_blocks, linear
from codescent.operators.saved_experts import ExpertSizes
from codescent.plan.shard import Parameter, Role

if TYPE_CHECKING:
    from codescent.models.llama.declare import LlamaShape

EXPERTS = (
    "num_experts",
    "experts_per_token",
    "expert_dim",
    "dense_layers",
    "expert_every",
    "route_norm",
    "route_scores",
    "route_bias",
    "route_groups",
    "groups_per_token",
    "route_scale",
    "shared_dim",
    "capacity_factor",
)
"""The fields of experts."""
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "recompute": (
        ("products",),
        'keeps the products of whole layers, and each expert has its own; parallel.recompute = "full" computes '
        "blocks again",
    ),
    "data_parallel": (
        tuple(range(2, 1025)),  # all that there are but 1
        "torch.nn.DataParallel copies modules, and the copies of routers count for themselves; parallel.dp_replicate "
        "gives each device its own rank",
    ),
}
"""See `Shape.refuses_values`."""
UNCOMPILED = "with model.num_experts: how many rows an expert has is known when they are routed"
"""See `Shape.uncompiled`."""


def wrong(full: Mapping[str, Any], where: str) -> Iterator[str]:
    """Problems of the sizes of experts."""
    experts, chosen = full.get("num_experts"), full.get("experts_per_token")
    if not experts:
        for name in EXPERTS[1:]:
            if full.get(name) is not None:
                yield f"{where}.{name}: given without {where}.num_experts; give both, or neither"
        return
    if not chosen:
        yield f"{where}.experts_per_token: not given; of how many of the {experts} experts is each token computed?"
    elif chosen > experts:
        yield f"{where}.experts_per_token = {chosen}: there are {experts} experts ({where}.num_experts)"
    yield from _wrong_groups(full, experts, chosen or 1, where)
    if full.get("capacity_factor") is not None and not full["capacity_factor"] > 0.0:
        yield f"{where}.capacity_factor: {full['capacity_factor']} must be above 0; leave it out to drop no token"
    layers, dense, every = full.get("num_layers", 1), full.get("dense_layers") or 0, full.get("expert_every") or 1
    if not any(layer > dense and layer % every == 0 for layer in range(1, layers + 1)):
        yield (
            f"{where}.num_experts = {experts}: no layer has experts with dense_layers = {dense} and expert_every = "
            f"{every} of {layers} layers"
        )
    if full.get("mup_base_dim"):
        yield f"{where}.mup_base_dim: mu-P has no rule for routers; leave it out, or {where}.num_experts"


def _wrong_groups(full: Mapping[str, Any], experts: int, chosen: int, where: str) -> Iterator[str]:
    """Problems of the groups of experts."""
    groups, some = full.get("route_groups") or 1, full.get("groups_per_token") or 0
    if experts % groups:
        yield f"{where}.route_groups = {groups}: {experts} experts do not divide into {groups} groups of equal size"
    elif (groups > 1) != (some > 0):
        yield f"{where}.route_groups and {where}.groups_per_token: give both, or neither"
    elif some > groups:
        yield f"{where}.groups_per_token = {some}: there are {groups} groups ({where}.route_groups)"
    elif groups > 1 and some * (experts // groups) < chosen:
        yield (
            f"{where}.groups_per_token = {some}: {counted(some, 'group')} of "
            f"{counted(experts // groups, 'expert')} each: "
            f"fewer experts than a token chooses ({where}.experts_per_token = {chosen})"
        )


def parameters(name: str, shape: LlamaShape, out_std: float, depth: int) -> Iterator[Parameter]:
    """The parameters of a layer of experts (see `operators.experts`)."""
    experts, inner, width = shape.num_experts, shape.inner_dim, shape.hidden_dim
    share = min(1.0, shape.experts_per_token / experts * (shape.capacity_factor or 1.0))
    options: dict[str, Any] = {"depths": (depth,), "read_by": share}
    if shared := shape.shared_dim:
        both: dict[str, Any] = {"depths": (depth,), "alternating": (1, 1)}
        yield Parameter(f"{name}.shared.gate_up.weight", (shared, 2, width), Role.COLUMN, WEIGHT_STD, **both)
        yield from linear(f"{name}.shared.down", shared, width, Role.ROW, out_std, False, depth)
    yield Parameter(f"{name}.router.weight", (experts, width), Role.ROUTER, WEIGHT_STD, depths=(depth,))
    if shape.route_bias:
        yield Parameter(f"{name}.router.bias", (experts,), Role.ROUTER_BIAS, depths=(depth,), fixed=True)
    yield Parameter(
        f"{name}.experts.gate_up.weight", (inner, experts, 2, width), Role.EXPERT_COLUMN, WEIGHT_STD, **options
    )
    yield Parameter(f"{name}.experts.down.weight", (inner, experts, width), Role.EXPERT_ROW, out_std, **options)


def forward_flops(shape: LlamaShape, seq_len: int) -> tuple[float, ...]:
    """See `flops_of_blocks`. Of experts those that compute a token count, and the router."""
    embedding, *plain, head = flops_of_blocks(shape, seq_len)
    blocks = [flops + more for flops, more in zip(plain, flops_instead(shape, seq_len), strict=True)]
    rows = shape.experts_per_token * (shape.capacity_factor or 1.0)
    channels = min(rows, shape.num_experts) * shape.inner_dim + shape.shared_dim
    instead = channels * shape.ffn_matrices + shape.num_experts
    more = 2.0 * shape.hidden_dim * (instead - shape.ffn_matrices * shape.ffn_dim)
    blocks = [flops + more * routed for flops, routed in zip(blocks, shape.routed, strict=True)]
    return (embedding, *blocks, head + multi_token.forward_flops(shape, tuple(blocks)))


def sizes_of(shape: LlamaShape) -> ExpertSizes:
    """The sizes of a layer of experts."""
    sizes = shape.num_experts, shape.experts_per_token, shape.inner_dim
    return ExpertSizes(
        *sizes, shape.route_norm, shape.capacity_factor, shape.route_scores == "sigmoid", shape.shared_dim
    )
