"""In: queries, keys and values of this rank's positions. Out: causal attention of the queries to the keys of all ranks.
It exchanges keys and values between the ranks, by a ring or an all-gather.
Does not compute the attention to the keys of one rank (causal_tiles.py and causal_sources.py do), or choose a rank's
positions (causal_tiles.py does)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.base.ranges import Flight
from codescent.base.stopwatch import waiting
from codescent.operators.block_attention import PLAIN, ScoreTraits
from codescent.operators.compiled import never_compiled
from codescent.operators.documents import DocumentBounds
from codescent.operators.fused_attention import fused_attention_for
from codescent.operators.kept import in_parts
from codescent.plan import Collective
from codescent.strategies.causal_sources import CausalSources
from codescent.strategies.causal_tiles import CausalTiles
from codescent.strategies.collectives import all_gather_into, reduce_scatter_into

# Shapes: B samples, H query heads, G key-value heads, T positions of this rank, K head_dim; 2: keys and values. P = B *
# G and R = H / G, as in `causal_tiles`.
_KEYS_VALUES, _GRADIENTS = 0, 1  # tags of messages: both may be in flight between the same two ranks


AddGradient = Callable[[int, Tensor, Tensor], None]
"""(source, its kv, d_kv): adds this rank's gradient of the source's keys and values to d_kv."""


class Exchange(ABC):
    """How keys and values reach every rank, and how their gradients come back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def visits(self, kv_2BGTK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank of the group with its kv: first this rank, then the rank before it, and so on."""

    @abstractmethod
    def gradient(self, kv_2BGTK: Tensor, add: AddGradient) -> Tensor:
        """The gradient of this rank's kv: the sum of what each rank adds, in at least fp32."""


class Ring(Exchange):
    """Each rank sends its current keys and values to the next rank, while it computes with them (Liu, Zaharia and
    Abbeel 2023, "Ring Attention with Blockwise Transformers")."""

    def visits(self, kv_2BGTK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See Exchange."""
        degree, index = self.group.size(), self.group.rank()
        for hop in range(degree - 1):
            message = _RingMessage(kv_2BGTK, self.group, _KEYS_VALUES)
            yield (index - hop) % degree, kv_2BGTK
            kv_2BGTK = message.wait()
        yield (index + 1) % degree, kv_2BGTK

    def gradient(self, kv_2BGTK: Tensor, add: AddGradient) -> Tensor:
        """See Exchange. The sum for a kv moves with it from rank to rank; the last rank sends it back to the kv's rank.

        That rank then adds its own part.
        """
        own: Tensor | None = None
        message: _RingMessage | None = None
        for source, visitor_2BGTK in self.visits(kv_2BGTK):
            d_kv_2BGTK = torch.zeros_like(visitor_2BGTK, dtype=_wide(visitor_2BGTK))
            add(source, visitor_2BGTK, d_kv_2BGTK)
            if own is None:
                own = d_kv_2BGTK
                continue
            if message is not None:
                d_kv_2BGTK += message.wait()
            message = _RingMessage(d_kv_2BGTK, self.group, _GRADIENTS)
        assert own is not None
        return own if message is None else own.add_(message.wait())


class _RingMessage:
    """Start to send a tensor to the next rank of the ring, and to receive one of its shape from the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        following, preceding = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        self.sent, self.received = tensor, torch.empty_like(tensor)
        self.flight = Flight(Collective.SEND, group, tensor)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, tag=tag, group_peer=following),
                dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=preceding),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for both transfers and return the received tensor. The sent tensor may then be overwritten."""
        with waiting():
            for work in self.works:
                work.wait()
        self.flight.waited()
        return self.received


class Gather(Exchange):
    """One all-gather of keys and values, one reduce-scatter of their gradients (Llama team 2024, "The Llama 3 Herd of
    Models", section 3.3.2).

    No computation hides them, and the keys and values of the whole sequence are in memory for a while. Backward gathers
    them again, so no layer saves them.
    """

    def visits(self, kv_2BGTK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See Exchange."""
        degree, index = self.group.size(), self.group.rank()
        all_kv = [kv_2BGTK]
        if degree > 1:
            gathered = kv_2BGTK.new_empty(degree, *kv_2BGTK.shape)
            all_gather_into(gathered.flatten(0, 1), kv_2BGTK, group=self.group)
            all_kv = list(gathered)
        for hop in range(degree):
            source = (index - hop) % degree
            yield source, all_kv[source]

    def gradient(self, kv_2BGTK: Tensor, add: AddGradient) -> Tensor:
        """See Exchange."""
        wide = _wide(kv_2BGTK)
        all_d_kv = kv_2BGTK.new_zeros(self.group.size(), *kv_2BGTK.shape, dtype=wide)
        for source, visitor_2BGTK in self.visits(kv_2BGTK):
            add(source, visitor_2BGTK, all_d_kv[source])
        if self.group.size() == 1:
            return all_d_kv[0]
        d_kv_2BGTK = torch.empty_like(kv_2BGTK, dtype=wide)
        reduce_scatter_into(d_kv_2BGTK, all_d_kv.flatten(0, 1), group=self.group)
        return d_kv_2BGTK


# torch.compile breaks the graph here, so that messages are sent in the order of this file on every rank.
@never_compiled
def split_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    exchange: Exchange,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    *,
    first_head: int = 0,
    scores: ScoreTraits = PLAIN,
    documents: DocumentBounds | None = None,
) -> Tensor:
    """Causal attention softmax(q k^T / sqrt(K)) v over a sequence that is split over ranks: [B, H, T, K].

    Each rank holds the positions of `causal_tiles.balanced_positions`. Every `Exchange` gives the same result, bitwise.
    `context_parallel.exchange_traffic` declares what it sends. Query head h reads key-value head h // (H / G).

    On CUDA a fused kernel computes the attention to the keys of each rank. Dropout needs probabilities with our masks,
    and fp64, windows, caps and documents have no fused kernel: then, and on a CPU, it is computed tile by tile.
    Documents change nothing of what is sent.

    Args:
        q_BHTK, k_BGTK, v_BGTK: queries, keys and values of this rank's positions.
        exchange: exchange over the ranks that share the sequence, in the sequence's order. One rank sends nothing.
        keys_B: dropout keys for the probabilities, the same on every rank; None: no dropout.
        dropout: probability of being dropped.
        first_head: index of this rank's first query head in the whole layer; dropout masks depend on it.
        scores: window, cap and factor of the scores.
        documents: of the whole samples; None: a sample is one document.
    """
    group = exchange.group
    scores = scores.within(group.size() * q_BHTK.shape[2])
    if scores.width:  # both ways divide by sqrt(K)
        q_BHTK = q_BHTK * (scores.factor(q_BHTK.shape[-1]) * math.sqrt(q_BHTK.shape[-1]))
    whole = keys_B is None and not scores.by_blocks and documents is None
    kernel = fused_attention_for(q_BHTK) if whole else None
    if kernel is not None:
        sources = CausalSources(kernel, group.rank(), q_BHTK.shape[2])
        return FusedSplitAttention.apply(q_BHTK, k_BGTK, v_BGTK, exchange, sources)  # type: ignore[no-any-return, no-untyped-call]
    begins_BT = None if documents is None else documents.begins_BT
    tiles = CausalTiles(group.size(), group.rank(), q_BHTK.shape[2], keys_B, dropout, first_head, scores, begins_BT)
    y_BHTK: Tensor = SplitAttention.apply(q_BHTK, k_BGTK, v_BGTK, exchange, tiles)  # type: ignore[no-untyped-call]
    return y_BHTK


class SplitAttention(torch.autograd.Function):
    """See `split_attention`. Forward saves q, k, v and y of this rank, and one number per query and head."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, exchange: Exchange, tiles: CausalTiles
    ) -> Tensor:
        """See `split_attention`."""
        kv_2BGTK = torch.stack([k_BGTK, v_BGTK])
        q_PRTK = _by_pairs(q_BHTK, kv_2BGTK, 1.0 / math.sqrt(q_BHTK.shape[-1]))
        wide_PRTK = torch.zeros_like(q_PRTK, dtype=_wide(q_PRTK))
        lse_PRT = wide_PRTK.new_full(wide_PRTK.shape[:-1], -math.inf)
        for source, visitor_2BGTK in exchange.visits(kv_2BGTK):
            tiles.attend_(source, q_PRTK, visitor_2BGTK.flatten(1, 2), wide_PRTK, lse_PRT)
        y_BHTK = wide_PRTK.mul_(tiles.kept_scale).to(q_BHTK.dtype).view(q_BHTK.shape)
        ctx.save_for_backward(q_PRTK, kv_2BGTK, y_BHTK, lse_PRT, tiles.begins_BT)  # the last one is in `tiles`, too
        ctx.exchange, ctx.tiles = exchange, tiles
        return y_BHTK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """The gradients of q, k and v."""
        q_PRTK, kv_2BGTK, y_BHTK, lse_PRT, _ = ctx.saved_tensors
        tiles: CausalTiles = ctx.tiles
        delta_PRT = (d_y_BHTK.to(lse_PRT.dtype) * y_BHTK).sum(-1).view(lse_PRT.shape)
        d_y_PRTK = _by_pairs(d_y_BHTK, kv_2BGTK, tiles.kept_scale)
        d_q_PRTK = torch.zeros_like(q_PRTK, dtype=lse_PRT.dtype)

        def add(source: int, visitor_2BGTK: Tensor, d_kv_2BGTK: Tensor) -> None:
            kv_2PTK, d_kv_2PTK = visitor_2BGTK.flatten(1, 2), d_kv_2BGTK.flatten(1, 2)
            tiles.attend_backward_(source, q_PRTK, kv_2PTK, lse_PRT, d_y_PRTK, delta_PRT, d_q_PRTK, d_kv_2PTK)

        d_k_BGTK, d_v_BGTK = ctx.exchange.gradient(kv_2BGTK, add).to(kv_2BGTK.dtype)
        d_q_BHTK = d_q_PRTK.mul_(1.0 / math.sqrt(q_PRTK.shape[-1])).to(q_PRTK.dtype).view(y_BHTK.shape)
        return d_q_BHTK, d_k_BGTK, d_v_BGTK, None, None


class FusedSplitAttention(torch.autograd.Function):
    """See `split_attention`. Forward saves q, k, v and y of this rank, and one number per query and head.

    The kernels read and write positions before heads, as the layers around them do: so nothing is copied but what
    they would copy.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, exchange: Exchange, sources: CausalSources
    ) -> Tensor:
        """See `split_attention`."""
        q_BHTK, kv_2BGTK = q_BHTK.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([k_BGTK, v_BGTK])
        wide_BHTK, lse_BHT = q_BHTK, q_BHTK  # the first visit is this rank's own
        with in_parts():
            for source, visitor_2BGTK in exchange.visits(kv_2BGTK):
                if source == sources.index:
                    wide_BHTK, lse_BHT = sources.first(q_BHTK, visitor_2BGTK)
                else:
                    sources.attend_(source, q_BHTK, visitor_2BGTK, wide_BHTK, lse_BHT)
        y_BHTK = wide_BHTK.to(q_BHTK.dtype)
        ctx.save_for_backward(q_BHTK, kv_2BGTK, y_BHTK, lse_BHT)
        ctx.exchange, ctx.sources = exchange, sources
        return y_BHTK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BHTK: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """The gradients of q, k and v."""
        q_BHTK, kv_2BGTK, y_BHTK, lse_BHT = ctx.saved_tensors
        sources: CausalSources = ctx.sources
        d_q_BHTK = torch.zeros_like(q_BHTK, dtype=_wide(q_BHTK))

        def add(source: int, visitor_2BGTK: Tensor, d_kv_2BGTK: Tensor) -> None:
            sources.attend_backward_(source, q_BHTK, visitor_2BGTK, y_BHTK, lse_BHT, d_y_BHTK, d_q_BHTK, d_kv_2BGTK)

        d_k_BGTK, d_v_BGTK = ctx.exchange.gradient(kv_2BGTK, add).to(kv_2BGTK.dtype)
        return d_q_BHTK.to(q_BHTK.dtype), d_k_BGTK, d_v_BGTK, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    """Dtype of sums over keys: in bf16, small terms would be lost."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_pairs(x_BHTK: Tensor, kv_2BGTK: Tensor, factor: float) -> Tensor:
    """x times the factor, contiguous, ordered by pairs of sample and key-value head: [P, R, T, K]."""
    _, batch, kv_heads, length, head_dim = kv_2BGTK.shape
    scaled_BHTK = torch.mul(x_BHTK, factor, out=x_BHTK.new_empty(x_BHTK.shape))
    return scaled_BHTK.view(batch * kv_heads, -1, length, head_dim)
