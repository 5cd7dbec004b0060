"""In: the pp axis, a schedule's name, what each depth of the model costs. Out: the model's stages, and their lists.
Does not make the lists (plan/pipeline does) and sends no activation (train/messages does, where the lists say so)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from codescent.base.nearest import near_multiples
from codescent.plan import DTYPE_BYTES, Collective, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.plan.pipeline import cut, cut_at, pipeline, refusals
from codescent.strategies.refusals import near_degrees
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PipelineOptions:
    """`schedule`: one of plan/pipeline.SCHEDULES. `virtual_stages`: chunks of the model on each rank.
    `sequence_parallel`: whether what is sent is divided over tp. `cut`: "cost", or "encoder-decoder": between the two,
    too."""

    schedule: str
    virtual_stages: int
    sequence_parallel: bool
    cut: str


class Deferring(Protocol):
    """A layer that can defer the gradient of its weight."""

    deferred: list[Any] | None


class Pipeline:
    """Each rank of the axis has some of the layers; micro-batches follow each other through them.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """

    axis = "pp"
    Options = PipelineOptions
    variants: tuple[Mapping[str, Any], ...] = (
        {"schedule": "naive"},
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "zero-bubble"},
    )

    def __init__(self, options: PipelineOptions) -> None:
        self.options = options
        self.name, self.num_chunks = options.schedule, options.virtual_stages

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Schedules that there are not, fewer layers than stages, weight parts that nobody could reduce."""
        degree = ask.mesh.degree(self.axis)
        if self._between and not ask.work.encoder_layers:
            yield (
                'parallel.cut = "encoder-decoder": this model has no encoder beside its decoder; take parallel.cut = '
                '"cost"'
            )
        elif self._between and degree == 1:
            yield (
                'parallel.cut = "encoder-decoder": with parallel.pp = 1 nothing is cut; nearest that would do: '
                'parallel.pp = 2, or parallel.cut = "cost"'
            )
        if degree == 1:
            return
        work, layers = ask.work, ask.work.num_layers
        for problem in refusals(
            self.name, degree, work.num_microbatches, self.num_chunks, num_layers=layers, keys=self._batch_keys(ask)
        ):
            yield f"parallel.pp = {degree}: {problem}"
        chunks = self._chunks
        if layers < degree * chunks:
            virtual = f" x {chunks} (virtual_stages) = {degree * chunks}" if chunks > 1 else ""
            yield (
                f"parallel.pp = {degree}{virtual}: the model has {layers} layers, fewer than stages; nearest that "
                f"would do: {near_degrees(ask, self.axis, degree, self._fits)}, or model.num_layers = {degree * chunks}"
            )
        if self.name == "zero-bubble" and ask.mesh.dp_shard > 1:
            yield (
                f'parallel.schedule = "zero-bubble" with dp_shard = {ask.mesh.dp_shard}: fully_shard reduces gradients '
                "in the input part of backward, where those of the weight part are not there yet; take schedule = "
                '"1f1b", or dp_replicate in place of dp_shard'
            )

    def _batch_keys(self, ask: Ask) -> str:
        """What makes the number of micro-batches a multiple of the stages."""
        size, batch, dp, pp = ask.microbatch_size, ask.work.global_batch_size, ask.mesh.dp, ask.mesh.pp
        if size is None and batch % (dp * pp) == 0:
            return f" (train.microbatch_size = {batch // (dp * pp)})"
        one = ", train.microbatch_size = 1" if size is None else ""
        return f" (train.global_batch_size = {near_multiples(batch, dp * pp * (size or 1))}{one})"

    @property
    def _chunks(self) -> int:
        """Virtual stages on each rank, as many as the schedule can have."""
        return self.num_chunks if self.name == "interleaved" else 1

    @property
    def _between(self) -> bool:
        return self.options.cut == "encoder-decoder"

    def _depths(self, ask: Ask) -> tuple[tuple[int, int], ...]:
        """First depth and end of each virtual stage."""
        costs, parts = ask.work.forward_flops, ask.mesh.pp * self.num_chunks
        return cut_at(costs, parts, ask.work.encoder_layers + 1) if self._between else cut(costs, parts)

    def _fits(self, ask: Ask) -> bool:
        degree, layers = ask.mesh.pp, ask.work.num_layers
        problems = refusals(self.name, degree, ask.work.num_microbatches, self._chunks)
        return degree == 1 or (layers >= degree * self._chunks and not list(problems))

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """A tensor is on the stages whose depths read it, as the schedule says. Where these are several, each knows a
        part of its gradient."""
        stages = self._stages(tensor, ask)
        if len(stages) == 1 or not tensor.parameter.trained:
            return tensor
        axis = "pp" if len(stages) == ask.mesh.pp else f"pp[{','.join(map(str, stages))}]"
        return replace(tensor, partial=(*tensor.partial, axis))

    def _stages(self, tensor: TensorPlan, ask: Ask) -> list[int]:
        parts = self._depths(ask) if ask.mesh.pp > 1 else ()
        held = {
            number % ask.mesh.pp
            for number, (first, stop) in enumerate(parts)
            if any(first <= depth < stop for depth in tensor.parameter.depths)
        }
        return sorted(held) or [0]

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """Each stage's list, and the depths of each virtual stage, cut so that the dearest is as cheap as can be (where
        that is asked for, of the cuts that lie between encoder and decoder, too)."""
        degree = ask.mesh.degree(self.axis)
        if degree == 1:
            return schedule
        work = ask.work
        lists = pipeline(self.name, degree, work.num_microbatches, self.num_chunks, all_load=work.beside)
        return replace(lists, depths=self._depths(ask))

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """A send for every SEND of the lists."""
        degree = plan.mesh.degree(self.axis)
        if degree == 1:
            return
        for stage, program in enumerate(plan.schedule.programs):
            counted: dict[tuple[Verb, int, int], int] = {}
            for at in program:
                if at.verb in (Verb.SEND_ACTIVATION, Verb.SEND_GRADIENT):
                    assert at.peer is not None
                    key = at.verb, at.chunk, at.peer
                    counted[key] = counted.get(key, 0) + 1
            for (verb, chunk, peer), times in counted.items():
                what = "activations" if verb is Verb.SEND_ACTIVATION else "gradients of activations"
                yield Traffic(
                    Collective.SEND,
                    f"pp[{stage},{peer}]",
                    self._message_bytes(plan),
                    plan.work.precision,
                    verb,
                    Verb.FORWARD if verb is Verb.SEND_ACTIVATION else plan.schedule.weight_verb,
                    f"{what} of virtual stage {chunk * degree + stage}",
                    times,
                    stage,
                )

    def _message_bytes(self, plan: Plan) -> int:
        """The residual stream of a micro-batch, as much of it as a rank has."""
        work, mesh = plan.work, plan.mesh
        rows = work.seq_len // mesh.cp // (mesh.tp if self.options.sequence_parallel else 1)
        return work.microbatch_size * rows * work.hidden_dim * DTYPE_BYTES[work.precision]

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """What is a stage's is decided before it is made; zero-bubble puts products of the weight parts off."""
        if here.plan.mesh.degree(self.axis) > 1 and self.name == "zero-bubble":
            deferred: list[Any] = []
            for layer in part.modules():
                if hasattr(layer, "deferred") and getattr(getattr(layer, "weight", None), "requires_grad", True):
                    cast(Deferring, layer).deferred = deferred

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Of a stage's weights like of any others: others'."""
        return None
