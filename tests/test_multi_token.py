"""In: models with modules that predict tokens behind the next one. Out: the loss of the paper's equations, on layouts.
Does not test what is declared (test_declared, test_activations and test_computed do)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forker import Forker
from pydantic import ValidationError
from runs import assert_same, make_project
from safetensors.torch import load_file, save_file
from test_huggingface import ours
from test_interchange import UNTRAINED, same, weights
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.huggingface.folder import open_folder, spare_tensors
from codescent.models.initialize import initialize_
from codescent.models.multi_token import tokens_ahead
from codescent.operators.documents import DocumentBounds
from codescent.plan.objective import Objective
from codescent.record import RunFolder
from codescent.verbs.export_run import export_run

# Shapes: B samples, T positions, D hidden_dim, V vocab_size.

SHAPE: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "ffn_dim": 40, "vocab_size": 61}
SHAPE |= {"head_dim": 12, "rotary_dim": 4, "kv_latent_dim": 10, "q_latent_dim": 14, "seq_len": 12, "mtp_layers": 2}
SIZES = (
    "model.kind=llama",
    "model.num_layers=2",
    "model.hidden_dim=20",
    "model.ffn_dim=46",
    "model.num_heads=2",
    "model.mtp_layers=2",
    "train.mtp_weight=0.7",
    "train.precision=fp64",
    "train.num_steps=4",
    "optimizer.decay_steps=4",
    "train.global_batch_size=8",
    "train.check_every=1",
    "checkpoint.every=2",
)
LATENTS = ("model.head_dim=10", "model.rotary_dim=4", "model.kv_latent_dim=12")
EXPERTS = (*LATENTS, "model.num_experts=4", "model.experts_per_token=2", "train.balance_loss=0.05")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp 2": (2, ()),
    "microbatches": (1, ("train.microbatch_size=2",)),
    "tp 2": (2, ("parallel.tp=2", *LATENTS)),
    "tp 2 without sequence": (2, ("parallel.tp=2", "parallel.sequence_parallel=false", "model.tie_head=true")),
    "dp_shard 2": (2, ("parallel.dp_shard=2", "parallel.recompute=full", *LATENTS)),
    "dp_shard 2, stage 1": (2, ("parallel.dp_shard=2", "parallel.zero_stage=1", "train.microbatch_size=2")),
    "dp_shard 2, stage 2": (2, ("parallel.dp_shard=2", "parallel.zero_stage=2", "model.tie_head=true")),
    "experts, tp 2 x dp_shard 2": (4, ("parallel.tp=2", "parallel.dp_shard=2", *EXPERTS)),
    "documents, tp 2": (2, ("parallel.tp=2", "data.documents=separate")),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("more")).parent


def one_process(project: Path, forker: Forker, changes: Sequence[str]) -> RunFolder:
    """The run of one rank with these changes of the model, made once."""
    kept = tuple(word for word in changes if not word.startswith(("parallel.", "train.microbatch_size")))
    name = f"one {zlib.crc32(' '.join(kept).encode())}"
    path = project / "runs" / name
    return RunFolder.open(path) if path.exists() else forker.train(project, name, 1, *SIZES, *kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_process(name: str, project: Path, forker: Forker) -> None:
    """Fault: a rank reads the tokens behind another position, or the loss of modules is counted once for each rank."""
    ranks, changes = LAYOUTS[name]
    expected = one_process(project, forker, changes)
    found = forker.train(project, name, ranks, *SIZES, *changes)
    assert_same(found, expected, 1e-9)
    for row, other in zip(found.read_metrics(), expected.read_metrics(), strict=True):
        assert row["mtp_loss"] == pytest.approx(other["mtp_loss"], rel=1e-9)


def built(**changes: Any) -> tuple[Any, Any]:
    shape = models.shape_of("llama", SHAPE | changes)
    module = models.construct(models.facts_of("llama", shape, head_chunk_tokens=5), "cpu").double()
    initialize_(module, 3, models.parameters_of("llama", shape))
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=made, dtype=torch.float64) * 0.2)
    return shape, module


def tokens(seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets of two samples."""
    found = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(seed))
    return found[:, :-1], found[:, 1:]


def by_equations(module: Any, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor, int]:
    """Main loss and loss of modules, both as sums; how many tokens the modules predict. Position by position.

    It reads the blocks of the model, and nothing else of it.
    """
    text_BT = torch.cat([inputs_BT, targets_BT[:, -1:]], 1)
    table, head = module.tok.weight, module.tok.weight if module.ties_head else module.head.weight
    turns = module.positions[0].turns.on(torch.device("cpu"), torch.float64)[:12]
    x_BTD = table[inputs_BT]
    for block in module.blocks.values():
        x_BTD = block(x_BTD, None, None, None, None, turns)
    h_BTD = normed(x_BTD, module.norm)
    main = F.cross_entropy((h_BTD @ head.t()).flatten(0, 1), targets_BT.flatten(), reduction="sum")
    more, count = main.new_zeros(()), 0
    for k, part in enumerate(module.mtp.values(), start=1):
        length = 13 - k - 1  # positions i that have a token i + k + 1
        joined = torch.cat(
            [normed(table[text_BT[:, k : k + length]], part.embed_norm), normed(h_BTD[:, :length], part.hidden_norm)],
            -1,
        )
        h_BTD = normed(part.block(joined @ part.join.weight.t(), None, None, None, None, turns[:length]), part.norm)
        logits_BTV = h_BTD @ head.t()
        more = more + F.cross_entropy(logits_BTV.flatten(0, 1), text_BT[:, k + 1 :].flatten(), reduction="sum")
        count += 2 * length
    return main, more, count


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


@pytest.mark.parametrize("changes", [{}, {"tie_head": True, "kv_latent_dim": 0, "q_latent_dim": 0}])
def test_loss_and_gradients_are_those_of_the_equations(changes: dict[str, Any]) -> None:
    """Fault: labels that are shifted by another number, a module that reads the wrong state, a weight of the sum of
    losses in place of their mean, gradients of the shared matrices that are lost."""
    shape, module = built(**{name: value for name, value in changes.items() if value})
    if changes:
        sizes = {name: value for name, value in SHAPE.items() if name not in ("kv_latent_dim", "q_latent_dim")}
        shape = models.shape_of("llama", sizes | {"tie_head": True, "rotary_dim": 12})
        module = models.construct(models.facts_of("llama", shape), "cpu").double()
        initialize_(module, 3, models.parameters_of("llama", shape))
    module.objective, module.head_chunk_tokens = Objective(mtp_weight=0.7), 5
    inputs, targets = tokens()
    main, more, count = by_equations(module, inputs, targets)
    expected = torch.autograd.grad((main + 0.7 / 2 * more) / 24, list(module.parameters()))
    module.train()
    loss = module(inputs, targets, loss_scale=1 / 24)
    loss.backward()
    torch.testing.assert_close(loss.detach(), main.detach())  # what is reported is the loss of next tokens
    total, counted = module.objective_sums[0]
    torch.testing.assert_close(total, more.detach())
    assert counted == count
    for (name, parameter), gradient in zip(module.named_parameters(), expected, strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12, msg=name)
    module.eval()
    module.objective_sums = None
    torch.testing.assert_close(module(inputs, targets).detach(), main.detach())
    assert module.objective_sums is None  # a validation reads no module


def test_no_module_predicts_tokens_of_another_document() -> None:
    """Fault: a label behind the end of a document, or of a sample."""
    inputs = torch.arange(10, 18)[None]
    targets = torch.arange(11, 19)[None].clone()
    targets[0, 2] = -1  # the last token of the first document
    bounds = DocumentBounds.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3]]), torch.tensor([[3, 8]]))
    first = tokens_ahead(inputs, targets, 1, bounds)
    assert first.read[0, :7].tolist() == list(range(11, 18))
    assert first.targets.tolist() == [[12, -1, -1, 15, 16, 17, 18, -1]]
    assert tokens_ahead(inputs, targets, 2, bounds).targets.tolist() == [[-1, -1, -1, 16, 17, 18, -1, -1]]
    assert tokens_ahead(inputs, targets, 2).targets.tolist() == [[-1, 14, 15, 16, 17, 18, -1, -1]]


@torch.no_grad()
def test_a_module_has_the_states_of_transformers() -> None:
    """Fault: the two inputs in another order, or a norm that is left out: published modules would predict noise."""
    _, module = built()
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=10,
        q_lora_rank=14, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        num_hidden_layers=1, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 0).double().eval()
    mine: Any = module.mtp["2"]
    rows = [*range(4, 12), *range(4)]  # channels that turn are the last ones there
    up = mine.block.attn.q_up.weight.view(4, 12, 14)[:, rows].flatten(0, 1)
    down = mine.block.attn.down.weight
    names = {
        "enorm": mine.embed_norm.weight, "hnorm": mine.hidden_norm.weight, "eh_proj": mine.join.weight,
        "post_norm": mine.norm.weight, "mtp_block.input_layernorm": mine.block.norm_1.weight,
        "mtp_block.post_attention_layernorm": mine.block.norm_2.weight, "mtp_block.self_attn.q_a_proj": down[:14],
        "mtp_block.self_attn.q_a_layernorm": mine.block.attn.q_norm.weight, "mtp_block.self_attn.q_b_proj": up,
        "mtp_block.self_attn.kv_a_proj_with_mqa": down[14:],
        "mtp_block.self_attn.kv_a_layernorm": mine.block.attn.kv_norm.weight,
        "mtp_block.self_attn.kv_b_proj": mine.block.attn.kv_up.weight,
        "mtp_block.self_attn.o_proj": mine.block.attn.out.weight,
        "mtp_block.mlp.gate_proj": mine.block.mlp.gate_up.weight[:, 0],
        "mtp_block.mlp.up_proj": mine.block.mlp.gate_up.weight[:, 1],
        "mtp_block.mlp.down_proj": mine.block.mlp.down.weight,
    }  # fmt: skip
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in names.items()})
    made = torch.Generator().manual_seed(2)
    state, embedded = (torch.randn(2, 9, 32, generator=made, dtype=torch.float64) for _ in range(2))
    places = torch.arange(9)[None]
    angles = DeepseekV3RotaryEmbedding(config)(state, places)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(embedded, state, angles, mask, places, None)
    turns = module.positions[0].turns.on(torch.device("cpu"), torch.float64)[:9]
    torch.testing.assert_close(mine(state, embedded, None, turns, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"parallel": {"pp": 2}}, r"modules that predict more tokens \(model\.mtp_layers\) read tokens"),
        ({"parallel": {"cp": 2}}, r"have attention whose messages are not declared"),
        ({"lora": {"rank": 2}}, r"model\.mtp_layers = 2: lora\.rank freezes the modules"),
        ({"model": {"window": 4}}, r"model\.window: not with model\.mtp_layers"),
        ({"model": {"mtp_layers": 12}}, r"model\.mtp_layers = 12: a sample of 12 tokens has no such token"),
        ({"model": {"kind": "gpt2"}}, r"gpt2 has no such size"),
    ],
)
def test_what_modules_cannot_have_is_refused(keys: dict[str, Any], message: str) -> None:
    """Fault: a traceback in the first step, or modules that are left out in silence."""
    model = {"kind": "llama", **SHAPE, **keys.get("model", {})}
    config = {"model": model, "train": {"global_batch_size": 4}, **{k: v for k, v in keys.items() if k != "model"}}
    with pytest.raises(UserError, match=message):
        build(Config.model_validate(config), 61, 2)


def test_the_weight_is_that_of_the_paper() -> None:
    """Fault: modules that nothing trains, whose gradients the ranks wait for."""
    config = {"model": {"kind": "llama", **SHAPE}, "train": {"global_batch_size": 4}}
    objective = build(Config.model_validate(config), 61, 1).objective
    assert (objective.mtp_weight, objective.measures) == (0.3, ("mtp_loss",))
    with pytest.raises(ValidationError, match=r"mtp_weight"):
        Config.model_validate({**config, "train": {"global_batch_size": 4, "mtp_weight": 0.0}})


FOLDER = (
    *EXPERTS,
    "model.q_latent_dim=14",
    "model.mtp_layers=1",
    "model.num_experts=8",
    "model.route_scores=sigmoid",
    "model.route_bias=true",
    "model.expert_dim=12",
    "model.shared_dim=24",
    "model.route_groups=4",
    "model.groups_per_token=2",
    "model.norm_eps=1e-6",
    "train.precision=fp32",
)


@pytest.mark.slow
def test_a_folder_has_the_modules_that_published_ones_have(project: Path, forker: Forker, tmp_path: Path) -> None:
    """Fault: modules under names that nobody reads, or left out in silence; a folder that cannot be read."""
    trained = forker.train(project, "exported", 1, *SIZES, *FOLDER, "train.mtp_weight=0.3")
    export_run(trained.path, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["model_type"], settings["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    path = tmp_path / "out" / "model.safetensors"
    stored = load_file(path)
    of_module = {name for name in stored if name.startswith("model.layers.2.")}
    assert {f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} < of_module
    shared = {"model.layers.2.embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored | shared | {"model.layers.2.shared_head.head.weight": stored["lm_head.weight"].clone()}, path)
    alone = open_folder(tmp_path / "out")  # as import and sample read it
    assert {name for name in alone.spare if "experts" not in name} >= {*shared, "model.layers.2.eh_proj.weight"}
    assert alone.shape.mtp_layers == 0
    assert spare_tensors(alone).endswith(f" and {len(of_module) + 2 - 12} more")
    theirs, text = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), torch.arange(16)[None]
    with torch.no_grad():
        assert float((theirs(text).logits - ours(tmp_path / "out")(text)).abs().max()) < 1e-5
    words = (*SIZES, *FOLDER, f"model.weights={tmp_path / 'out'}", *UNTRAINED)
    found = forker.train(project, "goes on", 2, *words, "parallel.tp=2", "checkpoint.every=1")
    assert same(weights(found.path), weights(trained.path))
    more = forker.train(project, "goes on with two", 1, *words, "model.mtp_layers=2", "checkpoint.every=1")
    (start,) = (event for event in more.read_events() if event["kind"] == "start")
    assert start["weights"]["drawn"]
    assert all(name.startswith("mtp.3.") for name in start["weights"]["drawn"])
