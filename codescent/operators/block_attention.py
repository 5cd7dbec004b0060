"""In: queries, keys and values by head. Out: causal attention, as products over blocks of queries, on any device.
Does not choose where it runs (attention.py does), and has no dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.linear import is_kept
from codescent.operators.saved_attention import BLOCK_QUERIES, KEEP_HEAD_DIMS, first_key
from codescent.operators.soft_cap import cap_

# Shapes: B batch, T positions, G key-value heads, which are also the groups; E heads of a group: its queries, key and
# value; K head_dim, V channels of a value. P = B * G pairs of sample and group, Q queries of a block, S keys that one
# sees, R query heads of a group, N = R * Q rows of the heads of a group. `begins_BT`: see `DocumentBounds`; None: one
# document a sample. Samples with documents are computed one by one: each has other keys that no block reads.


@dataclass(frozen=True)
class ScoreTraits:
    """Traits of the scores of causal attention.

    Attributes:
        window: a position sees so many positions, itself included; 0: all earlier ones.
        cap: a score s becomes cap * tanh(s / cap) (Gemma Team 2024, "Gemma 2", section 2); 0: it stays.
        width: products are divided by the square root of this number; 0: of the channels of a head.
        values: channels of a value, the first ones of a head; the others are 0, and have no output. 0: it has all.
    """

    window: int = 0
    cap: float = 0.0
    width: float = 0.0
    values: int = 0

    def within(self, length: int) -> ScoreTraits:
        """The same for samples of so many positions: a window of all of them is none."""
        return self if self.window < length else replace(self, window=0)

    def of_values(self, x: Tensor) -> Tensor:
        """The channels that a value has, of those of a head."""
        return x[..., : self.values] if self.values else x

    @property
    def by_blocks(self) -> bool:
        """Whether no fused kernel of torch computes them without a mask: then it is done block by block."""
        return bool(self.window or self.cap)

    def scale(self, head_dim: int) -> float | None:
        """The factor, for kernels that know the usual one by themselves; None: it is that."""
        return self.factor(head_dim) if self.width else None

    def factor(self, head_dim: int) -> float:
        """By what products of queries and keys are multiplied."""
        return 1.0 / math.sqrt(self.width or head_dim)


PLAIN = ScoreTraits()
"""q k^T / sqrt(head_dim), of all earlier positions."""


class BlockAttention(torch.autograd.Function):
    """Causal attention as batched matrix products over blocks of queries, each with the keys that it may see.

    Queries of heads that read the same keys are rows of one product. Backward recomputes the probabilities from q and
    k, unless they are small and `is_kept` is true: then forward saves them. With a cap or off a CPU it saves none.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_BTGEK: Tensor, recompute: bool, scores: ScoreTraits, begins_BT: Tensor | None = None
    ) -> Tensor:
        """The attention output: [B, T, D]. With documents no probabilities are saved."""
        _, length, _, _, head_dim = qkv_BTGEK.shape
        short = length <= KEEP_HEAD_DIMS * head_dim and begins_BT is None
        short = short and not scores.cap and qkv_BTGEK.device.type == "cpu"
        wide_BTGEK = products.widened(qkv_BTGEK)
        keep = ctx.needs_input_grad[0] and short and not recompute and is_kept(wide_BTGEK)
        y_BTD, qkv_EPTK, kept = _attend_each(wide_BTGEK, keep, scores, begins_BT)
        ctx.scores = scores
        ctx.save_for_backward(qkv_EPTK.to(qkv_BTGEK.dtype), begins_BT, *kept)
        return y_BTD.to(qkv_BTGEK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the projections."""
        qkv_EPTK, begins_BT, *kept = ctx.saved_tensors
        wide = products.widened(d_y_BTD), products.widened(qkv_EPTK)
        d_qkv_BTGEK = _attend_backward_each(*wide, kept, ctx.scores, begins_BT)
        return d_qkv_BTGEK.to(d_y_BTD.dtype), None, None, None


class _Seen:
    """Which keys queries see, beside that none is later: those of a window, and those of their document.

    Off a CPU every block reads the keys of all documents: to know fewer, the host would wait for the device.
    """

    def __init__(self, scores: ScoreTraits, begins_T: Tensor | None = None) -> None:
        self.scores, self.begins_T = scores, begins_T
        on_cpu = begins_T is not None and begins_T.device.type == "cpu"
        self._begins = begins_T[::BLOCK_QUERIES].tolist() if begins_T is not None and on_cpu else None

    @property
    def all_earlier(self) -> bool:
        """Whether the last query reads every key."""
        return not self.scores.window and self._begins is None

    def first(self, start: int) -> int:
        """The first key that the block of queries from `start` on reads."""
        begin, window = 0 if self._begins is None else self._begins[start // BLOCK_QUERIES], self.scores.window
        return max(begin, first_key(start, window)) if window else begin

    def hide(self, mask_QS: Tensor, start: int) -> Tensor:
        """The mask of this block, to add, with -inf also where the key is too early for the query."""
        first, window = self.first(start), self.scores.window
        if window:  # key first + s is too early for query start + q if q - s > first + window - start - 1
            past_QS = torch.ones_like(mask_QS, dtype=torch.bool).tril_(start - first - window)
            mask_QS = mask_QS.masked_fill(past_QS, -math.inf)
        if self.begins_T is not None:
            begins_Q = self.begins_T[start : start + len(mask_QS)]
            keys_S = torch.arange(first, first + mask_QS.shape[1], device=mask_QS.device)
            mask_QS = mask_QS.masked_fill(keys_S < begins_Q[:, None], -math.inf)
        return mask_QS


def _attend_each(
    qkv_BTGEK: Tensor, keep: bool, scores: ScoreTraits, begins_BT: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `_attend`."""
    if begins_BT is None:
        return _attend(qkv_BTGEK, keep, _Seen(scores))
    samples = len(begins_BT)
    found = [_attend(*one) for one in _samples(scores, begins_BT, qkv_BTGEK.chunk(samples), [False] * samples)]
    y_1TD, qkv_EGTK, _ = zip(*found, strict=True)
    return torch.cat(y_1TD), torch.cat(qkv_EGTK, 1), []


def _attend_backward_each(
    d_y_BTD: Tensor, qkv_EPTK: Tensor, kept: list[Tensor], scores: ScoreTraits, begins_BT: Tensor | None
) -> Tensor:
    """The gradient of the projections: [B, T, G, E, K]."""
    if begins_BT is None:
        return _attend_backward(d_y_BTD, qkv_EPTK, kept, _Seen(scores))
    samples = len(begins_BT)
    nothing_kept: list[list[Tensor]] = [[]] * samples
    parts = d_y_BTD.chunk(samples), qkv_EPTK.chunk(samples, 1), nothing_kept
    return torch.cat([_attend_backward(*one) for one in _samples(scores, begins_BT, *parts)])


def _samples(scores: ScoreTraits, begins_BT: Tensor, *each: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The arguments of each sample, and the keys that its queries see."""
    for begins_T, *of_sample in zip(begins_BT, *each, strict=True):
        yield (*of_sample, _Seen(scores, begins_T))


def _attend(qkv_BTGEK: Tensor, keep: bool, seen: _Seen) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The attention output, the projections ordered by head, and if `keep` the probabilities of each block."""
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    qkv_EPTK = qkv_BTGEK.permute(3, 0, 2, 1, 4).reshape(rows, batch * groups, length, head_dim)
    v_PTV = seen.scores.of_values(qkv_EPTK[-1])
    later_QT = _later(length, qkv_BTGEK)
    blocks, kept = [], []
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        probabilities_PNS, _ = _probabilities(qkv_EPTK, later_QT, start, stop, seen)
        y_PNV = torch.bmm(probabilities_PNS, v_PTV[:, seen.first(start) : stop])
        blocks.append(y_PNV.view(batch * groups, rows - 2, stop - start, v_PTV.shape[2]))
        if keep:
            kept.append(probabilities_PNS)
    y_PRTV = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
    y_BHTV = y_PRTV.view(batch, groups * (rows - 2), length, v_PTV.shape[2])
    return y_BHTV.transpose(1, 2).reshape(batch, length, -1), qkv_EPTK, kept


def _later(length: int, like: Tensor) -> Tensor:
    """Causal mask, to add: -inf where a key is later than the query, else 0. [Q, T], as the last block reads it."""
    rows = min(BLOCK_QUERIES, length)
    return like.new_full((rows, length), -math.inf).triu_(length - rows + 1)


def _rows(x_RPTK: Tensor, start: int, stop: int) -> Tensor:
    """[P, N, K]: positions [start, stop) of all heads of each group, head after head. With one head it is a view."""
    return x_RPTK[:, :, start:stop].transpose(0, 1).flatten(1, 2)


def _probabilities(
    qkv_EPTK: Tensor, later_QT: Tensor, start: int, stop: int, seen: _Seen
) -> tuple[Tensor, Tensor | None]:
    """Of the queries [start, stop); and with a cap the slope of each score in its product of query and key."""
    q_RPTK, scores, first = qkv_EPTK[:-2], seen.scores, seen.first(start)
    k_PSK = qkv_EPTK[-2][:, first:stop]
    rows, length = later_QT.shape
    # Row r of the mask belongs to query length - rows + r. A block that starts `shift` positions earlier skips `shift`
    # columns of the mask. A shorter last block starts later: it skips rows instead.
    shift = length - rows - start
    right, below = max(shift, 0), max(-shift, 0)
    mask_QS = seen.hide(later_QT[below : below + stop - start, right + first : right + stop], start)
    mask_NS = mask_QS if len(q_RPTK) == 1 else mask_QS.repeat(len(q_RPTK), 1)
    q_PNK = _rows(q_RPTK, start, stop)
    factor = scores.factor(q_PNK.shape[-1])
    if not scores.cap:
        return torch.softmax(torch.baddbmm(mask_NS, q_PNK, k_PSK.transpose(1, 2), alpha=factor), -1), None
    wide = torch.promote_types(q_PNK.dtype, torch.float32)
    scores_PNS = torch.bmm(q_PNK, k_PSK.transpose(1, 2)).to(wide).mul_(factor)
    slope_PNS = cap_(scores_PNS, scores.cap)
    return torch.softmax(scores_PNS.add_(mask_NS), -1).to(q_PNK.dtype), slope_PNS


def _attend_backward(d_y_BTD: Tensor, qkv_EPTK: Tensor, kept: list[Tensor], seen: _Seen) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    batch, heads = len(d_y_BTD), rows - 2
    q_RPTK, k_PTK, v_PTV = qkv_EPTK[:-2], qkv_EPTK[-2], seen.scores.of_values(qkv_EPTK[-1])
    d_y_BTGRV = d_y_BTD.reshape(batch, length, -1, heads, v_PTV.shape[2])
    d_y_RPTV = d_y_BTGRV.permute(3, 0, 2, 1, 4).reshape(heads, pairs, length, v_PTV.shape[2])
    filled = seen.all_earlier and v_PTV.shape[2] == head_dim
    d_qkv_EPTK = torch.empty_like(qkv_EPTK) if filled else torch.zeros_like(qkv_EPTK)
    d_q_RPTK, d_k_PTK, d_v_PTV = d_qkv_EPTK[:-2], d_qkv_EPTK[-2], seen.scores.of_values(d_qkv_EPTK[-1])
    later_QT = _later(length, qkv_EPTK) if not kept else qkv_EPTK
    scale = seen.scores.factor(head_dim)
    # The last block comes first: if it sees every key, it writes all of d_k and d_v. Other blocks add.
    for start in reversed(range(0, length, BLOCK_QUERIES)):
        stop = min(start + BLOCK_QUERIES, length)
        keys, slope_PNS = slice(seen.first(start), stop), None
        if kept:
            p_PNS = kept[start // BLOCK_QUERIES]
        else:
            p_PNS, slope_PNS = _probabilities(qkv_EPTK, later_QT, start, stop, seen)
        d_y_PNV = _rows(d_y_RPTV, start, stop)
        d_p_PNS = torch.bmm(d_y_PNV, v_PTV[:, keys].transpose(1, 2))
        # torch's backward of softmax, in one pass. It has no public name.
        d_s_PNS = torch.ops.aten._softmax_backward_data(d_p_PNS, p_PNS, -1, p_PNS.dtype)
        if slope_PNS is not None:
            d_s_PNS = (d_s_PNS * slope_PNS).to(p_PNS.dtype)
        beta = 0.0 if stop == length and seen.all_earlier else 1.0
        d_q_PNK = _rows(d_q_RPTK, start, stop)
        d_q_PNK.baddbmm_(d_s_PNS, k_PTK[:, keys], beta=0.0, alpha=scale)
        if d_q_PNK.data_ptr() != d_q_RPTK[:, :, start:stop].data_ptr():  # of several heads it may be a copy
            d_q_RPTK[:, :, start:stop] = d_q_PNK.view(pairs, heads, stop - start, head_dim).transpose(0, 1)
        d_k_PTK[:, keys].baddbmm_(d_s_PNS.transpose(1, 2), _rows(q_RPTK, start, stop), beta=beta, alpha=scale)
        d_v_PTV[:, keys].baddbmm_(p_PNS.transpose(1, 2), d_y_PNV, beta=beta)
    d_qkv_EBGTK = d_qkv_EPTK.view(rows, batch, -1, length, head_dim)
    d_qkv_BTGEK: Tensor = d_qkv_EBGTK.permute(1, 3, 2, 0, 4).contiguous()
    return d_qkv_BTGEK


# The same attention, opaque to torch.compile: its kernels for these products are no faster, and its SDPA is slower.
@torch.library.custom_op("codescent::block_attention", mutates_args=())
def block_attention_op(
    qkv_BTGEK: Tensor, window: int = 0, cap: float = 0.0, width: float = 0.0, begins_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention output [B, T, D], and the projections by head, [E, P, T, K], which backward reads."""
    wide_BTGEK, scores = products.widened(qkv_BTGEK), ScoreTraits(window, cap, width)
    y_BTD, qkv_EPTK, _ = _attend_each(wide_BTGEK, False, scores, begins_BT)
    y_BTD, qkv_EPTK = y_BTD.to(qkv_BTGEK.dtype), qkv_EPTK.to(qkv_BTGEK.dtype)
    # With one sample or one group qkv_EPTK is a view of the input. A custom op must return new memory, and in the
    # layout that `_attention_shapes` promises.
    own = qkv_EPTK.untyped_storage().data_ptr() != qkv_BTGEK.untyped_storage().data_ptr()
    return y_BTD, qkv_EPTK.contiguous() if own else qkv_EPTK.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("codescent::block_attention_backward", mutates_args=())
def _block_attention_backward_op(
    d_y_BTD: Tensor, qkv_EPTK: Tensor, window: int, cap: float, width: float, begins_BT: Tensor | None
) -> Tensor:
    wide, scores = (products.widened(d_y_BTD), products.widened(qkv_EPTK)), ScoreTraits(window, cap, width)
    return _attend_backward_each(*wide, [], scores, begins_BT).to(d_y_BTD.dtype)


@block_attention_op.register_fake
def _attention_shapes(
    qkv_BTGEK: Tensor, window: int = 0, cap: float = 0.0, width: float = 0.0, begins_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    y_BTD = qkv_BTGEK.new_empty(batch, length, groups * (rows - 2) * head_dim)
    return y_BTD, qkv_BTGEK.new_empty(rows, batch * groups, length, head_dim)


@_block_attention_backward_op.register_fake
def _attention_backward_shape(
    d_y_BTD: Tensor, qkv_EPTK: Tensor, window: int, cap: float, width: float, begins_BT: Tensor | None
) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    return d_y_BTD.new_empty(len(d_y_BTD), length, pairs // len(d_y_BTD), rows, head_dim)


def _save_projections(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *ctx.scores, begins_BT = inputs[1:]
    ctx.save_for_backward(output[1], begins_BT)


def _attention_op_backward(ctx: Any, d_y_BTD: Tensor, _d_qkv: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv_EPTK, begins_BT = ctx.saved_tensors
    d_qkv_BTGEK: Tensor = _block_attention_backward_op(d_y_BTD.contiguous(), qkv_EPTK, *ctx.scores, begins_BT)
    return d_qkv_BTGEK, None, None, None, None


block_attention_op.register_autograd(_attention_op_backward, setup_context=_save_projections)
