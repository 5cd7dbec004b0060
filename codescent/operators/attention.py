"""In: activations; for cross-attention also the encoder's output. Out: what attention adds to the residual stream.
Does not split heads or sequences over ranks: strategies do. They set the attributes `first_head` (this rank's first
head) and `core` (the function that computes attention over a split sequence)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.dropout import drop
from codescent.operators.head_norm import HeadNorm, Scale
from codescent.operators.kept import keeping
from codescent.operators.linear import Linear, is_kept
from codescent.operators.rotary import turn
from codescent.operators.saved_attention import BLOCK_QUERIES, KEEP_HEAD_DIMS

if TYPE_CHECKING:
    from codescent.operators.cache import LayerCache

# Shapes: B batch, T positions, S positions of the keys or slots of the cache, D hidden_dim, H query heads, G key-value
# heads, which are also the groups; R = H / G query heads of a group, E = R + 2 heads of a group: its queries, key and
# value; K head_dim, W = G * E * K. In attention on a CPU: P = B * G pairs of sample and group, Q queries of a block,
# which see the first S positions, N = R * Q rows of the heads of a group.


class AttentionCore(Protocol):
    """Attention over a sequence that is split over ranks (context parallelism)."""

    def __call__(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, *, keys_B: Tensor | None, dropout: float, first_head: int
    ) -> Tensor:
        """See `attend`."""


class Attention(nn.Module):
    """Self-attention.

    A group is the query heads that read the same key-value head (Ainslie et al. 2023, "GQA"). The rows of `qkv` go
    group by group: the group's queries, then its key, then its value. So a slice of the rows contains whole groups.
    `heads`: number of query heads, number of key-value heads. `dropout`: probability for attention probabilities.
    `head_dim` None: width / query heads. `qkv_bias` None: as `bias`.

    Attributes:
        head_norm: the norm of queries and keys, with the scales `q_norm` and `k_norm`; None: there is none.
        causal: whether a position sees only itself and earlier positions.
        recompute: whether backward recomputes the probabilities. Fused kernels always recompute them.
        core: computes attention if the sequence is split over ranks; None: the sequence is whole.
        first_head: index, in the model, of the first head of this rank.
    """

    def __init__(
        self,
        width: int,
        heads: tuple[int, int],
        bias: bool,
        dropout: float = 0.0,
        *,
        causal: bool = True,
        head_dim: int | None = None,
        qkv_bias: bool | None = None,
        norm: HeadNorm | None = None,
    ) -> None:
        super().__init__()
        queries, groups = heads
        self.head_dim, self.dropout, self.causal = head_dim or width // queries, dropout, causal
        self.group_rows = queries // groups + 2
        self.recompute = False
        self.core: AttentionCore | None = None
        self.first_head = 0
        self.head_norm = norm
        self.qkv = Linear(width, groups * self.group_rows * self.head_dim, bias if qkv_bias is None else qkv_bias)
        if norm is not None:
            self.q_norm, self.k_norm = (Scale(size) for size in norm.widths or (self.head_dim, self.head_dim))
        self.out = Linear(queries * self.head_dim, width, bias)

    def forward(
        self,
        x_BTD: Tensor,
        keys_B: Tensor | None = None,
        padding_BT: Tensor | None = None,
        cache: LayerCache | None = None,
        turns_TC2: Tensor | None = None,
    ) -> Tensor:
        """The attention output, to add to the residual stream: [B, T, D].

        Args:
            x_BTD: activations.
            keys_B: dropout keys for the attention probabilities; None: no dropout.
            padding_BT: bool, True at padding, which no query sees; positions after the first T are ignored.
            cache: key/value cache of earlier positions. The new keys and values are added to it.
            turns_TC2: angles of the positions (see `rotary`); positions after the first T are ignored. None: no
                rotation.
        """
        qkv_BTW = self.qkv(x_BTD)
        batch, length, _ = qkv_BTW.shape
        qkv_BTGEK = qkv_BTW.view(batch, length, -1, self.group_rows, self.head_dim)
        if self.head_norm is not None:
            qkv_BTGEK = self.head_norm(qkv_BTGEK, self.q_norm.weight, self.k_norm.weight)
        if turns_TC2 is not None:
            qkv_BTGEK = turn(qkv_BTGEK, turns_TC2 if turns_TC2.ndim > 3 else turns_TC2[:length])
        if self.causal and keys_B is None and padding_BT is None and cache is None and self.core is None:
            y_BTD: Tensor = self.out(causal_attention(qkv_BTGEK, self.recompute))
            return y_BTD
        q_BHTK, k_BTGK, v_BTGK = _by_kind(qkv_BTGEK)
        k_BGTK, v_BGTK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if self.core is not None:
            y_BHTK = self.core(q_BHTK, k_BGTK, v_BGTK, keys_B=keys_B, dropout=self.dropout, first_head=self.first_head)
        elif cache is not None:
            k_BSGK, v_BSGK = cache.extend(k_BTGK, v_BTGK)
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK,
                k_BSGK.transpose(1, 2),
                v_BSGK.transpose(1, 2),
                attn_mask=cache.mask_B1TS,
                enable_gqa=self.group_rows > 3,
            )
        else:
            hidden = hidden_keys(qkv_BTW, None if padding_BT is None else padding_BT[:, :length], causal=self.causal)
            y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, hidden, keys_B, self.dropout, self.first_head)
        y_BTD = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class CrossAttention(nn.Module):
    """Cross-attention from a target to a source. The rows of `kv` go head by head: the head's key, then its value.

    Attributes:
        first_head: index, in the model, of the first head of this rank.
    """

    def __init__(self, width: int, heads: int, bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim, self.dropout = width // heads, dropout
        self.first_head = 0
        self.q = Linear(width, width, bias)
        self.kv = Linear(width, 2 * width, bias)
        self.out = Linear(width, width, bias)

    def forward(
        self, x_BTD: Tensor, source_BSD: Tensor, padding_BS: Tensor | None = None, keys_B: Tensor | None = None
    ) -> Tensor:
        """The attention output, to add to the target's residual stream: [B, T, D].

        `padding_BS`: True at padding of the source, which no query sees. `keys_B`: dropout keys for the attention
        probabilities; None: no dropout.
        """
        q_BTHK = self.q(x_BTD).unflatten(2, (-1, self.head_dim))
        k_BSHK, v_BSHK = self.kv(source_BSD).unflatten(2, (-1, 2, self.head_dim)).unbind(3)
        hidden = hidden_keys(q_BTHK, padding_BS, causal=False)
        q_BHTK, k_BHSK, v_BHSK = (tensor.transpose(1, 2) for tensor in (q_BTHK, k_BSHK, v_BSHK))
        y_BHTK = attend(q_BHTK, k_BHSK, v_BHSK, hidden, keys_B, self.dropout, self.first_head)
        out_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


def hidden_keys(like: Tensor, padding_BS: Tensor | None, *, causal: bool) -> Tensor | None:
    """Mask of the keys that a query must not see: bool, broadcasts to [B, H, T, S]; None: it sees all keys.

    `like` is [B, T, ..]; it gives T and the device.
    """
    length = like.shape[1]
    later_TT = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1) if causal else None
    if padding_BS is None:
        return later_TT
    padding_B11S = padding_BS[:, None, None, :]
    return padding_B11S if later_TT is None else padding_B11S | later_TT


def attend(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    hidden: Tensor | None,
    keys_B: Tensor | None,
    dropout: float,
    first_head: int,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v: [B, H, T, K] (Vaswani et al. 2017, equation 1).

    With dropout (`keys_B`) the formula is computed step by step, because no fused kernel supports our dropout masks.
    `hidden` is from `hidden_keys`. `first_head`: index, in the model, of the first of these heads. The output of a
    query that sees no key is undefined.
    """
    if keys_B is None:
        return products.attention(q_BHTK, k_BHSK, v_BHSK, None if hidden is None else ~hidden)
    scores_BHTS = products.matmul(q_BHTK * (1.0 / math.sqrt(q_BHTK.shape[-1])), k_BHSK.transpose(2, 3))
    if hidden is not None:
        scores_BHTS = scores_BHTS.masked_fill(hidden, -math.inf)
    _, heads, length, _ = scores_BHTS.shape
    rows_R = torch.arange(heads * length, device=q_BHTK.device) + first_head * length
    kept = drop(scores_BHTS.softmax(-1).flatten(1, 2), keys_B, dropout, rows_R)
    return products.matmul(kept.view_as(scores_BHTS), v_BHSK)


def _by_kind(qkv_BTGEK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, K], k and v [B, T, G, K]."""
    queries = qkv_BTGEK.shape[3] - 2
    q_BTGRK, k_BTG1K, v_BTG1K = torch.split(qkv_BTGEK, [queries, 1, 1], dim=3)
    return q_BTGRK.flatten(2, 3).transpose(1, 2), k_BTG1K.squeeze(3), v_BTG1K.squeeze(3)


def causal_attention(qkv_BTGEK: Tensor, recompute: bool = False) -> Tensor:
    """Causal attention: softmax(q k^T / sqrt(head_dim)) v over a position and the earlier ones: [B, T, D].

    On CUDA this is torch's scaled_dot_product_attention. On a CPU it is `_BlockAttention`: with 4 samples of 256
    positions, 12 heads of 64, one AVX-512 core, forward + backward take 9 ms against 33 in bf16, 15 against 34 in fp32.

    `qkv_BTGEK` is contiguous. With `recompute` even small probabilities are not saved. Fused kernels never save them.
    """
    if qkv_BTGEK.device.type == "cpu":
        if torch.compiler.is_compiling() or keeping():
            y_BTD: Tensor = _block_attention_op(qkv_BTGEK)[0]
            return y_BTD
        y_BTD = _BlockAttention.apply(qkv_BTGEK, recompute)  # type: ignore[no-untyped-call]
        return y_BTD
    q_BHTK, k_BTGK, v_BTGK = _by_kind(qkv_BTGEK)
    y_BHTK = F.scaled_dot_product_attention(
        q_BHTK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), is_causal=True, enable_gqa=qkv_BTGEK.shape[3] > 3
    )
    return y_BHTK.transpose(1, 2).flatten(2)


class _BlockAttention(torch.autograd.Function):
    """Causal attention as batched matrix products over blocks of queries, each with the keys that it may see.

    Queries of heads that read the same keys are rows of one product. Backward recomputes the probabilities from q and
    k, unless they are small and `is_kept` is true: then forward saves them.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BTGEK: Tensor, recompute: bool) -> Tensor:
        _, length, _, _, head_dim = qkv_BTGEK.shape
        short = length <= KEEP_HEAD_DIMS * head_dim
        wide_BTGEK = products.widened(qkv_BTGEK)
        keep = ctx.needs_input_grad[0] and short and not recompute and is_kept(wide_BTGEK)
        y_BTD, qkv_EPTK, kept = _attend(wide_BTGEK, keep)
        ctx.save_for_backward(qkv_EPTK.to(qkv_BTGEK.dtype), *kept)
        return y_BTD.to(qkv_BTGEK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, None]:
        qkv_EPTK, *kept = ctx.saved_tensors
        return _attend_backward(products.widened(d_y_BTD), products.widened(qkv_EPTK), kept).to(d_y_BTD.dtype), None


def _attend(qkv_BTGEK: Tensor, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The attention output, the projections ordered by head, and if `keep` the probabilities of each block."""
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    qkv_EPTK = qkv_BTGEK.permute(3, 0, 2, 1, 4).reshape(rows, batch * groups, length, head_dim)
    v_PTK = qkv_EPTK[-1]
    later_QT = _later(length, qkv_BTGEK)
    blocks, kept = [], []
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        probabilities_PNS = _probabilities(qkv_EPTK, later_QT, start, stop)
        y_PNK = torch.bmm(probabilities_PNS, v_PTK[:, :stop])
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


def _probabilities(qkv_EPTK: Tensor, later_QT: Tensor, start: int, stop: int) -> Tensor:
    q_RPTK, k_PTK = qkv_EPTK[:-2], qkv_EPTK[-2]
    rows, length = later_QT.shape
    # Row r of the mask belongs to query length - rows + r. A block that starts `shift` positions earlier skips `shift`
    # columns of the mask. A shorter last block starts later: it skips rows instead.
    shift = length - rows - start
    right, below = max(shift, 0), max(-shift, 0)
    mask_QS = later_QT[below : below + stop - start, right : right + stop]
    mask_NS = mask_QS if len(q_RPTK) == 1 else mask_QS.repeat(len(q_RPTK), 1)
    q_PNK = _rows(q_RPTK, start, stop)
    scores_PNS = torch.baddbmm(mask_NS, q_PNK, k_PTK[:, :stop].transpose(1, 2), alpha=1.0 / math.sqrt(q_PNK.shape[-1]))
    return torch.softmax(scores_PNS, -1)


def _attend_backward(d_y_BTD: Tensor, qkv_EPTK: Tensor, kept: list[Tensor]) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    batch, heads = len(d_y_BTD), rows - 2
    q_RPTK, k_PTK, v_PTK = qkv_EPTK[:-2], qkv_EPTK[-2], qkv_EPTK[-1]
    d_y_BTGRK = d_y_BTD.reshape(batch, length, -1, heads, head_dim)
    d_y_RPTK = d_y_BTGRK.permute(3, 0, 2, 1, 4).reshape(heads, pairs, length, head_dim)
    d_qkv_EPTK = torch.empty_like(qkv_EPTK)
    d_q_RPTK, d_k_PTK, d_v_PTK = d_qkv_EPTK[:-2], d_qkv_EPTK[-2], d_qkv_EPTK[-1]
    later_QT = _later(length, qkv_EPTK) if not kept else qkv_EPTK
    scale = 1.0 / math.sqrt(head_dim)
    # The last block comes first: it sees every key, so it writes all of d_k and d_v. The other blocks add to them.
    for start in reversed(range(0, length, BLOCK_QUERIES)):
        stop = min(start + BLOCK_QUERIES, length)
        p_PNS = kept[start // BLOCK_QUERIES] if kept else _probabilities(qkv_EPTK, later_QT, start, stop)
        d_y_PNK = _rows(d_y_RPTK, start, stop)
        d_p_PNS = torch.bmm(d_y_PNK, v_PTK[:, :stop].transpose(1, 2))
        # torch's backward of softmax, in one pass. It has no public name.
        d_s_PNS = torch.ops.aten._softmax_backward_data(d_p_PNS, p_PNS, -1, p_PNS.dtype)
        beta = 0.0 if stop == length else 1.0
        d_q_PNK = _rows(d_q_RPTK, start, stop)
        d_q_PNK.baddbmm_(d_s_PNS, k_PTK[:, :stop], beta=0.0, alpha=scale)
        if d_q_PNK.data_ptr() != d_q_RPTK[:, :, start:stop].data_ptr():  # of several heads it may be a copy
            d_q_RPTK[:, :, start:stop] = d_q_PNK.view(pairs, heads, stop - start, head_dim).transpose(0, 1)
        d_k_PTK[:, :stop].baddbmm_(d_s_PNS.transpose(1, 2), _rows(q_RPTK, start, stop), beta=beta, alpha=scale)
        d_v_PTK[:, :stop].baddbmm_(p_PNS.transpose(1, 2), d_y_PNK, beta=beta)
    d_qkv_EBGTK = d_qkv_EPTK.view(rows, batch, -1, length, head_dim)
    d_qkv_BTGEK: Tensor = d_qkv_EBGTK.permute(1, 3, 2, 0, 4).contiguous()
    return d_qkv_BTGEK


# The same attention, opaque to torch.compile: its kernels for these products are no faster, and its SDPA is slower.
@torch.library.custom_op("codescent::block_attention", mutates_args=())
def _block_attention_op(qkv_BTGEK: Tensor) -> tuple[Tensor, Tensor]:
    y_BTD, qkv_EPTK, _ = _attend(products.widened(qkv_BTGEK), keep=False)
    y_BTD, qkv_EPTK = y_BTD.to(qkv_BTGEK.dtype), qkv_EPTK.to(qkv_BTGEK.dtype)
    # With one sample or one group qkv_EPTK is a view of the input. A custom op must return new memory, and in the
    # layout that `_attention_shapes` promises.
    own = qkv_EPTK.untyped_storage().data_ptr() != qkv_BTGEK.untyped_storage().data_ptr()
    return y_BTD, qkv_EPTK.contiguous() if own else qkv_EPTK.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("codescent::block_attention_backward", mutates_args=())
def _block_attention_backward_op(d_y_BTD: Tensor, qkv_EPTK: Tensor) -> Tensor:
    return _attend_backward(products.widened(d_y_BTD), products.widened(qkv_EPTK), []).to(d_y_BTD.dtype)


@_block_attention_op.register_fake
def _attention_shapes(qkv_BTGEK: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, groups, rows, head_dim = qkv_BTGEK.shape
    y_BTD = qkv_BTGEK.new_empty(batch, length, groups * (rows - 2) * head_dim)
    return y_BTD, qkv_BTGEK.new_empty(rows, batch * groups, length, head_dim)


@_block_attention_backward_op.register_fake
def _attention_backward_shape(d_y_BTD: Tensor, qkv_EPTK: Tensor) -> Tensor:
    rows, pairs, length, head_dim = qkv_EPTK.shape
    return d_y_BTD.new_empty(len(d_y_BTD), length, pairs // len(d_y_BTD), rows, head_dim)


def _save_projections(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _attention_op_backward(ctx: Any, d_y_BTD: Tensor, _d_qkv: Tensor | None) -> Tensor:
    d_qkv_BTGEK: Tensor = _block_attention_backward_op(d_y_BTD.contiguous(), ctx.saved_tensors[0])
    return d_qkv_BTGEK


_block_attention_op.register_autograd(_attention_op_backward, setup_context=_save_projections)
