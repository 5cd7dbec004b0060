"""In: a folder or file of token shards from nanoGPT or llm.c. Out: the shard files, their dtype and vocabulary size.
Does not unpickle nanoGPT's meta.pkl, which can run code. Does not read tokens, only the header of a shard."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.base.reading import open_regular

HEADER_BYTES = 256 * 4
# llm.c dev/data/data_common.py: magic -> version, token type, vocabulary
HEADERS: dict[int, tuple[int, np.dtype[Any], int]] = {
    20240520: (1, np.dtype("<u2"), 50257),
    20240801: (7, np.dtype("<u4"), 128256),
}
GPT2_VOCAB_SIZE = 50257


@dataclass(frozen=True)
class ShardFile:
    """A file of tokens: `num_tokens` of `dtype` after `offset_bytes`. `sha256` is of the whole file; "": unknown."""

    path: Path
    offset_bytes: int
    num_tokens: int
    dtype: np.dtype[Any]
    sha256: str = ""


@dataclass(frozen=True)
class Foreign:
    """Shards of another program. `vocab_size` None: unknown; callers take the largest token plus one."""

    format: str
    folder: Path
    train: tuple[ShardFile, ...]
    validation: tuple[ShardFile, ...]
    vocab_size: int | None


def is_foreign(path: Path, split: str = "train") -> bool:
    """Whether this is a `.bin` file, or a folder with `.bin` files for training ("train") or validation ("val")."""
    if path.is_dir():
        return bool(_files_of(path, split))
    return path.suffix == ".bin" and path.is_file()


def read_foreign(path: Path, *, both: bool = True) -> Foreign:
    """The shards of a folder, or the set of one training file (`X_train*.bin` with `X_val*.bin`).

    Args:
        path: of the folder or the training file.
        both: False: the training shards alone.

    Raises:
        UserError: no validation file; several sets in one folder; a file size that contradicts the header.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and "train" not in path.name:
        raise UserError(f"{path}: name the folder of the shards, or a training file (with train in its name)")
    stem, chosen = _set_of(path, "train")
    held_out = sorted(folder.glob(f"{glob.escape(stem)}val*.bin")) if both else []
    if both and not held_out:
        raise UserError(
            f"{folder}: no validation shard {stem}val*.bin next to {chosen[0].name}; add it, or give data.validation"
        )
    return _foreign(folder, chosen, held_out)


def read_foreign_validation(path: Path) -> Foreign:
    """The validation shards of a folder alone, or one file of any name.
    Raises UserError: several sets in one folder; a file size that contradicts the header.
    """
    if path.is_file():
        return _foreign(path.parent, [], [path])
    return _foreign(path, [], _set_of(path, "val")[1])


def _files_of(folder: Path, split: str) -> list[Path]:
    """The `.bin` files of a split, by name: a name such as interval_train.bin is of the training split."""
    found = [file for file in sorted(folder.glob("*.bin")) if split in file.name]
    return found if split == "train" else [file for file in found if "train" not in file.name]


def _set_of(path: Path, split: str) -> tuple[str, list[Path]]:
    """The stem and the files X_SPLIT*.bin of one set. Raises UserError: the folder has several sets."""
    folder = path if path.is_dir() else path.parent
    files = _files_of(folder, split)
    stems = {file.name.partition(split)[0] for file in ([path] if path.is_file() else files)}
    if len(stems) > 1:
        what = "training" if split == "train" else "validation"
        raise UserError(f"{path}: holds several sets of shards ({', '.join(sorted(stems))}): name one {what} file")
    (stem,) = stems
    return stem, [file for file in files if file.name.partition(split)[0] == stem]


def _foreign(folder: Path, chosen: list[Path], held_out: list[Path]) -> Foreign:
    shards = {file: _read_head(file) for file in [*chosen, *held_out]}
    headed = {shard.offset_bytes > 0 for shard in shards.values()}
    dtypes = {shard.dtype for shard in shards.values()}
    if len(headed) > 1 or len(dtypes) > 1:
        raise UserError(
            f"{folder}: shards of different formats in one folder ({', '.join(file.name for file in shards)})"
        )
    vocab_size: int | None = GPT2_VOCAB_SIZE
    if headed == {True}:
        vocab_size = next(size for _, dtype, size in HEADERS.values() if dtype in dtypes)
    elif (folder / "meta.pkl").exists():
        vocab_size = None  # nanoGPT writes this file for tokenizers other than GPT-2's
    train_shards, validation_shards = (tuple(shards[file] for file in of_split) for of_split in (chosen, held_out))
    return Foreign("llm.c" if headed == {True} else "nanoGPT", folder, train_shards, validation_shards, vocab_size)


def _read_head(path: Path) -> ShardFile:
    size_bytes = path.stat().st_size
    with open_regular(path) as stream:
        head = np.frombuffer(stream.read(HEADER_BYTES), "<u1")
    magic, version, num_tokens = head.view("<i4")[:3].tolist() if len(head) == HEADER_BYTES else (0, 0, 0)
    if magic not in HEADERS:
        if size_bytes % 2:
            raise UserError(f"{path}: truncated: {size_bytes} bytes are not a whole number of uint16 tokens")
        return ShardFile(path, 0, size_bytes // 2, np.dtype("<u2"))
    known, dtype, _ = HEADERS[magic]
    if version != known:
        raise UserError(f"{path}: llm.c shard of version {version}: only version {known} can be read")
    expected_bytes = HEADER_BYTES + num_tokens * dtype.itemsize
    if size_bytes != expected_bytes:
        what = "truncated" if size_bytes < expected_bytes else "too long"
        raise UserError(
            f"{path}: {what}: its header says {num_tokens} tokens, which end at byte {expected_bytes}, "
            f"but the file ends at byte {size_bytes}"
        )
    return ShardFile(path, HEADER_BYTES, num_tokens, dtype)
