"""In: the config of a run, its ranks, the ranks that are left. Out: the config of the largest layout for them.
Does not know who is left, and moves no tensor (train does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.nearest import divisors
from codescent.base.refusal import Change, Refusal, Value
from codescent.build.accept import accepted, changed, update_of
from codescent.build.plan import bare_plan, build, trajectory_of
from codescent.build.rules import Rule, rules
from codescent.build.survival import parts
from codescent.plan import AXES, Mesh, Plan, Scalar
from codescent.strategies import Candidate

if TYPE_CHECKING:
    from codescent.config.sections import Config

MODEL_AXES = ("tp", "cp", "pp")
"""These degrees never grow: matrices, sequences and layers would be cut finer than the user has asked for."""
NEAREST = (*MODEL_AXES, "ep", "dp_shard", "dp_replicate")
"""Of two layouts with as many ranks, the one is taken whose first axis here is nearer to what it was."""
DEGREES = frozenset(f"parallel.{axis}" for axis in AXES)

Fits = Callable[[Plan], bool]
"""Whether each rank of a plan has room in its memory."""


@dataclass(frozen=True)
class Shrunk:
    """How a run goes on with other ranks.

    Attributes:
        config: of the run, on these ranks.
        ranks: that take part.
        spares: ranks without a place, which wait.
        notes: sentences on what else changes.
        keeps_losses: whether the losses are those of the run left alone, up to rounding.
        parts: of the trained state, for each rank that trains: those with the same number hold the same.
    """

    config: Config
    ranks: int
    spares: int = 0
    notes: tuple[str, ...] = ()
    keeps_losses: bool = True
    parts: tuple[int, ...] = ()


def shrunk(config: Config, vocab_size: int | None, ranks: int, left: int, fits: Fits | None = None) -> Shrunk:
    """The largest layout of the ranks that are left which `build` admits, with the losses of the run.

    It depends on how the run began and on the ranks that are left, not on losses before. So each rank finds the same,
    and a run whose ranks have all come back has the layout with which it began.

    Args:
        config: with which the run began: its layout is given or chosen, the samples of a step are known.
        vocab_size: see `build`.
        ranks: with which the run began.
        left: ranks that are there now. More than `ranks` wait as spares.
        fits: leaves out plans that are too large; None: the memory is not asked about.

    Raises:
        UserError: all problems of the config; or there is no such layout.
    """
    if left >= ranks:
        return Shrunk(config, ranks, left - ranks, parts=parts(build(config, vocab_size, ranks)))
    search = _Search(config, vocab_size, ranks, fits)
    for mesh in search.meshes(left):
        if (found := search.on(mesh, left)) is not None:
            return found
    for mesh in search.fewer_replicas(left):
        if (found := search.on(mesh, left, keeps_losses=False)) is not None:
            return found
    raise UserError(search.refusal(left))


class _Search:
    """The layouts of a run with fewer ranks. Candidates are tried first, as a plan takes longer."""

    def __init__(self, config: Config, vocab_size: int | None, ranks: int, fits: Fits | None) -> None:
        self.vocab_size, self.fits = vocab_size, fits
        with_samples, resolved, self.candidate = accepted(config, vocab_size, ranks)
        began = bare_plan(with_samples, self.candidate)
        self.mesh, self.losses, self.decides = began.mesh, began.trajectory(), began.decides
        self.scale_ranks = began.scale_ranks
        self.config, self.settled = (_at_rate_of(one, self.scale_ranks) for one in (config, with_samples))
        self.outside = ranks - self.mesh.world_size  # ranks that do not train
        self.starts_all = config.parallel.ranks == ranks
        self.rules: tuple[Rule, ...] = rules(resolved)

    def meshes(self, left: int) -> Iterator[Mesh]:
        """The meshes of at most so many ranks that can share the batch: the largest first, then the nearest."""
        for workers in range(left - self.outside, 0, -1):
            yield from sorted(self._meshes_of(workers), key=self._distance)

    def _meshes_of(self, workers: int) -> Iterator[Mesh]:
        batch = self.candidate.work.global_batch_size
        for tp in _degrees(workers, self.mesh.tp):
            for cp in _degrees(workers // tp, self.mesh.cp):
                for pp in _degrees(workers // tp // cp, self.mesh.pp):
                    dp = workers // tp // cp // pp
                    if batch % dp:
                        continue
                    for ep in _degrees(dp, self.mesh.ep):
                        yield from (Mesh(pp, dp // ep // shard, shard, ep, cp, tp) for shard in divisors(dp // ep))

    def _distance(self, mesh: Mesh) -> tuple[float, ...]:
        pairs = ((mesh.degree(axis), self.mesh.degree(axis)) for axis in NEAREST)
        far = [max(now, before) / min(now, before) for now, before in pairs]
        return *far, *(-mesh.degree(axis) for axis in NEAREST)  # more of the first axis, where both are as far

    def fewer_replicas(self, left: int) -> Iterator[Mesh]:
        """The meshes with fewer replicas alone, for methods of which their number decides the losses."""
        for number in range(self.mesh.dp_replicate - 1, 0, -1):
            mesh = replace(self.mesh, dp_replicate=number)
            if mesh.world_size + self.outside <= left and self.candidate.work.global_batch_size % mesh.dp == 0:
                yield mesh

    def on(self, mesh: Mesh, left: int, *, keeps_losses: bool = True) -> Shrunk | None:
        """The run on a mesh; None: it is refused, has other losses, or does not fit."""
        for other in self._candidates(mesh):
            if not self._admits(other, keeps_losses=keeps_losses):
                continue
            ranks = mesh.world_size + self.outside
            try:
                config = changed(self.config, Change(self._values(other, ranks)))
                plan = build(config, self.vocab_size, ranks)
            except (UserError, ValueError):  # of values that contradict each other
                continue
            if self.fits is None or self.fits(plan):
                notes = tuple(self._notes(other, left, keeps_losses=keeps_losses))
                return Shrunk(config, ranks, left - ranks, notes, keeps_losses, parts(plan))
        return None

    def _candidates(self, mesh: Mesh) -> Iterator[Candidate]:
        """The mesh with each micro-batch: first those that need no more memory than the one of before."""
        before, share = self.candidate.work.microbatch_size, self.candidate.work.global_batch_size // mesh.dp
        sizes = sorted(divisors(share), key=lambda size: (size > before, abs(size - before)))
        for size in dict.fromkeys(sizes):
            work = replace(self.candidate.work, microbatch_size=size, num_microbatches=share // size)
            yield replace(
                self.candidate,
                mesh=mesh,
                work=work,
                world_size=mesh.world_size,
                microbatch_size=size,
                update=update_of(self.settled, mesh),
                advises=False,
            )

    def _admits(self, other: Candidate, *, keeps_losses: bool) -> bool:
        if any(True for rule in self.rules for _ in rule(self.settled, other)):
            return False
        differs = _differing(self.losses, trajectory_of(self.settled, other))
        return not differs if keeps_losses else differs <= DEGREES

    def _values(self, other: Candidate, ranks: int) -> dict[str, Value]:
        """What changes in the config."""
        mesh, before, size = other.mesh, self.mesh, other.work.microbatch_size
        values: dict[str, Value] = {
            f"parallel.{axis}": mesh.degree(axis) for axis in AXES if mesh.degree(axis) != before.degree(axis)
        }
        values["parallel.dp_replicate"] = mesh.dp_replicate
        if size != self.settled.train.microbatch_size and (
            self.settled.train.microbatch_size or other.work.num_microbatches > 1
        ):
            values["train.microbatch_size"] = size
        return {**values, **({"parallel.ranks": ranks} if self.starts_all else {})}

    def _notes(self, other: Candidate, left: int, *, keeps_losses: bool) -> Iterator[str]:
        work, was, ranks = other.work, self.candidate.work, other.mesh.world_size + self.outside
        if spares := left - ranks:
            waits = "waits as a spare" if spares == 1 else "wait as spares"
            batch = f"train.global_batch_size = {work.global_batch_size}"
            more = f"no layout of more than {counted(ranks, 'rank')} goes on with the same losses and {batch}"
            yield f"{counted(spares, 'rank')} {waits}: {more}"
        if not keeps_losses:
            key, value = next((key, value) for key, value in self.decides.items() if key not in DEGREES)
            before, now = self.mesh.dp_replicate, other.mesh.dp_replicate
            yield (
                f"{key} = {_written(value)}: the losses depend on the number of replicas; there are {now} instead of "
                f"{before}, so from now on they are not those of the run left alone"
            )
        if (rule := self.config.optimizer.scale_learning_rate) != "none":
            yield (
                f'optimizer.scale_learning_rate = "{rule}": the batch is the same, so the learning rate stays that of '
                f"{counted(self.scale_ranks, 'data-parallel rank')}"
            )
        if work.microbatch_size != was.microbatch_size:
            yield f"train.microbatch_size: {work.microbatch_size} instead of {was.microbatch_size}"
        before_parts, parts = _parts(self.mesh), _parts(other.mesh)
        if parts < before_parts:
            yield f"a rank holds up to {before_parts / parts:.3g} times as much of weights and optimizer state"

    def refusal(self, left: int) -> str:
        """Why there is no layout."""
        said = f"no layout of at most {counted(left, 'rank')} goes on with the losses of the run"
        if left <= self.outside:
            beside = f", beside {counted(self.outside, 'rank')} that must only serve" if self.outside else ""
            return f"{said}: none is left to train{beside}"
        alone = Mesh()
        other = next(self._candidates(alone))
        problem = next((found for rule in self.rules for found in rule(self.settled, other)), None)
        if problem is not None:
            return f"{said}: on one rank, {problem.said if isinstance(problem, Refusal) else problem}"
        differs = _differing(self.losses, trajectory_of(self.settled, other)) - DEGREES
        if differs:
            return f"{said}: {', '.join(sorted(differs))} would have another value"
        return f"{said}: those that have them do not fit in memory"


def _at_rate_of(config: Config, ranks: int) -> Config:
    """The config with the learning rate that so many data-parallel ranks have."""
    if config.optimizer.scale_learning_rate == "none":
        return config
    optimizer = config.optimizer.model_copy(update={"scale_ranks": ranks})
    return config.model_copy(update={"optimizer": optimizer})


def _degrees(ranks: int, most: int) -> Iterator[int]:
    return (degree for degree in range(most, 0, -1) if ranks % degree == 0)


def _parts(mesh: Mesh) -> int:
    """Into how many parts weights or optimizer state may be cut."""
    return mesh.tp * mesh.pp * mesh.dp_shard * mesh.ep


def _differing(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> set[str]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def _written(value: Scalar) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
