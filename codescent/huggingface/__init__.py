"""In: models of ours, folders of Hugging Face's `transformers`. Out: each as the other, through one table per kind.
Does not know runs or checkpoints (codescent/verbs/exchange.py does), and never imports or runs `transformers`."""

from __future__ import annotations

from codescent.huggingface.bert import BERT
from codescent.huggingface.gpt2 import GPT2
from codescent.huggingface.kind import Kind
from codescent.huggingface.llama import LLAMA

KINDS: dict[str, Kind] = {kind.name: kind for kind in (GPT2, LLAMA, BERT)}
"""By the name of our kind. To add one, declare it in a file and list it here."""

__all__ = ["KINDS", "Kind"]
