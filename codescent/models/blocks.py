"""In: activations of one layer. Out: those of the next: pre-norm attention and feed-forward, as GPT-2 has them.
Does not know tokens, losses or other layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.models.dropout import drop
from codescent.models.gpt2_shape import GPT2Shape

if TYPE_CHECKING:
    from codescent.models.cache import LayerCache

# Shapes: B batch, T positions, D hidden_dim, H heads, K head_dim, E = 3 * H * K, S slots of the cache; in attention on
# a CPU: P = B * H pairs of sample and head, Q queries of a block, which see the first S positions.
DROPOUT_SITES = 3  # in a block: attention probabilities, what attention adds, what the feed-forward adds

_BLOCK_QUERIES = 128
_KEEP_HEAD_DIMS = 8  # up to seq_len = 8 * head_dim the probabilities take no more memory than the feed-forward's hidden

# gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2u),  2u = x (A + B x^2)  (Hendrycks and Gimpel 2016)
_A = 2.0 * math.sqrt(2.0 / math.pi)
_B = _A * 0.044715
_PIECE = 1 << 17  # elements at a time: the intermediate values stay in the caches of two cores

_SMALL_BYTES = 4 << 20
_PAGE_BYTES = 4096  # addresses so far apart fall into the same set of a first-level cache
_LINE_BYTES = 64


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are all of q, then all of k, then all of v, each head by head."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.head_dim, self.dropout = shape.head_dim, shape.dropout
        self.recompute = False  # probabilities again in the backward pass, where no fused kernel does so anyway
        self.qkv = nn.Linear(shape.hidden_dim, 3 * shape.hidden_dim, bias=shape.bias, device=device)
        self.out = nn.Linear(shape.hidden_dim, shape.hidden_dim, bias=shape.bias, device=device)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """What attention adds to the residual stream.

        Args:
            x_BTD: normed activations.
            keys_B: keys of the dropout of the attention probabilities; None drops nothing.
            cache: keys and values of earlier positions; takes these ones too.
        """
        qkv_BTE = self.qkv(x_BTD)
        if keys_B is None and cache is None:
            y_BTD: Tensor = self.out(causal_attention(qkv_BTE, self.head_dim, self.recompute))
            return y_BTD
        batch, length, _ = x_BTD.shape
        q_BTHK, k_BTHK, v_BTHK = qkv_BTE.view(batch, length, 3, -1, self.head_dim).unbind(2)
        q_BHTK = q_BTHK.transpose(1, 2)
        if cache is not None:
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
        kept = drop(probabilities_BHTT.flatten(1, 2), keys_B, self.dropout)
        return kept.view_as(probabilities_BHTT) @ v_BHTK


class FeedForward(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_dim, shape.ffn_dim, bias=shape.bias, device=device)
        self.down = nn.Linear(shape.ffn_dim, shape.hidden_dim, bias=shape.bias, device=device)
        self.recompute = False  # GELU again in the backward pass

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream."""
        return gelu_linear_(self.up(x_BTD), self.down.weight, self.down.bias, self.recompute)


class Block(nn.Module):
    """One layer: x + attn(norm_1(x)), then x + mlp(norm_2(x))."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.norm_1 = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device)
        self.attn = Attention(shape, device)
        self.norm_2 = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device)
        self.mlp = FeedForward(shape, device)

    def forward(self, x_BTD: Tensor, keys_3B: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """The residual stream after this layer.

        Args:
            x_BTD: the residual stream.
            keys_3B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            cache: this layer's keys and values of earlier positions, when generating.
        """
        if keys_3B is None:
            x_BTD = x_BTD + self.attn(self.norm_1(x_BTD), None, cache)
            x_BTD = x_BTD + self.mlp(self.norm_2(x_BTD))
        else:
            x_BTD = x_BTD + drop(self.attn(self.norm_1(x_BTD), keys_3B[0], cache), keys_3B[1], self.dropout)
            x_BTD = x_BTD + drop(self.mlp(self.norm_2(x_BTD)), keys_3B[2], self.dropout)
        return x_BTD


def _is_kept(activation: Tensor) -> bool:
    """Whether a CPU keeps for the backward pass what it can make again from this activation.

    In fp32 to make GELU and probabilities again is 3 % of a step of GPT-2 124M and saves 250 of 3,200 MiB (4 x 256
    tokens); bf16 has half of the bytes to save, and beside its faster products it would be 8 %.
    """
    return activation.dtype == torch.bfloat16 or activation.nbytes <= _SMALL_BYTES


def causal_attention(qkv_BTE: Tensor, head_dim: int, recompute: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the positions up to each one: [B, T, D].

    On CUDA this is torch's scaled_dot_product_attention. On a CPU it is `BlockAttention`: with 4 samples of 256
    positions, 12 heads of 64, one AVX-512 core, forward + backward take 9 ms against 33 in bf16, 15 against 34 in fp32.

    Args:
        qkv_BTE: contiguous; the last dim is all of q, then all of k, then all of v, each head by head.
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
    q_BTHK, k_BTHK, v_BTHK = qkv_BTE.view(batch, length, 3, -1, head_dim).unbind(2)
    y_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), is_causal=True
    )
    return y_BHTK.transpose(1, 2).reshape(batch, length, width // 3)


class BlockAttention(torch.autograd.Function):
    """Causal attention as batched matrix products over blocks of queries, each with the keys that it may see.

    Probabilities are made again from q and k in the backward pass, unless they are small and `_is_kept` says yes.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BTE: Tensor, head_dim: int, recompute: bool) -> Tensor:
        """See `causal_attention`."""
        short = qkv_BTE.shape[1] <= _KEEP_HEAD_DIMS * head_dim
        keep = ctx.needs_input_grad[0] and short and not recompute and _is_kept(qkv_BTE)
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
    qkv_3BHTK = qkv_BTE.view(batch, length, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
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
    return d_qkv_3BHTK.permute(1, 3, 0, 2, 4).reshape(batch, length, 3 * num_heads * head_dim)


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


def gelu_linear_(h_BTF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, recompute: bool = False) -> Tensor:
    """gelu(h) weight^T + bias, GELU in its tanh form: [B, T, D]. Nobody else may read h: its memory is used again.

    On a CPU torch evaluates tanh-GELU in 1.8 to 2.1 ns an element (one AVX-512 core), sigmoid in 0.2 to 0.4. So GELU is
    written by sigmoid there, and its slope is made together with the value: 1.3 ns for both instead of 2.7. The two are
    a layer's largest activations: where `_is_kept` says no, only h is kept and they are made again.

    Args:
        h_BTF: contiguous.
        recompute: keep h alone for the backward pass.
    """
    if torch.compiler.is_compiling() or (h_BTF.device.type != "cpu" and not recompute):
        return F.linear(F.gelu(h_BTF, approximate="tanh"), weight_DF, bias_D)
    y_BTD: Tensor = GeluLinear.apply(h_BTF, weight_DF, bias_D, recompute)  # type: ignore[no-untyped-call]
    return y_BTD


class GeluLinear(torch.autograd.Function):
    """See `gelu_linear_`."""

    @staticmethod
    def forward(ctx: Any, h_BTF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, recompute: bool) -> Tensor:
        """See `gelu_linear_`."""
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and _is_kept(h_BTF)
        if ctx.keeps:
            value_BTF = _gelu_and_slope(h_BTF, out_slope=h_BTF)
            # As an alias: autograd takes an input for unchanged, and h has become the slope.
            ctx.save_for_backward(value_BTF, weight_DF, h_BTF.detach())
        else:
            value_BTF = _gelu(h_BTF)
            ctx.save_for_backward(h_BTF, weight_DF)
        return F.linear(value_BTF, weight_DF, bias_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """The gradients of h, weight and bias."""
        if ctx.keeps:
            value_BTF, weight_DF, slope_BTF = ctx.saved_tensors
        else:
            h_BTF, weight_DF = ctx.saved_tensors
            slope_BTF = torch.empty_like(h_BTF)
            value_BTF = _gelu_and_slope(h_BTF, out_slope=slope_BTF)
        d_y_ND = d_y_BTD.flatten(0, -2)
        d_weight_DF = d_y_ND.t() @ _apart(value_BTF.flatten(0, -2))
        d_h_BTF = (d_y_ND @ _apart(weight_DF)).view_as(slope_BTF).mul_(slope_BTF)
        return d_h_BTF, d_weight_DF, d_y_ND.sum(0) if ctx.needs_input_grad[2] else None, None


def _apart(matrix: Tensor) -> Tensor:
    """The matrix, copied with its rows a cache line further apart where a product would find them in each other's way.

    oneDNN's fp32 kernels read a few columns of many rows. Where these are three or five pages apart (the feed-forward
    of hidden_dim 768 and 1280) they share their cache sets, and the kernels fall to less than half of their speed;
    where the distance is a power of two they copy by themselves, and MKL ("exact" kernels) always does.
    """
    rows, columns = matrix.shape
    distance_bytes = columns * matrix.itemsize
    harmless = distance_bytes % _PAGE_BYTES != 0 or distance_bytes.bit_count() == 1
    if harmless or matrix.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return matrix
    return matrix.new_empty(rows, columns + _LINE_BYTES // matrix.itemsize)[:, :columns].copy_(matrix)


def _gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    factor = torch.tensor(_A, dtype=torch.promote_types(x.dtype, torch.float32))
    for x_piece, y_piece in zip(torch.split(x.view(-1), _PIECE), torch.split(y.view(-1), _PIECE), strict=True):
        wide = x_piece.to(factor.dtype)
        gate = torch.add(factor, wide * wide, alpha=_B).mul_(wide).sigmoid_()
        y_piece.copy_(gate.mul_(wide))
    return y


def _gelu_and_slope(x: Tensor, out_slope: Tensor) -> Tensor:
    """gelu(x), and gelu'(x) = gate + gelu(x) (1 - gate) (A + 3 B x^2), gate = sigmoid(x (A + B x^2)), in `out_slope`.

    `out_slope` may be x.
    """
    y = torch.empty_like(x)
    work = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype != work
    factor = torch.tensor(_A, dtype=work)  # a scalar in a sum of two is vectorised by torch, in addcmul it is not
    scratch = x.new_empty(4 if narrow else 2, min(_PIECE, x.numel()), dtype=work)
    for start in range(0, x.numel(), _PIECE):
        x_piece, y_piece, out_piece = (tensor.view(-1)[start : start + _PIECE] for tensor in (x, y, out_slope))
        gate, slope, *wider = scratch[:, : len(x_piece)].unbind()
        wide, value = wider if narrow else (x_piece, y_piece)
        if narrow:
            wide.copy_(x_piece)
        torch.mul(wide, wide, out=slope)
        torch.add(factor, slope, alpha=_B, out=gate).mul_(wide).sigmoid_()
        torch.mul(wide, gate, out=value)
        torch.add(factor, slope, alpha=3.0 * _B, out=slope).mul_(value)
        slope.addcmul_(slope, gate, value=-1.0)
        if narrow:
            y_piece.copy_(value)
            out_piece.copy_(slope.add_(gate))
        else:
            torch.add(slope, gate, out=out_piece)
    return y
