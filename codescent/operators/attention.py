"""In: activations; for cross-attention also the encoder's output. Out: what attention adds to the residual stream.
Does not split heads or sequences over ranks: strategies do. They set the attributes `first_head` (this rank's first
head) and `core` (the function that computes attention over a split sequence)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.operators import packed_attention, products
from codescent.operators.block_attention import PLAIN, BlockAttention, ScoreTraits, block_attention_op
from codescent.operators.documents import DocumentBounds
from codescent.operators.dropout import drop
from codescent.operators.head_norm import HeadNorm, Scale
from codescent.operators.kept import keeping
from codescent.operators.linear import Linear
from codescent.operators.rotary import turn
from codescent.operators.soft_cap import capped

if TYPE_CHECKING:
    from codescent.operators.cache import CachedToken, LayerCache

# Shapes: B batch, T positions, S positions of the keys or slots of the cache, D hidden_dim, H query heads, G key-value
# heads, which are also the groups; R = H / G query heads of a group, E = R + 2 heads of a group: its queries, key and
# value; K head_dim, W = G * E * K. In attention on a CPU: P = B * G pairs of sample and group, Q queries of a block,
# which see the first S positions, N = R * Q rows of the heads of a group.


class AttentionCore(Protocol):
    """Attention over a sequence that is split over ranks (context parallelism)."""

    def __call__(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        *,
        keys_B: Tensor | None,
        dropout: float,
        first_head: int,
        scores: ScoreTraits,
        documents: DocumentBounds | None,
    ) -> Tensor:
        """See `attend`, and `causal_attention` for `scores` and `documents`."""


class Attention(nn.Module):
    """Self-attention.

    A group is the query heads that read the same key-value head (Ainslie et al. 2023, "GQA"). The rows of `qkv` go
    group by group: the group's queries, then its key, then its value. So a slice of the rows contains whole groups.
    `heads`: number of query heads, number of key-value heads. `dropout`: probability for attention probabilities.
    `head_dim` None: width / query heads. `qkv_bias` None: as `bias`.

    Attributes:
        head_norm: the norm of queries and keys, with the scales `q_norm` and `k_norm`; None: there is none.
        scores: window, cap and factor of causal scores.
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
        scores: ScoreTraits = PLAIN,
    ) -> None:
        super().__init__()
        queries, groups = heads
        self.head_dim, self.dropout, self.causal = head_dim or width // queries, dropout, causal
        self.group_rows = queries // groups + 2
        self.recompute = False
        self.core: AttentionCore | None = None
        self.first_head = 0
        self.head_norm, self.scores = norm, scores
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
        documents: DocumentBounds | None = None,
    ) -> Tensor:
        """The attention output, to add to the residual stream: [B, T, D].

        Args:
            x_BTD: activations.
            keys_B: dropout keys for the attention probabilities; None: no dropout.
            padding_BT: bool, True at padding, which no query sees; positions after the first T are ignored.
            cache: key/value cache of earlier tokens. The new keys and values are added to it. B is 1.
            turns_TC2: angles of the positions (see `rotary`); positions after the first T are ignored. None: no
                rotation.
            documents: of the whole samples; None: each sample is one document. Only causal attention reads them.
        """
        qkv_BTW = self.qkv(x_BTD)
        batch, length, _ = qkv_BTW.shape
        qkv_BTGEK = qkv_BTW.view(batch, length, -1, self.group_rows, self.head_dim)
        if self.head_norm is not None:
            qkv_BTGEK = self.head_norm(qkv_BTGEK, self.q_norm.weight, self.k_norm.weight)
        if turns_TC2 is not None:
            qkv_BTGEK = turn(qkv_BTGEK, turns_TC2 if turns_TC2.ndim > 3 else turns_TC2[:length])
        y_BTD: Tensor
        if cache is not None:
            y_BTD = self.out(cache.attend(qkv_BTGEK, self.scores))
            return y_BTD
        if self.causal and keys_B is None and padding_BT is None and self.core is None:
            y_BTD = self.out(causal_attention(qkv_BTGEK, self.recompute, self.scores, documents))
            return y_BTD
        q_BHTK, k_BTGK, v_BTGK = by_kind(qkv_BTGEK)
        k_BGTK, v_BGTK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if self.core is not None:
            y_BHTK = self.core(
                q_BHTK,
                k_BGTK,
                v_BGTK,
                keys_B=keys_B,
                dropout=self.dropout,
                first_head=self.first_head,
                scores=self.scores,
                documents=documents,
            )
        else:
            hidden = hidden_keys(qkv_BTW, None if padding_BT is None else padding_BT[:, :length], causal=self.causal)
            if documents is not None:
                hidden = documents.hidden() if hidden is None else hidden | documents.hidden()
            y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, hidden, keys_B, self.dropout, self.first_head, self.scores)
        y_BTD = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD

    @property
    def cached(self) -> CachedToken:
        """What a cache holds of a token: keys and values of this rank's heads."""
        from codescent.operators.cache import CachedToken  # noqa: PLC0415 - it imports this module

        return CachedToken(self.qkv.weight.shape[0] // (self.group_rows * self.head_dim), self.head_dim)


class CrossAttention(nn.Module):
    """Cross-attention from a target to a source. The rows of `kv` go head by head: the head's key, then its value.

    Attributes:
        scores: of whose traits it knows the factor.
        first_head: index, in the model, of the first head of this rank.
    """

    def __init__(
        self, width: int, heads: int, bias: bool, dropout: float = 0.0, *, scores: ScoreTraits = PLAIN
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout, self.scores = width // heads, dropout, scores
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
        y_BHTK = attend(q_BHTK, k_BHSK, v_BHSK, hidden, keys_B, self.dropout, self.first_head, self.scores)
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


def attend_to_seen(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, seen: Tensor, scores: ScoreTraits) -> Tensor:
    """Attention of some queries to the keys that `seen` says: [B, H, T, K]. It knows no window itself.

    `seen`: bool, broadcasts to [B, H, T, S].

    No kernel of torch caps scores: then the formula is computed in at least fp32.
    """
    head_dim, grouped = q_BHTK.shape[-1], q_BHTK.shape[1] > k_BGSK.shape[1]
    if not scores.cap:
        scale = scores.scale(head_dim)
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=seen, scale=scale, enable_gqa=grouped)
    wide, times = torch.promote_types(q_BHTK.dtype, torch.float32), q_BHTK.shape[1] // k_BGSK.shape[1]
    q_BHTK, k_BHSK, v_BHSK = (
        q_BHTK.to(wide),
        k_BGSK.to(wide).repeat_interleave(times, 1),
        v_BGSK.repeat_interleave(times, 1),
    )
    scores_BHTS = capped(q_BHTK @ k_BHSK.transpose(2, 3) * scores.factor(head_dim), scores.cap)
    return scores_BHTS.masked_fill(~seen, -math.inf).softmax(-1).to(v_BHSK.dtype) @ v_BHSK


def attend(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    hidden: Tensor | None,
    keys_B: Tensor | None,
    dropout: float,
    first_head: int,
    scores: ScoreTraits = PLAIN,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v: [B, H, T, K] (Vaswani et al. 2017, equation 1).

    Of `scores` it knows the factor alone, which is another with `width`.

    With dropout (`keys_B`) the formula is computed step by step, because no fused kernel supports our dropout masks.
    `hidden` is from `hidden_keys`. `first_head`: index, in the model, of the first of these heads. The output of a
    query that sees no key is undefined.
    """
    if keys_B is None:
        scale = scores.scale(q_BHTK.shape[-1])
        return products.attention(q_BHTK, k_BHSK, v_BHSK, None if hidden is None else ~hidden, scale)
    scores_BHTS = products.matmul(q_BHTK * scores.factor(q_BHTK.shape[-1]), k_BHSK.transpose(2, 3))
    if hidden is not None:
        scores_BHTS = scores_BHTS.masked_fill(hidden, -math.inf)
    _, heads, length, _ = scores_BHTS.shape
    rows_R = torch.arange(heads * length, device=q_BHTK.device) + first_head * length
    kept = drop(scores_BHTS.softmax(-1).flatten(1, 2), keys_B, dropout, rows_R)
    return products.matmul(kept.view_as(scores_BHTS), v_BHSK)


def by_kind(qkv_BTGEK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, K], k and v [B, T, G, K], of [B, T, G, E, K]."""
    queries = qkv_BTGEK.shape[3] - 2
    q_BTGRK, k_BTG1K, v_BTG1K = torch.split(qkv_BTGEK, [queries, 1, 1], dim=3)
    return q_BTGRK.flatten(2, 3).transpose(1, 2), k_BTG1K.squeeze(3), v_BTG1K.squeeze(3)


def causal_attention(
    qkv_BTGEK: Tensor, recompute: bool = False, scores: ScoreTraits = PLAIN, documents: DocumentBounds | None = None
) -> Tensor:
    """Causal attention: softmax(q k^T / sqrt(head_dim)) v over a position and the earlier ones: [B, T, D].

    On CUDA this is torch's scaled_dot_product_attention. On a CPU it is `BlockAttention`: with 4 samples of 256
    positions, 12 heads of 64, one AVX-512 core, forward + backward take 9 ms against 33 in bf16, 15 against 34 in fp32.

    With a window or a cap it is `BlockAttention` on every device. torch's kernels have no cap. A window would be a mask
    of all pairs for them, and those for groups of heads would then keep the probabilities of all pairs.

    `documents`: a position sees its own document only; None: a sample is one document. Off a CPU a kernel of variable
    length computes them (`packed_attention`), which has windows; else without a window they are a mask.

    `qkv_BTGEK` is contiguous. With `recompute` even small probabilities are not saved. Fused kernels never save them.
    """
    scores = scores.within(qkv_BTGEK.shape[1]) if scores.window else scores
    on_cpu = qkv_BTGEK.device.type == "cpu"
    offsets_N = None if documents is None or scores.cap else documents.offsets_N
    packed = offsets_N is not None and packed_attention.serves(qkv_BTGEK)
    if on_cpu or (scores.by_blocks and not packed):
        begins_BT = None if documents is None else documents.begins_BT
        if (torch.compiler.is_compiling() or keeping()) and not scores.values:
            y_BTD: Tensor = block_attention_op(qkv_BTGEK, scores.window, scores.cap, scores.width, begins_BT)[0]
            return y_BTD
        y_BTD = BlockAttention.apply(qkv_BTGEK, recompute, scores, begins_BT)  # type: ignore[no-untyped-call]
        return y_BTD
    q_BHTK, k_BTGK, v_BTGK = by_kind(qkv_BTGEK)
    scale = scores.scale(q_BHTK.shape[-1])
    if packed:
        assert offsets_N is not None
        y_BTD = packed_attention.attend(q_BHTK, k_BTGK, v_BTGK, offsets_N, scores.window, scale)
        return scores.of_values(torch.unflatten(y_BTD, 2, (-1, q_BHTK.shape[-1]))).flatten(2)
    seen = None if documents is None else documents.seen()
    y_BHTK = F.scaled_dot_product_attention(
        q_BHTK,
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=qkv_BTGEK.shape[3] > 3,
    )
    return scores.of_values(y_BHTK.transpose(1, 2)).flatten(2)
