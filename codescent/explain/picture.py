"""In: a lesson. Out: one SVG with all its frames below each other, for a page or a slide of one's own.
Does not decide what is said and does not write a file."""

from __future__ import annotations

import re
import textwrap

from markupsafe import Markup

from codescent import __version__
from codescent.base.visible import visible
from codescent.explain.content import Chart, Figure, Lesson, LessonFrame, TextTable
from codescent.explain.page import MARK, refuse_without_charts, text_of
from codescent.explain.svg import LETTER, LINE, WIDE, Drawn, chart_svg, drawn, table_drawn

MARGIN = 24.0


class _Sheet:
    """Paper that is filled from the top to the bottom."""

    def __init__(self) -> None:
        self.parts: list[Markup] = []
        self.y, self.width = MARGIN, WIDE

    def write(self, text: str, kind: str = "") -> None:
        """A paragraph."""
        for line in textwrap.wrap(visible(text), int(WIDE / LETTER)) or [""]:
            self.y += LINE
            shape = Markup('<text x="{:.0f}" y="{:.1f}" class="{}">{}</text>')
            self.parts.append(shape.format(MARGIN, self.y, kind, line))

    def put(self, shape: Drawn) -> None:
        """A figure."""
        self.y += LINE / 2
        place = Markup('<g transform="translate({:.0f} {:.1f})">{}</g>')
        self.parts.append(place.format(MARGIN, self.y, shape.body))
        self.y, self.width = self.y + shape.height, max(self.width, shape.width)


def picture(lesson: Lesson) -> str:
    """The SVG. Raises UserError: see `page.refuse_without_charts`."""
    refuse_without_charts(lesson)
    sheet, frames = _Sheet(), len(lesson.frames)
    sheet.write(lesson.title, "title")
    sheet.write(lesson.about)
    sheet.write(lesson.config, "small")
    for number, frame in enumerate(lesson.frames, 1):
        sheet.y += LINE
        sheet.write(f"{number}/{frames} {frame.title}" if frames > 1 else frame.title, "head")
        for sentence in frame.says:
            sheet.write(sentence)
        for index, figure in enumerate(frame.figures):
            sheet.put(_shapes(figure, frame, f"frame{number}-{index}"))
        for sentence in frame.after:
            sheet.write(sentence)
    width, height = sheet.width + 2 * MARGIN, sheet.y + MARGIN
    style = text_of("page.css")
    names = Markup('xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"')
    head = Markup(
        '<svg {0} viewBox="0 0 {1:.0f} {2:.0f}" width="{1:.0f}" height="{2:.0f}">\n'
        '<!-- {3} -->\n<title>{4}</title>\n<style>{5}</style>\n<rect width="100%" height="100%" class="paper"/>\n'
    ).format(names, width, height, f"{MARK} {__version__}", visible(lesson.title), Markup(style))
    return f"{head}{Markup(chr(10)).join(sheet.parts)}\n</svg>\n"


def _shapes(figure: Figure, frame: LessonFrame, name: str) -> Drawn:
    if isinstance(figure, TextTable):
        return table_drawn(figure)
    if not isinstance(figure, Chart):
        return drawn(figure, frame.title)
    element = chart_svg(figure, name, frame.title)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', element)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    sized = Markup(str(element).replace("<svg ", f'<svg width="{width:.0f}" height="{height:.0f}" ', 1))
    return Drawn(width, height, sized)
