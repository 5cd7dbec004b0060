"""In: the model, the task and the batch of a plan. Out: the floating-point operations (FLOPs) of one step.
Does not estimate seconds and does not measure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from codescent.plan.model import ModelFacts, pairs_seen
from codescent.plan.shard import Parameter, Role
from codescent.plan.work import TaskFacts, Work


class FlopFormula(StrEnum):
    """How the FLOPs of a step are counted for GFLOP/s and MFU."""

    DENSE = "6nbt"  # 6 N for each token of the batch
    ATTENTION = "6n+attention"  # with 12 L C T for each token, without a causal mask: the default
    EXECUTED = "executed"  # every operator, with what backward computes again

    @property
    def said(self) -> str:
        """As it is written in tables and on axes."""
        return {self.DENSE: "6NBT", self.ATTENTION: "6N + attention"}.get(self, "what is executed")


@dataclass(frozen=True)
class StepFlops:
    """Model FLOPs of one step, summed over all ranks.

    N counts each parameter once, without an embedding matrix that is not also the matrix of the head. Of experts it
    counts those that a token is routed to (Fedus et al. 2021, "Switch Transformers", section 2).

    Attributes:
        dense_flops: 6 N per token: forward 2 N, backward 4 N, without attention (Kaplan et al. 2020, section 2.1).
            A frozen parameter has no weight gradient: 4 N.
        attention_flops: 12 L h s per token, counted without a causal mask (Chowdhery et al. 2022, "PaLM", appendix B).
            A decoder layer with t target and s source positions has t^2 + t s query-key pairs instead of s^2.
        weight_share: FLOPs of the weight gradients, divided by the FLOPs of the forward pass; without attention.
        recomputed_flops: what backward computes again because of parallel.recompute, in the same convention: of a
            forward pass 2 N and 4 L h s per token. "full": the forward pass of the blocks, without the head
            (Korthikanti et al. 2022, "Reducing Activation Recomputation", appendix A). "products": the ROW matrices of
            the blocks, 2 N. The last one of a block is left out where backward does not need its result. Attention is
            added where no kernel computes it as a whole (dropout, cp), 4 L h s. "selective": the products of queries
            and keys of causal self-attention, 2 L h s. With dropout or cp other kernels compute attention, to which the
            key adds no product. Activation functions have no products. A head that compares answers computes its logits
            twice, 2 N.
    """

    dense_flops: float
    attention_flops: float
    weight_share: float
    recomputed_flops: float = 0.0

    @property
    def total_flops(self) -> float:
        """6 N + 12 L h s per token. The metrics flops_per_s and mfu use this sum."""
        return self.dense_flops + self.attention_flops

    @property
    def hardware_flops(self) -> float:
        """Model FLOPs and those that parallel.recompute adds: the metric hfu (Chowdhery et al. 2022, appendix B)."""
        return self.total_flops + self.recomputed_flops


def step_flops(
    model: ModelFacts,
    task: TaskFacts,
    work: Work,
    parameters: Iterable[Parameter],
    recompute: str = "none",
    *,
    splits_sequence: bool = False,
    logits_twice: bool = False,
) -> StepFlops:
    """FLOPs of one step, summed over all micro-batches and ranks.

    Args:
        model, task, work, parameters: of the run.
        recompute: parallel.recompute.
        splits_sequence: whether ranks share a sequence (cp).
        logits_twice: whether backward computes the logits again (operators/token_losses.py).
    """

    def macs(some: Iterable[Parameter]) -> float:
        return sum(p.numel * p.read_by * _positions(model, task, work, p) for p in some)

    read = [p for p in parameters if p.role is not Role.VOCAB or p.depths != (0,)]
    trained = [p for p in read if p.trained]
    products, trained_products = (
        [p for p in some if len(p.shape) > 1 and p.role is not Role.POSITION] for some in (read, trained)
    )
    keys = model.num_heads * model.head_dim
    width = (keys + model.values) / 2  # of both products
    again = 0.0
    if recompute == "full":
        blocks = [p for p in read if any(1 <= depth <= model.num_layers for depth in p.depths)]
        again = 2.0 * macs(blocks) + 4.0 * _pairs(model, work) * width
    elif recompute == "products":
        rows = recomputed_rows(
            [p for p in read if any(1 <= depth <= model.num_layers for depth in p.depths)], model.dropout
        )
        again = 2.0 * macs(rows) + (4.0 * _pairs(model, work) * width if splits_sequence or model.dropout else 0.0)
    elif recompute == "selective" and not (splits_sequence or model.dropout):
        causal = model.windows[model.num_layers - model.causal_layers :]
        again = 2.0 * sum(pairs_seen(work.positions(-1), window) for window in causal) * keys
    if logits_twice:
        again += 2.0 * macs(p for p in products if p.role is Role.VOCAB and p.depths[-1] > model.num_layers)
    return StepFlops(
        dense_flops=(4.0 * macs(read) + 2.0 * macs(trained)) * work.global_batch_size,
        attention_flops=12.0 * _pairs(model, work) * width * work.global_batch_size,
        weight_share=macs(trained_products) / (macs(products) or 1.0),
        recomputed_flops=again * work.global_batch_size,
    )


def recomputed_rows(held: Iterable[Parameter], dropout: float) -> list[Parameter]:
    """The ROW matrices of blocks whose products backward computes again from the blocks' inputs, in forward order.

    They are all of a block except the last one. The last is computed again only if backward needs its result: for
    dropout, or as the input of a norm.
    """
    needed: dict[str, bool] = {}
    rows: list[Parameter] = []
    last: dict[int, str] = {}  # by depth: the latest output so far
    for parameter in held:
        depth = parameter.depths[0]
        if parameter.role in (Role.ROW, Role.EXPERT_ROW):
            rows.append(parameter)
            needed[parameter.name] = dropout > 0
            last[depth] = parameter.name
        elif parameter.role in (Role.NORM, Role.COLUMN, Role.STREAM, Role.ROUTER) and depth in last:
            needed[last[depth]] = True
    return [parameter for parameter in rows if needed[parameter.name]]


def _positions(model: ModelFacts, task: TaskFacts, work: Work, parameter: Parameter) -> float:
    """Number of positions of a sample to which a parameter is applied. All of the head has the positions it reads."""
    if parameter.depths[-1] > model.num_layers:
        return work.positions(-1) * task.head_share
    return work.positions(parameter.stream)


def _pairs(model: ModelFacts, work: Work) -> int:
    """Number of query-key pairs in a sample, summed over all layers."""
    if not work.streams:
        return sum(pairs_seen(work.seq_len, window) for window in model.windows)
    source, target = work.streams
    decoder_layers = model.num_layers - model.encoder_layers
    return model.encoder_layers * source**2 + decoder_layers * target * (target + source)
