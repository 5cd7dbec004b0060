"""In: values of a site file. Out: why a value looks like a password or a token, without showing it.
Does not find every secret: those with a telling name, in an address, or in the form of a known service."""

from __future__ import annotations

import re

NAME = r"\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY)"
"""Names whose value is a secret. HF_TOKEN_PATH is none: its name goes on."""
VALUE = r"[\"']?(?![$`\s\"']|\d+\b)."
"""Begin of a value that is not that of a variable, and not a number."""
NAMED = re.compile(rf"(?:(?<![\w$-])({NAME})=|--?(?:\w+-)*({NAME})[=\s]+){VALUE}", re.IGNORECASE | re.ASCII)
IN_ADDRESS = re.compile(r"\w://[^/\s:@]+:(?!\$)[^/\s@]+@")
KNOWN = re.compile(
    r"\b(?:hf_\w{20,}|gh[opsu]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{16,})"
)

INSTEAD = (
    "looks like a secret, and scripts and site files are read by many: name a variable of your environment instead"
)


def secret_key(name: str) -> bool:
    """Whether a key has the name of a secret."""
    return re.fullmatch(NAME, name, re.IGNORECASE | re.ASCII) is not None


def secret_in(value: object) -> str:
    """A sentence if there is a secret in a value, or in a list of strings; empty: there is none."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if found := NAMED.search(text):
        name = found[1] or found[2]
        return f'the value of {name} {INSTEAD}, such as "${name.upper().replace("-", "_")}"'
    if IN_ADDRESS.search(text):
        return f"the password in an address {INSTEAD}"
    if known := KNOWN.search(text):
        return f"{known[0][:4]}... {INSTEAD}"
    return ""
