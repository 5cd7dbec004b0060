"""In: weights and gradients. Out: the updates of torch's own optimizers, master weights, clipping, learning rates.
Does not train a model: test_trajectories does."""

from __future__ import annotations

import math

import pytest
import torch

from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Optimizer as OptimizerConfig
from codescent.train import optimize
from codescent.train.norm import gradient_norm
from codescent.train.optimize import Optimizer, Weight

SHAPES = {"matrix": (5, 7), "bias": (5,), "wide": (3, 4)}
RATES = [1e-2, 5e-3, 2e-3, 2e-3, 1e-3]


def tensors(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES.values()]


def weights(values: list[torch.Tensor], masters: list[torch.Tensor] | None = None) -> list[Weight]:
    masters = values if masters is None else masters
    return [
        Weight(name, value, master, value.ndim > 1) for name, value, master in zip(SHAPES, values, masters, strict=True)
    ]


REFERENCES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False),
    "adam": lambda groups: torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, eps=1e-8, foreach=False),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, rho=0.95, eps=1e-8, foreach=False),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, alpha=0.95, momentum=0.9, eps=1e-8, foreach=False),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", REFERENCES)
def test_every_kind_updates_as_torch_does(kind: str, fused: bool) -> None:
    config = OptimizerConfig.model_validate({"kind": kind, "fused": fused, "weight_decay": 0.1, "max_grad_norm": 0.5})
    ours, theirs = tensors(0, torch.float64), [torch.nn.Parameter(value) for value in tensors(0, torch.float64)]
    optimizer = Optimizer(weights(ours), config)
    decayed = [parameter for parameter in theirs if parameter.ndim > 1]
    plain = [parameter for parameter in theirs if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = REFERENCES[kind](groups)
    for step, rate in enumerate(RATES):
        gradients = tensors(100 + step, torch.float64)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        norm = math.sqrt(optimizer.step(gradients, rate))
        assert norm == pytest.approx(float(expected_norm), rel=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.data, rtol=1e-12, atol=1e-14)


def test_bf16_weights_follow_fp32_masters() -> None:
    config = OptimizerConfig.model_validate({"max_grad_norm": 0.0, "learning_rate": 1e-3})
    masters = tensors(0, torch.float32)
    exact = [master.clone() for master in masters]
    rounded = [master.bfloat16() for master in masters]
    optimizer = Optimizer(weights(rounded, masters), config)
    reference = Optimizer(weights(exact), config)
    for step in range(20):  # updates of 1e-3 are far below the spacing of bf16 at 1: without masters they would be lost
        gradients = tensors(step, torch.bfloat16)
        optimizer.step(gradients, 1e-4)
        reference.step([gradient.float() for gradient in gradients], 1e-4)
    for master, value, expected in zip(masters, rounded, exact, strict=True):
        assert torch.equal(master, expected)
        assert torch.equal(value, expected.bfloat16())


@pytest.mark.parametrize("unit_numel", [20, 40, 1 << 20], ids=["a matrix alone", "two units", "one unit"])
def test_bf16_gradients_are_clipped_in_every_unit(unit_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize, "UNIT_NUMEL", unit_numel)
    config = OptimizerConfig.model_validate({"kind": "sgd", "max_grad_norm": 0.5})
    masters, exact = tensors(0, torch.float32), tensors(0, torch.float32)
    optimizer = Optimizer(weights([master.bfloat16() for master in masters], masters), config)
    reference = Optimizer(weights(exact), config)
    for step in range(3):
        gradients = tensors(step, torch.bfloat16)
        optimizer.step(gradients, 1e-2)
        reference.step([gradient.float() for gradient in gradients], 1e-2)
    for master, expected in zip(masters, exact, strict=True):
        torch.testing.assert_close(master, expected)


def test_gradients_that_are_not_finite_change_nothing() -> None:
    values = tensors(0, torch.float64)
    before = [value.clone() for value in values]
    optimizer = Optimizer(weights(values), OptimizerConfig())
    gradients = tensors(1, torch.float64)
    gradients[1][2] = math.nan
    assert math.isnan(optimizer.step(gradients, 1e-2))
    state = optimizer.tensors()
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))
    assert not any(state[name].any() for name in state if name.startswith("optimizer."))


def test_where_the_loss_is_not_finite_nothing_changes_and_the_norm_is_told() -> None:
    values = tensors(0, torch.float64)
    before = [value.clone() for value in values]
    optimizer = Optimizer(weights(values), OptimizerConfig())
    ones = [torch.ones_like(value) for value in values]
    sums = optimizer.step(ones, 1e-2, lambda square: torch.stack((square * math.inf, square)))
    assert sums.tolist() == [math.inf, pytest.approx(5 * 7 + 5 + 3 * 4)]
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))


def test_what_is_not_finite_is_found_and_large_numbers_are_not_taken_for_it() -> None:
    values = tensors(0, torch.float32)
    optimizer = Optimizer(weights(values), OptimizerConfig())
    assert optimizer.is_finite()
    values[0].fill_(3e38)  # their sum overflows, and none of them is infinite
    assert optimizer.is_finite()
    for tensor in (values[1].reshape(-1), optimizer.torch.state[values[2]]["exp_avg_sq"].reshape(-1)):
        for bad in (math.inf, -math.inf, math.nan):
            before = float(tensor[-1])
            tensor[-1] = bad
            assert not optimizer.is_finite()
            tensor[-1] = before
    assert optimizer.is_finite()


def test_a_norm_that_overflows_is_infinite_and_updates_nothing() -> None:
    values = tensors(0, torch.float64)
    before = [value.clone() for value in values]
    parts = [Weight(f"w{i}", value, value, decay=True) for i, value in enumerate(values)]
    optimizer = Optimizer(parts, OptimizerConfig.model_validate({}))
    assert optimizer.step([torch.full_like(value, 1e200) for value in values], 0.1) == math.inf
    for value, expected in zip(values, before, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("kind", REFERENCES)
def test_state_is_there_before_the_first_step_and_zero(kind: str) -> None:
    values = tensors(0, torch.float32)
    before = [value.clone() for value in values]
    optimizer = Optimizer(weights(values), OptimizerConfig.model_validate({"kind": kind}))
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))
    state = {name: value for name, value in optimizer.tensors().items() if name.startswith("optimizer.")}
    assert state
    assert not any(value.any() for value in state.values())


def test_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    gradients = [torch.full((3_000_000,), 0.1, dtype=torch.bfloat16), torch.ones(10, dtype=torch.bfloat16)]
    exact = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert gradient_norm(gradients) == pytest.approx(exact, rel=1e-4)


def rates(steps: int, workers: int = 1, **values: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "min_learning_rate": 0.1, **values})
    return [learning_rate(config, 100, workers, step) for step in range(steps)]


@pytest.mark.parametrize(("schedule", "last"), [("linear", 1e-3 / 900), ("cosine", 3.046e-9), ("constant", 1e-3)])
def test_rates_of_the_first_and_last_steps_are_those_of_the_page(schedule: str, last: float) -> None:
    """The example of docs/learning_rate.md: no step has rate 0, and the last one is not yet at the minimum."""
    words = {"learning_rate": 1e-3, "min_learning_rate": 0.0, "warmup_steps": 100, "schedule": schedule}
    config = OptimizerConfig.model_validate(words)
    found = [learning_rate(config, 1000, 1, step) for step in (0, 99, 100, 999)]
    assert found == pytest.approx([1e-3 / 101, 1e-3 * 100 / 101, 1e-3, last], rel=1e-3)
    assert learning_rate(config, 1000, 1, 1000) == (1e-3 if schedule == "constant" else 0.0)


def test_warm_up_then_cosine_to_the_minimum() -> None:
    curve = rates(101, warmup_steps=10)
    assert curve[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert curve[10] == 1.0
    assert curve[55] == pytest.approx(0.55)
    assert curve[100] == 0.1
    assert all(a > b for a, b in zip(curve[10:], curve[11:], strict=False))


def test_linear_and_constant() -> None:
    assert rates(101, schedule="linear")[50] == pytest.approx(0.55)
    assert set(rates(101, schedule="constant")) == {1.0}
    assert rates(60, schedule="linear", decay_steps=50)[50:] == [0.1] * 10


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rate_scales_with_workers_only_when_asked(rule: str, factor: int) -> None:
    assert rates(100, workers=4, scale_learning_rate=rule) == pytest.approx([factor * rate for rate in rates(100)])
