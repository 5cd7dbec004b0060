"""In: a model's numbers of heads and channels, and the degree of tp. Out: what is wrong with them, and what would do.
Does not refuse a degree of tp (strategies do): it only suggests no number that tp cannot divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from codescent.base.nearest import divisors, nearest, nearest_multiples
from codescent.base.refusal import Change, Refusal, each


@dataclass(frozen=True)
class Heads:
    """The heads of attention.

    Attributes:
        queries: query heads (num_heads).
        keys: key-value heads (num_kv_heads); each serves the same number of query heads. None: as many as queries.
        width: channels of all query heads together (hidden_dim).
        multiple: the number of channels of a head must be a multiple of this.
        tp: parts into which tensor parallelism divides the heads.
        channels: of a head, if they are given (head_dim); None: width / queries.
    """

    queries: int
    keys: int | None
    width: int
    multiple: int
    tp: int
    channels: int | None = None

    def problems(self, where: str) -> Iterator[str]:
        """What is wrong for every tp, with what would do. `where`: the config section that messages name."""
        queries, keys, width, ways = self.queries, self.keys, self.width, self._ways(where)
        if self.channels is not None:
            if self.channels > 0 and self.channels % self.multiple:
                yield Refusal(
                    f"{where}.head_dim: {self.channels} channels of a head; rotary positions rotate pairs of channels: "
                    "the number of channels must be even",
                    each(f"{where}.head_dim", nearest_multiples(self.channels, self.multiple)),
                )
        elif width % queries:
            yield Refusal(f"{where}.num_heads: {queries} heads do not divide {where}.hidden_dim = {width}", ways)
        elif width // queries % self.multiple:
            yield Refusal(
                f"{where}.num_heads: {queries} heads of {width} channels ({where}.hidden_dim) have {width // queries} "
                "each; rotary positions rotate pairs of channels: the number of channels must be even",
                ways,
            )
        if keys is not None and queries % keys:
            yield Refusal(
                f"{where}.num_kv_heads: {keys} heads of keys and values cannot be shared equally by {queries} heads "
                f"({where}.num_heads)",
                ways,
            )

    def _fit(self) -> bool:
        channels, rest = divmod(self.width, self.queries) if self.channels is None else (self.multiple, 0)
        keys = self.queries if self.keys is None else self.keys
        divided = self.queries % self.tp == 0 and keys % self.tp == 0
        return not rest and channels % self.multiple == 0 and self.queries % keys == 0 and divided

    def _ways(self, where: str) -> list[Change]:
        """The nearest numbers with which all is right, if only one of the three changes."""
        some = divisors(self.width) if self.channels is None else nearest_multiples(self.queries, self.keys or 1)
        queries = nearest((n for n in some if replace(self, queries=n)._fit()), self.queries)
        keys = nearest((n for n in divisors(self.queries) if replace(self, keys=n)._fit()), self.keys or 0)
        widths = nearest_multiples(self.width, self.queries * self.multiple)
        ways = {
            "num_heads": queries,
            "num_kv_heads": [] if self.keys is None else keys,
            "hidden_dim": [n for n in widths if self.channels is None and replace(self, width=n)._fit()],
        }
        return [change for key, numbers in ways.items() for change in each(f"{where}.{key}", numbers)]
