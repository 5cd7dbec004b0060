"""In: mesh, model, task, batch, tensors and schedule of a run. Out: the frozen dataclass Plan, to and from JSON.
Does not check the values (build does), estimate costs (cost does) or run the plan (train does)."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, cast

from codescent.plan.activations import SavedTensor
from codescent.plan.brief import brief, is_left_out
from codescent.plan.flops import StepFlops, step_flops
from codescent.plan.layout import Layout
from codescent.plan.mesh import AXES, MOST_RANKS, Mesh
from codescent.plan.model import ModelFacts
from codescent.plan.objective import CROSS_ENTROPY, POLICY_KEYS, Objective
from codescent.plan.operators import LayerOperator
from codescent.plan.schedule import Schedule
from codescent.plan.served import Piece, pieces_of
from codescent.plan.shard import KeptTensor, TensorPlan
from codescent.plan.traffic import Traffic
from codescent.plan.work import Scalar, TaskFacts, Work

PARALLEL = tuple(f"parallel.{name}" for name in (*AXES, *(field.name for field in dataclasses.fields(Layout))))
"""The keys of [parallel] that a plan has. Most of them do not decide the losses."""

DECAY_STEPS = "optimizer.decay_steps (or train.num_steps)"
"""Name in `Plan.trajectory` of the step at which the decay of the learning rate ends; None: it does not decay."""

SCALE_RANKS = "data-parallel ranks, by which optimizer.scale_learning_rate multiplies"
"""Name in `Plan.trajectory` of the number that multiplies the learning rate."""


class OlderPlan(ValueError):
    """An earlier version wrote this JSON, without model and task. The caller rebuilds the plan from the config."""


@dataclass(frozen=True)
class Plan:
    """Everything that is fixed before a run starts.

    Attributes:
        objective: what training minimises; validation losses are plain cross-entropies.
        seed: seed of initial weights, sample order and dropout.
        update: the keys of [optimizer] that determine the weight update, with their values.
        kept: what strategies keep between steps, beside weights, gradients and optimizer state.
        decides: the keys of [parallel] that decide the losses, with their values, as the strategies declare them.
        activations: what forward keeps for backward of a micro-batch, as model and strategies declare it.
        again: where backward computes blocks again, what a block keeps meanwhile; of one block at a time.
        deferred: where gradients of weights are deferred, what a micro-batch keeps until they are computed.
        ema, ema_every: decay of the moving average of the weights, and the steps from one update to the next; 0: none.
        operators: what a rank computes of a micro-batch beside products with matrices, which follow from `tensors`.
        uncompiled: why torch.compile compiles none of its blocks, on any device; "": it may.
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
    objective: Objective = CROSS_ENTROPY
    kept: tuple[KeptTensor, ...] = brief(())
    decides: Mapping[str, Scalar] = brief({})
    activations: tuple[SavedTensor, ...] = brief(())
    again: tuple[SavedTensor, ...] = brief(())
    deferred: tuple[SavedTensor, ...] = brief(())
    operators: tuple[LayerOperator, ...] = brief(())
    uncompiled: str = brief("")
    ema: float = brief(0.0)
    ema_every: int = brief(1)

    @property
    def computing(self) -> Schedule:
        """The lists of the ranks that hold the model: one per pipeline stage, without that of the servers."""
        return replace(self.schedule, programs=self.schedule.programs[: self.mesh.pp])

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters of the model."""
        return sum(tensor.parameter.numel for tensor in self.tensors)

    @cached_property
    def trained(self) -> tuple[TensorPlan, ...]:
        """The tensors that training updates; at least one."""
        return tuple(tensor for tensor in self.tensors if tensor.parameter.trained)

    @property
    def scale_ranks(self) -> int:
        """The data-parallel ranks by which optimizer.scale_learning_rate multiplies; 1 if it does not."""
        return cast(int, self.update.get("num_workers", 1))

    @property
    def devices(self) -> int:
        """Number of devices of each rank."""
        return max((record.devices for record in self.traffic), default=1)

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes whose ranks train apart, and agree at the end of a round only."""
        return ("dp_replicate",) if self.layout.apart else ()

    @property
    def world_size(self) -> int:
        """Number of ranks: those of the mesh, and behind them the servers."""
        return self.mesh.world_size + self.layout.server_ranks

    @property
    def has_ranks_outside(self) -> bool:
        """Whether some ranks are not in the mesh: those that compute nothing."""
        return self.world_size > self.mesh.world_size

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that serve a part of the weights, in the order of the parts."""
        if self.layout.servers == "workers":
            return tuple(range(self.mesh.world_size))
        return tuple(range(self.mesh.world_size, self.world_size))

    def role(self, rank: int) -> int:
        """Index of the list of `rank` in the schedule: its pipeline stage, or 1 for a server."""
        return self.mesh.coordinates(rank)["pp"] if rank in self.mesh else 1

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """What each of `servers` holds."""
        return pieces_of(self.trained, len(self.servers))

    @property
    def together(self) -> str:
        """The ranks that sum a step's scalars: all of them, or those of a replica that trains apart."""
        return self.mesh.joint(*(axis for axis in AXES if axis not in self.apart))

    def replica(self, rank: int) -> int:
        """Index of the replica of `rank` among those that train apart; 0 if none does."""
        return self.mesh.coordinates(rank)["dp_replicate"] if self.apart else 0

    def samples_of_replica(self, rank: int) -> range:
        """Indices in the global batch of the samples of the replica of `rank`."""
        share = self.work.global_batch_size // (self.mesh.dp_replicate if self.apart else 1)
        return range(self.replica(rank) * share, (self.replica(rank) + 1) * share)

    def held_by(self, stage: int) -> tuple[TensorPlan, ...]:
        """The tensors of a pipeline stage, each once, by chunk, in the order of the forward pass."""
        return self._held[stage]

    @cached_property
    def _held(self) -> tuple[tuple[TensorPlan, ...], ...]:
        """`held_by` of every stage."""
        at: dict[int, list[int]] = {}  # by depth: the indices of its tensors
        for number, tensor in enumerate(self.tensors):
            for depth in tensor.parameter.depths:
                at.setdefault(depth, []).append(number)
        stages = []
        for stage in range(len(self.schedule.programs)):
            parts = ({number for depth in part for number in at.get(depth, ())} for part in self.schedule.parts(stage))
            held = dict.fromkeys(number for found in parts for number in sorted(found))
            stages.append(tuple(self.tensors[number] for number in held))
        return tuple(stages)

    def stages_of(self, tensor: TensorPlan) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor. The stage that reads it first comes first."""
        return self.schedule.stages_of(tensor.parameter.depths)

    def copies(self, tensor: TensorPlan, own: Collection[str]) -> int:
        """How many ranks hold the same values of a tensor, if the ranks of the axes `own` hold other ones."""
        if self.layout.served:  # one server holds each piece
            return 1
        axes = (axis for axis in AXES if axis not in ("pp", *own))
        return math.prod(self.mesh.degree(axis) for axis in axes) * len(self.stages_of(tensor))

    def flops(self) -> StepFlops:
        """Model FLOPs of one step, and those that are computed again, summed over all ranks."""
        parameters, splits = [tensor.parameter for tensor in self.tensors], self.mesh.cp > 1
        recompute = self.layout.recompute
        twice = self.objective.by_token
        return step_flops(
            self.model, self.task, self.work, parameters, recompute, splits_sequence=splits, logits_twice=twice
        )

    def counts_loss(self, rank: int) -> bool:
        """Whether sums over all ranks include the loss of this rank. All ranks of a tp group compute the same loss."""
        return self.mesh.coordinates(rank)["tp"] == 0

    @property
    def objective_sums(self) -> int:
        """Values of the measures of the objective, summed with the scalars of a step: a sum and a count of each."""
        return 2 * len(self.objective.measures)

    def samples(self, rank: int, microbatch: int) -> range:
        """Indices in the global batch of the samples of a rank's micro-batch."""
        size = self.work.microbatch_size
        first = (self.mesh.dp_index(rank) * self.work.num_microbatches + microbatch) * size
        return range(first, first + size)

    def sent_bytes(self, rank: int, number: int) -> float:
        """Bytes that a rank sends to other ranks in step `number` (from 0), by the ring algorithms."""
        always, others = self._sent[self.role(rank)]
        return always + sum(size for record, size in others if record.runs_in(number))

    @cached_property
    def _sent(self) -> tuple[tuple[float, tuple[tuple[Traffic, float], ...]], ...]:
        """By stage: the bytes that a rank sends in every step, and the collectives of some steps with their bytes."""
        stages = []
        for stage in range(len(self.schedule.programs)):
            mine = [record for record in self.traffic if record.stage in (None, stage)]
            sizes = [(one, one.times * one.wire_bytes(self.mesh.degree(one.axis))) for one in mine]
            always = sum(size for record, size in sizes if record.in_every_step)
            stages.append((always, tuple((record, size) for record, size in sizes if not record.in_every_step)))
        return tuple(stages)

    def trajectory(self) -> dict[str, Scalar]:
        """All values that determine the losses of a run, by config key.

        Two runs with equal trajectories have equal losses up to rounding, for any layouts.
        """
        lora, update = self.model.lora, dict(self.update)
        steps, workers = update.pop("decay_steps", None), update.pop("num_workers", None)
        return {
            "run.seed": self.seed,
            "model.kind": self.model.kind,
            **dict(self._sizes()),
            # With adapters the weights themselves are compared, because their folder may have been moved.
            "model.weights": self.model.weights if lora is None else None,
            "lora.rank": None if lora is None else lora.rank,
            "lora.alpha": None if lora is None else lora.alpha,
            "lora.targets": None if lora is None else ", ".join(sorted(lora.targets)),
            "lora.rslora": None if lora is None else lora.rslora,
            "model.adapters": self.model.adapters if lora is None else None,
            "lora.weights": None if lora is None else lora.start,
            "lora.quantize": None if lora is None else lora.quantize or "none",
            "lora.dora": None if lora is None else lora.dora,
            "lora.dropout": None if lora is None else lora.dropout,
            "lora.whole": None if lora is None else ", ".join(sorted(lora.whole)),
            "data.task": self.task.name,
            **{f"data.{name}": value for name, value in self.task.identity.items()},
            "data.seq_len": self.work.seq_len,
            "train.global_batch_size": self.work.global_batch_size,
            "train.precision": self.work.precision,
            "train.fp8": self.work.fp8 or "none",
            "train.label_smoothing": self.objective.label_smoothing,
            "train.z_loss": self.objective.z_loss,
            **self._preference(),
            **self._policy(),
            "train.balance_loss": self.objective.balance_loss,
            "train.balance_rate": self.objective.balance_rate,
            "train.router_z_loss": self.objective.router_z_loss,
            "train.mtp_weight": self.objective.mtp_weight,
            "train.ema": self.ema,
            "train.ema_every": self.ema_every,
            **{f"optimizer.{name}": value for name, value in update.items()},
            **dict.fromkeys(PARALLEL),
            **self.decides,
            DECAY_STEPS: steps,
            SCALE_RANKS: workers,
        }

    def _preference(self) -> dict[str, Scalar]:
        """The keys of the loss of answers; none without one."""
        found = self.objective.preference
        if found is None:
            return {}
        factors = {"beta": found.beta, "margin": found.margin}
        weights = {"chosen_weight": found.chosen_weight, "rejected_weight": found.rejected_weight}
        return {"train.preference": found.kind, **{f"train.{name}": one for name, one in (factors | weights).items()}}

    def _policy(self) -> dict[str, Scalar]:
        """The keys of the loss of answers that the model writes; none without one."""
        found = self.objective.policy
        return {} if found is None else {f"train.{key}": getattr(found, name) for name, key in POLICY_KEYS.items()}

    def _sizes(self) -> Iterator[tuple[str, Scalar]]:
        """The sizes of the model by config key; one that has several parts, such as a scaling, in words."""
        for name, size in self.model.sizes.items():
            parts = size.items() if isinstance(size, Mapping) else ()
            yield (
                f"model.{name}",
                ", ".join(f"{part} {value}" for part, value in parts) if parts else cast(Scalar, size),
            )

    def differing(self, other: Plan) -> dict[str, tuple[Scalar, Scalar]]:
        """The keys of both trajectories with other values, and these values: this plan's, the other's.

        A key of [parallel] that has no effect in one of them counts with the value of its config. Else another method
        would be told by every key that it alone has.
        """
        before, after = self.trajectory(), other.trajectory()
        found = {key: (before[key], after[key]) for key in before if key in after and before[key] != after[key]}
        given = {key: (self._given(key, old), other._given(key, new)) for key, (old, new) in found.items()}
        return {key: values for key, values in given.items() if values[0] != values[1]} or found

    def _given(self, key: str, value: Scalar) -> Scalar:
        """A value of the trajectory; of a key of [parallel] without an effect, which has None there, the config's."""
        section, _, name = key.partition(".")
        if value is not None or section != "parallel":
            return value
        found: Scalar = self.mesh.degree(name) if name in AXES else getattr(self.layout, name)
        return "auto" if found is None else found

    def to_json(self) -> dict[str, Any]:
        """The plan as nested dicts, lists, strings and numbers. `from_json` restores an equal plan."""
        return cast(dict[str, Any], _encode(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Restore a plan from the output of `to_json`.

        Raises:
            OlderPlan: an earlier version wrote it.
            KeyError, TypeError, ValueError: the data is not a plan.
        """
        if "work" in data and "model" not in data:
            raise OlderPlan("an earlier version wrote this plan: its model and its task are not in it")
        plan = cast(Plan, _decode(cls, data))
        plan._refuse_impossible()
        return plan

    def _refuse_impossible(self) -> None:
        """Raise ValueError: the numbers would take all memory, or name a dim that is not there."""
        degrees = {axis: getattr(self.mesh, axis) for axis in AXES}
        if min(degrees.values()) < 1 or math.prod(degrees.values()) > MOST_RANKS:
            raise ValueError(f"mesh: {degrees} is not 1 to {MOST_RANKS:,} ranks")
        servers = self.layout.servers
        if servers != "workers" and (not isinstance(servers, int) or not 0 <= servers <= MOST_RANKS):
            raise ValueError(f"layout: {str(servers)[:40]!r} is no number of servers")
        if unknown := [key for key in self.decides if key not in PARALLEL]:
            raise ValueError(f"decides: {unknown[0][:40]!r} is no key of [parallel]")
        for tensor in self.tensors:
            dims = len(tensor.parameter.shape)
            for placed in (tensor.weights, tensor.gradients, tensor.optimizer):
                if wrong := [axis for axis, dim in placed.shards.items() if axis not in AXES or not 0 <= dim < dims]:
                    raise ValueError(f"{tensor.parameter.name}: cannot be cut over {wrong[0]}")
        for kept in (*self.activations, *self.again, *self.deferred):
            kept.refuse_impossible()
        for operator in self.operators:
            operator.refuse_impossible()
        for record in self.traffic:
            if len(record.depths) != 2 or not 0 <= record.depths[0] <= record.depths[1] <= self.model.num_layers + 2:
                raise ValueError(f"{record.what}: {record.depths} are no depths of the model")


MOST_INTEGER = 2**100
"""Of a plan that is read. A product of several such numbers still has a float."""
_SCALARS = {int, float, bool, str, types.NoneType}


def _encode(value: Any) -> Any:
    if type(value) in _SCALARS:  # most values, by far
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {field.name: _encode(item) for field, item in fields if not is_left_out(field, item)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return value


@cache
def _kinds(kind: Any) -> Mapping[str, Any]:
    """The annotated type of each field of a dataclass. To ask Python anew for each value is most of the decoding."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, data: Any) -> Any:
    """Rebuild a value of the annotated type `kind`. The annotations of the dataclasses are the schema.

    A field that is missing in the data gets its default, so plans of older versions load.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _decode(of, data[name]) for name, of in _kinds(kind).items() if name in data})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise TypeError(f"{str(data)[:40]!r} is not a list")
        return tuple(_decode(arguments[0], item) for item in data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise TypeError(f"{str(data)[:40]!r} is not an object")
        return {key: _decode(arguments[1], item) for key, item in data.items()}
    if origin in (typing.Union, types.UnionType):
        others = [one for one in arguments if one not in _SCALARS]
        takes_scalars = bool(_SCALARS.intersection(arguments) - {types.NoneType})
        if data is None or (takes_scalars and type(data) in _SCALARS):
            return data  # JSON distinguishes strings and numbers already
        if not others:
            raise TypeError(f"{str(data)[:40]!r} is no number and no text")
        return _decode(others[0], data)
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise TypeError(f"{str(data)[:40]!r} is not {kind.__name__}")
    if type(data) is int and abs(data) >= MOST_INTEGER:
        raise ValueError(f"{str(data)[:40]!r} is too large")
    return kind(data)
