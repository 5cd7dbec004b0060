"""In: every kind of model, precision, recompute, adapter, layout, on the meta device. Out: no pass waits for it.
Does not compute a number: what it checks holds for every device that is not the CPU. Whole steps: test_fake_ranks."""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from covering import cover
from device_spy import META, PACKAGE, DeviceSpy, fused_kernels, make_tables
from fake_world import fake_world
from torch import Tensor
from torch.distributed import ProcessGroup

from codescent import models
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.build import build
from codescent.config.sections import Config
from codescent.models.part import Part
from codescent.operators.saved_attention import FEW_DOCUMENTS
from codescent.plan import Plan
from codescent.strategies import ThisRank, active

TABLE = Path(__file__).with_name("meta_device.csv")
"""The most launches and bytes of a micro-batch. They may only fall: `python tests/test_meta_device.py` writes lower
numbers into the table, and new cases. Who raises one says why in the commit."""

VOCAB, LENGTH, BATCH = 3000, 32, 2
MASKED = 4
"""Losses of a sample of the task "mlm"."""
WIDTHS = {"num_heads": 4, "hidden_dim": 64}
TWO = {"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1, "source_len": 12, "target_len": 20}
BERT = {"kind": "bert", "num_layers": 2, "seq_len": LENGTH, "ffn_dim": 96}
ONE = {"num_layers": 2, "seq_len": LENGTH}
GEMMA: dict[str, Any] = {
    "norm": "both", "norm_plus_one": True, "activation": "gelu", "scale_embedding": True, "window": 8, "full_every": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"model": {"kind": "gpt2", **ONE}},
    "gpt2-dropout": {"model": {"kind": "gpt2", **ONE, "dropout": 0.1}},
    "llama": {"model": {"kind": "llama", **ONE, "num_kv_heads": 2, "ffn_dim": 96}},
    "llama-qwen 3": {"model": {"kind": "llama", **ONE, "num_kv_heads": 2, "ffn_dim": 96, "qk_norm": "head"}},
    "llama-olmo 2": {
        "model": {"kind": "llama", **ONE, "num_kv_heads": 2, "ffn_dim": 96, "qk_norm": "all", "norm": "output"}
    },
    "gpt2-documents": {"model": {"kind": "gpt2", **ONE}, "data": {"documents": "separate"}},
    "llama-gemma 2": {
        "model": {"kind": "llama", **ONE, "num_kv_heads": 2, "ffn_dim": 96, **GEMMA, "score_cap": 9.0, "logit_cap": 9.0}
    },
    "llama-gemma 3": {
        "model": {
            "kind": "llama",
            **ONE,
            "num_kv_heads": 2,
            "ffn_dim": 96,
            **GEMMA,
            "qk_norm": "head",
            "rope_local_theta": 9.0,
        }
    },
    "transformer": {"model": TWO | {"ffn_dim": 96}},
    "pairs": {
        "model": TWO | {"ffn_dim": 96, "embedding": "untied", "causal": False},
        "data": {"task": "seq2seq", "corpus": "lines.txt"},
    },
    "tensors": {
        "model": TWO | {"ffn_dim": 96, "embedding": "none", "activation": "gelu"},
        "data": {"corpus": "synthetic:60"},
    },
    "mlm": {"model": BERT, "data": {"task": "mlm"}},
    "qa": {"model": BERT, "data": {"task": "qa", "corpus": "train.json", "validation": "dev.json"}},
}
PRECISIONS, RECOMPUTES = ("bf16", "fp32", "fp64"), ("none", "selective", "products", "full")
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "tp": {"tp": 2},
    "tp whole": {"tp": 2, "sequence_parallel": False},
    "cp ring": {"cp": 2},
    "cp all-gather": {"cp": 2, "context": "all-gather"},
}
"""Of two ranks, but the first. All stages are looked at; of the ranks of tp and cp the first."""
WAITS: dict[tuple[str, str], str] = {}
"""What waits for the device all the same, by operator and file, with the reason."""
COPIES = {
    "inference/sampling.py": "sampling reads every token on the host, so it waits for each one anyway",
    "inference/reader.py": "as above; a pass that a graph repeats copies into memory that is there",
    "inference/prompt_logprobs.py": "prompts come from the host, and their log-probabilities go back to it",
    "serving/embedder.py": "texts come from the host, and their vectors go back to it",
    "operators/grouped.py": "the host has waited for the rows of each expert, to know the sizes of their tensors",
    "inference/ranks.py": "rank 0 tells the others what the host has decided",
    "operators/cache.py": "as above; `PagesPass`, which a graph repeats, makes no tensor of numbers",
    "collectives/calls.py": "`codescent collectives` makes the tensors before it measures",
}
"""Files that may copy numbers to a device by `torch.tensor(numbers, device=...)`, which waits, with the reason."""


class Case(NamedTuple):
    kind: str
    precision: str
    recompute: str
    lora: str
    layout: str

    @property
    def ranks(self) -> int:
        """Of its layout."""
        return 2 if self.layout else 1

    def plan(self) -> Plan:
        """Its plan. Raises UserError: there is none."""
        sections: dict[str, dict[str, Any]] = {name: dict(section) for name, section in KINDS[self.kind].items()}
        sections["model"] |= WIDTHS
        sections["train"] = {"precision": self.precision, "global_batch_size": 2 * BATCH, "microbatch_size": BATCH}
        sections["parallel"] = {"recompute": self.recompute, **LAYOUTS[self.layout]}
        if self.lora:
            sections["lora"] = {"rank": 4}
        return build(Config.model_validate(sections), None if self.kind == "tensors" else VOCAB, self.ranks)

    def has_a_plan(self) -> bool:
        """Whether this kind of model has this layout. Masks of dropout are integers, whatever the precision."""
        if "dropout" in self.kind and self.precision != "bf16":
            return False
        try:
            self.plan()
        except UserError:
            return False
        return True


FACTORS = {
    "kind": tuple(KINDS),
    "precision": PRECISIONS,
    "recompute": RECOMPUTES,
    "lora": ("", "lora"),
    "layout": tuple(LAYOUTS),
}


def all_cases() -> Iterator[Case]:
    """Those that have no plan are among them."""
    for layout, *row in product(LAYOUTS, KINDS, PRECISIONS, RECOMPUTES, ("", "lora")):
        yield Case(*row, layout)


def cases_to_write() -> list[Case]:
    """All on one rank or with zero-bubble, which has no adapters; of the other layouts the quick ones."""
    cases = [case for case in all_cases() if case.layout in ("", "zero-bubble") and not (case.layout and case.lora)]
    cases = [case for case in cases if case.recompute != "products" or (case.precision == "bf16" and not case.lora)]
    cases = [case for case in cases if case.has_a_plan()]
    return [*cases, *(case for case in quick_cases() if case not in cases)]


@functools.cache
def quick_cases() -> list[Case]:
    """Cases in which each pair of values meets that any case has."""
    return [Case(**row) for row in cover(FACTORS, lambda row: Case(**row).has_a_plan(), lambda *_: True).rows]


@contextmanager
def parts_of(plan: Plan) -> Iterator[list[Part]]:
    """The parts of all stages, on the meta device, as `train/assemble.py` makes them."""
    with fake_world(0, plan.mesh.world_size, "meta") as world:
        world.divide(plan)
        yield [part for stage in range(plan.mesh.pp) for part in _parts_of(plan, stage, world.groups)]


def _parts_of(plan: Plan, stage: int, groups: dict[str, ProcessGroup]) -> Iterator[Part]:
    this_rank = ThisRank(plan, stage, groups)
    for depths in plan.schedule.parts(stage):
        part = cast(Part, models.construct(plan.model, "meta", depths))
        part.objective = plan.objective
        part.losses_per_sample = MASKED if plan.task.name == "mlm" else None
        for strategy in active(plan):
            strategy.divide(part, this_rank)
        for name in ("tokens_T", "rows_T"):
            if isinstance(positions_T := getattr(part, name), Tensor):
                setattr(part, name, positions_T.to(META))
        yield part.to(TORCH_DTYPE[plan.work.precision])


def numbers(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64, device=META)


def batch(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs, targets and extras of a micro-batch."""
    match kind:
        case "tensors":
            one, other = (torch.empty(BATCH, LENGTH, WIDTHS["hidden_dim"], dtype=dtype, device=META) for _ in range(2))
            return one, other, {}
        case "pairs":
            extras = {"source_lengths_B": numbers(BATCH), "target_lengths_B": numbers(BATCH)}
        case "mlm" | "qa":
            extras = {"segments_BT": numbers(BATCH, LENGTH), "lengths_B": numbers(BATCH)}
        case "gpt2-documents":
            extras = {"begins_BT": numbers(BATCH, LENGTH), "ends_BM": numbers(BATCH, FEW_DOCUMENTS)}
        case _:
            extras = {}
    return numbers(BATCH, LENGTH), numbers(BATCH, 2 if kind == "qa" else LENGTH), extras


def forward_and_backward(case: Case, parts: list[Part]) -> None:
    """A micro-batch, as `train/execute.py` computes it, on all stages in turn."""
    inputs, targets, extras = batch(case.kind, TORCH_DTYPE[case.precision])
    ins, outs = [], []
    for part in parts:
        part.set_dropout_context(1, 2, numbers(BATCH))
        x = inputs if part.embeds else outs[-1].detach().requires_grad_()
        ins.append(x)
        outs.append(part(x, targets, loss_scale=0.25, **extras) if part.ends else part(x, **extras))
    gradient: Tensor | None = None
    for part, x, y in zip(reversed(parts), reversed(ins), reversed(outs), strict=True):
        torch.autograd.backward(y, gradient)
        gradient = x.grad
        for weight, compute in part.deferred or ():
            torch.autograd.backward([weight], [compute()])


def watched(case: Case) -> DeviceSpy:
    """One micro-batch under the spy, and what must hold of its gradients."""
    plan = case.plan()
    with parts_of(plan) as parts, fused_kernels():
        for part in parts:
            make_tables(part, plan)
        with DeviceSpy() as spy:
            forward_and_backward(case, parts)
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert (parameter.grad.dtype, parameter.grad.shape) == (parameter.dtype, parameter.shape), name
    return spy


def written() -> dict[Case, tuple[int, int]]:
    if not TABLE.is_file():
        return {}
    rows = csv.reader(io.StringIO(TABLE.read_text(encoding="utf-8")))
    next(rows)
    return {Case(*row[:5]): (int(row[5]), int(row[6])) for row in rows}


def check(cases: Iterable[Case]) -> None:
    most = written()
    for case in cases:
        spy = watched(case)
        unknown = {
            wait: count for wait, count in spy.waits.items() if (wait[0], wait[1].partition(":")[0]) not in WAITS
        }
        assert not unknown, case
        if case in most:
            assert spy.launches <= most[case][0], (case, spy.launches)
            assert spy.bytes <= most[case][1], (case, spy.bytes)


def test_a_micro_batch_waits_for_nothing_and_launches_no_more_than_written_down() -> None:
    check(quick_cases())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_micro_batch_waits_or_launches_more_than_written_down(kind: str) -> None:
    check(case for case in all_cases() if case.kind == kind and case.has_a_plan())


def test_the_table_has_exactly_the_cases() -> None:
    assert set(written()) == set(cases_to_write())


def test_no_step_copies_numbers_from_a_list_to_a_device() -> None:
    """`torch.tensor(numbers, device=device)` copies from pageable memory, and waits until the device is done."""
    found = {}
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_tensor = isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
            if is_tensor and any(word.arg == "device" for word in cast(ast.Call, node).keywords):
                found[path.relative_to(PACKAGE).as_posix()] = ast.unparse(node)
    assert set(found) == set(COPIES), found


def main(arguments: list[str]) -> None:
    """Write the table: lower numbers, and those of new cases."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)
    before, lines = written(), ["kind,precision,recompute,lora,layout,launches,bytes"]
    for case in cases_to_write():
        spy = watched(case)
        launches, size = before.get(case, (spy.launches, spy.bytes))
        lines.append(",".join([*case, str(min(launches, spy.launches)), str(min(size, spy.bytes))]))
    replace_file(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
