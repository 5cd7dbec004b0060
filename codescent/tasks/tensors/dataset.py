"""In: tensors in memory, a prepared folder or a user's file. Out: a `TensorDataset`: training and validation samples.
Does not read files itself (files.py does) and does not write."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.sealed import digest
from codescent.data.prepared import (
    AGAIN,
    SPLITS,
    Fields,
    checked_description,
    edges_of,
    hash_problems,
    refuse_damaged,
    size_problems,
    unchecked_description,
)
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.verified import hashes
from codescent.tasks.tensors.files import SUFFIXES, InMemory, TensorFile
from codescent.tasks.tensors.synthetic import NAMES, PREFIX, Floats, Sizes, Synthetic

FORMAT = "codescent tensors 1"

Count = Annotated[int, Field(ge=1)]


class TensorSource:
    """Samples [first, stop) of tensors. The inputs are the source's vectors and then the target's.

    The loss compares the outputs with the target's vectors, as a script does with `output = model(source, targets)` and
    a loss of `output` and `targets`.
    """

    def __init__(
        self, name: str, tensors: TensorFile | InMemory, sizes: Sizes, first: int, stop: int, path: Path
    ) -> None:
        self._path = path
        self.name, self.num_samples = name, stop - first
        self.losses_per_sample: int | None = sizes.target_len
        self._tensors, self._sizes, self._first = tensors, sizes, first

    def read(self, numbers: Numbers) -> Samples:
        """inputs float32 [n, source_len + target_len, width]; targets are the same array, its source part has no loss.
        Raises UserError: the file cannot be read; IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        sizes = self._sizes
        both = np.empty((len(numbers), sizes.source_len + sizes.target_len, sizes.width), np.float32)
        self._tensors.read("source", numbers + self._first, both[:, : sizes.source_len])
        self._tensors.read("target", numbers + self._first, both[:, sizes.source_len :])
        return Samples(both, both, not_finite=self._not_finite(numbers, both))

    def _not_finite(self, numbers: Numbers, both: Floats) -> dict[int, str]:
        """The rows of `both` with NaN or infinity, in words: the file and the sample's number there, from 0."""
        if np.isfinite(both.sum(dtype=np.float64)):  # a sum in fp64 overflows only by what is not finite
            return {}
        found, border = {}, self._sizes.source_len
        for row in np.flatnonzero(~np.isfinite(both).all((1, 2))).tolist():
            names = [name for name, part in zip(NAMES, (both[row, :border], both[row, border:])) if not _finite(part)]
            found[row] = f"{self._path}: sample {numbers[row] + self._first} of {' and '.join(names)}"
        return found

    def losses(self, numbers: Numbers) -> Numbers:
        """`target_len` for each: one loss for each vector of the target."""
        return np.full(len(numbers), self._sizes.target_len, np.int64)


@dataclass(frozen=True)
class TensorDataset:
    """Open tensors.

    Attributes:
        fingerprint: for synthetic tensors a hash of the recipe, equal for every file format; else of the file's bytes.
        earlier: for a user's file, the fingerprint of earlier versions: a hash of size, first and last bytes.
    """

    path: Path
    sizes: Sizes
    train: TensorSource
    validation: TensorSource
    description: dict[str, Any]
    fingerprint: str
    earlier: str | None = None
    vocab_size: int | None = None
    tokenizer_text: str | None = None

    def source(self, split: str, seq_len: int, num_targets: int) -> TensorSource:
        """The samples of a split: see `AnyDataset`. Raises UserError: they have other lengths."""
        sizes = self.sizes
        if (seq_len, num_targets) != (sizes.source_len + sizes.target_len, sizes.target_len):
            raise UserError(f"{self.path}: {sizes}, not {seq_len - num_targets} and {num_targets} vectors")
        return self.train if split == "train" else self.validation

    def validated_on(self, other: TensorDataset) -> TensorDataset:
        """This dataset with the validation split of another. Raises UserError: its samples have other sizes."""
        if other.sizes != self.sizes:
            raise UserError(
                f"data.validation = {other.path}: has {other.sizes}, but {self.path} has {self.sizes}; give tensors of "
                "the same sizes"
            )
        of_validation = {"path": str(other.path), "fingerprint": other.fingerprint, **other.description}
        return replace(
            self,
            validation=other.validation,
            description={**self.description, "validation": of_validation},
            fingerprint=digest([self.fingerprint, other.fingerprint]),
            earlier=None,
        )

    def summary(self) -> list[str]:
        """What `codescent data` prints."""
        label = "synthetic: random numbers, for speed measurements" if self.description["synthetic"] else "tensors"
        lines = [f"{self.path}: {label}; {self.description['storage']}, {self.sizes}"]
        return lines + [
            f"{split.name}: {counted(split.num_samples, 'sample')}" for split in (self.train, self.validation)
        ]

    def verify(self) -> None:
        """Hash the files again and compare. Nothing is compared for a user's file. Raises UserError: a changed file."""
        of_validation = self.description.get("validation")
        refuse_damaged(self.path, hash_problems(self.path, _hashes_of(self.description), again=True))
        if isinstance(of_validation, dict) and "path" in of_validation:  # a data.validation, with a folder of its own
            folder = Path(str(of_validation["path"]))
            refuse_damaged(folder, hash_problems(folder, _hashes_of(of_validation), again=True))


class _Sizes(Fields):
    source_len: Count
    target_len: Count
    width: Count


class _Recipe(Fields):
    train: Count
    validation: Count
    sizes: _Sizes
    seed: int


class _File(Fields):
    bytes: Count
    sha256: str


class _TensorsDescription(Fields):
    format: Literal["codescent tensors 1"]
    storage: Literal["hdf5", "pt", "safetensors"]
    synthetic: Literal[True]
    recipe: _Recipe
    files: Annotated[dict[str, _File], Field(min_length=2, max_length=2)]


def is_tensors(corpus: str) -> bool:
    """Whether a corpus is tensors: synthetic:…, a prepared folder, or a file by its suffix."""
    path = expanded(corpus)
    return corpus.startswith(PREFIX) or path.suffix.lower() in SUFFIXES or is_prepared(path)


def is_prepared(path: Path) -> bool:
    """Whether a folder holds prepared tensors, by its description."""
    return unchecked_description(path).get("format") == FORMAT


def in_memory(recipe: Synthetic, corpus: str) -> TensorDataset:
    """Synthetic tensors in memory; each process computes its own copy."""
    train, validation = (
        TensorSource(
            split, InMemory(partial(recipe.whole, split)), recipe.sizes, 0, recipe.samples(split), Path(corpus)
        )
        for split in SPLITS
    )
    description = {"format": FORMAT, "storage": "memory", "synthetic": True, "recipe": asdict(recipe)}
    return TensorDataset(Path(corpus), recipe.sizes, train, validation, description, recipe.fingerprint)


def open_prepared(path: Path, *, whole: bool = False) -> TensorDataset:
    """Open a folder that `prepare_synthetic` made; `whole` loads each file into memory at its first read.
    A file that has changed since its last verification is hashed again. Raises UserError: every damaged file.
    """
    description = read_description(path)
    fields = description["recipe"]
    recipe = Synthetic(fields["train"], fields["validation"], Sizes(**fields["sizes"]), fields["seed"])
    refuse_damaged(path, size_problems(path, {name: file["bytes"] for name, file in description["files"].items()}))
    known = _hashes_of(description)
    refuse_damaged(path, hash_problems(path, known))
    sources = []
    for split, name in zip(SPLITS, sorted(known), strict=True):
        file = TensorFile(path / name, known[name])
        if (file.samples, file.sizes) != (recipe.samples(split), recipe.sizes):
            raise UserError(f"{path / name}: {file.samples} samples of {file.sizes}: damaged: {AGAIN}")
        sources.append(TensorSource(split, _rows(file, whole), file.sizes, 0, file.samples, file.path))
    return TensorDataset(path, recipe.sizes, sources[0], sources[1], description, recipe.fingerprint)


def open_tensors(corpus: str, validation_fraction: float, *, whole: bool = False) -> TensorDataset:
    """Open a prepared folder or a user's file. Raises UserError: everything that is wrong with it."""
    path = expanded(corpus)
    return open_prepared(path, whole=whole) if is_prepared(path) else open_file(path, validation_fraction, whole=whole)


def open_file(path: Path, validation_fraction: float, *, whole: bool = False) -> TensorDataset:
    """Open a user's file; its last samples are the validation split. `whole` loads it into memory at its first read.

    Args:
        path: of the file.
        validation_fraction: of the samples; 0 or 1: all samples are in one split.
        whole: see above.

    Raises:
        UserError: everything that is wrong with it.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    found, problems = hashes(path.parent, {path.name: None})
    if problems:
        raise UserError(*problems.values())
    file = TensorFile(path, found[path.name])
    border = int(file.samples * (1 - validation_fraction))
    if not 0 < border < file.samples and validation_fraction not in (0.0, 1.0):
        raise UserError(f"{path}: {counted(file.samples, 'sample')}: too few to split into train and validation")
    rows = _rows(file, whole)
    train = TensorSource("train", rows, file.sizes, 0, border, path)
    validation = TensorSource("validation", rows, file.sizes, border, file.samples, path)
    description = {"format": FORMAT, "storage": file.format, "synthetic": False, "file": str(path)}
    head = f"{path.stat().st_size} {border} {' '.join(NAMES)}\n".encode()
    earlier = hashlib.sha256(head + edges_of(path)).hexdigest()
    fingerprint = digest([found[path.name], border, *NAMES])
    return TensorDataset(path, file.sizes, train, validation, description, fingerprint, earlier)


def read_description(folder: Path) -> dict[str, Any]:
    """description.json of a folder of prepared tensors. Raises UserError: every wrong field."""
    return checked_description(folder, _TensorsDescription, "prepared tensors")


def _hashes_of(description: dict[str, Any]) -> dict[str, str]:
    return {name: file["sha256"] for name, file in description.get("files", {}).items()}


def _finite(numbers: Floats) -> bool:
    return bool(np.isfinite(numbers).all())


def _rows(file: TensorFile, whole: bool) -> TensorFile | InMemory:
    return InMemory(file.whole) if whole else file
