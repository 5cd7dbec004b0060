"""In: the weights of a replica, a lossy wire. Out: messages of their differences to a public copy, and what is mixed.
Does not send anything (mixing.py does)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan.wire import Wire
from codescent.strategies.gossip import message_bytes
from codescent.strategies.gossip_graphs import Row
from codescent.strategies.wire_codecs import codec, largest


class Differences:
    """Error feedback of gossip (Koloskova et al. 2019, "CHOCO-SGD", algorithm 2), with two copies however many
    neighbours there are: only the weighted sum of the public copies is kept.

    All neighbours know the same public copy y_i of replica i. It sends q(x_i - y_i). Then y_i becomes y_i plus what was
    sent, and x_i becomes x_i + sum_j W_ij y_j - y_i. What q loses stays in the difference, and is sent later.

    Args:
        wire: the format of the messages.
        weights: the initial weights [numel], the same on all replicas: all public copies begin with them.
    """

    def __init__(self, wire: Wire, weights: Tensor) -> None:
        self.wire, self.numel = wire, len(weights)
        self.public = weights.clone()
        self.mixed = weights.clone()  # sum_j W_ij y_j

    def encode(self, weights: Tensor) -> Tensor:
        """The message of this replica: [length], in the dtype of the messages."""
        difference = weights - self.public
        if self.wire.method == "topk":
            return self._encode_largest(difference)
        part = self.wire.part(self.numel, 2)
        padded = difference.new_zeros(1, part)
        padded[0, : self.numel] = difference
        messages = padded.new_empty(1, self.wire.message(part), dtype=TORCH_DTYPE[self.wire.message_dtype])
        codec(self.wire).encode(padded, messages, torch.empty_like(padded))
        return messages[0]

    def mix(self, weights: Tensor, own: int, row: Row, messages: Mapping[int, Tensor]) -> Tensor:
        """The new weights.

        `own`: index of this replica. `messages`: by replica of the row of the mixing matrix.
        """
        self._add(messages[own], self.public, 1.0)
        for source, weight in row.items():  # by replica: in a complete graph `mixed` has the same bits on all
            self._add(messages[source], self.mixed, weight)
        return weights + (self.mixed - self.public)

    def restart(self, weights: Tensor, mixed: Tensor) -> None:
        """Whole weights were sent, not differences: they are the public copies now."""
        self.public.copy_(weights)
        self.mixed.copy_(mixed)

    def _encode_largest(self, difference: Tensor) -> Tensor:
        indices = largest(difference, self.wire.top(self.numel), torch.empty_like(difference))
        size = message_bytes(self.wire, self.numel, str(difference.dtype).replace("torch.float", "fp"))
        message = torch.zeros(size, dtype=torch.uint8, device=difference.device)
        values, places = self._split(message)
        values.copy_(difference[indices])
        places.copy_(indices)
        return message

    def _add(self, message: Tensor, into: Tensor, weight: float) -> None:
        """Add what a message stands for, times `weight`."""
        if self.wire.method == "topk":
            values, places = self._split(message)
            into.index_add_(0, places, values, alpha=weight)
            return
        decoded = into.new_empty(1, self.wire.part(self.numel, 2))
        codec(self.wire).decode(message[None], decoded)
        into.add_(decoded[0, : self.numel], alpha=weight)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the values and of the indices of the largest elements."""
        count, dtype = self.wire.top(self.numel), self.public.dtype
        size = count * dtype.itemsize
        return message[:size].view(dtype), message[size : size + 4 * count].view(torch.int32)
