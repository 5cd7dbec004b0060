"""In: folders that `peft` wrote. Out: runs that begin with their adapters, weights with adapters merged, refusals.
Does not test what codescent writes for `peft` (test_lora and test_adapter_methods do)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from peft import LoraConfig, PeftModel, get_peft_model
from runs import make_project
from safetensors.torch import load_file, save_file
from test_interchange import a_folder, gpt2, llama, logits
from transformers import AutoModelForCausalLM

from codescent import models
from codescent.base.errors import UserError
from codescent.huggingface.folder import Folder, open_folder
from codescent.huggingface.initial import InitialValues
from codescent.huggingface.merged import merged_weights
from codescent.huggingface.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from codescent.huggingface.peft_folder import open_peft, open_start
from codescent.inference.trained import find, module_of
from codescent.models.lora.declare import Method, resolve
from codescent.plan.model import Lora
from codescent.verbs.cli import run

pytestmark = [  # what peft and transformers say of each other
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, all": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2, dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "use_dora": True, "use_rslora": True}),
    "llama, q and v": ("llama", {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}),
    "llama, dora and the head": (
        "llama",
        {"target_modules": ["k_proj", "gate_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    make_project(folder)
    for name, make in (("gpt2", gpt2), ("llama", llama)):
        a_folder(folder / name, make())
    for name in ADAPTERS:
        adapters(folder, name)
    return folder


def adapters(folder: Path, name: str) -> None:
    """A folder of `peft`, as its users have them: `peft` wrote it, and no matrix is zero."""
    base, options = ADAPTERS[name]
    config = LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / base), config)
    with torch.no_grad():
        for number, (_, tensor) in enumerate(model.named_parameters()):
            if tensor.requires_grad:
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                tensor.add_(noise * 0.1)
    model.save_pretrained(folder / name)


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_those_of_peft(project: Path, name: str) -> None:
    """Fault: rows of q, k and v or of two halves exchanged; another scale; lengths of columns in place of rows."""
    base = project / ADAPTERS[name][0]
    folder = open_folder(base)
    weights = merged_weights(folder, project / name)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), project / name)
    theirs.merge_and_unload().save_pretrained(project / f"{name} merged")
    wanted = merged_weights(open_folder(project / f"{name} merged"), None)
    changed = 0
    for parameter in models.parameters_of(folder.kind.name, folder.shape):
        every = [slice(0, size) for size in parameter.shape]
        some = [slice(size // 3, size) for size in parameter.shape]
        weights.box(parameter.name, every).add_(1.0)  # what a reader changes is its own
        torch.testing.assert_close(weights.box(parameter.name, every), wanted.box(parameter.name, every))
        torch.testing.assert_close(weights.box(parameter.name, some), wanted.box(parameter.name, some))
        changed += not torch.equal(wanted.box(parameter.name, every), merged_weights(folder, None).box(
            parameter.name, every
        ))  # fmt: skip
    assert changed >= 3
    identity = weights.identity()
    assert weights.matches(identity)
    assert not merged_weights(folder, None).matches(identity)


def lora_of(folder: Folder, targets: str, method: Method) -> Lora:
    return resolve(models.parameters_of(folder.kind.name, folder.shape), 3, 7.0, targets, None, method)


@pytest.mark.parametrize(
    ("name", "targets", "method"),
    [
        ("gpt2, all", "attn.qkv,attn.out,mlp.up,mlp.down", Method()),
        ("gpt2, dora", "attn.qkv,mlp.up", Method(rslora=True, dora=True)),
    ],
)
def test_a_run_begins_with_the_adapters(project: Path, name: str, targets: str, method: Method) -> None:
    """Fault: a matrix that stays new, or is read transposed: its logits are others than those of `peft`."""
    base = project / "gpt2"
    folder = open_folder(base)
    lora = lora_of(folder, targets, replace(method, start=str(project / name)))
    shape = replace(folder.shape, dropout=0.0)
    facts = models.facts_of("gpt2", shape, None, lora, 0, str(base))
    module, first = models.construct(facts, "cpu").eval(), InitialValues(1, facts, "fp32")
    boxes = [
        (parameter, tensor.data, tuple(slice(0, size) for size in parameter.shape))
        for parameter, tensor in zip(models.parameters_of("gpt2", shape, lora), module.parameters(), strict=True)
    ]
    assert first.write_(boxes) == []
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), project / name).eval()
    assert float((logits(module, 64) - logits(theirs, 64)).abs().max()) < 1e-5


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, 'peft_type = "IA3": codescent reads "LORA"'),
    "biases": ({"bias": "all"}, 'bias = "all": codescent reads "none", null'),
    "other base weights": ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa": codescent reads true'),
    "other ranks": ({"rank_pattern": {"c_fc": 8}}, 'rank_pattern = {"c_fc": 8}: not supported'),
    "a key of another version": ({"use_magic": True}, "use_magic = true: not supported"),
    "no rank": ({"r": "many"}, 'r = "many": must be a whole number >= 1'),
    "no alpha": ({"lora_alpha": -1}, "lora_alpha = -1: must be a number > 0"),
    "no switch": ({"use_dora": "yes"}, 'use_dora = "yes": must be true or false'),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_refused_key_by_key(project: Path, tmp_path: Path, case: str) -> None:
    """Fault: a key that changes the model is passed over, and the model is another one."""
    change, said = SETTINGS[case]
    shutil.copytree(project / "gpt2, dora", tmp_path / "folder")
    file = tmp_path / "folder" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as caught:
        open_peft(tmp_path / "folder")
    assert said in str(caught.value)
    assert ADAPTER_CONFIG in str(caught.value)


def test_damaged_folders(project: Path, tmp_path: Path) -> None:
    """Fault: a traceback in place of one sentence."""
    with pytest.raises(UserError, match="no such folder"):
        open_peft(tmp_path / "none")
    shutil.copytree(project / "gpt2", tmp_path / "folder")
    with pytest.raises(UserError, match="not a folder of peft"):
        open_peft(tmp_path / "folder")
    (tmp_path / "folder" / ADAPTER_CONFIG).write_text("[" * 10_000)
    with pytest.raises(UserError, match="not JSON"):
        open_peft(tmp_path / "folder")
    shutil.copy(project / "gpt2, dora" / ADAPTER_CONFIG, tmp_path / "folder")
    with pytest.raises(UserError, match="no such file"):
        open_peft(tmp_path / "folder")
    (tmp_path / "folder" / ADAPTER_WEIGHTS).write_bytes(b"not tensors")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        open_peft(tmp_path / "folder")


def test_adapters_that_do_not_fit(project: Path, tmp_path: Path) -> None:
    """Fault: a run trains other adapters than it was given, or merges some of them."""
    llama_folder, gpt2_folder = open_folder(project / "llama"), open_folder(project / "gpt2")
    dora = Method(dora=True, rslora=True)
    with pytest.raises(UserError, match=r"lora.rslora = false: but lora.weights = .* has true"):
        open_start(project / "gpt2, dora", gpt2_folder, lora_of(gpt2_folder, "attn.qkv,mlp.up", Method(dora=True)))
    with pytest.raises(UserError, match=r"lacks what the run trains: .*mlp.c_proj"):
        open_start(project / "gpt2, dora", gpt2_folder, lora_of(gpt2_folder, "attn.qkv,mlp.up,mlp.down", dora))
    with pytest.raises(UserError, match=r"has what the run does not train \(lora.targets, lora.whole\): .*c_attn"):
        open_start(project / "gpt2, dora", gpt2_folder, lora_of(gpt2_folder, "mlp.up", dora))
    with pytest.raises(UserError, match=r"not of this model: .*c_attn"):
        merged_weights(llama_folder, project / "gpt2, all")
    shutil.copytree(project / "gpt2, all", tmp_path / "other rank")
    settings = tmp_path / "other rank" / ADAPTER_CONFIG
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"r": 4}))
    with pytest.raises(UserError) as caught:
        merged_weights(gpt2_folder, tmp_path / "other rank")
    assert len(caught.value.problems) == 1
    assert "c_attn.lora_A.weight is [3, 16], not [4, 16]" in str(caught.value)
    assert " more" in str(caught.value)
    shutil.copytree(project / "llama, q and v", tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / ADAPTER_WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({other: one for other, one in tensors.items() if other != name}, tmp_path / "folder" / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match=r"q_proj has no lora_B\.weight"):
        merged_weights(llama_folder, tmp_path / "folder")


def test_different_matrices_a_are_merged_and_not_trained_on(project: Path, tmp_path: Path) -> None:
    """Fault: one of three matrices A takes the place of the others."""
    base, folder = project / "llama", open_folder(project / "llama")
    config = LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "qkv")
    with pytest.raises(UserError, match=r"q_proj, .*have different matrices A.*model.adapters = "):
        open_start(tmp_path / "qkv", folder, lora_of(folder, "attn.qkv", Method()))


SHORT = ("train.num_steps=2", "train.eval_every=2", "train.eval_samples=8", "train.global_batch_size=4")
GPT2 = ("model.weights=gpt2", "model.hidden_dim=16", "optimizer.learning_rate=1e-9")


@pytest.mark.slow
def test_runs_with_adapters_of_peft(
    project: Path, forker: Forker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a start that commands pass over; a merge that training or export loses; two ranks with other values."""
    monkeypatch.chdir(project)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("gpt2"), "gpt2, dora").eval()
    wanted = logits(theirs, 64)
    start = ("lora.rank=3", "lora.alpha=7", "lora.dora=true", "lora.rslora=true", "lora.targets=attn.qkv,mlp.up")
    words = (*SHORT, *GPT2, *start, "lora.weights=gpt2, dora")
    for ranks, layout in ((1, ()), (2, ("parallel.tp=2",)), (2, ("parallel.dp_shard=2",))):
        forker.train(project, f"begun-{ranks}-{len(layout)}-{''.join(layout)[-8:-2]}", ranks, *words, *layout)
        path = project / "runs" / f"begun-{ranks}-{len(layout)}-{''.join(layout)[-8:-2]}"
        found = logits(module_of(find(path), torch.device("cpu")).eval(), 64)
        assert float((found - wanted).abs().max()) < 1e-5
    forker.train(project, "merged", 2, *SHORT, *GPT2, "model.adapters=gpt2, dora", "parallel.dp_shard=2")
    found = logits(module_of(find(project / "runs" / "merged"), torch.device("cpu")).eval(), 64)
    assert float((found - wanted).abs().max()) < 1e-4
    forker.train(project, "on", 1, *SHORT, *GPT2, "model.adapters=gpt2, dora", "lora.rank=2")
    found = logits(module_of(find(project / "runs" / "on"), torch.device("cpu")).eval(), 64)
    assert float((found - wanted).abs().max()) < 1e-5
    capsys.readouterr()
    assert run(["import", "gpt2", str(tmp_path / "run"), "model.adapters=gpt2, dora"]) == 0
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert float((logits(again, 64) - wanted).abs().max()) < 1e-5
    done = forker.run(project, 1, [*words, "lora.alpha=8", "run.name=other"])
    assert done.codes == [2]
    assert "lora.alpha = 8.0: but lora.weights" in done.said
    done = forker.run(project, 1, [*SHORT, *GPT2, "model.adapters=none", "run.name=other"])
    assert done.codes == [2]
    assert "no such folder" in done.said
    shutil.copytree(project / "gpt2, dora", project / "damaged")
    tensors = load_file(project / "damaged" / ADAPTER_WEIGHTS)
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, project / "damaged" / ADAPTER_WEIGHTS)
    done = forker.run(project, 1, [*SHORT, *GPT2, "model.adapters=damaged", "run.name=other"])
    assert done.codes == [2]
    assert f"with {project / 'damaged'}: holds numbers that are not finite" in done.said
    assert not (project / "runs" / "other").exists()
