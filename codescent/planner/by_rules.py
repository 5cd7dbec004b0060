"""In: a config, ranks, devices in a few numbers. Out: the layout that the rules of docs/which.md give, and why.
Does not simulate: a search on a cluster compares all layouts by their seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent.base.amounts import of_bytes, of_share
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.refusal import Change
from codescent.build.plan import build
from codescent.cost.stage_memory import FITS
from codescent.plan import Plan
from codescent.planner.prediction import without_step
from codescent.planner.search.space import SEARCHED
from codescent.planner.search.unfit import MOST_RANKS_TRIED
from codescent.planner.which.facts import Devices as Devices
from codescent.planner.which.facts import RankHolds, RunFacts, facts_of, on_one_device
from codescent.planner.which.layout_rules import LayoutRule, rules_for
from codescent.planner.which.layout_rules import TableRow as TableRow
from codescent.planner.which.reasons import reasons
from codescent.planner.which.trajectories import OtherTrajectory, other_trajectory
from codescent.planner.which.trials import RuleTrials, TriedLayout, change_of, with_defaults

if TYPE_CHECKING:
    from codescent.config.sections import Config


@dataclass(frozen=True)
class ByRules:
    """The answer of docs/which.md.

    Attributes:
        change: of the config: keys of a layout.
        row: of the table of that page.
        why: sentences: the questions that decided, with their numbers; what was passed over; the memory.
        plan: with the change.
        held: by its fullest rank.
        devices: for which it is.
        other: over slow links, keys with which replicas send less, which is another trajectory; None: nothing.
    """

    change: Change
    row: TableRow
    why: tuple[str, ...]
    plan: Plan
    held: RankHolds
    devices: Devices
    other: OtherTrajectory | None


def by_rules(config: Config, vocab_size: int | None, ranks: int, devices: Devices, given: Collection[str]) -> ByRules:
    """The layout that the rules of docs/which.md give.

    Args:
        config: of the run.
        vocab_size: see `build.resolve`.
        ranks: of the run.
        devices: on which it runs.
        given: keys of a layout that keep the value of the config. The others start from their defaults.

    Raises:
        UserError: the config has problems, the ranks do not fill hosts, ranks are given portions of work, or no layout
            fits: then it says the fewest devices that would do.
    """
    given = frozenset(given) & set(SEARCHED)
    if problems := list(_refused(ranks, devices)):
        raise UserError(*problems)
    start = with_defaults(config, given)
    facts = facts_of(start, vocab_size, ranks, devices, given, on_one_device(start, vocab_size))
    trials = RuleTrials(start, vocab_size, facts)
    for rule in rules_for(facts):
        found = trials.first(rule)
        if found is not None:
            if reasons_against := list(without_step(found.plan)):
                raise UserError(*(f"`codescent docs which` has no rule: {reason}" for reason in reasons_against))
            slow = not facts.is_fast
            other = other_trajectory(config, start, vocab_size, facts) if slow else None
            change, why = change_of(config, found, given), tuple(reasons(facts, rule, found, trials))
            return ByRules(change, _row(rule, found), why, found.plan, found.held, devices, other)
    if trials.least is None and not trials.ruled_out and facts.least_tp <= facts.per_host:
        build(start, vocab_size, ranks)  # says what is wrong with the run, and what would do
        if trials.refused:
            raise UserError(*trials.refused)
    raise UserError(_does_not_fit(start, vocab_size, facts, trials))


def _refused(ranks: int, devices: Devices) -> Iterator[str]:
    each = devices.per_host
    if ranks > each and ranks % each:
        near = f"{ranks // each * each:,} or {-(-ranks // each) * each:,}"
        yield f"--ranks {ranks}: do not fill hosts of {each} (--per-host); {near} do"


def _row(rule: LayoutRule, found: TriedLayout) -> TableRow:
    """The row of the table. Two of them depend on what the memory needed."""
    spared = {found.plan.layout.recompute, found.plan.layout.offload} != {"none"}
    if rule.row is TableRow.DEVICE_FITS and spared:
        return TableRow.DEVICE_NOT
    if rule.row is TableRow.OLD_CARDS and not spared:
        return TableRow.SLOW
    return rule.row


def _does_not_fit(start: Config, vocab_size: int | None, facts: RunFacts, trials: RuleTrials) -> str:
    size, usable = facts.devices.memory_bytes, facts.devices.usable_bytes
    said = (
        f"no layout of `codescent docs which` fits on {counted(facts.ranks, 'rank')} of {of_bytes(size)}, of which "
        f"{of_share(FITS)} count ({of_bytes(usable)})"
    )
    if trials.least is not None:
        words = ", ".join(
            Change({key: trials.least.values[key] for key in SEARCHED if key in trials.least.values}).words()
        )
        said += f"; the least is {of_bytes(trials.least.held.total)}, with {words}"
    elif least := facts.one.weights + facts.one.gradients:
        said += f"; weights and gradients alone, divided over all, take {of_bytes(least / facts.ranks)}"
    if facts.least_tp > facts.per_host:
        block, each = of_bytes(facts.one.matrices), counted(facts.per_host, "rank")
        said += f"; a single block has {block} of weights and gradients, more than {each} of a host can divide"
    if trials.other_values:
        said += f"; given, and so kept: {', '.join(trials.other_values)}"
    fewest = _fewest(start, vocab_size, facts)
    if fewest is None:
        return f"{said}. No power of two up to {MOST_RANKS_TRIED:,} devices would do"
    return f"{said}. The fewest devices that would do, of powers of two: {fewest:,}"


def _fewest(start: Config, vocab_size: int | None, facts: RunFacts) -> int | None:
    """The smallest power of two of such devices on which a rule fits."""
    for ranks in (1 << power for power in range(MOST_RANKS_TRIED.bit_length())):
        if ranks == facts.ranks or any(_refused(ranks, facts.devices)):
            continue
        other = facts_of(start, vocab_size, ranks, facts.devices, facts.given, facts.one)
        trials = RuleTrials(start, vocab_size, other)
        if any(trials.may_fit(rule) for rule in rules_for(other)):
            return ranks
    return None
