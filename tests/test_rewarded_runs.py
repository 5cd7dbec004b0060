"""In: prompts, functions of rewards. Out: runs whose model writes answers walk on layouts as on one process; a resumed run
is bitwise that which was not; what is refused. Does not compare losses with those of trl (test_rewarded does)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from forker import Forker, Runs
from runs import assert_same, called, losses, make_project, refused

SIZES = (
    "model.kind=llama",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.hidden_dim=16",
    "model.seq_len=64",
    "data.task=grpo",
    "data.corpus=words.jsonl",
    "data.template={prompt}={response}",
    "data.reward=judge:share",
    "train.precision=fp64",
    "train.group_size=4",
    "train.new_tokens=5",
    "train.num_steps=3",
    "train.eval_every=2",
    "train.check_every=1",
    "train.global_batch_size=4",
    "train.head_chunk_tokens=96",
    "optimizer.learning_rate=1e-2",
)
GPT2 = ("model.kind=gpt2", "model.num_kv_heads=auto")
CASES = {
    "plain": (),
    "kl": ("train.kl=0.1", "train.temperature=0.8"),
    "gpt2": (*GPT2, "train.top_k=20", "model.dropout=0.1"),
    "lora": ("lora.rank=2", "train.kl=0.2", "train.scale_rewards=false"),
    "updates": ("train.updates_per_answer=2", "train.num_steps=4", "train.clip=0.01", "train.answer_mean=limit"),
}
SLOW = [
    ("plain", "dp_replicate=2", 2, "1"),
    ("plain", "dp_shard=2", 2, ""),
    ("plain", "tp=2", 2, "2"),
    ("plain", "tp=2 sequence_parallel=false recompute=full", 2, ""),
    ("kl", "dp_shard=2 zero_stage=2", 2, "1"),
    ("kl", "tp=2 dp_shard=2", 4, ""),
    ("kl", "tp=2", 2, "1"),
    ("gpt2", "dp_replicate=2", 2, ""),
    ("gpt2", "tp=2", 2, ""),
    ("lora", "dp_shard=2", 2, "2"),
    ("lora", "dp_replicate=2 tp=2", 4, "1"),
    ("updates", "dp_replicate=2", 2, "1"),
    ("updates", "tp=2", 2, ""),
    ("updates", "dp_shard=2", 2, ""),
]
MEASURES = ("reward", "reward_std", "answer_tokens", "answers_cut", "groups_alike")
JUDGE = '''
import os

def share(prompts, completions, answer, **_):
    """Letters at their place, and a little for the length."""
    return [sum(map(str.__eq__, text, right)) / len(right) - 0.05 * abs(len(text) - len(right))
            + 0.01 * (sum(map(ord, text)) % 7) for text, right in zip(completions, answer)]

def fails_later(prompts, completions, **_):
    if os.path.exists("fail"):
        raise KeyError("no such unit")
    return [float(len(text)) for text in completions]

def endless(prompts, completions, **_):
    while True:
        pass

not_a_function = 3
'''


def write_prompts(folder: Path) -> None:
    rng = random.Random(5)
    words = sorted({"".join(rng.choice("abcd") for _ in range(rng.randint(2, 4))) for _ in range(60)})
    lines = [{"prompt": word, "answer": word[::-1]} for word in words]
    (folder / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "judge.py").write_text(JUDGE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("rewarded")
    make_project(project)
    write_prompts(project)
    return Runs(project, forker, SIZES, ())


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout", "ranks", "size"), SLOW)
def test_every_layout_walks_the_trajectory_of_one_process(
    runs: Runs, case: str, layout: str, ranks: int, size: str
) -> None:
    """Fault: answers depend on the rank that writes them, or on the weights of another step; a sum is that of a rank."""
    parallel = [f"parallel.{key}" for key in layout.split()]
    expected = runs.of_one(*CASES[case])
    found = runs.run(ranks, *CASES[case], *parallel, *([f"train.microbatch_size={size}"] if size else []))
    assert_same(found, expected, 1e-9)
    names = (*MEASURES, *(["kl"] if "kl" in case or case == "lora" else []), *(["clipped"] * (case == "updates")))
    for mine, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-9, abs=1e-12)
    assert answers_of(found.path) == answers_of(expected.path)


def answers_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kl", "updates"])
def test_a_run_that_is_resumed_is_bitwise_that_which_was_not(runs: Runs, case: str) -> None:
    """Fault: a resumed run writes other answers, or its reference is what it resumes from."""
    words = (*CASES[case], "train.precision=fp32", "optimizer.decay_steps=8")
    whole = runs.run(1, *words, "train.num_steps=8")
    runs.run(1, *words, "train.num_steps=4")
    found = runs.run(1, *words, "train.num_steps=8", resume=True)
    assert losses(found) == losses(whole)
    assert answers_of(found.path) == answers_of(whole.path)
