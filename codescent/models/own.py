"""In: the name of a kind of model of the user, such as mymodel:KIND. Out: the kind; its module, compared with what it
declares.
Does not list the kinds of this package. Does not import torch before it builds a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from codescent.base import own_names
from codescent.base.counted import a_type, counted
from codescent.base.errors import UserError
from codescent.base.own_names import is_own_name
from codescent.base.returned import check_fields
from codescent.models.shape import Kind, Shape, wide_ffn
from codescent.plan.shard import Parameter

if TYPE_CHECKING:
    from torch import nn

KEY = "model.kind"
NO_KEYS = ("bias", "dropout")
"""Fields of a shape that are no sizes."""


@dataclass(frozen=True)
class ModelKind(Kind):
    """A kind of model of your own: an object that `model.kind = "mymodel:KIND"` names (docs/own_names.md).

    The attributes of `codescent.models.shape.Kind` declare the model: its sizes, parameters with the roles by which
    ranks divide them, FLOPs, what forward keeps for backward, and what it computes. Layouts follow from them. Axes of
    the mesh that the module cannot serve are in `Shape.refuses`, each with the reason.

    Attributes:
        name: leave it out: it is the name in the config.
        module: the class of the module, a subclass of `codescent.models.part.Part`, as "package.module:NAME". It is
            imported when a module is built, so planning needs no torch.
        presets: as of `Kind`; none.
        derived: as of `Kind`; ffn_dim is 4 * hidden_dim where it is not given.
        tasks: names of the tasks of this package for which it can be trained.
    """

    name: str = field(default="", kw_only=True)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    derived: Callable[[Mapping[str, Any]], Mapping[str, int | None]] = field(default=wide_ffn, kw_only=True)
    tasks: tuple[str, ...] = field(kw_only=True)

    def other_names(self) -> tuple[str, ...]:
        """What is code of the kind beside its own file."""
        return (self.module,)


def own_kind(name: str) -> ModelKind:
    """The kind of this name. Raises UserError: there is none, or its sizes are no keys of [model]."""
    found = own_names.object_of(KEY, name, ModelKind)
    if not is_own_name(found.module):
        raise UserError(
            f'{KEY} = {name}: module = "{found.module}"; must be the class of the module, as {own_names.FORM}'
        )
    return check_fields(dataclasses.replace(found, name=name), ModelKind, f"{KEY} = {name}")


def refuse_sizes(kind: ModelKind, keys: Sequence[str]) -> None:
    """Raise UserError if a size of a kind of the user is none of the keys of [model]."""
    if wrong := [size for size in kind.sizes if size not in keys]:
        raise UserError(
            f"{KEY} = {kind.name}: its shape has {', '.join(wrong)}, no key of [model]; its fields may be "
            f"{', '.join((*keys, *NO_KEYS))}"
        )


def check_declared(kind: str, shape: Shape, parameters: Sequence[Parameter]) -> None:
    """Raise UserError if parameters of a kind of the user are at depths that its model does not have, or twice."""
    depths = range(shape.num_layers + 2)
    beyond = [one.name for one in parameters if not one.depths or any(depth not in depths for depth in one.depths)]
    names = [one.name for one in parameters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if beyond or twice:
        at = f"depths of {', '.join(beyond[:5])}: must be from 0 (embedding) to {depths[-1]} (head)" if beyond else ""
        again = f"{', '.join(twice[:5])}: is declared twice" if twice else ""
        raise UserError(f"{KEY} = {kind}: parameters: {'; '.join(filter(None, (at, again)))}")


def check_flops(kind: str, shape: Shape, flops: Sequence[float]) -> None:
    """Raise UserError if the FLOPs of a kind of the user are not one number for each depth of its model."""
    if len(flops) != shape.num_layers + 2:
        raise UserError(
            f"{KEY} = {kind}: forward_flops returns {counted(len(flops), 'number')}; must be {shape.num_layers + 2}: "
            f"of the embedding, of {counted(shape.num_layers, 'block')}, and of the head"
        )


def build_own(kind: ModelKind, shape: Shape, head_chunk_tokens: int, device: str, depths: range | None) -> nn.Module:
    """Build the module of a kind of the user, or its part at `depths`.

    Raises:
        UserError: its class is no `Part`, or its parameters are not those that the kind declares.
    """
    from codescent.models.part import Part  # noqa: PLC0415 - keeps torch out of planning

    made = own_names.subclass(KEY, kind.module, Part, needs=("_build", "forward"))
    module = made(shape, head_chunk_tokens, device, depths)
    module.register_forward_hook(_check_output)
    wanted = range(shape.num_layers + 2) if depths is None else depths
    declared = {one.name: one.shape for one in kind.parameters(shape) if any(depth in wanted for depth in one.depths)}
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if [*declared.items()] != [*found.items()]:
        raise UserError(f"{KEY} = {kind.name}: {_difference(declared, found)}: see codescent docs own_names")
    return module


def _check_output(module: nn.Module, _inputs: object, output: object) -> None:
    """Raise UserError if a forward pass has not returned a tensor."""
    from torch import Tensor  # noqa: PLC0415 - keeps torch out of planning

    if not isinstance(output, Tensor):
        raise UserError(
            f"{type(module).__module__}:{type(module).__name__}: forward returns "
            f"{'None' if output is None else a_type(output)}; must be a Tensor: the sum of the losses, "
            "or without targets the logits: see codescent docs own_names"
        )


def _difference(declared: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """How the parameters of a module differ from the declared ones, in a clause."""
    only = [
        f"{what} {', '.join(names[:5])}"
        for what, names in (
            ("the module has no", [name for name in declared if name not in found]),
            ("the kind declares no", [name for name in found if name not in declared]),
        )
        if names
    ]
    sizes = [
        f"{name} is {found[name]}, declared {size}" for name, size in declared.items() if found.get(name, size) != size
    ]
    order = [
        f"the module has them in the order {', '.join([*found][:5])}, the kind declares {', '.join([*declared][:5])}"
    ]
    return "; ".join([*only, *sizes[:5]] or order)
