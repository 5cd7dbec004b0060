"""In: the presets of a kind of model, a preset's name, free sizes. Out: all of its sizes, or what is wrong, in words.
Does not know any kind of model and does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from codescent.base.errors import UserError
from codescent.plan.shard import Parameter, Role

WEIGHT_STD = 0.02
"""Deviation of initial weights (Radford et al. 2018, "GPT", section 4.1; initializer_range in Llama's config.json)."""

Size = int | float | bool | str


class Shape(Protocol):
    """Sizes that every decoder has."""

    @property
    def num_layers(self) -> int:
        """Blocks."""

    @property
    def num_heads(self) -> int:
        """Heads of queries."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values; each is read by num_heads / num_kv_heads heads of queries."""

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""

    @property
    def hidden_dim(self) -> int:
        """Channels of the residual stream."""

    @property
    def ffn_dim(self) -> int:
        """Channels inside the feed-forward."""

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary matrix."""

    @property
    def seq_len(self) -> int:
        """Longest sequence in tokens."""

    @property
    def bias(self) -> bool:
        """Whether linear layers have a bias."""

    @property
    def dropout(self) -> float:
        """Share of activations dropped while training."""


class EqualHeads:
    """Of shapes whose queries, keys and values have as many heads, of hidden_dim channels together."""

    num_heads: int
    hidden_dim: int

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Every head has its own keys and values."""
        return self.num_heads


def fill(
    kind: str,
    sizes: Mapping[str, Size | None],
    preset: str | None,
    presets: Mapping[str, Mapping[str, Any]],
    names: Collection[str],
    where: str,
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of a preset with those that are given in their place, and what is wrong with them.

    Args:
        kind: of model, for the messages.
        sizes: None or absent means the preset's.
        preset: a key of `presets`; None: none.
        presets: of this kind.
        names: of the sizes that this kind has.
        where: how the user wrote these keys, for the messages.

    Raises:
        UserError: there is no such preset.
    """
    problems = [
        f"{where}.{name}: {kind} has no such size; its sizes are {', '.join(names)}"
        for name, size in sizes.items()
        if name not in names and size is not None
    ]
    if preset is not None and preset not in presets:
        near = difflib.get_close_matches(preset, presets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            *problems, f"{where}.preset: there is no preset {preset!r} of {kind}{hint} Presets: {', '.join(presets)}"
        )
    full: dict[str, Any] = dict(presets[preset]) if preset is not None else {}
    full.update({name: size for name, size in sizes.items() if size is not None and name in names})
    return full, problems


def wrong_sizes(
    full: Mapping[str, Any], needed: Collection[str], presets: Collection[str], dropout: float, where: str
) -> Iterator[str]:
    """What is missing or impossible in any decoder."""
    missing = [name for name in needed if name not in full]
    if missing:
        keys = ", ".join(f"{where}.{name}" for name in missing)
        yield f"{keys}: not given; give them, or {where}.preset (one of {', '.join(presets)})"
    for name, size in full.items():
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            yield f"{where}.{name}: {size} is not a size; it must be at least 1"
    if not 0.0 <= dropout < 1.0:
        yield f"{where}.dropout: {dropout} is not a probability in [0, 1)"
    heads, width = full.get("num_heads", 0), full.get("hidden_dim", 0)
    if heads > 0 and width > 0 and width % heads:
        yield f"{where}.num_heads: {_indivisible(heads, width, where)}"


def near_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` next below and next above `wanted`, in words."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = max((divisor for divisor in divisors if divisor < wanted), default=1)
    above = min((divisor for divisor in divisors if divisor > wanted), default=below)
    return " or ".join(str(divisor) for divisor in sorted({below, above}))


def _indivisible(heads: int, width: int, where: str) -> str:
    near_widths = " or ".join(str(number) for number in (width // heads * heads, -(-width // heads) * heads) if number)
    return (
        f"{heads} heads do not divide {where}.hidden_dim = {width}; nearest: num_heads = {near_divisors(width, heads)} "
        f"for this width, hidden_dim = {near_widths} for these heads"
    )


def linear(name: str, inputs: int, outputs: int, role: Role, std: float, bias: bool, depth: int) -> Iterator[Parameter]:
    """The parameters of a linear layer, [outputs, inputs] as torch.nn.Linear has them."""
    yield Parameter(f"{name}.weight", (outputs, inputs), role, std, depths=(depth,))
    if bias:
        bias_role = Role.BIAS_COLUMN if role is Role.COLUMN else Role.BIAS_ROW
        yield Parameter(f"{name}.bias", (outputs,), bias_role, depths=(depth,))


def norm(name: str, width: int, bias: bool, depth: int) -> Iterator[Parameter]:
    """The parameters of a norm."""
    yield Parameter(f"{name}.weight", (width,), Role.NORM, mean=1.0, depths=(depth,))
    if bias:
        yield Parameter(f"{name}.bias", (width,), Role.NORM, depths=(depth,))
