"""In: activations, a weight w. Out: each row divided by its root mean square, times w (RMSNorm).
Does not compute norms of heads (head_norm.py does), or a norm that multiplies by 1 + w (plus_one_norm.py does)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from codescent.operators.compiled import plain_inference

# Shapes: B samples, T positions, D channels.


class RootMeanSquareNorm(nn.RMSNorm):
    """torch's RMSNorm (Zhang and Sennrich 2019). Without gradients on a CPU it calls fewer operators: for one token,
    torch's own takes as long as a product with a small matrix.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D], in the dtype of x."""
        few = plain_inference() and x_BTD.device.type == "cpu" and x_BTD.dtype != torch.bfloat16
        if not few or self.eps is None:
            return super().forward(x_BTD)
        norms_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True)
        rates_BT1 = norms_BT1.square_().mul_(1.0 / x_BTD.shape[-1]).add_(self.eps).rsqrt_()
        y_BTD: Tensor = (x_BTD * rates_BT1).mul_(self.weight)
        return y_BTD
