"""In: a small Llama of ours and transformers' with the same weights. Out: the same logits, losses and gradients.
Does not test speed, and needs no network: transformers builds its model from a config."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forker import Forker
from generating import continued
from runs import called, codescent, make_project
from torch import Tensor, nn
from torch.autograd import backward
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from codescent import models
from codescent.base.errors import UserError
from codescent.inference.request import Sampling
from codescent.inference.rows import context_start
from codescent.inference.sampling import Draw, choose
from codescent.models.initialize import initialize_
from codescent.models.llama.declare import PRESETS, LlamaShape, parameters
from codescent.models.llama.module import Llama
from codescent.operators import activations, linear
from codescent.operators.attention import causal_attention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.frequencies import frequencies
from codescent.operators.rotary import turn, turns
from codescent.operators.saved_attention import pairs_in_blocks
from codescent.plan.model import RopeScaling, pairs_seen
from codescent.plan.shard import Role
from codescent.verbs.sample import sample_run

# As Meta publishes them; num_parameters of the released checkpoints.
COUNTS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}
SIZES = {
    "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "hidden_dim": 48, "ffn_dim": 80,
    "vocab_size": 97, "seq_len": 300,
}  # fmt: skip
SCALING = RopeScaling(factor=4.0, original_seq_len=64)
LLAMA = """
[model]
kind = "llama"
num_layers = 3
num_heads = 4
num_kv_heads = 2
hidden_dim = 16
ffn_dim = 27
seq_len = 16
"""


def rates(shape: LlamaShape) -> Tensor:
    return frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)


def small(scaling: RopeScaling | None = None, **sizes: Any) -> LlamaShape:
    shape = models.shape_of("llama", SIZES | sizes)
    assert isinstance(shape, LlamaShape)
    return dataclasses.replace(shape, rope_scaling=scaling)


def build(shape: LlamaShape, dtype: torch.dtype, chunk: int = 1024) -> Llama:
    module = Llama(shape, chunk, "cpu").to(dtype)
    initialize_(module, 7, parameters(shape))
    with torch.no_grad():  # norms away from 1, where a mistake in them would not show
        for number, tensor in enumerate(module.parameters()):
            if tensor.ndim == 1:
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
    return module


def batch(shape: LlamaShape, samples: int, length: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, shape.vocab_size, (2, samples, length), generator=torch.Generator().manual_seed(0))
    return both[0], both[1]


def as_theirs(name: str, tensor: Tensor, shape: LlamaShape) -> dict[str, Tensor]:
    """A tensor of ours by transformers' names: rows of queries and keys pair channels c and c + head_dim / 2 there."""
    if name in ("tok.weight", "head.weight", "norm.weight"):
        return {{"tok": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}[name[:-7]] + ".weight": tensor}
    _, layer, leaf = name.removesuffix(".weight").split(".", 2)
    at = f"model.layers.{layer}"
    match leaf:
        case "attn.qkv":
            groups = tensor.view(shape.num_kv_heads, -1, shape.head_dim // 2, 2, shape.hidden_dim)
            halves = groups.transpose(2, 3).reshape(*groups.shape[:2], shape.head_dim, -1)
            q, k = halves[:, :-2].flatten(0, 2), halves[:, -2].flatten(0, 1)
            v = groups[:, -1].reshape(-1, shape.hidden_dim)
            return {f"{at}.self_attn.{kind}_proj.weight": rows for kind, rows in (("q", q), ("k", k), ("v", v))}
        case "mlp.gate_up":
            gate, up = tensor.unbind(1)
            return {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
    theirs = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
    theirs |= {"attn.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
    return {f"{at}.{theirs[leaf]}.weight": tensor}


def hf_twin(module: Llama, dtype: torch.dtype) -> nn.Module:
    """transformers' model with our weights. It computes norms and angles in fp32 even in fp64: there in fp64 here."""
    shape = module.shape
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_seq_len}
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.seq_len,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_head,
        rope_parameters=rope,
    )
    twin = LlamaForCausalLM(config)
    rotary = twin.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq.double(), reference_frequencies(shape), rtol=1e-6, atol=0)
    twin.to(dtype)
    rotary.inv_freq = reference_frequencies(shape).float()  # which have become bf16 ones
    mine = {
        key: value
        for name, tensor in module.named_parameters()
        for key, value in as_theirs(name, tensor, shape).items()
    }
    missing, unexpected = twin.load_state_dict({key: value.detach() for key, value in mine.items()}, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if shape.tie_head else set())
    assert not unexpected
    if dtype == torch.float64:
        rotary.forward = types.MethodType(exact_rotary, rotary)
        rotary.exact_frequencies = reference_frequencies(shape)
        for layer in twin.modules():
            if isinstance(layer, LlamaRMSNorm):
                layer.forward = types.MethodType(exact_norm, layer)
    return twin


def reference_frequencies(shape: LlamaShape) -> Tensor:
    """In the words of meta-llama/llama-models, models/llama3/model.py: apply_scaling."""
    found = []
    for pair in range(shape.head_dim // 2):
        frequency = shape.rope_theta ** (-2.0 * pair / shape.head_dim)
        if (scaling := shape.rope_scaling) is not None:
            wave = 2.0 * math.pi / frequency
            if wave > scaling.original_seq_len / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wave >= scaling.original_seq_len / scaling.high_freq_factor:
                smooth = (scaling.original_seq_len / wave - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        found.append(frequency)
    return torch.tensor(found, dtype=torch.float64)


def exact_rotary(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * self.exact_frequencies  # type: ignore[operator]
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def exact_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    scaled: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
    return scaled


def relative(mine: Tensor, theirs: Tensor) -> float:
    return ((mine - theirs).norm() / theirs.norm()).item()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("preset", PRESETS)
def test_module_on_meta_has_exactly_the_declared_parameters(preset: str) -> None:
    shape = models.shape_of("llama", {}, preset)
    declared = models.parameters_of("llama", shape)
    module = models.construct(models.facts_of("llama", shape))
    assert [(p.name, p.shape) for p in declared] == [(name, tuple(t.shape)) for name, t in module.named_parameters()]
    assert all(tensor.is_meta for tensor in module.parameters())
    assert not list(module.buffers())
    if preset in COUNTS:
        assert sum(tensor.numel() for tensor in module.parameters()) == COUNTS[preset]


def test_a_tied_model_has_one_vocabulary_matrix_that_both_ends_read() -> None:
    for tied, names in ((True, ["tok.weight"]), (False, ["tok.weight", "head.weight"])):
        shape = small(tie_head=tied)
        declared = [parameter for parameter in parameters(shape) if parameter.role is Role.VOCAB]
        assert [parameter.name for parameter in declared] == names
        assert sorted({depth for parameter in declared for depth in parameter.depths}) == [0, 3]
        built = [(name, tuple(tensor.shape)) for name, tensor in Llama(shape).named_parameters()]
        assert built == [(parameter.name, parameter.shape) for parameter in parameters(shape)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "stretched"])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("tied", "chunk"), [(True, 1024), (False, 100)])
def test_logits_and_gradients_are_those_of_transformers(
    dtype: torch.dtype, bound: float, scaling: RopeScaling | None, kv_heads: int, tied: bool, chunk: int
) -> None:
    shape = small(scaling, num_kv_heads=kv_heads, tie_head=tied)
    module = build(shape, dtype, chunk)
    twin = hf_twin(module, dtype)
    tokens, targets = batch(shape, 2, 290)
    hf_logits = twin(tokens).logits
    assert relative(module(tokens), hf_logits) < bound

    hf_loss = cross_entropy(hf_logits, targets)
    loss = module(tokens, targets)
    assert loss.dtype == dtype
    assert abs(loss.item() / hf_loss.item() - 1) < bound
    backward(hf_loss)
    backward(loss)
    seen = set()
    for name, tensor in module.named_parameters():
        assert tensor.grad is not None
        for theirs, gradient in as_theirs(name, tensor.grad, shape).items():
            expected = twin.get_parameter(theirs)
            assert expected.grad is not None
            assert relative(gradient, expected.grad) < bound, theirs
            seen.add(id(expected))
    assert seen == {id(tensor) for tensor in twin.parameters()}


def test_bf16_gradients_are_as_exact_as_those_of_transformers_in_bf16() -> None:
    shape = small()
    exact, rounded = build(shape, torch.float32), build(shape, torch.float32).to(torch.bfloat16)
    twin = hf_twin(rounded, torch.bfloat16)
    tokens, targets = batch(shape, 2, 200)
    wide, narrow = exact(tokens, targets), rounded(tokens, targets)
    assert narrow.dtype == torch.float32
    assert abs(narrow.item() / wide.item() - 1) < 1e-3
    for loss in (wide, narrow, cross_entropy(twin(tokens).logits.float(), targets)):
        backward(loss)
    ours, theirs = [], []
    for name, tensor in rounded.named_parameters():
        truth, mine = exact.get_parameter(name).grad, tensor.grad
        assert truth is not None
        assert mine is not None
        assert mine.dtype == torch.bfloat16
        ours.append(relative(mine.float(), truth))
        for peer, expected in as_theirs(name, truth, shape).items():
            gradient = twin.get_parameter(peer).grad
            assert gradient is not None
            theirs.append(relative(gradient.float(), expected))
    assert sum(ours) / len(ours) < 1.2 * sum(theirs) / len(theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_chained_are_the_whole(tied: bool) -> None:
    shape = small(tie_head=tied)
    whole = build(shape, torch.float64)
    tokens, targets = batch(shape, 2, 20)
    expected = whole(tokens, targets)
    backward(expected)
    parts = [Llama(shape, 1024, "cpu", depths).double() for depths in (range(2), range(2, 3), range(3, 4))]
    named = dict(whole.named_parameters())
    activations = tokens
    for part in parts:
        for name, tensor in part.named_parameters():
            tensor.data.copy_(named[name])
        activations = part(activations, targets) if part.ends else part(activations)
    torch.testing.assert_close(activations, expected)
    backward(activations)
    for name, tensor in named.items():
        found = [part.get_parameter(name).grad for part in parts if name in dict(part.named_parameters())]
        assert len(found) == (2 if tied and name == "tok.weight" else 1)
        torch.testing.assert_close(sum(gradient for gradient in found if gradient is not None), tensor.grad)


def test_a_part_of_the_positions_is_turned_by_its_own_angles() -> None:
    """The module reads the positions that it is told; more rows of angles than positions do no harm."""
    shape = small()
    module = build(shape, torch.float64)
    seen: list[Tensor] = []
    for block in module.blocks.values():
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[5]))
    tokens, _ = batch(shape, 1, 16)
    module.tokens_T = module.rows_T = torch.tensor([0, 1, 14, 15])
    assert module(tokens).shape[1] == 4
    torch.testing.assert_close(seen[0], turns(rates(shape), torch.tensor([0, 1, 14, 15]), torch.float64))
    later = Llama(shape, 1024, "cpu", range(1, 3)).double()
    later.load_state_dict({name: value for name, value in module.state_dict().items() if name.startswith("blocks")})
    x = torch.randn(1, 8, shape.hidden_dim, dtype=torch.float64)
    expected = later(x)
    later.rows_T = torch.arange(8)  # as if another rank had the rest: angles of all the model's positions
    torch.testing.assert_close(later(x), expected)


def test_angles_are_exact_far_out() -> None:
    shape = models.shape_of("llama", {}, "llama3.1-8b")
    assert isinstance(shape, LlamaShape)
    torch.testing.assert_close(rates(shape), reference_frequencies(shape), rtol=1e-12, atol=0)
    found = turns(rates(shape), torch.tensor([131_071]), torch.bfloat16)
    assert found.dtype == torch.float32
    angles = 131_071 * reference_frequencies(shape)
    torch.testing.assert_close(found[0, :, 0].double(), angles.cos(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turning_has_the_gradient_of_turning_back(dtype: torch.dtype) -> None:
    shape = small()
    x = torch.randn(2, 5, 2, 5, 8, dtype=torch.float64).to(dtype).requires_grad_()
    table = turns(rates(shape), torch.arange(5), dtype)
    y = turn(x, table)
    assert torch.equal(y[..., -1, :], x[..., -1, :])
    torch.testing.assert_close(y[:, 0], x[:, 0])
    upstream = torch.randn(2, 5, 2, 5, 8, dtype=torch.float64).to(dtype)
    (found,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(found, turn(upstream, table * torch.tensor([1.0, -1.0], dtype=table.dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["made again", "kept"])
@pytest.mark.parametrize(("length", "queries"), [(1, 3), (7, 2), (129, 2), (300, 3)])
def test_attention_of_groups(
    dtype: torch.dtype, small_bytes: int, length: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, length, 2, queries + 2, 16, dtype=torch.float64, generator=generator).requires_grad_()
    qkv = exact.detach().to(dtype).requires_grad_()
    q, k, v = exact.transpose(1, 2).split([queries, 1, 1], dim=3)  # [B, G, T, R, K]
    q = q.permute(0, 1, 3, 2, 4).flatten(1, 2)
    y = F.scaled_dot_product_attention(q, k.squeeze(3), v.squeeze(3), is_causal=True, enable_gqa=True)
    y = y.transpose(1, 2).flatten(2)
    upstream = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (expected,) = torch.autograd.grad(y, exact, upstream)
    mine = causal_attention(qkv)
    (found,) = torch.autograd.grad(mine, qkv, upstream.to(dtype))
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for one, other in ((mine, y), (found, expected)):
        assert one.dtype == dtype
        assert relative(one.double(), other) < bound


@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["made again", "kept"])
@pytest.mark.parametrize(("length", "window"), [(7, 1), (7, 3), (130, 129), (300, 100), (300, 128), (300, 290)])
def test_attention_in_a_window(length: int, window: int, small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a block of queries that sees a key too many or too few, a gradient that a later block overwrites."""
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, length, 2, 4, 40, dtype=torch.float64, generator=generator).requires_grad_()
    q, k, v = qkv.transpose(1, 2).split([2, 1, 1], dim=3)
    q = q.permute(0, 1, 3, 2, 4).flatten(1, 2)
    apart = torch.arange(length)[:, None] - torch.arange(length)
    mask = (apart >= 0) & (apart < window)
    y = F.scaled_dot_product_attention(q, k.squeeze(3), v.squeeze(3), attn_mask=mask, enable_gqa=True)
    y = y.transpose(1, 2).flatten(2)
    upstream = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (expected,) = torch.autograd.grad(y, qkv, upstream)
    mine = causal_attention(qkv, scores=ScoreTraits(window))
    (found,) = torch.autograd.grad(mine, qkv, upstream)
    assert relative(mine, y) < 1e-12
    assert relative(found, expected) < 1e-12
    (kept,) = torch.autograd.grad(torch.ops.codescent.block_attention(qkv, window)[0], qkv, upstream)
    assert relative(kept, expected) < 1e-12
    assert pairs_seen(length, window) == int(mask.sum())
    blocks = sum(len(rows) * int((rows.sum(0) > 0).sum()) for rows in mask.split(128))
    assert pairs_in_blocks(length, window) == blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["made again", "kept"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gated_feed_forward(
    dtype: torch.dtype, small_bytes: int, recompute: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(activations, "_PIECE", 1000)  # several pieces, the last one shorter
    shape = small(ffn_dim=81, activation=activation)
    module = build(shape, dtype).blocks["0"].mlp
    module.down.recompute = recompute
    x = torch.randn(2, 15, shape.hidden_dim, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    inputs = [x, *module.parameters()]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    gate, up = (F.linear(exact[0], matrix) for matrix in exact[1].unbind(1))
    gated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    y = F.linear(gated * up, exact[2])
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = torch.autograd.grad(y, exact, upstream.double())
    mine = module(x)
    deferred: linear.Deferred = []
    for found, other in zip([mine, *torch.autograd.grad(mine, inputs, upstream)], [y, *expected], strict=True):
        assert found.dtype == dtype
        assert (
            relative(found.double(), other) < {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        )
    module.gate_up.deferred = module.down.deferred = deferred
    (d_x,) = torch.autograd.grad(module(x), [x], upstream)  # of the weights nothing yet
    assert relative(d_x.double(), expected[0]) < 2e-2
    put_off = {id(weight): make() for weight, make in deferred}
    for weight, other in zip(inputs[1:], expected[1:], strict=True):
        assert relative(put_off[id(weight)].double(), other) < 2e-2


@torch.no_grad()
def without_cache(module: Llama, prompt: Sequence[int], count: int) -> list[int]:
    """The definition: read the whole context for every token."""
    tokens = list(prompt)
    for number in range(count):
        context = tokens[context_start(len(tokens), module.shape.seq_len) :]
        token = choose(module(torch.tensor([context]))[:, -1], [Draw(Sampling(1.3, seed=4), number)])[0].token
        assert token is not None
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_those_without_a_cache_also_past_the_context(tied: bool) -> None:
    module = build(small(SCALING, seq_len=16, tie_head=tied), torch.float64)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.mul_(15.0 if tensor.ndim > 1 else 1.0)
    for prompt in ([5, 3, 8], list(range(30, 52))):
        found = continued(module, [prompt, [1]], 40, temperature=1.3, seed=4)[0]
        assert found == without_cache(module, prompt, 40)
        assert len(set(found)) > 5


def problems(sizes: dict[str, int | None], preset: str | None = None, **options: float) -> str:
    with pytest.raises(UserError) as error:
        models.shape_of("llama", sizes, preset, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_what_is_refused() -> None:
    message = problems(
        {"num_layers": -2, "num_heads": 12, "hidden_dim": 770, "num_kv_heads": 5}, bias=True, dropout=0.1
    )
    for part in (
        "model.vocab_size, model.seq_len: not given",
        "model.num_layers: -2",
        "model.bias = true",
        "model.dropout = 0.1",
        "12 heads do not divide model.hidden_dim = 770; nearest that would do: model.num_heads = 5 or 35",
        "5 heads of keys and values cannot be shared equally by 12 heads",
    ):
        assert part in message, part
    assert "did you mean 'llama3-8b'" in problems({}, "llama3-8B")
    assert 'model.kind = "gpt2"' in problems({}, "gpt2-xl")
    assert "the number of channels must be even" in problems(
        {"num_heads": 16, "num_kv_heads": 8, "hidden_dim": 48}, "llama-tiny"
    )
    with pytest.raises(UserError, match="gpt2 has no such size"):
        models.shape_of("gpt2", {"num_kv_heads": 2}, "gpt2")


def test_sizes_that_nobody_gives() -> None:
    free = models.shape_of("llama", {"num_layers": 1, "num_heads": 4, "hidden_dim": 384, "vocab_size": 9, "seq_len": 8})
    assert isinstance(free, LlamaShape)
    assert (free.num_kv_heads, free.ffn_dim, free.rope_theta, free.tie_head) == (4, 1024, 10_000.0, False)
    changed = models.shape_of("llama", {"seq_len": 512, "tie_head": True, "rope_theta": 1e6}, "llama3.1-8b")
    assert isinstance(changed, LlamaShape)
    assert (changed.seq_len, changed.tie_head, changed.rope_theta, changed.head_dim) == (512, True, 1e6, 128)
    assert models.kind_of(None, "llama3-8b") == "llama"
    assert models.kind_of(None, None) == models.kind_of(None, "gpt2") == "gpt2"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    path = make_project(folder)
    _, _, rest = path.read_text().partition("[data]")
    path.write_text(f"{LLAMA}\n[data]{rest}")
    return folder


def test_a_run_learns_and_writes(project: Path, forker: Forker) -> None:
    run = forker.train(project, "one", 1, "model.tie_head=true")
    losses = [row["train_loss"] for row in run.read_metrics()]
    assert losses[-1] < losses[0] - 1
    assert len(sample_run(run.path, ["many "], tokens=30, device="cpu")[0]) > 5


def test_planning_needs_no_torch(project: Path) -> None:
    (project / "big.toml").write_text('[model]\npreset = "llama3-8b"\n[data]\ntokenizer = "byte"\n')
    done = called(project, "plan", "big.toml", "--ranks", "16", "parallel.tp=8", "parallel.dp_shard=2")
    assert done.returncode == 0, done.stderr
    assert "8,030,261,248" in done.stdout
    done = called(
        project, "plan", "big.toml", "--ranks", "16", "parallel.tp=8", "parallel.dp_shard=2", "model.window=512"
    )
    assert "12 x layers x channels x keys in the window x tokens" in done.stdout
    assert "not known on cuda" not in done.stdout
    done = called(project, "plan", "big.toml", "--ranks", "16", "parallel.tp=16", "train.global_batch_size=16")
    assert done.returncode == 2
    assert "8 key-value heads do not divide into 16 parts; nearest that would do: parallel.tp = 8" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tied", "layouts"),
    [
        ("false", "tp=2; tp=2,sequence_parallel=false; cp=2; pp=2; dp_shard=2"),
        ("true", "pp=2,tp=2; cp=2,context=all-gather; pp=2,schedule=zero-bubble; dp_shard=2,zero_stage=1"),
        ("true", "recompute=full; recompute=selective; dp_replicate=2; dp_shard=2,tp=2"),
    ],
)
def test_every_layout_walks_the_same_trajectory(project: Path, tied: str, layouts: str) -> None:
    words = (f"model.tie_head={tied}", "train.microbatch_size=2", "--layouts", layouts, "--steps", "4")
    done = codescent(project, "prove", "run.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("────")[2]  # below the lines of progress
    same = [line for line in table.splitlines() if line.split()[-1:] == ["same"]]
    assert len(same) == layouts.count(";") + 1, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "traits", [{}, {"qk_norm": "head", "window": 40}, {"qk_norm": "all", "norm": "output"}], ids=str
)
def test_compiled_blocks_follow_eager(traits: dict[str, Any]) -> None:
    torch.compiler.reset()
    shape = small(SCALING, **traits)
    eager, compiled = build(shape, torch.float32, 100), build(shape, torch.float32, 100)
    for block in compiled.blocks.values():
        block.compile()
    tokens, targets = batch(shape, 2, 150)
    losses = []
    for module in (eager, compiled):
        losses.append(module(tokens, targets, loss_scale=1 / 300))
        backward(losses[-1])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert relative(mine.grad, theirs.grad) < 1e-4, name
