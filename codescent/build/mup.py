"""In: a config. Out: why it cannot have mu-P, if it asks for it: initial weights, adapters, update rules.
Does not scale anything (models/mup.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from codescent.base.own_names import is_own_name
from codescent.base.refusal import Change, Refusal
from codescent.models.mup import ADDS_DECAY

if TYPE_CHECKING:
    from codescent.config.sections import Config

KEY = "model.mup_base_dim"
_WITHOUT = Change({KEY: None, "model.mup_base_head_dim": None})


def refusals(config: Config) -> Iterator[Refusal]:
    """Problems of mu-P with other sections. A kind of model without it refuses the key by itself."""
    if config.model.mup_base_dim is None:
        return
    optimizer = config.optimizer
    if config.model.weights is not None:
        yield Refusal(
            f"{KEY} = {config.model.mup_base_dim}: with model.weights training begins from weights that were not "
            "initialised by mu-P, and their head has no factor",
            [_WITHOUT],
        )
    if config.lora.rank is not None:
        yield Refusal(
            f"{KEY} = {config.model.mup_base_dim}: with lora.rank the matrices are frozen, and mu-P has no rule for "
            "adapters",
            [_WITHOUT],
        )
    if is_own_name(optimizer.kind):
        yield Refusal(
            f"optimizer.kind = {optimizer.kind}: nobody knows how the learning rate of this rule follows the width, "
            f"so it cannot have {KEY}",
            [Change({"optimizer.kind": "adamw"}), _WITHOUT],
        )
    elif optimizer.kind in ADDS_DECAY and optimizer.weight_decay:
        yield Refusal(
            f"optimizer.weight_decay = {optimizer.weight_decay}: {optimizer.kind} adds it to gradients, whose size it "
            f"then divides out; with {KEY} no factor keeps its effect at every width",
            [Change({"optimizer.weight_decay": 0.0}), Change({"optimizer.kind": "adamw"})],
        )
