"""In: a model's parameter list; LoRA's rank, alpha and names of target layers. Out: the list with adapters A and B.
Does not import torch or allocate memory: `lora.module` adds the adapters to a torch module."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from codescent.base.dtypes import WIDE
from codescent.base.errors import UserError
from codescent.base.nf4_size import BLOCK
from codescent.operators.saved_tensors import IN_BLOCKS
from codescent.plan.activations import SavedTensor
from codescent.plan.divided import Dim
from codescent.plan.model import Lora
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
_MAGNITUDES = {Role.COLUMN: Role.MAGNITUDE_COLUMN, Role.ROW: Role.MAGNITUDE, Role.STREAM: Role.NORM}
_ROLES = {
    Role.COLUMN: (Role.ADAPTER, Role.ADAPTER_COLUMN),
    Role.ROW: (Role.ADAPTER_ROW, Role.ADAPTER),
    Role.STREAM: (Role.STREAM, Role.STREAM),
}
_BLOCK = re.compile(r"blocks\.\d+\.")


@dataclass(frozen=True)
class Method:
    """How adapters work; see the fields of `Lora` with the same names."""

    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    start: str | None = None
    quantize: str = ""


PLAIN = Method()


def resolve(
    parameters: Sequence[Parameter],
    rank: int,
    alpha: float | None,
    targets: str | None,
    whole: str | None,
    method: Method = PLAIN,
) -> Lora:
    """Check the LoRA settings of a config and fill in the defaults.

    Args:
        parameters: the model's parameters, without adapters.
        rank, alpha: of every adapter; `alpha` None: twice the rank.
        targets: names of layers, separated by commas; None: every matrix of the blocks that tp can split.
        whole: names of layers whose own weights are trained; None: a head that does not predict the vocabulary, because
            each task needs a new one.
        method: how the adapters work.

    Raises:
        UserError: no layer takes adapters; every unknown name; a rank that is not smaller than both sides of a matrix.
    """
    matrices = {_layer(p): p for p in parameters if _is_adaptable(p)}
    if not matrices:
        raise UserError("lora.rank: no layer of this model takes an adapter: its blocks have no torch.nn.Linear")
    heads = tuple(dict.fromkeys(_layer(p) for p in parameters if p.role is Role.LOGITS))
    lora = Lora(
        rank=rank,
        alpha=2.0 * rank if alpha is None else alpha,
        targets=tuple(matrices) if targets is None else _names(targets),
        whole=heads if whole is None else _names(whole),
        **dataclasses.asdict(method),
    )
    problems = list(_unknown("lora.targets", lora.targets, matrices))
    if whole is not None:
        problems += _unknown("lora.whole", lora.whole, dict.fromkeys(map(_layer, parameters)))
    problems += [
        f"lora.whole: {name} is in lora.targets, too; remove it from one of them"
        for name in lora.whole
        if name in lora.targets
    ]
    for name in lora.targets:
        smallest = min(_sides(matrices[name])) if name in matrices else rank + 1
        if rank >= smallest:
            problems.append(
                f"lora.rank = {rank}: {name} is a matrix of {' x '.join(map(str, _sides(matrices[name])))}, and the "
                f"rank must be smaller than both sides; at most {max(1, smallest - 1)}, or other lora.targets"
            )
    for name, matrix in matrices.items() if method.quantize else ():
        if name not in lora.whole and matrix.shape[-1] % BLOCK:
            problems.append(
                f'lora.quantize = "{method.quantize}": {name} has {matrix.shape[-1]} inputs, and {BLOCK} of a row have '
                f'one scale: sizes must be multiples of {BLOCK}; or set it to "none"'
            )
    if problems:
        raise UserError(*problems)
    return lora


def adapted(parameters: Sequence[Parameter], lora: Lora | None) -> tuple[Parameter, ...]:
    """The parameters with adapters. An adapter follows its layer's own parameters. `lora` None: no adapters.

    A is initialised at random with standard deviation 1 / sqrt(3 * inputs), as in `peft`. B is 0, so a new adapter
    changes no output. With DoRA the lengths of the rows of W follow, which begin as they are. Only adapters and the
    layers in `lora.whole` are trained.
    """
    if lora is None:
        return tuple(parameters)
    found: list[Parameter] = []
    for _, group in itertools.groupby(parameters, key=lambda p: p.name.rpartition(".")[0]):
        layer = list(group)
        found += [_frozen(parameter, lora) for parameter in layer]
        for matrix in layer:
            if matrix.role in _ROLES and _layer(matrix) in lora.targets:
                found += _adapter(matrix, lora.rank)
                found += [_magnitude(matrix)] if lora.dora else []
    return tuple(found)


def _frozen(parameter: Parameter, lora: Lora) -> Parameter:
    """The parameter as adapters leave it: frozen, unless its layer is trained whole; a matrix perhaps in few bits."""
    trained = _layer(parameter) in lora.whole
    quantized = "" if trained or not _is_adaptable(parameter) else lora.quantize
    return dataclasses.replace(parameter, trained=trained, quantized=quantized)


def _is_adaptable(parameter: Parameter) -> bool:
    return parameter.role in _ROLES and _BLOCK.match(parameter.name) is not None


def _adapter(matrix: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    *outputs, inputs = matrix.shape
    role_a, role_b = _ROLES[matrix.role]
    name_a, name_b = names(matrix.name)
    a_std = 1.0 / math.sqrt(3 * inputs)
    return (
        dataclasses.replace(
            matrix, name=name_a, shape=(rank, inputs), role=role_a, std=a_std, alternating=(), beside=0
        ),
        dataclasses.replace(matrix, name=name_b, shape=(*outputs, rank), role=role_b, std=0.0, beside=0),
    )


def _magnitude(matrix: Parameter) -> Parameter:
    role, shape = _MAGNITUDES[matrix.role], matrix.shape[:-1]
    return dataclasses.replace(
        matrix, name=magnitude_name(matrix.name), shape=shape, role=role, std=0.0, alternating=(), beside=0
    )


def adapted_saved(saved: Iterable[SavedTensor], parameters: Sequence[Parameter], lora: Lora) -> Iterator[SavedTensor]:
    """What forward keeps with adapters: what only gradients of frozen weights need is not kept.

    An adapter keeps x A^T of its layer's input x. With DoRA a layer keeps its product and the lengths of its rows, too.
    `parameters`: with the adapters.
    """
    rows = {_layer(p): p for p in parameters if is_magnitude(p)}
    trained = {_layer(parameter) for parameter in parameters if parameter.trained}
    matrices = {_layer(parameter) for parameter in parameters if parameter.trained and not is_adapter(parameter)}
    adapters: set[tuple[str, int]] = set()
    for tensor in saved:
        layer, at = tensor.layer, {(tensor.product, depth) for depth in range(*tensor.depths)}
        if not layer or layer in trained:  # no gradient waits for a frozen weight
            yield tensor if tensor.product in matrices else dataclasses.replace(tensor, product="")
        if tensor.product in lora.targets and tensor.under and not at & adapters:
            adapters |= at
            shape, dims = (*tensor.shape[:2], lora.rank), (*tensor.dims[:2], Dim.WHOLE)
            yield SavedTensor(f"{tensor.product} adapter", shape, dims, tensor.dtype, tensor.depths, under=IN_BLOCKS)
            if tensor.product in rows:
                yield from _saved_by_dora(tensor, rows[tensor.product])


def _saved_by_dora(read: SavedTensor, rows: Parameter) -> Iterator[SavedTensor]:
    """Of the layer that keeps `read`: its product before it is scaled, and the lengths of the rows of W + scale B A."""
    cut = Dim.COLUMN if rows.role is Role.MAGNITUDE_COLUMN else Dim.WHOLE
    shape, dims = (*read.shape[:2], rows.numel), (*read.dims[:2], cut)
    yield SavedTensor(f"{read.product} unscaled", shape, dims, read.dtype, read.depths, under=IN_BLOCKS)
    sides = (cut, *(Dim.WHOLE for _ in rows.shape[1:]))
    yield SavedTensor(f"{read.product} lengths", rows.shape, sides, WIDE[read.dtype], read.depths, under=IN_BLOCKS)


def adapted_operators(saved: Iterable[SavedTensor], lora: Lora) -> Iterator[LayerOperator]:
    """What adapters compute beside their products: dropout of what each of them reads. `saved`: without adapters.

    What DoRA adds depends on weights alone, or is one product for each element of an output: it is not counted.
    """
    found: set[tuple[str, int]] = set()
    for tensor in saved if lora.dropout else ():
        at = {(tensor.product, depth) for depth in range(*tensor.depths)}
        if tensor.product in lora.targets and tensor.under and not at & found:
            found |= at
            yield _dropout(tensor)


def _dropout(read: SavedTensor) -> LayerOperator:
    """Forward writes what A reads. Backward does so again, and drops elements of the gradient, which it adds."""
    return LayerOperator(
        f"{read.product} adapter dropout",
        read.product,
        read.shape,
        read.dims,
        read.dtype,
        read.depths,
        flops=(2.0, 5.0),
        moves=(2.0, 7.0),
        again=("products", "full"),
    )


def is_adapter(parameter: Parameter) -> bool:
    """Whether the parameter is of an adapter: one of its two matrices, or a magnitude."""
    return parameter.name.rpartition(".")[2] in (A, B, MAGNITUDE)


def is_magnitude(parameter: Parameter) -> bool:
    """Whether the parameter has the lengths of the rows of a matrix (DoRA)."""
    return parameter.name.rpartition(".")[2] == MAGNITUDE


def names(matrix: str) -> tuple[str, str]:
    """Names of the adapter's matrices A and B, given the name of the adapted matrix."""
    owner = matrix.rpartition(".")[0]
    return f"{owner}.{A}", f"{owner}.{B}"


def magnitude_name(matrix: str) -> str:
    """The name of the lengths of the rows of an adapted matrix (DoRA), given the name of the matrix."""
    return f"{matrix.rpartition('.')[0]}.{MAGNITUDE}"


def matrix_name(part: str) -> str:
    """The name of the adapted matrix, given that of a part of its adapter."""
    return f"{part.rpartition('.')[0]}.weight"


def _layer(parameter: Parameter) -> str:
    """The name of a parameter's layer inside its block: "blocks.0.attn.qkv.weight" gives "attn.qkv"."""
    return _BLOCK.sub("", parameter.name, count=1).rpartition(".")[0]


def _sides(matrix: Parameter) -> tuple[int, int]:
    return math.prod(matrix.shape[:-1]), matrix.shape[-1]


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _unknown(key: str, given: Sequence[str], known: Collection[str]) -> Iterator[str]:
    if not given:
        yield f"{key}: names no layer; this model has {', '.join(known)}"
    for name in given:
        if name not in known:
            yield f"{key}: there is no {name!r} in this model; it has {', '.join(known)}"
