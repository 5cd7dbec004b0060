"""In: a kind's presets, and the sizes that a user gives. Out: a checked `Shape` (all sizes of a model), or UserError.
Does not name any kind of model and does not import torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar, Self, cast

from codescent.base.errors import UserError
from codescent.models.heads import Heads
from codescent.models.lora.declare import adapted, adapted_saved
from codescent.models.mup import KEYS as MUP_KEYS
from codescent.models.mup import SAME, Growth
from codescent.operators.saved_tensors import ForwardPass
from codescent.plan.activations import SavedTensor
from codescent.plan.model import Lora, Size, pairs_seen, windows_of
from codescent.plan.operators import LayerOperator
from codescent.plan.shard import Parameter, Role

WEIGHT_STD = 0.02
"""Deviation of initial weights (Radford et al. 2018, "GPT", section 4.1; initializer_range in Llama's config.json)."""


class Shape:
    """Sizes of a model, and facts about it that a plan needs. Each kind has a subclass, which is a frozen dataclass.

    Attributes:
        num_heads: query heads. Each of the num_kv_heads key-value heads serves the same number of query heads.
        hidden_dim: channels of the residual stream.
        ffn_dim: channels inside the feed-forward.
        seq_len: positions of the longest sample.
        dropout: probability while training.
        streams: lengths of the sequences of a sample, one after the other; empty: a sample is one sequence.
        encoder_layers: number of first layers that read only the first of several sequences.
        extras: whether layers at every depth read more of the sample than activations (such as lengths).
        head_share: share of the positions that the head reads, on average.
        ffn_matrices: number of matrices of a feed-forward.
        qk_norm: norms of queries and keys: "none", "head" (of each head) or "all" (over all heads).
        window: of how many positions a query of causal self-attention sees the keys, its own included; 0: of all.
        full_every: with a window: every so-many-th layer has none; 0: all have it.
        score_cap, logit_cap: soft caps of the scores of attention, and of the logits; 0: none.
        score_dim, value_dim: scores are divided by its square root; channels of a value; 0: head_dim.
        mtp_layers: modules behind the blocks, each of which predicts one more token in training.
        norm_offset: what norms add to their weights: initially these are 1 without it.
        cached: numbers of a token that a cache holds in each layer, if it holds no keys and values; 0: it does.
        mup_base_dim, mup_base_head_dim: hidden_dim (0: no mu-P) and head_dim (0: the same) of the base of mu-P.
        refuses: mesh axes that the model does not support, each with the reason; with tp > 1 also keys of [parallel].
        refuses_values: values of keys of [parallel] that it does not support, each with the reason as a clause.
        own_layers: whether the matrices of its blocks are in linear layers of codescent.
        needs_weights: why its initial values cannot be random; "": they can.
        num_experts: experts of a layer in place of one feed-forward; 0: no layer has any.
        undivided_axes: mesh axes along which the model has nothing to divide.
        uncompiled: why torch.compile does not compile its blocks, in words behind the kind; "": it may.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    bias: bool
    dropout: float
    streams: ClassVar[tuple[int, ...]] = ()
    encoder_layers: ClassVar[int] = 0
    extras: ClassVar[bool] = False
    head_share: ClassVar[float] = 1.0
    ffn_matrices: ClassVar[int] = 2
    qk_norm: str = "none"
    window: int = 0
    full_every: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    score_dim: int = 0
    value_dim: int = 0
    mtp_layers: int = 0
    cached: ClassVar[int] = 0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    num_experts: int = 0
    refuses: ClassVar[Mapping[str, str]] = {}
    refuses_values: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {}
    uncompiled: ClassVar[str] = ""
    norm_offset: ClassVar[float] = 0.0
    needs_weights: ClassVar[str] = ""
    own_layers: ClassVar[bool] = True
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> Self:
        """Build the shape from its fields: the inverse of `facts`."""
        return cls(**sizes)

    def facts(self) -> dict[str, Any]:
        """The fields as a plan has them, without those of mu-P if there is none; `of` builds the shape from them."""
        found = dataclasses.asdict(cast(Any, self))
        return {name: value for name, value in found.items() if value or name not in MUP_KEYS}

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_dim // self.num_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias

    @property
    def growth(self) -> Growth:
        """How many times as large it is as its base of mu-P."""
        if not self.mup_base_dim:
            return SAME
        return Growth(self.hidden_dim / self.mup_base_dim, self.head_dim / (self.mup_base_head_dim or self.head_dim))

    @property
    def base_dim(self) -> int:
        """hidden_dim of the base of mu-P, for initial values; without mu-P that of the model."""
        return self.mup_base_dim or self.hidden_dim

    @property
    def score_width(self) -> float:
        """Products of queries and keys are divided by its square root; 0: by that of head_dim.

        With mu-P the divisor grows with head_dim, not with its root (Yang et al. 2022, definition 4.1).
        """
        return self.score_dim if self.growth.head == 1.0 else (self.score_dim or self.head_dim) * self.growth.head

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: none."""
        return windows_of(self.num_layers, self.window, self.full_every)

    @property
    def causal_layers(self) -> int:
        """Number of layers whose self-attention is causal."""
        return self.num_layers

    @property
    def head_rows(self) -> int:
        """Rows of all matrices of the head together."""
        return self.vocab_size

    @property
    def undivided_axes(self) -> tuple[str, ...]:
        """See the class."""
        return () if self.num_experts else ("ep",)

    def expert_rows(self, positions: int) -> int:
        """Rows of all experts of a layer that has some, of a sample of so many positions."""
        return 0


class EqualHeads(Shape):
    """A shape with as many heads of keys and values as of queries."""

    @property
    def num_kv_heads(self) -> int:  # type: ignore[override]
        """Every head has its own keys and values."""
        return self.num_heads


def flops_of_blocks(shape: Shape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token, at each depth of a model whose blocks differ in their windows at most.

    A matrix costs 2 per element. The two products of attention cost 4 s h for s positions and h channels (Narayanan et
    al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", appendix). An embedding is a look-up: 0.
    """
    width, queries, keys = shape.hidden_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = 2.0 * width * (2 * queries + 2 * keys + shape.ffn_matrices * shape.ffn_dim)
    seen = (pairs_seen(seq_len, window) / seq_len for window in shape.windows)
    blocks = (products + 4.0 * keys_seen * queries for keys_seen in seen)
    return (0.0, *blocks, 2.0 * width * shape.head_rows * shape.head_share)


@dataclass(frozen=True)
class Kind:
    """A kind of model, as its `declare` module describes it.

    Attributes:
        name: name of the kind.
        shape: class of its sizes.
        module: name of the module's class in codescent.models.NAME.module.
        presets: sizes by the name of the preset.
        parameters: shape -> every parameter, in the order in which forward first reads it.
        derived: given sizes -> defaults of other sizes; a default is None if it depends on a size that is missing.
        saved: shape, forward pass of a micro-batch -> every tensor that forward keeps for backward.
        operators: shape, forward pass of a micro-batch -> every operator beside the products with matrices.
        forward_flops: shape, seq_len -> FLOPs of a forward pass per token at each depth: embedding, blocks, head.
        wrong: sizes, bias, dropout, config section -> error messages for values that only this kind refuses.
        words: options whose value is a word, with the allowed values; the first is the default.
        head_multiple: the number of channels of a head must be a multiple of this; 2 for rotary positions.
        options: which of the keys bias and dropout the user may set.
        generates: whether its models can generate text (see codescent/inference).
        encodes: whether its models read a text as a whole, so that their states describe it (embeddings).
        separates: whether its models keep the documents of a sample apart (see data/documents).
        uncompiled: why torch.compile is not verified for this kind; "": it is verified.
        parts: fields of the shape that are no sizes themselves: the sizes that users give for each of them instead.
    """

    name: str
    shape: type[Shape]
    module: str
    presets: Mapping[str, Mapping[str, Any]]
    parameters: Callable[[Any], Iterator[Parameter]]
    derived: Callable[[Mapping[str, Any]], Mapping[str, int | None]]
    saved: Callable[[Any, ForwardPass], Iterator[SavedTensor]]
    operators: Callable[[Any, ForwardPass], Iterator[LayerOperator]]
    forward_flops: Callable[[Any, int], tuple[float, ...]] = flops_of_blocks
    wrong: Callable[[Mapping[str, Any], bool | None, float, str], Iterator[str]] = lambda *_: iter(())
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_multiple: int = 1
    options: tuple[str, ...] = ("bias", "dropout")
    generates: bool = False
    encodes: bool = False
    separates: bool = False
    uncompiled: str = ""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes that a user may give."""
        names = (size.name for size in dataclasses.fields(self.shape) if size.name not in ("bias", "dropout"))
        return tuple(one for name in names for one in self.parts.get(name, (name,)))

    def kept(self, shape: Any, forward: ForwardPass, lora: Lora | None) -> Iterator[SavedTensor]:
        """What forward keeps for backward, with adapters."""
        found = self.saved(shape, forward)
        return found if lora is None else adapted_saved(found, adapted(tuple(self.parameters(shape)), lora), lora)

    def resolve(
        self,
        sizes: Mapping[str, Size | None],
        preset: str | None,
        bias: bool | None,
        dropout: float,
        where: str,
        tp: int = 1,
    ) -> Shape:
        """Check the sizes and fill in the missing ones. See `models.shape_of`."""
        problems = [
            f"{where}.{name}: {self.name} has no such size; its sizes are {', '.join(self.sizes)}"
            for name, size in sizes.items()
            if name not in self.sizes and size is not None
        ]
        if preset is not None and preset not in self.presets:
            near = difflib.get_close_matches(preset, self.presets, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            unknown = f"{where}.preset: there is no preset {preset!r} of {self.name}{hint}"
            raise UserError(*problems, f"{unknown} Presets: {', '.join(self.presets)}")
        full = dict(self.presets[preset]) if preset is not None else {}
        full |= {name: size for name, size in sizes.items() if size is not None and name in self.sizes}
        keys, channels = full.get("num_kv_heads"), full.get("head_dim")
        derived = self.derived(full)
        full |= {name: size for name, size in derived.items() if size is not None and name not in full}
        needed = [size.name for size in dataclasses.fields(self.shape) if size.default is MISSING]
        if missing := [f"{where}.{name}" for name in needed if name not in full and name not in derived]:
            presets = f"{where}.preset (one of {', '.join(self.presets)})"
            problems.append(
                f"{', '.join(missing)}: not given; give {'it' if len(missing) == 1 else 'them'}, or {presets}"
            )
        problems += _wrong_sizes(full, dropout if "dropout" in self.options else 0.0, where)
        heads, width = full.get("num_heads", 0), full.get("hidden_dim", 0)
        if heads > 0 and width > 0 and (keys is None or keys > 0):
            problems += Heads(heads, keys, width, self.head_multiple, tp, channels).problems(where)
        problems += [
            f"{where}.{name}: {full[name]!r} is none of {', '.join(words)}"
            for name, words in self.words.items()
            if full.get(name, words[0]) not in words
        ]
        problems += self.wrong(full, bias, dropout, where)
        if problems:
            raise UserError(*problems)
        options = {"bias": bias is not False, "dropout": dropout}
        return self.shape.of(full | {name: options[name] for name in self.options})


def _wrong_sizes(full: Mapping[str, Any], dropout: float, where: str) -> Iterator[str]:
    """Error messages for sizes that every kind refuses."""
    for name, size in full.items():
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            yield f"{where}.{name}: {size} is not a size; it must be at least 1"
    if not 0.0 <= dropout < 1.0:
        yield f"{where}.dropout: {dropout} is not a probability in [0, 1)"


def wide_ffn(full: Mapping[str, Any]) -> dict[str, int | None]:
    """Default size: ffn_dim = 4 * hidden_dim."""
    return {"ffn_dim": 4 * full["hidden_dim"] if "hidden_dim" in full else None}


def linear(
    name: str,
    inputs: int,
    outputs: int,
    role: Role,
    std: float,
    bias: bool,
    depth: int,
    stream: int | None = None,
    alternating: tuple[int, ...] = (),
) -> Iterator[Parameter]:
    """The parameters of a linear layer; the matrix is [outputs, inputs], as in torch.nn.Linear.

    `std` is that of the base of mu-P; see `mup.scaled`.
    """
    where: dict[str, Any] = {"depths": (depth,), "stream": stream}
    yield Parameter(f"{name}.weight", (outputs, inputs), role, std, alternating=alternating, **where)
    if bias:
        bias_role = Role.BIAS_COLUMN if role is Role.COLUMN else Role.BIAS_ROW
        yield Parameter(f"{name}.bias", (outputs,), bias_role, fixed=role is Role.LOGITS, **where)


def norm(
    name: str, width: int, bias: bool, depth: int, stream: int | None = None, mean: float = 1.0
) -> Iterator[Parameter]:
    """The parameters of a norm. Initially its weight is `mean` and its bias is 0."""
    yield Parameter(f"{name}.weight", (width,), Role.NORM, mean=mean, depths=(depth,), stream=stream)
    if bias:
        yield Parameter(f"{name}.bias", (width,), Role.NORM, depths=(depth,), stream=stream)


def attention(
    name: str, shape: Shape, std: float, out_std: float, depth: int, stream: int | None = None
) -> Iterator[Parameter]:
    """The parameters of self-attention (see `operators.attention`)."""
    width, queries, keys = shape.hidden_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    group = (queries // shape.num_kv_heads, shape.head_dim, shape.head_dim)  # rows of its queries, its key, its value
    yield from linear(f"{name}.qkv", width, queries + 2 * keys, Role.COLUMN, std, shape.qkv_bias, depth, stream, group)
    over_all = shape.qk_norm == "all"
    for scale, channels in (("q_norm", queries), ("k_norm", keys)) if shape.qk_norm != "none" else ():
        size, role = (channels, Role.COLUMN_NORM) if over_all else (shape.head_dim, Role.HEAD_NORM)
        mean = 1.0 - shape.norm_offset
        yield Parameter(f"{name}.{scale}.weight", (size,), role, mean=mean, depths=(depth,), stream=stream)
    yield from linear(f"{name}.out", queries, width, Role.ROW, out_std, shape.bias, depth, stream)


def feed_forward(
    name: str, shape: Shape, std: float, out_std: float, depth: int, stream: int | None = None
) -> Iterator[Parameter]:
    """The parameters of a feed-forward with two matrices."""
    width, ffn = shape.hidden_dim, shape.ffn_dim
    yield from linear(f"{name}.up", width, ffn, Role.COLUMN, std, shape.bias, depth, stream)
    yield from linear(f"{name}.down", ffn, width, Role.ROW, out_std, shape.bias, depth, stream)
