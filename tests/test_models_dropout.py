"""In: dropout masks of many seeds, steps, sites, samples, positions. Out: they are fair, independent, and of no layout.
Does not test whether dropout helps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import backward

from codescent import models
from codescent.models.gpt2.declare import parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.operators.dropout import drop, dropped_at, mix, sample_keys, site_keys

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 61, "seq_len": 40}


def dropped_rows(keys_B: Tensor, rows: int, width: int, probability: float, first_row: int = 0) -> Tensor:
    return dropped_at(keys_B, torch.arange(first_row, first_row + rows), torch.arange(width), probability)


def build(dropout: float) -> GPT2:
    shape = models.shape_of("gpt2", SIZES, dropout=dropout)
    module = GPT2(shape, 1024, "cpu").double()
    initialize_(module, 3, parameters(shape))
    return module


def batch(samples: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 61, (2, samples, 40), generator=torch.Generator().manual_seed(0))
    return both[0], both[1]


def gradients(module: GPT2, parts: list[list[int]], step: int = 5) -> tuple[float, list[Tensor]]:
    """The loss and gradients of samples 10, 11, ... of a global batch, in micro-batches as given."""
    tokens, targets = batch(6)
    module.zero_grad()
    total = 0.0
    for part in parts:
        module.set_dropout_context(1, step, torch.tensor(part) + 10)
        loss = module(tokens[part], targets[part])
        backward(loss)
        total += loss.item()
    return total, [tensor.grad for tensor in module.parameters() if tensor.grad is not None]


def test_micro_batching_and_order_do_not_change_the_masks() -> None:
    module = build(0.3)
    loss, expected = gradients(module, [[0, 1, 2, 3, 4, 5]])
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [2, 4], [1]]):
        again, found = gradients(module, parts)
        assert again == pytest.approx(loss, rel=1e-12)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_other_steps_drop_something_else() -> None:
    module = build(0.3)
    assert gradients(module, [[0, 1]], step=5)[0] != pytest.approx(gradients(module, [[0, 1]], step=6)[0], rel=1e-6)


def test_no_dropout_without_probability_or_while_evaluating() -> None:
    tokens, targets = batch(3)
    plain, dropping = build(0.0), build(0.5)
    dropping.eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens, targets), dropping(tokens, targets))


def test_training_with_dropout_needs_the_sample_numbers() -> None:
    module = build(0.5)
    tokens, targets = batch(3)
    with pytest.raises(RuntimeError, match="set_dropout_context"):
        module(tokens, targets)
    module.set_dropout_context(0, 0, torch.arange(2))
    with pytest.raises(RuntimeError, match="set_dropout_context"):
        module(tokens, targets)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_are_fair_in_every_direction(probability: float) -> None:
    """Counts along every dim, and agreements of neighbours, within five standard deviations of a fair coin's."""
    keys_SB = site_keys(sample_keys(1, 2, torch.arange(16)), 4)
    masks = torch.stack([dropped_rows(keys_B, 64, 96, probability) for keys_B in keys_SB]).double()  # [4, 16, 64, 96]
    deviation = math.sqrt(probability * (1 - probability))
    for kept in range(4):
        others = [dim for dim in range(4) if dim != kept]
        means = masks.mean(others)
        bound = 5 * deviation / math.sqrt(masks.numel() / masks.shape[kept])
        assert (means - probability).abs().max() < bound
    centred = (masks - probability) / deviation
    for dim in range(4):
        pairs = centred * centred.roll(1, dim)
        assert abs(pairs.mean().item()) < 5 / math.sqrt(masks.numel())


def test_every_coordinate_matters() -> None:
    def mask(seed: int, step: int, site: int, sample: int) -> Tensor:
        return dropped_rows(site_keys(sample_keys(seed, step, torch.tensor([sample])), 8)[site], 32, 64, 0.5)

    base = mask(1, 2, 3, 4)
    for other in (mask(2, 2, 3, 4), mask(1, 3, 3, 4), mask(1, 2, 4, 4), mask(1, 2, 3, 5), mask(2, 1, 3, 4)):
        assert (base == other).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(2048))
    assert torch.equal(base, mask(1, 2, 3, 4))


def test_any_rows_and_columns_have_the_mask_that_they_have_in_the_whole() -> None:
    keys_B = sample_keys(1, 2, torch.arange(3))
    whole = dropped_rows(keys_B, 40, 30, 0.4)
    rows, columns = torch.randperm(40)[:11], torch.randperm(30)[:7]
    for kind in (torch.int32, torch.int64):
        assert torch.equal(dropped_at(keys_B, rows, columns.to(kind), 0.4), whole[:, rows][:, :, columns])
    assert torch.equal(dropped_rows(keys_B, 5, 30, 0.4, first_row=9), whole[:, 9:14])


def test_masks_are_those_of_earlier_versions() -> None:
    """A run is continued by its checkpoints alone, so the masks are part of their format."""
    mask = dropped_rows(sample_keys(1, 2, torch.tensor([3])), 4, 16, 0.5)
    bits = ["".join(str(int(dropped)) for dropped in row) for row in mask[0].tolist()]
    assert bits == ["0100000100011011", "0000101011110101", "1000001110100001", "1111100110011001"]


def test_rows_and_columns_of_an_activation_are_dropped_as_in_the_whole() -> None:
    keys_B = sample_keys(0, 0, torch.arange(2))
    x = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([3, 4, 40, 41, 42])
    assert torch.equal(drop(x[:, rows], keys_B, 0.25, rows), drop(x, keys_B, 0.25)[:, rows])
    assert torch.equal(drop(x[..., 4:], keys_B, 0.25, first_column=4), drop(x, keys_B, 0.25)[..., 4:])


def test_what_is_kept_is_scaled() -> None:
    ones = torch.ones(2, 50, 60)
    dropped = drop(ones, sample_keys(0, 0, torch.arange(2)), 0.25)
    assert set(dropped.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_mix_is_splitmix64() -> None:
    """First outputs for seed 1234567, as published with the reference implementation (Vigna)."""
    golden = -7046029254386353131
    states = torch.tensor([1234567, 1234567 + golden, 1234567 + 2 * golden + 2**64])
    assert [value % 2**64 for value in mix(states).tolist()] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip
