"""In: a word of a command line. Out: its value, or argparse's error; the parser, which refuses an option given twice.
Does not know the subcommands (arguments.py does)."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from codescent.base.home import expanded, unknown_home
from codescent.base.hub_name import is_hub_name, parse_model
from codescent.base.visible import one_line
from codescent.launch.once import say_once

LONG = re.compile(r"\S{200,}")
SHOWN_CHARS = 60
"""So much of a LONG word is shown in a message."""
INSTEAD_OF_BOTH = "; give one of them"
MOST_PORT = 65_535
MOST_DIGITS = 18
"""Of a whole number: no option needs more, and Python reads no more than some thousands."""


def positive(word: str) -> int:
    """A whole number of at least 1."""
    return _whole(word, 1)


def nodes(word: str) -> tuple[int, int]:
    """A number of nodes, or the least and the most of them."""
    least, colon, most = word.partition(":")
    try:
        found = positive(least), positive(most if colon else least)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; write N, or the least and the most, such as 2:4") from error
    if found[0] > found[1]:
        right = f"write {found[1]}:{found[0]}"
        raise argparse.ArgumentTypeError(f"{word!r}: the first number must not be above the second one; {right}")
    return found


def whole(word: str) -> int:
    """A whole number of at least 0."""
    return _whole(word, 0)


def _whole(word: str, least: int) -> int:
    if not (word.isdecimal() and len(word) <= MOST_DIGITS and int(word) >= least):
        most = f" of at most {MOST_DIGITS} digits" if len(word) > MOST_DIGITS and word.isdecimal() else ""
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}{most}, such as 4")
    return int(word)


def port(word: str) -> int:
    """The number of a port; 0: a free one."""
    number = _whole(word, 0)
    if number > MOST_PORT:
        raise argparse.ArgumentTypeError(f"{word!r} is no port: at most {MOST_PORT}")
    return number


def amount(word: str) -> float:
    """A finite number above 0."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return number


def not_negative(word: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of at least 0, such as 0.5")
    return number


def numbers(word: str) -> list[int]:
    """Whole numbers of at least 1, with commas between them."""
    return [positive(part.strip()) for part in word.split(",")]


def names(word: str) -> list[str]:
    """Words with commas between them."""
    return [text(part.strip()) for part in word.split(",")]


def text(word: str) -> str:
    """A word that is not empty."""
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty")
    return word


class GrammarWord(NamedTuple):
    """A grammar as a command line names it: its kind, and its text or the file that has it."""

    kind: Literal["json", "json_schema", "regex", "lark"]
    value: str
    is_file: bool


def grammar(word: str) -> GrammarWord:
    """What a generated text must be."""
    name, _, value = word.partition("=")
    if word == "json":
        return GrammarWord("json", "", is_file=False)
    if name == "regex" and value:
        return GrammarWord("regex", value, is_file=False)
    if name in ("json_schema", "lark") and value:
        return GrammarWord("lark" if name == "lark" else "json_schema", str(path(value)), is_file=True)
    raise argparse.ArgumentTypeError(f"{word!r} is none of json, json_schema=FILE, regex=EXPRESSION, lark=FILE")


def token_bias(word: str) -> tuple[int, float]:
    """A token's id, and what is added to its logit."""
    token, _, bias = word.partition("=")
    try:
        return whole(token), float(bias)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"{word!r} is no ID=BIAS, such as 50256=-inf") from error


def stop_text(word: str) -> str:
    """A text that ends what is generated; white space, such as a line end, may be one."""
    if not word:
        raise argparse.ArgumentTypeError("is empty, and would end every text")
    return word


def path(word: str) -> Path:
    """A path; ~ is a home folder."""
    if problem := unknown_home(text(word)):
        raise argparse.ArgumentTypeError(f"{word}: {problem}")
    return expanded(word)


def path_or_hub(word: str) -> Path | str:
    """A path, or a name of a hub such as hf://Qwen/Qwen3-0.6B, as a string."""
    if not is_hub_name(word):
        return path(word)
    try:
        return str(parse_model(word))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word}: {error}") from error


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses abbreviated options: an option of a later version could make them ambiguous. It
    also refuses an option that is given twice, unless its action is "append".

    Its error messages are one line, in which control characters are shown as text and long words are shortened.
    """

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **{"allow_abbrev": False, **named})
        for name, action in ((None, _Once), ("store", _Once), ("store_true", _OnceTrue)):
            self.register("action", name, action)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        both = INSTEAD_OF_BOTH if ": not allowed with argument" in message else ""
        said = one_line(LONG.sub(lambda found: f"{found[0][:SHOWN_CHARS]}...", message)) + both
        with suppress(OSError):  # the standard error is closed
            say_once([*self.format_usage().splitlines(), f"{self.prog}: error: {said}"], os.environ)
        sys.exit(2)

    def needs(self, argument: str) -> bool:
        """Whether an argument without a dash must be given."""
        return any(action.required for action in self._get_positional_actions() if action.dest == argument)

    def near(self, word: str) -> str:
        """The option that begins with a word, or is most like it; empty: none is."""
        options = list(self._option_string_actions)
        if len(longer := [option for option in options if word.startswith("--") and option.startswith(word)]) == 1:
            return longer[0]
        return next(iter(difflib.get_close_matches(word, options, n=1, cutoff=0.7)), "")


class _Once(argparse.Action):
    """Stores the value of an argument. An option that is given twice is an error: one of its values would be lost."""

    given = False

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        if self.given and option is not None:
            parser.error(f"{'/'.join(self.option_strings)}: given twice; give it once")
        self.given = True
        setattr(namespace, self.dest, self.const if self.nargs == 0 else value)


class _OnceTrue(_Once):
    """A flag: stores True, or its `const`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **named: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **{"const": True, **named})
