"""In: a number and a noun. Out: both as text, with the noun in the singular or the plural.
Does not round numbers."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """Such as "1 rank", "1,024 ranks", "2 micro-batches", "0.5 epochs"."""
    return f"{number:{'g' if isinstance(number, float) else ','}} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """The noun as it stands after the number."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith(("tch", "sh", "ss")) else "s")


def a_type(value: object) -> str:
    """The type of a value, with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
