"""In: a config, a candidate of its layout. Out: what a run cannot have whose model writes answers before each step.
Does not write answers (train/rollouts.py does)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from codescent.base.nearest import nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.models import Shape
from codescent.strategies import Candidate
from codescent.strategies.refusals import near_degrees

if TYPE_CHECKING:
    from codescent.config.sections import Config

AXES: dict[str, str] = {
    "pp": "no rank has all layers, and the model writes answers with them",
    "cp": "ranks share the positions of a sample, and an answer grows by one position at a time",
    "ep": "ranks exchange rows of experts in equal steps, and their answers have other lengths",
}
"""The axes that cannot write answers, each with the reason."""
APART = "replicas train apart, so their answers are not those of one model"
KEYS: dict[str, str] = {
    "average_every": APART,
    "gossip": APART,
    "offload": "weights of answers are read on the device",
    "data_parallel": "one process has the model several times",
}
"""Keys of [parallel] that cannot either, each with the reason."""


def refusals(config: Config, shape: Shape, candidate: Candidate) -> Iterator[Refusal]:
    """Refusals of a task whose model writes answers: axes and keys of a layout, and number formats."""
    task, mesh = f'data.task = "{candidate.task.name}"', candidate.mesh
    for axis, why in AXES.items():
        if (degree := mesh.degree(axis)) > 1:
            one = near_degrees(candidate, axis, 1, lambda other, axis=axis: other.mesh.degree(axis) == 1)  # type: ignore[misc]
            yield Refusal(f"parallel.{axis} = {degree}: {task}: {why}", one)
    handed = {candidate.layout.hands_out_by: "ranks do not have the weights of a step at the same time"}
    for key, why in {**KEYS, **handed}.items():
        if not key:
            continue
        default: Any = type(config.parallel).model_fields[key].default
        if (value := getattr(candidate.layout, key)) != default:
            yield Refusal(
                f"parallel.{key} = {json.dumps(value)}: {task}: {why}", [Change({f"parallel.{key}": default})]
            )
    if config.train.fp8 != "none":
        yield Refusal(
            f'train.fp8 = "{config.train.fp8}": {task}: answers are written without fp8, so by another model',
            [Change({"train.fp8": "none"})],
        )
    yield from _parted(config, candidate)
    if shape.logit_cap and config.train.temperature != 1.0:
        yield Refusal(
            f"train.temperature = {config.train.temperature}: the model caps its logits (model.logit_cap), and the "
            "loss would be that of other probabilities than those from which tokens are drawn",
            [Change({"train.temperature": 1.0})],
        )
    if config.lora.quantize != "none" and mesh.dp_shard > 1:
        yield Refusal(
            f'lora.quantize = "{config.lora.quantize}": {task}: with parallel.dp_shard = {mesh.dp_shard} weights are '
            "gathered to write answers, and quantized ones cannot be",
            [
                Change({"lora.quantize": "none"}),
                *near_degrees(candidate, "dp_shard", 1, lambda o: o.mesh.dp_shard == 1),
            ],
        )


def _parted(config: Config, candidate: Candidate) -> Iterator[Refusal]:
    """Refusals of what would act between two steps that learn from the same answers."""
    times, key = config.train.updates_per_answer, "train.updates_per_answer"
    if times == 1:
        return
    for name, steps in candidate.due.items():
        if steps % times:
            yield Refusal(
                f"{name} = {steps}: {key} = {times} steps learn from the same answers, and nothing can act between "
                "them",
                [*each(name, nearest_multiples(steps, times)), Change({key: 1})],
            )
    if config.train.num_epochs is not None:
        yield Refusal(
            f"train.num_epochs = {config.train.num_epochs:g}: with {key} = {times} an epoch is no number of steps; "
            "give train.num_steps",
            [Change({key: 1})],
        )
