"""In: the name of a corpus, or the path of a text file, folder, glob or JSONL. Out: its files, in a fixed order.
Does not read their text (sources.py does) and never guesses: what is not there is refused with what would be."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError
from codescent.data.text import download

NAMES = ("python-stdlib", "shakespeare", "openwebtext")
# Folders of the library that are no example of its code: tests, other people's packages, tables and help texts.
STDLIB_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data")
)
OPENWEBTEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".xz", ".gz", ".bz2", ".tar", ".tgz", ".txz")


@dataclass(frozen=True)
class Source:
    """A file of a corpus; `name` is its path inside the corpus, the same on every machine."""

    name: str
    path: Path


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus in reading order.

    `stamp` changes when a file is added, removed or changed, and costs one stat per file; where the content is known
    beforehand by its sha256 it is that.
    """

    name: str
    sources: tuple[Source, ...]
    stamp: str
    is_single_file: bool


def identity(corpus: str) -> str:
    """What names a corpus in a dataset's description: the name, or the absolute path or glob."""
    return corpus if corpus in NAMES else str(Path(corpus).expanduser().absolute())


def is_present(corpus: str) -> bool:
    """Whether the corpus' text can be read here without a download."""
    if corpus == "python-stdlib":
        return True
    if corpus == "shakespeare":
        bases = [base for base in (download.data_folder(), download.cache_folder()) if base]
        return any((base / download.SHAKESPEARE.name).is_file() for base in bases)
    if corpus == "openwebtext":
        folder = download.data_folder()
        return (folder is not None and (folder / "openwebtext").is_dir()) or (
            download.cache_folder() / download.OPENWEBTEXT.name
        ).is_file()
    return bool(_matches(corpus))


def resolve(corpus: str, advance: Callable[[int], None] = lambda _: None) -> Corpus:
    """The corpus of this name or path; published ones are downloaded where they are not in the data folder or cached.

    Files of a folder or glob come in the order of the sha256 of their names inside it: the same on every machine, and
    mixed, so that the last part of the text (the validation split) is like the rest.

    Raises:
        UserError: no such corpus or path; a folder without a file; a download that failed.
    """
    if corpus == "python-stdlib":
        return _python_stdlib()
    if corpus == "shakespeare":
        path = download.obtain(download.SHAKESPEARE, advance)
        return Corpus(corpus, (Source(path.name, path),), download.SHAKESPEARE.sha256, True)
    if corpus == "openwebtext":
        return _openwebtext(advance)
    return _files(corpus)


def _python_stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        Source(path.relative_to(root).as_posix(), path)
        for path in _walk(root, STDLIB_LEFT_OUT)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise UserError(f"python-stdlib: this Python has no sources in {root}: name a text file or folder instead")
    # Of the files' stat only the size: another machine with the same Python has the same corpus, not the same mtimes.
    facts = (f"{source.name} {source.path.stat().st_size}" for source in found)
    stamp = _digest([platform.python_version(), *sorted(facts)])
    return Corpus("python-stdlib", _in_order(found), stamp, False)


def _openwebtext(advance: Callable[[int], None]) -> Corpus:
    """The user's files where there are any, else the published archive: 12.9 GB, checked once, as it is downloaded."""
    base = download.data_folder()
    folder = base / "openwebtext" if base else None
    found = [
        Source(path.relative_to(folder).as_posix(), path)
        for path in (_walk(folder) if folder and folder.is_dir() else ())
        if folder and path.suffix.lower() in OPENWEBTEXT_SUFFIXES
    ]
    if not found:
        archive = download.cache_folder() / download.OPENWEBTEXT.name
        if not archive.is_file():
            archive = download.obtain(download.OPENWEBTEXT, advance)
        found = [Source(archive.name, archive)]
    return Corpus("openwebtext", _in_order(found), _stat_stamp(found), False)


def _files(corpus: str) -> Corpus:
    path = Path(corpus).expanduser()
    matches = _matches(corpus)
    if not matches:
        raise _nothing_there(corpus, path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{corpus}: not a file: its text is read twice, so put it into one")
    if path.is_file():
        found = [Source(path.name, path)]
    elif path.is_dir():
        found = [Source(file.relative_to(path).as_posix(), file) for file in matches]
    else:
        base = Path(os.path.commonpath([match.parent for match in matches]))
        found = [Source(file.relative_to(base).as_posix(), file) for file in matches]
    return Corpus(_slug(corpus), _in_order(found), _stat_stamp(found), path.is_file())


def _matches(corpus: str) -> list[Path]:
    path = Path(corpus).expanduser()
    if path.is_dir():
        return list(_walk(path))
    if path.exists():
        return [path]
    if glob.has_magic(corpus):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
        return [Path(name) for name in sorted(names) if Path(name).is_file()]
    return []


def _nothing_there(corpus: str, path: Path) -> UserError:
    if path.is_dir():
        return UserError(f"{corpus}: this folder holds no file (hidden ones are left out)")
    if glob.has_magic(corpus):
        return UserError(f"{corpus}: no file matches this glob")
    siblings = [str(path.parent / child.name) for child in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(corpus, NAMES, 1, 0.5) or difflib.get_close_matches(str(path), siblings, 1, 0.8)
    hint = f": did you mean {close[0]}?" if close else ""
    return UserError(f"{corpus}: no such file or folder, nor a corpus (those are {', '.join(NAMES)}){hint}")


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> Iterable[Path]:
    """Every regular file beneath a folder; hidden files and folders, and those named in `left_out`, are passed over."""
    for folder, names, files in os.walk(root):  # links to folders are not followed: they may go in circles
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".") and name not in left_out and not _is_our_own(Path(folder, name))
        )
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_our_own(folder: Path) -> bool:
    """Prepared datasets and run folders are no text, even where they lie in the folder that they were made from."""
    return (folder / "description.json").is_file() or (
        (folder / "plan.json").is_file() and (folder / "checkpoints").is_dir()
    )


def _in_order(found: list[Source]) -> tuple[Source, ...]:
    return tuple(sorted(found, key=lambda source: _digest([source.name])))


def _stat_stamp(found: list[Source]) -> str:
    stats = ((source, source.path.stat()) for source in found)
    return _digest(sorted(f"{source.name} {stat.st_size} {stat.st_mtime_ns}" for source, stat in stats))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _slug(corpus: str) -> str:
    """A short plain name for the folder of the dataset: the last named part of the path."""
    parts = [part for part in Path(corpus).expanduser().absolute().parts if not glob.has_magic(part)]
    stem = parts[-1].split(".")[0] if parts else ""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in stem).strip("-")
    return plain[:40] or "text"
