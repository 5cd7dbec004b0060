"""In: queries, keys and values by head. Out: causal attention, as products over blocks of queries, on any device.
Does not choose where it runs (attention.py does), and has no dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.linear import is_kept
from codescent.operators.saved_attention import BLOCK_QUERIES, KEEP_HEAD_DIMS, first_key
from codescent.operators.scores import ScoreTraits
from codescent.operators.soft_cap import cap_

# Shapes: B batch, T positions, G key-value heads, which are also the groups; E heads of a group: its queries, key and
# value; K head_dim. P = B * G pairs of sample and group, Q queries of a block, S keys that one of them sees, R query
# heads of a group, N = R * Q rows of the heads of a group.


class BlockAttention(torch.autograd.Function):
    """Causal attention as batched matrix products over blocks of queries, each with the keys that it may see.

    Queries of heads that read the same keys are rows of one product. Backward recomputes the probabilities from q and
    k, unless they are small and `is_kept` is true: then forward saves them. With a cap or off a CPU it saves none.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BTGEK: Tensor, recompute: bool, scores: ScoreTraits) -> Tensor:
        """The attention output: [B, T, D]."""
        _, length, _, _, head_dim = qkv_BTGEK.shape
        short = length <= KEEP_HEAD_DIMS * head_dim and not scores.cap and qkv_BTGEK.device.type == "cpu"
        wide_BTGEK = products.widened(qkv_BTGEK)
        keep = ctx.needs_input_grad[0] and short and not recompute and is_kept(wide_BTGEK)
        y_BTD, qkv_EPTK, kept = _attend(wide_BTGEK, keep, scores)
        ctx.scores = scores
        ctx.save_for_backward(qkv_EPTK.to(qkv_BTGEK.dtype), *kept)
        return y_BTD.to(qkv_BTGEK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the projections."""
        qkv_EPTK, *kept = ctx.saved_tensors
        d_qkv_BTGEK = _attend_backward(products.widened(d_y_BTD), products.widened(qkv_EPTK), kept, ctx.scores)
        return d_qkv_BTGEK.to(d_y_BTD.dtype), None, None


def _attend(qkv_BTGEK: Tensor, keep: bool, scores: ScoreTraits) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The attention output, the projections ordered by head, and if `keep` the probabilities of each block."""
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    qkv_EPTK = qkv_BTGEK.permute(3, 0, 2, 1, 4).reshape(rows, batch * groups, length, head_dim)
    v_PTK = qkv_EPTK[-1]
    later_QT = _later(length, qkv_BTGEK)
    blocks, kept = [], []
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        probabilities_PNS, _ = _probabilities(qkv_EPTK, later_QT, start, stop, scores)
        y_PNK = torch.bmm(probabilities_PNS, v_PTK[:, first_key(start, scores.window) : stop])
        blocks.append(y_PNK.view(batch * groups, rows - 2, stop - start, head_dim))
        if keep:
            kept.append(probabilities_PNS)
    y_PRTK = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
    y_BHTK = y_PRTK.view(batch, groups * (rows - 2), length, head_dim)
    return y_BHTK.transpose(1, 2).reshape(batch, length, -1), qkv_EPTK, kept


def _later(length: int, like: Tensor) -> Tensor:
    """Causal mask, to add: -inf where a key is later than the query, else 0. [Q, T], as the last block reads it."""
    rows = min(BLOCK_QUERIES, length)
    return like.new_full((rows, length), -math.inf).triu_(length - rows + 1)


def _rows(x_RPTK: Tensor, start: int, stop: int) -> Tensor:
    """[P, N, K]: positions [start, stop) of all heads of each group, head after head. With one head it is a view."""
    return x_RPTK[:, :, start:stop].transpose(0, 1).flatten(1, 2)


def _probabilities(
    qkv_EPTK: Tensor, later_QT: Tensor, start: int, stop: int, scores: ScoreTraits
) -> tuple[Tensor, Tensor | None]:
    """Of the queries [start, stop); and with a cap the slope of each score in its product of query and key."""
    q_RPTK, window, first = qkv_EPTK[:-2], scores.window, first_key(start, scores.window)
    k_PSK = qkv_EPTK[-2][:, first:stop]
    rows, length = later_QT.shape
    # Row r of the mask belongs to query length - rows + r. A block that starts `shift` positions earlier skips `shift`
    # columns of the mask. A shorter last block starts later: it skips rows instead.
    shift = length - rows - start
    right, below = max(shift, 0), max(-shift, 0)
    mask_QS = later_QT[below : below + stop - start, right + first : right + stop]
    if window:  # key first + s is too early for query start + q if q - s > first + window - start - 1
        past_QS = torch.ones_like(mask_QS, dtype=torch.bool).tril_(start - first - window)
        mask_QS = mask_QS.masked_fill(past_QS, -math.inf)
    mask_NS = mask_QS if len(q_RPTK) == 1 else mask_QS.repeat(len(q_RPTK), 1)
    q_PNK = _rows(q_RPTK, start, stop)
    factor = scores.factor(q_PNK.shape[-1])
    if not scores.cap:
        return torch.softmax(torch.baddbmm(mask_NS, q_PNK, k_PSK.transpose(1, 2), alpha=factor), -1), None
    wide = torch.promote_types(q_PNK.dtype, torch.float32)
    scores_PNS = torch.bmm(q_PNK, k_PSK.transpose(1, 2)).to(wide).mul_(factor)
    slope_PNS = cap_(scores_PNS, scores.cap)
    return torch.softmax(scores_PNS.add_(mask_NS), -1).to(q_PNK.dtype), slope_PNS


def _attend_backward(d_y_BTD: Tensor, qkv_EPTK: Tensor, kept: list[Tensor], scores: ScoreTraits) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    batch, heads, window = len(d_y_BTD), rows - 2, scores.window
    q_RPTK, k_PTK, v_PTK = qkv_EPTK[:-2], qkv_EPTK[-2], qkv_EPTK[-1]
    d_y_BTGRK = d_y_BTD.reshape(batch, length, -1, heads, head_dim)
    d_y_RPTK = d_y_BTGRK.permute(3, 0, 2, 1, 4).reshape(heads, pairs, length, head_dim)
    d_qkv_EPTK = torch.zeros_like(qkv_EPTK) if window else torch.empty_like(qkv_EPTK)
    d_q_RPTK, d_k_PTK, d_v_PTK = d_qkv_EPTK[:-2], d_qkv_EPTK[-2], d_qkv_EPTK[-1]
    later_QT = _later(length, qkv_EPTK) if not kept else qkv_EPTK
    scale = scores.factor(head_dim)
    # The last block comes first: without a window it sees every key, and writes all of d_k and d_v. Other blocks add.
    for start in reversed(range(0, length, BLOCK_QUERIES)):
        stop = min(start + BLOCK_QUERIES, length)
        seen, slope_PNS = slice(first_key(start, window), stop), None
        if kept:
            p_PNS = kept[start // BLOCK_QUERIES]
        else:
            p_PNS, slope_PNS = _probabilities(qkv_EPTK, later_QT, start, stop, scores)
        d_y_PNK = _rows(d_y_RPTK, start, stop)
        d_p_PNS = torch.bmm(d_y_PNK, v_PTK[:, seen].transpose(1, 2))
        # torch's backward of softmax, in one pass. It has no public name.
        d_s_PNS = torch.ops.aten._softmax_backward_data(d_p_PNS, p_PNS, -1, p_PNS.dtype)
        if slope_PNS is not None:
            d_s_PNS = (d_s_PNS * slope_PNS).to(p_PNS.dtype)
        beta = 0.0 if stop == length and not window else 1.0
        d_q_PNK = _rows(d_q_RPTK, start, stop)
        d_q_PNK.baddbmm_(d_s_PNS, k_PTK[:, seen], beta=0.0, alpha=scale)
        if d_q_PNK.data_ptr() != d_q_RPTK[:, :, start:stop].data_ptr():  # of several heads it may be a copy
            d_q_RPTK[:, :, start:stop] = d_q_PNK.view(pairs, heads, stop - start, head_dim).transpose(0, 1)
        d_k_PTK[:, seen].baddbmm_(d_s_PNS.transpose(1, 2), _rows(q_RPTK, start, stop), beta=beta, alpha=scale)
        d_v_PTK[:, seen].baddbmm_(p_PNS.transpose(1, 2), d_y_PNK, beta=beta)
    d_qkv_EBGTK = d_qkv_EPTK.view(rows, batch, -1, length, head_dim)
    d_qkv_BTGEK: Tensor = d_qkv_EBGTK.permute(1, 3, 2, 0, 4).contiguous()
    return d_qkv_BTGEK


# The same attention, opaque to torch.compile: its kernels for these products are no faster, and its SDPA is slower.
@torch.library.custom_op("codescent::block_attention", mutates_args=())
def block_attention_op(qkv_BTGEK: Tensor, window: int = 0, cap: float = 0.0, width: int = 0) -> tuple[Tensor, Tensor]:
    """The attention output [B, T, D], and the projections by head, [E, P, T, K], which backward reads."""
    y_BTD, qkv_EPTK, _ = _attend(products.widened(qkv_BTGEK), False, ScoreTraits(window, cap, width))
    y_BTD, qkv_EPTK = y_BTD.to(qkv_BTGEK.dtype), qkv_EPTK.to(qkv_BTGEK.dtype)
    # With one sample or one group qkv_EPTK is a view of the input. A custom op must return new memory, and in the
    # layout that `_attention_shapes` promises.
    own = qkv_EPTK.untyped_storage().data_ptr() != qkv_BTGEK.untyped_storage().data_ptr()
    return y_BTD, qkv_EPTK.contiguous() if own else qkv_EPTK.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("codescent::block_attention_backward", mutates_args=())
def _block_attention_backward_op(d_y_BTD: Tensor, qkv_EPTK: Tensor, window: int, cap: float, width: int) -> Tensor:
    scores = ScoreTraits(window, cap, width)
    return _attend_backward(products.widened(d_y_BTD), products.widened(qkv_EPTK), [], scores).to(d_y_BTD.dtype)


@block_attention_op.register_fake
def _attention_shapes(qkv_BTGEK: Tensor, window: int = 0, cap: float = 0.0, width: int = 0) -> tuple[Tensor, Tensor]:
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    y_BTD = qkv_BTGEK.new_empty(batch, length, groups * (rows - 2) * head_dim)
    return y_BTD, qkv_BTGEK.new_empty(rows, batch * groups, length, head_dim)


@_block_attention_backward_op.register_fake
def _attention_backward_shape(d_y_BTD: Tensor, qkv_EPTK: Tensor, window: int, cap: float, width: int) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    return d_y_BTD.new_empty(len(d_y_BTD), length, pairs // len(d_y_BTD), rows, head_dim)


def _save_projections(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scores = inputs[1:]


def _attention_op_backward(ctx: Any, d_y_BTD: Tensor, _d_qkv: Tensor | None) -> tuple[Tensor | None, ...]:
    d_qkv_BTGEK: Tensor = _block_attention_backward_op(d_y_BTD.contiguous(), ctx.saved_tensors[0], *ctx.scores)
    return d_qkv_BTGEK, None, None, None


block_attention_op.register_autograd(_attention_op_backward, setup_context=_save_projections)
