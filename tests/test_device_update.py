"""In: the optimizer on the meta device, and its device tensors on the CPU. Out: no wait, few launches, right updates.
Does not run on a GPU: torch's fused kernels of the CPU read `grad_scale` and `found_inf` as those of CUDA do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_spy import META, DeviceSpy, fused_optimizers

from codescent.config.sections import Optimizer as OptimizerConfig
from codescent.train.norm import gradient_norm, square_on_device
from codescent.train.optimize import DEVICE_UNIT_NUMEL, Optimizer, Weight

FUSED, OTHERS = ("adamw", "adam", "sgd"), ("adagrad", "adadelta", "rmsprop")
LAUNCHES = 27
"""The most operators of a step that clips, for any number of weights. Measured: 18 to 27."""
SHAPES = ((5, 7), (5,), (3, 4))
RATES = (1e-2, 5e-3, 2e-3, 2e-3)


@pytest.fixture
def as_on_gpus() -> Iterator[None]:
    """torch.optim takes the kernels that it takes on a GPU. One of them has no form for meta tensors."""
    with fused_optimizers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)
        yield


def on_meta(config: OptimizerConfig, sizes: list[int], precision: str) -> tuple[Optimizer, list[torch.Tensor]]:
    """An optimizer of vectors of these sizes, and their gradients."""
    dtype, wide = (torch.bfloat16, torch.float32) if precision == "bf16" else (torch.float64, torch.float64)
    masters = [torch.empty(size, dtype=wide, device=META) for size in sizes]
    weights = [master.to(dtype) if precision == "bf16" else master for master in masters]
    pairs = zip(weights, masters, strict=True)
    made = Optimizer([Weight(f"w{i}", weight, master, i % 2 > 0) for i, (weight, master) in enumerate(pairs)], config)
    return made, [torch.empty_like(weight) for weight in weights]


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("kind", FUSED)
def test_a_step_waits_for_nothing_and_launches_the_same_for_any_number_of_weights(
    as_on_gpus: None, kind: str, precision: str
) -> None:
    launches = set()
    for number in (10, 80):
        optimizer, gradients = on_meta(OptimizerConfig.model_validate({"kind": kind}), [100] * number, precision)
        with DeviceSpy() as spy:
            optimizer.step(gradients, 1e-3)
        assert dict(spy.waits) == {}
        launches.add(spy.launches)
    assert len(launches) == 1
    assert launches.pop() <= LAUNCHES


class Reading(DeviceSpy):
    """Makes up what the host reads: each element is 1."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_to_copy" and torch.device((kwargs or {}).get("device") or META) != META:
            self.reads += 1
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [*FUSED, *OTHERS])
def test_where_the_host_decides_it_waits_once(as_on_gpus: None, kind: str) -> None:
    config = OptimizerConfig.model_validate({"kind": kind, "fused": False})
    optimizer, gradients = on_meta(config, [100] * 4, "bf16")
    with Reading() as spy:
        optimizer.step(gradients, 1e-3)
    assert (spy.reads, dict(spy.waits)) == (1, {})


def test_units_are_large_and_their_wide_gradients_bounded(as_on_gpus: None) -> None:
    """Of 700 M weights in bf16, none larger than a unit: three units, and memory for the largest."""
    optimizer, gradients = on_meta(OptimizerConfig(), [100_000_000] * 7, "bf16")
    assert [len(unit.indices) for unit in optimizer.units] == [2, 2, 2, 1]
    (memory,) = {buffer._base.nbytes if buffer._base is not None else buffer.nbytes for buffer in optimizer.buffers()}
    assert memory == 4 * 200_000_000 <= 4 * DEVICE_UNIT_NUMEL == 2**30
    with DeviceSpy() as spy:
        optimizer.step(gradients, 1e-3)
    assert dict(spy.waits) == {}


def values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def both(kind: str, dtype: torch.dtype, most: float) -> tuple[Optimizer, Optimizer]:
    """An optimizer that the host decides for, and one by device tensors."""
    config = OptimizerConfig.model_validate({"kind": kind, "max_grad_norm": most, "momentum": 0.9})
    named = [[Weight(f"w{i}", v, v, v.ndim > 1) for i, v in enumerate(values(0, dtype))] for _ in range(2)]
    by_host, by_device = (Optimizer(weights, config) for weights in named)
    by_device.decides_on_device = True
    return by_host, by_device


def state(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor.clone() for _, _, tensor in optimizer.named_state()]


@pytest.mark.parametrize("most", [0.0, 0.5, 1e3], ids=["no limit", "clipped", "not clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", FUSED)
def test_updates_are_those_that_the_host_decides(kind: str, dtype: torch.dtype, most: float) -> None:
    by_host, by_device = both(kind, dtype, most)
    for step, rate in enumerate(RATES):
        squares = [one.step(values(10 + step, dtype), rate) for one in (by_host, by_device)]
        assert squares[0] == squares[1]
    exact = 1e-6 if dtype == torch.float32 else 1e-13
    for found, expected in zip(state(by_device), state(by_host), strict=True):
        torch.testing.assert_close(found, expected, rtol=exact if most == 0.5 else 0, atol=exact if most == 0.5 else 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", FUSED)
def test_a_skipped_step_leaves_every_bit_and_the_next_one_is_as_without_it(
    kind: str, dtype: torch.dtype, in_loss: bool, bad: float
) -> None:
    _, never = both(kind, dtype, 0.5)
    _, optimizer = both(kind, dtype, 0.5)
    for one in (never, optimizer):
        one.step(values(10, dtype), 1e-2)
    before, gradients = state(optimizer), values(11, dtype)
    agree: Callable[[torch.Tensor], torch.Tensor] = (  # noqa: E731
        lambda square: torch.stack((square * 0 + bad, square)) if in_loss else square[None]
    )
    if not in_loss:
        gradients[1][2] = bad
    assert not optimizer.step(gradients, 1e-2, agree).isfinite().all()
    assert all(torch.equal(found, expected) for found, expected in zip(state(optimizer), before, strict=True))
    for one in (never, optimizer):
        one.step(values(12, dtype), 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(state(optimizer), state(never), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_off_the_cpu_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    gradients = [torch.full((300_000,), 0.1, dtype=dtype), *values(3, dtype)]
    square = square_on_device(gradients)
    assert square.dtype == torch.float64
    exact = {torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert math.sqrt(square) == pytest.approx(gradient_norm(gradients), rel=exact)
