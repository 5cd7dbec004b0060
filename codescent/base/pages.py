"""In: nothing. Out: the pages of the documentation: of a checkout, or those that a wheel brought. Their names.
Does not print a page (verbs/docs.py does). A build runs this file alone: it imports the standard library only."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
"""Files of the repository that are pages."""
FOLDER = "pages"
"""The folder of the package in which a wheel has them, each with its path in the repository: links stay right."""


def name_of(path: str) -> str:
    """The name of a page, such as "which" of docs/which.md and "changelog" of CHANGELOG.md."""
    return path.removeprefix("docs/").removesuffix(".md").lower()


def pages_in(root: Path) -> dict[str, Path]:
    """The pages of a folder that is laid out as the repository, by name; those in folders come last."""
    found = {
        name_of(path.relative_to(root).as_posix()): path for pattern in PATTERNS for path in sorted(root.glob(pattern))
    }
    return dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0])))


def pages() -> dict[str, Path]:
    """The pages that belong to this installation, by name; none: somebody has taken them away."""
    package = Path(__file__).resolve().parent.parent
    return pages_in(package / FOLDER) or pages_in(package.parent)
