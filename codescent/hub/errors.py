"""In: an error of huggingface_hub, the name that was asked for. Out: a UserError: what is wrong, and what to do.
Does not ask a hub, except for names that are near a wrong one."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from codescent.base.command import command
from codescent.base.early import StopAsked
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName
from codescent.base.published import in_words, is_full
from codescent.base.secret import without_user
from codescent.hub.cache import root

HTTP_ERRORS: tuple[type[BaseException], ...] = (HfHubHTTPError.__bases__[0], OSError)
"""What huggingface_hub raises: errors of its library for HTTP, whose name differs between versions, and of files."""
MOST_NAMES = 500
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO}


@contextmanager
def explained(name: HubName, what: str = "") -> Iterator[None]:
    """Turn errors of huggingface_hub into UserErrors. `what`: the file that is asked for."""
    try:
        yield
    except (UserError, StopAsked):
        raise
    except Exception as error:  # an address, a proxy or a token that is none, or an answer that is not of a hub
        raise UserError(without_user(_in_words(name, what, error))) from error  # HF_ENDPOINT may have a password


def not_in_cache(name: HubName, what: str = "") -> UserError:
    """The error for what the cache lacks while the user forbids requests."""
    file = f"{what} of it " if what else ""
    return UserError(
        f"{name}: HF_HUB_OFFLINE is set, and {file or 'it '}is not in the cache {root()}; on a machine with internet "
        f"run: {command('fetch', str(name))} (with the same HF_HOME, or copy that folder here)"
    )


def _in_words(name: HubName, what: str, error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    page = f"{constants.ENDPOINT}/{'datasets/' * name.is_dataset}{name.repo}"
    if isinstance(cause, GatedRepoError):
        return (
            f"{name}: is gated: accept its terms at {page}, and give a token of your account: export HF_TOKEN=..., or "
            "`hf auth login`"
        )
    if isinstance(cause, RepositoryNotFoundError):
        near = _near(name.repo, lambda api: _repositories(api, name))
        return (
            f"{name}: {constants.ENDPOINT} has no such {name.kind}, or it is private: then give a token that may read "
            f"it (HF_TOKEN){near}"
        )
    if isinstance(cause, RevisionNotFoundError):
        near = _near(name.revision, lambda api: _revisions(api, name))
        return f"{name}: {page} has no revision {name.revision}; give a branch, a tag or a commit{near}"
    if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
        return f"{name}: has no file {what}; its files: {page}/tree/{name.revision}"
    if isinstance(cause, HfHubHTTPError) and cause.response is not None:
        said = cause.server_message or cause.response.reason_phrase
        status = cause.response.status_code
        then = "give a token that may read it (HF_TOKEN)" if status in (401, 403) else "try again later"
        return f"{name}: {constants.ENDPOINT} answers {status} ({said}); {then}"
    if isinstance(cause, OSError) and cause.errno in _OF_DISK:
        more = "; free some space, or set HF_HOME to another disk" if is_full(cause) else "; set HF_HOME elsewhere"
        return f"{name}: {root()}: cannot be written: {in_words(cause)}{more}"
    if not isinstance(cause, HTTP_ERRORS):
        return (
            f"{name}: {constants.ENDPOINT} cannot be asked, or it is no hub: a page or a proxy may answer instead "
            f"({type(cause).__name__}: {brief(cause)}); check HF_ENDPOINT, HTTPS_PROXY and HF_TOKEN"
        )
    return (
        f"{name}: {constants.ENDPOINT} cannot be reached ({brief(cause)}); check the network, or HF_ENDPOINT and "
        f"HTTPS_PROXY; without internet run on a machine that has it: {command('fetch', str(name))}, and set "
        f"HF_HUB_OFFLINE=1 and its HF_HOME here"
    )


def brief(error: BaseException) -> str:
    """The first line of an error, without the number that Python puts before it."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\[Errno -?\d+\] ", "", first)[:200]


def _near(wanted: str, names: Callable[[HfApi], list[str]]) -> str:
    """A clause with the nearest name that the hub has; "": there is none, or the hub does not say. Repositories are of
    one owner, so what is before their / is alike."""
    with suppress(Exception):
        known = {name.rpartition("/")[2].lower(): name for name in names(HfApi(endpoint=constants.ENDPOINT))}
        found = difflib.get_close_matches(wanted.rpartition("/")[2].lower(), known, n=1, cutoff=0.6)
        return f"; did you mean {known[found[0]]}?" if found else ""
    return ""


def _repositories(api: HfApi, name: HubName) -> list[str]:
    """Repositories of the same owner."""
    owner = name.repo.partition("/")[0]
    listed = api.list_datasets if name.is_dataset else api.list_models
    return [one.id for one in listed(author=owner, limit=MOST_NAMES)]


def _revisions(api: HfApi, name: HubName) -> list[str]:
    """Branches and tags of the repository."""
    refs = api.list_repo_refs(name.repo, repo_type=name.kind)
    return [ref.name for ref in (*refs.branches, *refs.tags)]
