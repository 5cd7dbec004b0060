"""In: values of a site file, words for a script. Out: a sentence where one looks like a password or a token.
Does not show it. What looks like one: base/secret.py."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.secret import is_secret_name as secret_key
from codescent.base.secret import secret_of

__all__ = ["secret_in", "secret_in_words", "secret_key"]

INSTEAD = (
    "looks like a secret, and scripts and site files are read by many: name a variable of your environment instead"
)


def secret_in(value: object, *, are_words: bool = False) -> str:
    """A sentence if there is a secret in a value, or in a list of strings; empty: there is none.

    `are_words`: the strings are words of one command, not lines.
    """
    between = " " if are_words else "\n"
    found = secret_of(between.join(map(str, value)) if isinstance(value, list) else str(value))
    if found is None:
        return ""
    return f"{found.what} {INSTEAD}" + (f', such as "${found.variable}"' if found.variable else "")


def secret_in_words(words: Sequence[str]) -> str:
    """A sentence if there is a secret in the words of an own script, which no shell expands; empty: there is none."""
    if (found := secret_of(" ".join(words))) is None:
        return ""
    name = found.variable or "TOKEN"
    return (
        f"{found.what} looks like a secret, and the script for the scheduler is read by many: leave it out, "
        f'export {name}, and let your script read it: os.environ["{name}"]'
    )
