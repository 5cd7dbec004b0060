"""In: prompts, functions of rewards. Out: runs whose model writes answers walk on layouts as on one process; a resumed
run is bitwise that which was not; what is refused. Does not compare losses with those of trl (test_rewarded does)."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from forker import Forker, Runs
from runs import called, losses, make_project, refused

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
    "updates": ("train.updates_per_answer=2", "train.num_steps=4", "train.clip=0.03", "train.answer_mean=limit"),
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
    """Fault: answers depend on the rank that writes them, or on weights of another step; a sum is that of a rank."""
    parallel = [f"parallel.{key}" for key in layout.split()]
    expected = runs.of_one(*CASES[case])
    found = runs.run(ranks, *CASES[case], *parallel, *([f"train.microbatch_size={size}"] if size else []))
    names = ("train_loss", "grad_norm", "val_loss", *MEASURES, *(["kl"] if case in ("kl", "lora") else []))
    names = (*names, *(["clipped"] if case == "updates" else []))
    rows, others = found.read_metrics(), expected.read_metrics()
    for mine, other in zip(rows, others, strict=True):  # advantages add up to 0, and the first loss is their rounding
        numbers = ([math.nan if row[name] is None else row[name] for name in names] for row in (mine, other))
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-9, abs=1e-12, nan_ok=True)
    assert max(row["grad_norm"] for row in rows) > 1e-4
    assert case != "updates" or rows[1]["clipped"] > 0 == rows[2]["clipped"]
    assert answers_of(found.path) == answers_of(expected.path)
    assert len({row["reward"] for row in rows}) > 1


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


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), [("plain", "killed 5"), ("updates", "asked_to_stop 3")])
def test_a_run_that_is_killed_or_stopped_goes_on_bitwise(runs: Runs, case: str, fault: str) -> None:
    """Fault: what a rank has drawn before it died decides what it draws afterwards; a save parts steps that share
    answers."""
    words = ("parallel.dp_replicate=2", "train.precision=fp32", *CASES[case], "train.num_steps=6", "checkpoint.every=2")
    whole = runs.run(2, *words)
    assert any(code != 0 for code in runs.start(2, *words, fault=fault).codes)
    assert len(runs.last().read_metrics()) < 6
    found = runs.run(2, *words, resume=True)
    assert losses(found) == losses(whole)
    assert answers_of(found.path) == answers_of(whole.path)


EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo"
WORDS_OF_TWO = (
    *(
        "data.corpus=two.jsonl",
        "data.validation=two.jsonl",
        "data.tokenizer=letters.json",
        "data.reward=letter:letters",
    ),
    *("model.hidden_dim=32", "model.seq_len=128", "train.num_steps=160", "train.eval_every=80"),
    *("train.global_batch_size=12", "train.group_size=32", "train.new_tokens=2", "optimizer.learning_rate=2e-3"),
    *("train.kl=0.01", "optimizer.warmup_steps=10", "optimizer.weight_decay=0.0"),
)
"""In fp64 (SIZES): in fp32 kernels of other processors round otherwise, draws follow, and some learn more slowly."""


@pytest.mark.slow
def test_rewards_rise_and_a_run_is_scored(runs: Runs) -> None:
    """Fault: an advantage has the wrong sign, or evaluate writes other answers than a validation."""
    shutil.copy(EXAMPLE / "letters.json", runs.project)
    shutil.copy(EXAMPLE / "judge.py", runs.project / "letter.py")
    lines = [{"prompt": one + other, "answer": other + one} for one in "abcdef" for other in "abcdef"]
    (runs.project / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = runs.run(1, *WORDS_OF_TWO).read_metrics()
    assert sum(row["reward"] for row in rows[-10:]) / 10 > 0.9 > 0.2 > rows[0]["reward"]
    assert rows[-1]["val_reward"] == -rows[-1]["val_loss"] > 0.9
    assert [row["data_s"] > 0 for row in rows] == [True] * len(rows)
    done = called(runs.project, "evaluate", str(runs.last().path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["reward"] == pytest.approx(rows[-1]["val_reward"])
    assert found["count"] == 36


TEXT = {"prompt": "abc", "answer": "cba"}
CHAT = {"prompt": [{"role": "user", "content": "abc"}], "answer": "cba"}
MORE = ("parallel.ranks=2",)
REFUSED: list[tuple[Any, tuple[str, ...], str]] = [
    ({"answer": "cba"}, (), 'no "prompt" (it has: answer); set data.prompt_key'),
    ({"prompt": 3}, (), '"prompt": a text or a list of messages is needed, found 3'),
    (CHAT, (), "data.chat_template is needed to write messages as text"),
    ({"prompt": "abc"}, ("data.reward=exact",), '"answer": data.reward = "exact" compares with a text or a number'),
    ({**TEXT, "prompt": "abc" * 9}, (), "raise data.seq_len, lower train.group_size or train.new_tokens"),
    (TEXT, ("data.reward=judge:shares",), "has no function shares; did you mean judge:share?"),
    (TEXT, ("data.reward=judge:not_a_function",), "must be a function, and is an int"),
    (TEXT, ("data.reward=judges",), 'must be "module:NAME", or "exact"'),
    (TEXT, ("data.template={prompt}={response}!",), "the model writes what follows {response}"),
    (TEXT, ("train.compile=model",), 'train.compile = "model": data.task = "grpo" has tokens without a target'),
    (TEXT, (*MORE, "parallel.pp=2"), 'parallel.pp = 2: data.task = "grpo": no rank has all layers'),
    (TEXT, (*MORE, "parallel.cp=2"), 'parallel.cp = 2: data.task = "grpo": ranks share the positions of a sample'),
    (TEXT, (*MORE, "parallel.average_every=2"), "parallel.average_every = 2: data.task = "),
    (TEXT, ("train.updates_per_answer=2",), "train.num_steps = 3: train.updates_per_answer = 2 steps learn from"),
]


@pytest.mark.parametrize(("line", "words", "said"), [pytest.param(*one, id=one[2][:40]) for one in REFUSED])
def test_what_is_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str], line: dict[str, object], words: tuple[str, ...], said: str
) -> None:
    """Fault: a layout that cannot write answers, or a line that asks nothing, ends in a traceback or is trained on."""
    (runs.project / "bad.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [TEXT, line] * 6))
    found = refused(runs.project, capsys, *SIZES, "data.corpus=bad.jsonl", "train.global_batch_size=2", *words)
    assert said in found
    assert "Traceback" not in found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_that_fails_ends_the_run_with_one_sentence(runs: Runs, ranks: int) -> None:
    """Fault: the other ranks wait for the one whose reward has failed, or each prints an error of its own."""
    (runs.project / "fail").write_text("")
    done = runs.start(ranks, "data.reward=judge:fails_later")
    (runs.project / "fail").unlink()
    assert set(done.codes) == {2}
    assert len({line for line in done.said.splitlines() if "raised KeyError: 'no such unit'" in line}) == 1
    assert "data.reward = judge:fails_later: words.jsonl:" in done.said
    assert ", step 1: raised" in done.said
    hung = runs.start(ranks, "data.reward=judge:endless", "data.reward_timeout_s=1")
    assert set(hung.codes) == {2}
    assert len({line for line in hung.said.splitlines() if "no reward after 1 s; raise data.reward_tim" in line}) == 1
    assert "Traceback" not in done.said + hung.said


def test_the_plan_says_what_it_does_not_count(runs: Runs) -> None:
    """Fault: a plan is silent about the answers, or knows other sizes of the engine than a run has."""
    from codescent.inference import answers  # noqa: PLC0415
    from codescent.verbs import plan_answers  # noqa: PLC0415

    names = ("MOST_ROWS", "MOST_BYTES", "PAGE_SIZE")
    assert [getattr(answers, name) for name in names] == [getattr(plan_answers, name) for name in names]
    done = called(runs.project, "plan", "run.toml", *SIZES, "train.kl=0.1", "parallel.dp_shard=2", "parallel.ranks=2")
    assert done.returncode == 0, done.stderr
    assert "16 of up to 5 tokens, written before each step" in done.stdout
    assert "their time and messages are not counted here" in done.stdout
    assert "of gathered weights" in done.stdout
    assert "a copy of trained weights" in done.stdout
