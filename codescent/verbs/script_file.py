"""In: the text of a script or of another new file, and the path of --out. Out: it is printed, or saved there.
Does not say what a script looks like (jobs/ does)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.stopping import STOPPING
from codescent.base.writing import make_folder
from codescent.config.given import shown


def taken(out: Path) -> Iterator[str]:
    """Why a new file cannot be saved there."""
    above = out.absolute().parent
    try:
        out.lstat()
        yield f"--out {out}: is there already; delete it, or give another name"
    except FileNotFoundError:
        if not above.is_dir():
            yield f"--out {out}: there is no folder {above}; create it, or give another name"
        elif not os.access(above, os.W_OK | os.X_OK):
            yield f"--out {out}: {above} is not writable; give another name"
    except OSError as error:  # such as a name that is too long
        yield f"--out {shown(str(out))}: {error.strerror}; give another name"


def write_new(out: Path, text: str) -> None:
    """Write a file of --out as a whole, or not at all. A signal waits. Raises UserError: it is there, or cannot be."""
    if problems := [*taken(out)]:
        raise UserError(*problems)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        replace_file(out, text)
    except OSError as error:
        raise UserError(f"--out {out}: {in_words(error)}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def give(text: str, out: Path | None, *, secret: bool) -> None:
    """Print the script, or save it: executable, or for nobody else if it has a secret."""
    if out is None:
        print(text, end="")
        return
    save(text, out, secret=secret)
    print(f"{out} is written; {'read it, then ' if os.isatty(1) else ''}start it as its first lines say")


def save(text: str, out: Path, *, secret: bool, within: Path | None = None) -> None:
    """Write a script: executable, or for nobody else if it has a secret. Raises UserError: it cannot be written.

    `within`: a folder of the user in which that of the script is made; see base/writing.py.
    """
    try:
        if within is not None:
            make_folder(out.parent, within)
        replace_file(out, text, 0o600 if secret else 0o777 if text.startswith("#!") else 0o666, within)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from error
