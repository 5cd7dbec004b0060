"""In: adapters beside the matrices of every kind of model. Out: their gradients by the chain rule, runs on every layout
like one process, checkpoints of adapters alone, folders for `peft`. Does not count bytes of a step (test_declared)."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from peft import PeftModel
from questions import files as questions
from questions import vocabulary
from runs import assert_same, losses, make_project
from safetensors.torch import load_file, save_file
from test_interchange import a_folder, bert, gpt2, llama, logits, ours
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertForQuestionAnswering

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
from codescent.config.sections import Config
from codescent.inference.trained import find
from codescent.models.initialize import initialize_
from codescent.models.lora.declare import is_adapter, names, resolve
from codescent.plan.model import Lora
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.verbs.cli import run
from codescent.verbs.evaluate import evaluate_run

pytestmark = [  # what peft and transformers say of each other
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "vocab_size": 31, "seq_len": 8},
    "llama": {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim": 16,
        "ffn_dim": 24,
        "vocab_size": 31,
        "seq_len": 8,
    },
    "bert": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "vocab_size": 31, "seq_len": 8, "head": "mlm"},
    "transformer": {
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "ffn_dim": 24,
        "vocab_size": 31,
        "source_len": 3,
        "target_len": 5,
    },
}
RANK = 3


def adapted(kind: str, *, targets: str | None = None, whole: str | None = None) -> tuple[models.Shape, Lora]:
    shape = models.shape_of(kind, SIZES[kind])
    return shape, resolve(models.parameters_of(kind, shape), RANK, 7.0, targets, whole)


def module_with_values(kind: str, shape: models.Shape, lora: Lora | None) -> torch.nn.Module:
    """In fp64, no adapter's matrix zero."""
    module = models.construct(models.facts_of(kind, shape, None, lora, 5), "cpu").double()
    initialize_(module, 1, models.parameters_of(kind, shape, lora))
    with torch.no_grad():
        for number, (name, tensor) in enumerate(module.named_parameters()):
            if name.endswith("lora_b"):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return module


@pytest.mark.parametrize("kind", SIZES)
def test_the_module_has_the_declared_adapters(kind: str) -> None:
    shape, lora = adapted(kind, whole="norm_1")
    declared = models.parameters_of(kind, shape, lora)
    module = models.construct(models.facts_of(kind, shape, None, lora))
    found = {name: (tuple(tensor.shape), tensor.requires_grad) for name, tensor in module.named_parameters()}
    assert list(found.items()) == [(p.name, (p.shape, p.trained)) for p in declared]
    matrices = [p for p in models.parameters_of(kind, shape) if p.name.startswith("blocks.") and len(p.shape) > 1]
    adapters = [p for p in declared if is_adapter(p)]
    assert len(adapters) == 2 * len(matrices) > 0
    assert sum(p.numel for p in adapters) == sum(RANK * (math.prod(p.shape[:-1]) + p.shape[-1]) for p in matrices)
    for part in (range(2), range(2, shape.num_layers + 2)):  # a pipeline's chunks have the adapters of their layers
        chunk = models.construct(models.facts_of(kind, shape, None, lora), depths=part)
        held = [p.name for p in declared if any(depth in part for depth in p.depths)]
        assert [name for name, _ in chunk.named_parameters()] == held


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_gradients_follow_the_chain_rule(kind: str, recompute: bool) -> None:
    """With W' = W + s B A in place of W: the same loss, dA = s B^T dW', dB = s dW' A^T; nothing else has a gradient."""
    shape, lora = adapted(kind, whole="norm_1")
    module, plain = (
        module_with_values(kind, shape, lora),
        models.construct(models.facts_of(kind, shape, None, None, 5), "cpu").double(),
    )
    values = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in plain.named_parameters():
            a, b = (values.get(one) for one in names(name)) if name.endswith("weight") else (None, None)
            tensor.copy_(values[name] if a is None or b is None else values[name] + lora.scale * (b @ a))
    inputs = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(5))
    losses = []
    for one in (module, plain):
        for layer in one.modules():
            if hasattr(layer, "recompute"):
                layer.recompute = recompute  # type: ignore[assignment]
        loss = one(inputs, inputs.roll(1))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    wanted = {name: tensor.grad for name, tensor in plain.named_parameters()}
    checked = 0
    for name, tensor in module.named_parameters():
        if not tensor.requires_grad:
            assert tensor.grad is None
        elif not name.endswith(("lora_a", "lora_b")):
            torch.testing.assert_close(tensor.grad, wanted[name], rtol=1e-9, atol=1e-12)
        elif name.endswith("lora_a"):
            weight = name.replace("lora_a", "weight")
            d_weight = wanted[weight]
            assert d_weight is not None
            a, b = (values[one] for one in names(weight))
            torch.testing.assert_close(
                a.grad, lora.scale * b.flatten(0, -2).t() @ d_weight.flatten(0, -2), rtol=1e-9, atol=1e-12
            )
            torch.testing.assert_close(b.grad, lora.scale * d_weight @ a.t(), rtol=1e-9, atol=1e-12)
            checked += 1
    assert checked >= 8


def test_some_layers_alone() -> None:
    """Matrices without an adapter have no gradient, and what is behind them is not kept."""
    shape, lora = adapted("gpt2", targets="attn.qkv", whole="norm_1")
    module = module_with_values("gpt2", shape, lora)
    module(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    names_with = [name for name, tensor in module.named_parameters() if tensor.grad is not None]
    ends = {re.sub(r"blocks\.\d\.", "", name) for name in names_with}
    assert ends == {"attn.qkv.lora_a", "attn.qkv.lora_b", "norm_1.weight", "norm_1.bias"}


# -- runs

WORDS = (
    "lora.rank=3",
    "lora.whole=norm_1",
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.ffn_dim=45",
    "model.vocab_size=97",
    "model.num_layers=4",
    "data.tokenizer=char",
    "train.global_batch_size=12",
    "train.microbatch_size=3",
    "train.eval_every=3",
    "train.check_every=1",
    "train.num_steps=6",
    "optimizer.max_grad_norm=0.05",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp=2": (2, ()),
    "tp=2 sequence_parallel=false recompute=selective": (2, ()),
    "cp=2 recompute=full": (2, ()),
    "dp_shard=3 zero_stage=2": (3, ("train.microbatch_size=2",)),
    "dp_shard=3": (3, ("train.microbatch_size=2",)),
    "pp=2 schedule=zero-bubble": (2, ()),
    "pp=2 tp=2 schedule=interleaved virtual_stages=2": (4, ("train.microbatch_size=6",)),
}
WHOLE = {  # layers at both ends trained beside adapters; the tied matrix is on two stages
    "tp=2": (2, ()),
    "dp_shard=3 zero_stage=2": (3, ("train.microbatch_size=2",)),
    "pp=2 schedule=zero-bubble": (2, ()),
}
SLOW = {
    "dp_replicate=2": (2, ()),
    "dp_shard=3 zero_stage=1": (3, ("train.microbatch_size=2",)),
    "pp=2 dp_shard=2": (4, ()),
    "dp_shard=2 tp=2 zero_stage=2": (4, ()),
    "dp_replicate=2 dp_shard=2 cp=2": (8, ("train.microbatch_size=1",)),
    "dp_replicate=2 pp=2 tp=2": (8, ()),
    "pp=2 cp=2 schedule=zero-bubble recompute=full": (4, ()),
    "dp_shard=2 cp=2 zero_stage=1 recompute=full": (4, ()),
}


LINES = (
    "model.kind=transformer",
    "model.num_layers=auto",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=2",
    "model.seq_len=auto",
    "model.source_len=8",
    "model.target_len=8",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("lora")
    make_project(project)
    vocabulary(project)
    return Runs(project, forker, WORDS, ("train.microbatch_size=12",))


def of(layout: str) -> tuple[str, ...]:
    return tuple(f"parallel.{key}" for key in layout.split())


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)])
def test_every_layout_has_the_losses_of_one_process(runs: Runs, layout: str) -> None:
    ranks, words = (LAYOUTS | SLOW)[layout]
    model = ("train.precision=fp64", *(() if "cp" in layout else ("model.dropout=0.1",)))
    found = runs.run(ranks, *of(layout), *words, *model)
    assert_same(found, runs.of_one(*model), 1e-9)


@pytest.mark.parametrize(
    "layout",
    ["dp_shard=3", *(pytest.param(it, marks=pytest.mark.slow) for it in ("tp=2", "dp_shard=3 zero_stage=1", "pp=2"))],
)
def test_bf16(runs: Runs, layout: str) -> None:
    """What is not trained is bf16 alone; adapters have master copies."""
    ranks, words = (LAYOUTS | SLOW).get(layout, (2, ()))
    found = runs.run(ranks, *of(layout), *words, "train.precision=bf16")
    assert losses(found) == pytest.approx(losses(runs.of_one("train.precision=bf16")), rel=2e-3)


@pytest.mark.parametrize("layout", [*list(WHOLE)[1:], pytest.param("tp=2", marks=pytest.mark.slow)])
def test_whole_layers_on_layouts(runs: Runs, layout: str) -> None:
    ranks, words = WHOLE[layout]
    both = ("train.precision=fp64", "model.dropout=0.1", "lora.targets=attn.qkv", "lora.whole=tok,pos,norm,mlp.down")
    assert_same(runs.run(ranks, *of(layout), *words, *both), runs.of_one(*both), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("parallel.dp_shard=2", "parallel.zero_stage=2")])
def test_compiled_blocks(runs: Runs, words: Sequence[str]) -> None:
    kind = ("train.precision=fp64", "train.microbatch_size=6", "model.num_layers=2", "train.num_steps=3")
    found = runs.run(2 if words else 1, *words, *kind, "train.compile=blocks")
    assert losses(found) == pytest.approx(losses(runs.of_one(*kind)), rel=1e-9)


def test_everything_in_the_hosts_memory(runs: Runs) -> None:
    """parallel.offload = "all", with a CPU for the device: shards of what is not trained are there, too."""
    words = ("train.precision=bf16", "train.microbatch_size=6")
    away = ("parallel.dp_shard=2", "parallel.offload=all")
    found = runs.forker.train_on_cpus(runs.project, "away", 2, *WORDS, *words, *away)
    assert losses(found) == pytest.approx(losses(runs.of_one(*words)), rel=2e-3)


def test_a_stage_of_an_encoder_without_adapters(runs: Runs) -> None:
    """Nothing on it is trained, and its list makes no gradient of a weight."""
    words = (*LINES, "train.precision=fp64", "lora.targets=cross.q", "lora.whole=norm_3")
    layout = "pp=2 cut=encoder-decoder schedule=zero-bubble"
    assert_same(runs.run(2, *of(layout), *words), runs.of_one(*words), 1e-9)


def test_a_stage_with_nothing_to_train(runs: Runs) -> None:
    """A large vocabulary: the second stage has the head alone, which is not trained."""
    words = ("model.num_layers=2", "model.vocab_size=6000", "train.precision=fp64", "lora.whole=norm_2")
    found = runs.run(2, "parallel.pp=2", *words)
    assert_same(found, runs.of_one(*words), 1e-9)
    plan = found.plan
    assert [part[0] for part in plan["schedule"]["depths"]] == [0, 3]


KIND_WORDS = {
    "llama": ("model.kind=llama", "model.num_kv_heads=2", "model.tie_head=true", "model.hidden_dim=24"),
    "bert": ("model.kind=bert", "data.tokenizer=bert:vocab.txt", "model.vocab_size=160"),
    "transformer": LINES,
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "tp=2") for kind in KIND_WORDS), pytest.param("llama", "dp_shard=2", marks=pytest.mark.slow)],
)
def test_kinds_on_layouts(runs: Runs, kind: str, layout: str) -> None:
    words = (*KIND_WORDS[kind], "train.precision=fp64")
    assert_same(runs.run(2, *of(layout), *words), runs.of_one(*words), 1e-9)


def tensors_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    saved = Checkpoints(folder.checkpoints, 1, keep_best=False).latest()
    assert saved is not None
    return read_tensors(saved.path)


def test_a_checkpoint_has_what_is_trained_and_goes_on_bitwise(runs: Runs) -> None:
    words = ("train.precision=bf16", "checkpoint.every=3", "optimizer.decay_steps=6", "model.dropout=0.1")
    whole = runs.run(1, *words)
    names_held = {name.removeprefix("model.") for name in tensors_of(whole) if name.startswith("model.")}
    assert all(re.search(r"lora_[ab]$|norm_1\.", name) for name in names_held)
    assert len(names_held) == 4 * (4 * 2 + 2)
    runs.run(1, *words, "train.num_steps=3")
    resumed = runs.run(1, *words, resume=True)
    assert losses(resumed) == losses(whole)
    after, before = tensors_of(resumed), tensors_of(whole)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_checkpoints_go_from_layout_to_layout(runs: Runs) -> None:
    words = ("train.precision=fp64", "optimizer.decay_steps=6")
    runs.run(2, *words, "parallel.tp=2", "train.num_steps=2")
    runs.run(3, *words, "parallel.dp_shard=3", "train.num_steps=4", "train.microbatch_size=2", resume=True)
    found = runs.run(2, *words, "parallel.pp=2", resume=True)
    assert losses(found) == pytest.approx(losses(runs.of_one(*words)), rel=1e-9)


# -- weights from folders, and into folders


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    make_project(folder)
    vocabulary(folder)
    questions(folder)
    for name, model in (("gpt2", gpt2()), ("llama", llama()), ("bert", bert())):
        a_folder(folder / name, model)
    return folder


GPT2 = ("model.weights=gpt2", "model.hidden_dim=16", "lora.rank=2")
LLAMA = (
    "model.kind=llama",
    "model.weights=llama",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=27",
    "model.hidden_dim=32",
    "model.norm_eps=1e-6",
    "lora.rank=2",
    "lora.targets=attn.qkv,mlp.gate_up",
    "lora.whole=norm_1",
)
BERT = (
    "model.kind=bert",
    "model.weights=bert",
    "data.task=qa",
    "data.corpus=train.json",
    "data.validation=dev.json",
    "data.tokenizer=bert:vocab.txt",
    "data.seq_len=16",
    "data.question_len=4",
    "data.stride=4",
    "model.vocab_size=160",
    "model.ffn_dim=64",
    "lora.rank=2",
    "lora.targets=mlp.down",
)
MLM = (
    "model.kind=bert",
    "model.weights=bert",
    "data.tokenizer=bert:vocab.txt",
    "model.vocab_size=160",
    "model.ffn_dim=64",
    "lora.rank=2",
)
SHORT = ("train.num_steps=6", "train.eval_every=6", "train.eval_samples=8", "train.global_batch_size=4")


def of_base(bases: Path, forker: Forker, name: str, ranks: int, *words: str) -> Path:
    forker.train(bases, name, ranks, *SHORT, *words)
    return bases / "runs" / name


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("gpt2", 1, GPT2),
        ("gpt2", 2, (*GPT2, "parallel.tp=2")),
        ("gpt2", 1, (*GPT2, "lora.whole=tok,pos,norm")),
        ("gpt2", 1, (*GPT2, "lora.targets=attn.out", "lora.whole=mlp.down,norm_2")),
        ("llama", 1, LLAMA),
        ("llama", 2, (*LLAMA, "parallel.dp_shard=2")),
        ("llama", 1, (*LLAMA, "lora.whole=head,norm,tok,mlp.down", "lora.alpha=3.5")),
        ("bert", 1, BERT),
        ("bert", 1, (*BERT, "lora.targets=attn.qkv", "lora.whole=head,norm_2,mlp.down")),
        ("bert", 1, (*BERT, "lora.whole=head,attn.out,embed_norm,segment,pos")),
        ("bert", 1, (*MLM, "lora.whole=head.dense,head.norm")),
    ],
)
def test_a_trained_model_is_the_same_for_us_in_transformers_and_in_peft(
    bases: Path, forker: Forker, tmp_path: Path, name: str, ranks: int, words: Sequence[str]
) -> None:
    path = of_base(bases, forker, tmp_path.name, ranks, *words, "optimizer.learning_rate=3e-2")
    assert run(["export", str(path), str(tmp_path / "merged")]) == 0
    assert run(["export", str(path), str(tmp_path / "adapters"), "--adapters"]) == 0
    mine = ours(path)
    kinds: dict[str, Any] = {"qa": BertForQuestionAnswering, "mlm": AutoModelForMaskedLM}
    kind = kinds.get(find(path).task.name, AutoModelForCausalLM)
    base = kind.from_pretrained(bases / name)
    merged = kind.from_pretrained(tmp_path / "merged").eval()
    with_adapters = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    vocab_size = find(path).resolved.shape.vocab_size
    found = [_logits(model, vocab_size) for model in (mine, merged, with_adapters)]
    assert float(found[0].std()) > 1e-3
    for other in found[1:]:
        assert float((found[0] - other).abs().max()) < 1e-5
    assert run(["export", str(path), str(tmp_path / "other"), "--adapters", "--dtype", "bf16"]) == 0
    stored = load_file(tmp_path / "other" / "adapter_model.safetensors")
    assert all(tensor.dtype is torch.bfloat16 for tensor in stored.values())


@torch.no_grad()
def _logits(model: Any, vocab_size: int) -> torch.Tensor:
    if vocab_size != 160:  # a BERT's
        return logits(model, vocab_size)
    out = model(torch.randint(0, vocab_size, (3, 16), generator=torch.Generator().manual_seed(1)))
    if isinstance(out, torch.Tensor):
        return out
    return out.logits if "logits" in out else torch.stack((out.start_logits, out.end_logits), dim=-1)


def test_the_validation_loss_is_that_of_the_merged_model(
    bases: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bases)
    path = of_base(bases, forker, "evaluated", 1, *GPT2, "train.eval_samples=auto", "optimizer.learning_rate=1e-2")
    last = RunFolder.open(path).read_metrics()[-1]["val_loss"]
    (found,) = re.findall(r"loss ([\d.]+)", "\n".join(evaluate_run(path).lines))
    assert float(found) == pytest.approx(last, rel=5e-3)  # of windows that lie a little otherwise


def test_only_adapters_change_and_the_base_is_needed(
    bases: Path, forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bases, tmp_path / "project")
    project = tmp_path / "project"
    path = of_base(project, forker, "first", 1, *GPT2, "train.num_steps=3", "optimizer.decay_steps=6")
    words = [*SHORT, *GPT2, "run.name=first", "optimizer.decay_steps=6"]
    (project / "gpt2").rename(project / "away")
    assert run(["sample", str(path), "--prompt", "many", "--tokens", "2"]) == 2
    said = capsys.readouterr().err
    assert "only adapters, so the folder model.weights is needed" in said
    assert "no such folder" in said
    done = forker.run(project, 2, [*words, "parallel.tp=2"], resume=True)
    assert done.codes == [2, 2]
    assert done.said.count("gpt2; if it was moved to a folder NEW, add to the command: model.weights=NEW") == 2
    a_folder(project / "gpt2", gpt2())
    stored = load_file(project / "gpt2" / "model.safetensors")
    stored["transformer.ln_f.bias"][0] += 1
    save_file(stored, project / "gpt2" / "model.safetensors", {"format": "pt"})
    done = forker.run(project, 1, words, resume=True)
    assert done.codes == [2]
    assert "not the weights with which the adapters" in done.said
    assert run(["export", str(path), str(tmp_path / "out")]) == 2
    assert "not the weights with which the adapters" in capsys.readouterr().err
    assert forker.run(project, 1, [*words, "model.weights=away"], resume=True).codes == [0]
    assert run(["export", str(path), str(tmp_path / "out")]) == 0  # the run knows where its weights are now
    config = path / "config.toml"
    config.write_text(re.sub(r"(?m)^weights = .*$", 'weights = "auto"', config.read_text()))
    capsys.readouterr()
    assert run(["sample", str(path), "--prompt", "many", "--tokens", "2"]) == 2
    assert "not the weights with which the adapters" in capsys.readouterr().err


# -- refused

BASE = {
    "model": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 16, "vocab_size": 31},
    "train": {"device": "cuda"},
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora": {"rank": 16}}, "lora.rank = 16: attn.qkv is a matrix of 48 x 16"),
        ({"lora": {"rank": 2, "targets": "attn.kqv"}}, "lora.targets: there is no 'attn.kqv' in this model; it has"),
        ({"lora": {"rank": 2, "targets": "norm_1"}}, "lora.targets: there is no 'norm_1'"),
        ({"lora": {"rank": 2, "targets": " , "}}, "lora.targets: names no layer"),
        ({"lora": {"rank": 2, "whole": "neck"}}, "lora.whole: there is no 'neck'"),
        ({"lora": {"rank": 2, "whole": "mlp.up"}}, "lora.whole: mlp.up is in lora.targets, too"),
    ],
)
def test_adapters_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        build(Config.model_validate({**BASE, **given}), 31, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lora.alpha=8"], "lora.alpha: given, but lora.rank is not"),
        (["lora.rank=0"], "lora.rank: given 0; must be a whole number >= 1"),
        (["lora.rank=2", "train.compile=model"], 'train.compile: given "model", but lora.rank is set'),
        (["lora.rank=2", "parallel.offload=optimizer"], 'parallel.offload: given "optimizer", but lora.rank is set'),
    ],
)
def test_keys_that_do_not_go_together(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "default", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_head_that_would_stay_as_drawn(bases: Path, forker: Forker) -> None:
    """The base has a head for masked tokens; the one for answers is new, and trained whole unless told otherwise."""
    words = [*SHORT, *BERT, "run.name=headless", "lora.whole=norm_1"]
    done = forker.run(bases, 1, words)
    assert done.codes == [2]
    assert (
        "has no head.weight, head.bias, which with lora.rank would keep their random values; add head to lora.whole"
        in done.said
    )


def test_exports_that_cannot_be(
    bases: Path, forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = of_base(bases, forker, "plain", 1, "model.weights=gpt2")
    assert run(["export", str(plain), str(tmp_path / "out"), "--adapters"]) == 2
    assert "has no adapters (lora.rank is not set); leave out --adapters" in capsys.readouterr().err
    drawn = of_base(bases, forker, "drawn", 1, "lora.rank=2")
    assert run(["export", str(drawn), str(tmp_path / "out"), "--adapters"]) == 2
    assert "the adapters need this run's frozen random weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(["export", str(drawn), str(tmp_path / "out")]) == 0
    for whole, said in (
        ("head", "peft cannot load cls.predictions apart from cls.predictions.transform.dense"),
        ("tok", "peft cannot load cls.predictions.decoder apart from cls.predictions.decoder.bias"),
    ):
        path = of_base(bases, forker, f"mlm-{whole}", 1, *MLM, f"lora.whole={whole}")
        assert run(["export", str(path), str(tmp_path / "none"), "--adapters"]) == 2
        assert said in capsys.readouterr().err


def test_import_has_no_adapters(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(bases / "gpt2"), str(tmp_path / "run"), "lora.rank=2"]) == 2
    assert "an imported model has no adapters; give it when training" in capsys.readouterr().err


def test_what_comes_to_the_same_goes_on(bases: Path, forker: Forker) -> None:
    words = [*SHORT, *GPT2, "optimizer.decay_steps=6", "train.num_steps=3"]
    of_base(bases, forker, "same", 1, *words)
    spelt = ["lora.alpha=4", "lora.targets=mlp.down,mlp.up,attn.out,attn.qkv", "train.num_steps=6", "run.name=same"]
    assert forker.run(bases, 1, [*words, *spelt], resume=True).codes == [0]
    done = forker.run(bases, 1, [*words, "lora.targets=attn.qkv", "run.name=same"], resume=True)
    assert done.codes == [2]
    assert "lora.targets: the run in runs/same has 'attn.out, attn.qkv, mlp.down, mlp.up'" in done.said


def test_the_plan_counts_what_is_trained() -> None:
    """bf16: 2 bytes of a parameter that is not trained; 16 of one that is (weight, gradient, master, two moments)."""
    config = Config.model_validate({**BASE, "lora": {"rank": 2}, "train": {"precision": "bf16"}})
    plan = plan_of(config, 1)
    width, ffn, layers = 16, 64, 2
    adapters = 2 * layers * ((width + 3 * width) + (width + width) + (width + ffn) + (ffn + width))
    trained = sum(tensor.parameter.numel for tensor in plan.trained)
    assert trained == adapters
    state = sum(tensor.state_bytes(plan.mesh) for tensor in plan.tensors)
    assert state == 2 * (plan.num_parameters - adapters) + 16 * adapters
