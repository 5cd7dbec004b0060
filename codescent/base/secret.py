"""In: names and text that others will read. Out: which password or token is in them, in words that do not show it.
Does not find every secret: those with a telling name, in an address or a header, or in the form of a known service."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

_GIVEN = r"[\"']?(?!\$|\\\$|%)[^\s\"']+"
"""A password on a command line that is no variable."""
FORMS: Mapping[str, str] = {
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{20,}",
    "a token of GitHub": r"\b(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a token of GitLab": r"\bglpat-[\w-]{16,}",
    "a key of OpenAI or Anthropic": r"(?<![\w/-])sk-(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|[A-Za-z0-9]{32,})",
    "a key of AWS": r"\bA[KS]IA[0-9A-Z]{16}\b",
    "a key of Google": r"\bAIza[\w-]{30,}",
    "a token of Slack": r"\bxox[abeprs]-[\w-]{8,}",
    "a token of npm": r"\bnpm_\w{30,}",
    "a key of wandb": r"\bwandb\s+login\s[^;&|\n]{0,80}\b[0-9a-f]{40}\b",
    "a key of NVIDIA": r"\bnvapi-[\w-]{40,}",
    "a token of Docker": r"\bdckr_pat_[\w-]{20,}",
    "a web token (JWT)": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}",
    "a password of curl": r"\bcurl\s(?:[^;&|\n]{0,200}\s)?(?:-u|--user[= ])\s*[\"']?[^\s:$\"'\\]+:" + _GIVEN,
    "a password of sshpass": r"\bsshpass\s+-p\s*" + _GIVEN,
    "a password of a registry": r"\b(?:docker|podman)\s+login\s(?:[^;&|\n]{0,80}\s)?-p\s+" + _GIVEN,
    "a password in an address": r"\w://[^/\s:@]*:(?!\$)[^/\s@]+@(?!sha256:)",
    "the value of a header": r"(?i)\bAuthorization\W+(?:Bearer|Basic|Token)\s+(?!\$)\S",
}
"""What has the form of a secret, in words, and the form. The tokens of wandb look like a commit of git."""
_OF_A_VOCABULARY = r"(?:[\w-]*?[_-])?(?:BOS|EOS|PAD|UNK|MASK|SEP|CLS|STOP)[_-]TOKEN"
NAME = (
    rf"(?!{_OF_A_VOCABULARY})[\w-]*?"
    r"(?:PASSWORD|PASSWD|PASSPHRASE|MYSQL_PWD|(?:DB|SSH|SMTP|PROXY)_?PASS|TOKEN|SECRET(?:_KEY)?|"
    r"(?:API|ACCESS|PRIVATE)[_-]?KEY)(?:_?\d+)?"
)
"""Names whose value is a secret. HF_TOKEN_PATH is none: its name goes on. Nor is eos_token, a token of a vocabulary."""
NAMED = re.compile(
    rf"(?:(?<![\w$-])(?P<name>{NAME})(?:\+?=|:\s+)|(?<!\S)--?(?P<option>{NAME})(?:=|[ \t]+))"
    r"[\"']?(?:\$\{\w+:?[-=][\"']?)?"
    r"(?![-$`(<\[{}]|\\\$|%\w+%|\*{3}|x{3,}\b|~/|id=|\d{1,7}\b|(?:true|false|yes|no|none|null|auto|stdin)\b)"
    r"[^\s\"',;]{4,}",
    re.IGNORECASE | re.ASCII,
)
"""A name with a value that is no variable, file, number, switch or gap such as {{ }}, and no token such as <pad>.
The value may be what a shell takes where a variable is not set: ${X:-value}."""
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
"""The user, and perhaps a password, of an address: to the last @, as a password may have one."""


def is_secret_name(name: str) -> bool:
    """Whether a key or a variable has the name of a secret."""
    return re.fullmatch(NAME, name, re.IGNORECASE | re.ASCII) is not None


def secret_in(text: str) -> str:
    """The name or the form of the first secret in a text; empty: there is none."""
    if found := NAMED.search(text):
        return f"the value of {(found['name'] or found['option']).lstrip('-')}"
    return next((what for what, form in FORMS.items() if re.search(form, text)), "")


def warnings(values: Iterable[tuple[str, str]], readers: str) -> Iterator[str]:
    """A sentence for each value with a secret. It does not show the secret.

    Args:
        values: where each value stands, and the value.
        readers: what others will read, such as "scripts are".
    """
    for where, value in values:
        if what := secret_in(value):
            yield (
                f"warning: {where}: {what} looks like a secret, and {readers} read by others: leave it out, and "
                "export a variable where you start the command"
            )


def without_user(text: str) -> str:
    """The text; addresses in it have no user and no password."""
    return _USER.sub("", text)
