"""In: a model of `transformers`. Out: where its blocks are, which parameters are tied; tied ones are held once.
Does not run the model (observed.py does) and does not import transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from codescent.base.errors import UserError


def blocks_of(net: nn.Module, layers: int) -> str:
    """The name of the list of blocks. Raises UserError: there is not one list of `layers` modules."""
    lists = {name: one for name, one in net.named_modules() if isinstance(one, nn.ModuleList) and len(one) == layers}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        found = f"has {len(outer)} lists of {layers} modules ({', '.join(outer)})" if outer else "has none"
        raise UserError(
            f"its blocks are not known: by its config it has one list of {layers} blocks, which run one after the "
            f"other; the model {found}"
        )
    name: str = outer[0]
    return name


def owners(net: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Name, module, name in the module and parameter, of every place of a parameter; tied ones have several."""
    for name, module in net.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{leaf}" if name else leaf, module, leaf, parameter


def hold_once_(net: nn.Module) -> dict[str, str]:
    """Take tied parameters from all modules but the first. The others read the first one's at each forward pass.

    So strategies may replace a parameter, and every parameter has one name. Returns the first name of each other one.
    """
    first: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}
    tied: dict[str, str] = {}
    for name, module, leaf, parameter in list(owners(net)):
        if parameter not in first:
            first[parameter] = (name, module, leaf)
            continue
        source, owner, at = first[parameter]
        tied[name] = source
        del module._parameters[leaf]
        read = partial(_read, owner, at, leaf)
        read(module, ())
        module.register_forward_pre_hook(read)
    return tied


def _read(owner: nn.Module, at: str, leaf: str, module: nn.Module, _inputs: tuple[torch.Tensor, ...]) -> None:
    """Let `module` have the parameter `at` of `owner` as its attribute `leaf`, which it does not hold."""
    vars(module)[leaf] = owner._parameters[at]
