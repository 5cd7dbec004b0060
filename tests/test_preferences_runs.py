"""In: pairs of answers, judged answers. Out: runs with each loss on layouts walk the trajectory of one process; refusals.
Does not compare losses with those of trl (test_preferences does)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from forker import Forker, Runs
from runs import assert_same, losses, make_project

SIZES = (
    "model.num_layers=3",
    "model.num_heads=4",
    "model.hidden_dim=16",
    "model.seq_len=64",
    "data.task=dpo",
    "data.corpus=pairs.jsonl",
    "data.template=Say {prompt}: {response}",
    "train.precision=fp64",
    "train.num_steps=3",
    "train.eval_every=2",
    "train.check_every=1",
    "train.global_batch_size=8",
    "train.head_chunk_tokens=96",
)
LLAMA = ("model.kind=llama", "model.num_kv_heads=2")
GEMMA = (*LLAMA, "model.tie_head=true", "model.logit_cap=3.0")
LORA = (*LLAMA, "lora.rank=2")
KTO = ("train.preference=kto", "data.answers_per_sample=2", "data.corpus=judged.jsonl", "train.rejected_weight=1.5")
CASES = {
    "dpo": (),
    "dpo llama": LLAMA,
    "dpo lora": LORA,
    "ipo": ("train.preference=ipo", *LLAMA),
    "orpo": ("train.preference=orpo", *GEMMA),
    "simpo": ("train.preference=simpo",),
    "kto": (*KTO, *GEMMA),
    "kto gpt2": (*KTO, "model.dropout=0.1"),
}
QUICK = [
    ("dpo", "tp=2", 2, ""),
    ("kto", "cp=2 dp_replicate=2", 4, "2"),
]
SLOW = [
    ("dpo", "dp_replicate=2", 2, "2"),
    ("dpo", "dp_shard=2 zero_stage=2", 2, ""),
    ("dpo", "cp=2 tp=2", 4, "2"),
    ("dpo llama", "cp=2 context=all-gather", 2, ""),
    ("dpo llama", "dp_shard=2 recompute=full", 2, "2"),
    ("dpo llama", "pp=2 schedule=zero-bubble", 2, "2"),
    ("dpo llama", "cp=2 tp=2 sequence_parallel=false", 4, "4"),
    ("dpo lora", "dp_shard=2", 2, "2"),
    ("dpo lora", "tp=2", 2, "1"),
    ("dpo lora", "pp=2", 2, "2"),
    ("ipo", "dp_replicate=2", 2, "1"),
    ("ipo", "dp_shard=2 cp=2", 4, ""),
    ("ipo", "pp=2 tp=2", 4, "4"),
    ("orpo", "pp=2", 2, "2"),
    ("orpo", "cp=2", 2, "2"),
    ("orpo", "tp=2 recompute=products", 2, "4"),
    ("simpo", "dp_shard=2", 2, ""),
    ("simpo", "dp_replicate=2 pp=2 tp=2", 8, "2"),
    ("simpo", "cp=2", 2, "4"),
    ("kto", "pp=2 cp=2", 4, "4"),
    ("kto", "dp_shard=2 tp=2", 4, "2"),
    ("kto gpt2", "tp=2", 2, "4"),
    ("kto gpt2", "pp=2 schedule=interleaved virtual_stages=2", 2, "2"),
]
LAYOUTS = [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
PAIRED = ("chosen_rewards", "rejected_rewards", "reward_margins", "reward_accuracy")
SINGLE = ("chosen_rewards", "rejected_rewards", "reward_accuracy", "reference_kl")


def write_preferences(folder: Path) -> None:
    rng = random.Random(5)
    words = ["many", "workers", "one", "descent", "loss", "sum", "mean"]
    asked = [" ".join(rng.choice(words) for _ in range(rng.randint(1, 2))) for _ in range(120)]
    pairs = [{"prompt": one, "chosen": one[::-1][:9], "rejected": one[: rng.randint(1, 5)]} for one in asked]
    judged = [
        {"prompt": one["prompt"][:9], "completion": one[which][:5], "label": which == "chosen"}
        for one in pairs
        for which in rng.sample(["chosen", "rejected"], 2)
    ]
    for name, lines in {"pairs": pairs, "judged": judged}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("preferences")
    make_project(project)
    write_preferences(project)
    return Runs(project, forker, SIZES, ())


@pytest.mark.parametrize(("case", "layout", "ranks", "size"), LAYOUTS)
def test_every_layout_walks_the_trajectory_of_one_process(
    runs: Runs, case: str, layout: str, ranks: int, size: str
) -> None:
    """Fault: a rank counts the tokens of an answer twice, or not at all; a reference of another layout."""
    parallel = [f"parallel.{key}" for key in layout.split()]
    more = [f"train.microbatch_size={size}"] if size else []
    expected = runs.of_one(*CASES[case])
    found = runs.run(ranks, *CASES[case], *parallel, *more)
    assert_same(found, expected, 1e-9)
    names = SINGLE if "kto" in case else PAIRED
    for mine, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-9, abs=1e-12)
    assert losses(expected)[-1] < losses(expected)[0]
