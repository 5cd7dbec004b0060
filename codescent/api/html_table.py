"""In: rows of names and lines of text. Out: an HTML table for a notebook.
Does not know what the rows say."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

CELL = "text-align: left; vertical-align: top"
"""Notebooks align cells to the right."""
NAME = f"{CELL}; white-space: nowrap"


def html_table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table with a row for each name. A name that begins with spaces is a part of the row above, and is set in."""
    cells = (
        f'<tr><th style="{NAME}; padding-left: {_indent_em(name)}em">{html.escape(name.strip())}</th>'
        f'<td style="{CELL}">{"<br>".join(map(html.escape, lines))}</td></tr>'
        for name, lines in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _indent_em(name: str) -> float:
    return 0.5 + (len(name) - len(name.lstrip())) / 2
