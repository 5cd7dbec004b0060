"""In: pyproject.toml. Out: a file of constraints for pip, with the oldest version of each package that it allows.
Does not install anything: `make test-oldest` does."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("dev", "docs")
"""Extras with programs that check or build, and that no user of codescent needs: they are not pinned."""
OLDEST = re.compile(r"([\w.-]+)>=([\d.]+)")
OWN = re.compile(r"codescent\[[\w,]+\]")


def pins(project: Mapping[str, Any]) -> Iterator[str]:
    """A constraint for each package that the table [project] names, such as "numpy==2.0".

    Raises:
        ValueError: a requirement names no oldest version.
    """
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(one for extra in extras if extra not in TOOLS for one in extras[extra])]
    for requirement in dict.fromkeys(named):
        if OWN.fullmatch(requirement):
            continue
        found = OLDEST.fullmatch(requirement)
        if found is None:
            raise ValueError(f"pyproject.toml: {requirement}: write NAME>=VERSION, with the oldest version that works")
        yield f"{found[1]}=={found[2]}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != oldest:
        print(f"the oldest Python is {oldest}, this is {here}: make test-oldest PYTHON=python{oldest}", file=sys.stderr)
        return 2
    print(*pins(project), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
