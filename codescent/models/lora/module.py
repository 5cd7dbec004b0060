"""In: the torch module of a model or of a chunk of it, the parameter list with LoRA. Out: the module with adapters.
Does not compute the product of an adapter (operators/linear.py does) and does not initialise adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from codescent.models.lora.declare import A, B
from codescent.operators.linear import Linear
from codescent.plan.shard import Parameter


def adapt_(module: nn.Module, parameters: Iterable[Parameter], scale: float) -> None:
    """Add adapters to a model, or to a part of it, on its device. Afterwards only trained parameters require gradients.

    `parameters`: those of the whole model, with adapters. `scale`: factor on the product of an adapter.
    """
    present = dict(module.named_parameters())
    for parameter in parameters:
        owner, _, leaf = parameter.name.rpartition(".")
        if parameter.name in present:
            present[parameter.name].requires_grad_(parameter.trained)
        elif leaf in (A, B) and f"{owner}.weight" in present:
            layer, weight = module.get_submodule(owner), present[f"{owner}.weight"]
            assert isinstance(layer, Linear), owner
            setattr(layer, leaf, nn.Parameter(torch.empty(parameter.shape, device=weight.device, dtype=weight.dtype)))
            layer.scale = scale
