"""In: layouts. Out: collectives belong to the depths that the plan names: as ranks issue them, or by sizes of weights.
Does not count collectives of a whole step: test_declared does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from declared_cases import case
from declared_ranks import plan_of
from forker import Forker

from codescent.plan import Collective, Plan, Traffic, Verb

QUICK = {
    "tp": case(tp=2),
    "tp, recomputed, in two stages": case(tp=2, pp=2, microbatches=2, recompute="full"),
    "tp without sequence": case(tp=2, sequence_parallel=False, head_chunk_tokens=10),
    "cp": case(cp=2, context="all-gather"),
}
SLOW = {
    "tp, tied embedding and adapters": case(tp=2, lora={"rank": 2}),
    "two sequences": case(
        tp=2,
        task="seq2seq",
        recompute="products",
        model={
            "kind": "transformer",
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "source_len": 8,
            "target_len": 12,
        },
    ),
    "interleaved": case(tp=2, pp=2, microbatches=4, schedule="interleaved", virtual_stages=2, model={"num_layers": 4}),
    "qa": case(tp=2, task="qa", model={"kind": "bert", "vocab_size": 97}),
    "cp, ring, recomputed": case(cp=2, tp=2, recompute="full"),
}


def check(forker: Forker, folder: Path, cases: dict[str, Any]) -> None:
    """Of the axes tp and cp, each depth issues what its plan declares for it."""
    (found,) = forker.call("depth_ranks:on_fake_ranks", folder, cases=cases)
    wrong = {}
    for name, ranks in found.items():
        plan = plan_of(cases[name])
        for rank, issued in ranks.items():
            inside = {
                axis: set(plan.mesh.group(axis, int(rank))) for axis in ("tp", "cp") if plan.mesh.degree(axis) > 1
            }
            seen = Counter(
                (kind, size, verb, depth)
                for kind, members, size, _, verb, depth in issued
                # Sums of gradients go along cp, too.
                if any(set(members) == inside[axis] and (axis, kind) != ("cp", "all_reduce") for axis in inside)
            )
            declared = declared_at_depths(plan, plan.mesh.coordinates(int(rank))["pp"])
            if seen != declared:
                wrong[name, rank] = (seen - declared, declared - seen)
    assert not wrong


def declared_at_depths(plan: Plan, stage: int) -> Counter[tuple[str, int, str, int]]:
    """How often each depth issues a collective, by kind, bytes and verb."""
    found: Counter[tuple[str, int, str, int]] = Counter()
    for record in plan.traffic:
        computes = record.verb in (Verb.FORWARD, plan.schedule.input_verb)
        if record.axis in ("tp", "cp") and computes and record.stage in (None, stage):
            for depth, times in each_depth(record):
                found[record.collective, record.payload_bytes, record.verb, depth] += times
    return found


def each_depth(record: Traffic) -> list[tuple[int, int]]:
    """The depths of a record, each with its times."""
    first, end = record.depths
    times, rest = divmod(record.times, end - first)
    assert not rest
    return [(depth, times) for depth in range(first, end)]


def test_a_depth_issues_what_is_declared_for_it(forker: Forker, tmp_path: Path) -> None:
    check(forker, tmp_path, QUICK)


@pytest.mark.slow
def test_a_depth_of_other_layouts_issues_what_is_declared_for_it(forker: Forker, tmp_path: Path) -> None:
    check(forker, tmp_path, SLOW)


def test_a_unit_is_gathered_for_the_depth_that_reads_it() -> None:
    plan = plan_of(case(dp_shard=2, model={"num_layers": 3}))
    gathered: Counter[int] = Counter()
    for record in plan.traffic:
        if record.collective is Collective.ALL_GATHER and record.verb is Verb.FORWARD:
            assert record.depths[1] == record.depths[0] + 1
            gathered[record.depths[0]] += record.payload_bytes
    blocks = {
        depth: 4 * sum(t.parameter.numel for t in plan.tensors if t.parameter.depths == (depth,)) for depth in (1, 2, 3)
    }
    assert {depth: size for depth, size in gathered.items() if depth} == blocks
    outside = 4 * sum(t.parameter.numel for t in plan.tensors if t.parameter.depths[0] in (0, 4))
    assert outside <= gathered[0] <= outside + 4 * 32 * len(plan.tensors)  # first dims are padded


def test_a_bucket_and_a_message_have_their_depths() -> None:
    plan = plan_of(case(dp_replicate=2, bucket_bytes=1, model={"num_layers": 2}))
    buckets = [record.depths for record in plan.traffic if record.verb is Verb.REDUCE]
    trained = [tensor.parameter.depths for tensor in reversed(plan.trained)]
    assert buckets == [(depths[0], depths[-1] + 1) for depths in trained]  # a tensor each
    assert buckets[-1] == (0, 4)  # the tied embedding: its gradient is complete at depth 0
    stages = plan_of(case(pp=2, microbatches=2))
    sent = {record.verb: record.depths for record in stages.traffic if record.collective is Collective.SEND}
    border = stages.schedule.parts(0)[0].stop
    assert sent == {Verb.SEND_ACTIVATION: (border - 1, border), Verb.SEND_GRADIENT: (border, border + 1)}
