"""In: the name of a run; a secret text from CODESCENT_TOKEN, or else from the user's file ~/.codescent/token.
Out: the secret key of the run, which is the same on every rank. A missing file is created.
Does not send text or key over the network: ranks prove by HMAC that they know the key (transport/authenticate.py)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.reading import read_text

TOKEN = "CODESCENT_TOKEN"
FILE = "~/.codescent/token"
"""The token file, used if no launcher sets TOKEN. Machines need a shared home folder to find the same file."""


MOST_BYTES = 1 << 16
"""The longest secret."""


def fresh() -> str:
    """A new random token."""
    return secrets.token_hex(32)


def key_of(env: Mapping[str, str], run: str) -> bytes:
    """The key of a run. Ranks with the same token and the same `run` compute the same key.

    Raises:
        UserError: there is no token and the file cannot be written; or other users may read the file.
    """
    token = env.get(TOKEN, "").strip() or secret_of(
        Path(FILE), f"{FILE}: the secret of the ranks", f"export {TOKEN} for every rank: any text that is hard to guess"
    )
    return hmac.digest(os.fsencode(token), os.fsencode(f"codescent {run}"), hashlib.sha256)


def secret_of(path: Path, what: str, instead: str) -> str:
    """The secret text in a file that only this user may read; a missing file gets a new one.

    `what`, `instead`: for messages: what the file is for, and what would do in its place.
    Raises UserError: the file cannot be read or made, others may read it, or it is empty.
    """
    try:
        path = path.expanduser()
        if not path.exists():
            _make(path)
        token = read_text(path, MOST_BYTES).strip()
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(f"{path}: other users may read this secret: chmod 600 {path}, or {instead}")
        token.encode("ascii")
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        why = "is no text of ASCII" if isinstance(error, UnicodeError) else why
        raise UserError(f"{what} cannot be stored there ({why}): {instead}") from error
    if not token:
        raise UserError(f"{path}: is empty: delete it, and a new one is written")
    return token


def _make(path: Path) -> None:
    """Create the token file atomically. If several ranks create it at once, the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}_{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(fresh() + "\n")
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()
