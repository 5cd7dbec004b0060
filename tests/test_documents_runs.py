"""In: texts of several documents, conversations. Out: runs with data.documents = "separate" on layouts; refusals.
Does not test attention itself: test_documents.py does."""

from __future__ import annotations

import json
import random
import re

import pytest
from forker import Forker, Runs
from runs import assert_same, called, losses, make_project, refused

SIZES = (
    "model.num_layers=3",
    "model.num_heads=4",
    "model.hidden_dim=16",
    "model.seq_len=32",
    "data.documents=separate",
    "train.precision=fp64",
    "train.num_steps=3",
    "train.eval_every=2",
    "train.check_every=1",
    "train.global_batch_size=8",
)
TEXT = ("data.corpus=documents.jsonl",)
LLAMA = ("model.kind=llama", "model.num_kv_heads=2", "data.tokenizer=char")
SFT = ("data.task=sft", "data.corpus=pairs.jsonl", "data.template=Say {prompt}: {response}")
GEMMA = (
    *LLAMA,
    "model.norm=both",
    "model.norm_plus_one=true",
    "model.activation=gelu",
    "model.scale_embedding=true",
    "model.tie_head=true",
    "model.window=5",
    "model.full_every=2",
)
TASKS = {
    "gpt2": TEXT,
    "llama": (*TEXT, *LLAMA),
    "sft": SFT,
    "gpt2 with dropout": (*TEXT, "model.dropout=0.1"),
    "gemma 2": (*TEXT, *GEMMA, "model.score_cap=2.0", "model.logit_cap=3.0", "model.score_dim=10"),
    "gemma 3": (*TEXT, *GEMMA, "model.qk_norm=head", "model.rope_local_theta=50.0"),
}
QUICK = [
    ("gpt2", "tp=2", 2, ""),
    ("llama", "cp=2", 2, ""),
    ("gpt2 with dropout", "cp=2 context=all-gather", 2, ""),
    ("sft", "cp=2", 2, ""),
    ("sft", "tp=2", 2, ""),
    ("llama", "pp=2 schedule=zero-bubble", 2, "2"),
    ("llama", "dp_shard=2 recompute=full", 2, ""),
    ("gemma 2", "cp=2 tp=2", 4, "4"),
]
SLOW = [
    ("gpt2", "dp_replicate=2", 2, ""),
    ("gpt2", "dp_shard=2 zero_stage=1", 2, "2"),
    ("gpt2", "pp=2", 2, "2"),
    ("gpt2", "cp=2 tp=2", 4, ""),
    ("gpt2", "cp=4", 4, ""),
    ("gpt2", "recompute=products", 1, "4"),
    ("llama", "cp=2 tp=2 sequence_parallel=false", 4, "4"),
    ("llama", "pp=2 cp=2", 4, "4"),
    ("llama", "tp=2 recompute=products", 2, "4"),
    ("sft", "pp=2 cp=2 recompute=full", 4, "4"),
    ("sft", "dp_shard=2 tp=2", 4, ""),
    ("sft", "cp=2 tp=2 context=all-gather", 4, ""),
    ("gpt2 with dropout", "tp=2 recompute=products", 2, "4"),
    ("gpt2 with dropout", "pp=2 tp=2", 4, "4"),
    ("gemma 2", "tp=2 recompute=products", 2, "4"),
    ("gemma 2", "cp=2 context=all-gather recompute=full", 2, ""),
    ("gemma 2", "pp=2 schedule=zero-bubble", 2, "2"),
    ("gemma 3", "cp=2", 2, ""),
    ("gemma 3", "pp=2 tp=2 recompute=selective", 4, "4"),
    ("gemma 3", "dp_shard=2 cp=2", 4, ""),
]
LAYOUTS = [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project, rng = tmp_path_factory.mktemp("documents"), random.Random(3)
    make_project(project)
    words = ["many", "workers", "one", "descent", "loss", "sum", "mean"]
    texts = [" ".join(rng.choice(words) for _ in range(rng.randint(1, 9))) for _ in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (project / "documents.jsonl").write_text(lines)
    pairs = [{"prompt": text[:5], "response": text[::-1][: rng.randint(1, 9)]} for text in texts]
    (project / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return Runs(project, forker, SIZES, ())


@pytest.mark.parametrize(("task", "layout", "ranks", "size"), LAYOUTS)
def test_every_layout_walks_the_trajectory_of_one_process(
    runs: Runs, task: str, layout: str, ranks: int, size: str
) -> None:
    parallel = [f"parallel.{key}" for key in layout.split()]
    more = [f"train.microbatch_size={size}"] if size else []
    expected = runs.of_one(*TASKS[task])
    assert_same(runs.run(ranks, *TASKS[task], *parallel, *more), expected, 1e-11)
    assert losses(expected)[-1] < losses(expected)[0]


def test_a_run_that_is_resumed_is_bitwise_that_which_was_not(runs: Runs) -> None:
    words = (*SFT, "train.precision=fp32", "optimizer.decay_steps=6")
    whole = runs.run(1, *words, "train.num_steps=6")
    runs.run(1, *words)
    assert losses(runs.run(1, *words, "train.num_steps=6", resume=True)) == losses(whole)


def test_documents_are_other_losses_than_one_text(runs: Runs) -> None:
    separate, joined = runs.of_one(*TEXT), runs.run(1, *TEXT, "data.documents=joined")
    assert losses(separate)[0] != losses(joined)[0]
    assert "documents" not in (joined.path / "plan.json").read_text().replace("documents.jsonl", "")


def test_packing_leaves_less_padding(runs: Runs) -> None:
    packed, single = runs.of_one(*SFT), runs.run(1, *SFT, "data.documents=joined")
    shares = [[row["padding"] for row in run.read_metrics()] for run in (packed, single)]
    assert max(shares[0]) < 0.1 < 0.3 < min(shares[1])
    assert {row["padding"] for row in runs.of_one(*TEXT).read_metrics()} == {None}


def test_evaluate_scores_documents_as_training_does(runs: Runs) -> None:
    run = runs.of_one(*TEXT)
    done = called(runs.project, "evaluate", str(run.path.relative_to(runs.project)))
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) == pytest.approx(run.read_metrics()[-1]["val_loss"], abs=0.02)  # other windows
    assert "bits per byte" not in done.stdout.splitlines()[1]


REFUSED = [
    (("model.kind=bert", "data.tokenizer=bert:vocab.txt"), 'data.task = "mlm": BERT predicts masked tokens'),
    (
        ("model.kind=transformer", "model.num_encoder_layers=1", "model.num_decoder_layers=1", "model.source_len=8",
         "model.target_len=8", "model.num_layers=auto", "model.seq_len=auto"),
        'model.kind = "transformer" attends to all of a sample; only gpt2 and llama',
    ),
    (("train.compile=model",), "the last token of a document has no target"),
    (("data.tokenizer=char", "data.corpus=corpus.txt"), "has no token that ends a document"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_what_has_no_documents_is_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    (runs.project / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##a"]))
    said = refused(runs.project, capsys, "data.documents=separate", *words)
    assert expected in said
    assert "Traceback" not in said


def test_graphs_of_cuda_have_equal_sizes(runs: Runs) -> None:
    words = ("data.documents=separate", "train.cuda_graphs=true", "train.compile=blocks", "train.device=cuda")
    done = called(runs.project, "plan", "run.toml", *words)
    assert done.returncode == 2
    assert "the number of documents changes from step to step" in done.stderr
