"""In: a plan. Out: the floating-point operations of one step, by the formulas of the field, each with its name.
Does not estimate seconds and does not measure."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.plan import Plan, Role


@dataclass(frozen=True)
class StepFlops:
    """Model FLOPs of one step over all the ranks, N being every parameter counted once, less a matrix that is only
    looked up: the embedding of tokens, where the head has another.

    `dense_flops`: 6 N per token (Kaplan et al. 2020, section 2.1: forward 2 N, backward 4 N; attention left out).
    `attention_flops`: 12 L h s per token (Chowdhery et al. 2022, "PaLM", appendix B: full attention, not its half).
    """

    dense_flops: float
    attention_flops: float

    @property
    def total_flops(self) -> float:
        """6 N + 12 L h s per token: the figure behind flops_per_s and mfu."""
        return self.dense_flops + self.attention_flops


def step_flops(plan: Plan) -> StepFlops:
    """FLOPs of one step of `plan`: all micro-batches on all ranks."""
    work = plan.work
    looked_up = sum(
        tensor.parameter.numel
        for tensor in plan.tensors
        if tensor.parameter.role is Role.VOCAB and tensor.parameter.depths == (0,)
    )
    attention_width = work.num_heads * work.head_dim
    return StepFlops(
        dense_flops=6.0 * (plan.num_parameters - looked_up) * work.tokens,
        attention_flops=12.0 * work.num_layers * attention_width * work.seq_len * work.tokens,
    )
