"""In: torch.compile over single blocks and over the whole module. Out: the losses and gradients of the eager module.
Does not test the compiler's speed. Slow: it has to warm up."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import backward

from codescent import models
from codescent.models.gpt2.declare import parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.plan.objective import Objective

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 4099, "seq_len": 160}


def build(dropout: float) -> GPT2:
    shape = models.shape_of("gpt2", SIZES, dropout=dropout)
    module = GPT2(shape, 100, "cpu")
    if dropout:  # both at once, so that nothing more is compiled
        module.objective = Objective(label_smoothing=0.1, z_loss=1e-2)
    initialize_(module, 3, parameters(shape))
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_follows_eager(what: str, dropout: float) -> None:
    torch.compiler.reset()
    eager, compiled = build(dropout), build(dropout)
    if what == "model":
        compiled.compile()
    else:
        for block in compiled.blocks.values():
            block.compile()
    tokens = torch.randint(0, 4099, (2, 3, 150), generator=torch.Generator().manual_seed(0))
    for step in range(2):
        losses = []
        for module in (eager, compiled):
            module.zero_grad()
            module.set_dropout_context(1, step, torch.arange(3) + step)
            loss = module(tokens[0], tokens[1], loss_scale=1 / 450)
            backward(loss)
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6), name
    for module in (eager, compiled):
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens[0], tokens[1]), eager(tokens[0], tokens[1]))
        torch.testing.assert_close(compiled(tokens[0]), eager(tokens[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_step_compiles_nothing_anew() -> None:
    torch.compiler.reset()
    module = build(0.1)
    for block in module.blocks.values():
        block.compile()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for step in range(3):
        module.set_dropout_context(0, step, torch.arange(1) + step)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            backward(module(tokens, tokens))
