"""In: by how much a model is wider than its base, its parameters, an update rule. Out: the parameters with the initial
values of mu-P; by what the learning rate of each is multiplied.
Does not scale scores and logits (`Shape.score_width` and `Part.for_head` do) and does not import torch.

Maximal update parametrization: Yang et al. 2022, "Tensor Programs V" (arXiv 2203.03466), table 8. Its
fan-in and fan-out count in multiples of those of the base, so at the width of the base nothing changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from codescent.plan.shard import Parameter, Role, TensorPlan
from codescent.plan.work import Scalar

KEYS = ("mup_base_dim", "mup_base_head_dim")
"""Keys of [model] that give the base: fields of the shape of a kind whose module follows mu-P."""

HIDDEN = (Role.COLUMN, Role.ROW, Role.WHOLE)
"""Roles of matrices whose inputs and outputs grow with the width."""

ADDS_DECAY = ("adam", "adagrad", "adadelta", "rmsprop")
"""Update rules that add weight decay to gradients before they divide by their size: no factor keeps its effect."""


@dataclass(frozen=True)
class Growth:
    """How many times as large a model is as its base: channels of the residual stream, channels of a head."""

    width: float = 1.0
    head: float = 1.0


SAME = Growth()


def scaled(parameters: Iterable[Parameter], growth: Growth) -> Iterator[Parameter]:
    """The parameters, which a kind declares with the initial values of its base, with those of this width."""
    for one in parameters:
        factor = std_factor(one.role, growth)
        yield one if factor == 1.0 else replace(one, std=one.std * factor)


def std_factor(role: Role, growth: Growth) -> float:
    """By what the deviation of the initial values of the base is multiplied.

    The variance of hidden matrices falls with their fan-in. That of a head with few outputs, whose logits have no
    factor, falls with its square (table 3 of the paper). Embeddings, norms and biases keep theirs.
    """
    if role is Role.LOGITS:
        return 1.0 / growth.width
    return 1.0 / math.sqrt(growth.width) if role in HIDDEN else 1.0


def rate_factor(tensor: TensorPlan, growth: Growth, update: Mapping[str, Scalar]) -> float:
    """By what the learning rate of a tensor is multiplied. `update`: the keys of [optimizer], as in `Plan.update`.

    * Most rules divide gradients by their size: the update of a hidden matrix must fall with its fan-in.
    * SGD does not. Gradients of embeddings, norms and biases fall with the width, so their rate grows with it.
    * The spectral norm of an update of a hidden matrix must not follow the width (Yang, Simon and Bernstein 2023, "A
      Spectral Condition for Feature Learning"). Muon's is 1 times the factor of muon_adjust_lr_fn: with "original" it
      is the same at every width, with "match_rms_adamw" it grows with the root.
    """
    parameter, width = tensor.parameter, growth.width
    if tensor.orthogonalized:
        return 1.0 if update["muon_adjust_lr_fn"] == "original" else 1.0 / math.sqrt(width)
    if parameter.role is Role.LOGITS:
        return 1.0 / width
    if parameter.role in HIDDEN:
        return 1.0 if update["kind"] == "sgd" else 1.0 / width
    if update["kind"] != "sgd" or parameter.fixed:
        return 1.0
    return growth.head if parameter.role is Role.HEAD_NORM else width
