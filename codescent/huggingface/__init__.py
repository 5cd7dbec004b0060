"""In: a codescent model, or a Hugging Face folder. Out: the model in the other format, by one table per model kind.
Does not read runs or checkpoints (codescent/verbs/exchange.py does). Does not import `transformers`."""

from __future__ import annotations

from codescent.huggingface.bert import BERT
from codescent.huggingface.gpt2 import GPT2
from codescent.huggingface.kind import Kind
from codescent.huggingface.llama import LLAMA

KINDS: dict[str, Kind] = {kind.name: kind for kind in (GPT2, LLAMA, BERT)}
"""The table of each model kind, by its name in codescent. To add a kind, declare it in a file and list it here."""

__all__ = ["KINDS", "Kind"]
