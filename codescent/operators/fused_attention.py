"""In: queries, keys and values. Out: attention with the log-sum-exp of its scores, or gradients, by a fused kernel.
Does not divide a sequence (strategies/ring.py does). torch has no public name for these operators: only here they are
called with their log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.base.device import has_flash, offered
from codescent.operators.saved_attention import LSE_MULTIPLE

# Shapes: B samples, H query heads, G key-value heads (G divides H), T queries, S keys, K head_dim.
_aten = torch.ops.aten
_FLASH_MOST = 192  # head_dim: above it, some GPUs have no gradients
_FLASH_MULTIPLE = 8  # of head_dim
_EFFICIENT_MULTIPLE = 4  # head_dim in fp32: 16 bytes

Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""q [B, H, T, K], k and v [B, G, S, K], causal (then T = S) -> y [B, H, T, K], and fp32 [B, H, T]: for each query
log(sum(exp(score))) over the keys that it sees."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
"""d_y, q, k, v, y, log-sum-exp, causal -> d_q, d_k, d_v.

y and the log-sum-exp may be those of a softmax over more keys than these. Then the gradients are the part of these
keys (Dao 2023, "FlashAttention-2", section 3.1): probabilities are recomputed as exp(score - log-sum-exp)."""


@dataclass(frozen=True)
class FusedAttention:
    """A fused kernel for attention, and the kernel of its gradients. Scores are q k^T / sqrt(K)."""

    name: str
    forward: Forward
    backward: Backward


def fused_attention_for(q_BHTK: Tensor) -> FusedAttention | None:
    """The fused kernel for queries of this dtype and head_dim on this device; None: there is none, or this is a CPU.

    Flash attention (bf16) and the memory-efficient kernel (fp32), as in torch's scaled_dot_product_attention. There is
    none in fp64. On a CPU the products of `causal_tiles` are as fast; on XPU and MPS torch has other kernels.
    """
    device, head_dim = q_BHTK.device, q_BHTK.shape[-1]
    if offered(device).tiles:
        return None
    if q_BHTK.dtype in (torch.bfloat16, torch.float16):
        fits = head_dim % _FLASH_MULTIPLE == 0 and head_dim <= _FLASH_MOST
        return FLASH if fits and has_flash(device) else None
    return EFFICIENT if q_BHTK.dtype == torch.float32 and head_dim % _EFFICIENT_MULTIPLE == 0 else None


def _flash(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    y_BHTK, lse_BHT, *_ = _aten._scaled_dot_product_flash_attention(q_BHTK, k_BGSK, v_BGSK, 0.0, causal)
    return y_BHTK, lse_BHT


def _flash_backward(
    d_y_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, y_BHTK: Tensor, lse_BHT: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seeds = q_BHTK.new_empty(0, dtype=torch.int64)  # of dropout; without dropout nobody reads them
    lengths, dropout = (q_BHTK.shape[2], k_BGSK.shape[2]), 0.0
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        d_y_BHTK,
        q_BHTK,
        k_BGSK,
        v_BGSK,
        y_BHTK,
        lse_BHT.contiguous(),
        None,  # starts of samples that are packed into one, of queries and of keys
        None,
        *lengths,
        dropout,
        causal,
        seeds,
        seeds,
    )
    return found


def _efficient(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k_BHSK, v_BHSK = (_each_head(one, q_BHTK) for one in (k_BGSK, v_BGSK))
    mask, wants_lse, dropout = None, True, 0.0
    y_BHTK, lse_BHT, *_ = _aten._scaled_dot_product_efficient_attention(
        q_BHTK, k_BHSK, v_BHSK, mask, wants_lse, dropout, causal
    )
    return y_BHTK, lse_BHT[..., : q_BHTK.shape[2]]


def _efficient_backward(
    d_y_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, y_BHTK: Tensor, lse_BHT: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k_BHSK, v_BHSK = (_each_head(one, q_BHTK) for one in (k_BGSK, v_BGSK))
    seeds = q_BHTK.new_empty(0, dtype=torch.int64)
    padded_BHT = F.pad(lse_BHT, (0, -lse_BHT.shape[-1] % LSE_MULTIPLE), value=torch.inf)
    mask, dropout, wanted = None, 0.0, [True, True, True, False]
    d_q_BHTK, d_k_BHSK, d_v_BHSK, _ = _aten._scaled_dot_product_efficient_attention_backward(
        d_y_BHTK, q_BHTK, k_BHSK, v_BHSK, mask, y_BHTK, padded_BHT, seeds, seeds, dropout, wanted, causal
    )
    return d_q_BHTK, _each_group(d_k_BHSK, k_BGSK), _each_group(d_v_BHSK, v_BGSK)


def _for_cpu(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k_BHSK, v_BHSK = (_each_head(one, q_BHTK) for one in (k_BGSK, v_BGSK))
    y_BHTK, lse_BHT = _aten._scaled_dot_product_flash_attention_for_cpu(q_BHTK, k_BHSK, v_BHSK, 0.0, causal)
    return y_BHTK, lse_BHT


def _for_cpu_backward(
    d_y_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, y_BHTK: Tensor, lse_BHT: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k_BHSK, v_BHSK = (_each_head(one, q_BHTK) for one in (k_BGSK, v_BGSK))
    d_q_BHTK, d_k_BHSK, d_v_BHSK = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_y_BHTK, q_BHTK, k_BHSK, v_BHSK, y_BHTK, lse_BHT, 0.0, causal
    )
    return d_q_BHTK, _each_group(d_k_BHSK, k_BGSK), _each_group(d_v_BHSK, v_BGSK)


def _each_head(x_BGSK: Tensor, q_BHTK: Tensor) -> Tensor:
    """[B, H, S, K]: the key or value of each query head. A copy if heads share it: this kernel needs equal numbers."""
    times = q_BHTK.shape[1] // x_BGSK.shape[1]
    return x_BGSK if times == 1 else x_BGSK.repeat_interleave(times, 1)


def _each_group(d_x_BHSK: Tensor, x_BGSK: Tensor) -> Tensor:
    """[B, G, S, K]: the sum of the gradients of the heads that share a key or value."""
    (batch, groups, *rest), heads = x_BGSK.shape, d_x_BHSK.shape[1]
    return d_x_BHSK if groups == heads else d_x_BHSK.view(batch, groups, -1, *rest).sum(2)


FLASH = FusedAttention("flash", _flash, _flash_backward)
EFFICIENT = FusedAttention("memory-efficient", _efficient, _efficient_backward)
FOR_CPU = FusedAttention("flash for CPUs", _for_cpu, _for_cpu_backward)
"""Not chosen on a CPU. Tests compare with it what `strategies/causal_sources.py` makes of such a pair."""
