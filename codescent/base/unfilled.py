"""In: code that builds modules on the meta device, or gives them memory. Out: the same modules, without initial values.
Does not write values: models/initialize.py does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors of subclasses, such as DTensor, are allocated by torch."""
NONE: Mapping[str, Any] = MappingProxyType({})


class Unfilled(TorchFunctionMode):
    """A block in which some functions of torch.nn.init do nothing on the meta device, and `to_empty` only allocates.

    They are those that call handle_torch_function: uniform_, normal_, constant_ and kaiming_uniform_.
    For tensors of the meta device torch computes `normal_` and `empty_like` in Python. At the first one it imports its
    compiler and sympy, which takes a second and 80 MB. Here nobody needs what they compute.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `function`."""
        given = kwargs or NONE
        if getattr(function, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else given["tensor"]
            return tensor if tensor.is_meta else function(*args, **given)
        if function is torch.empty_like and type(args[0]) in PLAIN and args[0].is_meta and "device" in given:
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=given["device"])
        return function(*args, **given)
