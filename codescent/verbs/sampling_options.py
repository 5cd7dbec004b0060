"""In: options of a command that generates text. Out: `Sampling`, how its tokens are chosen; problems by option's name.
Does not parse the command line (arguments.py does) or generate."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.reading import read_text
from codescent.inference.engine import Engine
from codescent.inference.grammar import MOST_GRAMMAR_BYTES, Grammar, refuse
from codescent.inference.request import Sampling
from codescent.tasks.conversations.messages import HALF, half_a_character
from codescent.verbs.argument_types import GrammarWord

CHOICES = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "logit_bias", "grammar")
"""Options that say how tokens are chosen, by their names in a namespace."""
_OPTIONS = {"max_new_tokens": "tokens"}
"""Where an option has another name than the attribute of `Sampling`."""


def choices_of(arguments: Namespace) -> dict[str, Any]:
    """The values of CHOICES as `Sampling` takes them. Takes them out of the namespace.

    Raises UserError: all problems of stop texts, biases and the grammar that a command line alone can have.
    """
    given = {name: vars(arguments).pop(name) for name in CHOICES}
    problems, grammar, bias = list(_of_stops(given["stop"])), None, dict[int, float]()
    for token, value in given["logit_bias"]:
        if token in bias:
            problems.append(f"--logit-bias: token {token} is given twice")
        bias[token] = value
    try:
        grammar = None if given["grammar"] is None else _grammar(given["grammar"])
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    return given | {"stop": tuple(given["stop"]), "logit_bias": bias, "grammar": grammar}


def problems_of(sampling: Sampling) -> Iterator[str]:
    """The problems of a `Sampling`, each as one of the option that set it."""
    for problem in sampling.problems():
        yield _as_option(problem)


def refuse_as_options(engine: Engine, sampling: Sampling) -> None:
    """Raise UserError: what this engine cannot do, each as a problem of the option that set it."""
    try:
        engine.prepare(sampling)
    except UserError as error:
        raise UserError(*map(_as_option, error.problems)) from error


def _as_option(problem: str) -> str:
    """A problem of a request, whose first word names an attribute, as one of the option that set it."""
    words = re.match(r"\w+", problem)
    name = "" if words is None else words[0]
    return f"--{_OPTIONS.get(name, name).replace('_', '-')}{problem.removeprefix(name)}"


def _of_stops(stops: Sequence[str]) -> Iterator[str]:
    for stop in stops:
        if half_a_character(stop):
            yield f"--stop {stop!r}: {HALF}, or bytes that are not UTF-8"


def _grammar(word: GrammarWord) -> Grammar:
    """Raises UserError: its file cannot be read, or it is no grammar."""
    text = word.value
    if word.is_file:
        try:
            text = read_text(word.value, MOST_GRAMMAR_BYTES)
        except UnicodeDecodeError as error:
            raise UserError(f"--grammar {word.value}: not UTF-8 text") from error
        except OSError as error:
            raise UserError(f"--grammar {word.value}: {in_words(error)}") from error
    grammar = Grammar(word.kind, text)
    try:
        refuse(grammar)
    except UserError as error:
        raise UserError(*(f"--{problem}" for problem in error.problems)) from error
    return grammar
