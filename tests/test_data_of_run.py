"""In: configs of every task, names of corpora. Out: `codescent data` prepares what the run reads, and the run reads it.
Does not test names of a hub (test_hub.py) or how a task makes its samples."""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.request
from pathlib import Path

import pytest
from chats import CHATML, TALK, write_model_folder
from questions import files, vocabulary
from runs import called, make_project

from codescent.config.load import load
from codescent.data.text.download import Published
from codescent.preflight import check, prepared
from codescent.record import RunFolder
from codescent.tasks.answers import PUBLISHED

BERT = ("model.kind=bert", "data.seq_len=32", "model.seq_len=32", "data.question_len=8", "data.stride=8")
PAIRS = ("data.corpus=corpus.txt", "model.source_len=12", "model.target_len=13")
CONFIGS = {"lines": "reverse_lines", "tensors": "synthetic_transformer"}
TASKS = {
    "text": (),
    "text_with_a_validation_text": ("data.validation=other.txt",),
    "masked": ("model.kind=bert", "data.task=mlm", "data.tokenizer=bert:vocab.txt"),
    "lines": PAIRS,
    "questions": (*BERT, "data.corpus=train.json", "data.validation=dev.json", "data.tokenizer=bert:vocab.txt"),
    "responses": ("data.task=sft", "data.corpus=pairs.jsonl"),
    "tensors": ("data.corpus=synthetic:60", "data.format=hdf5", "data.validation=synthetic:8", "model.hidden_dim=16"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path)
    files(tmp_path)
    vocabulary(tmp_path)
    (tmp_path / "other.txt").write_text("one descent, many workers\n" * 40)
    rows = [{"prompt": f"{number} + 1 =", "response": f" {number + 1}"} for number in range(200)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def state(folder: Path) -> dict[str, int]:
    """The files below a folder, with the times of their last change."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", TASKS)
def test_the_data_of_a_config_is_what_its_run_opens(name: str, project: Path) -> None:
    """Fault: of one task `codescent data CONFIG` prepares other data than the run, which prepares it again, or less."""
    of, words = CONFIGS.get(name, "run.toml"), ("train.global_batch_size=2", *TASKS[name])
    done = called(project, "data", of, *words, "--verify")
    assert done.returncode == 0, done.stderr
    (folder, *more) = re.findall(r"^prepared: [\d.]+ \w+ in (\S+)$", done.stdout, re.MULTILINE)
    assert len(more) == (name == "text_with_a_validation_text")
    assert "verified: all stored hashes match" in done.stdout
    assert f"internet: codescent train {of} {' '.join(words)}" in done.stdout
    before, config = state(project / "datasets"), load(of, words).config
    opened = prepared(config)
    assert opened is not None
    assert str(opened.path) == folder
    check(config, 1, resume=False)
    assert state(project / "datasets") == before


def test_each_corpus_of_a_mixture_is_prepared(project: Path) -> None:
    """Fault: only the first corpus is, or the folder of all corpora is shown as one."""
    mixture = '[[data.mixture]]\ncorpus = "corpus.txt"\n[[data.mixture]]\ncorpus = "other.txt"\n'
    config = project / "run.toml"
    config.write_text(config.read_text().replace('corpus = "corpus.txt"\n', "") + mixture)
    done = called(project, "data", "run.toml")
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"^prepared: \S+ \w+ in (\S+)$", done.stdout, re.MULTILINE))) == 2
    assert prepared(load("run.toml").config) is not None


@pytest.mark.timeout(120)
def test_a_template_that_writes_the_date_is_said_to_give_other_samples_tomorrow(project: Path) -> None:
    """Fault: nobody says that a job of another day prepares its samples again; or their folder cannot be given."""
    write_model_folder(project / "model", CHATML + "{{ strftime_now('') }}")
    rows = [{"messages": TALK}] * 40
    (project / "talks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("data.task=sft", "data.chat_template=model", "data.tokenizer=model/tokenizer.json", "model.seq_len=200")
    done = called(project, "data", "run.toml", "data.corpus=talks.jsonl", *words)
    assert done.returncode == 0, done.stderr
    (corpus,) = re.findall(r"another day prepares the samples again.* (data\.corpus=\S+) keeps", done.stderr)
    (file,) = re.findall(r"^data\.chat_template: \d+ bytes in (\S+)$", done.stdout, re.MULTILINE)
    assert file == str(project / "model" / "tokenizer_config.json"), "not the whole model"
    done = called(project, "data", "run.toml", corpus, *(word for word in words if "template" not in word))
    assert (done.returncode, done.stderr) == (0, "")


def published(path: Path, name: str, url: str) -> Published:
    content = path.read_bytes()
    return Published(name, len(content), hashlib.sha256(content).hexdigest(), url)


def test_squad_by_name_is_downloaded_and_a_run_needs_no_network(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `codescent data squad` is read as a text, or as no corpus; or the run asks the network once more."""
    for split, name in (("train", "train.json"), ("validation", "dev.json")):
        file = project / name
        monkeypatch.setitem(PUBLISHED, split, published(file, f"squad/{split}-v1.1.json", file.as_uri()))
    keys = (
        "data.seq_len=32", "data.question_len=8", "data.stride=8", "data.tokenizer=bert:vocab.txt",
        "train.global_batch_size=2", "train.microbatch_size=auto",
    )  # fmt: skip
    done = called(project, "data", "squad", *keys)
    assert done.returncode == 0, done.stderr
    assert f"internet: codescent train bert_squad {' '.join(keys)}" in done.stdout
    for split in PUBLISHED:
        file = project / "cache" / "codescent" / "squad" / f"{split}-v1.1.json"
        assert re.search(rf"^squad/{split}-v1.1.json: \S+ \w+ in {file}$", done.stdout, re.MULTILINE), done.stdout
    before = state(project / "datasets")

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("the run asks the network"))
    small = ("model.preset=auto", *BERT[:1], "model.num_layers=1", "model.num_heads=2", "model.hidden_dim=8")
    batch = ("model.seq_len=32", "train.num_steps=1")
    done = called(
        project, "train", "bert_squad", *keys, *small, *batch, "train.device=cpu", "train.eval_every=0",
        "checkpoint.every=0", "checkpoint.keep_best=false", "log.tensorboard=false", "optimizer.decay_steps=auto",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(RunFolder.open(project / "runs" / "bert_squad").read_metrics())) == 1
    assert state(project / "datasets") == before


def test_questions_of_squad_that_are_there_are_prepared(
    project: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: files as published are not found in CODESCENT_DATA_DIR, or their size is not said."""
    part, dev = data_dir / "squad" / "train-v1.1.part44.json", data_dir / "squad" / "dev-v1.1.json"
    if not (part.is_file() and dev.is_file() and (data_dir / "bert-base-uncased" / "vocab.txt").is_file()):
        pytest.skip("needs SQuAD and BERT's vocabulary in CODESCENT_DATA_DIR")
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    limits = ("data.train_questions=20", "data.validation_questions=20")
    done = called(project, "data", "bert_squad", f"data.corpus={part}", "data.validation=squad", *limits)
    assert done.returncode == 0, done.stderr
    assert "20 questions" in done.stdout
    assert f"squad/dev-v1.1.json: 4.63 MiB in {dev}" in done.stdout
    assert "bert-base-uncased/vocab.txt: 226.08 KiB" in done.stdout
    assert f"a job needs the same CODESCENT_DATA_DIR={data_dir}" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("squd",), "not the name of a corpus (python-stdlib, shakespeare, openwebtext, squad) or of a shipped config"),
        (("squd",), "did you mean squad?"),
        (("rnu.toml",), "rnu.toml: no such file; did you mean run.toml?"),
        (("corpus.txt", "other.txt"), "corpus.txt other.txt: give one corpus; a pattern such as '*.txt' needs quotes"),
        (("corpus.txt", "data.tokenizer=gpt2"), "is for a config, and corpus.txt is a corpus"),
        (("run.toml", "--tokenizer", "gpt2"), "--tokenizer: is not for run.toml, which is prepared as a config says; "),
        (("run.toml", "--folder", "x", "--seed", "1"), "give data.folder=DIR\nerror: --seed: is not for run.toml"),
        (("run.toml", "data.corpus=none.txt"), "none.txt: no such file"),
        (("default", "model.preset=gpt2", "model.weights=gone"), "gone: no such folder; give a Hugging Face folder"),
        (
            ("synthetic_transformer",),
            "data.corpus = synthetic:2048: a run makes these random numbers in memory: nothing is prepared",
        ),
        (("train.json",), "`codescent data CONFIG` prepares them for the run of a config"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_what_would_do(
    words: tuple[str, ...], said: str, project: Path
) -> None:
    """Fault: a wrong name is taken for a text or a config; an option has no effect; nothing is prepared in silence."""
    done = called(project, "data", *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "datasets").exists() or not list((project / "datasets").iterdir())


def test_overrides_may_stand_before_the_config(project: Path) -> None:
    """Fault: the order of words that other commands take makes a corpus of an override."""
    done = called(project, "data", "data.tokenizer=char", "run.toml", "data.corpus=other.txt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("datasets/other-char-")
    assert "codescent train run.toml data.tokenizer=char data.corpus=other.txt" in done.stdout


def test_a_file_of_the_name_of_a_config_is_a_corpus(project: Path) -> None:
    """Fault: a config of the program hides a file of the user; or a text that ends in .toml cannot be prepared."""
    (project / "default").write_text("one descent\n" * 100)
    assert called(project, "data", "default").stdout.startswith("datasets/default-char-")
    assert called(project, "data", "run.toml", "--as-text").stdout.startswith("datasets/run-char-")


def test_a_folder_of_the_name_of_a_published_corpus_does_not_hide_it(project: Path) -> None:
    """Fault: beside a folder squad the name squad is a folder of texts, unlike in a config."""
    (project / "squad").mkdir()
    (project / "squad" / "readme.txt").write_text("not questions\n" * 20)
    done = called(project, "data", "squad", "data.corpus=train.json", "data.validation=dev.json", *BERT[3:])
    assert "readme" not in done.stdout + done.stderr
    assert "squad" not in [path.name for path in (project / "datasets").glob("*")]


def test_a_changed_file_of_data_validation_is_found(project: Path) -> None:
    """Fault: --verify reads the corpus alone, and a changed validation set is said to be as it was stored."""
    sizes = ("--source", "1x16", "--target", "20x16")
    assert called(project, "data", "--synthetic", "8", *sizes, "--folder", "other").returncode == 0
    (folder,) = (project / "other").iterdir()
    words = ("train.global_batch_size=2", "model.hidden_dim=16", "data.corpus=synthetic:60", "data.format=hdf5")
    words = (*words, f"data.validation={folder}", "--verify")
    done = called(project, "data", CONFIGS["tensors"], *words)
    assert "verified: all stored hashes match" in done.stdout, done.stderr
    file = folder / "validation.h5"
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(content))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = called(project, "data", CONFIGS["tensors"], *words)
    assert done.returncode == 2, done.stdout
    assert "validation.h5" in done.stderr


def test_data_too_short_for_its_run_is_refused(project: Path) -> None:
    """Fault: `codescent data` says "train with it", and the run is refused."""
    (project / "short.txt").write_text("one\n")
    done = called(project, "data", "run.toml", "data.corpus=short.txt")
    assert done.returncode == 2
    assert "the training split has 0 samples of 16 positions, fewer than train.global_batch_size = 8" in done.stderr
    assert "train with it" not in done.stdout


def test_one_of_a_thing_is_in_the_singular(project: Path) -> None:
    (project / "short.txt").write_text("one\n")
    done = called(project, "data", "short.txt", "--tokenizer", "char")
    assert "train: 3 characters, 3 tokens in 1 shard\nvalidation: 1 character, 1 token in 1 shard\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("*.toml",), "*.toml: no file has this name, so it is read as a pattern (glob): 1 file"),
        (("no*.toml",), "no*.toml: no such file"),
    ],
)
def test_a_pattern_that_ends_like_a_config_is_a_pattern(words: tuple[str, ...], said: str, project: Path) -> None:
    """Fault: it is taken for the name of a config."""
    done = called(project, "data", *words, "--tokenizer", "byte")
    assert said in done.stderr
    assert "shipped configs" not in done.stderr


def test_overrides_alone_need_a_config(project: Path) -> None:
    """Fault: the first one is taken for the name of a corpus."""
    done = called(project, "data", "data.folder=x", "run.seed=1")
    assert done.returncode == 2
    assert done.stderr == (
        "error: data.folder=x run.seed=1: no config to override; give one: codescent data CONFIG data.folder=x "
        "run.seed=1\n"
    )


def test_an_override_of_a_corpus_is_refused(project: Path) -> None:
    done = called(project, "data", "other.txt", "data.tokenizer=char")
    assert done.returncode == 2
    assert "data.tokenizer=char: an override is for a config, and other.txt is a corpus" in done.stderr
    assert "codescent data CONFIG data.corpus=other.txt data.tokenizer=char" in done.stderr


def test_all_that_is_wrong_with_squad_is_said_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the vocabulary alone, then one file, then the other."""
    for name in ("train", "dev"):
        (project / "squad").mkdir(exist_ok=True)
        (project / "squad" / f"{name}-v1.1.json").write_text("{")
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(project))
    for name, more in (("gone.txt", ["gone.txt"]), ("vocab.txt", [])):
        done = called(project, "data", "squad", f"data.tokenizer=bert:{name}")
        assert done.returncode == 2
        for said in (*more, "train-v1.1.json: not the published", "dev-v1.1.json: not the published"):
            assert said in done.stderr, done.stderr
