"""In: a decoder on a CPU. Out: the same decoder, with matrices stored column by column, for few tokens.
Does not change a value or a shape. A decoder that also trains stays as it is."""

from __future__ import annotations

import torch
from torch import nn

from codescent.operators.linear import Linear

# Shapes: O outputs, I inputs. A weight of two halves is [F, 2, I], with O = 2 F.


@torch.no_grad()
def store_by_columns_(module: nn.Module) -> None:
    """Store the matrices of all linear layers, except a matrix that an embedding shares, column by column.

    MKL's product of 4 to 16 tokens with a matrix in this order takes two thirds of the time (fp32, 1152 x 384 to 384 x
    1536); with one token it takes as long.
    """
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    for layer in module.modules():
        if isinstance(layer, Linear | nn.Linear) and id(layer.weight) not in embeddings:
            weight_OI = layer.weight.data.flatten(0, -2)
            layer.weight.data = weight_OI.t().contiguous().t().view(layer.weight.shape)
