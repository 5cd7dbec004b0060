"""In: the nouns of a run. Out: the Plan, frozen data that the simulator and the executor read, and its JSON form.
Does not compute prices and does not refuse anything: `build` refuses, `cost` prices, `train` executes."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from codescent.plan.flops import StepFlops, step_flops
from codescent.plan.layout import Layout
from codescent.plan.mesh import Mesh
from codescent.plan.model import ModelFacts
from codescent.plan.schedule import Schedule
from codescent.plan.shard import TensorPlan
from codescent.plan.traffic import Traffic
from codescent.plan.work import Scalar, TaskFacts, Work


class OlderPlan(ValueError):
    """An earlier version wrote this JSON, without model and task: the plan is made again from the run's config."""


@dataclass(frozen=True)
class Plan:
    """All that is decided before a run starts.

    `seed` is that of initial values, of the samples' order and of dropout. `update`: the keys of [optimizer] that
    decide what a step does to the weights, each with its value.
    """

    mesh: Mesh
    model: ModelFacts
    task: TaskFacts
    work: Work
    layout: Layout
    tensors: tuple[TensorPlan, ...]
    schedule: Schedule
    traffic: tuple[Traffic, ...] = ()
    seed: int = 0
    update: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        return sum(tensor.parameter.numel for tensor in self.tensors)

    @cached_property
    def trained(self) -> tuple[TensorPlan, ...]:
        """The tensors that are updated: some at least."""
        return tuple(tensor for tensor in self.tensors if tensor.parameter.trained)

    @property
    def devices(self) -> int:
        """Devices that each rank computes on."""
        return max((record.devices for record in self.traffic), default=1)

    def held_by(self, stage: int) -> tuple[TensorPlan, ...]:
        """The tensors of a pipeline stage, each once, chunk by chunk, in the order in which forward reads them."""
        return self._held[stage]

    @cached_property
    def _held(self) -> tuple[tuple[TensorPlan, ...], ...]:
        """`held_by` of every stage."""
        stages = []
        for stage in range(len(self.schedule.programs)):
            held: dict[str, TensorPlan] = {}
            for part in self.schedule.parts(stage):
                found = (tensor for tensor in self.tensors if any(depth in part for depth in tensor.parameter.depths))
                held |= {tensor.parameter.name: tensor for tensor in found}
            stages.append(tuple(held.values()))
        return tuple(stages)

    def stages_of(self, tensor: TensorPlan) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor, the one that reads it first in front."""
        return self.schedule.stages_of(tensor.parameter.depths)

    def flops(self) -> StepFlops:
        """Model FLOPs of one step over all the ranks."""
        return step_flops(self.model, self.task, self.work, [tensor.parameter for tensor in self.tensors])

    def counts_loss(self, rank: int) -> bool:
        """Whether the loss of a rank counts in sums over all of them: along tp all compute the same one."""
        return self.mesh.coordinates(rank)["tp"] == 0

    def samples(self, rank: int, microbatch: int) -> range:
        """The samples of a rank's micro-batch, by their number in the global batch."""
        size = self.work.microbatch_size
        first = (self.mesh.dp_index(rank) * self.work.num_microbatches + microbatch) * size
        return range(first, first + size)

    def trajectory(self) -> dict[str, Scalar]:
        """What decides the losses of a run, each by the key of the config that says it.

        Two runs with equal trajectories have the same losses, to rounding, whatever their layouts are.
        """
        lora, update = self.model.lora, dict(self.update)
        steps, workers = update.pop("decay_steps", None), update.pop("num_workers", None)
        return {
            "run.seed": self.seed,
            "model.kind": self.model.kind,
            **{f"model.{name}": size for name, size in self.model.sizes.items()},
            # Beside adapters the weights themselves are compared: their folder may have been moved.
            "model.weights": self.model.weights if lora is None else None,
            "lora.rank": None if lora is None else lora.rank,
            "lora.alpha": None if lora is None else lora.alpha,
            "lora.targets": None if lora is None else ", ".join(sorted(lora.targets)),
            "lora.whole": None if lora is None else ", ".join(sorted(lora.whole)),
            "data.task": self.task.name,
            **{f"data.{name}": value for name, value in self.task.identity.items()},
            "data.seq_len": self.work.seq_len,
            "train.global_batch_size": self.work.global_batch_size,
            "train.precision": self.work.precision,
            **{f"optimizer.{name}": value for name, value in update.items()},
            "optimizer.decay_steps (or train.num_steps)": steps,
            "data-parallel ranks, by which optimizer.scale_learning_rate multiplies": workers,
        }

    def to_json(self) -> dict[str, Any]:
        """Nested dicts, lists, strings and numbers; `from_json` gives an equal plan back."""
        return cast(dict[str, Any], _encode(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`.

        Raises:
            OlderPlan: an earlier version wrote it.
            KeyError, TypeError, ValueError: the data is not a plan.
        """
        if "work" in data and "model" not in data:
            raise OlderPlan("an earlier version wrote this plan: its model and its task are not in it")
        return cast(Plan, _decode(cls, data))


_SCALARS = {int, float, bool, str, types.NoneType}


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, data: Any) -> Any:
    """Rebuild a value of the annotated type `kind`; the annotations of the dataclasses are the only schema.

    A field that the data does not have takes its default: so a plan of an older version still loads.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        known = [field.name for field in dataclasses.fields(kind) if field.name in data]
        return kind(**{name: _decode(hints[name], data[name]) for name in known})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise TypeError(f"{data!r} is no object")
        return {key: _decode(arguments[1], item) for key, item in data.items()}
    if origin in (typing.Union, types.UnionType):
        if data is None or set(arguments) <= _SCALARS:
            return data  # JSON tells strings and numbers apart
        return _decode(next(a for a in arguments if a is not type(None)), data)
    return kind(data)
