"""In: a wire, a vector of this rank. Out: a message to one other process, and what a message stands for.
Does not send it and does not sum over ranks (wire.py does)."""

from __future__ import annotations

import torch
from torch import Tensor

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan.wire import Wire
from codescent.strategies.wire_codecs import codec, largest


class Messages:
    """Encodes vectors of one length for one receiver, with error feedback; or decodes them.

    What a message lacks is added to the next vector (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2).

    Args:
        wire: any but PowerSGD, whose factors are of use in a sum over ranks only.
        numel: length of the vectors.
        dtype: of the vectors: fp32 or fp64.
    """

    def __init__(self, wire: Wire, numel: int, dtype: str) -> None:
        self.wire, self.numel, self.wide = wire, numel, TORCH_DTYPE[dtype]
        self.length = wire.message_bytes(numel, dtype)
        self.codec = codec(wire) if wire.coded else None
        is_plain, part = wire.method == "none", wire.part(numel, 2) if wire.coded else numel
        self.row = torch.zeros(1, 0 if is_plain else part, dtype=self.wide)
        self.scratch = torch.zeros_like(self.row)
        self.residual = torch.zeros(numel if wire.lossy else 0, dtype=self.wide)
        self.message = torch.empty(0 if is_plain else self.length, dtype=torch.uint8)

    def encode(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The message for `vector` [numel], uint8 [length], and what it stands for [numel].

        Both are in memory that the next call uses again. The residual changes in `delivered`.
        """
        if self.wire.method == "none":
            return vector.view(torch.uint8), vector
        values, meant = self.row[0, : self.numel], self.scratch[0, : self.numel]
        torch.add(vector, self.residual, out=values) if self.wire.lossy else values.copy_(vector)
        self._write(values)
        return self.message, self.decode(self.message, meant)

    def delivered(self) -> None:
        """The last message was applied: from now on the residual is what it lacked. A message that was refused carried
        the old residual, which stays then, as it does if the vector was not finite. A push that is applied but moves
        nothing, as another worker's was not finite, is lost with its residual, as its gradient is."""
        if self.wire.lossy:
            unsent = self.row[0, : self.numel] - self.scratch[0, : self.numel]
            if bool(unsent.isfinite().all()):
                self.residual.copy_(unsent)

    def buffers(self) -> list[Tensor]:
        """The memory that it holds beside the residual."""
        return [self.row, self.scratch, self.message]

    def _write(self, values: Tensor) -> None:
        if self.codec is not None:
            self.codec.encode(self.row, self._coded(self.message), self.scratch)
            return
        places = largest(values, self.wire.top(self.numel), self.scratch[0])
        found, indices = self._top(self.message)
        found.copy_(values[places])
        indices.copy_(places)

    def decode(self, message: Tensor, into: Tensor) -> Tensor:
        """Write what a message stands for into a vector [numel]. Returns the vector."""
        if self.wire.method == "none":
            return into.copy_(message.view(self.wide))
        if self.codec is not None:
            self.codec.decode(self._coded(message), self.scratch)
            return into if into.data_ptr() == self.scratch.data_ptr() else into.copy_(self.scratch[0, : self.numel])
        found, indices = self._top(message)
        return into.zero_().index_copy_(0, indices.long(), found)

    def decoded(self, message: Tensor) -> Tensor:
        """What a message stands for [numel], in memory of its own; without an encoding, in that of the message."""
        if self.wire.method == "none":
            return message.view(self.wide)
        return self.decode(message, torch.empty(self.numel, dtype=self.wide))

    def _coded(self, message: Tensor) -> Tensor:
        return message.view(TORCH_DTYPE["bf16"] if self.wire.method == "bf16" else torch.uint8).unsqueeze(0)

    def _top(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the int32 indices in a message."""
        count = self.wire.top(self.numel)
        values = message[: count * self.wide.itemsize].view(self.wide)
        begin = values.numel() * self.wide.itemsize
        return values, message[begin : begin + 4 * count].view(torch.int32)
