"""In: activations of one layer, normed. Out: what causal self-attention adds to the residual stream.
Does not know tokens or other layers, and does not divide anything: who does, says so in `core` and `first_head`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.models.dropout import drop
from codescent.models.gpt2_shape import GPT2Shape
from codescent.models.linear import Linear, is_kept

if TYPE_CHECKING:
    from codescent.models.cache import LayerCache

# Shapes: B batch, T positions, D hidden_dim, H heads, K head_dim, E = H * 3 * K, S slots of the cache; in attention on
# a CPU: P = B * H pairs of sample and head, Q queries of a block, which see the first S positions.
_BLOCK_QUERIES = 128
_KEEP_HEAD_DIMS = 8  # up to seq_len = 8 * head_dim the probabilities take no more memory than the feed-forward's hidden


class AttentionCore(Protocol):
    """Attention of queries, keys and values whose sequence is divided over ranks."""

    def __call__(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, keys_B: Tensor | None, dropout: float, first_head: int
    ) -> Tensor:
        """[B, H, T, K]; `first_head` is the number of the first of these heads in the model."""


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are head by head, of each head q, then k, then v: so some of the heads
    are some of the rows, side by side.

    Attributes:
        recompute: make the probabilities again in the backward pass, where no fused kernel does so anyway.
        core: what computes attention instead of the kernels here, where the sequence is divided.
        first_head: number of the first head whose rows `qkv` has.
    """

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.head_dim, self.dropout = shape.head_dim, shape.dropout
        self.recompute = False
        self.core: AttentionCore | None = None
        self.first_head = 0
        self.qkv = Linear(shape.hidden_dim, 3 * shape.hidden_dim, shape.bias, device)
        self.out = Linear(shape.hidden_dim, shape.hidden_dim, shape.bias, device)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """What attention adds to the residual stream.

        Args:
            x_BTD: normed activations.
            keys_B: keys of the dropout of the attention probabilities; None drops nothing.
            cache: keys and values of earlier positions; takes these ones too.
        """
        qkv_BTE = self.qkv(x_BTD)
        if keys_B is None and cache is None and self.core is None:
            y_BTD: Tensor = self.out(causal_attention(qkv_BTE, self.head_dim, self.recompute))
            return y_BTD
        batch, length, _ = qkv_BTE.shape
        q_BTHK, k_BTHK, v_BTHK = qkv_BTE.view(batch, length, -1, 3, self.head_dim).unbind(3)
        q_BHTK = q_BTHK.transpose(1, 2)
        if self.core is not None:
            k_BHTK, v_BHTK = k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2)
            y_BHTK = self.core(q_BHTK, k_BHTK, v_BHTK, keys_B=keys_B, dropout=self.dropout, first_head=self.first_head)
        elif cache is not None:
            k_BSHK, v_BSHK = cache.extend(k_BTHK, v_BTHK)
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK, k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), attn_mask=cache.mask_B1TS
            )
        else:
            assert keys_B is not None
            y_BHTK = self._dropped(q_BHTK, k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), keys_B)
        y_BTD = self.out(y_BHTK.transpose(1, 2).reshape(batch, length, -1))
        return y_BTD

    def _dropped(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, keys_B: Tensor) -> Tensor:
        """Attention with some of its probabilities dropped, which no fused kernel does with our masks."""
        length = q_BHTK.shape[2]
        scores_BHTT = (q_BHTK * (1.0 / math.sqrt(self.head_dim))) @ k_BHTK.transpose(2, 3)
        later_TT = torch.ones(length, length, dtype=torch.bool, device=q_BHTK.device).triu(1)
        probabilities_BHTT = scores_BHTT.masked_fill(later_TT, -math.inf).softmax(-1)
        rows_R = torch.arange(q_BHTK.shape[1] * length, device=q_BHTK.device) + self.first_head * length
        kept = drop(probabilities_BHTT.flatten(1, 2), keys_B, self.dropout, rows_R)
        return kept.view_as(probabilities_BHTT) @ v_BHTK


def causal_attention(qkv_BTE: Tensor, head_dim: int, recompute: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the positions up to each one: [B, T, D].

    On CUDA this is torch's scaled_dot_product_attention. On a CPU it is `BlockAttention`: with 4 samples of 256
    positions, 12 heads of 64, one AVX-512 core, forward + backward take 9 ms against 33 in bf16, 15 against 34 in fp32.

    Args:
        qkv_BTE: contiguous; the last dim is head by head, of each q, then k, then v.
        head_dim: K.
        recompute: keep no probabilities for the backward pass, even if they are small; fused kernels never do.
    """
    if qkv_BTE.device.type == "cpu":
        if torch.compiler.is_compiling():
            y_BTD: Tensor = _block_attention_op(qkv_BTE, head_dim)[0]
            return y_BTD
        y_BTD = BlockAttention.apply(qkv_BTE, head_dim, recompute)  # type: ignore[no-untyped-call]
        return y_BTD
    batch, length, width = qkv_BTE.shape
    q_BTHK, k_BTHK, v_BTHK = qkv_BTE.view(batch, length, -1, 3, head_dim).unbind(3)
    y_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), is_causal=True
    )
    return y_BHTK.transpose(1, 2).reshape(batch, length, width // 3)


class BlockAttention(torch.autograd.Function):
    """Causal attention as batched matrix products over blocks of queries, each with the keys that it may see.

    Probabilities are made again from q and k in the backward pass, unless they are small and `is_kept` says yes.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BTE: Tensor, head_dim: int, recompute: bool) -> Tensor:
        """See `causal_attention`."""
        short = qkv_BTE.shape[1] <= _KEEP_HEAD_DIMS * head_dim
        keep = ctx.needs_input_grad[0] and short and not recompute and is_kept(qkv_BTE)
        y_BTD, qkv_3PTK, kept = _attend(qkv_BTE, head_dim, keep)
        ctx.save_for_backward(qkv_3PTK, *kept)
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of qkv."""
        qkv_3PTK, *kept = ctx.saved_tensors
        return _attend_backward(d_y_BTD, qkv_3PTK, kept), None, None


def _attend(qkv_BTE: Tensor, head_dim: int, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention, the projections laid out by head, and the probabilities of each block if they are to be kept."""
    batch, length, width = qkv_BTE.shape
    num_heads = width // (3 * head_dim)
    qkv_3BHTK = qkv_BTE.view(batch, length, num_heads, 3, head_dim).permute(3, 0, 2, 1, 4)
    qkv_3PTK = qkv_3BHTK.reshape(3, batch * num_heads, length, head_dim)
    v_PTK = qkv_3PTK[2]
    later_QT = _later(length, qkv_BTE)
    blocks, kept = [], []
    for start in range(0, length, _BLOCK_QUERIES):
        stop = min(start + _BLOCK_QUERIES, length)
        probabilities_PQS = _probabilities(qkv_3PTK, later_QT, start, stop)
        blocks.append(torch.bmm(probabilities_PQS, v_PTK[:, :stop]))
        if keep:
            kept.append(probabilities_PQS)
    y_PTK = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    y_BTD = y_PTK.view(batch, num_heads, length, head_dim).transpose(1, 2).reshape(batch, length, width // 3)
    return y_BTD, qkv_3PTK, kept


def _later(length: int, like: Tensor) -> Tensor:
    """-inf where a key is later than the query, else 0: [Q, T] for the last block; earlier ones read it shifted."""
    rows = min(_BLOCK_QUERIES, length)
    return like.new_full((rows, length), -math.inf).triu_(length - rows + 1)


def _probabilities(qkv_3PTK: Tensor, later_QT: Tensor, start: int, stop: int) -> Tensor:
    q_PTK, k_PTK, _ = qkv_3PTK.unbind(0)
    rows, length = later_QT.shape
    # Row r of the mask is for query length - rows + r: a block that starts earlier reads it as many columns to the
    # right, the last one, if it is shorter, as many rows below.
    shift = length - rows - start
    right, below = max(shift, 0), max(-shift, 0)
    mask_QS = later_QT[below : below + stop - start, right : right + stop]
    scores_PQS = torch.baddbmm(
        mask_QS, q_PTK[:, start:stop], k_PTK[:, :stop].transpose(1, 2), alpha=1.0 / math.sqrt(q_PTK.shape[-1])
    )
    return torch.softmax(scores_PQS, -1)


def _attend_backward(d_y_BTD: Tensor, qkv_3PTK: Tensor, kept: list[Tensor]) -> Tensor:
    _, pairs, length, head_dim = qkv_3PTK.shape
    batch = len(d_y_BTD)
    num_heads = pairs // batch
    q_PTK, k_PTK, v_PTK = qkv_3PTK.unbind(0)
    d_y_PTK = d_y_BTD.reshape(batch, length, num_heads, head_dim).transpose(1, 2).reshape(pairs, length, head_dim)
    d_qkv_3PTK = torch.empty_like(qkv_3PTK)
    d_q_PTK, d_k_PTK, d_v_PTK = d_qkv_3PTK.unbind(0)
    later_QT = _later(length, qkv_3PTK) if not kept else qkv_3PTK
    scale = 1.0 / math.sqrt(head_dim)
    # From the last block: it sees every key, so it writes all of d_k and d_v, to which the others add.
    for start in reversed(range(0, length, _BLOCK_QUERIES)):
        stop = min(start + _BLOCK_QUERIES, length)
        p_PQS = kept[start // _BLOCK_QUERIES] if kept else _probabilities(qkv_3PTK, later_QT, start, stop)
        d_y_PQK = d_y_PTK[:, start:stop]
        d_p_PQS = torch.bmm(d_y_PQK, v_PTK[:, :stop].transpose(1, 2))
        # The operator behind softmax's own backward: one pass, and no public name.
        d_s_PQS = torch.ops.aten._softmax_backward_data(d_p_PQS, p_PQS, -1, p_PQS.dtype)
        beta = 0.0 if stop == length else 1.0
        d_q_PTK[:, start:stop].baddbmm_(d_s_PQS, k_PTK[:, :stop], beta=0.0, alpha=scale)
        d_k_PTK[:, :stop].baddbmm_(d_s_PQS.transpose(1, 2), q_PTK[:, start:stop], beta=beta, alpha=scale)
        d_v_PTK[:, :stop].baddbmm_(p_PQS.transpose(1, 2), d_y_PQK, beta=beta)
    d_qkv_3BHTK = d_qkv_3PTK.view(3, batch, num_heads, length, head_dim)
    return d_qkv_3BHTK.permute(1, 3, 2, 0, 4).reshape(batch, length, 3 * num_heads * head_dim)


# The same, opaque to torch.compile: its own kernels for these products are no faster, and its SDPA is slower.
@torch.library.custom_op("codescent::block_attention", mutates_args=())
def _block_attention_op(qkv_BTE: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    y_BTD, qkv_3PTK, _ = _attend(qkv_BTE, head_dim, keep=False)
    return y_BTD, qkv_3PTK


@torch.library.custom_op("codescent::block_attention_backward", mutates_args=())
def _block_attention_backward_op(d_y_BTD: Tensor, qkv_3PTK: Tensor) -> Tensor:
    return _attend_backward(d_y_BTD, qkv_3PTK, [])


def _attention_shapes(qkv_BTE: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    batch, length, width = qkv_BTE.shape
    pairs = batch * (width // (3 * head_dim))
    return qkv_BTE.new_empty(batch, length, width // 3), qkv_BTE.new_empty(3, pairs, length, head_dim)


def _attention_backward_shape(d_y_BTD: Tensor, qkv_3PTK: Tensor) -> Tensor:
    batch, length, width = d_y_BTD.shape
    return d_y_BTD.new_empty(batch, length, 3 * width)


def _save_projections(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _attention_op_backward(ctx: Any, d_y_BTD: Tensor, _d_qkv: Tensor | None) -> tuple[Tensor, None]:
    return _block_attention_backward_op(d_y_BTD.contiguous(), ctx.saved_tensors[0]), None


_block_attention_op.register_fake(_attention_shapes)
_block_attention_backward_op.register_fake(_attention_backward_shape)
_block_attention_op.register_autograd(_attention_op_backward, setup_context=_save_projections)
