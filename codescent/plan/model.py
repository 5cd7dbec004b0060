"""In: nothing. Out: the noun for the model of a run: its kind, its sizes, its adapters, and what follows from them.
Does not know any kind of model: `models` makes these facts, and builds modules from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Size = int | float | bool | str
"""A size, or an option, of a model as a config gives it."""


@dataclass(frozen=True)
class Lora:
    """Adapters A [rank, I] and B [O, rank] of matrices W [O, I], which are not trained: W x + alpha / rank B A x (Hu et
    al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1).

    `targets` are the layers, of every block, that have one, as "attn.qkv"; `whole` are layers that are trained whole.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    whole: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor on the product of an adapter."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for sequences longer than those of pre-training, as in Llama 3.1.

    Those of waves longer than original_seq_len / low_freq_factor are divided by `factor`; those of waves shorter than
    original_seq_len / high_freq_factor stay; between the two the change is gradual (meta-llama/llama-models,
    models/llama3/model.py, apply_scaling).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, resolved.

    `sizes` are the fields of the shape that the kind of model declares: `models.shape_of_facts` gives that shape back.
    `forward_flops` are those of a forward pass per token at each depth: embedding, blocks, head. The first
    `encoder_layers` layers read only the first sequence of a sample. The head makes logits of `head_chunk_tokens`
    tokens at a time; 0: of all. `lora`: its adapters; None: every parameter is trained. `weights`: the folder whose
    weights training begins with; None: they are drawn.
    """

    kind: str
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    forward_flops: tuple[float, ...] = ()
    dropout: float = 0.0
    encoder_layers: int = 0
    head_chunk_tokens: int = 0
    sizes: Mapping[str, Size] = field(default_factory=dict)
    lora: Lora | None = None
    weights: str | None = None
