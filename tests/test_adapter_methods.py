"""In: each way to adapt a matrix (rsLoRA and others). Out: logits and gradients of `peft` on the same weights, runs on
every layout like one process. Does not test plain adapters (test_lora does)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from peft import PeftModel
from runs import assert_same, losses, make_project
from test_interchange import a_folder, gpt2, llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.huggingface import kind_of
from codescent.huggingface.folder import open_folder
from codescent.huggingface.initial import InitialValues
from codescent.huggingface.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters
from codescent.huggingface.rounding import Rounding
from codescent.huggingface.write import Shard, write_weights
from codescent.inference.trained import Values, find
from codescent.models.initialize import initial_values
from codescent.models.lora.declare import Method, names, resolve
from codescent.operators.activations import EXACT_GELU, ActivatedThenLinear
from codescent.operators.dropout import drop
from codescent.operators.gate_up import GateUp
from codescent.operators.gated import GATED
from codescent.operators.linear import Linear
from codescent.operators.nf4 import packed, rounded
from codescent.plan.model import Lora

pytestmark = [  # what peft and transformers say of each other
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
METHODS = {"rslora": Method(rslora=True), "dora": Method(dora=True), "both": Method(rslora=True, dora=True)}
QUANTIZED = {"nf4": Method(quantize="nf4"), "nf4, dora": Method(quantize="nf4", dora=True)}
BASES = {"gpt2": gpt2, "llama": llama}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name, make in (BASES | {"wide llama": wide_llama}).items():
        a_folder(folder / name, make())
    return folder


def wide_llama() -> LlamaForCausalLM:
    """Its rows have whole blocks of NF4."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **sizes))


def pair(base: Path, folder: Path, method: Method) -> tuple[torch.nn.Module, Any, Adapters]:
    """Our model with adapters, and `peft`'s, which has read ours. No matrix of an adapter is zero."""
    read = open_folder(base)
    lora = resolve(models.parameters_of(read.kind.name, read.shape), 3, 7.0, None, None, method)
    module = ours(base, lora)
    adapters = Adapters(kind_of(read.kind.name, read.shape), read.shape, lora)
    values = dict(module.named_parameters())
    file = Shard(ADAPTER_WEIGHTS, tuple(adapters.parts), 0)
    folder.mkdir()
    write_weights(folder, [file], "F32", lambda name, box: values[name].detach()[box], set(), Rounding("fp32"))
    (folder / ADAPTER_CONFIG).write_text(adapters.settings("CAUSAL_LM", str(base)))
    bits = {}
    if lora.quantize:
        bits["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **bits)
    if lora.quantize:  # the same values, without the kernel for CPUs that multiplies in fewer bits
        theirs = theirs.dequantize()
    return module, PeftModel.from_pretrained(theirs, folder, is_trainable=True).eval(), adapters


def ours(base: Path, lora: Lora) -> torch.nn.Module:
    read = open_folder(base)
    facts = models.facts_of(read.kind.name, replace(read.shape, dropout=0.0), None, lora, 0, str(base))
    module, first = models.construct(facts, "cpu"), InitialValues(1, facts, "fp32")
    declared = {one.name: one for one in models.parameters_of(read.kind.name, read.shape, lora)}
    with torch.no_grad():
        for number, (name, tensor) in enumerate(module.named_parameters()):
            tensor.copy_(first.box(declared[name], tuple(slice(0, size) for size in tensor.shape)))
            if declared[name].trained:
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                tensor.add_(noise * 0.3)
    for name, tensor in list(module.named_parameters()):
        if declared[name].quantized:
            layer: Any = module.get_submodule(name.rpartition(".")[0])
            every = tuple(slice(0, size) for size in tensor.shape)
            values, layer.packed = packed(tensor.detach(), declared[name].alternating, every, torch.float32)
            layer.weight = torch.nn.Parameter(values, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("base", "method"),
    [*product(BASES, METHODS), *(("wide llama", name) for name in QUANTIZED)],
)
def test_logits_and_gradients_are_those_of_peft(bases: Path, tmp_path: Path, base: str, method: str) -> None:
    """Fault: another factor, norm or derivative than `peft` has; a row of q, k or v in another place."""
    mine, theirs, adapters = pair(bases / base, tmp_path / "adapters", (METHODS | QUANTIZED)[method])
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(1))
    logits = theirs(tokens).logits
    with torch.no_grad():
        assert float((mine(tokens) - logits).abs().max()) < 1e-5
    targets = tokens.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    mine(tokens, targets, loss_scale=1 / targets.numel()).backward()
    found = {
        name.replace(".default", "").replace("vector.weight", "vector"): one.grad
        for name, one in theirs.named_parameters()
        if one.requires_grad
    }
    assert found.keys() == {part.tensor for part in adapters.parts}
    gradients = {name: torch.zeros_like(one) for name, one in mine.named_parameters() if one.requires_grad}
    for part in adapters.parts:  # q, k and v share our A: its gradient is the sum of theirs
        ours_of = [torch.from_numpy(part.of_ours(dim)) for dim in range(len(part.parameter.shape))]
        absent = [dim for dim in range(len(ours_of)) if dim not in part.ours_of]  # one of two halves
        order = [*absent, *part.ours_of]
        theirs_of = found[part.tensor][(None,) * len(absent)].permute([order.index(dim) for dim in range(len(order))])
        gradients[part.parameter.name][torch.meshgrid(*ours_of, indexing="ij")] += theirs_of
    for name, one in mine.named_parameters():
        if one.requires_grad:
            largest = float(gradients[name].abs().max())
            assert float((one.grad - gradients[name]).abs().max()) < 1e-5 * largest, name


LAYERS = {
    "linear": lambda: Linear(6, 4, True),
    "activated": lambda: ActivatedThenLinear(6, 4, True, EXACT_GELU),
    "gated": lambda: ActivatedThenLinear(6, 4, False, GATED["silu"]),
    "gate and up": lambda: GateUp(6, 4),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_is_of_what_the_adapter_reads(kind: str, recompute: bool) -> None:
    """Fault: the frozen product loses inputs, too; backward with another mask; a gradient without the mask."""
    torch.manual_seed(3)
    layer = LAYERS[kind]().double()
    layer.recompute = recompute
    layer.scale, layer.adapter_dropout = 0.7, 0.4
    layer.lora_a = torch.nn.Parameter(torch.randn(2, 6).double())
    layer.lora_b = torch.nn.Parameter(torch.randn(*layer.weight.shape[:-1], 2).double())
    layer.adapter_keys_B, layer.adapter_rows_T = torch.tensor([5, 9]), torch.tensor([4, 0, 7])
    for one in (layer.weight, layer.bias):
        if one is not None:
            torch.nn.init.normal_(one).requires_grad_(False)
    h = torch.randn(*((2,) if kind == "gated" else ()), 2, 3, 6).double().requires_grad_()
    value = layer.activation.plain(h) if isinstance(layer, ActivatedThenLinear) else h
    read = drop(value, layer.adapter_keys_B, 0.4, layer.adapter_rows_T)
    outputs, delta = layer.weight.flatten(0, -2), layer.lora_b.flatten(0, -2) @ layer.lora_a
    wanted = value @ outputs.t() + 0.7 * read @ delta.t()
    if layer.bias is not None:
        wanted = wanted + layer.bias
    if kind == "gate and up":
        wanted = wanted.view(2, 3, 4, 2).permute(3, 0, 1, 2)
    weights = torch.randn_like(wanted)
    leaves = [h, layer.lora_a, layer.lora_b]
    expected = torch.autograd.grad((wanted * weights).sum(), leaves)
    found = layer(h.clone())
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(read, value)
    layer.eval()
    assert layer.adapter.drops is None


WORDS = (
    "lora.rank=3",
    "lora.whole=norm_1",
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.vocab_size=97",
    "model.num_layers=4",
    "data.tokenizer=char",
    "train.global_batch_size=12",
    "train.microbatch_size=3",
    "train.eval_every=3",
    "train.check_every=1",
    "train.num_steps=4",
    "optimizer.max_grad_norm=0.05",
    "train.precision=fp64",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp=2 recompute=full": (2, ()),
    "tp=2": (2, ()),
    "tp=2 sequence_parallel=false recompute=selective": (2, ()),
    "cp=2 recompute=full": (2, ()),
    "dp_replicate=2": (2, ()),
    "dp_shard=3": (3, ("train.microbatch_size=2",)),
    "dp_shard=3 zero_stage=2": (3, ("train.microbatch_size=2",)),
    "pp=2 tp=2 schedule=interleaved virtual_stages=2": (4, ("train.microbatch_size=6",)),
    "pp=2 schedule=zero-bubble": (2, ()),
    "dp_shard=2 cp=2 tp=2 recompute=full": (8, ()),
}
OF_METHOD: dict[str, tuple[str, ...]] = {
    "dropout": ("lora.dropout=0.3",),
    "dora": ("lora.dora=true", "lora.rslora=true"),
    "nf4": ("lora.quantize=nf4", "lora.dora=true", "model.hidden_dim=128", "model.ffn_dim=256"),
}
KIND_WORDS = {
    "llama": ("model.kind=llama", "model.num_kv_heads=2", "model.tie_head=true", "model.hidden_dim=24"),
    "transformer": (
        "model.kind=transformer",
        "model.num_layers=auto",
        "model.num_encoder_layers=1",
        "model.num_decoder_layers=2",
        "model.seq_len=auto",
        "model.source_len=8",
        "model.target_len=8",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("methods")
    make_project(project)
    return Runs(project, forker, WORDS, ("train.microbatch_size=12",))


@pytest.mark.slow
@pytest.mark.parametrize("method", OF_METHOD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(runs: Runs, layout: str, method: str) -> None:
    """Fault: a mask that depends on the rank or the micro-batch; a norm of a part of a row."""
    ranks, words = LAYOUTS[layout]
    found = runs.run(ranks, *(f"parallel.{key}" for key in layout.split()), *words, *OF_METHOD[method])
    assert_same(found, runs.of_one(*OF_METHOD[method]), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", OF_METHOD)
@pytest.mark.parametrize("kind", KIND_WORDS)
def test_kinds_on_a_layout(runs: Runs, kind: str, method: str) -> None:
    """Fault: positions of two streams counted as one; halves of a gate taken for one row."""
    words = (*KIND_WORDS[kind], *OF_METHOD[method])
    assert_same(runs.run(2, "parallel.tp=2", *words), runs.of_one(*words), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compiled_blocks(runs: Runs, kind: str) -> None:
    """Fault: keys that the compiler takes for constants, so that each step drops the same inputs."""
    words = (*OF_METHOD["dora"], *OF_METHOD["dropout"], "train.microbatch_size=6", "model.num_layers=2")
    words += KIND_WORDS.get(kind, ())
    found = runs.run(1, *words, "train.compile=blocks")
    assert losses(found) == pytest.approx(losses(runs.of_one(*words)), rel=1e-9)


@pytest.mark.slow
def test_quantized_matrices_are_merged_as_they_were_trained(runs: Runs) -> None:
    """Fault: an export of the wide weights, to which the adapters do not belong."""
    words = ("lora.quantize=nf4", "lora.alpha=9", "model.hidden_dim=128", "model.ffn_dim=256", "train.precision=fp32")
    found = runs.run(2, "parallel.tp=2", *words, "optimizer.learning_rate=1e-2")
    trained = find(found.path)
    values, rows = Values(trained), slice(10, 100)
    for matrix in trained.declared:
        if matrix.name in ("blocks.0.attn.qkv.weight", "blocks.3.mlp.down.weight"):
            every = tuple(slice(0, size) for size in matrix.shape)
            a_name, b_name = names(matrix.name)
            a_RI = values.trained(a_name, (slice(0, 3), every[1]))
            b_OR = values.trained(b_name, (every[0], slice(0, 3)))
            wanted = rounded(initial_values(trained.config.run.seed, matrix), matrix.alternating) + 3.0 * b_OR @ a_RI
            torch.testing.assert_close(values.box(matrix.name, every), wanted)
            torch.testing.assert_close(values.box(matrix.name, (rows, every[1])), wanted[rows])
            assert float((wanted - initial_values(trained.config.run.seed, matrix)).abs().max()) > 1e-3


def test_sizes_and_layouts_that_nf4_cannot_have() -> None:
    """Fault: blocks that another layout would cut elsewhere, so that its losses are others."""
    model = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "ffn_dim": 320, "seq_len": 16, "vocab_size": 31}
    lora = {"rank": 2, "quantize": "nf4"}
    with pytest.raises(UserError, match=r"2 parts of the inputs of mlp\.down \(320\) would cut some of them"):
        build(Config.model_validate({"model": model, "lora": lora, "parallel": {"tp": 2}}), 31, 2)
    experts = {"kind": "llama", "num_experts": 2, "experts_per_token": 1, "shared_dim": 192}
    with pytest.raises(UserError, match=r"parts of the inputs of mlp\.shared\.down \(192\) would cut"):
        build(Config.model_validate({"model": model | experts, "lora": lora, "parallel": {"tp": 2}}), 31, 2)
    with pytest.raises(UserError, match=r"attn\.qkv has 48 inputs, and 64 of a row have one scale"):
        build(Config.model_validate({"model": model | {"hidden_dim": 48}, "lora": lora}), 31, 1)
    with pytest.raises(ValueError, match="quantized matrices stay on the device"):
        Config.model_validate({"model": model, "lora": lora, "parallel": {"offload": "all"}})


def test_the_plan_counts_bytes_of_nf4() -> None:
    """Fault: 2 bytes for each element of a frozen matrix that has half a byte."""
    model = {"num_layers": 1, "num_heads": 2, "hidden_dim": 128, "ffn_dim": 256, "seq_len": 16, "vocab_size": 31}
    given = {"model": model, "lora": {"rank": 2, "quantize": "nf4"}, "train": {"precision": "bf16"}}
    plan = build(Config.model_validate(given), 31, 1)
    held = {one.parameter.name: one.weights_bytes(plan.mesh) for one in plan.tensors}
    elements = 128 * 256
    assert held["blocks.0.mlp.up.weight"] == elements // 2 + elements // 64 + 8 * 256 + 4 * 2
    assert held["blocks.0.norm_1.weight"] == 2 * 128


def test_the_factor_of_rslora() -> None:
    """Fault: alpha / rank where alpha / sqrt(rank) was asked for."""
    assert Lora(16, 8.0, (), (), rslora=True).scale == 2.0
    assert Lora(16, 8.0, (), ()).scale == 0.5


def test_the_folder_of_peft_names_the_method(bases: Path, tmp_path: Path) -> None:
    """Fault: an export that `peft` reads as another method."""
    pair(bases / "gpt2", tmp_path / "adapters", METHODS["rslora"])
    assert json.loads((tmp_path / "adapters" / ADAPTER_CONFIG).read_text())["use_rslora"] is True
