"""In: the facts of a run, a layout of the rules. Out: a sentence for each question of docs/which.md that decided.
Does not decide (layout_rules.py and trials.py do) and does not print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from codescent.base.amounts import of_bytes, of_share
from codescent.base.counted import counted
from codescent.base.refusal import Value
from codescent.cost.activations import is_known
from codescent.cost.stage_memory import FITS
from codescent.plan.activations import CPU, RECOMPUTES
from codescent.planner.which.facts import MICROBATCH, OFFLOAD, RECOMPUTE, RankHolds, RunFacts
from codescent.planner.which.layout_rules import BUBBLE, LayoutRule
from codescent.planner.which.trials import RuleTrials, TriedLayout

MOST_REFUSALS = 3
"""So many reasons of refused layouts are said."""


def reasons(facts: RunFacts, rule: LayoutRule, found: TriedLayout, trials: RuleTrials) -> Iterator[str]:
    """Why the page gives this layout, question by question; then what was passed over, and the memory."""
    yield from _one_device(facts)
    if facts.least_tp > 1:
        block = of_bytes(facts.one.matrices)
        yield f"2. A single block has {block} of weights and gradients, so tp is at least {facts.least_tp}"
    yield from _shards(facts, rule, found)
    yield from _network(facts, rule, found)
    yield from _work(facts, rule, found)
    for key, values in trials.other_values.items():
        given = json.dumps(facts.given[key])
        yield f"{key} = {given} is given: rules that need {_several(values)} are passed over"
    for problem in list(trials.refused)[:MOST_REFUSALS]:
        yield f"Refused: {problem}"
    yield from _held(facts, found)


def _several(values: Iterable[Value]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _one_device(facts: RunFacts) -> Iterator[str]:
    """Question 1: whether it fits on one device, with micro-batches of one sample."""
    size, kept, again = facts.devices.memory_bytes, facts.one.kept, facts.one.again
    room = facts.devices.usable_bytes
    yield f"{of_share(FITS)} of a device may be planned for: {of_bytes(room)} of {of_bytes(size)}"
    if kept is None or again is None:
        return
    which, held = ("", kept) if kept.total <= room else (f", {RECOMPUTE} = {json.dumps(RECOMPUTES[-1])}", again)
    fits = "It fits on one device" if held.total <= room else "It does not fit on one device"
    yield f"1. {fits}: {_parts(held)} ({MICROBATCH} = 1{which})"


def _parts(held: RankHolds) -> str:
    return f"{of_bytes(held.state)} of state and {of_bytes(held.activations + held.block)} of activations"


def _shards(facts: RunFacts, rule: LayoutRule, found: TriedLayout) -> Iterator[str]:
    """Question 3: whether the ranks of one host hold the state together."""
    mesh, layout = rule.mesh, found.plan.layout
    if mesh.dp_shard == 1:
        return
    over = counted(mesh.dp_shard, "rank")
    if mesh.dp_shard > facts.per_host:
        yield f"3. The ranks of one host do not hold the state together, so dp_shard goes over {over} of several hosts"
    elif mesh.pp > 1:
        yield f"3. {over} of a host divide the state of a stage: zero_stage = {layout.zero_stage}"
    else:
        yield f"3. {over} of a host hold the state together: zero_stage = {layout.zero_stage} is the lowest that fits"


def _network(facts: RunFacts, rule: LayoutRule, found: TriedLayout) -> Iterator[str]:
    """Question 4: whether the links are fast for this run."""
    if facts.seldom and facts.hosts > 1:
        yield "4. Replicas send seldom by the keys of this config, so no network is too slow for them"
    elif facts.hosts > 1:
        yield f"4. {_needs(facts, facts.between_need, 'its network')}, {_between(facts, rule, found)}"
    if facts.inside_need and facts.per_host > 1 and (facts.hosts == 1 or facts.has_slow_bus):
        so = ""
        if facts.has_slow_bus and rule.mesh.pp > 1:
            so = ", so each device is a stage"
        elif _tokens(facts, rule, found) < facts.inside_need:
            so = f"; {_tokens(facts, rule, found):,} in a micro-batch wait for it"
        yield f"4. {_needs(facts, facts.inside_need, 'the link inside its host')}{so}"
    if rule.mesh.pp > 1 and rule.mesh.dp_shard == 1 and found.plan.layout.schedule == "zero-bubble":
        yield 'A stage has no shards, so schedule = "zero-bubble" is possible'


def _needs(facts: RunFacts, need: float, link: str) -> str:
    form = "F/W" if facts.widths == 1 else f"{facts.widths:g} F/W in {facts.precision}"
    return f"A rank has {round(facts.rank_tokens):,} tokens; {link} needs {round(need):,} ({form})"


def _tokens(facts: RunFacts, rule: LayoutRule, found: TriedLayout) -> int:
    """Tokens of a micro-batch on a rank."""
    return found.plan.work.microbatch_size * facts.sample_tokens // rule.mesh.cp


def _between(facts: RunFacts, rule: LayoutRule, found: TriedLayout) -> str:
    """What is between hosts, as the answer to question 4."""
    mesh = rule.mesh
    if mesh.pp > 1 and not facts.is_fast:
        return "so pp between hosts"
    if mesh.pp > 1:
        return "so it is fast" if facts.has_slow_bus else "but without pp no micro-batch of so many fits"
    if _tokens(facts, rule, found) < facts.between_need:
        return f"but no pipeline serves; {_tokens(facts, rule, found):,} in a micro-batch wait for it"
    if mesh.dp_shard > facts.per_host:
        return "so dp_shard over all hosts"
    return "so dp_shard inside a host" if mesh.dp_shard > 1 else "so replicas"


def _work(facts: RunFacts, rule: LayoutRule, found: TriedLayout) -> Iterator[str]:
    """Question 5: whether there is enough work for each rank."""
    mesh, work = rule.mesh, found.plan.work
    if mesh.pp > 1:
        least, number = BUBBLE * (mesh.pp - 1), work.num_microbatches
        asked = f"5. {mesh.pp} stages need {least:,} micro-batches or more, 4 x (pp - 1)"
        fewer = f", so the bubble is {of_share((mesh.pp - 1) / number)} of the computing" if number < least else ""
        yield f"{asked}: there are {number:,}{fewer}"
        without = facts.samples // (mesh.dp * mesh.tp)
        if mesh.tp > 1 and without < least:
            yield f"5. Without tp there were {without:,} micro-batches, so tp = {mesh.tp} inside a host"
    elif facts.few_samples and mesh.tp * mesh.cp > 1:
        several = [f"{axis} = {mesh.degree(axis)}" for axis in ("tp", "cp") if mesh.degree(axis) > 1]
        has = f"{counted(facts.samples, 'sample')} are not one or more for each of {counted(facts.ranks, 'rank')}"
        yield f"5. {has}, so several work on one: {' and '.join(several)}"


def _held(facts: RunFacts, found: TriedLayout) -> Iterator[str]:
    """The memory of the layout that was chosen, and what was done for it."""
    plan = found.plan
    done = [
        f"{key} = {json.dumps(value)}"
        for key, value in ((RECOMPUTE, plan.layout.recompute), (OFFLOAD, plan.layout.offload))
        if value != "none"
    ]
    with_it = f", with {' and '.join(done)}" if done else ""
    yield f"The fullest rank has {_parts(found.held)}{with_it}"
    if not is_known(plan, facts.kind):
        yield f"What activations take on {facts.kind} in {facts.precision} is not known; they count as on {CPU}"
