"""In: SLURM's abbreviated lists, such as "gpu[01-03,07],login2" and "2(x3),1". Out: the same lists, expanded.
Does not call SLURM (no scontrol) and does not read the environment."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

MAX_HOSTS = 2**16  # SLURM's own limit for a range

_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")  # text and brackets up to a comma outside of brackets
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def hosts(text: str) -> list[str]:
    """Expand a list such as SLURM_STEP_NODELIST, in the order of `scontrol show hostnames`.

    Raises ValueError with the reason: the list is malformed.
    """
    found: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text.strip()):
        if not _HOST.fullmatch(word):
            raise ValueError(f'"{word}" is not a host name or a list such as gpu[01-03,07]')
        pieces = _PART.split(word)  # text, inside of a bracket, text, inside of a bracket, ..., text
        found += _names(pieces[::2], [_numbers(inside) for inside in pieces[1::2]])
        if len(found) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
    return found


def counts(text: str) -> list[int]:
    """The number of tasks on each node, from a list such as SLURM_STEP_TASKS_PER_NODE.

    Raises ValueError with the reason: the list is malformed.
    """
    found: list[int] = []
    for word in text.strip().split(","):
        match = _COUNT.fullmatch(word)
        if match is None:
            raise ValueError(f'"{word}" is not a number of tasks or a list such as 2(x3)')
        times = int(match[2] or 1)
        if len(found) + times > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} nodes")
        found += [int(match[1])] * times
    return found


def _names(texts: list[str], numbers: list[list[str]]) -> Iterator[str]:
    """All names with one number per bracket, inserted between the texts. The last bracket changes fastest."""
    if not numbers:
        yield from texts
        return
    if math.prod(map(len, numbers)) > MAX_HOSTS:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    # Among the other brackets, SLURM changes the first one fastest.
    for *others, last in product(*reversed(numbers[:-1]), numbers[-1]):
        chosen = [*reversed(others), last]
        yield texts[0] + "".join(number + text for number, text in zip(chosen, texts[1:], strict=True))


def _numbers(inside: str) -> list[str]:
    """Expand a bracket: "01-03,07" becomes 01, 02, 03, 07. Each number has the width of the first one of its range."""
    found: list[str] = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or low > high:
            raise ValueError(f'"{word}" in brackets is not a number or a range with the lower number first')
        if len(found) + high - low >= MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        found += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return found
