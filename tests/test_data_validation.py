"""In: corpora with a validation file of their own, for every task. Out: the model is trained on all of the corpus and
validated on all of the file, with the tokenizer of the corpus.
Does not test how a task makes samples: the tests of each task do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from forker import Forker
from questions import vocabulary
from runs import make_project
from trajectories import towns

from codescent import tasks
from codescent.base.errors import UserError
from codescent.build import task_request
from codescent.config.load import load
from codescent.data.samples import AnyDataset
from codescent.data.text.dataset import Dataset, open_dataset
from codescent.data.text.prepare import prepare
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import load as load_tokenizer
from codescent.preflight import plan_with
from codescent.tasks.text import TextDataset
from codescent.verbs.cli import run as cli

STEPS = ("train.precision=fp64", "train.num_steps=4", "train.eval_every=4", "optimizer.decay_steps=4")
BERT = ("model.kind=bert", "data.tokenizer=bert:vocab.txt")
PAIRS = ("model.kind=transformer", "model.num_layers=auto", "model.seq_len=auto")
PAIRS += ("model.num_encoder_layers=1", "model.num_decoder_layers=1", "model.source_len=5", "model.target_len=6")
TASKS = {
    "lm": ("data.tokenizer=bpe:300",),
    "mlm": BERT,
    "seq2seq": (*PAIRS, "data.task=seq2seq", "data.tokenizer=char"),
    "qa": (*BERT, "model.seq_len=48", "data.seq_len=40", "data.stride=8", "data.question_len=12"),
    "sft": ("data.task=sft", "model.seq_len=24"),
    "tensors": (*PAIRS, "model.embedding=none"),
}
QUESTION = "To be, or not to be: that is the question. "
FILES = {"qa": "{}.json", "sft": "{}.jsonl", "tensors": "{}.h5"}
"""Names of corpus ("corpus") and validation files ("dev", "other"); other tasks have texts."""


def write_pairs(path: Path, *words: str) -> None:
    path.write_text("".join(json.dumps({"prompt": f"Say {word}: ", "response": word[::-1]}) + "\n" for word in words))


def write_tensors(path: Path, samples: int, seed: int, width: int = 16) -> None:
    h5py = pytest.importorskip("h5py")
    numbers = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for name, length in (("source", 5), ("target", 6)):
            file[name] = numbers.random((samples, length, width), np.float32)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    make_project(folder)
    vocabulary(folder)
    (folder / "dev.txt").write_text("one gradient\nmany ranks\n" * 40)
    (folder / "other.txt").write_text("step mean\nloss sum\nworkers\n" * 40)
    for number, name in enumerate(("corpus", "dev", "other")):
        (folder / f"{name}.json").write_text(json.dumps(towns(30 * number, 24 - 8 * number)))
        write_pairs(folder / f"{name}.jsonl", *(f"{word}{number}" for word in ("red", "green", "blue", "black") * 3))
        write_tensors(folder / f"{name}.h5", 20 - number, number)
    return folder


def words_of(task: str, validation: str) -> tuple[str, ...]:
    name = FILES.get(task, "{}.txt").format
    return *TASKS[task], *STEPS, f"data.corpus={name('corpus')}", f"data.validation={name(validation)}"


QUICK = ("lm", "qa")


@pytest.mark.parametrize(
    "task", [task if task in QUICK else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_a_run_is_validated_on_the_file(
    task: str, project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    dev = forker.train(project, task, 1, *words_of(task, "dev"))
    other = forker.train(project, f"{task}-other", 2, *words_of(task, "other"), "parallel.dp_shard=2")
    assert dev.plan["task"]["name"] == task
    losses = [[row["train_loss"] for row in run.read_metrics()] for run in (dev, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    validated = [run.read_metrics()[-1]["val_loss"] for run in (dev, other)]
    assert validated[0] != pytest.approx(validated[1], rel=1e-4)
    assert "dev" in json.dumps(dev.read_environment()["dataset"])

    assert cli(["evaluate", f"runs/{task}"]) == 0
    said = capsys.readouterr().out
    if task != "qa":  # prints no loss
        near = 1e-2 if task == "lm" else 1e-4  # also scores the last tokens, which are fewer than a sample
        assert float(re.search(r"loss ([\d.]+)", said)[1]) == pytest.approx(validated[0], abs=near)

    more = [f"run.name={task}", "train.num_steps=5", "--resume"]
    assert cli(["train", "run.toml", *words_of(task, "other"), *more]) == 2
    assert f"data.validation: the run in runs/{task} has" in capsys.readouterr().err
    if task == "lm":
        assert cli(["train", "run.toml", *words_of(task, "dev"), "data.validation_fraction=0.3", *more]) == 0
        Path("dev.txt").write_text("one gradient\nsum\n" * 60)
        assert cli(["train", "run.toml", *words_of(task, "dev"), *more, "train.num_steps=6"]) == 2
        assert "not the tokens that the run in runs/lm was trained on" in capsys.readouterr().err


def opened(folder: Path, *words: str) -> AnyDataset:
    """The dataset of a run with these words; `folder` gets the prepared data."""
    loaded = load(folder / "run.toml" if (folder / "run.toml").exists() else "default", words)
    request = task_request(loaded.config)
    data = request.data.model_copy(update={"folder": folder / "datasets"})
    return tasks.prepare_and_open(dataclasses.replace(request, data=data), progress=False)


def tokens_of(dataset: AnyDataset) -> list[list[int]]:
    text = dataset.text if isinstance(dataset, TextDataset) else dataset
    assert isinstance(text, Dataset)
    return [split.span(0, split.num_tokens).tolist() for split in (text.train, text.validation)]


@pytest.mark.parametrize("task", ["lm", "mlm", "seq2seq"])
def test_both_texts_are_read_whole(task: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    found = opened(project, *words_of(task, "dev"))
    tokenizer = load_tokenizer(found.path / "tokenizer.json")
    texts = [Path(name).read_text() for name in ("corpus.txt", "dev.txt")]
    assert tokens_of(found) == [tokenizer.encode(text).tolist() for text in texts]
    if task == "lm":  # the tokenizer is trained on all of the corpus, and on nothing else
        bpe.train(iter(texts[:1]), 300).save(project / "bpe.json")
        assert found.tokenizer_text == (project / "bpe.json").read_text()


def test_the_fingerprint_is_of_the_content(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    Path("copy.txt").write_bytes(Path("dev.txt").read_bytes())
    words = words_of("mlm", "dev")
    others = ("data.validation_fraction=0.4", "data.validation=copy.txt", "data.validation=other.txt")
    first, *same, other = (opened(project, *words, word) for word in ("data.task=mlm", *others))
    assert [one.fingerprint for one in same] == [first.fingerprint] * 2
    assert other.fingerprint != first.fingerprint
    assert other.path == first.path  # the corpus is prepared once
    sha256 = hashlib.sha256(Path("dev.txt").read_bytes()).hexdigest()
    assert first.description["validation"]["corpus"]["sha256"] == sha256


def test_many_documents_are_separated_in_both(tmp_path: Path) -> None:
    for name in ("corpus", "dev"):
        (tmp_path / f"{name}.jsonl").write_text('{"body": "ab"}\n{"body": "ba"}\n')
    files = (f"data.corpus={tmp_path / 'corpus.jsonl'}", f"data.validation={tmp_path / 'dev.jsonl'}")
    found = opened(tmp_path, "data.tokenizer=char", "data.text_key=body", *files)
    assert tokens_of(found) == [[0, 1, 2, 1, 0, 2]] * 2


@cache
def gpt2_ids(times: int) -> np.ndarray:
    return bpe.gpt2().encode(QUESTION * times)


@pytest.fixture
def shards(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 90 tokens for training in nanoGPT's form, and with 20 in the folder "held"."""
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    monkeypatch.chdir(tmp_path)
    ids = gpt2_ids(10)
    (tmp_path / "held").mkdir()
    ids[:90].tofile("train.bin")
    ids[90:110].tofile("held/anything_val.bin")
    ids[:50].tofile("held/interval_train.bin")  # no validation shard
    Path("dev.txt").write_text(QUESTION)
    return tmp_path


@pytest.mark.parametrize("validation", ["dev.txt", "held/anything_val.bin", "held"])
def test_shards_of_others_then_need_no_validation_split(validation: str, shards: Path) -> None:
    with pytest.raises(UserError, match=r"no validation shard .* or give data\.validation"):
        open_dataset(shards)
    ids = gpt2_ids(10).tolist()
    expected = gpt2_ids(1).tolist() if validation == "dev.txt" else ids[90:110]
    assert tokens_of(opened(shards, "data.corpus=.", f"data.validation={validation}")) == [ids[:90], expected]


def test_a_text_is_validated_on_prepared_shards_of_its_tokenizer(shards: Path) -> None:
    Path("corpus.txt").write_text(QUESTION * 3)
    words = ("data.corpus=corpus.txt", "data.tokenizer=gpt2")
    ids, again = (gpt2_ids(times).tolist() for times in (3, 1))
    made = prepare("dev.txt", "gpt2", shards, validation_fraction=1.0)
    assert tokens_of(opened(shards, *words, f"data.validation={made}")) == [ids, again]
    assert tokens_of(opened(shards, *words, "data.validation=held"))[0] == ids
    with pytest.raises(UserError, match="one shard of a prepared folder; give"):
        opened(shards, *words, f"data.validation={made / 'validation_000000.bin'}")
    for word, validation in (("data.tokenizer=byte", made), ("data.tokenizer=bpe:260", "held")):
        with pytest.raises(UserError, match="its tokens are of another tokenizer"):
            opened(shards, *words, word, f"data.validation={validation}")


def test_shards_without_a_tokenizer_need_shards(shards: Path) -> None:
    Path("meta.pkl").write_bytes(b"")
    with pytest.raises(UserError, match="have no tokenizer to encode it; give token shards, or put"):
        opened(shards, "data.corpus=.", "data.validation=dev.txt")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data.tokenizer=char", "data.validation=odd.txt"), r"data.validation: .* does not know 'é' \(U\+00E9\)"),
        (("data.validation=absent.txt",), "data.validation: absent.txt: no such file"),
        (("data.validation=short.txt",), "no sample of 16 positions; give a longer data.validation"),
        (
            (*TASKS["tensors"], "data.corpus=corpus.h5", "data.validation=dev.txt"),
            "= 'dev.txt': not tensors",
        ),
        ((*TASKS["tensors"], "data.corpus=corpus.h5", "data.validation=wide.h5"), "give tensors of the same sizes"),
        ((*TASKS["sft"], "data.corpus=corpus.jsonl", "data.validation=dev.txt"), "dev.txt:1: not JSON"),
    ],
)
def test_what_cannot_be_validated_on(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(project)
    Path("odd.txt").write_text("é" * 30)
    Path("short.txt").write_text("sum")
    write_tensors(Path("wide.h5"), 9, 0, width=8)
    config = load("run.toml", words).config
    with pytest.raises(UserError, match=expected):
        plan_with(config, opened(project, *words), 1)


def test_prepared_data_without_validation_is_helped_by_what_counts_for_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = ("data.validation_fraction=0.0001",)
    with pytest.raises(UserError, match=r"no sample of 16 positions; raise data\.validation_fraction, lower"):
        plan_with(load("run.toml", words).config, opened(project, *words), 1)
    shards = f"data.corpus={opened(project, *words).path}"
    with pytest.raises(UserError, match=r"no sample of 16 positions; give data\.validation, lower"):
        plan_with(load("run.toml", [shards]).config, opened(project, shards), 1)


def test_a_prepared_folder_has_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for task in ("sft", "qa"):
        words = words_of(task, "dev")
        folder = opened(project, *words).path
        with pytest.raises(UserError, match=r"was prepared with its own validation split; leave data\.validation out"):
            opened(project, *words, f"data.corpus={folder}")


@pytest.mark.parametrize("corpus", ["synthetic:9", "corpus.h5"])
def test_synthetic_validation_is_never_what_was_trained_on(
    corpus: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = (*TASKS["tensors"], f"data.corpus={corpus}", "data.validation=synthetic:4")
    found = opened(project, *words)
    train, validation = found.source("train", 11, 6), found.source("validation", 11, 6)
    assert (train.num_samples, validation.num_samples) == (9 if corpus[0] == "s" else 20, 4)
    both = [source.read(np.arange(4)).inputs for source in (train, validation)]
    assert not np.isclose(*both).all((1, 2)).any()
    assert plan_with(load("run.toml", words).config, found, 1)[1].task.synthetic
