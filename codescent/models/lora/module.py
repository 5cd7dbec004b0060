"""In: the torch module of a model or of a chunk of it, the adapters to add. Out: the module with the adapters.
Does not compute the product of an adapter (operators/linear.py does) and does not initialise adapters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from codescent.base.errors import UserError
from codescent.models.lora.declare import MAGNITUDE, A, B
from codescent.models.part import Part
from codescent.operators import products
from codescent.operators.linear import Adapter, Linear, squared_lengths
from codescent.plan.model import Lora
from codescent.plan.shard import Parameter


def adapt_(module: nn.Module, parameters: Iterable[Parameter], lora: Lora) -> None:
    """Add adapters to a model, or to a part of it, on its device. Afterwards only trained parameters require gradients.

    `parameters`: those of the whole model, with adapters.

    Raises:
        UserError: the method of the adapters needs layers of codescent, and this model has others.
    """
    present = dict(module.named_parameters())
    sites: list[Linear | None] = []  # of the whole model, so that a part knows the number of each of its adapters
    for parameter in parameters:
        owner, _, leaf = parameter.name.rpartition(".")
        sites += [None] if leaf == A else []
        if parameter.name in present:
            present[parameter.name].requires_grad_(parameter.trained)
        elif leaf in (A, B, MAGNITUDE) and f"{owner}.weight" in present:
            layer, weight = module.get_submodule(owner), present[f"{owner}.weight"]
            matrix = nn.Parameter(torch.empty(parameter.shape, device=weight.device, dtype=weight.dtype))
            layer.register_parameter(leaf, matrix)
            if isinstance(layer, Linear):
                layer.scale, layer.adapter_dropout, sites[-1] = lora.scale, lora.dropout, layer
            elif lora.dropout or lora.quantize:
                key, off = ("lora.dropout", "0") if lora.dropout else ("lora.quantize", '"none"')
                raise UserError(f"{key}: {owner} is a layer of another library; set {key} = {off}")
            elif leaf == B:  # a layer of torch: A is there already
                layer.register_forward_hook(partial(_add_adapter, lora.scale))
            elif leaf == MAGNITUDE:
                layer.register_forward_hook(partial(_scale, lora.scale))
    if lora.dropout and isinstance(module, Part):
        module.drops_of_adapters = tuple(sites)


def _add_adapter(
    scale: float, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """W x of a layer of torch -> W x + scale B A x (Hu et al. 2021, "LoRA", equation 3)."""
    a_RI, b_OR = layer.get_parameter(A), layer.get_parameter(B)
    return output + scale * products.linear(products.linear(inputs[0], a_RI), b_OR)


def _scale(scale: float, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """W x + scale B A x + b of a layer of torch -> the product with rows of the trained lengths, + b (DoRA)."""
    adapter = Adapter(layer.get_parameter(A), layer.get_parameter(B), scale)
    lengths = squared_lengths(layer.get_parameter("weight"), adapter).sqrt()
    factors = (layer.get_parameter(MAGNITUDE).to(lengths.dtype) / lengths).to(output.dtype)
    bias = getattr(layer, "bias", None)
    return output * factors if bias is None else (output - bias) * factors + bias
