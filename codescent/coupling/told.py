"""In: what a rank has sent to a server, and who it is. Out: nothing, or an error that names rank, host and wrong field.
Does not decide what follows from a message. A rank that has proved the token may still send nonsense: its memory may be
damaged, or it may be another release."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import RunFailed
from codescent.base.visible import one_line

MOST = 2**63
"""Whole numbers are smaller: a ticket has 63 bits."""
SHOWN_CHARS = 40


class Nonsense(RunFailed):
    """A rank has sent what no rank of this run sends. The run ends: what else it computes is wrong, too."""


@dataclass(frozen=True)
class Form:
    """What a field must be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < MOST)


def _is_pair(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_one, value))


WHOLE = Form("a whole number from 0 on", _is_whole)
POSITIVE = Form("a whole number from 1 on", lambda value: _is_whole(value, 1))
NUMBER = Form("a number", _is_number)
AMOUNT = Form("a finite number from 0 on", lambda value: _is_number(value) and math.isfinite(value) and value >= 0)
SQUARE = Form("a number that is not negative", lambda value: _is_number(value) and not value < 0)
FLAG = Form("true or false", lambda value: isinstance(value, bool))
PORTION = Form("two whole numbers from 0 on: a step and a part of it", lambda value: _is_pair(value, _is_whole))
VERSION = Form("two whole numbers", lambda value: _is_pair(value, lambda one: _is_whole(one, -1)))
MOMENT = Form("two numbers", lambda value: _is_pair(value, lambda one: _is_number(one) and math.isfinite(one)))
HOST = Form("the name of a host", lambda value: isinstance(value, str) and 0 < len(value) <= 255)
OBJECT = Form("an object of JSON", lambda value: isinstance(value, dict))

Fields = Mapping[str, Form]


def up_to(most: int, what: str) -> Form:
    """A whole number of at most `most`."""
    return Form(f"a whole number from 0 to {most}, {what}", lambda value: _is_whole(value) and value <= most)


def check(who: str, what: str, told: Mapping[str, Any], fields: Fields, optional: Fields | None = None) -> None:
    """Raise Nonsense if a field is missing, or has another form.

    Args:
        who: the rank and its host.
        what: kind of the message, such as "a push".
        told: its fields.
        fields: that it must have.
        optional: that it may have.
    """
    for name, form in {**fields, **(optional or {})}.items():
        if name not in told and name not in fields:
            continue
        if name not in told:
            raise nonsense(who, what, f"without {name}")
        if not form.holds(told[name]):
            given = repr(told[name])
            shown = f"{one_line(given[:SHOWN_CHARS])}{'...' * (len(given) > SHOWN_CHARS)}"
            raise nonsense(who, what, f"with {name} = {shown}, which is not {form.words}")


def nonsense(who: str, what: str, why: str) -> Nonsense:
    """The error for a message that makes no sense. `why`: what is wrong with it, after its name."""
    return Nonsense(
        f"{who} sent {what} {why}: look at that host (its memory, its release of codescent), then continue from the "
        "last checkpoint by `codescent train --resume`"
    )
