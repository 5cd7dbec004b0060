"""In: activations of one layer of an encoder or decoder. Out: what attention, to itself or the source, makes of them.
Does not know tokens or other layers, and does not divide anything: who does, says so in `first_head`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.shape import Shape
from codescent.models.transformer.declare import TransformerShape
from codescent.operators.attention import causal_attention
from codescent.operators.dropout import drop
from codescent.operators.linear import Linear

# Shapes: B batch, T positions of the queries, S of the keys, D hidden_dim, H heads, K head_dim, E = H * 3 * K.


class SelfAttention(nn.Module):
    """Attention of a sequence to itself. The rows of `qkv` are head by head, of each head q, then k, then v.

    Attributes:
        recompute: make the probabilities again in the backward pass, where no fused kernel does so anyway.
        first_head: number of the first head whose rows `qkv` has.
    """

    def __init__(self, shape: Shape, causal: bool, device: str) -> None:
        super().__init__()
        self.head_dim, self.dropout, self.causal = shape.head_dim, shape.dropout, causal
        self.recompute = False
        self.first_head = 0
        self.qkv = Linear(shape.hidden_dim, 3 * shape.hidden_dim, shape.bias, device)
        self.out = Linear(shape.hidden_dim, shape.hidden_dim, shape.bias, device)

    def forward(self, x_BTD: Tensor, padding_BT: Tensor | None = None, keys_B: Tensor | None = None) -> Tensor:
        """[B, T, D].

        Args:
            x_BTD: the sequence.
            padding_BT: bool, True at positions that nobody sees; there may be more of them, at the end.
            keys_B: keys of the dropout of the attention probabilities; None drops nothing.
        """
        qkv_BTE = self.qkv(x_BTD)
        qkv_BTH3K = qkv_BTE.unflatten(2, (-1, 3, self.head_dim))
        if self.causal and padding_BT is None and keys_B is None:
            y_BTD = causal_attention(qkv_BTH3K, self.recompute)
        else:
            q_BTHK, k_BTHK, v_BTHK = qkv_BTH3K.unbind(3)
            padding_BT = None if padding_BT is None else padding_BT[:, : qkv_BTE.shape[1]]
            hidden = _hidden(qkv_BTE, padding_BT, causal=self.causal)
            y_BTD = attend(q_BTHK, k_BTHK, v_BTHK, hidden, keys_B, self.dropout, self.first_head)
        out_BTD: Tensor = self.out(y_BTD)
        return out_BTD


class CrossAttention(nn.Module):
    """Attention of the target to the source. The rows of `kv` are head by head, of each head k, then v.

    Attributes:
        first_head: number of the first head whose rows `q` and `kv` have.
    """

    def __init__(self, shape: TransformerShape, device: str) -> None:
        super().__init__()
        self.head_dim, self.dropout = shape.head_dim, shape.dropout
        self.first_head = 0
        self.q = Linear(shape.hidden_dim, shape.hidden_dim, shape.bias, device)
        self.kv = Linear(shape.hidden_dim, 2 * shape.hidden_dim, shape.bias, device)
        self.out = Linear(shape.hidden_dim, shape.hidden_dim, shape.bias, device)

    def forward(
        self, x_BTD: Tensor, source_BSD: Tensor, padding_BS: Tensor | None = None, keys_B: Tensor | None = None
    ) -> Tensor:
        """[B, T, D].

        Args:
            x_BTD: the target.
            source_BSD: what the encoder has made of the source.
            padding_BS: bool, True at positions of the source that nobody sees.
            keys_B: keys of the dropout of the attention probabilities; None drops nothing.
        """
        q_BTHK = self.q(x_BTD).unflatten(2, (-1, self.head_dim))
        k_BSHK, v_BSHK = self.kv(source_BSD).unflatten(2, (-1, 2, self.head_dim)).unbind(3)
        hidden = _hidden(q_BTHK, padding_BS, causal=False)
        out_BTD: Tensor = self.out(attend(q_BTHK, k_BSHK, v_BSHK, hidden, keys_B, self.dropout, self.first_head))
        return out_BTD


def _hidden(like: Tensor, padding_BS: Tensor | None, *, causal: bool) -> Tensor | None:
    """bool, broadcast to [B, H, T, S]: which keys a query does not see; None: it sees all."""
    length = like.shape[1]
    later_TT = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1) if causal else None
    if padding_BS is None:
        return later_TT
    padding_B11S = padding_BS[:, None, None, :]
    return padding_B11S if later_TT is None else padding_B11S | later_TT


def attend(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    hidden: Tensor | None,
    keys_B: Tensor | None,
    dropout: float,
    first_head: int,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v of all heads side by side: [B, T, H * K] (Vaswani et al. 2017, equation 1).

    With dropout it is written out: no fused kernel drops by our masks. A query that sees nothing has no answer.

    Args:
        q_BTHK, k_BSHK, v_BSHK: queries, keys, values.
        hidden: see `_hidden`.
        keys_B: keys of the dropout of the probabilities; None drops nothing.
        dropout: probability.
        first_head: number of the first of these heads in the model.
    """
    q_BHTK, k_BHSK, v_BHSK = (tensor.transpose(1, 2) for tensor in (q_BTHK, k_BSHK, v_BSHK))
    if keys_B is None:
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, None if hidden is None else ~hidden)
        return y_BHTK.transpose(1, 2).flatten(2)
    scores_BHTS = (q_BHTK * (1.0 / math.sqrt(q_BHTK.shape[-1]))) @ k_BHSK.transpose(2, 3)
    if hidden is not None:
        scores_BHTS = scores_BHTS.masked_fill(hidden, -math.inf)
    _, heads, length, _ = scores_BHTS.shape
    rows_R = torch.arange(heads * length, device=q_BHTK.device) + first_head * length
    kept = drop(scores_BHTS.softmax(-1).flatten(1, 2), keys_B, dropout, rows_R)
    return (kept.view_as(scores_BHTS) @ v_BHSK).transpose(1, 2).flatten(2)
