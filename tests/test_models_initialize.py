"""In: parameters, seeds, slices. Out: initial values are normal, reproducible, and the same whoever draws which part.
Does not train."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codescent import models
from codescent.models.gpt2.declare import parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initial_values, initialize_
from codescent.plan.shard import Parameter, Role


def matrix(*shape: int, std: float = 1.0, mean: float = 0.0, name: str = "blocks.0.mlp.up.weight") -> Parameter:
    return Parameter(name, shape, Role.COLUMN, std, mean)


@st.composite
def shapes_and_slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    if len(shape) == 2 and draw(st.booleans()):  # a long row, so that blocks of the stream are crossed
        shape = (shape[0] % 3 + 1, 200_003)
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, tuple(slice(start, stop) for start, stop in bounds)


@given(shapes_and_slices(), st.integers(0, 2**63))
def test_a_slice_draws_the_values_that_the_whole_has_there(
    case: tuple[tuple[int, ...], tuple[slice, ...]], seed: int
) -> None:
    shape, slices = case
    whole = initial_values(seed, matrix(*shape))
    assert torch.equal(initial_values(seed, matrix(*shape), slices), whole[slices])


def test_values_are_standard_normal() -> None:
    """Moments within five standard errors, the Kolmogorov-Smirnov distance below its 1e-6 quantile."""
    values = initial_values(11, matrix(1000, 2003)).double().flatten()
    count = len(values)
    assert abs(values.mean().item()) < 5 / math.sqrt(count)
    assert abs(values.var().item() - 1) < 5 * math.sqrt(2 / count)
    assert abs((values**3).mean().item()) < 5 * math.sqrt(15 / count)
    assert abs((values**4).mean().item() - 3) < 5 * math.sqrt(96 / count)
    ordered = values.sort().values
    normal = 0.5 * torch.special.erfc(-ordered / math.sqrt(2))
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((normal - steps[:-1]).abs(), (normal - steps[1:]).abs()).max().item()
    assert distance < 2.7 / math.sqrt(count)


def test_neighbours_are_independent() -> None:
    values = initial_values(11, matrix(1000, 2003)).double().flatten()
    for lag in (1, 2, 3, 4, 8, 2003):
        assert abs((values[lag:] * values[:-lag]).mean().item()) < 5 / math.sqrt(len(values))


def test_mean_and_deviation_are_the_declared_ones() -> None:
    values = initial_values(0, matrix(500, 500, std=0.02, mean=0.5))
    assert values.mean().item() == pytest.approx(0.5, abs=5 * 0.02 / 500)
    assert values.std().item() == pytest.approx(0.02, rel=0.01)
    assert initial_values(0, matrix(7, std=0.0, mean=1.0)).tolist() == [1.0] * 7


def test_seed_and_name_matter_and_nothing_else_does() -> None:
    base = initial_values(1, matrix(300, 7))
    assert torch.equal(base, initial_values(1, matrix(300, 7)))
    for other in (initial_values(2, matrix(300, 7)), initial_values(1, matrix(300, 7, name="blocks.1.mlp.up.weight"))):
        assert abs(np.corrcoef(base.flatten(), other.flatten())[0, 1]) < 0.11


def test_the_stream_stays_what_it_is() -> None:
    """A changed stream would change every run's start: these bits were drawn when it was written."""
    values = initial_values(1337, matrix(64, 64, std=0.02, name="tok.weight"))
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "58d55a5e92f48d3b"


def test_slices_that_do_not_fit_are_refused() -> None:
    for slices in ((slice(0, 2),), (slice(0, 4, 2), slice(None))):
        with pytest.raises(ValueError, match="slice of step 1"):
            initial_values(0, matrix(4, 4), slices)


def test_module_gets_the_declared_values_in_its_own_dtype() -> None:
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "vocab_size": 61, "seq_len": 40}
    shape = models.shape_of("gpt2", sizes)
    module = GPT2(shape, 1024, "cpu").to(torch.bfloat16)
    initialize_(module, 5, parameters(shape))
    for declared in parameters(shape):
        assert torch.equal(module.get_parameter(declared.name), initial_values(5, declared).to(torch.bfloat16))
    by_name = {declared.name: declared for declared in parameters(shape)}
    assert by_name["blocks.2.attn.out.weight"].std == pytest.approx(0.02 / math.sqrt(6))
    assert by_name["blocks.2.mlp.down.weight"].std == pytest.approx(0.02 / math.sqrt(6))
    assert by_name["blocks.2.attn.qkv.weight"].std == 0.02
    assert by_name["norm.weight"].mean == 1.0


def test_a_module_of_another_shape_is_refused() -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 61, "seq_len": 40}
    shape = models.shape_of("gpt2", sizes)
    other = models.shape_of("gpt2", {**sizes, "num_layers": 2})
    with pytest.raises(ValueError, match=r"blocks\.1\."):
        initialize_(GPT2(shape, 1024, "cpu"), 5, parameters(other))
