"""In: a module, or a part of one, and its declared parameters, adapters among them. Out: the module with adapters.
Does not compute anything (linear does) and draws no values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from codescent.models.lora.declare import A, B
from codescent.operators.linear import Linear
from codescent.plan.shard import Parameter


def adapt_(module: nn.Module, parameters: Iterable[Parameter], scale: float) -> None:
    """Give the module its adapters, on its device, and have only those parameters want gradients that are trained.

    Args:
        module: a model or a part of it, whose own parameters are declared.
        parameters: of the whole model, with adapters (see `lora_shape.adapted`).
        scale: what an adapter's product is multiplied by.
    """
    there = dict(module.named_parameters())
    for parameter in parameters:
        owner, _, leaf = parameter.name.rpartition(".")
        if parameter.name in there:
            there[parameter.name].requires_grad_(parameter.trained)
        elif leaf in (A, B) and f"{owner}.weight" in there:
            layer, beside = module.get_submodule(owner), there[f"{owner}.weight"]
            assert isinstance(layer, Linear), owner
            setattr(layer, leaf, nn.Parameter(torch.empty(parameter.shape, device=beside.device, dtype=beside.dtype)))
            layer.scale = scale
