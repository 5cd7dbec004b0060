"""In: blocks compiled by torch.compile, of each kind, precision, recompute and layout, on the meta device. Out: CUDA
would keep for backward what the plan declares of compiled blocks.
Does not compute a number and compiles no kernel, but in one slow test: torch's partitioner chooses what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import kept_ranks
import pytest
import torch
import torch._functorch.partitioners as partitioners
import torch.nn.functional as F
from declared_ranks import trainer_of
from device_spy import make_tables
from kept_cases import of_kind
from test_meta_activations import RMSNorm, kept_by, kernels_of_cuda
from test_meta_device import BATCH, KINDS, LAYOUTS, Case, batch, numbers, parts_of
from torch import Tensor

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.cost.activations import bytes_by_chunk
from codescent.operators import compiled
from codescent.plan.activations import COMPILED, CPU

PARTITIONED = "aot_eager_decomp_partition"
"""A backend that divides forward and backward as inductor does, and then computes operator by operator."""
AT_LEAST = 0.95
"""With dropout the declared bytes are a bound. The sizes here are small; at 1024 positions it is 0.9999."""


def rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    """The compiler sees the operator that CUDA has."""
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]
        return y
    return RMSNorm.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def compiled_for_cuda(parts: Iterable[Any]) -> Iterator[None]:
    """The blocks are compiled, with the operators of CUDA. Without the state of random numbers, which meta has not."""
    torch.compiler.reset()
    with kernels_of_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "rms_norm", rms_norm)
        patch.setattr(partitioners, "functionalize_rng_ops", lambda joint, forward, backward, *_: (forward, backward))
        patch.setattr(compiled, "fuses", lambda _: True)
        patch.setattr(compiled, "alone", lambda function: function)
        for part in parts:
            for block in part.blocks.values():
                block.compile(backend=PARTITIONED)
        yield


def kept_and_declared(case: Case) -> tuple[list[int], list[int]]:
    """Bytes that each chunk keeps, and those that are declared."""
    plan = case.plan()
    assert not plan.uncompiled
    declared = [size for stage in range(plan.mesh.pp) for size in bytes_by_chunk(plan, stage, COMPILED)]
    x, targets, extras = batch(case.kind, TORCH_DTYPE[case.precision])
    sizes = []
    with parts_of(plan) as parts, compiled_for_cuda(parts):
        for part in parts:
            make_tables(part, plan)
            part.set_dropout_context(1, 2, numbers(BATCH))
            x = x if part.embeds else x.detach().requires_grad_()
            more = {**extras, **({"loss_scale": 0.25} if part.ends else {})}
            size, x = kept_by(part, x, (targets,) if part.ends else (), more)
            sizes.append(size)
    return sizes, declared


def check(cases: Iterable[Case]) -> None:
    """What is kept is what is declared; with dropout inside of a block that is not computed again, it is a bound."""
    wrong = {}
    for case in cases:
        sizes, declared = kept_and_declared(case)
        least = AT_LEAST if "dropout" in case.kind and case.recompute in ("none", "selective") else 1.0
        if not all(least * most <= size <= most for size, most in zip(sizes, declared, strict=True)):
            wrong[case] = (sizes, declared)
    assert not wrong


QUICK = [
    Case("gpt2", "bf16", "selective", "", ""),  # which does nothing
    Case("llama", "bf16", "none", "", ""),
]


def test_compiled_blocks_would_keep_on_cuda_what_is_declared() -> None:
    """Catches a declaration that counts what the compiler makes again, or leaves out what it keeps."""
    check(QUICK)


def all_cases(kind: str) -> Iterator[Case]:
    """All whose blocks a run may compile. "zero-bubble" is none of them."""
    for precision in ("bf16", "fp32", "fp64"):
        for recompute in ("none", "selective", "products", "full"):
            for layout in LAYOUTS:
                for lora in ("", "lora"):
                    case = Case(kind, precision, recompute, lora, layout)
                    if (
                        case.has_a_plan()
                        and not case.plan().uncompiled
                        and not (precision == "fp64" and "cp" in layout)
                    ):
                        yield case


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not Case(kind, "fp32", "none", "", "").plan().uncompiled])
def test_compiled_blocks_would_keep_on_cuda_what_is_declared_in_all_cases(kind: str) -> None:
    check(all_cases(kind))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inductor_keeps_what_the_partitioner_chose(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a backend of these tests that keeps other tensors than the one that runs use. On the CPU, for real."""
    case = of_kind(kind, precision=precision)

    def kept_with(backend: str) -> list[int]:
        def compiling(*args: Any, **more: Any) -> Any:
            trainer = trainer_of(*args, **more)
            for chunk in trainer.executor.chunks:
                for block in chunk.part.blocks.values():
                    block.compile(backend=backend)
            return trainer

        torch.compiler.reset()
        monkeypatch.setattr(kept_ranks, "trainer_of", compiling)
        chunks: list[int] = kept_ranks.kept_by_rank(case, 0)["chunks"]
        return chunks

    kept = kept_with("inductor")
    assert kept == kept_with(PARTITIONED)
    assert kept != bytes_by_chunk(kept_ranks.plan_of(case), 0, CPU)  # which is why it is not declared for a CPU
