"""In: configs and folders of `transformers`. Out: runs of the kind "transformers": layouts, resume, export, adapters.
Does not look at the model itself: test_any_model does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import config_of, folder_text
from forker import Forker
from questions import vocabulary
from runs import CONFIG, assert_same, losses, make_project, train
from safetensors.torch import load_file

from codescent.config.load import load
from codescent.models.transformers import library
from codescent.verbs.cli import run as cli

LAYOUTS = {
    "ddp": (2, ("parallel.dp_replicate=2",)),
    "zero 1": (2, ("parallel.dp_shard=2", "parallel.zero_stage=1", "train.microbatch_size=2")),
    "zero 2": (2, ("parallel.dp_shard=2", "parallel.zero_stage=2", "train.microbatch_size=2")),
    "zero 3": (2, ("parallel.dp_shard=2", "parallel.zero_stage=3", "train.microbatch_size=1")),
    "hsdp": (4, ("parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.recompute=full")),
    "micro-batches": (1, ("train.microbatch_size=2", "parallel.recompute=full")),
    "average": (2, ("parallel.dp_replicate=2", "parallel.average_every=1")),
}


def of_kind(config: str) -> str:
    """The config of `runs`, with another section [model]."""
    model = f'[model]\nkind = "transformers"\n{config}\n'
    return re.sub(r"\[model\].*?(?=\[data\])", model + "\n", CONFIG, flags=re.DOTALL).replace(
        'tokenizer = "byte"', 'tokenizer = "byte"\nseq_len = 16'
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any")
    make_project(folder)
    (folder / "config.json").write_text(folder_text("gpt_neox"))
    (folder / "run.toml").write_text(of_kind('config = "config.json"'))
    return folder


def words(name: str) -> tuple[str, ...]:
    """Words of a command line that train another model."""
    return (f"model.config={config_of(name)}", "train.num_steps=4", "train.eval_every=2", "train.precision=fp64")


def test_a_config_is_a_file(project: Path) -> None:
    """The run has its content, so the file may go."""
    run = train(project, "file", "train.num_steps=2", "train.eval_every=2")
    recorded = load(run.path / "config.toml").config.model.config
    assert recorded == config_of("gpt_neox")
    assert losses(run)[-1] < 6.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "opt", "gemma2"])
def test_losses_are_those_of_one_rank(name: str, project: Path, forker: Forker) -> None:
    """A tie or a unit that a strategy breaks, a gradient that is not summed, weights that differ between ranks."""
    sgd = ("optimizer.kind=sgd", "optimizer.max_grad_norm=0")
    whole = forker.train(project, f"{name}-one", 1, *words(name))
    plain = forker.train(project, f"{name}-sgd", 1, *words(name), *sgd)
    for layout, (ranks, keys) in LAYOUTS.items():
        more = sgd if layout == "average" else ()
        found = forker.train(project, f"{name}-{layout.replace(' ', '')}", ranks, *words(name), *keys, *more)
        if layout == "average":  # its norm is that of each rank alone
            assert losses(found) == pytest.approx(losses(plain), rel=1e-9)
        else:
            assert_same(found, whole, 1e-9 if name != "gemma2" else 1e-6)  # its norms compute in fp32, always


@pytest.mark.slow
def test_gossip_and_offload_of_nothing_they_do_not_know(project: Path, forker: Forker) -> None:
    """Replicas that mix weights with neighbours: each takes all steps, and the losses fall."""
    found = forker.train(
        project,
        "gossip",
        4,
        *words("gpt_neox"),
        "parallel.dp_replicate=4",
        "parallel.gossip=ring",
        "train.num_steps=12",
    )
    assert losses(found)[-1] < losses(found)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "zero 3"])
def test_a_resumed_run_goes_on_bitwise(layout: str, project: Path, forker: Forker) -> None:
    """Buffers or a tie that a checkpoint loses."""
    ranks, keys = LAYOUTS.get(layout, (1, ()))
    more = (*words("opt"), *keys, "checkpoint.every=2", "optimizer.decay_steps=4")
    whole = forker.train(project, f"whole-{ranks}", ranks, *more)
    forker.train(project, f"half-{ranks}", ranks, *more, "train.num_steps=2")
    found = forker.train(project, f"half-{ranks}", ranks, *more, resume=True)
    assert_same(found, whole, 0.0)


def pretrained(path: Path, name: str) -> Any:
    """A folder as save_pretrained makes it, and its model."""
    torch.manual_seed(1)
    net = library._transformers().AutoModelForCausalLM.from_config(library.config_of(config_of(name))).eval()
    for parameter in net.parameters():  # a number that is 0 would show the smallest update
        parameter.data += 0.01 * torch.randn(parameter.shape)
    net.save_pretrained(path)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "opt", "gemma2"])
def test_weights_are_read_and_exported_byte_by_byte(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, another order of dims, a tied tensor that is missing or twice; a config that no longer loads."""
    make_project(tmp_path)
    (tmp_path / "run.toml").write_text(of_kind('weights = "base"'))
    net = pretrained(tmp_path / "base", name)
    monkeypatch.chdir(tmp_path)
    still = ("optimizer.kind=sgd", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "optimizer.momentum=0")
    assert cli(["train", "run.toml", "run.name=still", "train.num_steps=1", "optimizer.warmup_steps=0", *still]) == 0
    assert cli(["export", "runs/still", "out"]) == 0
    before, after = (
        load_file(tmp_path / "base" / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[one], after[one]) for one in before)
    again = library._transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(3, 15)[None]
    assert torch.equal(again(input_ids=tokens).logits, net(input_ids=tokens).logits)
    assert cli(["evaluate", "runs/still"]) == 0


@pytest.mark.slow
def test_weights_of_another_config_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that changes what the same tensors compute."""
    make_project(tmp_path)
    pretrained(tmp_path / "base", "gpt_neox")
    (tmp_path / "other.json").write_text(folder_text("gpt_neox").replace("{", '{"rope_theta": 500.0, ', 1))
    (tmp_path / "run.toml").write_text(of_kind('weights = "base"\nconfig = "other.json"'))
    monkeypatch.chdir(tmp_path)
    assert cli(["train", "run.toml"]) == 2
    assert "but model.config has" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_are_those_of_peft(tmp_path: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters by the names of layers, on sharded ranks as on one; peft loads them, and merged they give the same."""
    peft = pytest.importorskip("peft")
    make_project(tmp_path)
    (tmp_path / "run.toml").write_text(of_kind('weights = "base"'))
    pretrained(tmp_path / "base", "opt")
    monkeypatch.chdir(tmp_path)
    more = (*words("opt"), "lora.rank=2", "lora.targets=self_attn.q_proj, self_attn.v_proj")
    one = forker.train(tmp_path, "one", 1, *more)
    for layout in ("ddp", "zero 3"):
        ranks, keys = LAYOUTS[layout]
        assert_same(forker.train(tmp_path, layout.replace(" ", ""), ranks, *more, *keys), one, 1e-9)
    assert cli(["export", "runs/one", "merged", "--dtype", "fp64"]) == 0
    assert cli(["export", "runs/one", "adapters", "--adapters", "--dtype", "fp64"]) == 0
    auto = library._transformers().AutoModelForCausalLM
    merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    base = auto.from_pretrained(tmp_path / "base", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    tokens = torch.arange(3, 15)[None]
    assert torch.allclose(merged(input_ids=tokens).logits, adapted(input_ids=tokens).logits, rtol=1e-9)
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert sorted(settings["target_modules"]) == ["self_attn.q_proj", "self_attn.v_proj"]


@pytest.mark.slow
def test_masked_tokens_of_a_roberta(project: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads the masked positions alone, on every layout."""
    vocabulary(project)
    more = (*words("roberta"), "data.task=mlm", "data.tokenizer=bert:vocab.txt")
    whole = forker.train(project, "masked", 1, *more)
    ranks, keys = LAYOUTS["zero 3"]
    assert_same(forker.train(project, "masked-zero", ranks, *more, *keys), whole, 1e-9)
    monkeypatch.chdir(project)
    assert cli(["evaluate", "runs/masked"]) == 0
