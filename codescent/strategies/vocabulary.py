"""In: this rank's rows of the matrix of embedding or head; tokens, or final activations and targets. Out: embeddings,
or the loss.
Does not gather logits for the loss: per token, ranks exchange largest logit, sum of exponentials, target's logit."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from codescent.operators import fused_softmax, products
from codescent.operators.compiled import never_compiled
from codescent.operators.head import SoftmaxGradient, head_loss, tied_embedding
from codescent.operators.softmax import (
    factor_of_softmax,
    gradient_at_targets,
    scale_,
    softmax_in_pieces_,
    sum_of_logits,
    with_z_loss,
)
from codescent.plan.objective import CROSS_ENTROPY, Objective
from codescent.strategies.collectives import all_gather_into, all_reduce, assert_async
from codescent.strategies.sequence import enter, gather_alike, gather_sequence, leave, scatter_sum

# Shapes: B samples, T positions, t = T / degree positions of this rank, N tokens of a chunk, M selected rows,
# D hidden_dim, C outputs of a small head, V vocab_size, v rows of the vocabulary matrix on this rank.


class SplitVocabulary:
    """The vocabulary-parallel embedding and head (Shoeybi et al. 2019, "Megatron-LM", section 3).

    Rank r holds rows [first, last) of the matrix [V, D], as torch.chunk cuts it. The last ranks may hold no row. A
    group of one rank sends nothing, and its results equal those of operators/head.py, bitwise. torch.compile does not
    see inside `embed` and `loss`: it would unroll the loop of chunks with its collectives.

    Traffic per micro-batch, with S = B * T * D * itemsize(x) bytes in the dtype of x, and W = fp32, or fp64 for x in
    fp64 (payload bytes; for an all-gather, those of the gathered buffer):

                                 forward                                            backward
        embed, sequence_parallel REDUCE_SCATTER S                                   ALL_GATHER S
        embed                    ALL_REDUCE S                                       -
        loss, sequence_parallel  ALL_GATHER S                                       REDUCE_SCATTER S
        loss                     -                                                  ALL_REDUCE S
        loss, either             of each chunk of N of its B * T tokens: ALL_REDUCE
                                 (max) N * itemsize(W), ALL_REDUCE 2 * N * itemsize(W)  -

    A chunk has chunk_tokens tokens, the last chunk the rest; with chunk_tokens = 0, one chunk has all B * T tokens.
    Without gradients there is only the forward traffic.

    If the head reads only M of the positions, `every_row` and `loss_of_rows` replace `loss`. With sequence_parallel,
    `every_row` gathers, and between the two functions each rank's gradients are a part of the sum. Without it, backward
    of `loss_of_rows` reduces only the M rows. Chunks are parts of these M rows.

    With sequence_parallel, `every_logit` is an ALL_GATHER of B * T * C * itemsize bytes forward. Its backward sends
    nothing.

    With sequence_parallel, activations outside this class are this rank's positions [B, t, D]; else they are whole
    [B, T, D].
    """

    def __init__(self, group: dist.ProcessGroup, vocab_size: int, *, sequence_parallel: bool) -> None:
        self.group, self.vocab_size, self.sequence_parallel = group, vocab_size, sequence_parallel
        self.rows_per_rank = math.ceil(vocab_size / group.size())
        self.first = min(group.rank() * self.rows_per_rank, vocab_size)
        self.last = min(self.first + self.rows_per_rank, vocab_size)

    @never_compiled
    def embed(
        self, weight_vD: Tensor, tokens_BT: Tensor, tied_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings x [B, t, D] or [B, T, D], summed over ranks: a rank adds 0 for the rows that it does not hold.

        `tokens_BT` is the same on every rank. `tied_dtype` and the second output [v, D] are those of `tied_embedding`.
        """
        alone = self.group.size() == 1
        rows_BT, elsewhere_BT = (tokens_BT, None) if alone else self._local(tokens_BT)
        tied_gradient_vD: Tensor | None = None
        if self.first == self.last:
            # Zeros that depend on the weight, so that backward's collective runs on this rank, too.
            x_BTD = weight_vD.sum().expand(*tokens_BT.shape, weight_vD.shape[1])
            tied_gradient_vD = None if tied_dtype is None else weight_vD.to(tied_dtype)
        elif tied_dtype is None:
            x_BTD = F.embedding(rows_BT, weight_vD)
        else:
            x_BTD, tied_gradient_vD = tied_embedding(weight_vD, rows_BT, tied_dtype)
        if elsewhere_BT is None:
            return x_BTD, tied_gradient_vD
        x_BTD = x_BTD.masked_fill(elsewhere_BT[..., None], 0.0)
        return (scatter_sum if self.sequence_parallel else leave)(x_BTD, self.group), tied_gradient_vD

    @never_compiled
    def logits(self, x: Tensor, weight_vD: Tensor) -> Tensor:
        """The logits of the whole vocabulary on every rank: [.., V], given x [.., D], which is the same on all. No
        gradients: training never has all logits. An ALL_GATHER of the rows of x times rows_per_rank * degree logits.
        """
        x_ND = x.flatten(0, -2)
        own_Nv = products.linear(x_ND, weight_vD)
        if self.group.size() == 1:
            return own_Nv.view(*x.shape[:-1], -1)
        padded_vN = own_Nv.new_zeros(self.rows_per_rank, len(x_ND))
        padded_vN[: own_Nv.shape[1]] = own_Nv.t()
        every_VN = padded_vN.new_empty(self.group.size() * self.rows_per_rank, len(x_ND))
        all_gather_into(every_VN, padded_vN, group=self.group)
        return every_VN[: self.vocab_size].t().view(*x.shape[:-1], -1)

    @never_compiled
    def loss(
        self,
        x: Tensor,
        weight_vD: Tensor,
        targets_BT: Tensor,
        chunk_tokens: int,
        loss_scale: float,
        tied_gradient_vD: Tensor | None,
        *,
        skip_negative: bool = False,
        objective: Objective = CROSS_ENTROPY,
        cap: float = 0.0,
    ) -> Tensor:
        """The sum of the losses of all B * T tokens, the same on every rank: see `head_loss`.

        `x` is [B, t, D] or [B, T, D], after the last norm; `targets_BT` is the same on every rank. `tied_gradient_vD`
        receives the gradient of `weight_vD`; None: `weight_vD` does. `skip_negative`: a negative target has no loss.
        """
        x_BTD = (gather_sequence if self.sequence_parallel else enter)(x, self.group)
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        return head_loss(
            x_ND,
            weight_vD,
            targets_N,
            chunk_tokens,
            loss_scale,
            tied_gradient_vD,
            self._softmax,
            skip_negative=skip_negative,
            objective=objective,
            cap=cap,
        )

    def every_row(self, x: Tensor) -> Tensor:
        """The rows [B, T, D] of all positions, given x [B, t, D] or [B, T, D]. `loss_of_rows` reads some of them."""
        return gather_sequence(x, self.group) if self.sequence_parallel else x

    def every_logit(self, y: Tensor) -> Tensor:
        """The outputs [B, T, C] of all positions, given y [B, t, C] or [B, T, C]. Every rank computes the same loss."""
        return gather_alike(y, self.group) if self.sequence_parallel else y

    @never_compiled
    def loss_of_rows(
        self,
        x_MD: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor,
        targets_M: Tensor,
        chunk_tokens: int,
        loss_scale: float,
        tied_gradient_vD: Tensor | None,
        objective: Objective = CROSS_ENTROPY,
        *,
        skip_negative: bool = False,
    ) -> Tensor:
        """`loss` of selected rows of `every_row`; `bias_v` are this rank's rows of the bias."""
        x_MD = x_MD if self.sequence_parallel else enter(x_MD, self.group)
        return head_loss(
            x_MD,
            weight_vD,
            targets_M,
            chunk_tokens,
            loss_scale,
            tied_gradient_vD,
            self._softmax,
            bias_v,
            skip_negative=skip_negative,
            objective=objective,
        )

    @property
    def _softmax(self) -> SoftmaxGradient | None:
        """The argument of `head_loss`; None, for its own softmax, in a group of one rank."""
        return None if self.group.size() == 1 else self._softmax_gradient_

    def _local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's index in this rank's rows, and a mask of tokens whose row this rank lacks (index: the nearest).

        Every rank refuses a token outside the vocabulary, as the one-device model does.
        """
        assert_async(((tokens >= 0) & (tokens < self.vocab_size)).all(), "a token outside the vocabulary")
        rows = (tokens - self.first).clamp(0, max(0, self.last - self.first - 1))
        return rows, (tokens < self.first) | (tokens >= self.last)

    def _softmax_gradient_(
        self, logits_Nv: Tensor, targets_N: Tensor, work: torch.dtype, wants: bool, objective: Objective
    ) -> Tensor:
        """A `SoftmaxGradient` (see operators/head.py) over the columns of all ranks.

        Let m be the largest logit on all ranks, m' the largest logit on this rank, and p' the probability of m' in the
        softmax over this rank's columns. Then exp(m' - m) / p' is this rank's part of the sum of exp(z - m). So one
        softmax per rank is enough, with one factor per row.
        """
        num_tokens, columns = logits_Nv.shape
        at_N, elsewhere_N = self._local(targets_N)
        share = objective.label_smoothing / self.vocab_size  # of each class in a smoothed target
        mine_2N1 = torch.ones(2, num_tokens, 1, dtype=work, device=logits_Nv.device)
        fuses = columns > 0 and fused_softmax.serves(logits_Nv)
        if fuses:
            of_rank = fused_softmax.statistics(logits_Nv, targets_N - self.first, work, total=share > 0.0)
            mine_2N1[0], mine_2N1[1] = of_rank.largest, 1.0 / of_rank.sums
            logit_at_N1, total_N1 = of_rank.at_target, of_rank.total if share else None
        elif columns:
            logit_at_N1 = logits_Nv.gather(1, at_N[:, None])
            total_N1 = sum_of_logits(logits_Nv, work) if share else None
            mine_2N1 = softmax_in_pieces_(logits_Nv, work, keep=wants)
        else:
            mine_2N1[0] = -math.inf
        largest_N1 = mine_2N1[0].clone()
        all_reduce(largest_N1, dist.ReduceOp.MAX, group=self.group)

        part_N1 = (mine_2N1[0] - largest_N1).exp_() / mine_2N1[1]
        sums_2N1 = torch.zeros_like(mine_2N1)  # of exp(z - m); of z - m, weighted by the (smoothed) target
        sums_2N1[0] = part_N1
        if columns:
            at_target_N1 = logit_at_N1 - largest_N1
            sums_2N1[1] = at_target_N1.masked_fill(elsewhere_N[:, None], 0.0)
            if total_N1 is not None:
                sums_2N1[1] *= 1.0 - objective.label_smoothing
                sums_2N1[1] += share * (total_N1 - columns * largest_N1)
        all_reduce(sums_2N1, group=self.group)
        log_sum_N1 = sums_2N1[0].log()
        log_z_N1 = log_sum_N1 + largest_N1

        if wants and fuses:
            entropies_N1, at_N = log_sum_N1 - at_target_N1, targets_N - self.first
            fused_softmax.overwrite_(logits_Nv, at_N, largest_N1, log_sum_N1, entropies_N1, objective, self.vocab_size)
        elif wants and columns:
            scale_(logits_Nv, part_N1 / sums_2N1[0] * factor_of_softmax(log_z_N1, objective), share)
            every_N = torch.arange(num_tokens, device=logits_Nv.device)
            entropies_N1 = log_sum_N1 - at_target_N1
            at_target_N = gradient_at_targets(entropies_N1, log_z_N1, objective, self.vocab_size).squeeze(1)
            at_target_N = at_target_N.to(logits_Nv.dtype)
            logits_Nv[every_N, at_N] = torch.where(elsewhere_N, logits_Nv[every_N, at_N], at_target_N)
        return with_z_loss(log_sum_N1 - sums_2N1[1], log_z_N1, objective)
