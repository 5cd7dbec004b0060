"""In: every page of the documentation. Out: its links lead somewhere, and the verbs have their pages.
Does not judge what the pages say, and follows no link out of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:codescent|tests|benchmarks|configs|docs)/[\w./-]+\.\w+)`")


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    broken += [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert not broken


def test_there_are_pages_for_the_verbs() -> None:
    assert len(PAGES) > 10
    for verb in ("train", "plan", "config", "data", "sample", "evaluate"):
        assert (ROOT / "docs" / f"{verb}.md").is_file()
