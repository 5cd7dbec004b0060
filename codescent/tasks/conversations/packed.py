"""In: the examples of a split, a length. Out: samples that hold several examples each, none of which sees another.
Does not read examples (dataset.py does) and does not order samples (data/loader.py does)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from codescent.data.documents import extras_of
from codescent.data.samples import NO_TARGET, Numbers, Samples, in_range


class Examples(Protocol):
    """The examples of a split, by number. `lengths`: int64, the positions of each."""

    name: str
    lengths: Numbers

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of targets in each example."""

    def write(self, number: int, inputs_T: Numbers, targets_T: Numbers) -> None:
        """Write an example into arrays of its length; `targets_T` has no targets yet."""


class PackedSource:
    """Samples of `seq_len` positions with as many whole examples as fit. The rest of a sample is padding (token 0).

    Which examples share a sample depends on their lengths alone (`packs_of`). Each is as if it were alone: positions
    begin again, no token sees another example, and no loss predicts across an end. So the sum of the losses is that of
    the examples, one in a sample.
    """

    losses_per_sample: int | None = None

    def __init__(self, examples: Examples, seq_len: int) -> None:
        self.name, self._examples, self._seq_len = examples.name, examples, seq_len
        packs = packs_of(examples.lengths, seq_len)
        self.num_samples = len(packs)
        self._members = np.array([number for pack in packs for number in pack], np.int64)
        self._firsts = np.cumsum([0, *map(len, packs)])
        lengths, losses = examples.lengths[self._members], examples.losses(self._members)
        self._filled, self._losses = (self._sums(one) for one in (lengths, losses))

    def _sums(self, of_members: Numbers) -> Numbers:
        """The sum over the examples of each sample."""
        sums = np.append(0, np.cumsum(of_members))
        return np.asarray(sums[self._firsts[1:]] - sums[self._firsts[:-1]], np.int64)

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], and the extras of `extras_of`: padding is a document, too.
        Raises IndexError: no such sample; UserError: the file has changed.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        inputs = np.zeros((len(numbers), self._seq_len), np.int64)
        targets, is_last = np.full_like(inputs, NO_TARGET), np.zeros(inputs.shape, np.bool_)
        for row, number in enumerate(numbers.tolist()):
            start = 0
            for member in self._members[self._firsts[number] : self._firsts[number + 1]].tolist():
                stop = start + int(self._examples.lengths[member])
                self._examples.write(member, inputs[row, start:stop], targets[row, start:stop])
                is_last[row, stop - 1] = True
                start = stop
        return Samples(inputs, targets, extras_of(is_last))

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of targets in each sample."""
        return np.asarray(self._losses[numbers], np.int64)

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`."""
        return np.asarray(self._seq_len - self._filled[numbers], np.int64)


def packs_of(lengths: Numbers, room: int) -> list[list[int]]:
    """The examples of each sample: best-fit decreasing (Johnson 1974, "Fast algorithms for bin packing").

    The longest example comes first, each into the fullest sample that has room for it. Samples, and the examples of a
    sample, are then in the order of the examples. `lengths`: none is above `room`, none is 0.
    """
    packs: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]  # numbers of the samples with so much room
    rooms = 0  # bit r: a sample has so much room
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        enough = rooms >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            pack = by_room[left].pop()
            rooms &= ~(1 << left) if not by_room[left] else -1
        else:
            left, pack = room, len(packs)
            packs.append([])
        packs[pack].append(number)
        if left > length:
            by_room[left - length].append(pack)
            rooms |= 1 << (left - length)
    return sorted(sorted(pack) for pack in packs)
