"""In: sizes of attention over a split sequence. Out: every message of one layer and one micro-batch, with its bytes.
Does not send them (ring does) and does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from codescent.plan import DTYPE_BYTES, WIDE, Verb


@dataclass(frozen=True)
class Message:
    """`times` messages or collectives, alike, that each rank issues; bytes as `plan.Traffic` counts its payload.

    `payload_bytes`: of the tensor that is sent or scattered, or of the whole that is gathered. A send is to the next
    rank of the ring, with a receive of as much from the one before.
    """

    kind: Literal["send", "all_gather", "reduce_scatter"]
    verb: Verb
    payload_bytes: int
    dtype: str
    what: str
    times: int = 1


@dataclass(frozen=True)
class SplitSizes:
    """Of keys and values: `batch` samples of a micro-batch, `length` positions and `kv_heads` heads of one rank."""

    degree: int
    batch: int
    kv_heads: int
    length: int
    head_dim: int
    precision: str

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one rank, stacked."""
        return 2 * self.batch * self.kv_heads * self.length * self.head_dim * DTYPE_BYTES[dtype]


def ring_traffic(sizes: SplitSizes) -> tuple[Message, ...]:
    """Of `ring.ring_attention`: n - 1 hops there, the same again in backward, and n - 1 hops of the gradients.

    A rank's keys and values reach all others in n - 1 hops. The sum of their gradients begins at the next rank and is
    home after as many. All but the last hop of the gradients can hide behind the computation.
    """
    if sizes.degree == 1:
        return ()
    hops, dtype, wide = sizes.degree - 1, sizes.precision, WIDE[sizes.precision]
    what = "keys and values"
    return (
        Message("send", Verb.FORWARD, sizes.kv_bytes(dtype), dtype, what, hops),
        Message("send", Verb.BACKWARD, sizes.kv_bytes(dtype), dtype, what, hops),
        Message("send", Verb.BACKWARD, sizes.kv_bytes(wide), wide, f"gradients of {what}", hops),
    )


def gather_traffic(sizes: SplitSizes) -> tuple[Message, ...]:
    """Of `ring.gathered_attention`: one all-gather there, the same again in backward, and one reduce-scatter.

    Whatever the algorithm, a rank sends n - 1 times its own part (`plan.Traffic.wire_bytes`): as much as in the ring.
    The ranks wait for all of it.
    """
    if sizes.degree == 1:
        return ()
    n, dtype, wide = sizes.degree, sizes.precision, WIDE[sizes.precision]
    what = "keys and values"
    return (
        Message("all_gather", Verb.FORWARD, n * sizes.kv_bytes(dtype), dtype, what),
        Message("all_gather", Verb.BACKWARD, n * sizes.kv_bytes(dtype), dtype, what),
        Message("reduce_scatter", Verb.BACKWARD, n * sizes.kv_bytes(wide), wide, f"gradients of {what}"),
    )
