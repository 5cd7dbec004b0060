"""In: kinds of model, kinds of recompute, layouts. Out: products have the FLOPs that the plan declares, exactly.
Does not run a step itself: computed_ranks does, on torch's fake process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from declared_cases import case
from forker import Forker
from kept_cases import KINDS, LAYOUTS, RECOMPUTES, computes_again, of_kind
from kept_ranks import plan_of

from codescent.cost.operators import ELEMENTWISE, Computed, operators_of_depth
from codescent.plan import Plan
from codescent.plan.activations import CPU, CUDA

ONE_HOT_VOCAB = 1024
"""Up to this size, the gradient of a tied embedding is a product with one-hot rows on a CPU (operators/head.py)."""
WHOLE = [name for name in KINDS if "many tokens" not in name]
"""Kinds of model. A large vocabulary is rounded up."""
QUICK = {
    "gpt2, selective": of_kind("gpt2", recompute="selective"),
    "gpt2, products, in blocks": of_kind("gpt2, two blocks of queries", recompute="products"),
    "gpt2, pp": of_kind("gpt2", layout=LAYOUTS["pp zero-bubble"]),
    "gpt2, zero 3": of_kind("gpt2", layout=LAYOUTS["zero 3"]),
    "llama, tp": of_kind("llama", layout=LAYOUTS["tp"], recompute="full"),
    "llama with a window": of_kind("llama with a window, three blocks of queries", recompute="products"),
    "pairs, with dropout": of_kind("pairs", 0.1, recompute="products"),
    "mlm, tp": of_kind("mlm", layout=LAYOUTS["tp"]),
    "qa": of_kind("qa", recompute="products"),
}


def operators_of_stage(plan: Plan, stage: int, device: str, rank: int = 0) -> list[Computed]:
    depths = [depth for part in plan.schedule.parts(stage) for depth in part]
    return [one for depth in depths for one in operators_of_depth(plan, depth, device, rank)]


def check(forker: Forker, folder: Path, cases: dict[str, Any]) -> None:
    """What each rank computes in a step is what its plan declares."""
    (found,) = forker.call("computed_ranks:on_fake_ranks", folder, cases=cases)
    wrong = {}
    for name, ranks in found.items():
        plan = plan_of(cases[name])
        for rank, computed in ranks.items():
            declared = declared_flops(plan, int(rank))
            if computed != declared:
                wrong[name, rank] = (computed, declared)
    assert not wrong


def declared_flops(plan: Plan, rank: int) -> dict[str, float]:
    """FLOPs of the products of a step, with those of look-ups that are products with one-hot rows."""
    stage, work = plan.mesh.coordinates(rank)["pp"], plan.work
    products = [one for one in operators_of_stage(plan, stage, CPU, rank) if one.kind != ELEMENTWISE]
    forward, backward = sum(one.forward_flops for one in products), sum(one.backward_flops for one in products)
    rows = 2 * work.microbatch_size * work.seq_len // plan.mesh.cp
    if 0 in plan.schedule.parts(stage)[0]:
        first = plan.tensors[0]
        tied = first.parameter.depths[-1] in plan.schedule.parts(stage)[-1] and len(first.parameter.depths) > 1
        if tied and first.parameter.trained:
            (vocab, width) = first.optimizer.without("dp_shard").sizes(first.parameter.shape, plan.mesh, rank)
            backward += rows * vocab * width * (plan.model.vocab_size <= ONE_HOT_VOCAB)
        if plan.model.kind == "bert":
            segments = rows * 2 * plan.model.hidden_dim // (plan.mesh.tp if plan.layout.sequence_parallel else 1)
            forward, backward = forward + segments, backward + segments
    return {"forward": work.num_microbatches * forward, "backward": work.num_microbatches * backward}


@pytest.mark.parametrize("half", [0, 1])
def test_a_rank_computes_what_is_declared(forker: Forker, tmp_path: Path, half: int) -> None:
    check(forker, tmp_path, dict(list(QUICK.items())[half::2]))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_rank_computes_what_is_declared_of_every_kind(forker: Forker, tmp_path: Path, recompute: str) -> None:
    check(
        forker,
        tmp_path,
        {name: of_kind(name, recompute=recompute) for name in WHOLE if computes_again(name, recompute)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mlm", "qa", "pairs"])
def test_a_rank_computes_what_is_declared_in_every_layout(forker: Forker, tmp_path: Path, kind: str) -> None:
    layouts = {name: layout for name, layout in LAYOUTS.items() if "cp" not in name}  # a ring computes its own pairs
    check(forker, tmp_path, {name: of_kind(kind, layout=layout) for name, layout in layouts.items()})


@pytest.mark.slow
def test_a_rank_computes_what_is_declared_with_adapters(forker: Forker, tmp_path: Path) -> None:
    lora, layouts = {"rank": 3}, {"alone": {}, "tp": {"tp": 2}, "pp": {"pp": 2, "microbatches": 2}}
    check(forker, tmp_path, {name: case(lora=lora, **layout) for name, layout in layouts.items()})


def test_attention_over_a_divided_sequence_is_computed_again_with_whole_blocks() -> None:
    """Its tiles are not counted, but what parallel.recompute adds is: see plan/flops.py."""
    plans = {one: plan_of(case(cp=2, recompute=one)) for one in RECOMPUTES}
    for device in (CPU, CUDA):
        again = {
            name: sum(one.backward_flops for one in operators_of_stage(plan, 0, device) if "attn s" in one.name)
            for name, plan in plans.items()
        }
        assert again["none"] == again["selective"] < again["products"] == again["full"]


def test_what_has_no_gradient_has_no_backward() -> None:
    frozen = plan_of(case(lora={"rank": 2}))
    assert all(one.backward_flops == one.backward_bytes == 0.0 for one in operators_of_depth(frozen, 0, CPU))
    assert all(one.backward_bytes for one in operators_of_depth(plan_of(case()), 0, CPU))


def test_amounts_of_a_gpt2() -> None:
    """By hand: B 2, T 16, C 32, 4 heads, V 97, in fp32."""
    plan = plan_of(of_kind("gpt2"))
    found = {(one.depth, one.name): one for one in operators_of_stage(plan, 0, CUDA)}
    assert [name for depth, name in found if depth == 1] == [
        "norm_1", "attn.qkv", "attn scores", "attn values", "attn.out", "attn residual", "norm_2", "mlp.up",
        "mlp activation", "mlp.down", "mlp residual",
    ]  # fmt: skip
    rows, width = 2 * 16, 32
    qkv = found[1, "attn.qkv"]
    assert qkv.sizes == (rows, width, 3 * width)
    assert (qkv.forward_flops, qkv.backward_flops) == (2 * rows * width * 96, 4 * rows * width * 96)
    assert qkv.forward_bytes == 4 * (rows * width + width * 96 + rows * 96)
    scores = found[1, "attn scores"]
    pairs = 2 * 4 * 16 * 17 / 2  # of all samples and heads
    assert (scores.forward_flops, scores.backward_flops) == (2 * pairs * 8, 6 * pairs * 8)
    assert scores.forward_bytes == 4 * 2 * rows * width  # queries and keys
    assert found[2, "norm_1"].forward_bytes == 4 * 2 * rows * width
    head = found[3, "tok"]
    assert (head.forward_flops, head.backward_flops) == (3 * 2 * rows * width * 97, 0.0)
