"""In: one model on one device and scattered over several. Out: the same loss and gradients; what is refused, and why.
Does not need CUDA but where marked: elsewhere torch's own copies are made on the CPU, and torch's fallback is tried."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from runs import called, losses, train

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.cost.memory import inside_bytes, wire_bytes
from codescent.models.initialize import initialize_
from codescent.plan import Collective, Plan
from codescent.strategies import DataParallel, ThisRank
from codescent.strategies.data_parallel_forward import DataParallelForward
from codescent.train import machine

replicate = importlib.import_module("torch.nn.parallel.replicate")  # torch has a function of the same name
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 12}
VOCAB = 40


def planned(devices: int, world_size: int = 1, precision: str = "fp32", **parallel: object) -> Plan:
    values = {
        "model": SIZES,
        "train": {"global_batch_size": 12, "microbatch_size": 6, "precision": precision},
        "parallel": {"data_parallel": devices, **parallel},
    }
    return build(Config.model_validate(values), VOCAB, world_size)


def model(devices: int, dropout: float = 0.0, recompute: str = "none") -> Any:
    """The same weights, whatever the number of devices, as `assemble` makes them: divided before they have memory."""
    sizes = {name: SIZES.get(name) for name in models.SIZES} | {"vocab_size": VOCAB}
    shape = models.shape_of("gpt2", sizes, dropout=dropout)  # type: ignore[arg-type]
    module = models.construct(models.facts_of("gpt2", shape), device="meta").to(torch.float64)
    plan = planned(devices, recompute=recompute)
    if DataParallel().active(plan):
        DataParallel().divide(module, ThisRank(plan, 0, {}))
    module.to_empty(device="cpu")
    initialize_(module, 1, models.parameters_of("gpt2", shape))
    return module


def on_cpus(parallel: torch.nn.DataParallel[Any], num_devices: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make torch's DataParallel copy the module as on CUDA, its tensors on the CPU; returns the samples of each copy.

    Scatter, gather and broadcast are torch's CUDA kernels: these are stand-ins. What a copy of a module is, with
    weights that are no leaves, is torch's own code.
    """
    seen: list[int] = []

    def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> list[Any]:
        return [[tensor.detach() if detach else tensor.clone() for tensor in tensors] for _ in devices]

    def scatter(inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[int]) -> Any:
        assert not kwargs, "torch calls devices that have no samples where there are keywords"
        parts = [x.chunk(num_devices) if isinstance(x, torch.Tensor) else [x] * num_devices for x in inputs]
        scattered = tuple(zip(*parts, strict=False))
        seen.extend(len(part[0]) for part in scattered)
        return scattered, tuple({} for _ in scattered)

    def apply(copies: Sequence[Any], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        for copy in copies:
            assert all(not leaf.is_leaf for leaf in [copy.part.tok.weight]) or not torch.is_grad_enabled()
            assert not list(copy.parameters())
        return [copy(*given) for copy, given in zip(copies, inputs, strict=True)]

    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    parallel.device_ids, parallel.output_device = list(range(num_devices)), 0
    parallel.src_device_obj = torch.device("cpu")
    monkeypatch.setattr(
        parallel, "replicate", lambda module, ids: replicate.replicate(module, ids, not torch.is_grad_enabled())
    )
    monkeypatch.setattr(parallel, "scatter", scatter)
    monkeypatch.setattr(parallel, "parallel_apply", apply)
    monkeypatch.setattr(parallel, "gather", lambda outputs, device: torch.cat(outputs))
    return seen


def scattered(module: Any) -> DataParallelForward:
    found = module.forward.__self__
    assert isinstance(found, DataParallelForward)
    return found


def step(module: Any, samples: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of some samples, called as the executor calls it."""
    tokens = torch.arange(samples * 13).reshape(samples, 13) * 7 % VOCAB
    module.set_dropout_context(3, 5, torch.arange(100, 100 + samples))
    loss = module(tokens[:, :-1], tokens[:, 1:], loss_scale=0.125)
    torch.autograd.backward(loss, None)
    return loss.detach(), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("devices", "samples", "parts"), [(2, 4, [2, 2]), (3, 5, [2, 2, 1]), (4, 2, [1, 1])], ids=["even", "uneven", "few"]
)
def test_loss_and_gradients_are_those_of_one_device(
    devices: int, samples: int, parts: list[int], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_loss, expected = step(model(1, dropout), samples)
    module = model(devices, dropout)
    seen = on_cpus(scattered(module).parallel, devices, monkeypatch)
    loss, gradients = step(module, samples)
    assert seen == parts
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_selective_recompute_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected_loss, expected = step(model(1), 4)
    module = model(2, recompute="selective")
    for layer in module.modules():
        if hasattr(layer, "recompute"):
            layer.recompute = True
    on_cpus(scattered(module).parallel, 2, monkeypatch)
    loss, gradients = step(module, 4)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("samples", [1, 3])
def test_validation_has_no_dropout_and_as_many_samples_as_it_likes(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, alone = model(2, dropout=0.3), model(1, dropout=0.3).eval()
    on_cpus(scattered(module).parallel, 2, monkeypatch)
    step(module, 4)
    module.train(False)
    tokens = torch.arange(samples * 13).reshape(samples, 13) % VOCAB
    with torch.no_grad():
        found = module(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(found, alone(tokens[:, :-1], tokens[:, 1:]), rtol=1e-12, atol=0)
        torch.testing.assert_close(module(tokens[:, :-1]), alone(tokens[:, :-1]), rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch falls back to the module itself where there is no CUDA")
def test_torchs_fallback_is_the_module_itself() -> None:
    expected_loss, expected = step(model(1, 0.3), 4)
    loss, gradients = step(model(2, 0.3), 4)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(found, wanted) for found, wanted in zip(gradients, expected, strict=True))


def test_the_module_keeps_its_parameters_and_their_names() -> None:
    assert [name for name, _ in model(2).named_parameters()] == [name for name, _ in model(1).named_parameters()]


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_traffic_stays_inside_the_rank(precision: str, itemsize: int) -> None:
    """N devices, m micro-batches: weights out and gradients in, (N-1) S each, samples (N-1)/N, a loss each."""
    plan, size, batches, samples = planned(3, precision=precision), 0, 2, 6 * SIZES["seq_len"]
    size = plan.num_parameters * itemsize
    assert {record.collective for record in plan.traffic} == {
        Collective.BROADCAST,
        Collective.SCATTER,
        Collective.GATHER,
        Collective.REDUCE,
    }
    assert inside_bytes(plan) == batches * (2 * 2 * size + 2 / 3 * 2 * 8 * samples + 2 / 3 * 3 * 4)
    assert wire_bytes(plan) == 0
    assert (plan.mesh.degree(""), plan.mesh.group("", 0)) == (1, (0,))
    assert plan.devices == 3
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: planned(2, 2), "the run has dp_replicate 2 = 2 ranks; dp_replicate gives each device"),
        (lambda: planned(2, 2, tp=2), "tp 2 = 2 ranks"),
        (lambda: planned(7), r"micro-batches of 6 samples do not reach 7 devices; nearest that would do"),
        (lambda: planned(2, recompute="full"), 'parallel.recompute = "selective", or parallel.data_parallel = 1'),
        (lambda: machine.refuse_device(planned(2), torch.device("cpu")), "this run computes on a CPU; remove the key"),
    ],
)
def test_what_it_refuses(make: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make()


def test_fewer_devices_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    machine.refuse_device(planned(2), torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"this machine has 2 CUDA devices"):
        machine.refuse_device(planned(3), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 'train.device is "cpu"'),
        (("train.device=auto",), "this run computes on a CPU"),
        (("train.device=auto", "train.compile=blocks"), "compiled modules cannot be copied"),
        (("train.device=auto", "--ranks", "2"), "is one process with all the devices"),
    ],
)
def test_a_run_without_cuda_is_refused_before_anything_is_written(
    project: Path, words: tuple[str, ...], expected: str
) -> None:
    done = called(project, "train", "run.toml", "run.name=refused", "parallel.data_parallel=2", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "runs" / "refused").exists()


def test_a_run_by_torchs_fallback_is_one_without(project: Path, forker: Forker) -> None:
    words = ("train.precision=fp64", "train.microbatch_size=4", "model.dropout=0.1", "train.num_steps=10")
    expected = forker.train(project, "without", 1, *words).read_metrics()
    found = forker.train_on_cpus(project, "fallback", 1, *words, "parallel.data_parallel=2").read_metrics()
    for column in ("train_loss", "grad_norm", "val_loss"):
        assert [row[column] for row in found] == [row[column] for row in expected]


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("words", [(), ("parallel.recompute=selective",), ("parallel.offload=optimizer",)])
def test_two_devices_walk_the_trajectory_of_one(
    project: Path, precision: str, tolerance: float, words: tuple[str, ...]
) -> None:
    common = ("train.device=cuda", "model.dropout=0.1", "train.microbatch_size=4", f"train.precision={precision}")
    name = f"{precision}-{len(words) and words[0][-5:]}"
    expected = train(project, f"one-{name}", *common)
    found = train(project, f"two-{name}", *common, "parallel.data_parallel=2", *words)
    assert losses(found) == pytest.approx(losses(expected), rel=tolerance)
