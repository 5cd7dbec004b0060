"""In: the mesh axis pp, the name of a schedule, FLOPs per layer. Out: each stage's layers and its instruction list.
Does not define the order of a schedule (plan/pipeline does) or send activations (train/messages does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from codescent.base.counted import counted
from codescent.base.nearest import nearest_divisors, nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import DTYPE_BYTES, SENDS, Collective, Layout, Mesh, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.plan.activations import SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.pipeline import cut, cut_at, pipeline, refusals
from codescent.strategies.refusals import near_degrees
from codescent.strategies.strategy import Candidate, Strategy, ThisRank

if TYPE_CHECKING:
    import torch


class Pipeline(Strategy):
    """Pipeline parallelism: each rank of the axis holds some of the layers. Micro-batches pass from rank to rank.

    Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """

    axis = "pp"
    variants = (
        {"schedule": "naive"},
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "zero-bubble"},
    )

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse impossible schedules, fewer layers than stages, and weight gradients that zero could not reduce."""
        layout, degree = candidate.layout, candidate.mesh.pp
        if _cut_between(layout) and not candidate.model.encoder_layers:
            what = 'parallel.cut = "encoder-decoder": this model is not an encoder-decoder'
            yield Refusal(what, [Change({"parallel.cut": "cost"})])
        elif _cut_between(layout) and degree == 1:
            most = 2 if layout.data_parallel == 1 else 1  # torch.nn.DataParallel is one process
            near = near_degrees(candidate, self.axis, most, lambda other: not any(self.refuse(other)))
            yield Refusal(
                'parallel.cut = "encoder-decoder": parallel.pp = 1 does not cut the model',
                [*near, Change({"parallel.cut": "cost"})],
            )
        yield from _wrong_layers(candidate)
        if degree == 1:
            return
        layers, chunks, microbatches = candidate.model.num_layers, _chunks(layout), candidate.work.num_microbatches
        more = _more_microbatches(candidate) if candidate.advises else []
        for problem in refusals(
            layout.schedule, degree, microbatches, layout.virtual_stages, num_layers=layers, more=more
        ):
            yield Refusal(f"parallel.pp = {degree}: {problem.said}", problem.changes)
        if layers < degree * chunks:
            virtual = f" x {chunks} (virtual_stages) = {degree * chunks}" if chunks > 1 else ""
            near, encoder = (
                near_degrees(candidate, self.axis, min(degree, layers), _fits),
                candidate.model.encoder_layers,
            )
            key = "model.num_decoder_layers" if encoder else "model.num_layers"
            fewer = each("parallel.virtual_stages", [layers // degree] if layers >= 2 * degree else [])
            yield Refusal(
                f"parallel.pp = {degree}{virtual}: the model has {counted(layers, 'layer')}, fewer than stages",
                [*fewer, *near, Change({key: degree * chunks - encoder})],
            )
        if layout.schedule == "zero-bubble" and candidate.mesh.dp_shard > 1:
            yield Refusal(
                f'parallel.schedule = "zero-bubble" with dp_shard = {candidate.mesh.dp_shard}: fully_shard reduces '
                "gradients in the input part of backward, before the weight part computes them",
                [Change({"parallel.schedule": "1f1b"}), *(_as_copies(candidate.mesh) if candidate.advises else ())],
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """A stage holds the tensors that its depths read. If several stages hold one, its gradients are partial."""
        degree, parts = candidate.mesh.pp, depths_of(candidate)
        stages = sorted(
            number
            for number in range(degree)
            if any(first <= d < stop for first, stop in parts[number::degree] for d in tensor.parameter.depths)
        )
        if len(stages) <= 1 or not tensor.parameter.trained:
            return tensor
        axis = self.axis if len(stages) == degree else f"pp[{','.join(map(str, stages))}]"
        return replace(tensor, partial=(*tensor.partial, axis))

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """Each stage's instruction list, and the depths of each virtual stage."""
        layout, microbatches = candidate.layout, candidate.work.num_microbatches
        lists = pipeline(
            layout.schedule, candidate.mesh.pp, microbatches, layout.virtual_stages, all_load=candidate.task.extras
        )
        return replace(lists, depths=depths_of(candidate))

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """One message for every SEND instruction: the rank's part of a micro-batch's residual stream."""
        work, mesh = plan.work, plan.mesh
        rows = work.seq_len // mesh.cp // (mesh.tp if plan.layout.sequence_parallel else 1)
        message_bytes = work.microbatch_size * rows * plan.model.hidden_dim * DTYPE_BYTES[work.precision]
        sends = Counter((at.verb, at.chunk, at.peer) for at in plan.schedule.programs[stage] if at.verb in SENDS)
        for (verb, chunk, peer), times in sends.items():
            axis, precision = f"pp[{stage},{peer}]", work.precision
            during, what = plan.schedule.weight_verb, "gradients of activations"
            if verb is Verb.SEND_ACTIVATION:
                during, what = Verb.FORWARD, "activations"
            what += f" of virtual stage {chunk * mesh.pp + stage}"
            part = plan.schedule.parts(stage)[chunk]
            at = part.stop - 1 if verb is Verb.SEND_ACTIVATION else part.start
            options: dict[str, Any] = {"times": times, "depths": (at, at + 1)}
            yield Traffic(Collective.SEND, axis, message_bytes, precision, verb, during, what, **options)

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Add the activations that a chunk receives and those that it sends: it holds them until its backward pass.

        The strategies before this one in ORDER have divided the other tensors. These are divided here, in the same way.
        """
        yield from tensors
        if not self.active(run):
            return
        work, model = run.work, run.model
        shape, dims = (work.microbatch_size, work.seq_len, model.hidden_dim), (Dim.SAMPLE, Dim.SEQUENCE, Dim.WHOLE)
        depths = (0, model.num_layers + 2)
        splits = ["cp"] if run.mesh.cp > 1 else []
        splits += ["tp"] if run.mesh.tp > 1 and run.layout.sequence_parallel else []
        for border, what in (("first", "received"), ("last", "sent")):
            tensor = SavedTensor(f"activations that are {what}", shape, dims, work.precision, depths, border=border)
            for axis in splits:
                tensor = tensor.divided(axis, (Dim.SEQUENCE,))
            yield tensor

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """With zero-bubble, make layers defer weight gradients. The part has only its stage's depths already."""
        if this_rank.plan.layout.schedule == "zero-bubble":
            deferred: list[Any] = []
            for layer in part.modules():
                if hasattr(layer, "deferred") and getattr(getattr(layer, "weight", None), "requires_grad", True):
                    cast(Any, layer).deferred = deferred


def _as_copies(mesh: Mesh) -> Iterator[Change]:
    yield Change({"parallel.dp_shard": 1, "parallel.dp_replicate": mesh.dp_replicate * mesh.dp_shard})


def _more_microbatches(candidate: Candidate) -> list[Change]:
    """The nearest batches and micro-batches whose number is a multiple of the stages."""
    size, batch = candidate.microbatch_size, candidate.work.global_batch_size
    ranks = candidate.mesh.dp * candidate.mesh.pp
    divides = batch % ranks == 0 and candidate.whole_samples
    if size is None and divides:
        return each("train.microbatch_size", [batch // ranks])
    key, total, unit = "train.global_batch_size", batch, ranks * (size or 1)
    if candidate.batch_tokens:
        key, total, unit = "train.global_batch_tokens", candidate.batch_tokens, unit * candidate.sample_tokens
    one = {"train.microbatch_size": 1} if size is None else {}
    smaller = nearest_divisors(batch // ranks, size) if size is not None and divides else []
    batches = [change.and_also(one) for change in each(key, nearest_multiples(total, unit))]
    return [*batches, *each("train.microbatch_size", smaller)]


def _chunks(layout: Layout) -> int:
    """Number of virtual stages on each rank; 1 unless the schedule is interleaved."""
    return layout.virtual_stages if layout.schedule == "interleaved" else 1


def _layers_given(layout: Layout) -> list[int]:
    """The layers of each virtual stage, if the config gives them."""
    return [int(number) for number in layout.cut.split(",")] if layout.cut[:1].isdecimal() else []


def _wrong_layers(candidate: Candidate) -> Iterator[Refusal]:
    """Refuse numbers of layers that are not those of the model, or not one for each virtual stage."""
    given, stages, layers = _layers_given(candidate.layout), _virtual_stages(candidate), candidate.model.num_layers
    wrong = []
    if given and len(given) != stages:
        wrong.append(f"{counted(len(given), 'number')} for {counted(stages, 'stage')} (pp x virtual_stages)")
    if given and sum(given) != layers:
        wrong.append(f"together {counted(sum(given), 'layer')}, and the model has {layers}")
    if wrong:
        said = f'parallel.cut = "{candidate.layout.cut}": {"; ".join(wrong)}'
        yield Refusal(said, [Change({"parallel.cut": "cost"})])


def _virtual_stages(candidate: Candidate) -> int:
    """Number of virtual stages of all ranks."""
    return candidate.mesh.pp * candidate.layout.virtual_stages


def _cut_between(layout: Layout) -> bool:
    return layout.cut == "encoder-decoder"


def depths_of(candidate: Candidate) -> tuple[tuple[int, int], ...]:
    """First depth and end of each virtual stage: equal costs (`cut`), or cut at the first decoder layer (`cut_at`), or
    with given numbers of layers: the embedding is before the first one, and the head behind the last one."""
    costs, parts = candidate.model.forward_flops, _virtual_stages(candidate)
    if given := _layers_given(candidate.layout):
        ends = [1 + sum(given[:number]) for number in range(len(given) + 1)]
        return tuple(zip([0, *ends[1:-1]], [*ends[1:-1], len(costs)], strict=True))
    between = _cut_between(candidate.layout)
    return cut_at(costs, parts, candidate.model.encoder_layers + 1) if between else cut(costs, parts)


def _fits(candidate: Candidate) -> bool:
    degree, layout = candidate.mesh.pp, candidate.layout
    problems = refusals(layout.schedule, degree, candidate.work.num_microbatches, _chunks(layout))
    if degree == 1:
        return not _cut_between(layout)
    return candidate.model.num_layers >= degree * _chunks(layout) and not list(problems)
