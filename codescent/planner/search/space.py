"""In: a config, a number of ranks, the keys that stay. Out: every combination of the keys of a layout, by frames.
Does not know what build refuses (rules.py asks it) and does not price anything."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

from codescent.base.nearest import divisors
from codescent.base.refusal import Change, Value
from codescent.build.accept import candidate_of, changed, mesh_of, update_of
from codescent.build.resolve import Resolved, resolve
from codescent.config.contradictions import is_given
from codescent.config.decided import with_device, with_samples
from codescent.config.effects import ONLY, value_of
from codescent.config.parallel import CHOSEN
from codescent.config.sections import SECTIONS, Config
from codescent.plan import AXES, Mesh, Scalar
from codescent.strategies import Candidate

MICROBATCH = "train.microbatch_size"
DEGREES = tuple(f"parallel.{axis}" for axis in AXES)
PP = "parallel.pp"
OFFLOAD = "parallel.offload"
SCHEDULE, VIRTUAL = "parallel.schedule", "parallel.virtual_stages"
OPTIONS = tuple(key for key in CHOSEN if key not in (*DEGREES, MICROBATCH))
"""The searched keys beside the degrees of the mesh and the micro-batch. Each is a field of `Layout`."""
SEARCHED = CHOSEN

Options = Mapping[str, Value]
"""Values of some of OPTIONS."""


class LayoutFrame(NamedTuple):
    """What is chosen first: the degrees of the mesh, samples of a micro-batch, micro-batches of a step."""

    mesh: Mesh
    microbatch_size: int
    microbatches: int


class Space:
    """All combinations of the searched keys that a mesh of the ranks and the batch admit.

    Args:
        config: of the run.
        vocab_size: see `build.resolve`.
        ranks: of the run.
        given: the searched keys that keep the value of the config. The others start from their defaults.
        device: the kind of device, where the config leaves it open.
        offloads: whether parallel.offload is searched. It makes no layout faster: where others fit, it is left out.

    Raises:
        UserError: the model or the task has problems.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int | None,
        ranks: int,
        given: Collection[str],
        device: str,
        *,
        offloads: bool = True,
    ) -> None:
        self.vocab_size, self.ranks, self.offloads = vocab_size, ranks, offloads
        self.given = frozenset(given) & set(SEARCHED)
        if config.train.device == "auto":
            config = with_device(config, device)
        self.start = changed(config, Change({key: default_of(key) for key in SEARCHED if key not in self.given}))
        self.resolved: Resolved = resolve(self.start, vocab_size)
        self.config = with_samples(self.start, self.resolved.sample_tokens)
        self.samples = self.config.train.global_batch_size
        self._updates: dict[int, Mapping[str, Scalar]] = {}

    def on(self, ranks: int) -> Space:
        """The same space on another number of ranks."""
        return Space(self.start, self.vocab_size, ranks, self.given, self.start.train.device, offloads=self.offloads)

    def without_offload(self) -> Space:
        """The same space, but for layouts that offload. If the config gives parallel.offload, it keeps its value."""
        return Space(self.start, self.vocab_size, self.ranks, self.given, self.start.train.device, offloads=False)

    @cached_property
    def candidate(self) -> Candidate:
        """The candidate of the config itself, which is not looked at for problems."""
        mesh = mesh_of(self.config, self.ranks)
        size = self.config.train.microbatch_size or max(1, self.samples // mesh.dp)
        found = candidate_of(
            self.config, self.resolved, mesh, self.ranks, (size, max(1, self.samples // mesh.dp // size))
        )
        return dataclasses.replace(found, advises=False)

    def frames(self) -> Iterator[LayoutFrame]:
        """Every mesh of the ranks, with every micro-batch that divides what a data-parallel rank has of a step."""
        for mesh in self._meshes() if self.candidate.whole_samples else ():
            share, rest = divmod(self.samples, mesh.dp)
            if rest:
                continue
            for size in sorted(set(self._sizes(share))):
                if share % size == 0:
                    yield LayoutFrame(mesh, size, share // size)

    def _meshes(self, *degrees: int) -> Iterator[Mesh]:
        axis, left = len(degrees), self.ranks
        for degree in degrees:
            left //= degree
        if axis == len(AXES):
            if left == 1:
                yield Mesh(**dict(zip(AXES, degrees)))
            return
        fixed = value_of(self.config, DEGREES[axis]) if DEGREES[axis] in self.given else None
        if fixed is not None:
            possible = [fixed] if left % fixed == 0 else []
        elif AXES[axis] in self.resolved.shape.undivided_axes:
            possible = [1]
        else:
            possible = sorted(set(divisors(left))) if axis < len(AXES) - 1 else [left]
        for degree in possible:
            yield from self._meshes(*degrees, degree)

    def _sizes(self, share: int) -> list[int]:
        if MICROBATCH not in self.given:
            return divisors(share)
        return [self.config.train.microbatch_size or share]

    def domain(self, key: str, frame: LayoutFrame, chosen: Options) -> tuple[Value, ...]:
        """The values of one of OPTIONS in a frame, in ascending order. A key without an effect has one value.

        `chosen`: the values of other options; VIRTUAL needs that of SCHEDULE.
        """
        if key in self.given:
            return (value_of(self.config, key),)
        only = ONLY.get(key)
        if only is not None and not only.test(self._value(only.key, frame, chosen)):
            return (default_of(key),)
        if key == OFFLOAD and not self.offloads:
            return (default_of(key),)
        if key == VIRTUAL:  # each virtual stage has a layer; where there are too few, build refuses the least
            return tuple(range(2, max(2, self.resolved.model.num_layers // frame.mesh.pp) + 1))
        return choices_of(key)

    def decides(self, key: str) -> set[str]:
        """The keys of frames that decide the values of an option (`domain`)."""
        only = ONLY.get(key)
        return ({only.key} if only else set()) | ({PP} if key == VIRTUAL else set())

    def domains(self, frame: LayoutFrame) -> tuple[Any, ...]:
        """What decides the values of all options in a frame: frames where it is equal have the same."""
        axes = ((only, only.key.partition(".")[2]) for only in map(ONLY.get, OPTIONS) if only is not None)
        return (frame.mesh.pp, *(only.test(getattr(frame.mesh, axis)) for only, axis in axes if axis in AXES))

    def _value(self, key: str, frame: LayoutFrame, chosen: Options) -> Any:
        section, _, name = key.partition(".")
        return getattr(frame.mesh, name) if section == "parallel" and name in AXES else chosen[key]

    def candidate_with(self, frame: LayoutFrame, options: Options) -> Candidate:
        """The candidate of a frame with some options; the others have their values of the config."""
        work = dataclasses.replace(
            self.candidate.work, microbatch_size=frame.microbatch_size, num_microbatches=frame.microbatches
        )
        layout = dataclasses.replace(self.candidate.layout, **fields_of(options))
        return dataclasses.replace(
            self.candidate,
            mesh=frame.mesh,
            work=work,
            layout=layout,
            update=self.update(frame.mesh),
            microbatch_size=frame.microbatch_size,
        )

    def update(self, mesh: Mesh) -> Mapping[str, Scalar]:
        """See `Plan.update`."""
        if mesh.dp not in self._updates:
            self._updates[mesh.dp] = update_of(self.config, mesh)
        return self._updates[mesh.dp]

    @cached_property
    def scales(self) -> bool:
        """Whether the update depends on the data-parallel ranks."""
        first, *others = (self.update(Mesh(dp_replicate=ranks)) for ranks in divisors(self.ranks))
        return any(one != first for one in others)

    def change(self, frame: LayoutFrame, options: Options) -> Change:
        """A layout as a change of the config: all searched keys that are not given and have an effect."""
        values: dict[str, Value] = {key: frame.mesh.degree(axis) for key, axis in zip(DEGREES, AXES)}
        values |= {MICROBATCH: frame.microbatch_size, **options}
        return Change({key: value for key, value in values.items() if key not in self.given})


def given_keys(config: Config) -> dict[str, Value]:
    """The searched keys that a file or a command line gives, with their values. In a search they stay."""
    return {key: value_of(config, key) for key in SEARCHED if is_given(config, key)}


def default_of(key: str) -> Value:
    """The default of a key of the config."""
    section, _, name = key.partition(".")
    found: Value = SECTIONS[section].model_fields[name].default
    return found


def fields_of(options: Options) -> dict[str, Any]:
    """Options by the names of their fields of `Layout`."""
    return {key.partition(".")[2]: value for key, value in options.items()}


@cache
def choices_of(key: str) -> tuple[Value, ...]:
    """All values of a key with few of them, in the order in which the config declares them."""
    section, _, name = key.partition(".")
    field = SECTIONS[section].model_fields[name]
    if field.annotation is bool:
        return (True, False)
    if field.annotation is int:
        bounds = {type(bound).__name__: bound for bound in field.metadata}
        return tuple(range(bounds["Ge"].ge, bounds["Le"].le + 1))
    return typing.get_args(field.annotation)
