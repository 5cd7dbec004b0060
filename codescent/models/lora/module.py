"""In: a model, or a part of it, and its declared parameters with adapters. Out: the module with adapters.
Does not compute anything (operators.linear does) and draws no values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from codescent.models.lora.declare import A, B
from codescent.operators.linear import Linear
from codescent.plan.shard import Parameter


def adapt_(module: nn.Module, parameters: Iterable[Parameter], scale: float) -> None:
    """Give a model, or a part of it, its adapters on its device; then only trained parameters require gradients.

    `parameters` are those of the whole model, with adapters; `scale` is the factor on the product of an adapter.
    """
    there = dict(module.named_parameters())
    for parameter in parameters:
        owner, _, leaf = parameter.name.rpartition(".")
        if parameter.name in there:
            there[parameter.name].requires_grad_(parameter.trained)
        elif leaf in (A, B) and f"{owner}.weight" in there:
            layer, weight = module.get_submodule(owner), there[f"{owner}.weight"]
            assert isinstance(layer, Linear), owner
            setattr(layer, leaf, nn.Parameter(torch.empty(parameter.shape, device=weight.device, dtype=weight.dtype)))
            layer.scale = scale
