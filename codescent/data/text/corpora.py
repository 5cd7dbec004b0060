"""In: the name of a corpus, or the path of a file, folder or glob. Out: its files, in a fixed order.
Does not read their text (sources.py does) and does not guess: for an unknown corpus the error names the nearest one."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from codescent.base import hub_name
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.own_names import is_own_name
from codescent.data.text import download, saved
from codescent.data.text.forms import JSONL_SUFFIXES, READ, TEXT
from codescent.data.text.own_documents import OwnTexts
from codescent.data.text.records import DocumentPiece, Reading
from codescent.data.text.sources import TAR_SUFFIXES, looked_at, may_hold_records, read_blocks

NAMES = ("python-stdlib", "shakespeare", "openwebtext")
# Folders of the standard library that are left out: tests, installed packages, tables and help texts.
STDLIB_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data")
)
MOST_ODD = 20
OPENWEBTEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".parquet", ".xz", ".gz", ".bz2", ".zst", *TAR_SUFFIXES)


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus; `name` is its path inside the corpus, the same on every machine. `own`: the documents of a
    class of the user, which are in no file of ours."""

    name: str
    path: Path
    own: OwnTexts | None = None

    @property
    def size_bytes(self) -> int:
        """Of the file; 0: unknown."""
        return self.path.stat().st_size if self.own is None else 0

    def blocks(self, reading: Reading, watch: Callable[[memoryview], None] | None = None) -> Iterator[DocumentPiece]:
        """Its text, in order: see `read_blocks`. Raises UserError."""
        return read_blocks(self.path, reading, watch) if self.own is None else self.own.blocks(watch)


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus in reading order; `stamp` (one stat per file, or a sha256) changes when a file does.
    `as_text`: its files are known to be plain text, whatever they look like."""

    name: str
    sources: tuple[CorpusFile, ...]
    stamp: str
    is_single_file: bool
    as_text: bool = False


def identity(corpus: str) -> str:
    """How a dataset's description names the corpus: by its name, or by the absolute path or glob."""
    return corpus if corpus in NAMES or is_own_name(corpus) else str(expanded(corpus).absolute())


def is_present(corpus: str) -> bool:
    """Whether the corpus' text can be read without a download."""
    if corpus == "python-stdlib" or is_own_name(corpus):
        return True
    if corpus == "shakespeare":
        return download.found(download.SHAKESPEARE) is not None
    if corpus == "openwebtext":
        return _openwebtext_folder() is not None or download.found(download.OPENWEBTEXT) is not None
    return bool(_matches(corpus))


def may_have_columns(corpus: str) -> bool:
    """Whether a file of the corpus may have JSON lines or be a table, by its name or its first bytes."""
    if corpus in NAMES:
        return corpus == "openwebtext"
    return any(map(may_hold_records, _matches(corpus)))


def pattern_files(corpus: str) -> int | None:
    """The number of files of a corpus that is read as a pattern (glob); None: it is a name, a file or a folder."""
    if corpus in NAMES or not glob.has_magic(corpus) or expanded(corpus).exists():
        return None
    return len(_matches(corpus))


def is_as_named(corpus: str) -> bool:
    """Whether every file of a corpus has the form that its name says. Earlier versions looked at names alone."""
    return corpus in NAMES[:2] or not any(map(_is_misnamed, _matches(corpus)))


def is_read(corpus: str) -> bool:
    """Whether every file of a corpus has a form that is read."""
    return corpus in NAMES[:2] or all(looked_at(path) in READ for path in _matches(corpus))


def _is_misnamed(path: Path) -> bool:
    names = {suffix.lower() for suffix in path.suffixes}
    return names.isdisjoint((*JSONL_SUFFIXES, *TAR_SUFFIXES)) and looked_at(path) != TEXT


def own_files(corpus: str) -> list[Path]:
    """The files of a corpus that is a path or a glob; none of a published one."""
    return [] if corpus in NAMES else _matches(corpus)


def resolve(corpus: str, advance: Callable[[int], None] = lambda _: None) -> Corpus:
    """The corpus of this name or path. A published corpus is downloaded if the data folder and the cache lack it.

    Files of a folder or glob are sorted by the sha256 of their names: the order is the same on every machine, and
    mixed, so that the end of the text (the validation split) resembles the rest.

    Raises:
        UserError: no such corpus or path; a folder without a file; a failed download; no such class of the user.
    """
    if is_own_name(corpus):
        return _own(corpus)
    if corpus == "python-stdlib":
        return _python_stdlib()
    if corpus == "shakespeare":
        path = download.obtain(download.SHAKESPEARE, advance)
        return Corpus(corpus, (CorpusFile(path.name, path),), download.SHAKESPEARE.sha256, True, as_text=True)
    if corpus == "openwebtext":
        return _openwebtext(advance)
    return _files(corpus)


def _own(corpus: str) -> Corpus:
    """The documents of a class of the user."""
    texts, name = OwnTexts(corpus), corpus.rpartition(":")[2]
    return Corpus(name, (CorpusFile(corpus, Path(corpus), texts),), texts.stamp(), False, as_text=True)


@cache  # a study asks for it once for each point, and its files stay as long as this process
def _python_stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in _walk(root, STDLIB_LEFT_OUT) if path.suffix == ".py" and path.is_file())
    sources = _in_order(root, (path for path in paths if not path.name.startswith("_sysconfigdata")))
    if not sources:
        raise UserError(f"python-stdlib: this Python has no sources in {root}: name a text file or folder instead")
    # Sizes without mtimes: the same Python on another machine has the same corpus with other mtimes.
    facts = (f"{source.name} {source.path.stat().st_size}" for source in sources)
    return Corpus("python-stdlib", sources, _digest([platform.python_version(), *sorted(facts)]), False, True)


def _openwebtext(advance: Callable[[int], None]) -> Corpus:
    """The user's files if there are any, else the published archive: 12.9 GB, checked only when it is downloaded."""
    folder = _openwebtext_folder()
    paths = [path for path in _walk(folder) if path.suffix.lower() in OPENWEBTEXT_SUFFIXES] if folder else []
    if folder is None or not paths:
        archive = download.found(download.OPENWEBTEXT) or download.obtain(download.OPENWEBTEXT, advance)
        folder, paths = archive.parent, [archive]
    _refuse_odd(paths)
    return _stamped("openwebtext", folder, paths, False)


def _openwebtext_folder() -> Path | None:
    base = download.data_folder()
    return base / "openwebtext" if base and (base / "openwebtext").is_dir() else None


def _files(corpus: str) -> Corpus:
    path, matches = expanded(corpus), _found(corpus)
    if not matches:
        raise _nothing_there(corpus, path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{corpus}: not a regular file: its text is read twice, so save it to a file first")
    _refuse_odd(matches)
    if path.is_dir():
        saved.refuse_splits(matches)
    root = saved.data_root(path) if path.is_dir() else Path(os.path.commonpath([match.parent for match in matches]))
    return _stamped(_slug(corpus), root, matches, path.is_file())


def _matches(corpus: str) -> list[Path]:
    """The regular files of a folder or a glob, or the path itself."""
    return [path for path in _found(corpus) if path.is_file() or path == expanded(corpus)]


def _found(corpus: str) -> list[Path]:
    """As `_matches`, with what is no regular file: such a path may not be left out in silence (`_refuse_odd`)."""
    path = expanded(corpus)
    if path.is_dir():
        return list(_walk(saved.data_root(path)))
    if path.exists():
        return [path]
    return sorted(_of_glob(path)) if glob.has_magic(corpus) else []


def _of_glob(path: Path) -> Iterator[Path]:
    """What matches a glob, without folders. Hidden files are left out, unless the glob names them.

    "**" does not enter links to folders (Path.glob; glob.glob would), because they may form circles.
    """
    first = next(
        number
        for number, part in enumerate(path.parts)
        if glob.has_magic(part) and not Path(*path.parts[: number + 1]).exists()  # a folder may be named [1]
    )
    root, pattern = Path(*path.parts[:first]), Path(*path.parts[first:])
    if pattern.name == "**":  # which alone gives folders
        pattern /= "*"
    names_hidden = any(part.startswith(".") for part in pattern.parts)
    for file in root.glob(str(pattern)):
        is_hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if not file.is_dir() and (names_hidden or not is_hidden):
            yield file


def _nothing_there(corpus: str, path: Path) -> UserError:
    if path.is_dir():
        return UserError(f"{corpus}: this folder holds no file (hidden ones are left out)")
    of_hub = f"; a data set of the hub is named {name}" if (name := hub_name.meant(corpus, is_dataset=True)) else ""
    if glob.has_magic(corpus):
        why = "no such file or folder, and no file matches it as a pattern (glob), as its name has * ? or ["
        return UserError(f"{corpus}: {why}{of_hub}")
    if path.is_symlink():
        return UserError(f"{corpus}: a symbolic link that leads nowhere")
    siblings = [str(path.parent / child.name) for child in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(corpus, NAMES, 1, 0.5) or difflib.get_close_matches(str(path), siblings, 1, 0.8)
    hint = f": did you mean {close[0]}?" if close else ""
    return UserError(
        f"{corpus}: no such file or folder, and not the name of a corpus ({', '.join(NAMES)}){hint}{of_hub}"
    )


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> Iterable[Path]:
    """Every file below a folder, except hidden ones and folders named in `left_out`.
    Raises UserError: a folder cannot be read.
    """
    for folder, names, files in os.walk(root, onerror=_refuse_folder):  # not links to folders, which may form circles
        names[:] = sorted(
            name
            for name in saved.data_folders(Path(folder), names)
            if not name.startswith(".") and name not in left_out and not _is_our_own(Path(folder, name))
        )
        shown = sorted(name for name in files if not name.startswith("."))
        yield from (Path(folder, name) for name in saved.data_files(Path(folder), shown))


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _refuse_odd(paths: Iterable[Path]) -> None:
    """Raise UserError if a path of a corpus is no regular file: its text would be left out in silence."""
    odd = [path for path in paths if not path.is_file()]
    leads = "a symbolic link that leads nowhere"
    why = [f"{path}: {leads if path.is_symlink() else 'a pipe, a socket or a device'}" for path in odd[:MOST_ODD]]
    if odd:
        more = f", and {len(odd) - MOST_ODD} more" if len(odd) > MOST_ODD else ""
        raise UserError(*why[:-1], f"{why[-1]}{more}: it holds no text; delete it, or give a glob of the other files")


def _is_our_own(folder: Path) -> bool:
    """Whether a folder is a prepared dataset or a run folder. Such folders may lie inside the corpus' folder."""
    return (folder / "description.json").is_file() or (
        (folder / "plan.json").is_file() and (folder / "checkpoints").is_dir()
    )


def _in_order(root: Path, paths: Iterable[Path]) -> tuple[CorpusFile, ...]:
    found = (CorpusFile(path.relative_to(root).as_posix(), path) for path in paths)
    return tuple(sorted(found, key=lambda source: _digest([source.name])))


def _stamped(name: str, root: Path, paths: Iterable[Path], is_single_file: bool) -> Corpus:
    sources = _in_order(root, paths)
    stats = ((source, source.path.stat()) for source in sources)
    stamp = _digest(sorted(f"{source.name} {stat.st_size} {stat.st_mtime_ns}" for source, stat in stats))
    return Corpus(name, sources, stamp, is_single_file)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _slug(corpus: str) -> str:
    """A short name for the dataset's folder: the last part of the path that is not a glob."""
    path = expanded(corpus).absolute()
    parts = [part for part in path.parts if path.exists() or not glob.has_magic(part)]
    stem = parts[-1].split(".")[0] if parts else ""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in stem).strip("-")
    return plain[:40] or "text"
