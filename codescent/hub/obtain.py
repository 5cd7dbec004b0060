"""In: a name of a hub. Out: the name at a commit; its files in the cache, downloaded and verified.
Does not know the keys of a config (huggingface/named.py does) and prints nothing but the start of a download."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from codescent.base.amounts import of_bytes
from codescent.base.command import command
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName
from codescent.base.output import note, warn
from codescent.base.published import NO_SPACE
from codescent.base.writing import make_parents, remove_file
from codescent.hub.cache import folder_of, hub_shown, is_offline, known_commit, note_commit, root, snapshot_of
from codescent.hub.listing import HubFile, HubFiles, found_on_disk, keep, listing_of
from codescent.hub.once import once

Choice = Callable[[HubName, HubFiles], list[HubFile]]
"""Which files of a repository are needed: see needed.py."""


WORTH_A_LINE_BYTES = 1 << 20
"""Less is downloaded without a word."""


@dataclass(frozen=True)
class CachedFiles:
    """Files of a name.

    Attributes:
        name: pinned.
        folder: of the cache, with all files of the commit that the cache has.
        files: that are needed.
        missing: those that the cache lacks.
    """

    name: HubName
    folder: Path
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


def pinned(name: HubName) -> HubName:
    """The name at the commit that its branch or tag has now. A name that is pinned stays as it is.

    Processes that start together ask once. With HF_HUB_OFFLINE the commit is the one that the cache knows.

    Raises:
        UserError: the hub cannot be reached, or lacks it; offline: the cache lacks it.
    """
    if name.is_pinned:
        return name
    if is_offline():
        if (known := known_commit(name)) is None:
            raise _not_in_cache(name)
        return name.at(known)

    from codescent.hub.client import ask  # noqa: PLC0415 - see _not_in_cache

    def look() -> str:
        commit, listing = ask(name)
        keep(name.at(commit), listing)
        with suppress(OSError):  # a cache that is only read
            note_commit(name, commit)
        return commit

    bare = HubName(name.repo, name.is_dataset, name.revision)
    return name.at(str(once(_question("commit", bare), look)))


def listed(name: HubName) -> HubFiles:
    """The files of a pinned name. Raises UserError: see `pinned`."""
    if (known := listing_of(name)) is not None:
        return known
    if is_offline():
        found = found_on_disk(name)
        if not found.files:
            raise _not_in_cache(name)
        return found

    from codescent.hub.client import ask  # noqa: PLC0415 - see _not_in_cache

    def look() -> None:
        keep(name, ask(name)[1])

    once(_question("files", name), look)
    known = listing_of(name)
    if known is None:  # another process has asked, and the cache cannot be written
        look()
        known = listing_of(name)
    assert known is not None
    return known


def _question(what: str, name: HubName) -> str:
    """For `once`."""
    return f"{what} of {name} at {hub_shown()} for {root()}"


def held(name: HubName, choose: Choice) -> CachedFiles:
    """What the cache has of the files that are needed of a pinned name.

    Raises UserError: see `pinned` and `choose`; offline: files are missing, and no listing says which.
    """
    try:
        files = tuple(choose(name, listed(name)))
    except UserError as error:
        if is_offline() and listing_of(name) is None:  # what is there is all that is known
            raise _not_in_cache(name) from error
        raise
    folder = snapshot_of(name)
    return CachedFiles(name, folder, files, tuple(file for file in files if not (folder / file.path).exists()))


def obtain(name: HubName, choose: Choice) -> CachedFiles:
    """Download what the cache lacks of a pinned name, and verify it.

    Raises:
        UserError: the hub cannot be reached or refuses; the disk is full; a file has another size or hash than the hub
            says; offline: the cache lacks a file.
    """
    found = held(name, choose)
    _refuse_cut(found)
    if not found.missing:
        return found
    if is_offline():
        raise _not_in_cache(name, found.missing[0].path)
    _refuse_full(found)
    size_bytes = sum(file.size_bytes for file in found.missing)
    if size_bytes > WORTH_A_LINE_BYTES:
        note(f"downloading {name}: {counted(len(found.missing), 'file')}, {of_bytes(size_bytes)}, to {root()}")
    for file in found.missing:
        _download(name, file)
    return CachedFiles(name, found.folder, found.files, ())


def repair(name: HubName, choose: Choice) -> CachedFiles:
    """As `obtain`. It also reads the files that are in the cache already, and downloads those that are damaged again.

    Raises UserError: as `obtain`; offline: a file is damaged.
    """
    before = held(name, choose)
    for file in before.files:
        path = before.folder / file.path
        if file in before.missing or not (why := file.differs(path)):
            continue
        if is_offline():
            raise _damaged(name, file, path, why)
        warn(f"{path}: {why}: it is downloaded again")
        _forget(path)
    return obtain(name, choose)


def _download(name: HubName, file: HubFile) -> None:
    from codescent.hub.client import download  # noqa: PLC0415 - see _not_in_cache

    path = download(name, file)
    if why := file.differs(path):
        _forget(path)
        raise UserError(
            f"{name}: {file.path} was downloaded, but {why}: it was deleted again; try once more, and if it stays so, "
            f"{hub_shown()} or a proxy changes files"
        )


def _not_in_cache(name: HubName, what: str = "") -> UserError:
    """See errors.py. It loads huggingface_hub, which takes 0.3 s: commands without names of a hub do without."""
    from codescent.hub.errors import not_in_cache  # noqa: PLC0415

    return not_in_cache(name, what)


def _refuse_cut(found: CachedFiles) -> None:
    """Raise UserError if a file of the cache does not have the size that the hub has said."""
    there = ((file, found.folder / file.path) for file in found.files if file not in found.missing)
    for file, path in there:
        if (size_bytes := path.stat().st_size) != file.size_bytes:
            why = f"has {size_bytes:,} bytes, and the hub says {file.size_bytes:,}"
            raise _damaged(found.name, file, path, why)


def _damaged(name: HubName, file: HubFile, path: Path, why: str) -> UserError:
    return UserError(
        f"{name}: the copy of {file.path} in the cache is damaged: {path} {why}; download it again: "
        f"{command('fetch', str(name))}"
    )


def _refuse_full(found: CachedFiles) -> None:
    """Raise UserError if the disk of the cache has no room for what is missing."""
    folder = folder_of(found.name)
    blobs = folder / "blobs"  # of any commit: what is there is linked
    needs = sum(one.size_bytes for one in found.missing if not (blobs / (one.sha256 or one.blob or ".")).is_file())
    try:
        make_parents(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(
            f"{found.name}: {folder}: cannot be written: {error.strerror}; set HF_HOME to a folder of yours"
        ) from error
    if free < needs:
        raise UserError(
            f"{found.name}: {NO_SPACE}: its files need {needs:,} bytes, and {root()} has {free:,} free; free some, or "
            "set HF_HOME to another disk"
        )


def _forget(path: Path) -> None:
    """Delete a file of the cache: the link in the snapshot, and the blob that it leads to."""
    blob = path.resolve()
    remove_file(path, missing_ok=True)
    if blob != path:
        remove_file(blob, missing_ok=True)
