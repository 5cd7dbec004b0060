"""In: docs/faults.md, the results of benchmarks/survive.py. Out: the page has the figures of these results.
Does not measure: the benchmark does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import survive  # noqa: E402 - found by the line above: a folder of scripts, no package
import survive_docs  # noqa: E402


def test_the_page_has_the_figures_of_the_last_measured_run() -> None:
    """Fault: the page promises what nobody has measured. `python benchmarks/survive.py --docs` writes it anew."""
    text = survive_docs.PAGE.read_text(encoding="utf-8")
    assert survive_docs.page(text, json.loads(survive_docs.RESULTS.read_text(encoding="utf-8"))) == text


def test_a_part_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    """Fault: the results of an hour are lost, because another part was measured into the same file."""
    path = tmp_path / "results.json"
    for name, value in (("soak", 1), ("losses", 2), ("soak", 3)):
        survive.add_part(path, name, {"result": value})
    assert json.loads(path.read_text())["parts"] == {"losses": {"result": 2}, "soak": {"result": 3}}


def test_a_page_without_its_marks_is_refused() -> None:
    """Fault: the page is written anew without its tables, because somebody has changed a mark."""
    with pytest.raises(ValueError, match=r"faults\.md has no part between"):
        survive_docs.page("# Faults\n", {"parts": {}})
