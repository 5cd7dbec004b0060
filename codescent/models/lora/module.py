"""In: the torch module of a model or of a chunk of it, the adapters to add. Out: the module with the adapters.
Does not compute the product of an adapter (operators/linear.py does) and does not initialise adapters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from codescent.models.lora.declare import A, B
from codescent.operators import products
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
            matrix = nn.Parameter(torch.empty(parameter.shape, device=weight.device, dtype=weight.dtype))
            layer.register_parameter(leaf, matrix)
            if isinstance(layer, Linear):
                layer.scale = scale
            elif leaf == B:  # a layer of torch: A is there already
                layer.register_forward_hook(partial(_add_adapter, scale))


def _add_adapter(
    scale: float, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """W x of a layer of torch -> W x + scale B A x (Hu et al. 2021, "LoRA", equation 3)."""
    a_RI, b_OR = layer.get_parameter(A), layer.get_parameter(B)
    return output + scale * products.linear(products.linear(inputs[0], a_RI), b_OR)
