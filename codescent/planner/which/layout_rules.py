"""In: the facts of a run. Out: the rules of docs/which.md that may serve it, in the order of that page.
Does not try whether a rule builds and fits (trials.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from codescent.base.nearest import divisors
from codescent.base.refusal import Value
from codescent.build.rules import MAX_MICROBATCHES
from codescent.plan import Mesh
from codescent.plan.activations import CUDA, RECOMPUTES
from codescent.planner.which.facts import MICROBATCH, OFFLOAD, RECOMPUTE, RunFacts

SCHEDULE, ZERO_STAGE = "parallel.schedule", "parallel.zero_stage"
BUBBLE = 4
"""A pipeline has at least so many micro-batches for each stage but one: then its bubble, (pp - 1) / micro-batches, is a
quarter of the computing, or less."""
STAGES = (1, 2, 3)
GIVEN_INSIDE = ("tp", "cp", "dp_shard")
"""Axes of a stage. A value that is given is tried, also where the page asks for another one."""
OLD = "fp32"
"""Cards without bf16 compute in this format (docs/which.md, "Old cards")."""


class TableRow(StrEnum):
    """The rows of the table of docs/which.md, by their first column."""

    DEVICE_FITS = "one device, it fits"
    DEVICE_NOT = "one device, it does not fit"
    NODE_FITS = "one node, it fits"
    NODE_NOT = "one node, it does not fit"
    BLOCK_NOT = "one node, a single block does not fit"
    FAST = "many nodes, fast network"
    SLOW = "many nodes, slow network"
    ETHERNET = "nodes on slow Ethernet, the model fits in one"
    LONG = "long sequences"
    FEW = "small global batch"
    OLD_CARDS = "old cards with little memory"


class MemorySteps(NamedTuple):
    """Some keys that decide the memory, and micro-batches to try with them, the best one first."""

    settings: Mapping[str, Value]
    sizes: tuple[int, ...]


class LayoutRule(NamedTuple):
    """A rule of the page.

    Attributes:
        row: of the table.
        mesh: that it asks for.
        steps: what decides the memory, the best first; the last one needs least.
        waits: whether messages may take longer than what hides them, or a pipeline has fewer micro-batches than the
            page asks for. Such a rule comes after all others.
    """

    row: TableRow
    mesh: Mesh
    steps: tuple[MemorySteps, ...]
    waits: bool = False

    @property
    def offloads(self) -> bool:
        """Whether the optimizer moves to the host's memory."""
        return OFFLOAD in self.steps[-1].settings


def rules_for(facts: RunFacts) -> Iterator[LayoutRule]:
    """The rules for a run, in order. The first one that builds and fits is the answer of the page."""
    for rule in _in_order(facts):
        if facts.kind == CUDA or not rule.offloads:  # a CPU has no other memory
            yield rule


def _in_order(facts: RunFacts) -> Iterator[LayoutRule]:
    need = facts.inside_need if facts.hosts == 1 else facts.between_need
    if facts.seldom or facts.ranks == 1:
        need = 0.0
    if facts.is_fast and not facts.has_slow_bus:
        yield from data_rules(facts, need)
        if facts.hosts > 1:
            yield from _pipelines(facts)
        if need:
            yield from data_rules(facts, 0.0, waits=True)
        yield from _pipelines(facts)
        yield from _pipelines(facts, STAGES[1:])
        yield from data_rules(facts, 0.0, offload=True, waits=need > 0)
        yield from _pipelines(facts, offload=True)
    else:
        yield from _pipelines(facts)
        yield from _pipelines(facts, STAGES[1:])
        yield from _pipelines(facts, offload=True)
        yield from data_rules(facts, 0.0, waits=True)
        yield from data_rules(facts, 0.0, offload=True, waits=True)
    yield from _pipelines(facts, waits=True)


def data_rules(facts: RunFacts, need: float, *, offload: bool = False, waits: bool = False) -> Iterator[LayoutRule]:
    """Replicas, then shards inside a host, then shards over all hosts; each with more and more of tp, then of cp.

    Args:
        facts: of the run.
        need: tokens that a micro-batch must have on a rank.
        offload: with the optimizer in the host's memory.
        waits: see `LayoutRule`.
    """
    for tp, cp in _inner(facts):
        inside = max(1, facts.per_host // (tp * cp))
        given = facts.given.get("parallel.dp_shard")
        for shards in dict.fromkeys((1, inside, facts.ranks // (tp * cp), *([given] if given else []))):
            copies, rest = divmod(facts.ranks // (tp * cp), int(shards))
            if rest:
                continue
            mesh = Mesh(dp_replicate=copies, dp_shard=int(shards), cp=cp, tp=tp)
            sizes = _sizes(facts, mesh, need)
            if sizes:
                steps = _offloaded(mesh, sizes) if offload else _of_data(mesh, sizes)
                yield LayoutRule(_row(facts, mesh), mesh, tuple(steps), waits)


def _inner(facts: RunFacts) -> Iterator[tuple[int, int]]:
    """Degrees of tp and cp: tp inside of a host alone, then with cp. A degree that is given counts as any other."""
    given = int(facts.given.get("parallel.tp") or 0)
    degrees = sorted({*divisors(facts.per_host), *([given] if given else [])})
    fitting = [tp for tp in degrees if facts.ranks % tp == 0 and (tp >= facts.least_tp or tp == given)]
    yield from ((tp, 1) for tp in fitting)
    for cp in sorted(divisors(facts.ranks))[1:]:
        for tp in reversed(fitting):
            if facts.ranks % (tp * cp) == 0 and (facts.per_host % (tp * cp) == 0 or tp * cp % facts.per_host == 0):
                yield tp, cp


def _sizes(facts: RunFacts, mesh: Mesh, need: float) -> tuple[int, ...]:
    """The micro-batches that a rank's share of the samples admits, the largest first, with so many tokens or more."""
    share, rest = divmod(facts.samples, mesh.dp)
    if rest:
        return ()
    possible = divisors(share)
    if MICROBATCH in facts.given:
        possible = [int(facts.given[MICROBATCH] or share)]
    enough = (size for size in possible if size * facts.sample_tokens / mesh.cp >= need and share % size == 0)
    return tuple(sorted(enough, reverse=True))


def _of_data(mesh: Mesh, sizes: tuple[int, ...]) -> Iterator[MemorySteps]:
    """First smaller micro-batches, then recompute; shards with the lowest stage that fits. Stage 3 sends weights for
    each micro-batch, so it has one, and recompute comes before smaller ones."""
    if mesh.dp_shard == 1:
        yield MemorySteps({}, sizes)
        for recompute in RECOMPUTES[1:]:
            yield MemorySteps({RECOMPUTE: recompute}, _tightest(sizes))
        return
    for recompute in RECOMPUTES:
        for stage in STAGES:
            yield MemorySteps({RECOMPUTE: recompute, ZERO_STAGE: stage}, sizes if stage < STAGES[-1] else sizes[:1])
    yield MemorySteps({RECOMPUTE: RECOMPUTES[-1], ZERO_STAGE: STAGES[-1]}, _tightest(sizes))


def _offloaded(mesh: Mesh, sizes: tuple[int, ...]) -> Iterator[MemorySteps]:
    for stage in STAGES if mesh.dp_shard > 1 else (None,):
        stages = {} if stage is None else {ZERO_STAGE: stage}
        yield MemorySteps({RECOMPUTE: RECOMPUTES[-1], OFFLOAD: "optimizer", **stages}, _tightest(sizes))


def _tightest(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest micro-batch; then all samples in one, which needs no sum of gradients in fp32."""
    return tuple(dict.fromkeys((sizes[-1], sizes[0])))


def _row(facts: RunFacts, mesh: Mesh) -> TableRow:
    """The row of a mesh without a pipeline."""
    if mesh.world_size == 1:
        return TableRow.DEVICE_FITS
    tp, cp = (int(facts.given.get(f"parallel.{axis}", 1) or 1) for axis in ("tp", "cp"))
    if mesh.cp > cp or mesh.tp > tp:
        if facts.few_samples or facts.rank_tokens < facts.inside_need:
            return TableRow.FEW
        return TableRow.BLOCK_NOT if facts.least_tp > 1 and mesh.cp == cp else TableRow.LONG
    if facts.hosts > 1:
        return TableRow.FAST if facts.is_fast else TableRow.SLOW
    return TableRow.NODE_FITS if mesh.dp_shard == 1 else TableRow.NODE_NOT


def _pipelines(
    facts: RunFacts, stages: tuple[int, ...] = (1,), *, offload: bool = False, waits: bool = False
) -> Iterator[LayoutRule]:
    """Pipelines: of as many stages as there are hosts, with shards inside of them; then of more, then of fewer stages.

    Args:
        facts: of the run.
        stages: values of zero_stage.
        offload: with the optimizer in the host's memory.
        waits: with fewer micro-batches than the page asks for.
    """
    tp_given, cp_given, shards_given = (int(facts.given.get(f"parallel.{axis}") or 0) for axis in GIVEN_INSIDE)
    for pp in _stage_numbers(facts):
        inside = min(facts.per_host, facts.ranks // pp)
        possible = divisors(inside) if facts.has_nvlink or facts.least_tp > 1 else [1]
        layouts = [(tp, 1, inside // tp) for tp in sorted(possible) if tp >= facts.least_tp]
        if tp_given or cp_given or shards_given:
            tp, cp = tp_given or 1, cp_given or 1
            layouts.append((tp, cp, shards_given or max(1, inside // (tp * cp))))
        for tp, cp, shards in dict.fromkeys(layouts):
            copies, rest = divmod(facts.ranks, pp * tp * cp * shards)
            if not rest and not (shards == 1 and stages != (1,)):
                mesh = Mesh(pp=pp, dp_replicate=copies, dp_shard=shards, cp=cp, tp=tp)
                yield from _pipeline(facts, mesh, stages, offload=offload, waits=waits)


def _stage_numbers(facts: RunFacts) -> list[int]:
    """Numbers of stages: one for each host (each card, if the cards of a host have no fast bus), more, then fewer."""
    first = facts.ranks if facts.has_slow_bus else facts.hosts
    possible = [number for number in sorted(divisors(facts.ranks)) if 1 < number <= facts.layers]
    more = [number for number in possible if number >= first and number % first == 0]
    return [*more, *reversed([number for number in possible if number not in more])]


def _pipeline(
    facts: RunFacts, mesh: Mesh, stages: tuple[int, ...], *, offload: bool, waits: bool
) -> Iterator[LayoutRule]:
    """A pipeline with micro-batches of one sample where that may be: the more micro-batches, the smaller the bubble."""
    share, least = facts.samples // mesh.dp, 1 if waits else BUBBLE * (mesh.pp - 1)
    sizes = reversed(_sizes(facts, mesh, 0.0))
    enough = tuple(size for size in sizes if least <= share // size <= MAX_MICROBATCHES // mesh.pp)
    if not enough:
        return
    old = facts.precision == OLD and mesh.pp == facts.ranks
    steps: list[dict[str, Value]] = []
    if offload:
        steps.append({SCHEDULE: "1f1b", RECOMPUTE: RECOMPUTES[-1], OFFLOAD: "optimizer"})
    else:
        steps += [{SCHEDULE: "zero-bubble"}] if mesh.dp_shard == 1 else []
        steps += [
            {SCHEDULE: "1f1b", RECOMPUTE: one} for one in ((RECOMPUTES[0], RECOMPUTES[-1]) if old else RECOMPUTES)
        ]
    if mesh.dp_shard > 1:
        steps = [{**one, ZERO_STAGE: stage} for one in steps for stage in stages]
    row = TableRow.OLD_CARDS if old else TableRow.SLOW
    yield LayoutRule(row, mesh, tuple(MemorySteps(one, enough) for one in steps), waits)
