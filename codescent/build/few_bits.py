"""In: a resolved model, a candidate of its layout. Out: which matrices cannot be held or multiplied in few bits.
Does not know the number formats (operators/nf4.py and operators/fp8.py do)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from codescent import models
from codescent.base.nf4_size import BLOCK
from codescent.base.refusal import Change, Refusal
from codescent.build.resolve import Resolved
from codescent.plan import Parameter, Role
from codescent.strategies import Candidate
from codescent.strategies.refusals import near_degrees

MULTIPLE = 16
"""Sizes of a product in fp8 are multiples of this (torch.nn.functional.scaled_mm)."""
_IN_BLOCK = re.compile(r"blocks\.\d+\.")


def refusals(resolved: Resolved, candidate: Candidate) -> Iterator[Refusal]:
    """Blocks of NF4 that tp would cut; sizes that the kernels of fp8 do not have."""
    model, work = candidate.model, candidate.work
    in_nf4 = model.lora is not None and model.lora.quantize != ""
    of_kernels = work.fp8 != "" and not work.fp8_emulated
    if (in_nf4 and candidate.mesh.tp > 1) or of_kernels:
        every = models.parameters_of(resolved.model.kind, resolved.shape, resolved.model.lora)
        matrices = {_IN_BLOCK.sub("", one.name): one for one in every if _IN_BLOCK.match(one.name)}
        named = {name.removesuffix(".weight"): one for name, one in matrices.items()}
        if in_nf4:
            yield from _cut_blocks(named, candidate)
        if of_kernels:
            yield from _sizes(named, candidate)


def _cut_blocks(named: dict[str, Parameter], candidate: Candidate) -> Iterator[Refusal]:
    """Inputs of ROW matrices whose blocks tp would cut: the scales would be others than those of one rank."""
    assert candidate.model.lora is not None
    degree, said = candidate.mesh.tp, f'lora.quantize = "{candidate.model.lora.quantize}"'
    rows = {name: one.shape[-1] for name, one in named.items() if one.quantized and one.role is Role.ROW}

    heads = candidate.model.num_heads, candidate.model.num_kv_heads

    def whole(other: Candidate) -> bool:
        tp = other.mesh.tp
        return not any(size % (tp * BLOCK) for size in rows.values()) and not any(number % tp for number in heads)

    cut = [f"{name} ({width:,})" for name, width in rows.items() if width % (degree * BLOCK)]
    if cut:
        yield Refusal(
            f"parallel.tp = {degree}: {said} has a scale for {BLOCK} inputs of a row, and {degree} parts of the inputs "
            f"of {', '.join(cut)} would cut some of them",
            near_degrees(candidate, "tp", min(rows.values()) // BLOCK, whole),
        )


def _sizes(named: dict[str, Parameter], candidate: Candidate) -> Iterator[Refusal]:
    """Sides of matrices, and numbers of tokens of a micro-batch, that are no multiples."""
    work = candidate.work
    said, off = f'train.fp8 = "{work.fp8}"', Change({"train.fp8": "none"})
    wrong = [
        f"{name} ({' x '.join(map(str, sides))})"
        for name, sides in (
            (name, _sides(one)) for name, one in named.items() if one.role in (Role.COLUMN, Role.ROW, Role.STREAM)
        )
        if any(side % MULTIPLE for side in sides)
    ]
    if wrong:
        yield Refusal(f"{said}: both sides of a matrix must be multiples of {MULTIPLE}: {', '.join(wrong)}", [off])
    tokens = work.microbatch_size * work.seq_len
    if work.fp8 == "tensorwise" and tokens % MULTIPLE:
        yield Refusal(
            f"{said}: {tokens} tokens of a micro-batch must be a multiple of {MULTIPLE}",
            [Change({"train.fp8": "rowwise"})],
        )


def _sides(matrix: Parameter) -> tuple[int, int]:
    """Outputs and inputs of a product. Two halves [F, 2, I] are multiplied apart."""
    halves = 2 if matrix.alternating == (1, 1) else 1
    return math.prod(matrix.shape[:-1]) // halves, matrix.shape[-1]
