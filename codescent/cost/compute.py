"""In: a plan. Out: the floating-point operations of one step, by the formulas of the field, each with its name.
Does not estimate seconds and does not measure."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.plan import Parameter, Plan, Role, Work


@dataclass(frozen=True)
class StepFlops:
    """Model FLOPs of one step over all the ranks, N being every parameter counted once, less a matrix that is only
    looked up: the embedding of tokens, where the head has another.

    `dense_flops`: 6 N per token (Kaplan et al. 2020, section 2.1: forward 2 N, backward 4 N; attention left out).
    `attention_flops`: 12 L h s per token (Chowdhery et al. 2022, "PaLM", appendix B: full attention, not its half).
    Of a model of several sequences both are counted with the positions that are read: a parameter's are those of its
    own sequence, a head's those of the target; and s^2 pairs of positions are, in a decoder's layer, its t^2 and t s.
    Of a parameter that is not trained the backward pass has 2 N, the gradients of what it is multiplied with: 4 N.
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
    dense_flops = sum((6.0 if p.trained else 4.0) * p.numel * _positions(work, p) for p in _read(plan))
    attention_width = work.num_heads * work.head_dim
    return StepFlops(
        dense_flops=dense_flops * work.global_batch_size,
        attention_flops=12.0 * _pairs(work) * attention_width * work.global_batch_size,
    )


def weight_share(plan: Plan) -> float:
    """What the weight part of a backward pass costs beside the forward pass: of the products with matrices, attention
    left out, those whose matrix is trained."""
    products = [p for p in _read(plan) if len(p.shape) > 1 and p.role is not Role.POSITION]
    every, trained = (
        sum(p.numel * _positions(plan.work, p) for p in some) for some in (products, [p for p in products if p.trained])
    )
    return trained / every


def _read(plan: Plan) -> list[Parameter]:
    """All parameters but matrices that are only looked up: one of the vocabulary is multiplied in the head, whatever
    embeds with it."""
    return [t.parameter for t in plan.tensors if t.parameter.role is not Role.VOCAB or t.parameter.depths != (0,)]


def _positions(work: Work, parameter: Parameter) -> float:
    """Of a sample, that read a parameter; in the head those that it reads."""
    if parameter.role in (Role.VOCAB, Role.WHOLE):
        return work.positions(-1) * work.head_share
    return work.positions(parameter.stream)


def _pairs(work: Work) -> int:
    """Pairs of a query's and a key's position in a sample, over all layers."""
    if not work.streams:
        return work.num_layers * work.seq_len**2
    source, target = work.streams
    decoder_layers = work.num_layers - work.encoder_layers
    return work.encoder_layers * source**2 + decoder_layers * target * (target + source)
