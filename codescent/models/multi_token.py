"""In: the last states of a decoder, its tokens. Out: the loss of the tokens behind the next one, in training
(multi-token prediction).
Does not build blocks (a kind of model does), and has no part in generating text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from codescent.operators.documents import DocumentBounds
from codescent.operators.linear import Linear

# Shapes: B samples, T positions, D hidden_dim.


class TokensAhead(NamedTuple):
    """What a module reads and predicts at each position i of a sample, both int64 [B, T].

    Attributes:
        read: the token at i + k, of which the model before has predicted the one behind.
        targets: the token at i + k + 1; -1: there is none, or it is of another document than i, or it has no loss.
    """

    read: Tensor
    targets: Tensor


def tokens_ahead(
    inputs_BT: Tensor, targets_BT: Tensor, module: int, documents: DocumentBounds | None = None
) -> TokensAhead:
    """Tokens of a module, which are counted from 1 (DeepSeek-AI 2024, "DeepSeek-V3", equations 21 to 24).

    `targets_BT`: the next token at each position; negative: it has no loss. Behind the last token of a sample a module
    reads token 0, where it predicts nothing, and which no other position sees.
    """
    length, zeros_Bk = inputs_BT.shape[1], torch.zeros_like(inputs_BT[:, :module])
    read_BT = torch.cat([inputs_BT[:, module:], zeros_Bk], 1)
    ahead_BT = torch.cat([targets_BT[:, module:], zeros_Bk - 1], 1)
    if documents is not None:
        begins_BT = documents.begins_BT
        other_BT = begins_BT[:, module:] != begins_BT[:, : length - module]
        ahead_BT[:, : length - module].masked_fill_(other_BT, -1)
    return TokensAhead(read_BT, ahead_BT)


class TokenPredictor(nn.Module):
    """A module that predicts one token more: a matrix of two normed inputs, a block, a norm before the shared head.

    The inputs are the embedding of a token, and the state of the model or module before it (equations 21 and 22), which
    the norm before the head has normed, as in the released weights.
    """

    def __init__(self, norm: Callable[[], nn.Module], width: int, block: nn.Module) -> None:
        super().__init__()
        self.embed_norm, self.hidden_norm = norm(), norm()
        self.join = Linear(2 * width, width, False)
        self.join.reads_rows = True
        self.block = block
        self.norm = norm()

    def forward(
        self,
        x_BTD: Tensor,
        embedded_BTD: Tensor,
        rows_T: Tensor | None,
        turns_TC2: Tensor | None,
        documents: DocumentBounds | None,
    ) -> Tensor:
        """The next state: [B, T, D]. See `decoder.Block` for the last arguments."""
        x_BTD = self.join(torch.cat([self.embed_norm(embedded_BTD), self.hidden_norm(x_BTD)], -1))
        y_BTD: Tensor = self.norm(self.block(x_BTD, None, rows_T, None, None, turns_TC2, *(documents or ())))
        return y_BTD
