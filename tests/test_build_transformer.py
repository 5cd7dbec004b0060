"""In: configs of an encoder-decoder. Out: its plan, its cut between encoder and decoder, its FLOPs; what is refused.
Does not run a plan: test_trajectories does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.plan import Plan
from codescent.plan.pipeline import cut, cut_at
from codescent.verbs.columns import columns
from codescent.verbs.plan_rows import plan_rows

SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 4, "num_heads": 2, "hidden_dim": 8}
SIZES |= {"source_len": 12, "target_len": 6}
MODEL: dict[str, object] = {"kind": "transformer", **SIZES}
BETWEEN = {"cut": "encoder-decoder"}


def plan_of(model: dict[str, object] | None = None, ranks: int = 1, **sections: dict[str, Any]) -> Plan:
    train = {"global_batch_size": 16, "microbatch_size": 2}
    values = {"model": MODEL if model is None else model, "train": train, **sections}
    return build(Config.model_validate(values), 11, ranks)


def test_the_work_has_both_sequences() -> None:
    plan = plan_of()
    work, model = plan.work, plan.model
    assert (work.streams, work.seq_len, model.num_layers, model.encoder_layers) == ((12, 6), 18, 6, 2)
    assert work.tokens == 16 * 6


@pytest.mark.parametrize("preset", ["transformer-base", "transformer-big"])
def test_presets_are_of_this_kind(preset: str) -> None:
    assert plan_of({"preset": preset}).model.kind == "transformer"


def test_flops_of_a_step_are_three_forward_passes() -> None:
    """All but norms and biases, which 6 N counts and products do not."""
    plan = plan_of(MODEL | {"bias": False, "embedding": "untied"})
    norms = [tensor.parameter for tensor in plan.tensors if tensor.parameter.role == "norm"]
    forward = 16 * plan.work.seq_len * sum(plan.model.forward_flops)
    of_norms = sum(6 * norm.numel * 16 * plan.work.positions(norm.stream) for norm in norms)
    assert plan.flops().total_flops == pytest.approx(3 * forward + of_norms, rel=1e-12)


@pytest.mark.parametrize(("pp", "depths"), [(2, ((0, 3), (3, 8))), (3, ((0, 3), (3, 5), (5, 8)))])
def test_a_stage_begins_with_the_decoder(pp: int, depths: tuple[tuple[int, int], ...]) -> None:
    assert plan_of(ranks=pp, parallel={"pp": pp, **BETWEEN}).schedule.depths == depths


def test_by_cost_it_would_begin_elsewhere() -> None:
    assert plan_of(ranks=2, parallel={"pp": 2}).schedule.depths == ((0, 4), (4, 8))


def test_the_plan_shows_the_stages() -> None:
    said = columns(plan_rows(plan_of(ranks=2, parallel={"pp": 2, **BETWEEN}), "20"))
    assert "% of FLOPs: embedding, encoder layers 0 to 1\n" in said
    assert "% of FLOPs: decoder layers 2 to 5, head\n" in said
    assert "96 = 16 samples x 6 (and 12 of the source)" in said


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.data(),
)
def test_a_cut_at_a_border_is_the_best_of_those(front: list[float], back: list[float], data: st.DataObject) -> None:
    costs, border = (*front, *back), len(front)
    parts = data.draw(st.integers(2, len(costs)))
    found = cut_at(costs, parts, border)
    assert len(found) == parts
    assert found[0][0] == 0
    assert found[-1][1] == len(costs)
    assert all(before[1] == after[0] for before, after in zip(found, found[1:], strict=False))
    assert border in [first for first, _ in found]
    dearest = max(sum(costs[first:stop]) for first, stop in found)
    assert dearest >= max(sum(costs[first:stop]) for first, stop in cut(costs, parts))
    sides = [
        max(
            sum(c[first:stop]) for c, n in ((front, before), (back, parts - before)) for first, stop in cut(tuple(c), n)
        )
        for before in range(1, parts)
        if before <= len(front) and parts - before <= len(back)
    ]
    assert dearest == min(sides)


def test_a_cut_that_leaves_a_side_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="one on each side"):
        cut_at((1.0, 2.0), 1, 1)


@pytest.mark.parametrize(
    ("model", "ranks", "sections", "words"),
    [
        (MODEL, 1, {"data": {"seq_len": 16}}, ["data.seq_len = 16", "model.source_len", "18 together"]),
        (MODEL, 3, {"parallel": {"cp": 3}}, ["parallel.cp = 3: in an encoder-decoder", "cp = 1 on 1 rank"]),
        (MODEL, 1, {"parallel": BETWEEN}, ["parallel.pp = 1 does not cut the model", "pp = 2 on 2 ranks"]),
        (MODEL, 4, {"parallel": {"tp": 4}}, ["2 heads do not divide into 4 parts"]),
        (MODEL, 1, {"log": {"sample_tokens": 5}}, ["log.sample_tokens = 5", "only gpt2 and llama"]),
        (
            MODEL,
            1,
            {"train": {"compile": "blocks", "global_batch_size": 16}},
            ['train.compile = "blocks"', 'do: train.compile = "none"'],
        ),
        (MODEL | {"num_layers": 3, "seq_len": 9}, 1, {}, ["model.num_layers: transformer has no such size"]),
        (MODEL | {"preset": "gpt2"}, 1, {}, ["a preset of model.kind"]),
        ({"preset": "gpt2", "norm": "first"}, 1, {}, ["model.norm: gpt2 has no such size"]),
        (
            {"preset": "llama-tiny", "source_len": 4, "causal": False},
            1,
            {},
            ["model.source_len: llama", "model.causal"],
        ),
        (
            {"preset": "gpt2"},
            2,
            {"parallel": {"pp": 2, **BETWEEN}},
            ["is not an encoder-decoder", 'parallel.cut = "cost"'],
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    model: dict[str, object], ranks: int, sections: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        plan_of(model, ranks, **sections)
    for word in words:
        assert word in str(refusal.value)
