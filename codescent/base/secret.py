"""In: names and text that others will read. Out: whether a password or a token is in them, and of what, not shown.
Does not find every secret: those with a telling name, in an address or a header, or in the form of a known service."""

from __future__ import annotations

import re
from dataclasses import dataclass

PASSWORD = r"(?:\w*(?:PASSWORD|PASSWD|PASSPHRASE)|(?:\w+_)?PASS|\w+_PWD)"
NAME = (
    rf"(?:{PASSWORD}|\w*(?:TOKEN|SECRET(?:_KEY)?|CREDENTIALS?|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY))"
    r"(?:_VALUE)?(?:_?\d+)?"
)
"""Names whose value is a secret. HF_TOKEN_PATH is none: its name goes on. Nor are PWD and OLDPWD of the shell."""
LITERAL = (
    r"(?![\s\"']|\$\w|\$\{!?\w+(?!\w|:?[-=][\"']?[^\"'$}])|(?:\$\(|`)(?!\s*(?:echo|printf)\s))"
    r"(?!(?:\$\(|`)\s*(?:echo|printf)\s+(?:-\w+\s+|[\"']?%s(?:\\n)?[\"']?\s+)*[\"']?\$)"
)
"""Not the begin of a variable, such as $TOKEN, and not a command that reads one, such as $(cat FILE).

${TOKEN:-text} and $(echo text) have the text in them, and $'text' is text.
"""
FLAGS = re.IGNORECASE | re.ASCII
NAMED = re.compile(
    rf"(?:(?<![\w$-])(?P<variable>{NAME})\+?=|(?<!\S)--?(?P<option>(?:\w+-)*{NAME})(?:=|[ \t]+(?!-)))"
    rf"[\"']?{LITERAL}(?P<value>[^\s\"',;]+|.)",
    FLAGS,
)
HEADER = re.compile(
    rf"Authorization\W+(?:Bearer|Basic|Token)\s+{LITERAL}\S|(?:-H|--header)[\s=]*[\"']?[\w-]*{NAME}\s*:\s*{LITERAL}\S",
    FLAGS,
)
OF_USER = re.compile(
    rf"\b(?:curl|wget)\b.*?\s(?:-\w*u|--user|--proxy-user)[\s=]*[\"']?(?!\d+:\d+\b)[^\s:\"'$]+:{LITERAL}\S", FLAGS
)
"""Not the numbers of a user and a group, as docker has them in a later command of the line."""
IN_ADDRESS = re.compile(rf"\w://[^/\s:@]*:{LITERAL}[^/\s@]+@|https?://(?![a-z._-]{{1,16}}@){LITERAL}[^/\s:@]+@")
"""A password, or a token in the place of a user's name."""
KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|(?<!/)sk-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{8,}|npm_\w{30,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,})"
)
LOGIN = re.compile(r"\bwandb\b.*\blogin\b[^;&|]*\b[0-9a-f]{40}\b")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
"""The user, and perhaps a password, of an address: to the last @, as a password may have one."""
SWITCHES = ("true", "false", "yes", "no", "none")
"""Values with which a name says only whether there is a secret."""
OF_DATA = re.compile(
    r"(?:[\w-]*[_-])?(?:(?:bos|eos|pad|unk|sep|cls|mask|image|special)[_-]token"
    r"|(?:first|second|last|num|n|multi|single|train|eval|forward|backward)[_-]pass)",
    FLAGS,
)
"""Names of tokens that a tokenizer adds to a text, and of passes over data."""
SHORT = 3
"""A number of so few digits is a count, also behind a name such as --pass."""


@dataclass(frozen=True)
class Secret:
    """What a text has: words for it, and a name for a variable instead of it; empty: none is known."""

    what: str
    variable: str = ""


def is_secret_name(name: str) -> bool:
    """Whether a key or a variable has the name of a secret."""
    return re.fullmatch(NAME, name, FLAGS) is not None


def secret_of(text: str) -> Secret | None:
    """The first secret in a text; None: there is none."""
    for found in NAMED.finditer(text):
        name = found["variable"] or found["option"]
        if _counts(name, found["value"]):
            return Secret(f"the value of {name}", name.upper().replace("-", "_"))
    if HEADER.search(text):
        return Secret("the value of a header")
    if OF_USER.search(text):
        return Secret("the password of a user")
    if IN_ADDRESS.search(text):
        return Secret("the password in an address")
    if LOGIN.search(text):
        return Secret("the key of wandb login", "WANDB_API_KEY")
    known = KNOWN.search(text)
    return None if known is None else Secret(f"{known[0][:4]}...")


def without_user(text: str) -> str:
    """The text; addresses in it have no user and no password."""
    return _USER.sub("", text)


def _counts(name: str, value: str) -> bool:
    """Whether the value of such a name is a secret: not a switch, a number, a thing of the data, or a path."""
    if value.lower() in SWITCHES or OF_DATA.fullmatch(name) or value.startswith(("<", "[")):
        return False
    if value.isdecimal():
        return len(value) > SHORT and re.search(rf"(?:^|-){PASSWORD}", name, FLAGS) is not None
    is_place = re.search(r"(?:PWD|CREDENTIALS?)$", name, FLAGS) is not None
    return not (is_place and (value.startswith(("/", "~", "./", "..")) or value.endswith(".json")))
