"""In: a small GPT-2 of ours and transformers' with the same weights. Out: the same logits, losses and gradients.
Does not test speed, and needs no network: transformers builds its model from a config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from transformers import GPT2Config, GPT2LMHeadModel

from codescent import models
from codescent.models.gpt2.declare import PRESETS, GPT2Shape, parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.operators import head
from codescent.plan.objective import Objective

COUNTS = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
# ours -> transformers'; its Conv1D holds [input, output], so matrices of blocks are transposed
HF_NAMES = {"norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj"}
HF_NAMES |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "tok": "wte", "pos": "wpe", "norm": "ln_f"}


def small(vocab_size: int = 97, seq_len: int = 300, *, bias: bool = True) -> GPT2Shape:
    sizes = {"num_layers": 2, "num_heads": 3, "hidden_dim": 48, "vocab_size": vocab_size, "seq_len": seq_len}
    return models.shape_of("gpt2", sizes, bias=bias)


def build(shape: GPT2Shape, dtype: torch.dtype, chunk: int = 1024) -> GPT2:
    module = GPT2(shape, chunk, "cpu").to(dtype)
    initialize_(module, 7, parameters(shape))
    with torch.no_grad():  # biases and norms away from 0 and 1, where a mistake in them would not show
        for number, tensor in enumerate(module.parameters()):
            if tensor.ndim == 1:
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
    return module


def batch(shape: GPT2Shape, samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, shape.vocab_size, (2, samples, length), generator=generator)
    return both[0], both[1]


def hf_name(name: str) -> str:
    prefix, leaf = "transformer.", name
    if name.startswith("blocks."):
        _, layer, leaf = name.split(".", 2)
        prefix = f"transformer.h.{layer}."
    stem, kind = leaf.rsplit(".", 1)
    return f"{prefix}{HF_NAMES[stem]}.{kind}"


def hf_twin(module: GPT2, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers' model with our weights, and its parameters by our names."""
    shape = module.shape
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.hidden_dim,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_inner=shape.ffn_dim,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    twin: nn.Module = GPT2LMHeadModel(config)
    twin.to(dtype)
    theirs: dict[str, Tensor] = {name: twin.get_parameter(hf_name(name)) for name, _ in module.named_parameters()}
    assert {id(tensor) for tensor in theirs.values()} == {id(tensor) for tensor in twin.parameters()}
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            theirs[name].copy_(as_theirs(name, tensor, shape))
    return twin, theirs


def as_theirs(name: str, tensor: Tensor, shape: GPT2Shape) -> Tensor:
    """A tensor of ours as transformers has it: rows of qkv not head by head but q, k, v; matrices transposed."""
    if ".qkv." in name:
        heads = tensor.view(shape.num_heads, 3, shape.head_dim, *tensor.shape[1:])
        tensor = heads.transpose(0, 1).reshape(tensor.shape)
    return tensor.t() if name.startswith("blocks.") and tensor.ndim == 2 else tensor


def relative(mine: Tensor, theirs: Tensor) -> float:
    error: float = ((mine - theirs).norm() / theirs.norm()).item()
    return error


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("preset", PRESETS)
def test_module_on_meta_has_exactly_the_declared_parameters(preset: str) -> None:
    shape = models.shape_of("gpt2", {}, preset)
    declared = models.parameters_of("gpt2", shape)
    module = models.construct(models.facts_of("gpt2", shape))
    assert [(p.name, p.shape) for p in declared] == [(name, tuple(t.shape)) for name, t in module.named_parameters()]
    assert all(tensor.is_meta for tensor in module.parameters())
    assert sum(parameter.numel for parameter in declared) == COUNTS[preset]
    assert not list(module.buffers())


def test_module_without_biases_has_exactly_the_declared_parameters() -> None:
    shape = small(bias=False)
    module = models.construct(models.facts_of("gpt2", shape))
    declared = models.parameters_of("gpt2", shape)
    assert [(p.name, p.shape) for p in declared] == [(name, tuple(t.shape)) for name, t in module.named_parameters()]
    assert all(parameter.decay for parameter in declared if not parameter.name.count("norm"))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("chunk", [1024, 100])
def test_logits_and_gradients_are_those_of_transformers(dtype: torch.dtype, bound: float, chunk: int) -> None:
    shape = small()
    module = build(shape, dtype, chunk)
    twin, theirs = hf_twin(module, dtype)
    tokens, targets = batch(shape, 2, 290)
    hf_logits = twin(tokens).logits
    assert relative(module(tokens), hf_logits) < bound

    hf_loss = cross_entropy(hf_logits, targets)
    loss = module(tokens, targets)
    assert loss.dtype == dtype
    assert abs(loss.item() / hf_loss.item() - 1) < bound
    backward(hf_loss)
    backward(loss)
    for name, tensor in module.named_parameters():
        gradient = theirs[name].grad
        assert gradient is not None
        assert tensor.grad is not None
        assert relative(as_theirs(name, tensor.grad, shape), gradient) < bound, name


def test_large_vocabulary_has_the_gradients_of_transformers_too() -> None:
    """Above a few thousand tokens the head works in pieces and the embedding adds row by row."""
    shape = small(vocab_size=5003, seq_len=64)
    for chunk in (1024, 50):
        module = build(shape, torch.float32, chunk)
        twin, theirs = hf_twin(module, torch.float32)
        tokens, targets = batch(shape, 3, 64)
        loss = module(tokens, targets)
        backward(loss)
        hf_loss = cross_entropy(twin(tokens).logits, targets)
        backward(hf_loss)
        assert abs(loss.item() / hf_loss.item() - 1) < 1e-6
        gradient, expected = module.tok.weight.grad, theirs["tok.weight"].grad
        assert gradient is not None
        assert expected is not None
        assert relative(gradient, expected) < 1e-5


def test_gradients_through_logits_are_those_of_the_fused_loss() -> None:
    shape = small()
    module = build(shape, torch.float64)
    tokens, targets = batch(shape, 2, 33)
    backward(0.25 * cross_entropy(module(tokens), targets))
    by_logits = {name: tensor.grad for name, tensor in module.named_parameters()}
    module.zero_grad()
    value = module(tokens, targets, loss_scale=0.25)
    backward(value)
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.grad, by_logits[name])
    with torch.no_grad():
        torch.testing.assert_close(module(tokens, targets), value)


def test_gradients_that_come_in_multiply_those_that_the_head_made() -> None:
    shape = small()
    module = build(shape, torch.float64)
    tokens, targets = batch(shape, 2, 20)
    backward(module(tokens, targets))
    once = module.tok.weight.grad
    assert once is not None
    module.zero_grad()
    backward(module(tokens, targets) * 3.0)
    torch.testing.assert_close(module.tok.weight.grad, 3.0 * once)


def test_without_gradients_the_head_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, wanted, softmax_gradient_ = small(), [], head._softmax_gradient_

    def watched(logits: Tensor, targets: Tensor, work: torch.dtype, wants: bool, objective: Objective) -> Tensor:
        wanted.append(wants)
        return softmax_gradient_(logits, targets, work, wants, objective)

    monkeypatch.setattr(head, "_softmax_gradient_", watched)
    module = build(shape, torch.float64)
    with torch.no_grad():
        module(*batch(shape, 2, 20))
    module(*batch(shape, 2, 20))
    assert wanted == [False, True]


def test_bf16_gradients_are_as_exact_as_those_of_transformers_in_bf16() -> None:
    for vocab_size, chunk in ((97, 1024), (5003, 1024), (5003, 60)):
        shape = small(vocab_size=vocab_size)
        exact, rounded = build(shape, torch.float32, chunk), build(shape, torch.float32, chunk).to(torch.bfloat16)
        twin, theirs = hf_twin(rounded, torch.bfloat16)
        tokens, targets = batch(shape, 2, 200)
        wide, narrow = exact(tokens, targets), rounded(tokens, targets)
        assert narrow.dtype == torch.float32
        assert abs(narrow.item() / wide.item() - 1) < 1e-3
        backward(wide)
        backward(narrow)
        backward(cross_entropy(twin(tokens).logits.float(), targets))
        our_errors, their_errors = [], []
        for name, tensor in rounded.named_parameters():
            mine, peer, truth = tensor.grad, theirs[name].grad, exact.get_parameter(name).grad
            assert mine is not None
            assert peer is not None
            assert truth is not None
            assert mine.dtype == torch.bfloat16
            our_errors.append(relative(mine.float(), truth))
            their_errors.append(relative(peer.float(), as_theirs(name, truth, exact.shape)))
        assert sum(our_errors) < 1.2 * sum(their_errors)


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    shape = small()
    module = build(shape, torch.float32)
    tokens, targets = batch(shape, 1, 8)
    targets[0, 3] = shape.vocab_size
    with pytest.raises((IndexError, RuntimeError)):
        module(tokens, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "chunk"), [(97, 1024), (5003, 1024), (5003, 60)])
def test_what_lies_in_fresh_memory_does_not_show(
    dtype: torch.dtype, vocab_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may read the padding of a row and multiply it by zero: harmless, unless it is not a number."""
    module = build(small(vocab_size=vocab_size), dtype, chunk)
    tokens, targets = batch(small(vocab_size=vocab_size), 2, 200)

    def gradients() -> list[torch.Tensor]:
        module.zero_grad()
        backward(module(tokens, targets))
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    expected = gradients()

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    for mine, peer in zip(gradients(), expected, strict=True):
        assert torch.equal(mine, peer)
