"""In: a config, the tokenizer's vocabulary size, the number of ranks. Out: the candidate from which a plan is built, or
all problems of the config, with changes that would do: each has been tried.
Does not build a plan (plan.py does). Strategies refuse what they cannot do (codescent/strategies)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from codescent import tasks
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal, each
from codescent.build.own import problems_of_own
from codescent.build.resolve import Resolved, has_sizes, needs_vocab_size, resolve, resolve_into
from codescent.build.rules import MAX_MICROBATCHES, batch_of, stages_of, unsupported
from codescent.config.decided import with_samples
from codescent.config.rate_schedules import end_of_decay, unread
from codescent.config.update_rules import own_rule
from codescent.plan import AXES, MOST_RANKS, Layout, Mesh, Scalar, Work, product_of
from codescent.strategies import ORDER, Candidate
from codescent.strategies.muon import decided
from codescent.strategies.refusals import near_copies, near_meshes, near_ranks, too_long

if TYPE_CHECKING:
    from codescent.config.sections import Config, Parallel

ANY_VOCAB_SIZE = 1 << 16
"""Stands for a vocabulary that is not known yet."""

SINCE_FIRST = {"decay_steps", "min_learning_rate"}
"""Keys of schedules that every plan has, also where the schedule does not read them."""

MOST_TRIED = 64
"""Changes, or combinations of them, that are tried. Each takes some milliseconds, also of a large model."""

Accepted = tuple["Config", Resolved, Candidate]
"""The config with the samples of a step, its model and task, and the candidate from which its plan is built."""


def accepted(config: Config, vocab_size: int | None, world_size: int) -> Accepted:
    """Look at all that decides whether a config has a plan.

    Raises:
        UserError: all problems of the config. A change that a `Refusal` names leaves fewer problems, with no other
            key, and so none if it is the only one.
    """
    problems, found = _look(config, vocab_size, world_size)
    if found is None:
        raise UserError(*problems)
    if not problems:
        return found
    number = len(problems) + _unpreparable(found)

    def does(change: Change) -> bool:
        try:
            other = changed(config, change)
        except ValueError:
            return False
        left, found = _look(other, vocab_size, change.ranks or world_size, advises=False)
        fewer = found is not None and len(left) + _unpreparable(found) < number
        return fewer and set(map(_key, left)) <= set(map(_key, problems))

    raise UserError(*(_with_changes(problem, does) for problem in problems))


def check_sizes(config: Config, world_size: int) -> None:
    """Check the sizes of the model before the data is prepared, which may take hours.

    Raises:
        UserError: sizes are missing or do not fit each other; with them all other problems that need no data, except
            those of a layout that is not chosen yet.
    """
    vocab_size = ANY_VOCAB_SIZE if needs_vocab_size(config) else None
    if has_sizes(config, vocab_size):
        return
    if config.parallel.layout == "auto":
        resolve(config, vocab_size)
    else:
        accepted(config, vocab_size, world_size)


def changed(config: Config, change: Change) -> Config:
    """The config with other values. Raises ValueError: it has no such value, or values contradict each other."""
    if not change.values:
        return config
    given = config.model_dump(exclude_unset=True)
    if config.train.global_batch_tokens is not None:  # decides the samples
        given["train"].pop("global_batch_size", None)
    for key, value in change.values.items():
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = value
    return type(config).model_validate(given)


def _key(problem: str) -> str:
    """The key that a problem begins with."""
    return problem.split(" ")[0].rstrip(":")


def _unpreparable(found: Accepted) -> int:
    """The number of problems that preparing the data would find."""
    request = found[1].request
    return len(list(tasks.task_of(request).unpreparable(request)))


def _with_changes(problem: str, does: Callable[[Change], bool]) -> str:
    """A problem with those of its changes that do."""
    return Refusal(problem.said, filter(does, problem.changes)) if isinstance(problem, Refusal) else problem


def _look(
    config: Config, vocab_size: int | None, world_size: int, *, advises: bool = True
) -> tuple[list[str], Accepted | None]:
    """All problems of a config, and what `accepted` returns; None if the model or the mesh cannot be looked at.

    `advises` False: the problems come without changes.
    """
    problems, found = _look_at_workers(config, vocab_size, max(1, world_size - _servers(config)), advises=advises)
    if servers := _servers(config):
        problems = [*_no_worker(servers, world_size), *(_with_servers(problem, servers) for problem in problems)]
    return problems, found


def _servers(config: Config) -> int:
    """Number of ranks that are servers and nothing else."""
    return config.parallel.servers if isinstance(config.parallel.servers, int) else 0


def _no_worker(servers: int, world_size: int) -> Iterator[str]:
    """A problem if all ranks are servers."""
    if servers >= world_size:
        fewer = each("parallel.servers", [world_size - 1] if world_size > 1 else [0])
        yield Refusal(
            f"parallel.servers = {servers}: leaves no worker of {counted(world_size, 'rank')}",
            [*fewer, Change({}, servers + 1)],
        )


def _with_servers(problem: str, servers: int) -> str:
    """A problem of the workers. Its changes count them, and become changes that count all ranks."""
    if not isinstance(problem, Refusal):
        return problem
    changes = (
        change if change.ranks is None else dataclasses.replace(change, ranks=change.ranks + servers)
        for change in problem.changes
    )
    return Refusal(problem.said, changes)


def _look_at_workers(
    config: Config, vocab_size: int | None, world_size: int, *, advises: bool
) -> tuple[list[str], Accepted | None]:
    """See `_look`. `world_size`: ranks of the mesh."""
    problems = list(problems_of_own(config))
    if problems:  # what follows asks this code
        return problems, None
    resolved = resolve_into(config, vocab_size, problems)
    if resolved is None and config.train.global_batch_tokens is not None:  # the samples of a step are unknown
        return problems, None
    config = with_samples(config, resolved.sample_tokens if resolved else 0)
    mesh = mesh_of(config, world_size)
    if too_many := list(_too_many(config, mesh, world_size)):
        return [*problems, *too_many], None
    batch = batch_of(config, mesh, resolved)
    wrong = batch if isinstance(batch, Refusal) else None
    if resolved is None:
        return [*problems, *filter(None, [wrong, _misfit(config, mesh, world_size)])], None
    # Without a solution: values that no strategy refuses, so that no second problem hides the first.
    asked = config.train.microbatch_size
    usual = asked or max(1, config.train.global_batch_size // mesh.dp), mesh.pp if asked else 1
    sizes = usual if isinstance(batch, Refusal) else batch
    candidate = dataclasses.replace(candidate_of(config, resolved, mesh, world_size, sizes), advises=advises)
    others = [*too_long(candidate, resolved.shape.seq_len), *unsupported(config, resolved, candidate)]
    others += _unsettled(config)

    def builds(other: Candidate) -> bool:
        return not (problems or others) and _builds(other)

    misfit = _misfit(config, mesh, world_size)
    if misfit and advises:
        misfit = Refusal(misfit.said, _fitting(config, candidate, builds))
    if wrong and misfit and misfit.changes:  # which include a batch
        wrong = Refusal(wrong.said)
    elif wrong and advises:
        wrong = Refusal(wrong.said, [*wrong.changes, *_on_near_ranks(config, candidate, builds)])
    refused = (problem for strategy in ORDER for problem in strategy.refuse(candidate))
    found = [*filter(None, [misfit]), *problems, *filter(None, [wrong]), *others, *refused]
    return found, (config, resolved, candidate)


def candidate_of(config: Config, resolved: Resolved, mesh: Mesh, world_size: int, batch: tuple[int, int]) -> Candidate:
    """The candidate of a config on a mesh, whether or not anything refuses it. `batch`: see `batch_of`."""
    microbatch_size, num_microbatches = batch
    work = Work(
        seq_len=resolved.seq_len,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        precision=config.train.precision,
        streams=resolved.shape.streams,
        prefetch=config.data.prefetch,
        fp8="" if config.train.fp8 == "none" else config.train.fp8,
        fp8_emulated=config.train.fp8 != "none" and config.train.fp8_emulated,
    )
    return Candidate(
        mesh=mesh,
        model=resolved.model,
        task=resolved.task,
        work=work,
        layout=_layout(config.parallel),
        world_size=world_size,
        microbatch_size=config.train.microbatch_size,
        update=update_of(config, mesh),
        batch_tokens=config.train.global_batch_tokens or 0,
        sample_tokens=resolved.sample_tokens,
        due={
            "train.eval_every": config.train.eval_every,
            "checkpoint.every": config.checkpoint.every,
            "train.num_steps": config.train.num_steps if config.train.num_epochs is None else 0,
        },
    )


def _layout(parallel: Parallel) -> Layout:
    """The keys of [parallel] that a plan keeps. A period in epochs is one step here: `_unsettled` refuses it."""
    values = {field.name: getattr(parallel, field.name) for field in dataclasses.fields(Layout)}
    period = values["average_every"]
    return Layout(**{**values, "average_every": 1 if isinstance(period, str) else period})


def _unsettled(config: Config) -> Iterator[str]:
    """A problem if a period in epochs is not known in steps yet."""
    if isinstance(period := config.parallel.average_every, str):
        yield (
            f'parallel.average_every = "{period}": the steps of an epoch are unknown until the data is prepared, '
            "which `codescent train` does first; to plan without it, give a number of steps"
        )


def update_of(config: Config, mesh: Mesh) -> dict[str, Scalar]:
    """The keys of [optimizer] that decide what a step does to the weights, with their values for this mesh."""
    optimizer, train = config.optimizer, config.train
    num_steps = train.num_steps if train.num_epochs is None else None  # None: unknown before the data is prepared
    left_out = {"fused", "scale_ranks", *unread(optimizer) - SINCE_FIRST}
    return {
        **decided(optimizer.model_dump(exclude=left_out), train.precision),
        "decay_steps": end_of_decay(optimizer, num_steps),
        **({} if (rule := own_rule(optimizer)) is None else {"elementwise": rule.elementwise}),
        "num_workers": 1 if optimizer.scale_learning_rate == "none" else optimizer.scale_ranks or mesh.dp,
    }


def mesh_of(config: Config, world_size: int) -> Mesh:
    """The mesh of the config; if parallel.dp_replicate is auto, with as many copies as make the run's ranks."""
    mesh = Mesh(**{axis: getattr(config.parallel, axis) or 1 for axis in AXES})
    left, rest = divmod(world_size, mesh.world_size // mesh.dp_replicate)
    return mesh if config.parallel.dp_replicate or rest else dataclasses.replace(mesh, dp_replicate=left)


def _too_many(config: Config, mesh: Mesh, world_size: int) -> Iterator[str]:
    """A problem if nobody has so many ranks: no other check of the mesh is of use then."""
    for place, ranks in (("parallel.ranks", world_size), (f"parallel: {_equation(config)}", mesh.world_size)):
        if ranks > MOST_RANKS:
            yield f"{place} = {ranks} ranks: more than anybody has; give at most {MOST_RANKS:,}"
            return


def _equation(config: Config) -> str:
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    return product_of({axis: degree for axis, degree in degrees.items() if degree is not None})


def _misfit(config: Config, mesh: Mesh, ranks: int) -> Refusal | None:
    """A problem if the size of the mesh is not the number of ranks."""
    if mesh.world_size == ranks:
        return None
    servers = _servers(config)
    serve = f", {servers:,} of which only serve{'s' * (servers == 1)}" if servers else ""
    said = f"{counted(mesh.world_size, 'rank')}, but the run has {ranks + servers:,}{serve}"
    if config.parallel.dp_replicate is None:
        one = f"{mesh.world_size:,} ranks for one copy of the model"
        said = f"{one}, which do not divide the run's {counted(ranks, 'worker' if servers else 'rank')}"
    return Refusal(f"parallel: {_equation(config)} = {said}")


def _fitting(config: Config, candidate: Candidate, builds: Callable[[Candidate], bool]) -> list[Change]:
    """The nearest meshes of the run's ranks and the nearest numbers of ranks, each with a batch that they can share."""
    mesh, ranks = candidate.mesh, candidate.world_size
    near, copies = [], [mesh.dp_replicate]
    if config.parallel.dp_replicate is None:
        near = [Change({}, number) for number in near_ranks(candidate, ranks / mesh.world_size, builds)]
        copies = [ranks // mesh.world_size, ranks // mesh.world_size + 1]
    return near_meshes(candidate, _builds) + (near or near_copies(candidate, copies, builds))


def _builds(candidate: Candidate) -> bool:
    """Whether no strategy refuses a candidate, and no plan would be too long."""
    mesh, microbatches = candidate.mesh, candidate.work.num_microbatches
    if mesh.world_size > MOST_RANKS or microbatches * stages_of(candidate.layout, mesh) > MAX_MICROBATCHES:
        return False
    candidate = dataclasses.replace(candidate, advises=False)
    return not any(True for strategy in ORDER for _ in strategy.refuse(candidate))


def _on_near_ranks(config: Config, candidate: Candidate, builds: Callable[[Candidate], bool]) -> list[Change]:
    """The nearest numbers of ranks that can share the batch equally."""
    mesh, ranks = candidate.mesh, near_ranks(candidate, candidate.mesh.dp_replicate, builds)
    if config.parallel.dp_replicate is None:
        return [Change({}, number) for number in ranks]
    one = mesh.world_size // mesh.dp_replicate
    return [Change({"parallel.dp_replicate": number // one}, number) for number in ranks]
