"""In: a name of a hub. Out: its commit with a listing of the files, or one file of it in the cache.
Does not decide which files are needed (needed.py does). Only this file and errors.py send requests."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from huggingface_hub import DatasetInfo, HfApi, ModelInfo, constants, hf_hub_download
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

from codescent import __version__
from codescent.base.early import raise_if_asked
from codescent.base.hub_name import HubName, is_inside
from codescent.base.messages import shows_progress
from codescent.hub.errors import explained
from codescent.hub.listing import HubFile, HubFiles

TIMEOUT_S = 30.0
"""For the answer about a repository; a data set may have many thousands of files."""


class StoppableBar(tqdm):
    """A bar at which a download ends where the run is asked to stop before it begins."""

    def update(self, n: float | None = 1) -> bool | None:
        """As tqdm's. Raises StopAsked: see base/early.py."""
        raise_if_asked()
        shown: bool | None = super().update(n)
        return shown


def ask(name: HubName) -> tuple[str, HubFiles]:
    """The commit of a name now, and its files. Raises UserError: the hub cannot be reached, or lacks it."""
    _quiet()
    with explained(name):
        api = HfApi(endpoint=constants.ENDPOINT, library_name="codescent", library_version=__version__)
        info = api.repo_info(
            name.repo, repo_type=name.kind, revision=name.revision, files_metadata=True, timeout=TIMEOUT_S
        )
        if not isinstance(info, ModelInfo | DatasetInfo) or info.sha is None:
            raise ValueError("it names no commit")
        held = (one for one in info.siblings or () if is_inside(one.rfilename))  # no file of the cache lies elsewhere
        return info.sha, HubFiles({one.rfilename: _file_of(one) for one in held})


def _file_of(one: RepoSibling) -> HubFile:
    if one.lfs is None:
        return HubFile(one.rfilename, one.size or 0, None, one.blob_id)
    return HubFile(one.rfilename, one.lfs.size, one.lfs.sha256, one.blob_id)


def _quiet() -> None:
    """No bars in a log, and no line for each retry: an error says what is wrong once."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not (sys.stderr.isatty() and shows_progress()):
        disable_progress_bars()


def download(name: HubName, file: HubFile) -> Path:
    """The path of a file of a pinned name in the cache; it is downloaded if the cache lacks it.

    Where a connection breaks, the download goes on at the byte where it ended. A file is whole or not there. Processes
    that want the same file wait for the one that downloads it.

    Args:
        name: pinned.
        file: of its listing.

    Raises:
        UserError: the hub cannot be reached or refuses, or the disk is full.
        StopAsked: the run was asked to stop (base/early.py).
    """
    _quiet()
    with explained(name, file.path):
        found = hf_hub_download(
            name.repo,
            file.path,
            repo_type=name.kind,
            revision=name.revision,
            endpoint=constants.ENDPOINT,
            library_name="codescent",
            library_version=__version__,
            tqdm_class=StoppableBar,
        )
    return Path(found)
