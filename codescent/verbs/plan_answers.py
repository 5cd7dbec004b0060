"""In: the plan of a run whose model writes answers. Out: a row of `codescent plan` on them, in words.
Does not count their time or their messages: both depend on how long the answers become."""

from __future__ import annotations

import math
from collections.abc import Iterator

from codescent import models
from codescent.base.amounts import of_bytes
from codescent.base.counted import counted
from codescent.plan import DTYPE_BYTES, Plan
from codescent.plan.objective import Policy

MOST_ROWS, MOST_BYTES, PAGE_SIZE = 256, 4 << 30, 16
"""Those of inference/answers.py, which needs torch; a test compares."""


def answer_rows(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """How many answers a step has, and the memory that they need beside what the plan counts; nothing without any."""
    policy = plan.objective.policy
    if policy is not None:
        yield "answers", list(_lines(plan, policy))


def _lines(plan: Plan, policy: Policy) -> Iterator[str]:
    number, mesh = plan.work.global_batch_size * policy.group, plan.mesh
    before = "each step" if policy.updates == 1 else f"every {policy.updates} steps"
    yield f"{number:,} of up to {counted(policy.new_tokens, 'token')}, written before {before}"
    yield "their time and messages are not counted here"
    beside = [f"{of_bytes(cache_bytes(plan, policy))} of keys and values"]
    if mesh.dp_shard > 1:
        whole = sum(tensor.parameter.numel for tensor in plan.tensors) * DTYPE_BYTES[plan.work.precision] / mesh.tp
        beside.append(f"{of_bytes(whole)} of gathered weights")
    yield f"memory meanwhile: {', '.join(beside)}"
    if policy.kl:
        trained = sum(tensor.weights.numel(tensor.parameter.shape, mesh) for tensor in plan.trained)
        yield f"a copy of trained weights: {of_bytes(trained * DTYPE_BYTES[plan.work.precision])}, always"


def cache_bytes(plan: Plan, policy: Policy) -> int:
    """At most so many bytes of keys and values on a rank while it writes."""
    shape, work = models.shape_of_facts(plan.model), plan.work
    rows = min(MOST_ROWS, work.microbatch_size * work.num_microbatches * policy.group)
    longest = work.seq_len // policy.group + 1
    tokens = rows * math.ceil(longest / PAGE_SIZE) * PAGE_SIZE
    channels = 2 * shape.num_layers * math.ceil(shape.num_kv_heads / plan.mesh.tp) * shape.head_dim
    return min(tokens * channels * DTYPE_BYTES[work.precision], MOST_BYTES)
