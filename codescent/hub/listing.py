"""In: what a hub says of the files of a commit. Out: `HubFiles`: their sizes and hashes, kept in the cache as JSON.
Does not ask a hub (client.py does)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from codescent.base.durable import replace_file, sha256_of
from codescent.base.hub_name import HubName
from codescent.base.reading import open_regular, read_json
from codescent.base.writing import make_parents
from codescent.hub.cache import folder_of, snapshot_of

OWN = "codescent"
"""Our folder beside `snapshots` and `blobs`: it travels with the cache."""
PIECE_BYTES = 1 << 20

_known: dict[HubName, HubFiles] = {}
"""Listings of this process. Where the cache cannot be written they are here alone."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes:
        path: in the repository.
        size_bytes: of the file.
        sha256: of a file in LFS; None: the hub does not know it.
        blob: the hash by git of a file that is not in LFS: SHA-1 of "blob SIZE\\0" and the content.
    """

    path: str
    size_bytes: int
    sha256: str | None
    blob: str | None

    def differs(self, path: Path) -> str:
        """How a file on the disk differs from this one, in words; "": it is the same, by size and by hash."""
        if (size_bytes := path.stat().st_size) != self.size_bytes:
            return f"has {size_bytes:,} bytes, and the hub says {self.size_bytes:,}"
        if self.sha256 is not None and (found := sha256_of(path)) != self.sha256:
            return f"has the sha256 {found}, and the hub says {self.sha256}"
        if self.sha256 is None and self.blob is not None and (found := _git_hash(path)) != self.blob:
            return f"has the git hash {found}, and the hub says {self.blob}"
        return ""


@dataclass(frozen=True)
class HubFiles:
    """The files of a commit, by path."""

    files: Mapping[str, HubFile]


def listing_of(name: HubName) -> HubFiles | None:
    """The listing of a pinned name, if the cache or this process has it."""
    key = _key(name)
    if key not in _known:
        try:
            rows = read_json(_place(name))
            _known[key] = HubFiles({row["path"]: HubFile(**row) for row in rows})
        except (OSError, ValueError, TypeError, LookupError, RecursionError):  # none, or damaged: the hub is asked
            return None
    return _known[key]


def keep(name: HubName, listing: HubFiles) -> None:
    """Keep the listing of a pinned name, on the disk too if the cache can be written."""
    _known[_key(name)] = listing
    text = json.dumps([asdict(file) for file in listing.files.values()], indent=0) + "\n"
    with suppress(OSError):  # a cache that is only read, which has all files
        make_parents(_place(name).parent)
        replace_file(_place(name), text)


def found_on_disk(name: HubName) -> HubFiles:
    """The files that the cache has of a pinned name, where nobody has kept a listing, such as after `hf download`.

    A file that huggingface_hub has downloaded is a link to a blob, whose name is the hash that the hub has said.
    """
    snapshot, files = snapshot_of(name), dict[str, HubFile]()
    for path in sorted(path for path in snapshot.rglob("*") if path.is_file()):
        digest = path.resolve().name if path.is_symlink() else ""
        inner = path.relative_to(snapshot).as_posix()
        is_hash = bool(digest) and set(digest) <= set("0123456789abcdef")
        sha256, blob = digest if is_hash and len(digest) == 64 else None, digest if len(digest) == 40 else None
        files[inner] = HubFile(inner, path.stat().st_size, sha256, blob if is_hash else None)
    return HubFiles(files)


def _key(name: HubName) -> HubName:
    return HubName(name.repo, name.is_dataset, name.revision)


def _place(name: HubName) -> Path:
    return folder_of(name) / OWN / f"{name.revision}.json"


def _git_hash(path: Path) -> str:
    """The SHA-1 by which git names a file."""
    with open_regular(path) as file:
        found = hashlib.sha1(f"blob {os.fstat(file.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()
