"""In: a report. Out: the same report as Markdown, for a README or a pull request.
Does not draw: with the files of the figures it links to them. Timelines are left out; the page has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codescent.base.visible import visible
from codescent.report.content import Item, Listing, Picture, Report, Said, Table, Words

MARK = "<!-- codescent report -->"
SPECIAL = "\\`*_{}[]<>#|~$&"
"""Characters that would format text."""


def markdown(report: Report, figures: Mapping[str, str] | None = None) -> str:
    """The report as text.

    Args:
        report: what is said.
        figures: for the name of each figure its file, as a link from the text; None: no figures.
    """
    lines = [MARK, "", f"# {plain(report.title)}", "", *map(plain, report.about)]
    for picture in report.figures:
        lines += _lines(picture, figures or {})
    for answer in report.answers:
        lines += ["", f"**{plain(answer.question)}**", "", *map(_said, answer.sentences)]
    for section in report.sections:
        items = [line for item in section.items for line in _lines(item, figures or {})]
        if items:
            lines += ["", f"## {plain(section.title)}", *items]
    return "\n".join(lines).strip() + "\n"


def _said(said: Said) -> str:
    about, sentence = said
    return f"- **{plain(about)}:** {plain(sentence)}" if about else f"- {plain(sentence)}"


def _lines(item: Item, figures: Mapping[str, str]) -> Iterator[str]:
    if isinstance(item, Words):
        yield ""
        yield from (f"- {plain(said)}" if item.listed else plain(said) for said in item.paragraphs)
    elif isinstance(item, Table):
        yield ""
        yield from _table(item)
        if item.caption:
            yield from ("", plain(item.caption))
    elif isinstance(item, Picture) and item.name in figures:
        yield from ("", f"![{plain(item.title)}]({figures[item.name]})", "", plain(f"{item.title}. {item.caption}"))
    elif isinstance(item, Listing):
        return  # a config is a file of its run folder


def _table(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(plain(column.title) for column in table.columns) + " |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield "| " + " | ".join(f"**{plain(cell.text)}**" if cell.odd else plain(cell.text) for cell in row) + " |"


def plain(text: str) -> str:
    """The text with everything escaped that Markdown or HTML would read."""
    shown = visible(" ".join(text.split()))
    return "".join(f"\\{character}" if character in SPECIAL else character for character in shown)
