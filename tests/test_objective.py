"""In: label smoothing and z-loss. Out: losses and gradients of the heads are those that autograd finds with torch's.
Does not divide the head (test_tensor_operators does) or train on layouts (test_trajectories does)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forker import Forker
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import called, losses, make_project
from torch import Tensor
from torch.autograd import backward, grad

from codescent import models
from codescent.models.bert.module import span_loss
from codescent.models.initialize import initialize_
from codescent.operators.head import _head_loss_op, head_loss
from codescent.plan.objective import CROSS_ENTROPY, Objective

BOTH = Objective(label_smoothing=0.1, z_loss=1e-2)


def truth(logits_NV: Tensor, targets_N: Tensor, objective: Objective) -> Tensor:
    """The sum of the losses, as torch has them. A negative target has none."""
    kept = targets_N >= 0
    logits_NV, targets_N = logits_NV[kept], targets_N[kept]
    entropies = F.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=objective.label_smoothing)
    return entropies + objective.z_loss * torch.logsumexp(logits_NV, -1).square().sum()


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 7, 2999]),  # the last one by the CPU's other way to compute a softmax
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([0, 1, 4, 100]),
    objective=st.builds(Objective, st.sampled_from([0.0, 0.1, 0.9]), st.sampled_from([0.0, 1e-4, 0.5])),
    biased=st.booleans(),
    sharpness=st.sampled_from([0.1, 3.0, 30.0]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_autograd(
    vocab: int,
    tokens: int,
    chunk: int,
    objective: Objective,
    biased: bool,
    sharpness: float,
    ignored: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_ND = (sharpness * draw(tokens, 5)).requires_grad_()
    weight_VD, bias_V = draw(vocab, 5).requires_grad_(), draw(vocab).requires_grad_()
    inputs = [x_ND, weight_VD, *([bias_V] if biased else [])]
    targets_N = torch.randint(0, vocab, (tokens,), generator=generator)
    targets_N[torch.rand(tokens, generator=generator) < ignored] = -1
    bias, options = bias_V if biased else None, dict[str, Any]({"skip_negative": True, "objective": objective})
    loss = head_loss(x_ND, weight_VD, targets_N, chunk, 0.25, bias_V=bias, **options)
    wanted = truth(F.linear(x_ND, weight_VD, bias), targets_N, objective)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for mine, other in zip(grad(loss, inputs), grad(0.25 * wanted, inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(head_loss(x_ND, weight_VD, targets_N, chunk, bias_V=bias, **options), loss.detach())


@pytest.mark.parametrize("vocab", [97, 2999])
def test_bf16_is_as_exact_as_without_the_terms(vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x_ND, weight_VD = torch.randn(64, 16, generator=generator), torch.randn(vocab, 16, generator=generator)
    targets_N = torch.randint(0, vocab, (64,), generator=generator)
    errors = []
    for objective in (CROSS_ENTROPY, BOTH):
        inputs = [tensor.bfloat16().requires_grad_() for tensor in (x_ND, weight_VD)]
        loss = head_loss(inputs[0], inputs[1], targets_N, 24, objective=objective)
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        wanted = truth(exact[0] @ exact[1].t(), targets_N, objective)
        assert loss.item() == pytest.approx(wanted.item(), rel=5e-3)
        pairs = zip(grad(loss, inputs), grad(wanted, exact), strict=True)
        errors.append([float((mine.double() - other).norm() / other.norm()) for mine, other in pairs])
    for plain, smoothed in zip(*errors, strict=True):
        assert smoothed < 1.5 * plain + 1e-3


@pytest.mark.parametrize("vocab", [97, 2999])
def test_the_operator_of_compiled_models_knows_the_terms(vocab: int) -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (20, vocab)]
    targets_N = torch.randint(0, vocab, (20,), generator=generator)
    terms = (BOTH.label_smoothing, BOTH.z_loss)
    loss = _head_loss_op(inputs[0], inputs[1], targets_N, 7, 0.5, True, *terms)[0]
    wanted = truth(inputs[0] @ inputs[1].t(), targets_N, BOTH)
    torch.testing.assert_close(loss, wanted)
    for mine, other in zip(grad(loss, inputs), grad(0.5 * wanted, inputs), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("objective", [BOTH, Objective(label_smoothing=0.3), Objective(z_loss=0.2), CROSS_ENTROPY])
def test_the_classes_of_a_span_are_the_positions_of_its_sample(objective: Objective, padded: bool) -> None:
    logits_BT2 = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(5)).double().requires_grad_()
    lengths_B = torch.tensor([4, 6, 1]) if padded else torch.tensor([6, 6, 6])
    targets_B2 = torch.tensor([[0, 3], [5, 2], [0, 0]])
    loss = span_loss(logits_BT2, targets_B2, lengths_B if padded else None, 0.25, objective)
    wanted = sum(
        truth(logits_T2[:length].t(), targets_2, objective) / 2
        for logits_T2, targets_2, length in zip(logits_BT2, targets_B2, lengths_B.tolist(), strict=True)
    )
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grad(loss, logits_BT2), grad(0.25 * wanted, logits_BT2))


SIZES = {"num_heads": 2, "hidden_dim": 16, "vocab_size": 53}
ONE_STACK, TWO_STACKS = {"num_layers": 1, "seq_len": 12}, {"num_encoder_layers": 1, "num_decoder_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": SIZES | ONE_STACK,
    "llama": SIZES | ONE_STACK,
    "bert": SIZES | ONE_STACK | {"head": "mlm"},
    "transformer": SIZES | TWO_STACKS | {"source_len": 5, "target_len": 7},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_by_the_objective_and_evaluates_by_the_plain_cross_entropy(kind: str) -> None:
    shape = models.shape_of(kind, KINDS[kind])
    module: Any = models.construct(models.facts_of(kind, shape, head_chunk_tokens=5), "cpu").double()
    initialize_(module, 3, models.parameters_of(kind, shape))
    module.objective = BOTH
    generator = torch.Generator().manual_seed(6)
    tokens_BT, targets_BT = (torch.randint(0, 53, (2, 12), generator=generator) for _ in range(2))
    if kind == "bert":
        targets_BT = targets_BT.masked_fill(torch.rand(2, 12, generator=generator) < 0.7, -100)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for training, objective in ((True, BOTH), (False, CROSS_ENTROPY)):
        module.train(training)
        loss, logits_BTV = module(tokens_BT, targets_BT), module(tokens_BT)
        wanted = truth(logits_BTV.flatten(0, 1), targets_BT[:, -logits_BTV.shape[1] :].flatten(), objective)
        torch.testing.assert_close(loss, wanted)
        for mine, other in zip(grad(loss, parameters), grad(wanted, parameters), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def test_z_loss_pulls_log_z_to_zero() -> None:
    """Its gradient is along the softmax: what the loss gains does not change the probabilities."""
    weight_VD = torch.eye(4, dtype=torch.float64).requires_grad_()
    x_ND = torch.full((1, 4), 5.0, dtype=torch.float64).requires_grad_()
    backward(head_loss(x_ND, weight_VD, torch.tensor([2]), objective=Objective(z_loss=1.0)))
    backward(head_loss(x_ND, weight_VD, torch.tensor([2])) * -1.0)
    log_z = 5.0 + math.log(4)
    torch.testing.assert_close(x_ND.grad, torch.full((1, 4), 2 * log_z / 4, dtype=torch.float64))


STANDING = ("train.num_steps=2", "train.eval_every=1", "optimizer.learning_rate=1e-30", "optimizer.warmup_steps=0")
SMOOTHED = ("train.label_smoothing=0.1", "train.z_loss=1e-3")


def test_a_run_minimises_the_objective_and_validates_by_the_plain_cross_entropy(forker: Forker, tmp_path: Path) -> None:
    make_project(tmp_path)
    plain = forker.train(tmp_path, "plain", 1, *STANDING)
    smoothed = forker.train(tmp_path, "smoothed", 1, *STANDING, *SMOOTHED)
    for one, other in zip(plain.read_metrics(), smoothed.read_metrics(), strict=True):
        # At initial weights every class has about the same logit: log Z is about log V for every token.
        assert other["train_loss"] - one["train_loss"] == pytest.approx(1e-3 * math.log(257) ** 2, rel=0.05)
        assert other["val_loss"] == one["val_loss"]
    scores = [called(tmp_path, "evaluate", f"runs/{name}").stdout for name in ("plain", "smoothed")]
    assert scores[0].replace("runs/plain", "") == scores[1].replace("runs/smoothed", "")


def test_a_run_of_before_the_keys_continues_as_a_plain_one(forker: Forker, tmp_path: Path) -> None:
    make_project(tmp_path)
    saved = ("checkpoint.every=1",)
    run = forker.train(tmp_path, "old", 1, "train.num_steps=1", "optimizer.decay_steps=9", *saved)
    plan = json.loads((run.path / "plan.json").read_text())
    assert plan.pop("objective") == {"label_smoothing": 0.0, "z_loss": 0.0}
    (run.path / "plan.json").write_text(json.dumps(plan))
    lines = (run.path / "config.toml").read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(("label_smoothing", "z_loss"))]
    assert len(older) == len(lines) - 2
    (run.path / "config.toml").write_text("".join(older))
    words = ["run.name=old", "train.num_steps=2", "optimizer.decay_steps=9", *saved]
    refused = forker.run(tmp_path, 1, [*words, *SMOOTHED], resume=True)
    assert refused.codes == [2]
    assert "train.label_smoothing: the run in runs/old has 0.0, this config 0.1" in refused.said
    assert "train.z_loss: the run in runs/old has 0.0, this config 0.001" in refused.said
    assert len(losses(forker.train(tmp_path, "old", 1, *words[1:], resume=True))) == 2
