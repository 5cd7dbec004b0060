"""In: a prepared text. Out: its samples with data.documents = "separate", in which no document sees another one.
Does not build samples (data/documents.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.documents import SeparateSource
from codescent.data.tokenizers.tokenizer import document_end
from codescent.tasks.text import TextDataset


@dataclass(frozen=True)
class SeparateDataset(TextDataset):
    """A prepared text whose documents are separate. Raises UserError: no token ends its documents."""

    def __post_init__(self) -> None:
        tokenizer = self.text.tokenizer
        if tokenizer is None or not document_end(tokenizer):
            raise UserError(
                f'data.documents = "separate": {self.path} has no token that ends a document: it is one document, or '
                'its tokenizer has no such token; take data.documents = "joined", or another data.tokenizer'
            )

    @cached_property
    def end(self) -> int:
        """The last token of each document."""
        tokenizer = self.text.tokenizer
        assert tokenizer is not None
        return document_end(tokenizer)[-1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens and of the token at which documents end."""
        return digest(["separate", self.end, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> SeparateSource:
        """See `AnyDataset`. `num_targets` is not used: all positions but the last one of a document have a target."""
        return SeparateSource(self.text.train if split == "train" else self.text.validation, seq_len, self.end)
