"""In: pairs of answers, judged answers. Out: runs with each loss walk on layouts as on one process; what is refused.
Does not compare losses with those of trl (test_preferences does)."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from forker import Forker, Runs
from runs import assert_same, called, losses, make_project, refused

SIZES = (
    "model.num_layers=4",
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
QUICK = [("dpo", "cp=2", 2, "4")]
SLOW = [
    ("dpo", "tp=2", 2, ""),
    ("kto", "cp=2 dp_replicate=2", 4, "2"),
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
    chats = [
        {
            "prompt": [{"role": "user", "content": one["prompt"]}],
            **{name: [{"role": "assistant", "content": one[name]}] for name in ("chosen", "rejected")},
        }
        for one in pairs
    ]
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    for name, lines in {"pairs": pairs, "judged": judged, "chats": chats}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


CHAT_TEMPLATE = """{% for m in messages %}{% if m.role == "user" %}Say {{ m.content }}: {% else %}{{ m.content }}
<|endoftext|>{% endif %}{% endfor %}""".replace("\n", "")


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
    # A folder of its own: else the layout would read the reference that one process has computed.
    more = [f"data.folder=of {layout} {case}", *([f"train.microbatch_size={size}"] if size else [])]
    expected = runs.of_one(*CASES[case])
    found = runs.run(ranks, *CASES[case], *parallel, *more)
    assert_same(found, expected, 1e-9)
    names = SINGLE if "kto" in case else PAIRED
    for mine, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        assert [mine[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-9, abs=1e-12)
    assert losses(expected)[-1] < losses(expected)[0]


@pytest.mark.slow
def test_a_run_that_is_resumed_is_bitwise_that_which_was_not(runs: Runs) -> None:
    """Fault: a resumed run compares with the weights that it resumes from, not with those that it began with."""
    words = ("train.precision=fp32", "optimizer.decay_steps=6", "data.folder=resumed")
    whole = runs.run(1, *words, "train.num_steps=6")
    runs.run(1, *words)
    for folder in (runs.project / "resumed").glob("references-*"):
        shutil.rmtree(folder)
    assert losses(runs.run(1, *words, "train.num_steps=6", resume=True)) == losses(whole)


@pytest.mark.slow
def test_messages_are_learned_as_the_same_texts(runs: Runs) -> None:
    """Fault: of a conversation other tokens are compared than those of the answer and its end."""
    words = ("data.corpus=chats.jsonl", "data.chat_template=chat.jinja", "data.template={prompt}{response}")
    assert losses(runs.run(1, *words)) == losses(runs.of_one())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks", "measured"),
    [
        pytest.param(("parallel.servers=1", "parallel.dp_replicate=2"), 3, False, id="a server"),
        pytest.param(
            ("parallel.average_every=2", "parallel.dp_replicate=2", "train.num_steps=4"), 2, True, id="rounds"
        ),
    ],
)
def test_replicas_that_train_otherwise(runs: Runs, words: tuple[str, ...], ranks: int, measured: bool) -> None:
    """Fault: a rank that computes nothing waits for a reference, or the sum of a round is taken for that of a step."""
    rows = runs.run(ranks, "data.folder=otherwise", *words).read_metrics()
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] == pytest.approx(0.6931471805599453)
    assert (rows[-1]["reward_margins"] is not None) == measured
    assert not measured or rows[-1]["reward_margins"] > 0


@pytest.mark.slow
def test_a_reference_is_computed_once_and_damage_is_found(runs: Runs) -> None:
    """Fault: another loss computes the reference again, or a run reads a damaged one."""
    words = ("data.folder=shared", "train.num_steps=1", "train.eval_every=0")
    said = runs.start(1, *words, "data.seq_len=44").said
    assert "answers are cut at their ends: data.seq_len = 44, and the longest sample has" in said
    assert "are cut" not in runs.start(1, *words).said
    assert "computing the reference" in said
    assert "computing the reference" not in runs.start(1, *words, "train.preference=ipo", "train.beta=0.5").said
    assert "computing the reference" in runs.start(1, *words, "run.seed=3").said
    for file in (runs.project / "shared").glob("references-*/references.npy"):
        file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)
    done = runs.start(1, *words)
    assert done.codes == [2]
    assert "references.npy: changed" in done.said


@pytest.mark.slow
def test_a_reference_has_the_adapters_that_a_run_begins_with(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a run that begins with trained adapters compares with the model without them, as an earlier run did."""
    few = ("train.num_steps=1", "train.eval_every=0", "data.folder=begun", "optimizer.learning_rate=0.1")
    exported = [str(runs.project / name) for name in ("base", "adapters")]
    assert called(runs.project, "export", str(runs.run(1, *few).path), exported[0]).returncode == 0
    tuned = ("model.weights=base", "lora.rank=2", *few)
    first = runs.run(1, *tuned)
    assert called(runs.project, "export", str(first.path), exported[1], "--adapters").returncode == 0
    began = [runs.run(1, *words) for words in ((*tuned, "lora.weights=adapters"), ("model.adapters=adapters", *tuned))]
    for run in (first, *began):
        rows = run.read_metrics()
        assert rows[0]["train_loss"] == pytest.approx(0.6931471805599453, abs=1e-9)
        assert rows[0]["reward_accuracy"] == 0.0
    assert len(list((runs.project / "begun").glob("references-*"))) == 2 * 4


@pytest.mark.slow
def test_a_model_learns_what_is_preferred_and_is_scored(runs: Runs) -> None:
    """Fault: rewards have the wrong sign, or evaluate compares other answers than training."""
    words = ("train.precision=fp32", "train.num_steps=60", "train.eval_every=30", "optimizer.learning_rate=1e-2")
    rows = runs.run(1, *words).read_metrics()
    assert rows[-1]["reward_margins"] > 0.3 > rows[1]["reward_margins"]
    assert rows[-1]["reward_accuracy"] > 0.9
    assert rows[-1]["chosen_rewards"] - rows[-1]["rejected_rewards"] == pytest.approx(rows[-1]["reward_margins"])
    done = called(runs.project, "evaluate", str(runs.last().path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy_of_means"] > 0.9


TEXT = {"prompt": "many", "chosen": "workers", "rejected": "one"}
CHAT = {"prompt": [{"role": "user", "content": "many"}]}
CHAT |= {name: [{"role": "assistant", "content": TEXT[name]}] for name in ("chosen", "rejected")}
REFUSED = [
    ({"prompt": "many", "chosen": "workers"}, (), 'no "rejected" (it has: prompt, chosen)'),
    ({**TEXT, "chosen": ""}, (), '"chosen": the answer is empty'),
    ({**TEXT, "rejected": "workers"}, (), '"chosen" and "rejected" are equal'),
    ({"chosen": "a b", "rejected": "a c"} | {"prompt": 3}, (), '"prompt": a text or a list of messages is needed'),
    ({"chosen": "up", "rejected": "down"}, (), 'no "prompt", and "chosen" and "rejected" do not begin with the same'),
    ({**TEXT, "prompt": "many " * 40}, (), "leaves no room for an answer; raise data.seq_len"),
    (CHAT, (), "data.chat_template is needed to write them as text"),
    ({**CHAT, "chosen": []}, (), '"chosen": the list of messages is empty'),
    ({**CHAT, "chosen": [{"role": "user", "content": "x"}]}, (), 'the last message must be of the role "assistant"'),
    ({"prompt": "x", "completion": "y", "label": True}, (), 'learned with train.preference = "kto"'),
    ({"prompt": "x", "completion": "y", "label": 2}, ("train.preference=kto",), '"label": true (wanted) or false is'),
    ({"prompt": "x", "completion": "", "label": True}, ("train.preference=kto",), "the answer is empty"),
    (
        {"completion": "y", "label": True},
        ("train.preference=kto",),
        "an answer that is judged by itself needs a prompt",
    ),
    (TEXT, ("data.chosen_key=prompt",), 'data.prompt_key, data.chosen_key: both are "prompt"'),
    (TEXT, ("train.compile=model",), 'train.compile = "model": data.task = "dpo" has tokens without a target'),
    (TEXT, ("data.documents=separate",), "its samples always keep their answers apart; leave data.documents out"),
    (TEXT, ("model.kind=bert", "data.tokenizer=bert:vocab.txt"), 'data.task = "dpo": model.kind = "bert" is trained'),
]


@pytest.mark.parametrize(("line", "words", "said"), [pytest.param(*one, id=one[2]) for one in REFUSED])
def test_what_is_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str], line: dict[str, object], words: tuple[str, ...], said: str
) -> None:
    """Fault: a line that says nothing of a preference is learned from, left out in silence, or ends in a traceback."""
    lines = [TEXT, {**TEXT, "prompt": "one"}, line] * 3 if "label" not in line else [line] * 9
    (runs.project / "bad.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = refused(runs.project, capsys, *SIZES, "data.corpus=bad.jsonl", "train.global_batch_size=2", *words)
    assert said in found
    assert "Traceback" not in found
    assert len(set(found.splitlines())) == len(found.splitlines())  # nothing is said twice
    assert line == TEXT or "bad.jsonl:" in found
