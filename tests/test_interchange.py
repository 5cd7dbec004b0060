"""In: runs of several layouts, folders of transformers. Out: the same logits both ways, and the same initial weights.
Does not test how a folder is read (test_huggingface does) or what a checkpoint is (test_checkpoint* do)."""

from __future__ import annotations

import errno
import functools
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from questions import files as questions
from questions import vocabulary
from runs import called, environment, make_project
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
from codescent.config.load import load
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.huggingface.tokens import tokenizer_files
from codescent.inference.trained import find, module_of
from codescent.record import RunFolder
from codescent.verbs.cli import run
from codescent.verbs.export_run import export_run
from codescent.verbs.import_folder import import_folder
from codescent.verbs.sample import sample_run

LLAMA = ("model.kind=llama", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=27", "model.hidden_dim=32")
ALONE = ("train.num_steps=1", "train.eval_every=0", "train.num_threads=1", "train.global_batch_size=2")
SMALL = (*ALONE, "log.sample_tokens=0")
SHORT = ("train.num_steps=4", "train.eval_every=2", "checkpoint.every=2", "train.eval_samples=8")
BERT = ("model.kind=bert", "data.tokenizer=bert:vocab.txt", "model.dropout=0.1")
MUP = ("model.mup_base_dim=5", "model.mup_base_head_dim=3", "optimizer.learning_rate=0.1")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (1, ()),
    "gpt2-plain": (1, ("model.bias=false", "data.tokenizer=char", "model.vocab_size=64")),
    "gpt2-tp": (2, ("parallel.tp=2",)),
    "gpt2-shard": (2, ("parallel.dp_shard=2",)),
    "gpt2-pp": (2, ("parallel.pp=2", "train.microbatch_size=4")),
    "gpt2-bf16": (1, ("train.precision=bf16",)),
    "bert": (1, BERT),
    "bert-tp": (2, (*BERT, "parallel.tp=2")),
    "bert-shard": (2, (*BERT, "parallel.dp_shard=2")),
    "bert-pp": (2, (*BERT, "parallel.pp=2", "train.microbatch_size=4")),
    "gpt2-mup": (1, MUP),
    "bert-mup": (1, (*BERT, *MUP)),
    "llama-mup": (1, (*LLAMA, *MUP, "model.tie_head=true", "model.qkv_bias=true")),
    "llama-norms-mup": (1, (*LLAMA, *MUP, "model.qk_norm=head")),
    "llama": (1, LLAMA),
    "llama-tied": (1, (*LLAMA, "model.tie_head=true", "data.tokenizer=bpe:300")),
    "llama-tp": (2, (*LLAMA, "parallel.tp=2")),
    "llama-shard": (2, (*LLAMA, "parallel.dp_shard=2")),
    "llama-pp": (2, (*LLAMA, "parallel.pp=2", "train.microbatch_size=4")),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    vocabulary(folder)
    return folder


@pytest.fixture(scope="module")
def trained(project: Path, forker: Forker) -> Callable[[str], Path]:
    """The folder of one of RUNS, which is trained when it is first asked for."""

    @functools.cache
    def of(name: str) -> Path:
        ranks, words = RUNS[name]
        return forker.train(project, name, ranks, *SHORT, *words).path

    return of


@torch.no_grad()
def logits(model: Any, vocab_size: int) -> torch.Tensor:
    x_BT = torch.randint(0, vocab_size, (3, 16), generator=torch.Generator().manual_seed(1))
    out = model(x_BT)
    return (out if isinstance(out, torch.Tensor) else out.logits).float()


def ours(path: Path) -> Any:
    return module_of(find(path), torch.device("cpu")).eval()


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's newest checkpoint."""
    saved = Checkpoints(path / "checkpoints", 1, keep_best=False).latest()
    assert saved is not None
    tensors = read_tensors(saved.path)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "gpt2-bf16"])
def test_a_trained_model_of_any_layout_has_the_same_logits_in_transformers(
    name: str, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    path = trained(name)
    assert run(["export", str(path), str(tmp_path / "out"), "--max-shard-bytes", "20000"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    found = find(path)
    mine = logits(ours(path), found.resolved.shape.vocab_size)
    kind = AutoModelForMaskedLM if name.startswith("bert") else AutoModelForCausalLM
    theirs = logits(kind.from_pretrained(tmp_path / "out").eval(), found.resolved.shape.vocab_size)
    assert float((mine - theirs).abs().max()) < 1e-5
    assert float(mine.std()) > 0.01
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.tokenizer is not None
    text = "many workers one\ndescent"
    assert tokenizer.encode(text, add_special_tokens=False) == found.tokenizer.encode(text).tolist()


@pytest.mark.parametrize("name", ["gpt2-tp", "llama-shard", "gpt2-plain", "bert-tp"])
def test_there_and_back_is_bitwise(name: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    """Export, import, export: the same files; and the same weights, but for the biases that ours had not."""
    path = trained(name)
    first, again, second = tmp_path / "first", tmp_path / "again", tmp_path / "second"
    assert run(["export", str(path), str(first)]) == 0
    assert run(["import", str(first), str(again), "data.corpus=none.txt"]) == 0
    assert run(["export", str(again), str(second)]) == 0
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    before, after = weights(path), weights(again)
    added = after.keys() - before.keys()
    assert same(before, {name: after[name] for name in before})
    assert all(name.endswith("bias") and not after[name].any() for name in added)
    assert bool(added) == (name == "gpt2-plain")


def test_number_formats(trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's by default; each is the master weights, rounded once. What rounding changes is said."""
    path, said = trained("gpt2-bf16"), dict[str, str]()
    for dtype, words in (("bf16", []), ("fp32", ["--dtype", "fp32"]), ("fp16", ["--dtype", "fp16"])):
        assert run(["export", str(path), str(tmp_path / dtype), *words]) == 0
        said[dtype] = capsys.readouterr().out.splitlines()[1]
    wide = stored(tmp_path / "fp32")
    assert torch.equal(wide["transformer.wte.weight"], weights(path)["model.tok.weight"])
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert same(stored(tmp_path / dtype), {name: tensor.to(torch_dtype) for name, tensor in wide.items()})
        assert AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").dtype is torch_dtype
        far = {name: (tensor - tensor.to(torch_dtype).float()).norm() / tensor.norm() for name, tensor in wide.items()}
        name = max(far, key=lambda one: float(far[one].nan_to_num()))
        rounded = sum(bool(one > 0) for one in far.values())
        assert (
            said[dtype]
            == f"{dtype} rounds {rounded} of {len(wide)} tensors; most of all {name}, by {far[name]:.2g} of its norm"
        )
    assert said["fp32"] == "every value is the trained one"
    assert run(["import", str(tmp_path / "bf16"), str(tmp_path / "run")]) == 0
    assert find(tmp_path / "run").config.train.precision == "bf16"
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert same(stored(tmp_path / "bf16"), stored(tmp_path / "again"))


def test_which_checkpoint(trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained("gpt2")
    losses = {row["step"]: row["val_loss"] for row in RunFolder.open(path).read_metrics() if row["val_loss"]}
    best = min(losses, key=lambda step: losses[step])
    for words, step in (([], 4), (["--best"], best), (["--step", "2"], 2)):
        assert run(["export", str(path), str(tmp_path / f"out{len(words)}{step}{best}"), *words]) == 0
        assert f"step {step} of " in capsys.readouterr().out
    assert run(["export", str(path), str(tmp_path / "none"), "--step", "3"]) == 2
    assert "no checkpoint of step 3; there are: 2, 4" in capsys.readouterr().err


def a_folder(path: Path, model: Any) -> Path:
    """A folder of transformers with random weights, and a tokenizer of bytes where it is none of a BERT."""
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    if isinstance(model, BertForMaskedLM):
        return path
    ByteTokenizer().save(path / "ours.json")
    for name, text in tokenizer_files((path / "ours.json").read_text(), 16)[0].items():
        (path / name).write_text(text)
    return path


def gpt2() -> Any:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=257, n_positions=16, eos_token_id=256)
    return GPT2LMHeadModel(config)


def llama(kind: Any = LlamaForCausalLM) -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return kind(LlamaConfig(**sizes, intermediate_size=27, vocab_size=257, max_position_embeddings=16))


def bert() -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=160, max_position_embeddings=16))


LIKE_LLAMA = (*LLAMA, "model.norm_eps=1e-6")


def test_an_imported_run_is_sampled_and_trained(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    folder, path = a_folder(tmp_path / "hf", gpt2()), tmp_path / "run"
    assert run(["import", str(folder), str(path), "--config", "run.toml", "model.dropout=0.5"]) == 2
    assert "model.dropout: given, but" in capsys.readouterr().err
    assert run(["import", str(folder), str(path), "--config", "run.toml", "run.name=x", "run.folder=y"]) == 2
    said = capsys.readouterr().err
    assert "run.name: given on the command line, but" in said
    assert "run.folder: given on the command line, but" in said
    done = called(project, "import", str(folder), str(path), "--config", "run.toml", *SHORT)
    assert done.returncode == 0, done.stderr
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    assert float((logits(ours(path), 257) - logits(model, 257)).abs().max()) < 1e-5
    assert sample_run(path, ["many"], tokens=5, device="cpu", out=io.StringIO())[0].startswith("many")
    done = called(project, "train", str(path / "config.toml"), f"run.folder={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    assert f"weights of 28 parameters read from {folder}" in done.stdout
    (started, *_) = RunFolder.open(tmp_path / "new").read_events()
    assert started["weights"]["drawn"] == []
    assert len(started["weights"]["fingerprint"]) == 64
    done = called(project, "train", str(path / "config.toml"), "--resume")
    assert done.returncode == 2
    assert "was imported and has no training steps" in done.stderr


IDS = {"bos_token_id": None, "eos_token_id": [256, 7], "pad_token_id": 5}
GENERATION = {"eos_token_id": [256, 7], "pad_token_id": 5, "temperature": 0.6, "do_sample": True}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": True, "special": True},
    "pad_token": "a",
    "model_max_length": 11,
    "padding_side": "left",
}


def reading(folder: Path) -> list[Any]:
    """What transformers reads of a folder's control tokens."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generation = (
        GenerationConfig.from_pretrained(folder).to_dict() if (folder / "generation_config.json").is_file() else 0
    )
    ids = [getattr(config, name, 0) for name in (*IDS, "sep_token_id", "decoder_start_token_id")]
    names = ("special_tokens_map", "all_special_ids", "model_max_length", "padding_side")
    return [ids, generation, [getattr(tokenizer, name) for name in names], tokenizer("many <|endoftext|>")]


@pytest.mark.parametrize("with_files", [True, False], ids=["files", "bare"])
def test_control_tokens_are_those_of_the_folder(with_files: bool, tmp_path: Path) -> None:
    """Also after training from its weights."""
    folder, out, tuned = a_folder(tmp_path / "hf", gpt2()), tmp_path / "out", tmp_path / "tuned"
    settings = json.loads((folder / "config.json").read_text())
    settings = {key: value for key, value in settings.items() if not key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(settings | (IDS if with_files else {})))
    for name, values in (("generation_config.json", GENERATION), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (folder / name).write_text(json.dumps(values)) if with_files else (folder / name).unlink(missing_ok=True)
    make_project(tmp_path)
    assert run(["import", str(folder), str(tmp_path / "run"), "data.corpus=corpus.txt", *SMALL]) == 0
    assert run(["export", str(tmp_path / "run"), str(out)]) == 0
    done = called(tmp_path, "train", "run/config.toml", "run.folder=tuned", *SMALL)
    assert done.returncode == 0, done.stderr
    assert run(["export", str(tuned), str(tmp_path / "trained")]) == 0
    for exported in (out, tmp_path / "trained"):
        assert reading(exported) == reading(folder)
        written = json.loads((exported / "config.json").read_text())
        assert {key: value for key, value in written.items() if key.endswith("_token_id")} == (
            IDS if with_files else {}
        )
        for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
            assert (exported / name).exists() == (folder / name).exists()


def test_what_an_import_of_a_bert_prints_works_as_printed(tmp_path: Path) -> None:
    make_project(tmp_path)
    train, dev = questions(tmp_path)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 64}
    torch.manual_seed(3)
    config = BertConfig(**sizes, vocab_size=160, max_position_embeddings=64)
    BertForQuestionAnswering(config).save_pretrained(tmp_path / "hf")
    vocabulary(tmp_path / "hf")
    small = (*ALONE, "data.stride=8", "data.question_len=12")
    for number, (words, asks) in enumerate(
        (
            ((), ", with your files as CORPUS and VALIDATION"),
            (("data.corpus=CORPUS",), ", with your file as VALIDATION"),
            (("data.corpus=CORPUS", "data.validation=VALIDATION"), ""),
        )
    ):
        path = f"runs/bert{number}"
        done = called(tmp_path, "import", "hf", path, *small, *words)
        assert done.returncode == 0, done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("to train"))
        told, _, command = line.partition(": codescent ")
        assert told == f"to train{asks}"
        (tmp_path / "CORPUS").unlink(missing_ok=True)
        done = called(tmp_path, "evaluate", path)
        if asks:
            assert done.returncode == 2
            assert done.stderr.endswith("so it has no validation split; give the file to score: --data FILE\n")
            assert "python-stdlib" not in done.stderr
            done = called(tmp_path, "train", "--resume", path)
            assert done.stderr.endswith(f"begin a run with its weights{asks}: codescent {command}\n")
        done = called(tmp_path, "evaluate", path, "--data", "dev.json")
        assert "exact match" in done.stdout, done.stderr
        (tmp_path / "CORPUS").write_bytes(train.read_bytes())
        (tmp_path / "VALIDATION").write_bytes(dev.read_bytes())
        done = called(tmp_path, *shlex.split(command))
        assert done.returncode == 0, done.stderr
        done = called(tmp_path, "evaluate", f"{path}-tuned")
        assert "exact match" in done.stdout, done.stderr


def test_a_masked_model_without_a_corpus_asks_for_one(tmp_path: Path) -> None:
    vocabulary(a_folder(tmp_path / "hf", bert()))
    assert called(tmp_path, "import", "hf", "run").returncode == 0
    done = called(tmp_path, "evaluate", "run")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "so it has no validation split; import it again, with another name, with data.corpus=FILE\n"
    )


UNTRAINED = ("train.num_steps=1", "optimizer.learning_rate=1e-30", "train.eval_every=0")
"""A step that changes no weight: below half of the last bit of any."""


@pytest.mark.parametrize(
    ("kind", "words"),
    [(gpt2, ("model.dropout=0.1",)), (llama, LIKE_LLAMA), (bert, (*BERT, "model.vocab_size=160"))],
    ids=["gpt2", "llama", "bert"],
)
def test_weights_to_begin_with_are_the_same_on_every_layout(
    kind: Any, words: Sequence[str], project: Path, tmp_path: Path, forker: Forker
) -> None:
    folder = a_folder(tmp_path / "hf", kind())
    assert run(["import", str(folder), str(tmp_path / "run")]) == 0
    expected = weights(tmp_path / "run")
    layouts = {
        "one": (1, ()),
        "bf16": (1, ("train.precision=bf16",)),
        "tp": (2, ("parallel.tp=2",)),
        "shard": (2, ("parallel.dp_shard=2",)),
        "pp": (2, ("parallel.pp=2", "train.microbatch_size=4")),
        "hybrid": (4, ("parallel.tp=2", "parallel.dp_shard=2")),
    }
    for name, (ranks, layout) in layouts.items():
        begun = f"{kind.__name__}-begins-{name}"
        found = forker.train(project, begun, ranks, *UNTRAINED, *words, *layout, f"model.weights={folder}")
        assert same(weights(found.path), expected), name


def test_what_the_folder_lacks_is_drawn_and_said(project: Path, tmp_path: Path, forker: Forker) -> None:
    folder = a_folder(tmp_path / "hf", llama(LlamaModel))
    words = (*UNTRAINED, *LIKE_LLAMA)
    forker.train(project, "begun", 1, *words, f"model.weights={folder}")
    forker.train(project, "drawn", 1, *words)
    begun, drawn = (weights(project / "runs" / name) for name in ("begun", "drawn"))
    assert torch.equal(begun["model.head.weight"], drawn["model.head.weight"])
    assert not torch.equal(begun["model.tok.weight"], drawn["model.tok.weight"])
    (started, *_) = RunFolder.open(project / "runs" / "begun").read_events()
    assert started["weights"]["drawn"] == ["head.weight"]
    with pytest.raises(UserError, match=r"head\.weight: missing: the folder's model has no head"):
        import_folder(folder, tmp_path / "run", load("default"))


def test_a_masked_model_begins_with_a_new_head_to_answer_questions(
    project: Path, trained: Callable[[str], Path], tmp_path: Path, forker: Forker
) -> None:
    questions(project)
    assert run(["export", str(trained("bert-tp")), str(tmp_path / "hf")]) == 0
    asked = ("data.task=qa", "data.corpus=train.json", "data.validation=dev.json", "model.seq_len=16", "data.stride=4")
    words = (*UNTRAINED, *BERT, *asked, "data.question_len=5", "train.global_batch_size=2", "parallel.dp_shard=2")
    vocab = find(trained("bert-tp")).resolved.shape.vocab_size
    begun = forker.train(project, "asked", 2, *words, f"model.vocab_size={vocab}", f"model.weights={tmp_path / 'hf'}")
    before, after = weights(trained("bert-tp")), weights(begun.path)
    body = {name for name in after if not name.startswith("model.head.")}
    assert same({name: after[name] for name in body}, {name: before[name] for name in body})
    assert (begun.read_events()[0])["weights"]["drawn"] == ["head.weight", "head.bias"]
    assert run(["export", str(begun.path), str(tmp_path / "qa")]) == 0
    assert run(["import", str(tmp_path / "qa"), str(tmp_path / "run")]) == 0
    assert find(tmp_path / "run").config.data.task == "qa"
    assert same(weights(tmp_path / "run"), after)


def test_weights_of_another_model_are_refused_before_a_rank_starts(project: Path, tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "hf", gpt2())
    rows = "codescent makes no rows for new tokens; in transformers, call model.resize_token_embeddings(300)"
    for words, parts in (
        (["model.vocab_size=300"], ["model.vocab_size = 300: but model.weights = ", f"has 257: {rows}"]),
        (["model.num_layers=3", "model.hidden_dim=32"], ["model.num_layers = 3", "model.hidden_dim = 32"]),
        (["data.tokenizer=char", "model.vocab_size=257"], ["data.tokenizer = char", "another id in the tokenizer"]),
        (list(LIKE_LLAMA), ['of a gpt2, but model.kind = "llama"']),
        (["model.weights=nowhere"], ["model.weights: ", "nowhere: no such folder"]),
    ):
        done = called(
            project,
            "train",
            "run.toml",
            "--ranks",
            "2",
            f"run.folder={tmp_path / 'not'}",
            f"model.weights={folder}",
            *words,
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert all(part in done.stderr for part in parts), done.stderr
        assert "rank" not in done.stdout
        assert not (tmp_path / "not").exists()


def test_a_resumed_run_does_not_need_the_folder(project: Path, tmp_path: Path, forker: Forker) -> None:
    folder = a_folder(tmp_path / "hf", gpt2())
    words = ("model.dropout=0.1", f"model.weights={folder}", "checkpoint.every=2", "train.eval_every=0")
    forker.train(project, "goes-on", 1, *words, "train.num_steps=2", "optimizer.decay_steps=4")
    folder.rename(tmp_path / "away")
    forker.train(project, "goes-on", 1, *words, "train.num_steps=3", "optimizer.decay_steps=4", resume=True)


def test_weights_that_are_not_finite_are_refused_on_every_rank(project: Path, tmp_path: Path, forker: Forker) -> None:
    folder = a_folder(tmp_path / "hf", gpt2())
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    tensors[name][:, -1] = float("nan")  # of the second rank's columns
    save_file(tensors, file, {"format": "pt"})
    done = forker.run(project, 2, ["run.name=nan", f"model.weights={folder}", "parallel.tp=2"])
    assert done.codes == [2, 2]
    assert f"{folder}: holds numbers that are not finite (NaN or infinity), in blocks.1.mlp.up.weight" in done.said
    assert not (project / "runs" / "nan").exists()
    (told,) = (line for line in import_folder(folder, tmp_path / "imported", load("default")) if "warning" in line)
    assert "not finite (NaN or infinity), in blocks.1.mlp.up.weight: no run can train from them" in told


def test_nothing_half_made_is_left(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = a_folder(tmp_path / "hf", gpt2())
    before = sorted(tmp_path.iterdir())
    path = trained("gpt2")
    with monkeypatch.context() as patch:
        patch.setattr("codescent.verbs.export_run.write_weights", full)
        with pytest.raises(UserError, match="no space left"):
            export_run(path, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("codescent.checkpoint.parts._write_hashed", full)
        with pytest.raises(UserError, match="no space left"):
            import_folder(folder, tmp_path / "out", load("default"))
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_done_has_exit_code_2(
    project: Path, trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], forker: Forker
) -> None:
    (tmp_path / "there").mkdir()
    path = trained("gpt2")
    sizes = ("model.num_layers=auto", "model.num_encoder_layers=1", "model.num_decoder_layers=1")
    sizes += ("model.seq_len=auto", "model.source_len=8", "model.target_len=8")
    forker.train(project, "encoder", 1, *UNTRAINED, "model.kind=transformer", *sizes)
    assert run(["export", str(path), str(project / "out")]) == 0
    cut = tmp_path / "cut"
    a_folder(cut, gpt2())
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-4])
    for words, message in (
        (["export", str(path), str(tmp_path / "there")], "exists already"),
        (["export", str(tmp_path / "there"), str(tmp_path / "out")], "not a run folder"),
        (["export", str(project / "runs" / "encoder"), str(tmp_path / "out")], 'model.kind = "transformer"'),
        (["import", str(tmp_path / "nowhere"), str(tmp_path / "out")], "no such folder"),
        (["import", str(cut), str(tmp_path / "out")], "not a whole safetensors file"),
        (["import", str(cut), str(tmp_path / "there")], "exists already"),
        (["import", str(project / "out"), f"{tmp_path}/ends in a space "], "cannot be a run: name: "),
    ):
        assert run(words) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert sorted(tmp_path.iterdir()) == [cut, tmp_path / "there"]


PEAK = """
import sys
from pathlib import Path
from codescent.config.load import load
from codescent.verbs.export_run import export_run
from codescent.verbs.import_folder import import_folder

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def peak(act, *words, **options):
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = status("VmRSS:")
    act(*words, **options)
    print(status("VmHWM:") - before)

folder, config = Path(sys.argv[1]), load("default")
peak(import_folder, folder / "hf", folder / "run", config)
peak(export_run, folder / "run", folder / "fp32", dtype="fp32", max_shard_bytes=int(sys.argv[2]))
peak(export_run, folder / "run", folder / "bf16", dtype="bf16", max_shard_bytes=int(sys.argv[2]) // 2)
"""
WIDE = {"n_layer": 4, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024}
SHARD_BYTES = 160_000_000
MAPPED_BYTES = 80_000_000
"""Pages of mapped files count while the kernel leaves them: 20 to 60 MB more or less from run to run. A program that
holds all weights needs twice 270 MB."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_peak_memory_stays_below_the_largest_shard(tmp_path: Path) -> None:
    """270 MB of weights in fp32, of which the vocabulary is 154 MB in one tensor; tensors mapped from a file count."""
    GPT2LMHeadModel(GPT2Config(**WIDE)).save_pretrained(tmp_path / "hf", max_shard_size=SHARD_BYTES)
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(SHARD_BYTES)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    peaks = dict(zip(("hf", "fp32", "bf16"), map(int, done.stdout.split()), strict=True))
    for name, peak_bytes in peaks.items():
        sizes = [file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")]
        assert len(sizes) == 2
        assert peak_bytes < 1.2 * max(sizes) + MAPPED_BYTES, (name, peak_bytes, max(sizes))
    assert same(stored(tmp_path / "fp32"), stored(tmp_path / "hf"))
