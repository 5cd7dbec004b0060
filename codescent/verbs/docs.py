"""In: arguments of `codescent docs`. Out: a page of the documentation, printed; without a name the list of pages.
Does not render Markdown: a page is printed as it is written, for a terminal, a pager or a file."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from codescent.base import pages
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.reading import read_text

HEADING = re.compile(r"(#+) (.*)")


def main(arguments: Namespace) -> int:
    """Print the page or its section, or the list. Raises UserError: there is no such page or section."""
    found = pages.pages()
    if not found:
        raise UserError("this installation has no pages of the documentation: install codescent again")
    if arguments.page is None:
        say(titles(found))
        return 0
    said, mark, anchor = arguments.page.partition("#")
    if not said:
        section_of = f"PAGE#{anchor}" if anchor else "PAGE#SECTION"
        raise UserError(
            f"codescent docs {arguments.page}: names no page: write {section_of}; `codescent docs` lists all"
        )
    if mark and not anchor:
        raise UserError(f"codescent docs {arguments.page}: names no section after #; leave # out to print the page")
    name = page_named(found, said)
    lines = read_text(found[name]).splitlines()
    say(section(name, lines, anchor) if anchor else lines)
    return 0


def titles(found: Mapping[str, Path]) -> Iterator[str]:
    """A line for each page: its name, and its first heading."""
    width = max(map(len, found))
    for name, path in found.items():
        head = read_text(path).partition("\n")[0]
        yield f"{name:<{width}}  {head.lstrip('# ')}"
    yield ""
    yield "codescent docs PAGE prints one of them, codescent docs PAGE#SECTION a part of it."


def page_named(found: Iterable[str], said: str) -> str:
    """The name of the page that a user means.

    Args:
        found: the names of all pages.
        said: a name, its last part, or the path of a link in another page: ../docs/which.md.

    Raises:
        UserError: there is no such page; with the nearest names.
    """
    name = pages.name_of(re.sub(r"^(\.{1,2}/)+", "", said))
    lasts = {known.rpartition("/")[2]: known for known in reversed([*found])}  # the page that is listed first wins
    if name in found:
        return name
    if name in lasts:
        return lasts[name]
    near = dict.fromkeys(lasts[one] for one in difflib.get_close_matches(name.rpartition("/")[2], lasts))
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"there is no page {said}; {meant}`codescent docs` lists all pages")


def section(name: str, lines: Sequence[str], anchor: str) -> Sequence[str]:
    """The lines of a page from the heading with this anchor up to the next one that is not below it.

    Raises:
        UserError: the page `name` has no such heading; with the nearest ones.
    """
    heads = list(_headings(lines))
    for place, (number, depth, known) in enumerate(heads):
        if known == anchor.lower():
            end = next((later for later, other, _ in heads[place + 1 :] if other <= depth), len(lines))
            return lines[number:end]
    known_anchors = [known for _, _, known in heads]
    near = difflib.get_close_matches(anchor.lower(), known_anchors) or known_anchors[:3]
    raise UserError(f"page {name} has no section {anchor}; did you mean {' or '.join(near)}?")


def _headings(lines: Iterable[str]) -> Iterator[tuple[int, int, str]]:
    """The number of the line, the depth and the anchor of each heading."""
    is_code = False
    for number, line in enumerate(lines):
        is_code ^= line.startswith("```")
        if not is_code and (found := HEADING.fullmatch(line)):
            yield number, len(found[1]), anchor_of(found[2])


def anchor_of(heading: str) -> str:
    """The name by which links lead to a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
