"""In: a config, its resolved model, a candidate. Out: the rules that may refuse a layout, each apart from the others.
Does not try changes that would do (accept.py does), and has no rule of a strategy (codescent/strategies has)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from codescent import models, tasks
from codescent.base.nearest import divisors, nearest_divisors, nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.build import experts, few_bits, mtp, mup, rollouts
from codescent.build.resolve import Resolved
from codescent.config.contradictions import contradictions
from codescent.config.decided import undivided
from codescent.plan import AXES, Layout, Mesh
from codescent.strategies import ORDER, Candidate, Strategy, active
from codescent.strategies.refusals import near_degrees, too_long

if TYPE_CHECKING:
    from codescent.config.sections import Config, Parallel

MAX_MICROBATCHES = 100_000
"""Largest number of micro-batches of a step, times virtual stages: a plan has an instruction for each."""

_WHOLE = "optimizer.kind = {} updates whole tensors (it does not say elementwise = True), and this axis cuts them"

Rule = Callable[["Config", Candidate], Iterable[str]]
"""The problems that one rule finds, of a config and the candidate of its layout."""


def rules(resolved: Resolved) -> tuple[Rule, ...]:
    """All rules that may refuse a layout of the run's ranks, in which each data-parallel rank has whole micro-batches.

    Each reads few keys. Who asks about many layouts may ask a rule once for all that differ in other keys.
    """
    return (
        lambda config, _: (problem for _, problem in contradictions(config)),
        lambda _, candidate: _too_many_microbatches(candidate),
        lambda _, candidate: too_long(candidate, resolved.shape.seq_len),
        lambda config, candidate: unsupported(config, resolved, candidate),
        *(_of_strategy(strategy) for strategy in ORDER),
    )


def _of_strategy(strategy: Strategy) -> Rule:
    return lambda _, candidate: strategy.refuse(candidate)


def _too_many_microbatches(candidate: Candidate) -> Iterator[str]:
    number, stages = candidate.work.num_microbatches, stages_of(candidate.layout, candidate.mesh)
    if number * stages > MAX_MICROBATCHES:
        yield f"{number} micro-batches on {stages} stages"


def stages_of(layout: Parallel | Layout, mesh: Mesh) -> int:
    """Number of (virtual) stages: each has a program with an instruction for each micro-batch."""
    return mesh.pp * (layout.virtual_stages if layout.schedule == "interleaved" else 1) if mesh.pp > 1 else 1


def batch_of(config: Config, mesh: Mesh, resolved: Resolved | None) -> tuple[int, int] | Refusal:
    """(microbatch_size, num_microbatches) from: global_batch_size = dp x microbatch_size x num_microbatches.

    If there is no solution, the problem.
    """
    size, microbatch = config.train.global_batch_size, config.train.microbatch_size
    multiple, stages = mesh.pp if config.parallel.schedule == "interleaved" else 1, stages_of(config.parallel, mesh)
    unit = mesh.dp * (microbatch or 1) * multiple
    if wrong := undivided(config, resolved.sample_tokens, mesh.dp, unit) if resolved else None:
        return wrong
    share, rest = divmod(size, mesh.dp)
    if rest:
        return Refusal(
            f"train.global_batch_size = {size} does not divide into {mesh.dp} data-parallel ranks",
            each("train.global_batch_size", nearest_multiples(size, unit)),
        )
    if microbatch is None:
        return share, 1
    if share % microbatch:
        sizes = [] if share % multiple else nearest_divisors(share // multiple, microbatch)
        return Refusal(
            f"train.microbatch_size = {microbatch}: {size} (global_batch_size) = {mesh.dp} (data-parallel ranks) x "
            f"{microbatch} (microbatch_size) x {share / microbatch:g}, which is not a whole number of micro-batches",
            each("train.microbatch_size", sizes),
        )
    if share // microbatch * stages > MAX_MICROBATCHES and not (resolved and stages > resolved.model.num_layers):
        where = f" on each of {stages:,} stages" if stages > 1 else ""
        return Refusal(
            f"train.microbatch_size = {microbatch}: a step would have {share // microbatch:,} micro-batches{where}, "
            f"more than {MAX_MICROBATCHES:,}",
            each("train.microbatch_size", _larger(share // multiple, -(-share * stages // MAX_MICROBATCHES))),
        )
    return microbatch, share // microbatch


def _larger(share: int, least: int) -> list[int]:
    """The smallest divisor of a share of samples that is at least `least`, if there is one."""
    return sorted(number for number in divisors(share) if number >= least)[:1]


def _without(refused: Mapping[str, str], candidate: Candidate) -> Iterator[str]:
    """A problem for each key of [parallel] that is set although the model does not support it."""
    for key, why in refused.items():
        mesh, is_axis = candidate.mesh, key in AXES
        value = mesh.degree(key) if is_axis else getattr(candidate.layout, key)
        if value > 1 if is_axis else value and mesh.tp > 1:
            without = _one(candidate, key) if is_axis else [Change({f"parallel.{key}": False})]
            yield Refusal(f"parallel.{key} = {str(value).lower()}: {why}", without)


def _without_values(
    refused: Mapping[str, tuple[tuple[object, ...], str]], parallel: Parallel, candidate: Candidate
) -> Iterator[Refusal]:
    """A problem for each key of [parallel] with a value that the model does not support."""
    for key, (values, why) in refused.items():
        if (value := getattr(candidate.layout, key)) in values:
            field = type(parallel).model_fields[key]
            words = [word for word in get_args(field.annotation) if word != field.default]  # numbers have none
            others = [Change({f"parallel.{key}": one}) for one in (*words, field.default) if one not in values]
            yield Refusal(f"parallel.{key} = {json.dumps(value)}: {why}", others)


def _one(candidate: Candidate, axis: str) -> list[Change]:
    return near_degrees(candidate, axis, 1, lambda other: other.mesh.degree(axis) == 1)


def _without_average(config: Config, candidate: Candidate) -> Iterator[Refusal]:
    """A problem if ranks have other weights than those of the run after some steps."""
    for key in dict.fromkeys(strategy.weights_apart_by for strategy in active(candidate)):
        if key:
            value, without = json.dumps(getattr(candidate.layout, key)), type(config.parallel).model_fields[key].default
            yield Refusal(
                f"train.ema = {config.train.ema}: with parallel.{key} = {value} no rank has the weights of the run "
                "after each step, so there is no one average of them",
                [Change({"train.ema": 0.0}), Change({f"parallel.{key}": without})],
            )


def unsupported(config: Config, resolved: Resolved, candidate: Candidate) -> Iterator[str]:
    """Problems with settings that model or task do not support: layouts, generating text, torch.compile."""
    kind = resolved.model.kind
    yield from _without(resolved.shape.refuses, candidate)
    if not candidate.update.get("elementwise", True):
        yield from _without(dict.fromkeys(("tp", "dp_shard"), _WHOLE.format(config.optimizer.kind)), candidate)
    yield from _without_values(resolved.shape.refuses_values, config.parallel, candidate)
    yield from tasks.refusals(resolved.request)
    if config.log.sample_tokens and not models.generates(kind):
        yield Refusal(
            f"log.sample_tokens = {config.log.sample_tokens}: only {' and '.join(models.GENERATING)} can generate "
            f'text, not model.kind = "{kind}"',
            [Change({"log.sample_tokens": 0})],
        )
    if config.profile.active and (key := candidate.layout.hands_out_by):
        without = type(config.parallel).model_fields[key].default
        yield Refusal(
            f"profile.active = {config.profile.active}: with parallel.{key} = "
            f"{json.dumps(getattr(candidate.layout, key))} ranks take different steps at a time, so they have no "
            "common window",
            [Change({"profile.active": 0}), Change({f"parallel.{key}": without})],
        )
    if config.train.fp8 != "none" and not resolved.shape.own_layers:
        yield Refusal(
            f'train.fp8 = "{config.train.fp8}": model.kind = "{kind}" has layers of another library',
            [Change({"train.fp8": "none"})],
        )
    yield from mup.refusals(config)
    yield from experts.refusals(config, resolved.shape, candidate)
    yield from mtp.refusals(config, resolved.request)
    if tasks.task_of(resolved.request).policy(resolved.request) is not None:
        yield from rollouts.refusals(config, resolved.shape, candidate)
    yield from few_bits.refusals(resolved, candidate)
    if config.train.ema:
        yield from _without_average(config, candidate)
    if config.train.cuda_graphs and (number := candidate.work.num_microbatches) > 1:
        yield Refusal(
            f"train.cuda_graphs = true: {number} micro-batches add up gradients that the next replay would overwrite",
            [Change({"train.cuda_graphs": False})],
        )
    if config.train.cuda_graphs and candidate.task.documents:
        yield Refusal(
            'train.cuda_graphs = true: with data.documents = "separate" the number of documents changes from step to '
            "step, and a graph replays equal sizes",
            [Change({"train.cuda_graphs": False}), Change({"data.documents": "joined"})],
        )
    why = models.uncompiled(kind, resolved.shape)
    if config.train.cuda_graphs and why:
        yield Refusal(
            f'train.cuda_graphs = true: model.kind = "{kind}" {why}',
            [Change({"train.cuda_graphs": False})],
        )
    if config.train.compile not in (None, "none") and why:
        yield Refusal(
            f'train.compile = "{config.train.compile}": model.kind = "{kind}" {why}',
            [Change({"train.compile": "none"})],
        )
