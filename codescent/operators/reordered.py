"""In: a matrix on a CPU. Out: products with it, by a copy in the order in which oneDNN's kernels read it.
Does not decide which matrices are worth a copy (inference/layouts.py does). The products have no gradient."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators.head import Vocabulary

# Shapes: N rows of any leading dims, I inputs, O outputs, V vocab_size, D hidden_dim. A weight of two halves is
# [F, 2, I], with O = 2 F.


def has_onednn() -> bool:
    """Whether torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies bf16 by instructions of this processor."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Reordered:
    """x W^T + b by oneDNN, for any number of rows. An ordinary product reorders the matrix, or parts, at each call.

    The copy has the values that the matrix has now: a later change of them is not seen.

    Args:
        weight: [O, I], or of two halves [F, 2, I]; fp32 or bf16.
        plain_OI: for up to `few` rows, an ordinary product with this matrix of the same values is faster.
        few: so many rows; 0: none.
    """

    def __init__(self, weight: Tensor, plain_OI: Tensor | None = None, few: int = 0) -> None:
        self._plain_OI, self._few = plain_OI, few
        with torch.no_grad():
            self._copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().flatten(0, -2).contiguous())

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b: [.., O]."""
        if self._plain_OI is not None and x_NI.numel() <= self._few * x_NI.shape[-1]:
            return F.linear(x_NI, self._plain_OI, bias_O)
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._copy, bias_O, "none", [], "")
        return y_NO


class ReorderedVocabulary(Vocabulary):
    """Embedding and head of a decoder whose head matrix has such a copy. In training it is as `Vocabulary`."""

    def __init__(self, head: Reordered) -> None:
        self._head = head

    def logits(self, x: Tensor, weight_VD: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return self._head.linear(x)
