"""In: an encoder-decoder that is not split over ranks, source sequences. Out: target sequences, by greedy decoding.
Does not handle text and has no key/value cache: for each new token the decoder reads the whole target again."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.models.part import padding
from codescent.models.transformer.module import Transformer
from codescent.operators import products
from codescent.operators.cache import few_lengths

# Shapes: B samples, S positions of the source, T of the target, D hidden_dim, V vocab_size.


@torch.no_grad()
def greedy(module: Transformer, source_BS: Tensor, lengths_B: Tensor, begin: int, end: int) -> Tensor:
    """Targets int64 [B, target_len] of greedy search: always the likeliest next token.

    After its first `end`, a target contains only `end`. The model must be whole and in evaluation mode. `lengths_B`:
    the sources' lengths; the rest is padding. `begin` and `end`: the tokens that begin and end a target.
    """
    shape, blocks = module.shape, list(module.blocks.values())
    encoder, decoder = blocks[: shape.num_encoder_layers], blocks[shape.num_encoder_layers :]
    matrices = (module.tok,) * 3 if shape.embedding == "tied" else (module.source_tok, module.target_tok, module.head)
    source_weight_VD, target_weight_VD, head_VD = (matrix.weight for matrix in matrices)
    padding_BS = padding(lengths_B, source_BS.shape[1])
    source_BSD = _embedded(module, source_BS, source_weight_VD)
    for block in encoder:
        source_BSD = block(source_BSD, padding_BS)
    target_BT = source_BS.new_full((len(source_BS), 1), begin)
    ended_B = torch.zeros_like(target_BT[:, 0], dtype=torch.bool)
    while (length := target_BT.shape[1]) <= shape.target_len:
        read = few_lengths(length, shape.target_len, target_BT.device)
        # A causal mask hides what follows the last token.
        visible = shape.causal or read == length
        padding_1T = None if visible else torch.arange(read, device=target_BT.device)[None] >= length
        x_BTD = _embedded(module, F.pad(target_BT, (0, read - length), value=end), target_weight_VD)
        for block in decoder:
            x_BTD = block(x_BTD, padding_1T, source_BSD=source_BSD, padding_BS=padding_BS)
        next_B = products.linear(module.norm(x_BTD[:, length - 1]), head_VD).argmax(-1).masked_fill(ended_B, end)
        ended_B |= next_B == end
        target_BT = torch.cat((target_BT, next_B[:, None]), dim=1)
        if bool(ended_B.all()):
            break
    rest = shape.target_len + 1 - target_BT.shape[1]
    return F.pad(target_BT[:, 1:], (0, rest), value=end)


def _embedded(module: Transformer, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    positions_TD = module.positions.on(weight_VD.device, weight_VD.dtype)[: tokens_BT.shape[1]]
    x_BTD: Tensor = F.embedding(tokens_BT, weight_VD) * math.sqrt(weight_VD.shape[1]) + positions_TD
    return x_BTD
