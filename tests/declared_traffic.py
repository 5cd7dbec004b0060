"""In: a plan, what a rank has issued in a step. Out: an assertion that it is what the plan declares, to the byte.
Does not run a step: declared_ranks and meta_ranks do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from codescent.plan import SENDS, Collective, Plan, Traffic, Verb
from codescent.plan.wire import PIECE_BYTES

Key = tuple[Any, ...]
DTYPE = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "uint8": "uint8", "int64": "int64"}


def declared(plan: Plan, rank: int, number: int = 0, *, on_gloo: bool = False) -> Counter[Key]:
    """How often each collective of a rank is issued in step `number` (from 0), and during which verb.

    `on_gloo`: gathers of coded messages are cut into pieces (strategies/pieces.py); a reduce-scatter, and an all-gather
    of two ranks, is a message to each other rank (strategies/by_messages.py).
    """
    counted: Counter[Key] = Counter()
    for record in plan.traffic:
        if record.collective is Collective.COPY or not record.runs_in(number):
            continue
        if record.stage in (None, plan.mesh.coordinates(rank)["pp"]):
            ranks = tuple(sorted(plan.mesh.group(record.axis, rank)))
            begins = record.verb in SENDS or record.verb is Verb.AVERAGE
            verb = record.verb if begins else record.during or record.verb
            if verb is Verb.REDUCE and "bucket" in record.what:  # the last bucket: backward starts it and ends with it
                verb = plan.schedule.weight_verb
            sent = on_gloo_sent(record, len(ranks)) if on_gloo else [(record.collective, record.payload_bytes)]
            for kind, size in sent:
                counted[str(kind), ranks, size, DTYPE[record.dtype], str(verb)] += record.times
    return counted


def on_gloo_sent(record: Traffic, ranks: int) -> list[tuple[Collective, int]]:
    """What a rank hands to gloo for a collective, with the payloads."""
    kind, size = record.collective, record.payload_bytes
    if record.verb in (Verb.REDUCE, Verb.AVERAGE) and kind in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        whole, rest = divmod(size, ranks * PIECE_BYTES)  # a row of PIECE_BYTES at most for each rank
        return [(kind, ranks * PIECE_BYTES)] * whole + [(kind, rest)] * (rest > 0)
    if kind is Collective.REDUCE_SCATTER or (kind is Collective.ALL_GATHER and ranks == 2):
        return [(Collective.SEND, size // ranks)] * (ranks - 1)
    return [(kind, size)]


def check_issued(plan: Plan, rank: int, records: list[list[Any]], number: int = 0, *, on_gloo: bool = False) -> None:
    """What a rank has issued in a step against the plan, which says how much for the fullest rank of a stage."""
    issued = Counter((kind, tuple(ranks), *others) for kind, ranks, *others in records)
    expected = declared(plan, rank, number, on_gloo=on_gloo)
    first = plan.mesh.group("pp", 0)[plan.mesh.coordinates(rank)["pp"]]
    # In the last round of Muon some ranks have no matrix to send.
    even = not any(one.collective is Collective.ALL_TO_ALL and one.verb is Verb.STEP for one in plan.traffic)
    if rank == first or (even and parts(plan, rank) == parts(plan, first)):
        assert (dict(issued - expected), dict(expected - issued)) == ({}, {}), "(issued alone, declared alone)"
        return
    # As often, and each time no more.
    mine, most = payloads(issued), payloads(expected)
    assert {key: len(sizes) for key, sizes in mine.items()} == {key: len(sizes) for key, sizes in most.items()}
    for key, sizes in mine.items():
        assert all(size <= limit for size, limit in zip(sizes, most[key], strict=True)), key


def check_copied(plan: Plan, rank: int, records: list[list[Any]]) -> None:
    """What the first rank of a stage copies between device and host, by verb and dtype. Batches are not declared."""
    expected: Counter[tuple[str, str]] = Counter()
    for record in plan.traffic:
        if record.collective is Collective.COPY and record.stage in (None, plan.mesh.coordinates(rank)["pp"]):
            expected[str(record.verb), DTYPE[record.dtype]] += record.payload_bytes * record.times
    assert {(verb, dtype): size for verb, dtype, size in records if verb != str(Verb.LOAD)} == expected


def parts(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """The shapes of what a rank updates."""
    tensors = plan.held_by(plan.mesh.coordinates(rank)["pp"])
    return [tensor.optimizer.sizes(tensor.parameter.shape, plan.mesh, rank) for tensor in tensors]


def payloads(issued: Counter[Key]) -> dict[Key, list[int]]:
    """The sizes of all that is else alike, in ascending order."""
    sizes: dict[Key, list[int]] = {}
    for kind, ranks, size, *others in sorted(issued.elements()):
        sizes.setdefault((kind, ranks, *others), []).append(size)
    return sizes
