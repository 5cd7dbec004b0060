"""In: optimizer.kind = "muon". Out: the updates of torch.optim.Muon, bytes of state, which parameters it updates.
Does not compare layouts (test_trajectories does) or traffic (test_declared does)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from runs import assert_same, codescent, losses

from codescent.build import build
from codescent.checkpoint.checkpoints import read_tensors
from codescent.config.sections import Config
from codescent.config.sections import Optimizer as OptimizerConfig
from codescent.cost.memory import inside_bytes, state_bytes, wire_bytes
from codescent.operators import products
from codescent.operators.attention import by_kind
from codescent.plan import Collective, Parameter, Plan
from codescent.record import RunFolder
from codescent.strategies import ThisRank
from codescent.strategies.muon import flops, rounds
from codescent.train.muon import _factor, matrix_rounds, orthogonal, scale
from codescent.train.optimize import Optimizer, Weight

RATES = [1e-2, 5e-3, 2e-3, 2e-3, 1e-3]
CPU = torch.device("cpu")
SMALL = {"num_layers": 2, "num_heads": 4, "hidden_dim": 16, "ffn_dim": 40, "seq_len": 8, "vocab_size": 31}
LLAMA = SMALL | {"kind": "llama", "num_kv_heads": 2}


def planned(
    model: dict[str, Any], precision: str = "fp32", lora: int | None = None, parallel: Any = None, **optimizer: Any
) -> tuple[Plan, OptimizerConfig]:
    """A plan with Muon, and its section [optimizer]."""
    degrees = parallel or {}
    sections = {
        "model": model,
        "lora": {"rank": lora},
        "train": {"precision": precision, "global_batch_size": 48},
        "parallel": degrees,
        "optimizer": {"kind": "muon", **optimizer},
    }
    config = Config.model_validate(sections)
    return build(config, None, math.prod(degrees.values())), config.optimizer


def optimizer_of(plan: Plan, config: OptimizerConfig, masters: list[torch.Tensor]) -> Optimizer:
    weights = [
        Weight(tensor.parameter.name, master, master, tensor.parameter.decay)
        for tensor, master in zip(plan.trained, masters, strict=True)
    ]
    return Optimizer(weights, config, matrices=matrix_rounds(ThisRank(plan, 0, {}), CPU))


def tensors(plan: Plan, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (tensor.parameter.shape for tensor in plan.trained)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def parts(plan: Plan, values: list[torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Copies of the matrices that a plan's tensors hold, and of the other tensors, by name."""
    found: dict[str, torch.Tensor] = {}
    for tensor, value in zip(plan.trained, values, strict=True):
        name, head = tensor.parameter.name, width // 4
        if name.endswith(("qkv.weight", "qkv.lora_b")):
            groups = value.unflatten(0, (-1, sum(tensor.parameter.alternating), 1))[:, :, 0]
            found[f"{name} q"] = groups[:, : -2 * head].flatten(0, 1).clone()
            found[f"{name} k"] = groups[:, -2 * head : -head].flatten(0, 1).clone()
            found[f"{name} v"] = groups[:, -head:].flatten(0, 1).clone()
        elif name.endswith(("gate_up.weight", "gate_up.lora_b")):
            found[f"{name} gate"], found[f"{name} up"] = value[:, 0].clone(), value[:, 1].clone()
        else:
            found[name] = value.clone()
    return found


@pytest.mark.parametrize(
    ("model", "matrices", "options"),
    [
        (SMALL, 6, {}),
        (SMALL, 6, {"muon_adjust_lr_fn": "original", "muon_nesterov": False, "muon_ns_steps": 3, "muon_momentum": 0.8}),
        (LLAMA, 7, {"muon_learning_rate": 2e-2, "learning_rate": 1e-2}),
        (LLAMA, 11, {"muon_adjust_lr_fn": "original", "lora": 2}),
    ],
)
def test_updates_are_those_of_torch(model: dict[str, Any], matrices: int, options: dict[str, Any]) -> None:
    """Each matrix by itself under torch.optim.Muon, the rest under torch.optim.AdamW: bitwise but for the last one.

    There B of queries has another factor than that of keys and values, which is multiplied in another order.
    """
    plan, config = planned(model, muon_precision="bf16", weight_decay=0.2, max_grad_norm=0.5, **options)
    ours = tensors(plan, 0, torch.float32)
    theirs = {name: torch.nn.Parameter(value) for name, value in parts(plan, ours, 16).items()}
    optimizer = optimizer_of(plan, config, ours)
    of_muon = [p for name, p in theirs.items() if name.startswith("blocks") and p.ndim > 1]
    others = [p for p in theirs.values() if all(p is not other for other in of_muon)]
    assert len(of_muon) == 2 * matrices
    ratio = options.get("muon_learning_rate", 1.0) / options.get("learning_rate", 1.0)
    reference = torch.optim.Muon(
        of_muon,
        weight_decay=0.2,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_ns_steps,
        adjust_lr_fn=config.muon_adjust_lr_fn,
    )
    decayed, plain = [p for p in others if p.ndim > 1], [p for p in others if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step, rate in enumerate(RATES):
        gradients = tensors(plan, 100 + step, torch.float32)
        for parameter, gradient in zip(theirs.values(), parts(plan, gradients, 16).values(), strict=True):
            parameter.grad = gradient
        norm = math.sqrt(optimizer.step(gradients, rate))
        torch.nn.utils.clip_grads_with_norm_(theirs.values(), 0.5, torch.tensor(norm, dtype=torch.float64))
        reference.param_groups[0]["lr"] = rate * ratio
        for group in rest.param_groups:
            group["lr"] = rate
        reference.step()
        rest.step()
    bitwise = "lora" not in options
    for name, found in parts(plan, ours, 16).items():
        torch.testing.assert_close(found, theirs[name].data, rtol=0 if bitwise else 1e-6, atol=0 if bitwise else 1e-7)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_rows_of_a_shard_have_the_factors_of_their_matrices(rule: str) -> None:
    """Shards of all sizes: also those that begin inside a head."""
    qkv = parameter(LLAMA, "blocks.0.attn.qkv.lora_b", 2)
    whole = [scale(*qkv.matrices[number], rule) for number in labels(qkv).tolist()]
    assert len(set(whole)) == 2  # grouped queries: keys have fewer rows
    for size in (1, 5, 8, 32):
        for first in range(0, 32, size):
            found = _factor(qkv, first, torch.empty(min(size, 32 - first), 2, dtype=torch.float64), rule)
            expected = whole[first : first + size]
            got = [found] * len(expected) if isinstance(found, float) else found[:, 0].tolist()
            assert got == pytest.approx(expected, rel=1e-15)


def hidden(plan: Plan) -> dict[str, int]:
    """Elements of the tensors that Muon updates, by name."""
    return {t.parameter.name: t.parameter.numel for t in plan.trained if t.orthogonalized}


BLOCK = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
SWIGLU = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
TRANSFORMER = {name: size for name, size in SMALL.items() if name not in ("num_layers", "seq_len")}
TRANSFORMER |= {"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1}
TRANSFORMER |= {"source_len": 4, "target_len": 4}


@pytest.mark.parametrize(("model", "layers"), [(SMALL, BLOCK), (LLAMA, SWIGLU)])
def test_muon_updates_the_matrices_of_the_blocks(model: dict[str, Any], layers: tuple[str, ...]) -> None:
    plan, _ = planned(model)
    assert set(hidden(plan)) == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers}
    of_adapters, _ = planned(model, lora=2)
    names = {f"blocks.{block}.{layer}.lora_{which}" for block in (0, 1) for layer in layers for which in "ab"}
    assert set(hidden(of_adapters)) == names


def parameter(model: dict[str, Any], name: str, lora: int | None = None) -> Parameter:
    plan, _ = planned(model, lora=lora)
    return next(tensor.parameter for tensor in plan.tensors if tensor.parameter.name == name)


def labels(declared: Parameter) -> torch.Tensor:
    """For each row the number of its matrix."""
    period = torch.arange(len(declared.alternating)).repeat_interleave(torch.tensor(declared.alternating))
    return period.repeat(math.prod(declared.shape[:-1]) // len(period))


def test_rows_of_a_tensor_are_declared_as_modules_read_them() -> None:
    qkv = parameter(LLAMA, "blocks.0.attn.qkv.weight")
    assert qkv.matrices == ((16, 16), (8, 16), (8, 16))
    for number, read in enumerate(by_kind(labels(qkv).view(1, 1, 2, 4, 4))):  # 2 groups of 4 heads of 4 channels
        assert (read == number).all()
    kv = parameter(TRANSFORMER, "blocks.1.cross.kv.weight")
    assert kv.matrices == ((16, 16), (16, 16))
    for number, read in enumerate(labels(kv).unflatten(0, (-1, 2, 4)).unbind(1)):  # as CrossAttention does
        assert (read == number).all()
    assert parameter(LLAMA, "blocks.0.mlp.gate_up.weight").matrices == ((40, 16), (40, 16))
    assert parameter(SMALL, "blocks.1.mlp.up.weight").matrices == ((40, 16),)
    assert parameter(LLAMA, "blocks.0.attn.qkv.lora_a", 2).matrices == ((2, 16),)
    assert parameter(LLAMA, "blocks.0.attn.qkv.lora_b", 2).matrices == ((16, 2), (8, 2), (8, 2))


@pytest.mark.parametrize(("precision", "wide", "master"), [("fp32", 4, 0), ("bf16", 4, 4), ("fp64", 8, 0)])
def test_bytes_of_the_state(precision: str, wide: int, master: int) -> None:
    """One momentum for the H elements of the matrices, two moments for the others, master copies for all P."""
    plan, _ = planned(LLAMA, precision)
    muon = sum(hidden(plan).values())
    rest = plan.num_parameters - muon
    assert state_bytes(plan).optimizer_bytes == wide * (muon + 2 * rest) + master * plan.num_parameters


def test_state_is_the_momentum_and_zero() -> None:
    plan, config = planned(LLAMA)
    values = tensors(plan, 0, torch.float32)
    optimizer = optimizer_of(plan, config, values)
    shapes = {name: tuple(value.shape) for name, value in optimizer.tensors().items() if name.startswith("optimizer.")}
    for tensor in plan.trained:
        states = ["momentum_buffer"] if tensor.orthogonalized else ["exp_avg", "exp_avg_sq"]
        for state in states:
            assert shapes.pop(f"optimizer.{state}.{tensor.parameter.name}") == tensor.parameter.shape
    assert all(name.startswith("optimizer.step.") for name in shapes)
    optimizer.step(tensors(plan, 1, torch.float32), 1e-2)
    momentum = optimizer.tensors()["optimizer.momentum_buffer.blocks.0.mlp.gate_up.weight"]
    assert momentum.any()  # a view of the state, not a copy


def test_gradients_that_are_not_finite_change_nothing() -> None:
    plan, config = planned(SMALL)
    values = tensors(plan, 0, torch.float32)
    before = [value.clone() for value in values]
    optimizer = optimizer_of(plan, config, values)
    gradients = tensors(plan, 1, torch.float32)
    gradients[0][0, 0] = math.inf  # of the embedding: the matrices' own gradients are finite
    assert optimizer.step(gradients, 1e-2) == math.inf
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))
    assert not any(v.any() for name, v in optimizer.tensors().items() if name.startswith("optimizer."))


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_keeps_directions_and_equalises_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    coefficients = (3.4445, -4.7750, 2.0315)
    found = orthogonal(matrix, coefficients, 5, 1e-7)
    assert found.dtype == dtype
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = s / s.square().sum().sqrt()
    for _ in range(5):  # of each singular value, by the same polynomial
        values = coefficients[0] * values + coefficients[1] * values**3 + coefficients[2] * values**5
    expected = u @ values.diag() @ vh
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-4)
    assert not orthogonal(torch.zeros(shape, dtype=dtype), coefficients, 5, 1e-7).any()


def test_rounds_have_each_matrix_once_and_equal_work() -> None:
    """Twelve layers on eight ranks: 48 tensors in 6 rounds, those of a round as expensive as each other."""
    plan, _ = planned(SMALL | {"num_layers": 12, "ffn_dim": 64}, parallel={"dp_replicate": 8})
    found = rounds(plan, 0)
    assert len(found) == 6
    names = [tensor.parameter.name for one in found for tensor in one.tensors]
    assert sorted(names) == sorted(hidden(plan))
    work = [[flops(tensor.parameter) for tensor in one.tensors] for one in found]
    assert sum(max(one) - min(one) for one in work) <= max(map(max, work))


def test_keys_of_muon_are_no_part_of_other_trajectories() -> None:
    """A run of an earlier version, without these keys, goes on."""
    plan = build(Config.model_validate({"model": SMALL}), None, 1)
    assert not any("muon" in key for key in plan.trajectory())
    found, _ = planned(SMALL, "bf16")
    trajectory = found.trajectory()
    assert trajectory["optimizer.muon_precision"] == "bf16"
    assert trajectory["optimizer.muon_learning_rate"] == trajectory["optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("parallel", "collected", "returned"),
    [
        ({"dp_replicate": 4}, 0, 3 / 4),
        ({"dp_shard": 4}, 3 / 16, 3 / 16),
        ({"tp": 4}, 3 / 16, 3 / 16),
        ({"cp": 2, "tp": 2}, 1 / 8, 3 / 8),
        ({"dp_replicate": 2, "dp_shard": 2}, 1 / 8, 3 / 8),
        ({"pp": 2, "dp_shard": 2}, 1 / 4, 1 / 4),
    ],
)
def test_bytes_that_a_rank_sends(parallel: dict[str, int], collected: float, returned: float) -> None:
    """Of H elements of matrices on R copies x S shards, N = R S: (S - 1) / S of H / N, and (N - 1) / N of H / S."""
    sizes = {"num_layers": 4, "ffn_dim": 64}
    plan, _ = planned(SMALL | sizes, "bf16", parallel=parallel)
    sent = [t for t in plan.traffic if t.collective is Collective.ALL_TO_ALL and t.stage in (None, 0)]
    found = sum(t.wire_bytes(plan.mesh.degree(t.axis)) for t in sent)
    elements = sum(hidden(plan).values()) / plan.mesh.pp
    assert found == pytest.approx(2 * elements * (collected + returned))
    assert wire_bytes(plan) >= found


@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 2}, {"dp_shard": 2, "zero_stage": 1}])
def test_offload_copies_the_updates_both_ways(parallel: dict[str, int]) -> None:
    """In the format of the products; everything else is copied as with AdamW."""
    degrees = {**parallel, "offload": "optimizer"}
    sections = {"model": SMALL | {"ffn_dim": 64}, "train": {"global_batch_size": 48}, "parallel": degrees}
    ranks = 2 if parallel else 1
    adamw = build(Config.model_validate(sections), None, ranks)
    muon = build(Config.model_validate(sections | {"optimizer": {"kind": "muon"}}), None, ranks)
    share = sum(hidden(muon).values()) // muon.mesh.dp_shard
    assert inside_bytes(muon) - inside_bytes(adamw) == 2 * 4 * share


# -- runs

WORDS = ("optimizer.kind=muon", "optimizer.decay_steps=20", "train.num_steps=6", "train.check_every=1")
WORDS += ("train.eval_every=3",)


@pytest.mark.slow
def test_a_run_goes_on_bitwise_and_in_another_layout(project: Path, forker: Forker) -> None:
    shards = (*WORDS, "train.precision=fp64", "parallel.dp_shard=2", "parallel.zero_stage=1")
    whole = forker.train(project, "muon-whole", 2, *shards)
    for name, ranks, words in (("bitwise", 2, shards), ("moved", 1, (*WORDS, "train.precision=fp64"))):
        forker.train(project, f"muon-{name}", 2, *shards, "train.num_steps=3")
        found = forker.train(project, f"muon-{name}", ranks, *words, resume=True)
        same, other = saved(found), saved(whole)
        assert any("momentum_buffer" in tensor for tensor in same)
        assert same.keys() == other.keys()
        if name == "bitwise":
            assert losses(found) == losses(whole)
            assert all(torch.equal(tensor, other[key]) for key, tensor in same.items())
        else:
            assert_same(found, whole, 1e-9)
            assert all(torch.allclose(tensor, other[key], rtol=1e-7, atol=1e-12) for key, tensor in same.items())


def saved(run: RunFolder) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    return dict(read_tensors(run.checkpoints / "step_00000006"))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.dp_shard=2", "parallel.zero_stage=1"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.dp_shard=2", "parallel.offload=all"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.tp=2",), marks=pytest.mark.slow),
    ],
)
def test_offload_walks_the_trajectory_without(
    project: Path, forker: Forker, ranks: int, words: tuple[str, ...]
) -> None:
    """A CPU stands for the device, too."""
    words = (*WORDS, "train.precision=fp64", *words)
    name = f"muon-{ranks}-{len(words)}-{words[-1][-5:]}"
    away = () if "parallel.offload=all" in words else ("parallel.offload=optimizer",)
    here = tuple(word for word in words if "offload" not in word)
    expected = forker.train(project, f"{name}-here", ranks, *here)
    assert_same(forker.train_on_cpus(project, f"{name}-away", ranks, *words, *away), expected, 1e-9)


def test_ranks_skip_a_step_together(project: Path, forker: Forker) -> None:
    words = (*WORDS, "parallel.dp_shard=2")
    run = forker.train(project, "muon-skipped", 2, *words, fault="infinite_gradient")
    assert [event["step"] for event in run.read_events() if event["kind"] == "skipped_step"] == [3]
    assert len(losses(run)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2", "dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2"])
def test_adapters_on_layouts(project: Path, forker: Forker, layout: str) -> None:
    words = (*WORDS, "train.precision=fp64", "lora.rank=3", "lora.whole=norm_1", "train.microbatch_size=2")
    keys = [f"parallel.{key}" for key in layout.split()]
    name, ranks = layout.replace("=", "").replace(" ", "-"), 2 * len(keys)
    expected = forker.train(project, f"muon-lora-{name}-one", 1, *words)
    assert_same(forker.train(project, f"muon-lora-{name}", ranks, *words, *keys), expected, 1e-9)
    assert losses(expected)[-1] < losses(expected)[0]


@pytest.mark.slow
def test_prove_tries_it(project: Path) -> None:
    words = ("prove", "run.toml", "optimizer.kind=muon", "--layouts", "dp_shard=2; tp=2", "--steps", "3")
    done = codescent(project, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" same") >= 2


def test_without_bf16_instructions_the_products_are_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    coefficients = (3.4445, -4.775, 2.0315)
    monkeypatch.setattr(products, "_widens_bf16", True)
    found = orthogonal(matrix, coefficients, 5, 1e-7)
    assert torch.equal(found, orthogonal(matrix.float(), coefficients, 5, 1e-7).bfloat16())
