"""In: nothing. Out: the nouns of a dataset's samples: what a model reads, what is wanted, and who gives them.
Does not read files: a corpus of each kind has a source of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def in_range(numbers: npt.NDArray[np.integer[Any]], count: int, name: str) -> Numbers:
    """Numbers of samples of a split that has `count`, as int64.

    Raises:
        IndexError: no such sample.
    """
    found = np.asarray(numbers, np.int64)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < count:
        raise IndexError(f"samples of the {name} split lie in [0, {count})")
    return found


@dataclass(frozen=True)
class Samples:
    """n samples.

    Attributes:
        inputs: int64 [n, T] tokens, or float32 [n, X, D] vectors: what the model's first layer reads.
        targets: what its head is told to want: int64 [n, T] the token after each input (negative: nothing is wanted
            there), int64 [n, 2] where an answer begins and ends, float32 [n, X, D] vectors.
        extras: what layers at every depth read beside activations, by the name of the model's argument, each int64
            with n rows: "segments_BT", "lengths_B".
    """

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    extras: Mapping[str, Numbers] = field(default_factory=dict)


class Source(Protocol):
    """The samples of one split by number.

    Attributes:
        name: "train" or "validation".
        num_samples: how many there are.
        losses_per_sample: how many losses the model gives of each (a token's, or a question's); None: see `losses`.
    """

    name: str
    num_samples: int
    losses_per_sample: int | None

    def read(self, numbers: Numbers) -> Samples:
        """Samples, each number in [0, num_samples).

        Raises:
            UserError: what is wrong with the files: where.
            IndexError: no such sample.
        """

    def losses(self, numbers: Numbers) -> Numbers:
        """How many losses the model gives of each of these samples: the mean of a step is over all of them."""


class AnyDataset(Protocol):
    """What a run reads, open.

    Attributes:
        description: what is known of its making, as JSON.
        fingerprint: changes with what samples hold: a checkpoint is continued on the same alone.
    """

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens that there are; None: samples hold vectors."""

    @property
    def description(self) -> dict[str, Any]:
        """See the class."""

    @property
    def fingerprint(self) -> str:
        """See the class."""

    @property
    def tokenizer_text(self) -> str | None:
        """The tokenizer as a file holds it; None: there is none."""

    def source(self, split: str, seq_len: int, num_targets: int) -> Source:
        """The samples of a split as the task makes them.

        Args:
            split: "train" or "validation".
            seq_len: positions of a sample.
            num_targets: how many of these, the last ones, something is wanted of.
        """
