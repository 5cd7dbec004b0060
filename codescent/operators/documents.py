"""In: where the documents of each sample begin and end. Out: `Documents`, what attention and positions read of them.
Does not compute attention, and does not know which token ends a document (data/documents.py does)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Shapes: B samples, T positions of a sample, M documents of the sample that has most, N = B * M documents.


class DocumentBounds(NamedTuple):
    """The documents of some samples. No query sees a key of another document.

    Attributes:
        begins_BT: int64: the position at which the document of each position begins.
        offsets_N: int32 [N + 1]: where each document begins if the samples follow one another, and where the last one
            ends: what kernels of variable length read. A sample with fewer documents than others has some of length 0.
            None: on a CPU, where there is no such kernel.
    """

    begins_BT: Tensor
    offsets_N: Tensor | None = None

    @classmethod
    def of(cls, begins_BT: Tensor, ends_BM: Tensor) -> DocumentBounds:
        """Documents as a loader gives them (see `data.documents`). Nothing waits for the device."""
        if begins_BT.device.type == "cpu":
            return cls(begins_BT)
        samples, length = begins_BT.shape
        firsts_B1 = torch.arange(samples, device=ends_BM.device)[:, None] * length
        ends_N = (ends_BM + firsts_B1).flatten().to(torch.int32)
        return cls(begins_BT, torch.cat([ends_N.new_zeros(1), ends_N]))

    @property
    def positions_BT(self) -> Tensor:
        """int64: the position of each token in its document."""
        return torch.arange(self.begins_BT.shape[1], device=self.begins_BT.device) - self.begins_BT

    def hidden(self) -> Tensor:
        """bool [B, 1, T, T], True where a key is of an earlier document than the query. Later keys are not hidden."""
        keys_T = torch.arange(self.begins_BT.shape[1], device=self.begins_BT.device)
        return (keys_T < self.begins_BT[..., None])[:, None]

    def seen(self) -> Tensor:
        """bool [B, 1, T, T], True where a query sees the key: of its document, and no later one."""
        length = self.begins_BT.shape[1]
        earlier_TT = torch.ones(length, length, dtype=torch.bool, device=self.begins_BT.device).tril_()
        return earlier_TT & ~self.hidden()
