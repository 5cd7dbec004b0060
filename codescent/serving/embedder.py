"""In: texts, or ids of tokens; an encoder such as BERT. Out: one vector for each, of length 1.
Does not train or fine-tune the vectors: they are means of the last layer's states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codescent.base.errors import UserError
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.models.bert.module import Bert

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass, with padding."""


class Embedder:
    """Gives vectors of texts: the mean of the last layer's states over the text's own tokens, scaled to length 1.

    That is mean pooling (Reimers and Gurevych 2019, "Sentence-BERT"), with [CLS] and [SEP] among the tokens as there.

    Attributes:
        seq_len: tokens of a text that the model reads at most, with [CLS] and [SEP].
        dim: numbers of a vector.
    """

    def __init__(self, module: Bert, tokenizer: WordPiece) -> None:
        """`module`: in evaluation mode, on its device."""
        module.ends = False  # states, not logits
        self._module, self._tokenizer = module, tokenizer
        self.seq_len, self.dim = module.shape.seq_len, module.shape.hidden_dim

    def ids(self, text: str | Sequence[int]) -> list[int]:
        """The ids of a text, from [CLS] to [SEP]. Ids that are given are taken as they are.

        Raises UserError: a text that is too long for the model, or an id outside of the vocabulary.
        """
        if isinstance(text, str):
            found = [self._tokenizer.begin, *self._tokenizer.encode(text).tolist(), self._tokenizer.end]
        else:
            found, most = list(text), self._tokenizer.vocab_size
            if wrong := next((one for one in found if not 0 <= one < most), None):
                raise UserError(f"the token {wrong}: ids are in [0, {most:,})")
        if len(found) > self.seq_len:
            raise UserError(f"{len(found):,} tokens are more than the {self.seq_len:,} that the model reads")
        return found

    def vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The vectors [N, D] of texts as ids, in fp32 on the CPU. Texts of like length are read together."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found_ND = torch.empty(len(texts), self.dim)
        while order:
            longest = len(texts[order[-1]])
            count = max(1, TOKENS_AT_ONCE // longest)
            part, order = order[-count:], order[:-count]
            found_ND[part] = self._pass([texts[number] for number in part]).float().cpu()
        return found_ND

    @torch.inference_mode()
    def _pass(self, texts: Sequence[Sequence[int]]) -> Tensor:
        device, longest = self._module.tok.weight.device, max(map(len, texts))
        lengths_B = torch.tensor([len(text) for text in texts], device=device)
        tokens_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
        states_BTD = self._module(tokens_BT, lengths_B=lengths_B)
        own_BT1 = (torch.arange(longest, device=device) < lengths_B[:, None])[..., None]
        means_BD = (states_BTD * own_BT1).sum(1) / lengths_B[:, None]
        return torch.nn.functional.normalize(means_BD, dim=-1)
