"""In: what a reader must know about a point or a repeat. Out: a mark: a kind with its values, in English as text.
Does not find marks (evaluate.py, repeat.py and opened.py do) and does not translate (explain/of_study.py does)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


def message(sentence: str) -> str:
    """The sentence itself: release/messages.py finds it by this call, and translators see it."""
    return sentence


class MarkKind(Enum):
    """The kinds of marks. The value is the sentence in English, with the names of its values."""

    SUPER_LINEAR = message("super-linear")
    COMPUTATION = message("computation super-linear")
    FASTER = message("faster than ideal: {gain} times as fast as {workers}, with {ideal} times as many")
    OVERSUBSCRIBED = message("oversubscribed: {threads} threads on {cores} cores")
    SPREADS = message("spreads {share}")
    OTHERS = message("other programs used {share} of the cores")
    FEWER = message("repeats: {done} of {wanted}")
    FAILED = message("a repeat failed: {why}")
    THREADS = message("threads of a rank: {here}, of the baseline: {there}; train.num_threads sets them")
    MACHINE = message("other machine: {fact} {here}, not {there}")
    UNFINISHED = message("repeat {repeat}: its run has not ended")
    STOPPED = message("repeat {repeat}: its run was stopped before its end")
    BROKEN = message("repeat {repeat}: its run failed before its end")
    NOTED = "{text}"  # by who wrote a table: in the words of that person


class Mark(NamedTuple):
    """What a reader must know. Made by `mark`; its text in English is `str`."""

    kind: MarkKind
    values: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        return self.kind.value.format(**dict(self.values))

    @property
    def oversubscribed(self) -> bool:
        """Whether the repeat had more threads than cores; a table says so at the beginning of a note."""
        return str(self).startswith("oversubscribed")


def mark(kind: MarkKind, **values: object) -> Mark:
    """A mark of a kind, with the values that its sentence names."""
    return Mark(kind, tuple(values.items()))
