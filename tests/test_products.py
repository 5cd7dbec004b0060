"""In: bf16 matrices. Out: products in fp32, rounded once, where the processor has no bf16, and no bf16 product is left.
Does not measure speed (benchmarks/peers.py --isa does)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forker import Forker
from runs import called, environment, losses, make_project
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.config.load import load
from codescent.models import construct, facts_of, shape_of
from codescent.models.bert.declare import BertShape
from codescent.models.bert.module import Bert
from codescent.operators import products
from codescent.record import RunFolder
from codescent.train import choices, machine

HALF_ULP = 2.0**-8
"""Largest relative error of one rounding to bf16 (8 bits)."""


@pytest.fixture
def widening() -> Iterator[None]:
    products.widen_bf16(True)
    yield
    products.widen_bf16(False)


def bf16(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """Each element is the exact one, rounded; sums in fp32 may differ by their own last bits."""
    assert found.dtype == torch.bfloat16
    assert float(((found.double() - exact).abs() - HALF_ULP * exact.abs()).max()) < 1e-4


def relative(found: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest element."""
    return float((found.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max())


class NoBf16Product(TorchDispatchMode):
    """Counts the products of bf16 matrices that reach torch."""

    PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)]
        if function.name().startswith(self.PRODUCTS) and any(one.dtype == torch.bfloat16 for one in given):
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("limit", [16 << 20, 10_000], ids=["whole", "in parts"])
@pytest.mark.parametrize("sizes", [(30, 50, 400), (400, 50, 30), (30, 700, 90)], ids=["columns", "rows", "inner"])
def test_a_product_is_rounded_once(
    widening: None, sizes: tuple[int, int, int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WIDE_ELEMENTS", limit)
    rows, inner, columns = sizes
    a, b, bias = bf16(rows, inner, seed=0), bf16(columns, inner, seed=1).t(), bf16(columns, seed=2)
    exact = a.double() @ b.double()
    assert_rounded_once(products.mm(a, b), exact)
    assert_rounded_once(products.mm(a, b, bias_M=bias), exact + bias.double())
    out = bf16(rows, columns + 3, seed=3)
    assert_rounded_once(products.mm(a, b, out=out[:, :columns]), exact)
    assert_rounded_once(out[:, :columns], exact)
    before = bf16(rows, columns, seed=4)
    assert_rounded_once(products.addmm_(before.clone(), a, b, 0.5), before.double() + 0.5 * exact)


def test_gradients_of_a_linear_layer_and_of_pairs_are_rounded_once(widening: None) -> None:
    x, weight, bias = (bf16(*shape, seed=5).requires_grad_() for shape in ((2, 5, 24), (16, 24), (16,)))
    q, k = (bf16(2, 3, 7, 8, seed=seed).requires_grad_() for seed in (6, 7))
    for mine, reference, inputs in (
        (lambda *of: products.linear(*of), F.linear, [x, weight, bias]),
        (lambda *of: products.matmul(of[0], of[1].mT), lambda *of: of[0] @ of[1].mT, [q, k]),
    ):
        exact = [one.detach().double().requires_grad_() for one in inputs]
        y, expected = mine(*inputs), reference(*exact)
        upstream = bf16(*y.shape, seed=8)
        assert_rounded_once(y.detach(), expected.detach())
        gradients = torch.autograd.grad(y, inputs, upstream)
        for found, wanted in zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
            assert found.dtype == torch.bfloat16
            assert relative(found, wanted) < 6 * HALF_ULP
        assert gradients[1].is_contiguous()  # as the weight: it is not copied before it is summed


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_fp32(widening: None, masked: bool) -> None:
    inputs = [bf16(2, 3, 9, 8, seed=seed).transpose(1, 2).contiguous().requires_grad_() for seed in range(3)]
    seen = torch.arange(3)[None, None, None, :] < torch.tensor([3, 2])[:, None, None, None] if masked else None
    exact = [one.detach().double().requires_grad_() for one in inputs]
    y, expected = products.attention(*inputs, seen), F.scaled_dot_product_attention(*exact, seen)
    upstream = bf16(*y.shape, seed=8)
    pairs = zip(
        [y, *torch.autograd.grad(y, inputs, upstream)],
        [expected, *torch.autograd.grad(expected, exact, upstream.double())],
        strict=True,
    )
    for found, wanted in pairs:
        assert found.dtype == torch.bfloat16
        assert relative(found, wanted) < 6 * HALF_ULP


def test_nothing_changes_with_bf16_instructions_or_in_fp32(widening: None) -> None:
    a, b = torch.randn(9, 8), torch.randn(8, 7)
    assert torch.equal(products.mm(a, b), torch.mm(a, b))
    products.widen_bf16(False)
    a, b = a.bfloat16(), b.bfloat16()
    assert torch.equal(products.mm(a, b), torch.mm(a, b))
    assert torch.equal(products.linear(a, b.t()), F.linear(a, b.t()))
    assert products.widened(a) is a


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("model.dropout=0.1", "train.head_chunk_tokens=8"), marks=pytest.mark.slow),
        ("model.kind=llama", "model.num_kv_heads=1", "lora.rank=2", "parallel.recompute=selective"),
    ],
    ids=["gpt2 with dropout", "llama with adapters"],
)
def test_a_run_computes_no_bf16_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Where the trial says so; the losses are near those of fp32."""
    make_project(tmp_path)
    monkeypatch.setattr(machine, "faster_products", lambda seconds: "fp32")
    common = ("train.num_steps=3", "train.eval_every=0", "log.sample_tokens=0", *words)
    with NoBf16Product() as mode:
        done = called(tmp_path, "train", "run.toml", "run.name=bf16", "train.precision=bf16", *common)
        assert done.returncode == 0, done.stderr
    in_trial = 5 * 3  # the trial computes them
    assert len(mode.found) == in_trial, mode.found[in_trial:]
    run = RunFolder.open(tmp_path / "runs" / "bf16")
    found = run.read_environment()["bf16_products"]
    assert found["choice"] == "fp32"
    assert set(found["trial"]) == {"bf16", "fp32"}
    assert called(tmp_path, "train", "run.toml", "run.name=fp32", *common).returncode == 0
    assert not products.widens(bf16(1, seed=0))  # the second run is in fp32, and has switched it off
    assert losses(run) == pytest.approx(losses(RunFolder.open(tmp_path / "runs" / "fp32")), rel=2e-2)


def test_every_command_sums_products_in_fp32_on_a_device(tmp_path: Path) -> None:
    """torch lets cuBLAS round parts of a sum to bf16; its flags are process-wide, and can be read without a device."""
    make_project(tmp_path)
    flags, run = torch.backends.cuda.matmul, "runs/sums"
    words = ("train.eval_every=0", "log.sample_tokens=0")
    for command in (
        ("train", "run.toml", "run.name=sums", "train.num_steps=1", *words),
        ("train", "--resume", run, "train.num_steps=2"),
        ("sample", run, "--tokens", "1"),
    ):
        flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
        done = called(tmp_path, *command)
        assert done.returncode == 0, done.stderr
        assert not flags.allow_bf16_reduced_precision_reduction, command
        assert not flags.allow_fp16_reduced_precision_reduction, command


def test_muon_computes_no_bf16_product_in_a_run_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(tmp_path)
    monkeypatch.setattr(machine, "faster_products", lambda seconds: "fp32")
    words = ("train.num_steps=2", "train.eval_every=0", "log.sample_tokens=0", "optimizer.kind=muon")
    try:
        with NoBf16Product() as mode:
            done = called(tmp_path, "train", "run.toml", "run.name=muon", *words, "optimizer.muon_precision=bf16")
    finally:
        products.widen_bf16(False)
    assert done.returncode == 0, done.stderr
    assert len(mode.found) == 5 * 3  # the trial computes them
    assert RunFolder.open(tmp_path / "runs" / "muon").read_environment()["bf16_products"]["choice"] == "fp32"


def test_a_bert_computes_no_bf16_product(widening: None) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "ffn_dim": 24, "vocab_size": 31, "seq_len": 8}
    shape = shape_of("bert", sizes | {"head": "mlm"}, dropout=0.0)
    assert isinstance(shape, BertShape)
    module = Bert(shape, 1024, "cpu", None).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.arange(16).view(2, 8)
    with NoBf16Product() as mode:
        module(tokens, tokens.roll(1, 1), segments_BT=tokens % 2, lengths_B=torch.tensor([8, 5])).backward()
    assert mode.found == []


@pytest.mark.parametrize("norm", ["last", "first"])
@pytest.mark.parametrize("embedding", ["tied", "untied", "none"])
def test_a_transformer_computes_no_bf16_product(widening: None, embedding: str, norm: str) -> None:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "hidden_dim": 16, "ffn_dim": 24}
    sizes |= {"vocab_size": 31, "source_len": 4, "target_len": 4}
    shape = shape_of("transformer", {**sizes, "embedding": embedding, "norm": norm}, dropout=0.0)
    module = construct(facts_of("transformer", shape), "cpu").to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    inputs = bf16(2, 8, 16, seed=0) if embedding == "none" else torch.arange(16).view(2, 8)
    lengths = {"source_lengths_B": torch.tensor([3, 4]), "target_lengths_B": torch.tensor([4, 2])}
    with NoBf16Product() as mode:
        module(inputs, inputs.roll(1, 1), **lengths).backward()
    assert mode.found == []
    products.widen_bf16(False)
    with NoBf16Product() as mode:
        module(inputs, inputs.roll(1, 1), **lengths).backward()
    assert mode.found  # it would have seen them


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_attention_over_a_split_sequence_computes_no_bf16_product(
    tmp_path: Path, forker: Forker, exchange: str
) -> None:
    assert forker.call("ring_ranks:bf16_products", tmp_path, 2, method=exchange) == [[], []]


@pytest.mark.parametrize(
    ("native", "widened", "choice"),
    [(0.6, 1.6, "bf16"), (1.0, 0.9, "bf16"), (23.0, 4.7, "fp32"), (374.0, 5.0, "fp32"), (1334.0, 15.7, "fp32")],
)
def test_choice_of_products(native: float, widened: float, choice: str) -> None:
    assert machine.faster_products({"bf16": native, "fp32": widened}) == choice


def test_a_processor_of_the_same_name_with_other_instructions_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may hide instructions."""
    make_project(tmp_path)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "faster_products", lambda seconds: "bf16")
    words = ("train.precision=bf16", "train.eval_every=0", "optimizer.decay_steps=4", "run.name=moved")

    def environment_after(num_steps: int, flags: str) -> tuple[dict[str, Any], str]:
        (tmp_path / "cpuinfo").write_text(f"model name\t: One 1\nflags\t\t: fpu {flags}\n\nmodel name\t: Two\n")
        resume = ["--resume"] if num_steps > 1 else []
        done = called(tmp_path, "train", "run.toml", *words, f"train.num_steps={num_steps}", *resume)
        assert done.returncode == 0, done.stderr
        return RunFolder.open(tmp_path / "runs" / "moved").read_environment(), " ".join(done.stdout.split())

    try:
        begun, _ = environment_after(1, "avx512f avx512_bf16")
        assert begun["processor"] == "One 1"
        assert begun["instructions"].endswith(" avx512f avx512_bf16")
        kept, said = environment_after(2, "avx512f avx512_bf16 other")
        assert kept["bf16_products"] == {"choice": "bf16", "trial": choices.KEPT}
        assert "changed since" not in said
        monkeypatch.setattr(machine, "faster_products", lambda seconds: "fp32")
        again, said = environment_after(3, "avx512f")
    finally:
        products.widen_bf16(False)
    assert again["bf16_products"]["choice"] == "fp32"
    assert set(again["bf16_products"]["trial"]) == {"bf16", "fp32"}
    assert "changed since the last command: instructions " in said
    assert "so kernels, products and threads are chosen again" in said
    assert "bf16 products are computed: fp32, before bf16; from here on the losses differ by rounding" in said


def test_a_replay_computes_with_what_the_run_has_chosen() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    config = load("default", []).config
    try:
        for threads, kernels, of_bf16 in ((2, "fast", "fp32"), (1, "exact", "bf16")):
            recorded = {"matmul": {"choice": kernels}, "bf16_products": {"choice": of_bf16}, "num_threads": threads}
            assert choices.restore(config, {**recorded, "compile": {"choice": "none"}}) == "none"
            assert torch.get_num_threads() == threads
            assert torch.get_float32_matmul_precision() == machine.TORCH_SETTING[kernels]
            assert products._widens_bf16 is (of_bf16 == "fp32")
    finally:
        products.widen_bf16(False)
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def test_choices_are_kept_if_every_rank_is_on_a_known_kind_of_machine() -> None:
    one, two, three = ({fact: f"{fact} {number}" for fact in choices.KIND} for number in (1, 2, 3))
    before = {
        "machines": [one, two],
        "world_size": 4,
        "matmul": {"choice": "fast"},
        "bf16_products": None,
        "threads": {"choice": 1, "by_most": {"2": 1}},
    }
    here: dict[str, Any] = {"machines": [two], "world_size": 4}
    assert choices._kept(before, here) == {"matmul": "fast", "threads": {"2": 1}}
    assert choices._moved(before, here) == []
    assert choices._kept(before, {**here, "world_size": 2}) == {"matmul": "fast"}
    assert choices._kept(before, {"machines": [one, three], "world_size": 4}) == {}
    (line,) = choices._moved(before, {"machines": [one, three], "world_size": 4})
    assert "cores cores 3, before cores 1" in line
    old = {key: value for key, value in before.items() if key != "machines"}  # of an earlier version
    assert choices._kept(old, here) == {}
    assert choices._moved({}, here) == []


def test_a_choice_that_changed_on_resume_is_said() -> None:
    before = {"matmul": {"choice": "exact"}, "bf16_products": {"choice": "bf16"}}
    now = {"matmul": {"choice": "exact"}, "bf16_products": {"choice": "fp32"}, "threads": {"choice": 2}}
    (line,) = choices.changed(before, now)
    assert line.startswith("number format in which bf16 products are computed: fp32, before bf16")
    assert choices.changed(now, now) == []
    assert choices.changed({}, now) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks(widening: None) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 64, "seq_len": 16}
    module = construct(facts_of("gpt2", shape_of("gpt2", sizes, dropout=0.0)), "cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    tokens = torch.arange(32).view(2, 16)
    names = list(dict(module.named_parameters()))
    expected = torch.autograd.grad(module(tokens, tokens.roll(1, 1)), list(module.parameters()))
    assert isinstance(module.blocks, torch.nn.ModuleDict)
    for block in module.blocks.values():
        block.compile()
    found = torch.autograd.grad(module(tokens, tokens.roll(1, 1)), list(module.parameters()))
    for name, mine, reference in zip(names, found, expected, strict=True):
        assert relative(mine, reference) < 0.05, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_emulated_processor_without_bf16(tmp_path: Path) -> None:
    """oneDNN is told to use AVX2 only. On two ranks; no line advises fp32, and the losses are those of fp32."""
    make_project(tmp_path)
    words = ("train.num_steps=6", "train.eval_every=0", "log.sample_tokens=0")
    runs = {}
    for precision in ("fp32", "bf16"):
        command = [sys.executable, "-m", "codescent", "train", "run.toml", f"run.name={precision}", "--ranks", "2"]
        done = subprocess.run(
            [*command, f"train.precision={precision}", *words],
            cwd=tmp_path,
            env=environment(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2", PATH=os.environ["PATH"]),
            text=True,
            capture_output=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "train.precision" not in done.stdout + done.stderr  # no advice to take another
        runs[precision] = RunFolder.open(tmp_path / "runs" / precision)
    assert runs["bf16"].read_environment()["bf16_products"]["choice"] == "fp32"
    assert runs["fp32"].read_environment()["bf16_products"] is None
    assert losses(runs["bf16"]) == pytest.approx(losses(runs["fp32"]), rel=2e-2)
