"""In: llamas with the traits of other families, on several ranks. Out: the losses of one process; a resume; adapters.
Does not compare with transformers (test_families does) or count bytes (test_declared and test_activations do)."""

from __future__ import annotations

import pytest
from forker import Forker, Runs
from runs import assert_same, losses, make_project

from codescent.verbs.sample import sample_run

SIZES = (
    "model.kind=llama",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.hidden_dim=32",
    "model.ffn_dim=45",
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
YARN = ("model.rope_type=yarn", "model.rope_factor=4.0", "model.rope_original_seq_len=8")
GEMMA = (
    "model.norm=both",
    "model.norm_plus_one=true",
    "model.activation=gelu",
    "model.scale_embedding=true",
    "model.full_every=2",
    "model.tie_head=true",
)
TRAITS: dict[str, tuple[str, ...]] = {
    "qwen 2": ("model.qkv_bias=true", "model.tie_head=true"),
    "qwen 3": ("model.qk_norm=head", "model.head_dim=12", *YARN),
    "olmo 2": ("model.qk_norm=all", "model.norm=output"),
    "all": ("model.qk_norm=all", "model.norm=output", "model.qkv_bias=true", "model.head_dim=6", "model.window=6"),
    "mistral": ("model.window=5",),
    "gemma 2": (*GEMMA, "model.score_cap=2.0", "model.logit_cap=3.0", "model.score_dim=10", "model.window=5"),
    "gemma 3": (*GEMMA, "model.qk_norm=head", "model.window=6", "model.rope_local_theta=50.0"),
    "phi 4": ("model.rotary_dim=6", "model.window=7", "model.fused=true"),
}
QUICK = (
    ("all", 4, "cp=2 tp=2 recompute=full"),
    ("qwen 3", 2, "tp=2 sequence_parallel=false"),
    ("gemma 2", 4, "pp=2 tp=2 recompute=products"),
    ("gemma 3", 4, "cp=2 tp=2"),
)
LAYOUTS = {
    "tp=2": 2,
    "pp=2 tp=2 sequence_parallel=false": 4,
    "cp=2 context=all-gather": 2,
    "pp=2 schedule=zero-bubble": 2,
    "pp=2 tp=2 schedule=zero-bubble": 4,
    "dp_shard=2": 2,
    "dp_shard=2 zero_stage=1": 2,
    "dp_shard=2 tp=2": 4,
    "tp=2 recompute=products": 2,
    "tp=2 recompute=selective": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("traits")
    make_project(project)
    return Runs(project, forker, SIZES, ("train.microbatch_size=16",))


def walk(runs: Runs, ranks: int, layout: str, *words: str) -> None:
    """A run on the layout has the losses of one process."""
    expected = runs.of_one(*words)
    found = runs.run(ranks, *words, *(f"parallel.{key}" for key in layout.split()), "train.microbatch_size=4")
    assert_same(found, expected, 1e-12)
    assert losses(expected)[-1] < losses(expected)[0]  # equality of runs that stand still proves nothing


@pytest.mark.parametrize(("traits", "ranks", "layout"), QUICK)
def test_a_layout_has_the_losses_of_one_process(runs: Runs, traits: str, ranks: int, layout: str) -> None:
    """Catches: a scale whose gradient lacks heads, a mean over the heads of one rank, a window of local positions."""
    walk(runs, ranks, layout, *TRAITS[traits])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("traits", TRAITS)
def test_every_layout_has_the_losses_of_one_process(runs: Runs, traits: str, layout: str) -> None:
    walk(runs, LAYOUTS[layout], layout, *TRAITS[traits])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("traits", ["qwen 3", "all", "gemma 2", "gemma 3"])
def test_adapters_a_resume_and_a_sample(runs: Runs, traits: str) -> None:
    """Catches: a scale that is frozen on some ranks only, state that a checkpoint lacks, a cache without a norm."""
    words = (*TRAITS[traits], "lora.rank=3", "lora.whole=norm_1")
    walk(runs, 2, "tp=2", *words)
    walk(runs, 2, "pp=2", *words)
    whole = runs.of_one(*TRAITS[traits])
    half = (
        *TRAITS[traits],
        "parallel.tp=2",
        "train.microbatch_size=4",
        "checkpoint.every=1",
        "optimizer.decay_steps=3",
    )
    first = runs.run(2, *half, "train.num_steps=1")
    found = runs.run(2, *half, resume=True)
    assert first.path == found.path
    assert_same(found, whole, 1e-9, first=1)
    assert len(sample_run(found.path, ["many "], tokens=30, device="cpu")[0]) > 5
