"""In: an update rule of the user. Out: its torch optimizer, after a trial on small tensors; or what is wrong with it.
Does not update the model (optimize.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from codescent.base.counted import a_type
from codescent.base.errors import UserError
from codescent.config.update_rules import KEY, UpdateRule

if TYPE_CHECKING:
    from codescent.config.optimizer import Optimizer

TRIAL_STEPS = 3
TRIAL_RATE = 0.01
CLOSE = 1e-9
"""Relative difference, in fp64, of an element that was updated in another tensor."""
SHAPES = ((6, 4), (5,))


def make(rule: UpdateRule, groups: list[dict[str, Any]], optimizer: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a rule for parameters in groups. Raises UserError: the rule is not what it says of itself."""
    if problems := [f"{KEY} = {optimizer.kind}: {problem}" for problem in _problems(rule, optimizer)]:
        raise UserError(*problems)
    return rule.make(groups, optimizer)


def _problems(rule: UpdateRule, optimizer: Optimizer) -> Iterator[str]:
    made: object = rule.make(_groups([torch.zeros(2)]), optimizer)
    if not isinstance(made, torch.optim.Optimizer):
        yield f"make returns {a_type(made)}; must be a torch.optim.Optimizer"
        return
    problems = [*_of_state(rule, optimizer)]
    yield from problems
    if problems:
        return
    wholes = _values()
    together = _updated(rule, optimizer, [wholes])
    if not _close(together, _updated(rule, optimizer, [wholes], zeroed=True)):
        yield "its state does not begin at zero; codescent sets all tensors of it to zero before the first step"
    elif not _close(together, _updated(rule, optimizer, [[one] for one in wholes])):
        yield "the update of a tensor depends on other tensors; each must be updated by itself"
    elif rule.elementwise and not _is_elementwise(rule, optimizer, wholes[0], together[0]):
        yield (
            "elementwise = True, but the update of an element depends on others of its tensor: a part of a tensor is "
            "updated otherwise than the whole; set it to False"
        )


def _of_state(rule: UpdateRule, optimizer: Optimizer) -> Iterator[str]:
    """Problems of what a rule keeps: other tensors than it says, what no checkpoint has; weights that change at a rate
    of 0."""
    parameter = torch.ones(*SHAPES[0], dtype=torch.float64)
    made = rule.make(_groups([parameter]), optimizer)
    before = [_kept(group) for group in made.param_groups]
    _step(made, [parameter], [torch.zeros_like(parameter)], 0.0)
    state = made.state.get(parameter, {})
    whole = [name for name, value in state.items() if torch.is_tensor(value) and value.shape == parameter.shape]
    if sorted(whole) != sorted(rule.state):
        yield (
            f"state = {rule.state}, but the optimizer keeps {', '.join(sorted(whole)) or 'no tensor'} in the shape of "
            "a parameter; name these"
        )
    if plain := [name for name, value in state.items() if not torch.is_tensor(value)]:
        yield (
            f"its state has {', '.join(plain)}, which is no tensor, so no checkpoint has it; keep a count as "
            "torch.zeros(())"
        )
    sized = [name for name, value in state.items() if torch.is_tensor(value) and value.numel() > 1]
    if others := [name for name in sized if name not in whole]:
        yield f"its state {', '.join(others)} has another shape than its parameter; must have the same, or one element"
    if bool(parameter.ne(1).any()):
        yield 'weights change at a learning rate of 0; the rate of a step is group["lr"]'
    if before != [_kept(group) for group in made.param_groups]:
        yield "it changes values of its groups, which no checkpoint has; keep them as tensors in state[parameter]"


def _kept(group: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name not in ("params", "lr")}


def _is_elementwise(rule: UpdateRule, optimizer: Optimizer, value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether parts of a tensor are updated as the whole is, cut along each dim."""
    for dim in range(value.dim()):
        parts = _updated(rule, optimizer, [[*value.chunk(2, dim)]], dim)
        if not _close([whole], [torch.cat(parts, dim)]):
            return False
    return True


def _values() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]


def _updated(
    rule: UpdateRule,
    optimizer: Optimizer,
    apart: Sequence[Sequence[torch.Tensor]],
    dim: int | None = None,
    *,
    zeroed: bool = False,
) -> list[torch.Tensor]:
    """Tensors after some steps, in a list.

    Args:
        rule, optimizer: see `make`.
        apart: the tensors of each optimizer.
        dim: they are parts of one tensor, cut there; None: they are whole.
        zeroed: the state is made before, and set to zero, as optimize.py does.
    """
    tensors = [tensor.clone().contiguous() for values in apart for tensor in values]
    makes, first = [], 0
    for values in apart:
        own = tensors[first : first + len(values)]
        makes.append((rule.make(_groups(own), optimizer), own))
        first += len(values)
    for made, own in makes if zeroed else ():
        _step(made, own, [torch.zeros_like(one) for one in own], 0.0)
        for value in (value for state in made.state.values() for value in state.values()):
            value.zero_()
    random = torch.Generator().manual_seed(1)
    for _ in range(TRIAL_STEPS):
        gradients = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
        pieces = gradients if dim is None else [*gradients[0].chunk(2, dim)]
        of_tensor = dict(zip(map(id, tensors), pieces))
        for made, own in makes:
            _step(made, own, [of_tensor[id(one)].contiguous() for one in own], TRIAL_RATE)
    return tensors


def _groups(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": list(tensors), "weight_decay": 0.1}]


def _step(
    made: torch.optim.Optimizer, own: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], rate: float
) -> None:
    for group in made.param_groups:
        group["lr"] = rate
    for tensor, gradient in zip(own, gradients, strict=True):
        tensor.grad = gradient
    with torch.no_grad():
        made.step()


def _close(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, two, rtol=CLOSE, atol=CLOSE) for one, two in zip(first, second, strict=True))
