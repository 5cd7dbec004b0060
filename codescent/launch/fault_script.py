"""In: a text such as "kill 2 at 7; stop 1 at 12; join at 15", ranks and steps of a run. Out: its faults, or all errors.
Does not make a fault (inject.py does) and does not know what the run does about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from codescent.base.counted import counted
from codescent.base.errors import UserError

MOST_DIGITS = 9
EXAMPLE = "kill 2 at 7; stop 1 at 12; join at 15"


class FaultKind(StrEnum):
    """What is done to a run."""

    KILL = "kill"  # SIGKILL ends a rank
    STOP = "stop"  # SIGSTOP: a rank lives, and does nothing more
    JOIN = "join"  # a rank that was lost comes back, or another one for it


FORMS = {FaultKind.KILL: "kill RANK at STEP", FaultKind.STOP: "stop RANK at STEP", FaultKind.JOIN: "join at STEP"}


@dataclass(frozen=True)
class Fault:
    """A fault of a script.

    Attributes:
        step: in which it happens, from 1.
        rank: to which it happens, by its number at the start of the run; None: a rank joins.
    """

    kind: FaultKind
    step: int
    rank: int | None = None

    def __str__(self) -> str:
        return " ".join([self.kind, *([] if self.rank is None else [str(self.rank)]), "at", str(self.step)])


def parse_faults(text: str, ranks: int, steps: int) -> tuple[Fault, ...]:
    """Parse a script for a run of so many ranks and steps.

    Raises:
        UserError: all its problems.
    """
    parts = [" ".join(part.split()) for part in text.split(";") if part.strip()]
    found: list[Fault] = []
    problems = [] if parts else [f"it is empty; an example is {EXAMPLE}"]
    for part in parts:
        read = _read(part.split())
        if isinstance(read, Fault):
            found.append(read)
        else:
            problems += [f"{part!r}: {problem}" for problem in read]
    problems += _not_in_the_run(found, ranks, steps)
    problems += _wrong_order(found)
    if problems:
        raise UserError(*(f"--faults: {problem}" for problem in problems))
    return tuple(found)


def _read(words: Sequence[str]) -> Fault | list[str]:
    """A fault, or why its words are none."""
    if words[0] not in list(FaultKind):
        near = difflib.get_close_matches(words[0], list(FaultKind), n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; write {', '.join(FORMS.values())}"
        return [f"{words[0]!r} is no fault{meant}"]
    kind, rest = FaultKind(words[0]), list(words[1:])
    at = rest.index("at") if "at" in rest else min(1, len(rest))
    named, when = rest[:at], rest[at + 1 :] if "at" in rest else []
    problems, form = [], f"write {FORMS[kind]}, such as {_example(kind)}"
    rank, step = _number(named), _number(when)
    if kind is FaultKind.JOIN and named:
        problems.append(f"a rank that joins is not named; {form}")
    elif kind is not FaultKind.JOIN and rank is None:
        what = f"{' '.join(named)!r} is no number of a rank" if named else "names no rank"
        problems.append(f"{what}; {form}")
    if step is None:
        problems.append(f"{' '.join(when)!r} is no number of a step; {form}" if when else f"names no step; {form}")
    if problems or step is None:
        return problems
    return Fault(kind, step, rank)


def _example(kind: FaultKind) -> str:
    return next(part for part in EXAMPLE.split("; ") if part.startswith(kind))


def _number(words: Sequence[str]) -> int | None:
    """The number that one word is; None: it is none, or there are more words."""
    text = words[0] if len(words) == 1 else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _not_in_the_run(faults: Sequence[Fault], ranks: int, steps: int) -> Iterator[str]:
    """Ranks and steps that the run does not have."""
    for fault in faults:
        if fault.rank is not None and fault.rank >= ranks:
            yield f"'{fault}': there is no rank {fault.rank}: the run has {counted(ranks, 'rank')}, counted from 0"
        if not 1 <= fault.step <= steps:
            yield f"'{fault}': there is no step {fault.step}: the run has {counted(steps, 'step')}, counted from 1"


def _wrong_order(faults: Sequence[Fault]) -> Iterator[str]:
    """Steps that do not ascend, and ranks that join where nobody is missing."""
    lost, latest = 0, -1
    for fault in faults:
        if fault.step == latest:
            yield f"'{fault}': another fault is in step {latest} already; give each its own step"
        elif fault.step < latest:
            yield f"'{fault}': comes after a fault in step {latest}; write them in the order of their steps"
        latest = max(latest, fault.step)
        lost += -1 if fault.kind is FaultKind.JOIN else 1
        if lost < 0:
            yield f"'{fault}': no rank is missing then; a rank must be lost (kill, stop) before another one joins"
            lost = 0
