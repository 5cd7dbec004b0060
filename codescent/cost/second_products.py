"""In: a plan whose blocks are computed again from some of their products. Out: which of them a program keeps that keeps
every second one, and what its blocks keep then.
Does not know seconds or bytes. What the product itself keeps is in the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from codescent.plan import Plan, Role
from codescent.plan.activations import SavedTensor

KIND = "products"
"""The value of parallel.recompute that this changes."""
PRODUCT, INPUT = " product", "block input"
"""How models name the result of a product that a block keeps, and the residual stream that it begins with."""
_BLOCK = re.compile(r"blocks\.\d+\.")


def kept_shares(plan: Plan) -> dict[str, float]:
    """By layer of a block: the share of its results that is kept. Matrices in one parameter count apart.

    The first product of a block is kept, the second one is not, and so on (torchtitan at the end of 2024, selective
    activation checkpointing per operator). {}: blocks are not computed again from products.
    """
    if plan.layout.recompute != KIND:
        return {}
    held = [tensor.parameter for tensor in plan.tensors if tensor.parameter.depths == (1,)]
    shares, number = dict[str, float](), 0
    for parameter in held:
        if len(parameter.shape) > 1 and parameter.role in (Role.COLUMN, Role.ROW):
            rows = [rows for rows, _ in parameter.matrices]
            kept = sum(size for at, size in enumerate(rows, number) if at % 2 == 0)
            shares[_BLOCK.sub("", parameter.name).rpartition(".")[0]] = kept / sum(rows)
            number += len(rows)
    return shares


def kept_tensors(plan: Plan) -> Iterator[SavedTensor]:
    """What the forward pass of a micro-batch keeps for backward."""
    shares = kept_shares(plan)
    for tensor in plan.activations:
        share = shares.pop(tensor.name.removesuffix(PRODUCT), 1.0) if tensor.name.endswith(PRODUCT) else 1.0
        yield replace(tensor, shape=(*tensor.shape[:-1], round(share * tensor.shape[-1])))
    stream = next((tensor for tensor in plan.activations if tensor.name == INPUT), None)
    for layer, share in shares.items():  # products that write to the residual stream
        if stream is not None and share:
            yield replace(stream, name=f"{layer}{PRODUCT}", begins=0)
