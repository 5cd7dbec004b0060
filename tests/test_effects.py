"""In: configs with keys that change nothing. Out: each is named with the reason, and no other key is.
Does not look at keys that are refused where they have no effect: test_refusals does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from asked import questions
from questions import files, vocabulary
from runs import called, make_project

from codescent.build import build
from codescent.config import effects
from codescent.config.effects import ONLY
from codescent.config.load import load, shipped, to_toml
from codescent.config.words import KEYS
from codescent.data.text.prepare import prepare
from codescent.preflight import without_effect
from codescent.record import RunFolder
from codescent.tasks import TASKS
from codescent.tasks.tensors.prepare import make_recipe, prepare_synthetic
from codescent.tasks.tensors.synthetic import Sizes

OF_A_TASK = {f"data.{name}" for task in TASKS for name in (*task.keys, *task.reads)}
OF_A_TASK |= {f"train.{name}" for task in TASKS for name in task.objective}
ALWAYS = {
    "model": "sizes that a kind does not have are refused",
    "lora": "refused without lora.rank",
    "run": "every run has them",
    "log": "every run has them, but for those of the text at its end",
}
"""Sections whose keys always have an effect, or are refused."""
EVERY_RUN = {
    *("data.task", "data.folder", "data.seq_len", "data.prefetch", "data.verify", "data.mixture"),
    *("train.num_steps", "train.global_batch_size", "train.microbatch_size", "train.precision", "train.device"),
    *("train.num_epochs", "train.global_batch_tokens"),
    *("train.compile", "train.eval_every", "train.check_every", "train.head_chunk_tokens", "train.deterministic"),
    *("train.num_threads", "train.allocator", "train.matmul", "train.label_smoothing", "train.z_loss"),
    *("train.balance_loss", "train.balance_rate", "train.router_z_loss", "parallel.ep"),
    *("train.ema", "train.fp8"),
    *("optimizer.kind", "optimizer.learning_rate", "optimizer.weight_decay", "optimizer.max_grad_norm"),
    *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.scale_learning_rate"),
    *("parallel.ranks", "parallel.dp_replicate", "parallel.pp", "parallel.dp_shard", "parallel.cp", "parallel.tp"),
    *("parallel.layout", "parallel.cut", "parallel.recompute", "parallel.offload", "parallel.data_parallel"),
    *("parallel.bucket_bytes", "parallel.reduce_dtype", "parallel.restarts", "parallel.timeout_s"),
    *("parallel.meet_s", "parallel.listen", "parallel.stopped_s"),
    *("parallel.average_every", "parallel.wire", "parallel.gossip", "parallel.servers"),
    *("checkpoint.every", "checkpoint.last", "checkpoint.keep_last", "profile.active"),
    *("checkpoint.asynchronous", "checkpoint.fall_back", "checkpoint.on_failed_save"),
    *("survive.lease_s", "survive.on_divergence", "survive.on_loss", "survive.on_spike", "survive.restart_window_s"),
}
"""Keys that every run reads, or that only need more ranks, or that are refused where they have no effect."""


def said(path: Path, *words: str) -> dict[str, str]:
    """By key: the sentence."""
    sentences = without_effect(load(path, words))
    return {sentence.split(": ")[1].split(" = ")[0]: sentence for sentence in sentences}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_project(tmp_path)


def test_every_key_says_for_what_it_counts() -> None:
    rest = {key for key in KEYS if key.split(".")[0] not in ALWAYS or key in ONLY} - EVERY_RUN
    assert rest == (OF_A_TASK | set(ONLY))
    assert not (OF_A_TASK | set(ONLY)) & EVERY_RUN


@pytest.mark.parametrize("name", shipped())
def test_every_key_of_a_shipped_config_has_an_effect(name: str) -> None:
    assert not said(Path(name))


@pytest.mark.parametrize(
    ("word", "useless", "useful"),
    [
        ("parallel.zero_stage=2", "parallel.dp_shard=1", "parallel.dp_shard=2"),
        ("parallel.schedule=gpipe", "parallel.pp=1", "parallel.pp=2"),
        ("parallel.virtual_stages=2", "parallel.schedule=1f1b", "parallel.schedule=interleaved"),
        ("parallel.context=all-gather", "parallel.cp=1", "parallel.cp=2"),
        ("parallel.sequence_parallel=false", "parallel.tp=1", "parallel.tp=2"),
        ("optimizer.momentum=0.5", "optimizer.kind=adamw", "optimizer.kind=sgd"),
        ("optimizer.beta1=0.5", "optimizer.kind=rmsprop", "optimizer.kind=adam"),
        ("optimizer.beta2=0.5", "optimizer.kind=adagrad", "optimizer.kind=adadelta"),
        ("optimizer.eps=1e-3", "optimizer.kind=sgd", "optimizer.kind=adagrad"),
        ("optimizer.fused=false", "optimizer.kind=adadelta", "optimizer.kind=sgd"),
        ("optimizer.muon_momentum=0.9", "optimizer.kind=adamw", "optimizer.kind=muon"),
        ("optimizer.muon_learning_rate=0.02", "optimizer.kind=sgd", "optimizer.kind=muon"),
        ("optimizer.muon_precision=bf16", "optimizer.kind=adam", "optimizer.kind=muon"),
        ("optimizer.momentum=0.8", "optimizer.kind=muon", "optimizer.kind=sgd"),
        ("optimizer.min_learning_rate=1e-5", "optimizer.schedule=constant", "optimizer.schedule=linear"),
        ("optimizer.decay_steps=15", "optimizer.schedule=constant", "optimizer.schedule=cosine"),
        ("optimizer.decay_share=0.5", "optimizer.schedule=cosine", "optimizer.schedule=wsd"),
        ("optimizer.decay_form=linear", "optimizer.schedule=linear", "optimizer.schedule=wsd"),
        ("optimizer.decay_power=2.0", "optimizer.schedule=wsd", "optimizer.schedule=polynomial"),
        ("optimizer.timescale=9", "optimizer.schedule=cosine", "optimizer.schedule=inverse-sqrt"),
        ("optimizer.cooldown_steps=5", "optimizer.schedule=constant", "optimizer.schedule=constant-cooldown"),
        ("train.ema_every=2", "train.ema=0.0", "train.ema=0.9"),
        ("train.eval_samples=5", "train.eval_every=0", "train.eval_every=5"),
        ("train.stop_after=3", "train.eval_every=0", "train.eval_every=5"),
        ("profile.stacks=true", "profile.active=0", "profile.active=1"),
        ("checkpoint.keep_best=false", "train.eval_every=0", "train.eval_every=5"),
        ("data.train_questions=3", "data.task=lm", ""),
        ("data.pairs=copy", "data.task=lm", ""),
        ("data.validation_fraction=0.3", "data.validation=corpus.txt", "data.validation=auto"),
    ],
)
def test_a_key_without_effect_is_named(config: Path, word: str, useless: str, useful: str) -> None:
    key, cause = word.partition("=")[0], useless.partition("=")[0]
    sentence = said(config, word, useless)[key]
    assert re.match(rf"command line: {key} = .* has no effect: it needs {cause} ", sentence)
    if useful:
        assert key not in said(config, word, useful)


ROUNDS = ("parallel.average_every=5", "parallel.synchronous_steps=20")
WIRE = ("parallel.wire=int4", "parallel.wire_from=20")
SPIKES = ("survive.on_spike=stop", "survive.spike_window=50")
SPEEDS = ("parallel.servers=1", "parallel.updates=asynchronous", "parallel.local_steps=by_speed")


def test_a_config_that_codescent_writes_has_no_key_without_effect(tmp_path: Path) -> None:
    loaded = load("default", ["log.sample_tokens=0"])
    useless = {key for key, _ in effects.without_effect(loaded.config)}
    assert useless == {"log.sample_prompt", "log.sample_temperature"}
    (tmp_path / "config.toml").write_text(to_toml(effects.effective(loaded.config)))
    written = load(tmp_path / "config.toml", [])
    assert without_effect(written) == []
    changed = {key for key in KEYS if effects.value_of(written.config, key) != effects.value_of(loaded.config, key)}
    assert changed == useless, "nothing else is lost"


@pytest.mark.parametrize(
    ("words", "useless", "useful", "key", "why"),
    [
        (ROUNDS, "train.num_steps=20", "train.num_steps=25", "parallel.average_every", "it begins after parallel.sync"),
        (ROUNDS, "train.num_steps=20", "train.num_epochs=2", "parallel.average_every", "it begins after parallel.sync"),
        (WIRE, "train.num_steps=10", "train.num_steps=21", "parallel.wire", "it begins after parallel.wire_from = 20"),
        (
            SPIKES,
            "train.num_steps=50",
            "train.num_steps=51",
            "survive.on_spike",
            "it begins after survive.spike_window",
        ),
        (
            ("survive.restart_window_s=5.0",),
            "survive.on_loss=stop",
            "survive.on_loss=shrink",
            "survive.restart_window_s",
            "it",
        ),
        (SPEEDS, "parallel.average_every=1", "parallel.average_every=2", "parallel.local_steps", "it needs parallel."),
    ],
)
def test_what_begins_after_the_run_or_has_one_step_is_named(
    config: Path, words: tuple[str, ...], useless: str, useful: str, key: str, why: str
) -> None:
    assert why in said(config, *words, useless)[key]
    assert key not in said(config, *words, useful)


def test_a_default_asks_for_nothing(config: Path) -> None:
    assert not said(config, "parallel.zero_stage=3", "optimizer.momentum=0.9", "data.pairs=reverse")


def test_what_the_task_ignores(config: Path) -> None:
    words = ("model.kind=bert", "data.task=qa", "data.text_key=body", "train.head_chunk_tokens=5")
    assert set(said(config, *words)) >= {"data.text_key", "train.head_chunk_tokens"}


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "ndjson", "jsonl.gz", "tar"])
def test_the_key_of_json_lines_needs_json_lines(config: Path, suffix: str) -> None:
    (config.parent / f"more.{suffix}").write_text("")
    corpus, more = config.parent / "corpus.txt", config.parent / f"more.{suffix}"
    for words in ((f"data.corpus={more}",), (f"data.corpus={corpus}", f"data.validation={more}")):
        found = said(config, *words, "data.text_key=body")
        assert bool(found) == (suffix == "txt")
        assert all("needs JSON lines or tables, and there are none in the corpus" in one for one in found.values())
    as_text = said(config, f"data.corpus={more}", "data.text_key=body", "data.as_text=true")
    why = "is for JSON lines and tables, and data.as_text reads every file as plain text"
    assert as_text["data.text_key"].endswith(why)


def test_what_token_shards_make_useless(config: Path) -> None:
    words = (f"data.corpus={config.parent}", "data.text_key=body", "data.validation_fraction=0.2")
    np.arange(90, dtype="<u2").tofile(config.parent / "train.bin")
    useless = {"data.text_key", "data.validation_fraction", "data.tokenizer"}
    assert set(said(config, *words)) == useless
    assert set(said(config, *words, "data.tokenizer=gpt2")) == useless - {"data.tokenizer"}
    (config.parent / "dev.jsonl").write_text("")
    found = said(config, *words, f"data.validation={config.parent / 'dev.jsonl'}")
    assert set(found) == {"data.tokenizer", "data.validation_fraction"}
    assert found["data.tokenizer"].endswith("is token shards, which have a tokenizer already")


def test_what_prepared_folders_make_useless(config: Path) -> None:
    folder = config.parent
    (folder / "corpus.txt").write_text("some words\n" * 90)
    made = prepare(str(folder / "corpus.txt"), "bpe:300", folder)
    for tokenizer, useless in (("bpe:300", set()), ("bpe:301", {"data.tokenizer"}), ("no.json", {"data.tokenizer"})):
        assert set(said(config, f"data.corpus={made}", f"data.tokenizer={tokenizer}")) == useless
    train, dev = files(folder)
    keys = {"tokenizer": f"bert:{vocabulary(folder)}", "stride": 8, "question_len": 9, "train_questions": 2}
    made = questions(str(train), validation=str(dev), seq_len=40, **keys).prepare(folder)
    same = [f"data.{name}={value}" for name, value in keys.items()]
    of_folder = ("model.kind=bert", f"data.corpus={made}")
    assert not said(config, *of_folder, *same)
    found = said(config, *of_folder, *same, "data.stride=9", "data.validation_questions=1", "data.train_questions=3")
    assert set(found) == {"data.stride", "data.validation_questions", "data.train_questions"}
    assert f"it is for a corpus that is not prepared yet, and {made} is prepared" in found["data.stride"]
    made = prepare_synthetic(make_recipe(9, Sizes(1, 2, 4), 0, 0.1), "safetensors", folder)
    words = ("model.kind=transformer", f"data.corpus={made}", "data.validation_fraction=0.2", "data.tokenizer=char")
    assert set(said(config, *words)) == {"data.validation_fraction"}


def test_keys_of_lines_that_the_corpus_does_not_have(config: Path) -> None:
    pair, talk = config.parent / "pairs.jsonl", config.parent / "talks.jsonl"
    pair.write_text('{"q": "a", "a": "b"}\n')
    talk.write_text('\n{"turns": [{"role": "user", "content": "a"}]}\n')
    keys = ("data.task=sft", "data.prompt_key=q", "data.response_key=a", "data.messages_key=turns")
    chat = f"data.chat_template={config.parent}"
    assert set(said(config, *keys, f"data.corpus={pair}")) == {"data.messages_key"}
    assert set(said(config, *keys, chat, f"data.corpus={pair}")) == {"data.messages_key"}
    assert set(said(config, *keys, chat, f"data.corpus={talk}")) == {"data.prompt_key", "data.response_key"}


def test_only_a_task_without_classes_ignores_label_smoothing_and_z_loss(config: Path) -> None:
    smoothed = {"train.label_smoothing": "0.1", "train.z_loss": "1e-4"}
    words = [f"{key}={value}" for key, value in smoothed.items()]
    tensors = ("model.kind=transformer", "model.embedding=none", "data.corpus=synthetic:64")
    assert set(said(config, *tensors, *words)) >= set(smoothed)
    for other in ((), ("model.kind=bert", "data.task=qa"), ("model.kind=bert", "data.task=mlm")):
        assert not set(said(config, *other, *words)) & set(smoothed)


def test_plan_and_train_say_it_once(config: Path) -> None:
    word = "parallel.zero_stage=2"
    for words in (("plan", "run.toml"), ("train", "run.toml", "--ranks", "2", "train.num_steps=1")):
        done = called(config.parent, *words, word)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("parallel.zero_stage = 2 has no effect") == 1
    notes = [
        event for event in RunFolder.open(config.parent / "runs" / "default").read_events() if event["kind"] == "note"
    ]
    assert [event["text"] for event in notes] == list(said(config, word).values())


PRESET = 'model.preset = "gpt2-xl"'
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16}
"""The sizes of the project's config, which begin in its line 3."""


def test_a_preset_replaces_the_sizes_of_its_base_and_says_so(config: Path) -> None:
    loaded = load(config, ["model.preset=gpt2-xl", "model.seq_len=32"])
    model = loaded.config.model
    assert (model.num_layers, model.num_heads, model.hidden_dim, model.seq_len) == (None, None, None, 32)
    (sentence,) = without_effect(loaded)
    sizes = [f"model.{name} = {size} ({config}:{line})" for line, (name, size) in enumerate(SIZES.items(), 3)]
    assert sentence == f"command line: {PRESET} replaces {', '.join(sizes)}"
    shape = build(loaded.config, None, 1).model
    assert (shape.num_layers, shape.num_heads, shape.hidden_dim) == (48, 25, 1600)


def test_sizes_beside_a_preset_win_over_it(config: Path) -> None:
    inner = config.with_name("inner.toml")
    inner.write_text('base = "run.toml"\n[model]\npreset = "gpt2-xl"\nnum_layers = 3\n')
    loaded = load(inner, ["train.num_steps=5"])
    assert (loaded.config.model.num_layers, loaded.config.model.num_heads) == (3, None)
    assert build(loaded.config, None, 1).model.num_layers == 3
    assert load(inner, ["model.num_layers=4"]).config.model.num_layers == 4
    assert load(inner, ["model.preset=auto", "model.num_heads=2"]).replaced == loaded.replaced
