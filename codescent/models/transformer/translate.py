"""In: a whole encoder-decoder, sources. Out: their targets, each token the likeliest after those before it.
Does not know text and keeps no keys and values: the decoder reads the target so far again for each token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from codescent.models.transformer.module import Transformer, sinusoids

# Shapes: B samples, S positions of the source, T of the target, D hidden_dim, V vocab_size.


@torch.no_grad()
def greedy(module: Transformer, source_BS: Tensor, lengths_B: Tensor, begin: int, end: int) -> Tensor:
    """Targets int64 [B, target_len], always the likeliest next token; after its first `end` a target is all `end`.

    Args:
        module: the model, in evaluation mode, not divided.
        source_BS: tokens.
        lengths_B: tokens of each source; the rest is padding.
        begin, end: the tokens that begin and end a target.
    """
    shape = module.shape
    layers = [(int(name) < shape.num_encoder_layers, block) for name, block in module.blocks.items()]
    source_weight_VD, target_weight_VD, head_VD = _matrices(module)
    padding_BS = torch.arange(source_BS.shape[1], device=source_BS.device) >= lengths_B[:, None]
    source_BSD = _embedded(source_BS, source_weight_VD)
    for is_encoder, block in layers:
        if is_encoder:
            source_BSD = block(source_BSD, padding_BS)
    target_BT = source_BS.new_full((len(source_BS), 1), begin)
    ended_B = torch.zeros_like(target_BT[:, 0], dtype=torch.bool)
    while target_BT.shape[1] <= shape.target_len:
        x_BTD = _embedded(target_BT, target_weight_VD)
        for is_encoder, block in layers:
            if not is_encoder:
                x_BTD = block(x_BTD, source_BSD, None, padding_BS)
        next_B = (module.norm(x_BTD[:, -1]) @ head_VD.t()).argmax(-1).masked_fill(ended_B, end)
        ended_B |= next_B == end
        target_BT = torch.cat((target_BT, next_B[:, None]), dim=1)
        if bool(ended_B.all()):
            break
    rest = shape.target_len + 1 - target_BT.shape[1]
    return torch.nn.functional.pad(target_BT[:, 1:], (0, rest), value=end)


def _matrices(module: Transformer) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of source and target, and the head."""
    if module.shape.embedding == "tied":
        return module.tok.weight, module.tok.weight, module.tok.weight
    return module.source_tok.weight, module.target_tok.weight, module.head.weight


def _embedded(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    length, width = tokens_BT.shape[1], weight_VD.shape[1]
    positions_TD = sinusoids(length, width, weight_VD.dtype, weight_VD.device)
    x_BTD: Tensor = torch.nn.functional.embedding(tokens_BT, weight_VD) * math.sqrt(width) + positions_TD
    return x_BTD
