"""In: models with mu-P, as wide as their base and wider. Out: the run without it, bit by bit; one trajectory on each
layout; initial values and learning rates by role; what is refused.
Does not measure activations (test_coordinates does)."""

from __future__ import annotations

import math

import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, called, losses, make_project

from codescent import models
from codescent.base.errors import UserError
from codescent.build.plan import build
from codescent.config.load import load
from codescent.config.sections import Optimizer
from codescent.operators.attention import attend
from codescent.operators.block_attention import ScoreTraits
from codescent.plan import Plan
from codescent.train.muon import scale
from codescent.train.optimize import Optimizer as Optimize
from codescent.train.optimize import Weight
from codescent.verbs.plan_mup import mup_rows

SIZES = (
    "model.num_layers=2",
    "model.num_heads=4",
    "model.hidden_dim=32",
    "model.vocab_size=97",
    "data.tokenizer=char",
    "train.num_steps=3",
    "train.global_batch_size=16",
    "train.eval_every=2",
    "train.check_every=1",
    "train.precision=fp64",
    "optimizer.learning_rate=3e-3",
    "optimizer.max_grad_norm=0.1",
)
GPT2 = ("model.kind=gpt2",)
LLAMA = ("model.kind=llama", "model.num_kv_heads=2", "model.ffn_dim=64", "model.tie_head=false")
WIDER = ("model.mup_base_dim=8", "model.mup_base_head_dim=4")
"""Four times as wide as the base, with heads twice as large."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("mup")
    make_project(project)
    return Runs(project, forker, SIZES, ("train.microbatch_size=16",))


SGD = ("optimizer.kind=sgd", "optimizer.learning_rate=0.3")


@pytest.mark.parametrize("kind", [GPT2, (*LLAMA, *SGD), (*LLAMA, "optimizer.kind=muon")])
def test_at_the_width_of_the_base_a_run_is_the_same_bit_by_bit(runs: Runs, kind: tuple[str, ...]) -> None:
    """Catches: a factor that is not 1 there, a group of its own that changes the order of the update."""
    plain, base = runs.of_one(*kind), runs.of_one(*kind, "model.mup_base_dim=32", "model.mup_base_head_dim=8")
    assert losses(plain) == losses(base)
    wider = runs.of_one(*kind, *WIDER)
    assert losses(wider)[0] != losses(plain)[0]  # else the keys do nothing at all


def walk(runs: Runs, kind: tuple[str, ...], ranks: int, layout: str) -> None:
    """A run with mu-P on the layout has the losses of one process."""
    expected = runs.of_one(*kind, *WIDER)
    keys = (f"parallel.{key}" for key in layout.split())
    found = runs.run(ranks, *kind, *WIDER, *keys, "train.microbatch_size=4")
    assert_same(found, expected, 1e-12)
    assert losses(expected)[-1] < losses(expected)[0]


@pytest.mark.parametrize(("kind", "ranks", "layout"), [(LLAMA, 4, "cp=2 tp=2"), (GPT2, 4, "pp=2 dp_shard=2")])
def test_a_layout_has_the_losses_of_one_process(runs: Runs, kind: tuple[str, ...], ranks: int, layout: str) -> None:
    """Catches: a rank that scales its scores by its own heads, a shard without its learning rate."""
    walk(runs, kind, ranks, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        (GPT2, 2, "tp=2"),
        (GPT2, 2, "tp=2 recompute=products"),
        ((*GPT2, "model.dropout=0.1"), 2, "tp=2"),
        ((*LLAMA, "model.qk_norm=head", *SGD), 2, "tp=2"),
        ((*LLAMA, "optimizer.kind=muon"), 2, "dp_shard=2 zero_stage=1"),
        ((*GPT2, *SGD), 2, "dp_shard=2 zero_stage=2"),
        (GPT2, 3, "dp_replicate=2 servers=1"),
        (GPT2, 2, "pp=2 schedule=zero-bubble"),
    ],
)
def test_every_layout_has_the_losses_of_one_process(runs: Runs, kind: tuple[str, ...], ranks: int, layout: str) -> None:
    """Catches: a server without the learning rate of a tensor, dropout whose scores have the usual factor."""
    walk(runs, kind, ranks, layout)


def test_a_run_that_is_resumed_is_bitwise_that_which_was_not(runs: Runs) -> None:
    """Catches: a group of the optimizer whose factor, or whose decay divided by it, is restored twice."""
    words = (*LLAMA, *WIDER, "train.precision=fp32", "optimizer.decay_steps=6", "optimizer.kind=muon")
    whole = runs.run(1, *words, "train.num_steps=6")
    runs.run(1, *words)
    assert losses(runs.run(1, *words, "train.num_steps=6", resume=True)) == losses(whole)


def test_another_base_is_refused_at_a_resume(runs: Runs) -> None:
    """Catches: a run whose learning rates change in the middle."""
    run = runs.of_one(*GPT2, *WIDER)
    done = called(runs.project, "train", "--resume", str(run.path.relative_to(runs.project)), "model.mup_base_dim=16")
    assert done.returncode == 2
    assert "model.mup_base_dim" in done.stderr


def planned(*words: str) -> Plan:
    """The plan of words for one rank."""
    return build(load("default", [*SIZES, *words]).config, 97, 1)


def factors(plan: Plan) -> dict[str, float]:
    """The factor of the learning rate of each tensor of the first block, and outside of blocks."""
    names = {tensor.parameter.name: tensor.rate_factor for tensor in plan.tensors}
    return {name: factor for name, factor in names.items() if not name.startswith("blocks.1.")}


def test_adamw_scales_hidden_matrices_alone() -> None:
    """Catches: a role without its factor: table 8 of Tensor Programs V, for a model four times as wide."""
    found = factors(planned(*LLAMA, "model.qkv_bias=true", *WIDER))
    hidden = {name for name in found if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight"))}
    assert len(hidden) == 4
    assert {found[name] for name in hidden} == {1 / 4}
    assert {factor for name, factor in found.items() if name not in hidden} == {1.0}


def test_sgd_scales_vectors_and_embeddings_alone() -> None:
    """Catches: a vector of a head that counts as one of the width, a rate of AdamW."""
    found = factors(planned(*LLAMA, "model.qk_norm=head", "model.qkv_bias=true", *WIDER, "optimizer.kind=sgd"))
    assert found["tok.weight"] == found["head.weight"] == found["blocks.0.norm_1.weight"] == 4.0
    assert found["blocks.0.attn.qkv.bias"] == 4.0
    assert found["blocks.0.attn.q_norm.weight"] == 2.0
    assert found["blocks.0.attn.qkv.weight"] == found["blocks.0.mlp.down.weight"] == 1.0


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_updates_of_muon_have_one_spectral_norm_at_every_width(rule: str) -> None:
    """Catches: updates that grow or shrink with the width: the factor of muon_adjust_lr_fn counted twice, or never."""
    muon = (*GPT2, "optimizer.kind=muon", f"optimizer.muon_adjust_lr_fn={rule}", *WIDER)
    base = ("model.hidden_dim=8", "model.num_heads=2")
    narrow, wide = factors(planned(*muon, *base)), factors(planned(*muon))
    assert narrow["blocks.0.mlp.up.weight"] == wide["tok.weight"] == wide["norm.weight"] == 1.0
    for name, rows, columns in (("mlp.up", 4, 1), ("mlp.down", 1, 4), ("attn.out", 1, 1), ("attn.qkv", 1, 1)):
        of_base, of_wide = (scale(rows * width, columns * width, rule) for width in (8, 32))
        assert of_wide * wide[f"blocks.0.{name}.weight"] == pytest.approx(of_base), name


PLANS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "adamw": (
        (*LLAMA, *WIDER),
        [
            "base: 8 channels, heads of 4; this model is 4 x as wide",
            "hidden matrices: initial values x 0.5, learning rate x 0.25",
            "logits x 0.25",
            "scores of attention x 0.7071",
        ],
    ),
    "sgd": (
        (*LLAMA, "model.qk_norm=head", "optimizer.kind=sgd", *WIDER),
        [
            "base: 8 channels, heads of 4; this model is 4 x as wide",
            "embeddings, norms, head: learning rate x 4",
            "hidden matrices: initial values x 0.5",
            "norms of heads: learning rate x 2",
            "logits x 0.25",
            "scores of attention x 0.7071",
        ],
    ),
    "base": ((*LLAMA, "model.mup_base_dim=32"), ["base: 32 channels, heads of 8; this model is 1 x as wide"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_what_has_which_factor(name: str) -> None:
    """Catches: a table that is silent on mu-P, or that names a role with the factor of another."""
    words, lines = PLANS[name]
    assert list(mup_rows(planned(*words))) == [("mu-P", lines)]


def test_a_plan_without_mup_says_nothing_of_it() -> None:
    """Catches: a row that every plan has."""
    assert not list(mup_rows(planned(*LLAMA)))


def deviations(*words: str) -> dict[str, float]:
    return {tensor.parameter.name: tensor.parameter.std for tensor in planned(*words).tensors}


@pytest.mark.parametrize(
    "kind", [GPT2, LLAMA, ("model.kind=transformer", "model.num_encoder_layers=1", "model.num_decoder_layers=1")]
)
def test_initial_values_follow_the_fan_in(kind: tuple[str, ...]) -> None:
    """Catches: a deviation that follows the width twice, as Glorot's would, or an embedding that follows it."""
    if "transformer" in kind[0]:
        kind = (
            *kind,
            "model.source_len=8",
            "model.target_len=8",
            "data.task=seq2seq",
            "model.num_layers=auto",
            "model.seq_len=auto",
            "log.sample_tokens=0",
        )
    base = ("model.hidden_dim=8", "model.ffn_dim=16", "model.num_heads=2", "model.num_kv_heads=auto")
    wide = ("model.hidden_dim=32", "model.ffn_dim=64", "model.num_heads=4", "model.num_kv_heads=auto")
    before, after = deviations(*kind, *base), deviations(*kind, *wide, *WIDER)
    assert before.keys() == after.keys()
    for name, std in before.items():
        hidden = any(part in name for part in ("attn", "cross", "mlp"))
        assert math.isclose(after[name], std / 2 if hidden else std), name


def test_a_head_of_few_outputs_needs_no_factor_on_its_logits() -> None:
    """Catches: answers (qa) whose logits grow with the width: variance 1 / width^2, and a rate of 1 / width."""
    shape = models.shape_of(
        "bert", {"num_layers": 1, "num_heads": 4, "hidden_dim": 32, "vocab_size": 97, "seq_len": 8, "head": "qa",
                 "mup_base_dim": 8},
    )  # fmt: skip
    of_name = {one.name: one for one in models.parameters_of("bert", shape)}
    assert of_name["head.weight"].std == 0.02 / 4
    assert of_name["head.bias"].fixed
    assert not of_name["blocks.0.attn.qkv.bias"].fixed


@pytest.mark.parametrize(("kind", "factor"), [("adamw", 0.25), ("sgd", 4.0), ("muon", 0.25)])
def test_a_step_shrinks_every_weight_alike(kind: str, factor: float) -> None:
    """Catches: a decay that follows the learning rate of its group, a rate that does not follow the factor."""
    config = Optimizer(kind=kind, learning_rate=0.5, weight_decay=0.1, max_grad_norm=0.0)  # type: ignore[arg-type]
    decayed = [torch.ones(4, 4) for _ in range(2)]
    names = ("scaled", factor), ("plain", 1.0)
    weights = [Weight(name, one, one, True, rate_factor=by) for one, (name, by) in zip(decayed, names, strict=True)]
    optimizer = Optimize(weights, config)
    optimizer.step([torch.zeros(4, 4) for _ in weights], 0.5)
    assert [group["lr"] for group in optimizer.torch.param_groups] == [0.5 * factor, 0.5]
    for one in decayed:
        assert torch.allclose(one, torch.full((4, 4), 0.95))


def test_scores_with_dropout_have_the_factor() -> None:
    """Catches: training with dropout, step by step, whose scores are not those of the fused kernels."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    scores = ScoreTraits(width=32.0)
    keys = torch.zeros(2, dtype=torch.int64)
    whole = attend(q, k, v, None, None, 0.0, 0, scores)
    assert torch.allclose(attend(q, k, v, None, keys, 0.0, 0, scores), whole)
    assert torch.allclose(whole, (q @ k.transpose(2, 3) / 32**0.5).softmax(-1) @ v)


REFUSED = [
    (("lora.rank=4",), "lora.rank"),
    (("optimizer.kind=adam",), "optimizer.weight_decay = 0.1: adam adds it"),
    (("optimizer.kind=rmsprop",), "optimizer.weight_decay = 0.1: rmsprop adds it"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_what_has_no_rule_is_refused(words: tuple[str, ...], why: str) -> None:
    """Catches: adapters or a decay that nobody scaled, trained in silence."""
    with pytest.raises(UserError) as error:
        planned(*GPT2, *WIDER, *words)
    assert len(error.value.problems) == 1
    assert why in str(error.value)


def test_adam_without_decay_is_not_refused() -> None:
    """Catches: a change that a message names, which does not do."""
    assert factors(planned(*GPT2, *WIDER, "optimizer.kind=adam", "optimizer.weight_decay=0"))["tok.weight"] == 1.0
