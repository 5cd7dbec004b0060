"""In: a frame of a search. Out: the combinations of the other keys that build admits there, as factors of a product.
Has no rule of its own: it asks those of build, and each only about the keys that it reads. Builds no plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from codescent.base.refusal import Value
from codescent.build.plan import bare_plan, trajectory_of
from codescent.build.rules import rules
from codescent.clusters.cluster import Cluster
from codescent.config.sections import Config
from codescent.plan import AXES
from codescent.planner.prediction import not_priced
from codescent.planner.search.reads import MICROBATCHES, Reads, noting
from codescent.planner.search.space import DEGREES, MICROBATCH, OPTIONS, SCHEDULE, VIRTUAL, LayoutFrame, Options, Space
from codescent.strategies import Candidate

T = TypeVar("T")
Ask = Callable[[Config, Candidate], bool]
"""Whether a rule refuses a config and its candidate."""
Refused = Mapping[str, Value]
"""Values of options that are refused together, whatever the others are. Empty: every combination is refused."""


@dataclass(frozen=True)
class Admitted:
    """The combinations of options that a frame admits: each is one of each factor.

    Attributes:
        factors: lists of options. Those of different lists are independent of each other.
        combinations: their number before anything is refused.
        refused: how many of them build refuses.
        other_losses: how many of the others change the losses.
        unpriced: how many of the others have no price.
    """

    factors: tuple[tuple[Options, ...], ...]
    combinations: int
    refused: int
    other_losses: int
    unpriced: int

    @property
    def number(self) -> int:
        """Of the combinations that are left."""
        return math.prod(map(len, self.factors))


class Rules:
    """What build admits and cost/ prices, frame by frame."""

    def __init__(self, space: Space, cluster: Cluster) -> None:
        self.space = space
        losses, device = trajectory_of(space.config, space.candidate), space.config.train.device

        def changes_losses(config: Config, candidate: Candidate) -> bool:
            if space.scales:  # by these ranks: they are read before `update` is made
                _ = candidate.mesh.dp
            return trajectory_of(config, candidate) != losses

        def has_no_price(config: Config, candidate: Candidate) -> bool:
            return any(True for _ in not_priced(bare_plan(config, candidate), cluster, device))

        self.build = [_Rule(space, _refuses(rule)) for rule in rules(space.resolved)]
        self.losses, self.price = _Rule(space, changes_losses), _Rule(space, has_no_price)
        self._found: dict[tuple[Any, ...], Admitted] = {}

    def admitted(self, frame: LayoutFrame) -> Admitted:
        """The combinations of a frame that build admits, that keep the losses of the config, and that have a price."""
        values = _values_of(frame)
        refused = [rule.refused(frame, values) for rule in self.build]
        losses, price = self.losses.refused(frame, values), self.price.refused(frame, values)
        same = (self.space.domains(frame), *map(id, refused), id(losses), id(price))  # `_Rule` keeps what it returns
        if same not in self._found:
            builds = [one for found in refused for one in found]
            steps: tuple[list[Refused], ...] = [], builds, [*builds, *losses], [*builds, *losses, *price]
            factors = [self._factors(frame, those) for those in steps]
            numbers = [math.prod(map(len, one)) for one in factors]
            left_out = (before - after for before, after in pairwise(numbers))
            self._found[same] = Admitted(factors[-1], numbers[0], *left_out)
        return self._found[same]

    def _factors(self, frame: LayoutFrame, refused: Sequence[Refused]) -> tuple[tuple[Options, ...], ...]:
        """Options that are refused together are in one factor."""
        if not all(refused):
            return ((),)
        groups: list[set[str]] = [{key} for key in OPTIONS]
        for together in ({SCHEDULE, VIRTUAL}, *map(set, refused)):
            joined = set[str]().union(*(group for group in groups if group & together))
            groups = [joined, *(group for group in groups if not group & together)]
        values: dict[tuple[str, ...], set[tuple[Value, ...]]] = {}
        for one in refused:
            values.setdefault(tuple(one), set()).add(tuple(one.values()))

        def admits(options: Options) -> bool:
            return not any(
                all(key in options for key in keys) and tuple(options[key] for key in keys) in those
                for keys, those in values.items()
            )

        combinations = (self._combinations(frame, [key for key in OPTIONS if key in group], {}) for group in groups)
        return tuple(tuple(filter(admits, options)) for options in combinations)

    def _combinations(self, frame: LayoutFrame, keys: Sequence[str], chosen: Options) -> Iterator[Options]:
        if not keys:
            yield chosen
            return
        for value in self.space.domain(keys[0], frame, chosen):
            yield from self._combinations(frame, keys[1:], {**chosen, keys[0]: value})


def _refuses(rule: Callable[[Config, Candidate], Any]) -> Ask:
    return lambda config, candidate: any(True for _ in rule(config, candidate))


class _Rule:
    """A rule, and its answers by the values that it has read: it depends on nothing else."""

    def __init__(self, space: Space, ask: Ask) -> None:
        self.space, self.ask = space, ask
        self._answers = _ByReads[tuple[bool, tuple[str, ...]]]()
        self._refused = _ByReads[tuple[Refused, ...]]()
        self._same: dict[tuple[Any, ...], tuple[Refused, ...]] = {}  # what is equal is one object

    def refused(self, frame: LayoutFrame, values: Mapping[str, Value]) -> tuple[Refused, ...]:
        """The options that are refused together in a frame. `values`: see `_values_of`."""
        found = self._refused.get(values)
        if found is None:
            read = set[str]()
            all_of_them = tuple(self._explore(frame, values, {}, read))
            found = self._same.setdefault(tuple(tuple(one.items()) for one in all_of_them), all_of_them)
            self._refused.add([key for key in values if key in read], values, found)
        return found

    def _explore(
        self, frame: LayoutFrame, values: Mapping[str, Value], chosen: Options, read: set[str]
    ) -> Iterator[Refused]:
        """Ask with the chosen options. An option that the rule also reads is then chosen in all possible ways.

        `read`: is given the keys of frames on which the answer depends.
        """
        options = dict(chosen)
        for key in OPTIONS:
            if key not in options:
                options[key] = self.space.domain(key, frame, options)[0]
        refuses, reads = self._answer(frame, {**values, **options}, options)
        read.update(reads)
        others = [key for key in OPTIONS if key in reads and key not in chosen]
        if not others:
            if refuses:
                yield chosen
            return
        key = others[0]
        read.update(self.space.decides(key))
        for value in self.space.domain(key, frame, chosen):
            yield from self._explore(frame, values, {**chosen, key: value}, read)

    def _answer(
        self, frame: LayoutFrame, values: Mapping[str, Value], options: Options
    ) -> tuple[bool, tuple[str, ...]]:
        """Whether the rule refuses, and what it has read."""
        found = self._answers.get(values)
        if found is None:
            reads: Reads = {}
            refuses = self.ask(*noting(self.space, frame, options, reads))
            if VIRTUAL in reads:  # which values it has depends on the schedule
                reads[SCHEDULE] = options[SCHEDULE]
            found = refuses, tuple(reads)
            self._answers.add(found[1], values, found)
        return found


class _ByReads(Generic[T]):
    """Answers by the values of the keys on which they depend. These keys may differ from answer to answer."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[tuple[Value, ...], T]] = {}

    def get(self, values: Mapping[str, Value]) -> T | None:
        """The answer for these values of all keys, if one is known."""
        for keys, answers in self._known.items():
            if (found := answers.get(tuple([values[key] for key in keys]))) is not None:
                return found
        return None

    def add(self, keys: Sequence[str], values: Mapping[str, Value], answer: T) -> None:
        """An answer that depends on these keys alone."""
        self._known.setdefault(tuple(keys), {})[tuple([values[key] for key in keys])] = answer


def _values_of(frame: LayoutFrame) -> dict[str, int]:
    values = {key: frame.mesh.degree(axis) for key, axis in zip(DEGREES, AXES, strict=True)}
    return {**values, MICROBATCH: frame.microbatch_size, MICROBATCHES: frame.microbatches}
