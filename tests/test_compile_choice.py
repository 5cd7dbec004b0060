"""In: train.compile and train.head_chunk_tokens = "auto", train.cuda_graphs. Out: what a run chooses, records and says.
Does not compile a block (test_compiled_graphs does)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from forker import Forker
from pydantic import ValidationError

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config import decided
from codescent.config.sections import Config
from codescent.cost.memory import head_bytes
from codescent.operators import compiled
from codescent.plan import Plan
from codescent.train import assemble, choices, compiling
from codescent.train.world import World

GPT2 = {"model": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 8}}
TWO = {"model": {"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 2}}
TWO["model"] |= {"hidden_dim": 16, "ffn_dim": 32, "source_len": 4, "target_len": 4}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    compiling.broken.cache_clear()
    yield
    compiled.use(False)


def world(device: str, others: bool = True) -> World:
    return cast(World, SimpleNamespace(device=torch.device(device), all_agree=lambda mine: mine and others))


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    *,
    device: str = "cuda",
    broken: str = "",
    ranks: int = 1,
    others: bool = True,
) -> dict[str, Any]:
    monkeypatch.setattr(compiling, "broken", lambda _: broken)
    config = Config.model_validate(values)
    return compiling.chosen(config.train, build(config, 50, ranks), world(device, others))


def plan_of(values: dict[str, Any]) -> Plan:
    return build(Config.model_validate(values), 50, 1)


def test_a_key_without_effect_on_compiled_blocks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(GPT2 | {"parallel": {"recompute": "selective"}})
    first, second = compiling.said(chosen(monkeypatch, GPT2), plan)
    assert first == "train.compile: blocks; the first steps take longer"
    assert second.startswith("parallel.recompute: selective does nothing in compiled blocks")
    assert compiling.said(chosen(monkeypatch, GPT2 | {"train": {"compile": "none"}}), plan) == []


def test_blocks_are_compiled_on_cuda_and_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, GPT2)
    assert (found["choice"], found["functions_why"], compiled.fuses(torch.device("meta"))) == ("blocks", "", True)
    assert compiling.said(found, plan_of(GPT2)) == ["train.compile: blocks; the first steps take longer"]
    found = chosen(monkeypatch, GPT2, device="cpu")
    assert (found["choice"], compiled.fuses(torch.device("meta"))) == ("none", False)
    assert compiling.said(found, plan_of(GPT2)) == []


@pytest.mark.parametrize(
    ("values", "options", "alone", "why"),
    [
        (GPT2 | {"train": {"deterministic": True}}, {}, False, "train.deterministic"),
        (GPT2, {"broken": "torch's compiler does not work here: no Triton"}, False, "no Triton"),
        (GPT2, {"others": False}, False, "another rank"),
        (TWO, {}, True, 'model.kind = "transformer"'),
        (GPT2 | {"parallel": {"pp": 2, "schedule": "zero-bubble"}}, {"ranks": 2}, True, "zero-bubble"),
        (GPT2 | {"parallel": {"data_parallel": 2}}, {}, False, "data_parallel"),
    ],
)
def test_where_blocks_would_be_refused_or_fail_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], options: dict[str, Any], alone: bool, why: str
) -> None:
    found = chosen(monkeypatch, values, **options)
    assert (found["choice"], not found["functions_why"]) == ("none", alone)
    assert why in found["why"]
    assert compiling.said(found, plan_of(GPT2)) == [f"train.compile: none, because {found['why']}"]
    said = compiling.levers(found, plan_of(GPT2), torch.device("meta"))["functions"]
    assert said == ("compiled" if alone else f"not compiled: {found['functions_why']}")


def test_a_given_value_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, alone in (("none", False), ("blocks", True), ("model", True)):
        found = chosen(monkeypatch, GPT2 | {"train": {"compile": value}})
        assert (found["choice"], not found["functions_why"], compiling.said(found, plan_of(GPT2))) == (value, alone, [])
    assert chosen(monkeypatch, GPT2 | {"train": {"compile": "blocks"}}, device="cpu")["choice"] == "blocks"


def test_the_trial_finds_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    assert compiling.broken("cpu", "aot_eager") == ""
    compiling.broken.cache_clear()
    torch.compiler.reset()

    def fails(*_: object) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    assert "Failed to find C compiler" in compiling.broken("cpu", cast(Any, fails))
    torch.compiler.reset()


def test_a_resumed_run_says_that_it_compiles_otherwise() -> None:
    before, now = {"compile": {"choice": "none"}}, {"compile": {"choice": "blocks"}}
    said = "what torch.compile compiles: blocks, before none; from here on the losses differ by rounding"
    assert choices.changed(before, now) == [said]
    assert choices.changed({}, now) == choices.changed(now, now) == []  # a folder of an earlier version has no choice


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 1024),
        ({"device": "cpu"}, 1024),
        ({"device": "cuda"}, 8192),
        ({"device": "cuda", "head_chunk_tokens": 100}, 100),
        ({"head_chunk_tokens": 0, "device": "cuda"}, 0),
        ({"head_chunk_tokens": "auto"}, 1024),
    ],
)
def test_the_device_decides_the_tokens_of_the_head(keys: dict[str, Any], expected: int) -> None:
    config = Config.model_validate(GPT2 | {"train": keys})
    assert build(config, 50, 1).model.head_chunk_tokens == expected
    known = decided.with_device(config, "cuda")
    assert build(known, 50, 1).model.head_chunk_tokens == (
        8192 if keys.get("head_chunk_tokens", "auto") == "auto" else expected
    )


def test_a_run_records_what_it_chose(project: Path, forker: Forker) -> None:
    run = forker.train(project, "chosen", 1, "train.num_steps=1")
    levers = run.read_environment()["levers"]
    assert run.read_environment()["compile"]["choice"] == levers["compile"] == "none"
    assert (run.plan["model"]["head_chunk_tokens"], levers["head_chunk_tokens"]) == (1024, 1024)
    assert "compile" not in run.config_text  # auto: a resume on another device chooses for it
    assert "head_chunk_tokens" not in run.config_text


def test_the_memory_of_the_head_is_that_of_the_device() -> None:
    values = {"model": {"preset": "gpt2"}, "train": {"precision": "bf16", "global_batch_size": 12}}
    plan = build(Config.model_validate(values), 50257, 1)
    matrix = 50304 * 768
    assert head_bytes(plan, 1024, on_cpu=True) == 1024 * 50257 * 2 + 50257 * 768 * (4 + 2)
    assert head_bytes(plan, 8192, on_cpu=False) == 8192 * 50304 * 2 + matrix * 4 + matrix * 2
    assert head_bytes(plan, 0, on_cpu=False) == 12 * 1024 * 50304 * 2 + matrix * 2
    divided = build(Config.model_validate(values | {"parallel": {"tp": 2, "cp": 2}}), 50257, 4)
    assert head_bytes(divided, 8192, on_cpu=False) == 6 * 1024 * 25152 * 2 + 25152 * 768 * 2


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"train": {"device": "cpu"}}, "train.device is 'cpu': there are none on a CPU"),
        ({"train": {"compile": "model"}}, "train.compile is 'model'"),
        ({"parallel": {"dp_shard": 2}}, "parallel.dp_shard is 2: a block then has messages"),
        ({"parallel": {"pp": 2}}, "parallel.pp is 2"),
        ({"parallel": {"cp": 2}}, "parallel.cp is 2"),
        ({"parallel": {"tp": 2}}, "parallel.tp is 2"),
    ],
)
def test_cuda_graphs_are_refused_where_they_cannot_work(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=f"{re.escape(problem)}.*; set train.cuda_graphs to false"):
        Config.model_validate(GPT2 | keys | {"train": {**keys.get("train", {}), "cuda_graphs": True}})


def test_cuda_graphs_need_one_micro_batch_and_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    several = GPT2 | {"train": {"cuda_graphs": True, "global_batch_size": 4, "microbatch_size": 2}}
    with pytest.raises(UserError, match="2 micro-batches"):
        build(Config.model_validate(several), 50, 1)
    graphs = GPT2 | {"train": {"cuda_graphs": True}}
    assert chosen(monkeypatch, graphs)["choice"] == "blocks"
    with pytest.raises(UserError, match=r"because no Triton; set train.cuda_graphs = false"):
        chosen(monkeypatch, graphs, broken="no Triton")
    for compiles in ("auto", "blocks"):  # blocks are compiled on a CPU, too: the message must not deny it
        on_cpu = GPT2 | {"train": {"cuda_graphs": True, "compile": compiles}}
        with pytest.raises(UserError, match=r"needs CUDA, but the device is a CPU; set train.cuda_graphs = false"):
            chosen(monkeypatch, on_cpu, device="cpu")
    for device in ("cpu", "cuda"):  # the command says that the key has no effect, so it must not end the run
        uncompiled = GPT2 | {"train": {"cuda_graphs": True, "compile": "none"}}
        assert chosen(monkeypatch, uncompiled, device=device)["choice"] == "none"


def test_with_cuda_graphs_a_forward_pass_begins_a_replay_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: asked.append(options))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: asked.append("begin"))
    for graphs in (False, True):
        part = models.construct(build(Config.model_validate(GPT2), 50, 1).model)
        assemble._compile(part, "blocks", graphs=graphs)
        part(*(torch.zeros(1, 8, dtype=torch.int64, device="meta"),) * 2)
        assert asked == ([{"mode": "reduce-overhead"}] * 2 + ["begin"] if graphs else [{}] * 2)
        asked.clear()
