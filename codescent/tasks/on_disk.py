"""In: an open dataset of a run. Out: the datasets of which it is made, and the files and folders that have its samples.
Does not prepare or open a dataset, and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from codescent.data.mixture import MixedDataset
from codescent.data.samples import AnyDataset
from codescent.data.text.dataset import Dataset
from codescent.tasks.folder import FolderDataset
from codescent.tasks.task import ShownDataset
from codescent.tasks.tensors.dataset import TensorDataset
from codescent.tasks.text import TextDataset


def shown(dataset: AnyDataset) -> Iterator[ShownDataset]:
    """The datasets that can be printed and verified: each corpus of a mixture, the text of masked samples or lines.

    None of a dataset whose class is the user's.
    """
    if isinstance(dataset, MixedDataset):
        for one in dataset.corpora.values():
            yield from shown(one)
    elif isinstance(dataset, TextDataset):
        yield dataset.text
    elif isinstance(dataset, Dataset | FolderDataset | TensorDataset):
        yield dataset


def places(dataset: AnyDataset) -> list[Path]:
    """The files and folders of a dataset and of its data.validation, each once. What is in memory alone has none."""
    datasets = list(dataset.corpora.values()) if isinstance(dataset, MixedDataset) else [dataset]
    found: list[Path] = []
    for one in datasets:
        of_validation = one.description.get("validation")
        also = of_validation.get("path") if isinstance(of_validation, dict) else None
        found += [one.path, *([Path(also)] if also else [])]
    return [path for path in dict.fromkeys(found) if path.exists()]


def size_bytes(place: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
