"""In: the matrix of embedding or head; tokens, or final activations and targets. Out: embeddings, or the summed loss.
Does not store all logits: it computes logits for a chunk of tokens, then overwrites the logits with their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import fused_softmax, products
from codescent.operators.saved_tensors import SMALL_VOCAB, WORTH_A_COPY
from codescent.operators.soft_cap import cap_
from codescent.operators.softmax import (
    factor_of_softmax,
    gradient_at_targets,
    scale_,
    softmax_in_pieces_,
    sum_of_logits,
    with_z_loss,
)
from codescent.plan.activations import ALIGNED_ROWS
from codescent.plan.objective import CROSS_ENTROPY, Objective

# Shapes: B samples, T positions, N = B * T tokens, D hidden_dim, V vocab_size, C = V or V rounded up.
# Rows of logits start on a cache line: oneDNN computes dW of 50257 columns 1.27x faster. CUDA: all sizes are multiples.
_ONE_HOT_VOCAB = 1024  # up to this size, a product with one-hot rows is more exact and faster than index_add_

Losses = Callable[[Tensor, Tensor, torch.dtype, bool], Tensor]
"""Logits [N, V], targets [N], wide dtype, whether to overwrite the logits by their gradient -> the losses [N, 1]."""
SoftmaxGradient = Callable[[Tensor, Tensor, torch.dtype, bool, Objective], Tensor]
"""`Losses` of the objective that is its last argument."""


class Vocabulary:
    """Embedding and head of a model on one device. A strategy that splits the vocabulary replaces this object."""

    def embed(
        self, weight_VD: Tensor, tokens_BT: Tensor, tied_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B, T, D]; with `tied_dtype` also the second output of `tied_embedding`, else None."""
        if tied_dtype is None:
            return F.embedding(tokens_BT, weight_VD), None
        return tied_embedding(weight_VD, tokens_BT, tied_dtype)

    def logits(self, x: Tensor, weight_VD: Tensor) -> Tensor:
        """The logits of all tokens of the vocabulary: [.., V], given x [.., D]."""
        return products.linear(x, weight_VD)

    def loss(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        chunk_tokens: int,
        loss_scale: float,
        tied_gradient_VD: Tensor | None,
        *,
        skip_negative: bool = False,
        objective: Objective = CROSS_ENTROPY,
        cap: float = 0.0,
    ) -> Tensor:
        """See `head_loss`."""
        return head_loss(
            x_BTD.flatten(0, 1),
            weight_VD,
            targets_BT.flatten(),
            chunk_tokens,
            loss_scale,
            tied_gradient_VD,
            skip_negative=skip_negative,
            objective=objective,
            cap=cap,
        )

    def every_row(self, x_BTD: Tensor) -> Tensor:
        """The rows of all positions: here x itself; all-gathered if ranks hold parts. `loss_of_rows` reads some."""
        return x_BTD

    def every_logit(self, y_BTC: Tensor) -> Tensor:
        """The outputs of all positions: here y itself; all-gathered if ranks hold parts. For a head of few outputs."""
        return y_BTC

    def loss_of_rows(
        self,
        x_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        targets_M: Tensor,
        chunk_tokens: int,
        loss_scale: float,
        tied_gradient_VD: Tensor | None,
        objective: Objective = CROSS_ENTROPY,
        *,
        skip_negative: bool = False,
    ) -> Tensor:
        """See `head_loss`. The number of rows depends on the data, so callers do not compile this."""
        return head_loss(
            x_MD,
            weight_VD,
            targets_M,
            chunk_tokens,
            loss_scale,
            tied_gradient_VD,
            bias_V=bias_V,
            skip_negative=skip_negative,
            objective=objective,
        )


def tied_embedding(weight_VD: Tensor, tokens_BT: Tensor, tied_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a matrix that the head reads too, with one gradient for both.

    Autograd would allocate a second dense gradient [V, D] for the embedding, and then add the two. Instead, the head
    passes its gradient to the second output, and backward adds the rows of the embedding in place. `tied_dtype` is the
    dtype of the head's gradient. If it is wider than the weight's, the sum is rounded once.

    Returns:
        x_BTD, and [V, D] zeros that take no memory. Their gradient is the head's part of the weight's gradient.
    """
    out: tuple[Tensor, Tensor] = _TiedEmbedding.apply(weight_VD, tokens_BT, tied_dtype)  # type: ignore[no-untyped-call]
    return out


class _TiedEmbedding(torch.autograd.Function):
    """See `tied_embedding`."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens_BT: Tensor, tied_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens_BT)
        ctx.like_weight = (weight_VD.shape, weight_VD.dtype)
        return F.embedding(tokens_BT, weight_VD), weight_VD.new_zeros((), dtype=tied_dtype).expand(weight_VD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_BTD: Tensor | None, d_tied_VD: Tensor | None) -> tuple[Tensor | None, None, None]:
        shape, dtype = ctx.like_weight
        if d_x_BTD is None:
            return (None if d_tied_VD is None else d_tied_VD.to(dtype)), None, None
        total_VD = d_x_BTD.new_zeros(shape) if d_tied_VD is None else d_tied_VD
        tokens_N, rows_ND = ctx.saved_tensors[0].flatten(), d_x_BTD.flatten(0, -2)
        if shape[0] <= _ONE_HOT_VOCAB:
            hot_NV = rows_ND.new_zeros(len(tokens_N), shape[0]).scatter_(1, tokens_N[:, None], 1.0)
            products.addmm_(total_VD, hot_NV.t().to(total_VD.dtype), rows_ND.to(total_VD.dtype))
        else:
            total_VD.index_add_(0, tokens_N, rows_ND.to(total_VD.dtype))
        return total_VD.to(dtype), None, None


def head_loss(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk_tokens: int = 1024,
    loss_scale: float = 1.0,
    tied_gradient_VD: Tensor | None = None,
    softmax_gradient_: SoftmaxGradient | None = None,
    bias_V: Tensor | None = None,
    *,
    skip_negative: bool = False,
    objective: Objective = CROSS_ENTROPY,
    cap: float = 0.0,
) -> Tensor:
    """The sum over tokens of the objective for the logits x @ weight.T + bias and the targets: a scalar in fp32 (in
    fp64 for x in fp64). By default it is the cross-entropy. Without tokens, the loss and the gradients are 0.

    The gradients are those of loss_scale * loss. The forward pass computes and scales them at no extra cost; a division
    of the loss would take another pass over them. Backward multiplies them by the incoming gradient. On a CPU it skips
    this if the incoming gradient is 1. (On CUDA, reading it would wait for the device.)

    Args:
        x_ND, weight_VD: activations after the last norm; the vocabulary matrix, in the same dtype.
        targets_N: int64, each in [0, V).
        chunk_tokens: rows of logits in memory at a time; 0: all.
        loss_scale: factor on the gradients, not on the value.
        tied_gradient_VD: tensor that receives the weight's gradient, in its own dtype (see `tied_embedding`); None:
            the weight receives it.
        softmax_gradient_: the softmax over all ranks, if `weight_VD` has only this rank's rows; None: it has all rows.
        bias_V: added to the logits; None: no bias. Not for compiled code.
        skip_negative: whether targets may be negative; such a token has no loss. Not for compiled code.
        objective: label smoothing and z-loss.
        cap: the logits are capped (`soft_cap`); 0: they are not.
    """
    chunk = chunk_tokens or max(len(x_ND), 1)
    receiver_VD = weight_VD if tied_gradient_VD is None else tied_gradient_VD
    if torch.compiler.is_compiling() and softmax_gradient_ is None and bias_V is None and not skip_negative:
        wants, terms = torch.is_grad_enabled(), (objective.label_smoothing, objective.z_loss, cap)
        loss: Tensor = _head_loss_op(x_ND, weight_VD, targets_N, chunk, loss_scale, wants, *terms)[0]
        return loss
    losses_ = _capping(_with_objective(softmax_gradient_ or _softmax_gradient_, objective), cap)
    if skip_negative and (softmax_gradient_ is not None or not fused_softmax.serves(x_ND)):
        losses_ = _skipping(losses_)
    if not torch.is_grad_enabled():  # `_HeadLoss.forward` itself cannot see that gradients are disabled
        x_ND, receiver_VD = x_ND.detach(), receiver_VD.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    weight_VD = weight_VD.detach()
    loss = _HeadLoss.apply(x_ND, weight_VD, receiver_VD, targets_N, chunk, loss_scale, losses_, bias_V)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """See `head_loss`. Forward computes the loss and the gradients in one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        receiver_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        scale: float,
        losses_: Losses,
        bias_V: Tensor | None,
    ) -> Tensor:
        wants_x, _, wants_weight, *_, wants_bias = ctx.needs_input_grad
        d_weight_dtype = receiver_VD.dtype if wants_weight else None
        loss, *gradients = _loss_and_gradients(
            x_ND, weight_VD, targets_N, chunk, scale, wants_x, d_weight_dtype, losses_, bias_V, wants_bias
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x_ND, d_weight_VD, d_bias_V = ctx.saved_tensors
        if d_loss.device.type != "cpu" or float(d_loss) != 1.0:
            for gradient in (d_x_ND, d_weight_VD, d_bias_V):
                if gradient is not None:
                    gradient *= d_loss
        return d_x_ND, None, d_weight_VD, None, None, None, None, d_bias_V


def _loss_and_gradients(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int,
    scale: float,
    wants_x: bool,
    d_weight_dtype: torch.dtype | None,
    losses_: Losses,
    bias_V: Tensor | None = None,
    wants_bias: bool = False,
    rounds_up: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The summed loss, and the gradients of x, weight and bias; None for a gradient that is not wanted.

    Args:
        d_weight_dtype: dtype of the weight's gradient; None: it is not wanted.
        rounds_up: whether the products have C columns, by rows of zeros after the weight's. None: for many tokens on
            devices other than a CPU. There also the products of the weight's gradient are not rounded before the sum.
    """
    num_tokens, vocab = len(x_ND), len(weight_VD)
    work = torch.promote_types(x_ND.dtype, torch.float32)
    loss = x_ND.new_zeros((), dtype=work)
    d_x_ND = torch.empty_like(x_ND) if wants_x else None
    d_weight_VD: Tensor | None = None
    wants = wants_x or d_weight_dtype is not None or wants_bias
    d_bias_V = weight_VD.new_zeros(vocab, dtype=work) if wants_bias else None
    elsewhere = rounds_up or x_ND.device.type != "cpu"
    rounds_up = elsewhere and num_tokens >= WORTH_A_COPY if rounds_up is None else rounds_up
    columns = vocab if vocab < SMALL_VOCAB and not rounds_up else -(-vocab // ALIGNED_ROWS) * ALIGNED_ROWS
    weight_CD, bias_C = weight_VD, bias_V
    buffer_NC = x_ND.new_empty(min(chunk, num_tokens), columns)
    if rounds_up:
        weight_CD, bias_C = _rounded_up(weight_VD, columns), None if bias_V is None else _rounded_up(bias_V, columns)
    else:
        # oneDNN's AMX kernels read whole tiles and multiply the padding by 0, so the padding must not contain a NaN.
        buffer_NC[:, vocab:].zero_()
    for start in range(0, num_tokens, chunk):
        x_chunk_ND = x_ND[start : start + chunk]
        padded_NC = buffer_NC[: len(x_chunk_ND)]
        product_NC, logits_NV = padded_NC[:, : len(weight_CD)], padded_NC[:, :vocab]
        products.mm(x_chunk_ND, weight_CD.t(), out=product_NC, bias_M=bias_C)
        loss += losses_(logits_NV, targets_N[start : start + chunk], work, wants).sum()
        if d_x_ND is not None:
            products.mm(product_NC, weight_CD, out=d_x_ND[start : start + chunk])
        if d_weight_dtype is not None and elsewhere and num_tokens > chunk:
            d_weight_VD = products.add_product(d_weight_VD, padded_NC.t(), x_chunk_ND, work, scale)
        elif d_weight_dtype is not None:
            # The product includes the padding columns. The slice removes their rows.
            d_chunk_VD = products.mm(padded_NC.t(), x_chunk_ND * scale)[:vocab]
            if d_weight_VD is not None:
                d_weight_VD += d_chunk_VD
            else:
                d_weight_VD = d_chunk_VD.to(d_chunk_VD.dtype if num_tokens <= chunk else work)
        if d_bias_V is not None:
            d_bias_V += logits_NV.sum(0, dtype=work)
    if d_x_ND is not None:
        d_x_ND *= scale
    if d_bias_V is not None and bias_V is not None:
        d_bias_V = d_bias_V.mul_(scale).to(bias_V.dtype)
    if d_weight_dtype is not None:
        d_weight_VD = torch.zeros_like(weight_VD) if d_weight_VD is None else d_weight_VD  # None: no tokens
        d_weight_VD = d_weight_VD[:vocab].to(d_weight_dtype)
    return loss, d_x_ND, d_weight_VD, d_bias_V


def _rounded_up(rows_V: Tensor, columns: int) -> Tensor:
    """A copy with rows of zeros at its end, so that there are `columns` rows; the rows themselves if there are."""
    missing = columns - len(rows_V)
    return torch.cat([rows_V, rows_V.new_zeros(missing, *rows_V.shape[1:])]) if missing else rows_V


def _softmax_gradient_(
    logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool, objective: Objective
) -> Tensor:
    """The losses (see `SoftmaxGradient`). The gradient of the plain cross-entropy is softmax - onehot."""
    if fused_softmax.serves(logits_NV):
        return fused_softmax.softmax_gradient_(logits_NV, targets_N, work, wants_gradient, objective)
    smoothing, vocab = objective.label_smoothing, logits_NV.shape[1]
    at_target_N1 = logits_NV.gather(1, targets_N[:, None])
    mean_N1 = sum_of_logits(logits_NV, work) / vocab if smoothing else at_target_N1
    if logits_NV.device.type != "cpu" or vocab < SMALL_VOCAB:
        log_p_NV = torch.log_softmax(logits_NV, -1, dtype=work)
        entropies_N1 = -log_p_NV.gather(1, targets_N[:, None])
        log_z_N1 = entropies_N1 + at_target_N1
        if wants_gradient:
            torch.exp(log_p_NV, out=logits_NV)
    else:
        largest_2N1 = softmax_in_pieces_(logits_NV, work, wants_gradient)
        # log(sum(exp)) is the largest logit minus the log of its probability, so exp is not computed again.
        log_z_N1 = largest_2N1[0] - largest_2N1[1].log()
        entropies_N1 = log_z_N1 - at_target_N1
    if wants_gradient:
        if objective != CROSS_ENTROPY:
            scale_(logits_NV, factor_of_softmax(log_z_N1, objective), smoothing / vocab)
        at_target_N = gradient_at_targets(entropies_N1, log_z_N1, objective, vocab).squeeze(1)
        rows_N = torch.arange(len(targets_N), device=targets_N.device)  # in bf16, scatter_ would copy all logits
        logits_NV[rows_N, targets_N] = at_target_N.to(logits_NV.dtype)
    smoothed_N1 = entropies_N1 + smoothing * (at_target_N1 - mean_N1) if smoothing else entropies_N1
    return with_z_loss(smoothed_N1, log_z_N1, objective)


def _with_objective(softmax_gradient_: SoftmaxGradient, objective: Objective) -> Losses:
    return lambda logits_NV, targets_N, work, wants: softmax_gradient_(logits_NV, targets_N, work, wants, objective)


def _capping(losses_: Losses, cap: float) -> Losses:
    """Wrap a softmax: it reads capped logits, and the gradient is that of the logits before. 0: there is no cap."""
    if not cap:
        return losses_

    def with_cap_(logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool) -> Tensor:
        slope_NV = cap_(logits_NV, cap)
        losses_N1 = losses_(logits_NV, targets_N, work, wants_gradient)
        if wants_gradient:
            logits_NV.mul_(slope_NV)
        return losses_N1

    return with_cap_


def _skipping(losses_: Losses) -> Losses:
    """Wrap a softmax: tokens with a negative target have no loss and no gradient. Their logits are still computed, so
    the size of the collectives per chunk does not depend on the targets."""

    def with_skipped_(logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool) -> Tensor:
        skipped_N1 = (targets_N < 0)[:, None]
        losses_N1 = losses_(logits_NV, targets_N.clamp(min=0), work, wants_gradient)
        if wants_gradient:
            logits_NV.masked_fill_(skipped_N1, 0.0)
        return losses_N1.masked_fill(skipped_N1, 0.0)

    return with_skipped_


# head_loss, opaque to torch.compile. Otherwise it would unroll the pieces and choose itself what stays in memory.
@torch.library.custom_op("codescent::head_loss", mutates_args=())
def _head_loss_op(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int,
    scale: float,
    wants_gradient: bool,
    label_smoothing: float,
    z_loss: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    d_weight_dtype = weight_VD.dtype if wants_gradient else None
    losses_ = _capping(_with_objective(_softmax_gradient_, Objective(label_smoothing, z_loss)), cap)
    loss, d_x_ND, d_weight_VD, _ = _loss_and_gradients(
        x_ND, weight_VD, targets_N, chunk, scale, wants_gradient, d_weight_dtype, losses_
    )
    empty = x_ND.new_empty(0)
    return loss, empty if d_x_ND is None else d_x_ND, empty.clone() if d_weight_VD is None else d_weight_VD


@_head_loss_op.register_fake
def _head_loss_shapes(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int,
    scale: float,
    wants_gradient: bool,
    label_smoothing: float,
    z_loss: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = x_ND.new_empty((), dtype=torch.promote_types(x_ND.dtype, torch.float32))
    if not wants_gradient:
        return loss, x_ND.new_empty(0), x_ND.new_empty(0)
    return loss, torch.empty_like(x_ND), torch.empty_like(weight_VD)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])


def _head_loss_op_backward(ctx: Any, d_loss: Tensor, _d_d_x: Any, _d_d_weight: Any) -> tuple[Tensor | None, ...]:
    d_x_ND, d_weight_VD = ctx.saved_tensors
    scale = d_loss.to(d_x_ND.dtype)
    return d_x_ND * scale, d_weight_VD * scale, *(None,) * 7


_head_loss_op.register_autograd(_head_loss_op_backward, setup_context=_save_gradients)
