"""In: open datasets of several corpora, with weights. Out: one dataset, whose samples are those of all corpora.
Does not prepare or open a corpus (tasks/mixture.py does), and does not choose samples (mixed_order.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codescent.base.counted import counted
from codescent.base.sealed import digest
from codescent.data.mixed_order import MixedOrder
from codescent.data.order import RepeatedOrder, Sampler, StepOrder
from codescent.data.samples import AnyDataset, Numbers, PaddedSource, PromptSource, Samples, Source, in_range

DIGITS = 9
"""Weights of sizes have so many: another library of mathematics may round the last ones otherwise."""


class MixedSource:
    """The samples of a split of all corpora, one corpus after the other; see `Source`.

    Attributes:
        corpora: the samples of each corpus, by name.
        shares: of each corpus in training; they sum to 1.
    """

    def __init__(self, name: str, corpora: Mapping[str, Source], shares: Sequence[Fraction]) -> None:
        self.name, self.corpora, self.shares = name, corpora, tuple(shares)
        self._sources = list(corpora.values())
        self._ends = np.cumsum([source.num_samples for source in self._sources])
        self.num_samples = int(self._ends[-1])
        each = {source.losses_per_sample for source in self._sources}
        self.losses_per_sample: int | None = each.pop() if len(each) == 1 else None

    def order(self, seed: int, global_batch_size: int) -> MixedOrder:
        """The order in which training takes the samples."""
        sizes = [source.num_samples for source in self._sources]
        return MixedOrder(seed, list(self.corpora), sizes, self.shares, global_batch_size)

    def read(self, numbers: Numbers) -> Samples:
        """See `Source`."""
        pieces = [(rows, self._sources[corpus].read(inside)) for corpus, rows, inside in self._divided(numbers)]
        count, (_, first) = len(numbers), pieces[0]

        def joined(of: str, name: str = "") -> Any:
            parts = [(rows, getattr(piece, of)) for rows, piece in pieces]
            arrays = [(rows, part[name] if name else part) for rows, part in parts]
            widest = max((array for _, array in arrays), key=lambda array: array.shape[1:])
            out = np.empty((count, *widest.shape[1:]), widest.dtype)
            for rows, array in arrays:  # a corpus with fewer documents in a sample ends more of them at the last place
                out[rows] = array if array.shape[1:] == widest.shape[1:] else _widened(array, widest.shape[1])
            return out

        extras = {name: joined("extras", name) for name in first.extras}
        wrong = {int(rows[row]): what for rows, piece in pieces for row, what in piece.not_finite.items()}
        return Samples(joined("inputs"), joined("targets"), extras, wrong)

    def losses(self, numbers: Numbers) -> Numbers:
        """See `Source`."""
        out = np.empty(len(numbers), np.int64)
        for corpus, rows, inside in self._divided(numbers):
            out[rows] = self._sources[corpus].losses(inside)
        return out

    def mean(self, losses: Mapping[str, float], most_samples: int | None) -> float:
        """The mean loss of all corpora: what training minimises, of samples that it has not seen.

        Args:
            losses: the mean loss of each corpus, of its first `most_samples` samples; None: of all.
        """
        weights = {
            name: float(share) * _losses_per_sample(source, most_samples)
            for (name, source), share in zip(self.corpora.items(), self.shares, strict=True)
            if name in losses
        }
        return sum(weight * losses[name] for name, weight in weights.items()) / sum(weights.values())

    def _divided(self, numbers: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """Of each corpus with some of the samples: its index, their rows in `numbers`, their numbers in the corpus."""
        numbers = in_range(numbers, self.num_samples, self.name)
        corpora = np.searchsorted(self._ends, numbers, side="right")
        return [
            (corpus, rows, numbers[rows] - (self._ends[corpus] - self._sources[corpus].num_samples))
            for corpus in (np.unique(corpora).tolist() or [0])
            for rows in [np.flatnonzero(corpora == corpus)]
        ]


class PaddedMixture(MixedSource):
    """The same, of corpora whose samples have padding; see `PaddedSource`."""

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`."""
        out = np.zeros(len(numbers), np.int64)
        for corpus, rows, inside in self._divided(numbers):
            source = self._sources[corpus]
            if isinstance(source, PaddedSource):
                out[rows] = source.padding(inside)
        return out


def _widened(array: Numbers, width: int) -> Numbers:
    """[n, M] with its last column again, up to `width` columns."""
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), mode="edge")


@dataclass(frozen=True)
class MixedDataset:
    """Open datasets of several corpora, of one tokenizer; see `AnyDataset`.

    Attributes:
        path: the folder of prepared corpora.
        corpora: the dataset of each corpus, by name.
        weights: of each corpus, by name; empty: they follow from the sizes.
        temperature: weights of sizes are the number of training samples, to the power of 1 / temperature.
    """

    path: Path
    corpora: Mapping[str, AnyDataset]
    weights: Mapping[str, float]
    temperature: float = 1.0
    earlier: None = None
    _shares: dict[tuple[int, int], list[Fraction]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def vocab_size(self) -> int | None:
        """See `AnyDataset`."""
        return next(iter(self.corpora.values())).vocab_size

    @property
    def description(self) -> dict[str, Any]:
        """The description of each corpus."""
        return {"corpora": {name: corpus.description for name, corpus in self.corpora.items()}}

    @property
    def fingerprint(self) -> str:
        """See `AnyDataset`. Names and weights are in the plan."""
        return digest(["mixture", *(corpus.fingerprint for corpus in self.corpora.values())])

    @property
    def tokenizer_text(self) -> str | None:
        """See `AnyDataset`."""
        return next(filter(None, (corpus.tokenizer_text for corpus in self.corpora.values())), None)

    def source(self, split: str, seq_len: int, num_targets: int) -> MixedSource:
        """See `AnyDataset`."""
        found = {name: corpus.source(split, seq_len, num_targets) for name, corpus in self.corpora.items()}
        if (seq_len, num_targets) not in self._shares:
            train = found.values() if split == "train" else self._train(seq_len, num_targets)
            self._shares[seq_len, num_targets] = self._shares_of([source.num_samples for source in train])
        mixed = PaddedMixture if any(isinstance(one, PaddedSource) for one in found.values()) else MixedSource
        return mixed(split, found, self._shares[seq_len, num_targets])

    def _train(self, seq_len: int, num_targets: int) -> list[Source]:
        """The training samples of each corpus; nothing is read if their sizes decide nothing."""
        if self.weights:
            return []
        return [corpus.source("train", seq_len, num_targets) for corpus in self.corpora.values()]

    def _shares_of(self, sizes: Sequence[int]) -> list[Fraction]:
        """The share of each corpus; equal shares where all corpora are empty, which is refused elsewhere."""
        if self.weights:
            exact = [Fraction(str(self.weights[name])) for name in self.corpora]
        else:
            exact = [Fraction(f"{size ** (1 / self.temperature):.{DIGITS}g}") for size in sizes]
        total = sum(exact)
        return [one / total for one in exact] if total else [Fraction(1, len(exact))] * len(exact)


class CorpusUse(NamedTuple):
    """What a run takes of a corpus: its share of all samples, its training samples, and its epochs by the end."""

    name: str
    share: float
    num_samples: int
    epochs: float

    def in_words(self) -> str:
        """The same in words."""
        return (
            f"{self.name}: {self.share:.1%} of the samples, {self.epochs:.3g} epochs of "
            f"{counted(self.num_samples, 'sample')}"
        )


def uses(source: Source, global_batch_size: int, num_steps: int) -> list[CorpusUse]:
    """What a run of so many steps takes of each corpus of a mixture; of other data nothing."""
    if not isinstance(source, MixedSource):
        return []
    taken = source.order(0, global_batch_size).taken(num_steps)
    return [
        CorpusUse(name, float(share), corpus.num_samples, count / max(1, corpus.num_samples))
        for (name, corpus), share, count in zip(source.corpora.items(), source.shares, taken, strict=True)
    ]


def order_of(source: Source, seed: int, global_batch_size: int) -> StepOrder:
    """The order in which training takes the samples of a source. Raises UserError: see `Sampler`."""
    if isinstance(source, MixedSource):
        return source.order(seed, global_batch_size)
    order = Sampler(seed, source.num_samples, global_batch_size)
    times = source.times if isinstance(source, PromptSource) else 1
    return order if times == 1 else RepeatedOrder(order, times)


def corpora_of(source: Source) -> Mapping[str, Source]:
    """The samples of each corpus of a mixture that has some; of other data nothing."""
    corpora = source.corpora if isinstance(source, MixedSource) else {}
    return {name: corpus for name, corpus in corpora.items() if corpus.num_samples}


def without_samples(source: Source) -> list[str]:
    """The names of the corpora of a mixture that have no sample; of other data "", if it has none."""
    corpora = source.corpora if isinstance(source, MixedSource) else {"": source}
    return [name for name, corpus in corpora.items() if corpus.num_samples < 1]


def datasets_of(dataset: AnyDataset) -> list[AnyDataset]:
    """The datasets of the corpora of a mixture; else the dataset itself."""
    return list(dataset.corpora.values()) if isinstance(dataset, MixedDataset) else [dataset]


def _losses_per_sample(source: Source, most_samples: int | None) -> float:
    """The mean number of losses of the first samples of a source."""
    if source.losses_per_sample is not None:
        return float(source.losses_per_sample)
    count = min(source.num_samples, most_samples or source.num_samples)
    return float(source.losses(np.arange(count)).mean())
