"""In: number, sizes and seed of random samples, a file format (hdf5, pt, safetensors). Out: a prepared folder of files.
Does not leave an incomplete folder. Does not read tensors (files.py does)."""

from __future__ import annotations

import errno
import io
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.safetensors_header import encode_header
from codescent.base.sealed import digest, write_sealed
from codescent.base.writing import open_new, open_own
from codescent.data.prepared import DESCRIPTION, SPLITS, prepared
from codescent.data.progress import stage
from codescent.tasks.tensors.dataset import FORMAT, open_prepared
from codescent.tasks.tensors.files import FORMATS, SUFFIX, h5py
from codescent.tasks.tensors.synthetic import MAX_SEED, NAMES, Sizes, Synthetic

MAX_WIDTH, MAX_SAMPLES = 1_000_000, 1 << 53
Advance = Callable[[int], None]


def make_recipe(samples: int, sizes: Sizes, seed: int, validation_fraction: float) -> Synthetic:
    """A recipe: `samples` for training, and validation_fraction * samples in addition for validation.
    Raises UserError: every problem of the arguments.
    """
    problems = []
    samples = min(samples, MAX_SAMPLES + 1)
    if samples > MAX_SAMPLES:
        problems.append(f"synthetic: at most {MAX_SAMPLES:,} samples")
    if not 0.0 < validation_fraction <= 0.5:
        problems.append(f"data.validation_fraction: {validation_fraction} is not in (0, 0.5]")
    if samples < 1:
        problems.append(f"synthetic: {samples} is not a number of samples: 1 or more")
    if not 0 <= seed <= MAX_SEED:
        problems.append(f"seed: {seed} is not a whole number from 0 to {MAX_SEED}")
    if problems:
        raise UserError(*problems)
    return Synthetic(samples, max(1, round(samples * validation_fraction)), sizes, seed)


def parse_sizes(source: str, target: str) -> Sizes:
    """Sizes from the texts of a command line, such as 1x512 and 20x512. Raises UserError: every wrong text."""
    problems, found = [], []
    digits = len(str(MAX_WIDTH))
    for flag, text in (("--source", source), ("--target", target)):
        words = text.lower().split("x")
        numbers = [int(word) if word.isascii() and word.isdecimal() and len(word) <= digits else 0 for word in words]
        if len(numbers) != 2 or not 1 <= min(numbers) <= max(numbers) <= MAX_WIDTH:
            problems.append(f"{flag} {text}: must be VECTORSxNUMBERS, such as 20x512")
        found.append(numbers)
    if not problems and found[0][1] != found[1][1]:
        problems.append(f"--source {source}, --target {target}: a model reads vectors of one width; make both the same")
    if problems:
        raise UserError(*problems)
    return Sizes(found[0][0], found[1][0], found[0][1])


def folder_of(recipe: Synthetic, storage: str, root: Path) -> Path:
    """Path of the prepared folder."""
    sizes = f"{recipe.sizes.source_len}x{recipe.sizes.width}-{recipe.sizes.target_len}x{recipe.sizes.width}"
    return root / f"synthetic-{recipe.train}-{sizes}-{storage}-{digest([storage, recipe.fingerprint])[:8]}"


def prepare_synthetic(recipe: Synthetic, storage: str, root: Path, *, progress: bool = False) -> Path:
    """The folder of synthetic tensors in one of FORMATS, written if it does not exist; `progress` shows a bar or lines.
    Raises UserError: an unknown format, a missing library, a problem of the disk, or a damaged existing folder.
    """
    if storage not in FORMATS:
        raise UserError(f"format {storage}: tensors are written as {', '.join(FORMATS)}")
    target = folder_of(recipe, storage, root)
    return prepared(target, lambda folder: _write(recipe, storage, folder, progress=progress), open_prepared)


def _write(recipe: Synthetic, storage: str, folder: Path, *, progress: bool) -> None:
    shapes = [recipe.shape(split, name) for split in SPLITS for name in NAMES]
    files = {}
    size_bytes = 4 * sum(math.prod(shape) for shape in shapes)
    if size_bytes > (disk_bytes := shutil.disk_usage(folder).total):  # would write for hours in vain
        raise OSError(errno.ENOSPC, f"{size_bytes:,} bytes are needed, the disk has {disk_bytes:,}")
    with stage("making synthetic tensors", size_bytes, progress) as advance:
        for split in SPLITS:
            path = folder / f"{split}{SUFFIX[storage]}"
            _WRITE[storage](recipe, split, path, advance)
            with open_own(path, folder.parent) as stream:
                os.fsync(stream.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    description = {"format": FORMAT, "storage": storage, "synthetic": True, "recipe": asdict(recipe)}
    write_sealed(folder / DESCRIPTION, {**description, "fingerprint": recipe.fingerprint, "files": files})


class _ErrorHidingFile(io.FileIO):
    """A file that hides errors of the disk from its writer; `check` raises the first one. Writes after it are lost.

    torch.save would hide the reason.
    HDF5 cannot close a file after a failed write: a full disk would end the process with a segmentation fault.
    """

    error: OSError | None = None  # the first error of the disk

    def write(self, data: Any) -> int:
        """Write all of `data`; after an error of the disk, nothing. Returns the size of `data` in any case."""
        left = memoryview(data).cast("B")
        size_bytes = len(left)
        try:
            while len(left) and self.error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return size_bytes

    def truncate(self, size: int | None = None) -> int:
        """Change the size to `size` bytes."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return self.tell() if size is None else size

    def check(self) -> None:
        """Raise the first error of the disk."""
        if self.error is not None:
            raise self.error


def _write_hdf5(recipe: Synthetic, split: str, path: Path, advance: Advance) -> None:
    library = h5py()
    with open_new(path) as made, _ErrorHidingFile(made.fileno(), "w+", closefd=False) as stream:
        try:
            with library.File(stream, "w") as file:
                file.attrs["synthetic"] = True
                for name in NAMES:
                    dataset, first = file.create_dataset(name, recipe.shape(split, name), "<f4"), 0
                    for block in recipe.blocks(split, name):
                        dataset[first : first + len(block)] = block
                        first += len(block)
                        stream.check()
                        advance(block.nbytes)
        finally:
            stream.check()  # the disk's own error, whatever HDF5 raises


def _write_safetensors(recipe: Synthetic, split: str, path: Path, advance: Advance) -> None:
    """The header, then the rows, a block at a time: the library would need all of them in memory."""
    header, _ = encode_header([(name, "F32", recipe.shape(split, name)) for name in NAMES], {"synthetic": "true"})
    with open_new(path) as made, io.BufferedWriter(made) as stream:
        stream.write(header)
        for name in NAMES:
            for block in recipe.blocks(split, name):
                stream.write(block.astype("<f4", copy=False).tobytes())
                advance(block.nbytes)


def _write_pt(recipe: Synthetic, split: str, path: Path, advance: Advance) -> None:
    """torch.save needs whole tensors: those of a split are all in memory."""
    import torch  # noqa: PLC0415 - planning writes no tensors

    whole = {name: torch.from_numpy(recipe.whole(split, name)) for name in NAMES}
    with open_new(path) as made, _ErrorHidingFile(made.fileno(), "w+", closefd=False) as stream:
        try:
            torch.save(whole, stream)
        except RuntimeError as error:
            stream.check()
            raise OSError(errno.EIO, f"torch.save: {next(iter(str(error).splitlines()), 'no reason')}", path) from error
        stream.check()
    advance(sum(tensor.numel() * tensor.element_size() for tensor in whole.values()))


_WRITE = {"hdf5": _write_hdf5, "pt": _write_pt, "safetensors": _write_safetensors}
