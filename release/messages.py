"""In: the sentences of `codescent explain`. Out: its message files (.po for translators, .mo for programs), up to date.
Does not translate: a new message has none yet, and tests/test_explain_languages.py names it. Needs Babel (extra dev).

    python release/messages.py           after a sentence or a translation has changed
    python release/messages.py --add fr  begin another language"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from babel import Locale
from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from jinja2.ext import babel_extract

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "codescent" / "explain"
OTHERS = (ROOT / "codescent" / "study" / "marks.py",)
"""Files of other rooms that have sentences of a lesson."""
LANGUAGES = SOURCES / "languages"
KEYWORDS = {"say": None, "many": (1, 2), "Topic": None, "message": None}
"""Calls whose first text is a message; of `many` the first two are one. The first argument of `Topic` is `about`."""
SAME = datetime(2026, 1, 1, tzinfo=UTC)
"""The date in every file: the true one would change with every run."""


def messages() -> Catalog:
    """All messages of the code, without translations."""
    found = Catalog()
    for path in (*sorted(SOURCES.rglob("*")), *OTHERS):
        if path.suffix not in (".py", ".html"):
            continue
        with path.open("rb") as file:
            for _, message, comments, _ in extract(_extractor(path), file, keywords=KEYWORDS):
                found.add(message, locations=[(path.relative_to(ROOT).as_posix(), 1)], auto_comments=comments)
    return found


def _extractor(path: Path) -> Any:
    """What reads the messages of a file: Babel's own for Python, that of Jinja for a template."""
    return "python" if path.suffix == ".py" else babel_extract


def updated(path: Path) -> Catalog:
    """The catalog of a .po file with exactly the messages of the code. Those that are new have no translation."""
    with path.open("rb") as file:
        catalog = read_po(file, locale=locale_of(path))
    catalog.update(messages(), no_fuzzy_matching=True)
    return catalog


def as_po(catalog: Catalog) -> bytes:
    """The text for translators, in the order of the code."""
    _head(catalog)
    file = io.BytesIO()
    write_po(file, catalog, width=120, ignore_obsolete=True, include_lineno=False)
    return file.getvalue()


def as_mo(catalog: Catalog) -> bytes:
    """The same for programs."""
    _head(catalog)
    file = io.BytesIO()
    write_mo(file, catalog)
    return file.getvalue()


def _head(catalog: Catalog) -> None:
    """Say in the head what the file is; nothing in it changes from day to day."""
    catalog.header_comment = "# Sentences of `codescent explain`. After a change: python release/messages.py"
    catalog.project, catalog.version, catalog.msgid_bugs_address = "codescent", "explain", ""
    catalog.last_translator = catalog.language_team = "the authors of codescent"
    catalog.creation_date = catalog.revision_date = SAME
    catalog.fuzzy = False


def files() -> Iterator[Path]:
    """The .po file of each language."""
    yield from sorted(LANGUAGES.glob("*/LC_MESSAGES/codescent.po"))


def locale_of(path: Path) -> Locale:
    """The language of a .po file: its folder says it."""
    return Locale.parse(path.parents[1].name)


def main() -> int:
    """Update all files; 1 if a message has no translation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", metavar="CODE", help="begin a language, such as fr")
    if code := parser.parse_args().add:
        path = LANGUAGES / code / "LC_MESSAGES" / "codescent.po"
        if path.exists():
            parser.error(f"{path.relative_to(ROOT)} is there already")
        path.parent.mkdir(parents=True)
        path.write_bytes(as_po(Catalog(locale=Locale.parse(code))))
    missing = 0
    for path in files():
        catalog = updated(path)
        path.write_bytes(as_po(catalog))
        path.with_suffix(".mo").write_bytes(as_mo(catalog))
        without = [message.id for message in catalog if message.id and not _said(message.string)]
        missing += len(without)
        print(f"{path.relative_to(ROOT)}: {len(catalog)} messages, {len(without)} without a translation")
    return 1 if missing else 0


def _said(string: str | tuple[str, ...] | list[str] | None) -> bool:
    return string is not None and (bool(string) if isinstance(string, str) else all(string))


if __name__ == "__main__":
    sys.exit(main())
