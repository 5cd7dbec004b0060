"""In: prepared answers, a length. Out: samples that hold all answers to compare, each a document; read by number.
Does not tokenise (encode.py does) and does not compute a loss (operators/preferences.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from codescent.base.counted import counted
from codescent.base.sealed import digest
from codescent.data.documents import extras_of
from codescent.data.file_array import FileArray
from codescent.data.prepared import SPLITS, Description, Fields, Splits
from codescent.data.samples import NO_TARGET, Numbers, References, Samples, in_range
from codescent.plan.objective import CHOSEN, PROMPT
from codescent.tasks.conversations.dataset import ResponseDataset, counts_in_words
from codescent.tasks.preferences.encode import ARRAYS, PAIRED

NO_SPAN = -1
"""The span of a position whose target is compared with nothing."""


class _PreferenceSplit(Fields):
    samples: int
    answers: int
    tokens: int


class _PreferencesDescription(Description):
    format: Literal["codescent preferences 1"]
    splits: Splits[_PreferenceSplit]
    unused: dict[str, int] = Field(default_factory=dict)


class PreferenceSource:
    """The samples of a split. A sample has the documents of its answers, one behind the other, and then padding.

    Each document is a prompt with an answer. It is as if it were alone: positions begin again, no token sees another
    document. If a sample is longer than `seq_len`, its longest documents are cut to one length.

    Args:
        tokens: the tokens of all documents.
        begins: [documents + 1], positions in `tokens` where each document begins, and where the last one ends.
        wanted: [pieces, 2], positions [begin, end) in `tokens` of the pieces of answers, in order.
        lines: [documents], the line of each document in its file, from 1.
        labels: [documents], 1 if the answer is wanted.
        documents: of a sample.
        key: identifies the samples.

    Attributes:
        references: float64 [num_samples, K]: what the model with its initial weights computes of each sample (see
            `data.samples.References`); None: it is not known.
    """

    def __init__(
        self,
        name: str,
        tokens: npt.NDArray[Any] | FileArray,
        begins: Numbers,
        wanted: Numbers,
        lines: Numbers,
        labels: Numbers,
        seq_len: int,
        documents: int,
        key: str,
    ) -> None:
        self.name, self.key, self._tokens, self._wanted, self._seq_len = name, key, tokens, wanted, seq_len
        self._pieces = np.searchsorted(wanted[:, 0], begins)  # number of the first piece of each document
        self._begins, self._lines = begins, lines.reshape(-1, documents)
        lengths = (begins[1:] - begins[:-1] - 1).reshape(-1, documents)  # positions: the last token is a target only
        self._lengths = cut_to(lengths, seq_len)
        self.num_samples, self.documents = lengths.shape
        self.answers = 0 if documents == PAIRED else documents // 2
        self.losses_per_sample: int | None = max(1, self.answers)
        self._labels = labels.reshape(-1, documents)[:, : self.answers].astype(np.int64)
        self.references: npt.NDArray[np.float64] | None = None

    def without_room(self) -> Iterator[tuple[int, int]]:
        """Samples of which no token of some answer is inside the sample: the line, and the positions that it needs."""
        first = self._wanted[np.minimum(self._pieces[:-1], len(self._wanted) - 1), 0] - self._begins[:-1]
        lacks = first.reshape(-1, self.documents) > self._lengths  # the target of the last position is token `length`
        for sample, document in np.argwhere(lacks).tolist():
            whole = int(first.reshape(-1, self.documents)[sample].sum())
            yield int(self._lines[sample, document]), whole

    @property
    def cut(self) -> tuple[int, int, int]:
        """How many documents are cut at their ends, how many there are, and the positions of the longest sample."""
        whole = (self._begins[1:] - self._begins[:-1] - 1).reshape(self._lengths.shape)
        return int((whole > self._lengths).sum()), whole.size, int(whole.sum(1).max(initial=0))

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len]; the extras of `extras_of`, and those of `operators.preferences`.

        Every token of a chosen answer and of its prompt is a target, and every token of the other answers. Padding is
        token 0. Raises IndexError: no such sample; UserError: the file has changed.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets, spans = np.full_like(inputs, NO_TARGET), np.full_like(inputs, NO_SPAN)
        is_last = np.zeros(inputs.shape, np.bool_)
        for row, number in enumerate(numbers.tolist()):
            start = 0
            for document, length in enumerate(self._lengths[number].tolist()):
                at = row, slice(start, start + length)
                self._write(number * self.documents + document, document, inputs[at], targets[at], spans[at])
                start += length
                is_last[row, start - 1] = True
        extras: dict[str, npt.NDArray[Any]] = {**extras_of(is_last), "spans_BT": spans}
        if self.references is not None:
            extras["references_BK"] = self.references[numbers]
        if self.answers:
            extras["wanted_BA"] = self._labels[numbers]
        return Samples(inputs, targets, extras)

    def _write(self, number: int, document: int, inputs_T: Numbers, targets_T: Numbers, spans_T: Numbers) -> None:
        """Write a document of the split, which is the so-manieth of its sample, into arrays of its length."""
        begin = int(self._begins[number])
        tokens = self._tokens[begin : begin + len(inputs_T) + 1]
        inputs_T[:] = tokens[:-1]
        if document == CHOSEN and not self.answers:
            targets_T[:], spans_T[:] = tokens[1:], PROMPT
        first, stop = self._pieces[number], self._pieces[number + 1]
        for start, end in (self._wanted[first:stop] - begin).tolist():
            targets_T[start - 1 : end - 1] = tokens[start:end]  # both slices end where the document does
            spans_T[start - 1 : end - 1] = document

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of losses in each sample: of a pair one, else one of each answer."""
        return np.full(len(numbers), self.losses_per_sample, np.int64)

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`."""
        return np.asarray(self._seq_len - self._lengths[numbers].sum(1), np.int64)

    def refer(self, references: References) -> None:
        """Keep what the model with its initial weights has computed of all samples."""
        assert references.shape[0] == self.num_samples
        self.references = references


def cut_to(lengths_ND: Numbers, room: int) -> Numbers:
    """Lengths [N, D] whose sum in each row is at most `room`: longer ones are cut to the largest length that fits."""
    low, high = np.zeros(len(lengths_ND), np.int64), np.full(len(lengths_ND), max(room, 1), np.int64)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = np.minimum(lengths_ND, middle[:, None]).sum(1) <= room
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return np.minimum(lengths_ND, low[:, None])


@dataclass(frozen=True)
class PreferenceDataset(ResponseDataset):
    """Open prepared pairs of answers, or answers that are judged one by one."""

    format = "codescent preferences 1"
    read_formats: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[type[Description]] = _PreferencesDescription
    what = "prepared preferences"

    _of_length: dict[tuple[str, int], PreferenceSource] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def documents(self) -> int:
        """Documents of a sample."""
        return 2 * int(self.description["request"]["answers"]) or PAIRED

    def source(self, split: str, seq_len: int, num_targets: int) -> PreferenceSource:  # type: ignore[override]
        """See `AnyDataset`. A second call returns the same object. `num_targets` is not used."""
        if (split, seq_len) not in self._of_length:
            tokens, *rest = (self.arrays[f"{split}_{name}"] for name in ARRAYS)
            begins, wanted, lines, labels = (one[:] for one in rest)
            key = digest([self.fingerprint, split, seq_len])
            found = PreferenceSource(split, tokens, begins, wanted, lines, labels, seq_len, self.documents, key)
            self._of_length[split, seq_len] = found
        return self._of_length[split, seq_len]

    def file_of(self, split: str) -> str:
        """The file that a split was prepared from."""
        named = self.description.get("validation") if split == "validation" else None
        return str(named or self.description["source"])

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        tokenizer, splits = self.description["tokenizer"], self.description["splits"]
        unused = Counter(self.description.get("unused", {}))
        answers = int(self.description["request"]["answers"])
        of_each = f" of {answers} answers" if answers else ""
        return [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}",
            *(
                f"{name}: {counted(splits[name]['samples'], 'sample' if answers else 'pair')}{of_each}, "
                f"{splits[name]['tokens']:,} tokens"
                for name in SPLITS
            ),
            *([f"parts of lines that have no effect: {counts_in_words(unused)}"] if unused else []),
        ]
