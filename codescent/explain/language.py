"""In: the code of a language. Out: the sentences of the lessons in it, from the message files of gettext.
Does not translate terms of torch, keys, commands, numbers or units: they are alike in every language."""

from __future__ import annotations

import difflib
import gettext
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import UserError

DOMAIN = "codescent"
FOLDER = Path(__file__).with_name("languages")
SOURCE = "en"
"""The language of the code: its sentences are the names of the messages."""


@dataclass(frozen=True)
class Language:
    """Says sentences in one language.

    Attributes:
        code: such as "es".
    """

    code: str
    messages: gettext.NullTranslations

    def __call__(self, sentence: str, **values: object) -> str:
        """The sentence in this language, with its values. A sentence is a literal: the message files have it."""
        return self.messages.gettext(sentence).format(**values)

    def told(self, sentence: str, **values: object) -> str:
        """The same for a sentence of another room, which names it by `message` (study/marks.py)."""
        return self(sentence, **values)

    def many(self, one: str, several: str, number: int, **values: object) -> str:
        """`one` or `several`, as the language says this number. It has {number}."""
        return self.messages.ngettext(one, several, number).format(number=f"{number:,}", **values)


def languages() -> tuple[str, ...]:
    """The codes of all languages, that of the code first."""
    found = sorted(path.parents[1].name for path in FOLDER.glob(f"*/LC_MESSAGES/{DOMAIN}.mo"))
    return (SOURCE, *found)


def language(code: str) -> Language:
    """The language with this code. Raises UserError: there is none."""
    if code == SOURCE:
        return Language(code, gettext.NullTranslations())
    if code not in languages():
        near = difflib.get_close_matches(code, languages(), n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(languages())}"
        raise UserError(f"--lang {code}: no such language; {meant}")
    return Language(code, gettext.translation(DOMAIN, FOLDER, [code]))
