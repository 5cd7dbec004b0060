"""In: products in 8-bit floats, emulated on a CPU. Out: values and gradients of a reference with the same rounding, the
same losses on every layout, refusals, prices. Does not run on a device that has such products."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, losses, make_project

from codescent.base.errors import UserError
from codescent.build import build
from codescent.clusters.cluster import Software
from codescent.clusters.files import load_cluster
from codescent.config.sections import Config
from codescent.cost.device_time import spent
from codescent.cost.operators import operators_of_depth
from codescent.operators.activations import EXACT_GELU, ActivatedThenLinear
from codescent.operators.fp8 import NARROW, WIDE_RANGE, Fp8, quantized
from codescent.operators.gate_up import GateUp
from codescent.operators.linear import Linear
from codescent.train.machine import refuse_device

LARGEST = {NARROW: 448.0, WIDE_RANGE: 57344.0}


def rounded(matrix: torch.Tensor, number_format: torch.dtype, *, by_row: bool) -> torch.Tensor:
    """What a matrix stands for in fp8, number by number: the largest power of two that fits is looked for."""
    found = matrix.clone()
    for part in found if by_row else [found]:
        amax, factor = float(part.abs().max()), 2.0**-60
        while amax and amax * factor * 2 <= LARGEST[number_format]:
            factor *= 2
        part.copy_((part * factor).to(number_format).to(part.dtype) / factor)
    return found


@pytest.mark.parametrize("number_format", [NARROW, WIDE_RANGE])
@pytest.mark.parametrize("by_row", [True, False])
def test_numbers_are_rounded_as_the_reference_does(number_format: torch.dtype, by_row: bool) -> None:
    """Fault: a factor with which the largest value overflows to NaN, or half of the range is not used."""
    torch.manual_seed(1)
    matrix = torch.randn(5, 32) * torch.tensor([1.0, 1e-6, 448.0, 3e4, 0.0])[:, None]
    matrix[0, 0], matrix[2, 3], matrix[3, 0] = 7.5, 448.0 * 4, 57344.0
    values, factors = quantized(matrix, number_format, by_row=by_row)
    assert values.dtype is number_format
    assert torch.equal(values.to(torch.float32) / factors, rounded(matrix, number_format, by_row=by_row))
    assert all(math.log2(float(one)).is_integer() for one in factors.flatten())
    assert bool(values.to(torch.float32).isfinite().all())


KINDS = {
    "linear": lambda: Linear(16, 32, True),
    "activated": lambda: ActivatedThenLinear(16, 32, True, EXACT_GELU),
    "gate and up": lambda: GateUp(16, 32),
}


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_same_rounding(kind: str, recipe: str) -> None:
    """Fault: an operand that is not rounded, or along the wrong dim; a gradient of other operands."""
    torch.manual_seed(2)
    layer = KINDS[kind]().double()
    layer.fp8 = Fp8(recipe, emulated=True)
    for one in layer.parameters():
        torch.nn.init.normal_(one)
    x = torch.randn(2, 3, 16).double().requires_grad_()
    read = layer.activation.plain(x) if isinstance(layer, ActivatedThenLinear) else x
    halves = layer.weight.unbind(1) if kind == "gate and up" else [layer.weight]
    y, by_row = layer(x), recipe == "rowwise"
    d_y = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, layer.weight], d_y)
    d_read, d_weights = torch.zeros_like(read).flatten(0, 1), []
    for weight, result, d_result in zip(halves, y if len(halves) > 1 else [y], d_y if len(halves) > 1 else [d_y]):
        d_NO, x_NI, w = d_result.flatten(0, -2), read.detach().flatten(0, 1), weight.detach()
        wanted = rounded(x_NI, NARROW, by_row=by_row) @ rounded(w, NARROW, by_row=by_row).t()
        wanted = wanted if layer.bias is None else wanted + layer.bias.detach()
        torch.testing.assert_close(result.detach().flatten(0, -2), wanted)
        narrow = NARROW if by_row else WIDE_RANGE
        d_read += rounded(d_NO, narrow, by_row=by_row) @ rounded(w.t().contiguous(), NARROW, by_row=by_row).t()
        if by_row:
            d_weights.append(d_NO.t() @ x_NI)
        else:
            columns = rounded(d_NO.t().contiguous(), narrow, by_row=False)
            d_weights.append(columns @ rounded(x_NI.t().contiguous(), NARROW, by_row=False).t())
    (d_x,) = torch.autograd.grad(read, [x], d_read.view_as(read)) if read is not x else (d_read.view_as(x),)
    torch.testing.assert_close(found[0], d_x)
    d_weight = torch.stack(d_weights, 1) if len(halves) > 1 else d_weights[0]
    torch.testing.assert_close(found[1], d_weight)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_torchs_scaled_product_is_what_is_emulated(recipe: str) -> None:
    """Fault: scales in place of their reciprocals, or of the rows of the other operand."""
    torch.manual_seed(3)
    a, b = torch.randn(32, 64) * 3, torch.randn(48, 64) * torch.arange(1, 49)[:, None]
    try:
        found = Fp8(recipe, emulated=False).multiply(a.bfloat16(), b.bfloat16())
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch has no scaled product on a CPU: {error}")
    wanted = Fp8(recipe, emulated=True).multiply(a.bfloat16().float(), b.bfloat16().float())
    assert found.dtype is torch.bfloat16
    assert float((found.float() - wanted).abs().max()) < 2**-8 * float(wanted.abs().max())


WORDS = (
    "train.fp8_emulated=true",
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.num_layers=4",
    "train.global_batch_size=12",
    "train.microbatch_size=3",
    "train.eval_every=2",
    "train.num_steps=4",
    "train.check_every=1",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp_replicate=2": (2, ()),
    "dp_shard=3": (3, ("train.microbatch_size=2",)),
    "dp_shard=3 zero_stage=2": (3, ("train.microbatch_size=2",)),
    "cp=2 recompute=full": (2, ()),
    "pp=2": (2, ()),
    "pp=2 dp_shard=2": (4, ()),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("fp8")
    make_project(project)
    return Runs(project, forker, WORDS, ("train.microbatch_size=12",))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(runs: Runs, layout: str, kind: str) -> None:
    """Fault: a factor of what a rank or a micro-batch has, in place of a row."""
    ranks, words = LAYOUTS[layout]
    more = ("train.fp8=rowwise", "train.precision=fp64", f"model.kind={kind}")
    more += ("model.num_kv_heads=2", "model.hidden_dim=24") if kind == "llama" else ()
    found = runs.run(ranks, *(f"parallel.{key}" for key in layout.split()), *words, *more)
    assert_same(found, runs.of_one(*more), 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_of_500_steps_is_that_of_bf16(runs: Runs) -> None:
    """Fault: rounding that training does not stand. Emulated: a device was not asked."""
    words = (
        *("train.precision=bf16", "train.num_steps=500", "train.eval_every=500", "model.num_layers=2"),
        *("model.hidden_dim=64", "model.num_heads=4", "train.global_batch_size=8", "train.microbatch_size=8"),
        *("optimizer.learning_rate=3e-3", "train.check_every=0"),
    )
    means = {}
    for recipe in ("none", "rowwise", "tensorwise"):
        found = losses(runs.run(1, *words, f"train.fp8={recipe}"))
        means[recipe] = sum(found[-50:]) / 50
    print(means)
    assert means["rowwise"] == pytest.approx(means["none"], rel=5e-3)
    assert means["tensorwise"] == pytest.approx(means["none"], rel=5e-3)


def config(train: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "seq_len": 16, "vocab_size": 31}
    fp8 = {"fp8": "rowwise", "precision": "bf16", "global_batch_size": 4, "microbatch_size": 4, **(train or {})}
    found = {"model": sizes, "train": fp8}
    return Config.model_validate({**found, **{name: found.get(name, {}) | one for name, one in sections.items()}})


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ({"parallel": {"tp": 2}}, 2, "parallel.tp = 2 would divide rows that have one factor"),
        ({"parallel": {"recompute": "selective"}}, 1, 'parallel.recompute = "selective" keeps other products'),
        ({"parallel": {"pp": 2, "schedule": "zero-bubble"}}, 2, "cannot wait, as zero-bubble wants"),
        ({"lora": {"rank": 2}}, 1, "lora.rank adds products of adapters"),
        ({"train": {"fp8": "tensorwise", "microbatch_size": 2}}, 1, "must be one micro-batch on one rank"),
        ({"train": {"fp8": "tensorwise"}, "parallel": {"dp_replicate": 2}}, 2, "must be one micro-batch on one rank"),
        ({"train": {"fp8": "tensorwise"}, "parallel": {"data_parallel": 2}}, 1, "must be one micro-batch on one rank"),
        ({"model": {"hidden_dim": 36}}, 1, "must be multiples of 16: attn.qkv (108 x 36), attn.out (36 x 36), mlp.up"),
        (
            {"model": {"kind": "llama", "ffn_dim": 40, "num_experts": 2, "experts_per_token": 1, "shared_dim": 24}},
            1,
            "must be multiples of 16: mlp.shared.gate_up (24 x 32), mlp.shared.down (32 x 24); nearest",
        ),
    ],
)
def test_what_cannot_have_products_in_fp8(given: dict[str, Any], ranks: int, said: str) -> None:
    """Fault: losses that depend on the layout, or a kernel that fails in the first step."""
    with pytest.raises(UserError, match=re.escape(said)):
        build(config(**given), 31, ranks)


def test_devices_and_precisions_without_fp8() -> None:
    """Fault: a run that begins and falls back, without a word."""
    with pytest.raises(ValueError, match="products in fp8 have results in bf16"):
        config({"precision": "fp32"})
    plan = build(config(), 31, 1)
    with pytest.raises(UserError, match=r"no products in fp8; NVIDIA GPUs since compute capability 8\.9"):
        refuse_device(plan, torch.device("cpu"))
    refuse_device(build(config({"fp8_emulated": True}), 31, 1), torch.device("cpu"))


def test_a_price_counts_products_in_fp8() -> None:
    """Fault: products in fp8 priced as those in bf16, or the gradient of a weight as if it were in fp8, too."""
    cluster = load_cluster("h100-sxm")
    sizes = {"hidden_dim": 4096, "num_heads": 32, "seq_len": 2048}
    seconds = {}
    for recipe in ("none", "rowwise", "tensorwise"):
        plan = build(config({"fp8": recipe}, model=sizes), 31, 1)
        found = operators_of_depth(plan, 1, "cuda")
        forward, backward = spent(found, cluster.device, Software(), "bf16", 2)
        seconds[recipe] = forward.products_s, backward.products_s
    assert seconds["rowwise"][0] == seconds["tensorwise"][0] < 0.8 * seconds["none"][0]
    assert seconds["tensorwise"][1] < seconds["rowwise"][1] < seconds["none"][1]
