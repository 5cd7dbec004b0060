"""In: the environment, this user's home. Out: the secret that the ranks of a run share, and a key made of it.
Does not send it: ranks prove that they know it, by HMAC (train/store)."""

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

TOKEN = "CODESCENT_TOKEN"
FILE = "~/.codescent/token"
"""Where no launcher hands a token down: on machines with a common home folder every rank finds the same one."""


def fresh() -> str:
    """A new token."""
    return secrets.token_hex(32)


def key_of(env: Mapping[str, str], run: str) -> bytes:
    """The key of one run: ranks with the same token and the same `run` have the same.

    Raises:
        UserError: there is no token, and the file cannot be made; or others may read it.
    """
    token = env.get(TOKEN, "").strip() or _of_this_user()
    return hmac.digest(token.encode(), f"codescent {run}".encode(), hashlib.sha256)


def _of_this_user() -> str:
    path = Path(FILE).expanduser()
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(f"{path}: others may read this secret: chmod 600 {path}, or export {TOKEN}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{FILE}: the secret by which ranks know each other cannot be kept there ({error}): export {TOKEN}, any "
            "text that is hard to guess, for every rank"
        ) from error
    if not token:
        raise UserError(f"{path}: is empty: delete it to have a new one")
    return token


def _make(path: Path) -> None:
    """Ranks that begin together make one file: it appears whole, and the first one stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}_{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(fresh() + "\n")
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()
