"""In: a tokenizer, a prompt. Out: the tokens that a trained model continues, and the token that ends a text.
Does not generate tokens (models/generate.py does)."""

from __future__ import annotations

from typing import cast

from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import Tokenizer


class Prompts:
    """Prompts that a model continues as they are.

    Attributes:
        stop: the token that ends a text; None: none does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop = tokenizer.separator

    def encode(self, prompt: str) -> tuple[str, list[int]]:
        """A prompt as it is shown, and its tokens; an empty one begins a document.

        Raises:
            UserError: it cannot be encoded.
        """
        return prompt, self._tokenizer.encode(prompt).tolist() if prompt else self._beginning()

    def _beginning(self) -> list[int]:
        """What a document begins after: the separator, or a line's end where there is none."""
        if self._tokenizer.separator is not None:
            return [self._tokenizer.separator]
        try:
            return cast(list[int], self._tokenizer.encode("\n").tolist()) or [0]
        except UserError:  # an alphabet without line ends
            return [0]
