"""In: a config, its model, a candidate of its layout. Out: what layers of experts cannot have.
Does not refuse numbers of ranks that do not divide experts (strategies/expert_parallel.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from codescent.base.refusal import Change, Refusal
from codescent.models import Shape
from codescent.strategies import Candidate
from codescent.strategies.refusals import near_degrees

if TYPE_CHECKING:
    from codescent.config.sections import Config

LOSSES = ("balance_loss", "router_z_loss")
"""Keys of [train] that only routers read."""


def refusals(config: Config, shape: Shape, candidate: Candidate) -> Iterator[Refusal]:
    """Losses of routers without routers; with cp what reads all positions of a sample."""
    for name in LOSSES:
        if (value := getattr(config.train, name)) and not shape.num_experts:
            yield Refusal(
                f"train.{name} = {value}: no layer of the model has experts", [Change({f"train.{name}": 0.0})]
            )
    rate = config.train.balance_rate
    if rate and not candidate.model.sizes.get("route_bias"):
        said = f"train.balance_rate = {rate}: the routers of the model have no biases (model.route_bias)"
        yield Refusal(said, [Change({"train.balance_rate": 0.0})])
    elif rate and candidate.layout.hands_out:
        key = candidate.layout.hands_out_by
        said = f"train.balance_rate = {rate}: with parallel.{key} no rank knows the loads of a step"
        yield Refusal(said, [Change({"train.balance_rate": 0.0})])
    if candidate.mesh.cp == 1 or not shape.num_experts:
        return
    whole = near_degrees(candidate, "cp", 1, lambda other: other.mesh.cp == 1)
    if config.train.balance_loss:
        yield Refusal(
            f"train.balance_loss = {config.train.balance_loss}: with parallel.cp = {candidate.mesh.cp} no rank has all "
            "positions of a sample, over which the loss counts",
            [Change({"train.balance_loss": 0.0}), *whole],
        )
    if capacity := candidate.model.sizes.get("capacity_factor"):
        yield Refusal(
            f"model.capacity_factor = {capacity}: with parallel.cp = {candidate.mesh.cp} no rank has all positions of "
            "a sample, of which an expert takes a share",
            whole,
        )
