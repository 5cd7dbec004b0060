"""In: what a check has found wrong. Out: `Finding`: what, where, what is expected, and the line that mends it.
Does not check anything and does not print (report.py does)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

WRONG, WARNING = "wrong", "warning"
"""A run would fail, or compute something else; a run works, but slowly, or only by luck."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as a run needs it.

    Attributes:
        severity: WRONG or WARNING.
        check: which check has found it: a word such as "ports".
        where: names of the hosts at which it is to be mended.
        what: the fact.
        expected: what a run needs instead.
        mend: a command, a setting or a sentence that mends it.
        ranks: the ranks concerned; none: the whole host.
    """

    severity: str
    check: str
    where: tuple[str, ...]
    what: str
    expected: str
    mend: str
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing was found; 1: warnings only; 2: something is wrong."""
    severities = {finding.severity for finding in findings}
    return 2 if WRONG in severities else 1 if severities else 0


def listed(words: Iterable[object], most: int = 6) -> str:
    """Words with commas between; of many the first, and how many more there are."""
    shown = [str(word) for word in words]
    if len(shown) <= most:
        return ", ".join(shown)
    return f"{', '.join(shown[: most - 1])} and {len(shown) - most + 1} more"


def of_ranks(ranks: Iterable[int]) -> str:
    """Such as "rank 2", "ranks 0 to 3", "ranks 0, 2"."""
    found = sorted(ranks)
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    return f"rank{'s' if len(found) > 1 else ''} {listed(found)}"
