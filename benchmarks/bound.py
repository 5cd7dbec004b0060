"""In: sizes of a GPT-2 and of one step, a precision. Out: bytes that a step moves beside its products; a function that
takes as long as both. Does not train: a program that keeps nothing in caches cannot be faster on this processor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from products import products
from work import Work

from codescent.build import build
from codescent.config.sections import Config
from codescent.cost.operators import ATTENTION, ELEMENTWISE, operators_of_depth
from codescent.plan.activations import CPU

UPDATE_BYTES = {"fp32": 28, "bf16": 30}
"""Bytes of each parameter that AdamW moves in one pass. It reads and writes weight and moments; it reads the gradient.
fp32: 7 numbers of 4 bytes. bf16: 6 such numbers; it reads and clears a gradient of 2 bytes and writes a weight of 2."""
COPIED_BYTES = 2**28
"""Of each of two tensors: more than caches hold."""


def moved_bytes(work: Work, precision: str) -> dict[str, float]:
    """Bytes that a step reads and writes beside its products, by part, each tensor once for each operator.

    The parts are the optimizer's update, softmax of attention, softmax and loss of the head, and other element-wise
    operators. The plan of codescent declares them (codescent/cost/operators.py).
    """
    sizes = {"num_layers": work.num_layers, "num_heads": work.num_heads, "hidden_dim": work.hidden_dim}
    config = Config.model_validate(
        {
            "model": {**sizes, "vocab_size": work.vocab_size, "seq_len": work.max_seq_len},
            "data": {"seq_len": work.seq_len},
            "train": {"global_batch_size": work.batch_size, "precision": precision},
        }
    )
    plan = build(config, work.vocab_size, 1)
    found = {"optimizer": float(UPDATE_BYTES[precision] * work.num_parameters)}
    for depth in range(work.num_layers + 2):
        for one in operators_of_depth(plan, depth, CPU):
            if one.kind not in (ATTENTION, ELEMENTWISE):
                continue
            part = "attention" if one.kind == ATTENTION else "head" if one.name == "loss" else "element-wise"
            moved = (one.forward_bytes + one.backward_bytes) * plan.work.num_microbatches
            found[part] = found.get(part, 0.0) + moved
    return found


def bound(work: Work, precision: str) -> Callable[[], None]:
    """A function that computes the step's products (see `products`), then copies half of `moved_bytes`.

    A copy reads and writes each byte, so it moves them all, at the bandwidth of this machine.
    """
    multiply = products(work, precision)
    numbers = round(
        sum(moved_bytes(work, precision).values()) / 2 / 4
    )  # of 4 bytes, of which a copy moves twice as many
    source, target = torch.ones(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)

    def step() -> None:
        multiply()
        for start in range(0, numbers, len(source)):
            count = min(len(source), numbers - start)
            target[:count].copy_(source[:count])

    return step
