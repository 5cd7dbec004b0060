"""In: a text of BERT's tokens. Out: the task "mlm": the tokens that are masked are wanted.
Does not make samples: source.py does."""

from __future__ import annotations

from pathlib import Path

from codescent.data.text.dataset import open_dataset
from codescent.tasks.masked_tokens.source import MaskedDataset
from codescent.tasks.task import Ask, refuse_no_wordpiece
from codescent.tasks.text import TextTask


class MaskedTokens(TextTask):
    """Predict masked tokens (Devlin et al. 2018, section 3.1)."""

    name = head = "mlm"
    kinds = ("bert",)
    unit = "masked tokens"

    def vocab_size(self, ask: Ask) -> int | None:
        """See `Task`."""
        refuse_no_wordpiece(self, ask.data)
        return super().vocab_size(ask)

    def open(self, ask: Ask, path: Path) -> MaskedDataset:
        """See `Task`."""
        return MaskedDataset(open_dataset(path), ask.seed)
