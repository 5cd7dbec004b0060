"""In: models with multi-head latent attention. Out: its formulas, a cache of latents, losses of one process on layouts,
and what is refused.
Does not compare with transformers (test_families does). What is declared: test_declared, test_activations."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from runs import assert_same, losses, make_project
from torch import Tensor

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.inference.reader import page_bytes
from codescent.models.initialize import initialize_
from codescent.operators.cache import KeysValues, RowPart, RowsPass, TextPages
from codescent.operators.latents import LATENT_EPS, LatentSizes, joined, normed
from codescent.record import RunFolder
from codescent.verbs.plan_rows import plan_rows

# Shapes: B samples, T positions, H heads, K channels of a query, P of them turn, V of a value, L and Q of latents.

SHAPE: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "vocab_size": 61, "seq_len": 48}
SHAPE |= {"head_dim": 12, "rotary_dim": 4, "kv_latent_dim": 10, "q_latent_dim": 14}
SIZES = (
    "model.kind=llama",
    "model.num_layers=2",
    "model.hidden_dim=20",
    "model.ffn_dim=46",
    "model.num_heads=2",
    "model.head_dim=10",
    "model.rotary_dim=4",
    "model.kv_latent_dim=12",
    "train.precision=fp64",
    "train.num_steps=4",
    "optimizer.decay_steps=4",
    "train.global_batch_size=8",
    "train.check_every=1",
    "checkpoint.every=2",
)
QUERIES = "model.q_latent_dim=14"
EXPERTS = (
    QUERIES,
    "model.num_experts=4",
    "model.experts_per_token=2",
    "model.expert_dim=18",
    "model.dense_layers=1",
    "model.route_scores=sigmoid",
    "model.route_bias=true",
    "model.shared_dim=22",
    "train.balance_rate=0.02",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp 2": (2, (QUERIES,)),
    "tp 2": (2, (QUERIES, "parallel.tp=2")),
    "tp 2, keys": (2, ("parallel.tp=2", "model.value_dim=10")),
    "tp 2 without sequence": (2, (QUERIES, "parallel.tp=2", "parallel.sequence_parallel=false")),
    "tp 2, keys, without sequence": (
        2,
        ("parallel.tp=2", "parallel.sequence_parallel=false", "parallel.recompute=full"),
    ),
    "dp_shard 2": (2, (QUERIES, "parallel.dp_shard=2", "parallel.recompute=full")),
    "dp_shard 2, stage 1": (2, (QUERIES, "parallel.dp_shard=2", "parallel.zero_stage=1", "train.microbatch_size=2")),
    "dp_shard 2, stage 2": (2, ("parallel.dp_shard=2", "parallel.zero_stage=2", "train.microbatch_size=2")),
    "pp 2, zero-bubble": (
        2,
        (QUERIES, "parallel.pp=2", "train.microbatch_size=2", "parallel.schedule=zero-bubble"),
    ),
    "pp 2 x tp 2": (4, (QUERIES, "parallel.pp=2", "parallel.tp=2", "train.microbatch_size=2")),
    "cp 2": (2, (QUERIES, "parallel.cp=2")),
    "cp 2 x tp 2, all-gather": (4, ("parallel.cp=2", "parallel.tp=2", "parallel.context=all-gather")),
    "experts, ep 2 x tp 2": (4, (*EXPERTS, "parallel.ep=2", "parallel.tp=2")),
    "experts, ep 2 x dp_shard 2": (4, (*EXPERTS, "parallel.ep=2", "parallel.dp_shard=2", "parallel.recompute=full")),
    "experts, pp 2": (2, (*EXPERTS, "parallel.pp=2", "train.microbatch_size=2")),
    "adapters, tp 2": (2, (QUERIES, "parallel.tp=2", "lora.rank=3", "lora.dora=true", "lora.dropout=0.1")),
    "adapters, tp 2 without sequence": (
        2,
        (QUERIES, "parallel.tp=2", "parallel.sequence_parallel=false", "lora.rank=3", "lora.dropout=0.1"),
    ),
}
QUICK = ("tp 2",)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("latents")).parent


def one_process(project: Path, forker: Forker, changes: Sequence[str]) -> RunFolder:
    """The run of one rank with these changes of the model, made once."""
    kept = tuple(word for word in changes if not word.startswith(("parallel.", "train.microbatch_size")))
    name = f"one {zlib.crc32(' '.join(kept).encode())}"
    path = project / "runs" / name
    return RunFolder.open(path) if path.exists() else forker.train(project, name, 1, *SIZES, *kept)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAYOUTS])
def test_losses_are_those_of_one_process(name: str, project: Path, forker: Forker) -> None:
    """Fault: the gradient of a latent or of the shared key is that of this rank's heads; or it is summed twice."""
    ranks, changes = LAYOUTS[name]
    expected = one_process(project, forker, changes)
    found = forker.train(project, name, ranks, *SIZES, *changes)
    assert_same(found, expected, 1e-9)


@pytest.mark.slow
def test_a_checkpoint_continues_in_another_layout(project: Path, forker: Forker) -> None:
    """Fault: rows of heads are saved or read as those of others."""
    expected = one_process(project, forker, EXPERTS)
    forker.train(project, "moves", 4, *SIZES, *LAYOUTS["experts, ep 2 x tp 2"][1], "train.num_steps=2")
    words = (*SIZES, *LAYOUTS["experts, pp 2"][1])
    found = forker.train(project, "moves", 2, *words, resume=True)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9)


def test_latents_and_heads_have_the_gradients_of_the_formulas() -> None:
    """Fault: a part of a gradient is lost in our own backward passes, or the shared key has that of one head."""
    sizes, made = LatentSizes(3, 6, 2, 5, 4, 7), torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64, requires_grad=True)

    latents, scales = some(2, 3, sizes.down_rows), (some(7), some(4))
    angles = torch.randn(3, 1, generator=made, dtype=torch.float64)
    turns = torch.stack([angles.cos(), angles.sin()], -1)
    assert torch.autograd.gradcheck(normed, (latents, *scales))
    assert torch.autograd.gradcheck(lambda x, scale: normed(x, None, scale)[1], (latents, scales[1]))
    heads = some(2, 3, 18), some(2, 3, 3 * sizes.up_rows), some(2, 3, 2)
    assert torch.autograd.gradcheck(lambda q, kv, shared: joined(q, kv, shared, turns, sizes), heads)
    with torch.no_grad():
        x = latents[..., 7:11]
        expected = x / (x.square().mean(-1, keepdim=True) + LATENT_EPS).sqrt() * scales[1]
        torch.testing.assert_close(normed(latents, *scales)[1][..., :4], expected)
        q, k, v = joined(*heads, turns, sizes).unbind(3)
        pair = torch.view_as_complex(heads[0].view(2, 3, 3, 6)[..., :2].contiguous())
        turned = torch.view_as_real(pair * torch.complex(angles.cos(), angles.sin()))
        torch.testing.assert_close(q[..., :2], turned.view(2, 3, 3, 2))
        assert torch.equal(k[:, :, 0, :2], k[:, :, 2, :2])
        assert not v[..., 5:].any()


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cache_of_latents_has_the_logits_of_whole_texts(lora: bool) -> None:
    """Fault: the products that are moved from keys to queries are those of other rows, or leave an adapter out."""
    shape = models.shape_of("llama", SHAPE)
    adapters = models.Lora(3, 6.0, ("attn.down", "attn.q_up", "attn.kv_up", "attn.out"), (), dora=True)
    facts = models.facts_of("llama", shape, lora=adapters if lora else None)
    module = models.construct(facts, "cpu").double().eval()
    initialize_(module, 3, models.parameters_of("llama", shape, facts.lora))
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=made, dtype=torch.float64) * 0.3)
    token = module.get_submodule("blocks.0.attn").cached
    assert token.numbers == 10 + 4  # a latent and a shared key, not 4 x (12 + 8)
    assert page_bytes(module, 16) == 2 * 16 * 14 * 8  # type: ignore[arg-type]
    memory = KeysValues(2, 8, 4, token, torch.device("cpu"), torch.float64)
    text = [(7 * n) % 61 for n in range(19)]
    pages = TextPages(4, [3, 4, 6, 0, 1])
    with torch.inference_mode():
        whole = module(torch.tensor([text]))
        for length, new in ((11, 11), (12, 1), (19, 7)):  # the beginning, one token, several behind others
            given = torch.tensor([text[length - new : length]])
            found = module(given, cache=RowsPass(memory, [RowPart(new, length, pages)], [True]))
            torch.testing.assert_close(found[0], whole[0, length - 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, r"num_kv_heads = 2: with model\.kv_latent_dim each of the 4 heads has its own keys"),
        ({"rotary_dim": None}, r"rotary_dim: not given; with model\.kv_latent_dim a part of the 12 channels"),
        ({"value_dim": 13}, r"value_dim = 13: a value has at most the channels of a key, 12"),
        ({"qk_norm": "head"}, r"model\.qk_norm: not with model\.kv_latent_dim"),
        ({"mup_base_dim": 16}, r"model\.mup_base_dim: not with model\.kv_latent_dim"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    """Fault: a traceback when the module is built, or another model in silence."""
    config = {"model": {"kind": "llama", **SHAPE, **changes}, "train": {"global_batch_size": 4}}
    with pytest.raises(UserError, match=message):
        build(Config.model_validate(config), 61, 1)


def test_the_plan_says_what_a_cache_holds() -> None:
    """Fault: a user plans memory for keys and values, 71 times as much as the latents of DeepSeek-V3."""
    config = {"model": {"kind": "llama", **SHAPE}, "train": {"global_batch_size": 4}}
    rows = dict(plan_rows(build(Config.model_validate(config), 61, 1), ""))
    assert rows["cache"] == [
        "14 numbers of a token and layer; keys and values: 80",
        "112 bytes of a token in all layers, in fp32",
    ]


def test_products_around_latents_are_not_kept() -> None:
    """Fault: backward reads products of other matrices than those that forward has kept."""
    config = {"model": {"kind": "llama", **SHAPE}, "train": {"global_batch_size": 4}}
    with pytest.raises(UserError, match=r'parallel\.recompute = "products".*latents'):
        build(Config.model_validate(config | {"parallel": {"recompute": "products"}}), 61, 1)
