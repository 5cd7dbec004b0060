"""In: a config, rules of docs/which.md. Out: the first layout of a rule that builds and fits, and why others did not.
Does not choose the order of the rules (layout_rules.py does)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Refusal, Value
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.config.effects import value_of
from codescent.plan import AXES, Mesh, Plan
from codescent.planner.search.space import SEARCHED, default_of
from codescent.planner.which.facts import MICROBATCH, OFFLOAD, RankHolds, RunFacts, held_by
from codescent.planner.which.layout_rules import SCHEDULE, ZERO_STAGE, LayoutRule, MemorySteps

if TYPE_CHECKING:
    from codescent.config.sections import Config

COPIES = "parallel.dp_replicate"
LONG_STEP = 2
"""Micro-batches for each stage: with more the memory is the same."""


@dataclass(frozen=True)
class TriedLayout:
    """A layout that builds.

    Attributes:
        values: keys that the rule sets.
        plan: of the run.
        held: by its fullest rank.
        fits: whether this is at most what may be used.
    """

    values: Mapping[str, Value]
    plan: Plan
    held: RankHolds
    fits: bool


class RuleTrials:
    """Tries rules as plans.

    Attributes:
        refused: what `build` or the config says against layouts, in the order of the trials.
        other_values: by a key that is given: values that rules need instead.
        least: the layout that needs least of those that do not fit.
        ruled_out: whether a bound said of a layout that it does not fit.
    """

    def __init__(self, config: Config, vocab_size: int | None, facts: RunFacts) -> None:
        self._config, self._vocab_size, self._facts = config, vocab_size, facts
        self._tried: dict[tuple[tuple[str, Value], ...], TriedLayout | None] = {}
        self.refused: dict[str, None] = {}
        self.other_values: dict[str, dict[Value, None]] = {}
        self.least: TriedLayout | None = None
        self.ruled_out = False

    def first(self, rule: LayoutRule) -> TriedLayout | None:
        """The best layout of a rule that builds and fits; None: there is none."""
        if not self._admits(rule.mesh):
            return None
        steps = [one for one in rule.steps if self._stays(one.settings)]
        if not steps or not self._may_fit(rule, steps):
            return None
        return next((found for one in steps if (found := self._best_size(rule.mesh, one)) is not None), None)

    def may_fit(self, rule: LayoutRule) -> bool:
        """Whether a layout of a rule builds and fits."""
        steps = [one for one in rule.steps if self._stays(one.settings)]
        return bool(steps) and self._admits(rule.mesh) and self._may_fit(rule, steps)

    def _admits(self, mesh: Mesh) -> bool:
        return self._stays({f"parallel.{axis}": mesh.degree(axis) for axis in AXES})

    def _stays(self, values: Mapping[str, Value]) -> bool:
        """Whether keys that are given keep their value. "auto" is any value."""
        stays = True
        for key, value in values.items():
            given = self._facts.given.get(key)
            if given is not None and given != value:
                self.other_values.setdefault(key, {})[value] = None
                stays = False
        return stays

    def _may_fit(self, rule: LayoutRule, steps: list[MemorySteps]) -> bool:
        """Whether what needs least fits: the last step, with its smallest micro-batch or with all samples in one.

        A bound comes first: with state and activations divided equally.
        """
        mesh, facts = rule.mesh, self._facts
        stage = int(steps[-1].settings.get(ZERO_STAGE) or 1)
        offload = rule.offloads or facts.given.get(OFFLOAD, "none") != "none"
        if facts.least_bytes(mesh, stage, offload=offload) > facts.devices.usable_bytes:
            self.ruled_out = True
            return False
        sizes = sorted({size for one in steps for size in one.sizes})
        admitted = (found for size in sizes if (found := self._probed(mesh, steps[-1].settings, size)) is not None)
        smallest = next(admitted, None)
        if smallest is not None and smallest.fits:
            return True
        largest = self._probed(mesh, steps[-1].settings, sizes[-1])
        return largest is not None and largest.fits

    def _best_size(self, mesh: Mesh, steps: MemorySteps) -> TriedLayout | None:
        """The first micro-batch that builds and fits.

        If the smallest is too large, all but the first one are: a step of one micro-batch has smaller gradients.
        """
        sizes = steps.sizes
        falls = sizes[0] > sizes[-1]
        for number, size in enumerate(sizes):
            if number == 1 and falls and self._too_large(mesh, steps.settings, sizes[-1]):
                return None
            if not self._too_large(mesh, steps.settings, size):
                found = self._tried_with(mesh, steps.settings, size)
                if found is not None and found.fits:
                    return found
            elif not falls:
                return None
        return None

    def _too_large(self, mesh: Mesh, settings: Mapping[str, Value], size: int) -> bool:
        """Whether it builds and does not fit."""
        probed = self._probed(mesh, settings, size)
        return probed is not None and not probed.fits

    def _probed(self, mesh: Mesh, settings: Mapping[str, Value], size: int) -> TriedLayout | None:
        """As `_tried_with`, but of a pipeline with a shorter step, as far as memory does not depend on it.

        A rank has the activations of at most `pp` micro-batches. A plan of thousands would take seconds.
        """
        number = LONG_STEP * mesh.pp
        if mesh.pp == 1 or self._facts.samples // mesh.dp // size <= number:
            return self._tried_with(mesh, settings, size)
        samples = number * mesh.dp * size
        shorter: dict[str, Value] = {"train.global_batch_size": samples}
        if self._config.train.global_batch_tokens is not None:
            shorter = {"train.global_batch_tokens": samples * self._facts.sample_tokens}
        return self._once({**self._values(mesh, settings, size), **shorter})

    def _tried_with(self, mesh: Mesh, settings: Mapping[str, Value], size: int) -> TriedLayout | None:
        """The layout as a plan; None: it is refused."""
        return self._once(self._values(mesh, settings, size))

    def _values(self, mesh: Mesh, settings: Mapping[str, Value], size: int) -> dict[str, Value]:
        """The keys of a layout that are not given."""
        values: dict[str, Value] = {f"parallel.{axis}": mesh.degree(axis) for axis in AXES if axis != "dp_replicate"}
        share = self._facts.samples // mesh.dp
        values |= {MICROBATCH: None if size == share and mesh.pp == 1 else size, **settings}
        return {key: value for key, value in values.items() if key not in self._facts.given}

    def _once(self, values: Mapping[str, Value]) -> TriedLayout | None:
        key = tuple(sorted(values.items()))
        if key not in self._tried:
            self._tried[key] = self._built(values)
        return self._tried[key]

    def _built(self, values: Mapping[str, Value]) -> TriedLayout | None:
        try:
            plan = build(changed(self._config, Change(values)), self._vocab_size, self._facts.ranks)
        except (UserError, ValueError) as error:
            self.refused.update(dict.fromkeys(problems_of(error)))
            return None
        held = held_by(plan, self._facts.kind)
        found = TriedLayout(values, plan, held, held.total <= self._facts.devices.usable_bytes)
        if not found.fits and (self.least is None or held.total < self.least.held.total):
            self.least = found
        return found


def problems_of(error: UserError | ValueError) -> Iterator[str]:
    """What build says against a layout, or the types of a config against values: without the changes that would do."""
    if isinstance(error, UserError):
        yield from (problem.said if isinstance(problem, Refusal) else problem for problem in error.problems)
        return
    errors: Any = getattr(error, "errors", None)  # pydantic's
    yield from (str(one["msg"]).removeprefix("Value error, ") for one in (errors() if errors else [{"msg": error}]))


def with_defaults(config: Config, given: Collection[str]) -> Config:
    """The config with defaults for all keys of a layout that are not given."""
    return changed(config, Change({key: default_of(key) for key in SEARCHED if key not in given}))


def change_of(config: Config, found: TriedLayout, given: Collection[str]) -> Change:
    """A layout as keys of a config: those that have an effect and are no defaults, and those that lose their value.

    The stage of ZeRO and the schedule are said where there are shards or stages.
    """
    plan = found.plan
    says = {ZERO_STAGE: plan.mesh.dp_shard > 1, SCHEDULE: plan.mesh.pp > 1}
    values = {key: found.values.get(key, default_of(key)) for key in SEARCHED if key not in given}
    if values.get(MICROBATCH, 0) is None and config.train.microbatch_size is not None:
        values[MICROBATCH] = plan.work.microbatch_size  # "auto" would say no number
    return Change(
        {
            key: value
            for key, value in values.items()
            if value != default_of(key) or value != value_of(config, key) or says.get(key, False)
        }
    )
