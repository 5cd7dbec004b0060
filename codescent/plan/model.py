"""In: nothing. Out: the dataclass ModelFacts: kind, sizes, LoRA adapters and FLOPs of the model of a run.
Does not compute these values and does not build a module (models does both)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from codescent.plan.brief import brief

T = TypeVar("T")
Size = int | float | bool | str
"""A size or an option of a model in the config."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters A [rank, I] and B [O, rank] of frozen matrices W [O, I].

    The output is W x + scale B A x (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1).

    Attributes:
        targets: layers of every block that have an adapter, such as "attn.qkv".
        whole: layers whose own parameters are trained.
        rslora: the scale is alpha / sqrt(rank) (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for
            Fine-Tuning with LoRA", theorem 3.2).
        quantize: the number format of the frozen matrices of blocks, "nf4" (Dettmers et al. 2023, "QLoRA"); "": that of
            the run.
        start: folder of `peft` with the adapters with which the run begins; None: they are new.
        dora: rows of the adapted matrix have trained lengths (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank
            Adaptation", equation 5).
        dropout: probability of dropout of what an adapter reads, in training.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    rslora: bool = brief(False)
    dropout: float = brief(0.0)
    dora: bool = brief(False)
    start: str | None = brief(None)
    quantize: str = brief("")

    @property
    def scale(self) -> float:
        """Factor of the adapter's output: alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences longer than in pre-training. operators/frequencies.py has formulas.

    Attributes:
        factor: how much longer the sequences are; frequencies are divided by it.
        low_freq_factor, high_freq_factor: llama3: the ends of the gradual change, in waves in `original_seq_len`.
        original_seq_len: tokens of the longest sequence before the scaling.
        method: "linear", "llama3", "yarn" or "longrope".
        beta_fast, beta_slow: yarn: the ends of the gradual change, in waves in `original_seq_len`.
        truncate: yarn: whether these ends are rounded to whole pairs of channels.
        attention_factor: yarn, longrope: factor on queries and keys; None: by the formula of the method.
        mscale_all_dim: yarn: scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2 (DeepSeek); None: by 1.
        short_factors, long_factors: longrope: what divides the frequency of each pair of channels, in models of up to
            `original_seq_len` positions and of more.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192
    method: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, with every size resolved.

    Attributes:
        forward_flops: FLOPs of a forward pass per token at each depth: embedding, blocks, head.
        encoder_layers: the first layers, which read only the first sequence of a sample.
        causal_layers: layers whose self-attention is causal: the last of all. Plans of earlier versions say 0.
        head_chunk_tokens: number of tokens whose logits are in memory at the same time; 0: all.
        sizes: all fields of the shape class of this kind of model. `models.shape_of_facts` rebuilds the shape.
        lora: the adapters; None: every parameter is trained.
        weights: folder of the initial weights; None: weights are initialised at random.
        adapters: folder of adapters of `peft` that are merged into these weights; None: there are none.
        window: of how many positions a query sees the keys; 0: of all.
        full_every: with a window: every so-many-th layer has none; 0: all have it.
        score_cap: soft cap of the scores of attention; 0: none.
        logit_cap: soft cap of the logits; 0: none.
        num_experts: experts of a layer that has some; 0: none has.
        expert_rows: rows of all experts of such a layer, of one sample.
        value_dim: channels of a value; 0: head_dim.
        mtp_layers: modules that predict more tokens; each looks its tokens up, and reads the head.
        cached: numbers of a token that a cache holds in each layer; 0: keys and values of all key-value heads.
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
    causal_layers: int = 0
    head_chunk_tokens: int = 0
    sizes: Mapping[str, Size | Mapping[str, Size | tuple[float, ...]]] = field(default_factory=dict)
    lora: Lora | None = None
    weights: str | None = None
    window: int = brief(0)
    full_every: int = brief(0)
    score_cap: float = brief(0.0)
    logit_cap: float = brief(0.0)
    num_experts: int = brief(0)
    expert_rows: int = brief(0)
    adapters: str | None = brief(None)
    value_dim: int = brief(0)
    mtp_layers: int = brief(0)
    cached: int = brief(0)

    @property
    def values(self) -> int:
        """Channels of the values of all heads, which the output of attention has."""
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the initial weights: their own, that of adapters which are merged, that of trained ones."""
        start = None if self.lora is None else self.lora.start
        return tuple(folder for folder in (self.weights, self.adapters, start) if folder is not None)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: none."""
        return windows_of(self.num_layers, self.window, self.full_every)


def windows_of(layers: int, window: int, full_every: int) -> tuple[int, ...]:
    """The window of each of some layers; 0: none. See `ModelFacts.full_every`."""
    return tuple(0 if full_every and layer % full_every == 0 else window for layer in range(1, layers + 1))


def runs_of(traits: Sequence[T]) -> Iterator[tuple[tuple[int, int], T]]:
    """Depths [first, end) of layers with the same trait that follow each other, such as a window, and this trait."""
    depth = 1
    for trait, alike in groupby(traits):
        count = len(list(alike))
        yield (depth, depth + count), trait
        depth += count


def pairs_seen(positions: int, window: int) -> int:
    """Pairs of a query and a key of one head that count as attention: all of a sample, or those inside of a window.

    Without a window they are counted as if no mask hid later keys (Chowdhery et al. 2022, "PaLM", appendix B). With one
    a query sees `window` keys, fewer at the beginning. A window of all positions is none.
    """
    if not 0 < window < positions:
        return positions**2
    return window * (window + 1) // 2 + (positions - window) * window
