"""In: a plan. Out: the row of `codescent plan` on mu-P: the base, and which factors parameters have by their roles.
Does not compute a factor (models/mup.py does) and does not print."""

from __future__ import annotations

import math
from collections.abc import Iterator

from codescent import models
from codescent.models.mup import Growth, std_factor
from codescent.plan import Plan
from codescent.plan.shard import Role, TensorPlan

Row = tuple[str, list[str]]
_WORDS = {
    Role.COLUMN: "hidden matrices",
    Role.ROW: "hidden matrices",
    Role.WHOLE: "hidden matrices",
    Role.VOCAB: "embeddings",
    Role.POSITION: "embeddings",
    Role.LOGITS: "head",
    Role.NORM: "norms",
    Role.COLUMN_NORM: "norms",
    Role.HEAD_NORM: "norms of heads",
    Role.BIAS_COLUMN: "biases",
    Role.BIAS_ROW: "biases",
}
"""What the parameters of a role are called. Adapters are not among them: they cannot have mu-P."""


def mup_rows(plan: Plan) -> Iterator[Row]:
    """A row where the model has a base of mu-P: its width, then a line for each pair of factors that differs from 1."""
    shape = models.shape_of_facts(plan.model)
    if not shape.mup_base_dim:
        return
    growth = shape.growth
    heads = f", heads of {shape.mup_base_head_dim or shape.head_dim}"
    lines = [f"base: {shape.mup_base_dim:,} channels{heads}; this model is {growth.width:.4g} x as wide"]
    scaled: dict[tuple[float, float], list[str]] = {}
    for tensor in plan.tensors:
        names = scaled.setdefault((std_factor(tensor.parameter.role, growth), tensor.rate_factor), [])
        names += [name for name in [_name(tensor, plan)] if name not in names]
    lines += [f"{', '.join(names)}: {_factors(*pair)}" for pair, names in scaled.items() if pair != (1.0, 1.0)]
    yield "mu-P", [*lines, *_of_activations(plan, growth)]


def _name(tensor: TensorPlan, plan: Plan) -> str:
    """The name of what a tensor is. A vocabulary matrix that only the head reads is one of the head."""
    parameter = tensor.parameter
    if parameter.role is Role.VOCAB and min(parameter.depths) == plan.model.num_layers + 1:
        return "head"
    return "biases of logits" if parameter.fixed else _WORDS[parameter.role]


def _factors(std: float, rate: float) -> str:
    words = [] if std == 1.0 else [f"initial values x {std:.4g}"]
    return ", ".join([*words, *([] if rate == 1.0 else [f"learning rate x {rate:.4g}"])])


def _of_activations(plan: Plan, growth: Growth) -> Iterator[str]:
    """The factors on what is no parameter. A head of few outputs has its factor in its initial values."""
    few = any(tensor.parameter.role is Role.LOGITS for tensor in plan.tensors)
    if growth.width != 1.0 and not few:
        yield f"logits x {1.0 / growth.width:.4g}"
    if growth.head != 1.0:
        yield f"scores of attention x {1.0 / math.sqrt(growth.head):.4g}"
