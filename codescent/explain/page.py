"""In: a lesson. Out: one HTML page that contains all it shows; its script shows one frame at a time.
Does not decide what is said and does not write a file. All text is escaped by the template."""

from __future__ import annotations

import base64
import hashlib

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from codescent import __version__
from codescent.base.errors import UserError
from codescent.base.visible import visible
from codescent.explain.content import Chart, Figure, Lesson, TextTable
from codescent.explain.language import Language
from codescent.explain.svg import chart_svg, drawn
from codescent.report.style import no_matplotlib

MARK = "codescent explain"
"""Stands in every file of this command, which replaces only such files."""


def page(lesson: Lesson, say: Language) -> str:
    """The HTML page. Raises UserError: see `refuse_without_charts`."""
    refuse_without_charts(lesson)
    environment = _environment()
    script = text_of("page.js")
    return environment.get_template("page.html").render(
        lesson=lesson,
        language=say.code,
        say=say,
        mark=f"{MARK} {__version__}",
        style=Markup(text_of("page.css")),
        script=Markup(script),
        script_hash=Markup("sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        is_table=lambda figure: isinstance(figure, TextTable),
        drawn=_element,
    )


def _environment() -> Environment:
    loader = PackageLoader("codescent.explain", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    environment.finalize = lambda value: visible(value) if type(value) is str else value
    return environment


def text_of(name: str) -> str:
    """The text of a file of this folder, such as page.css."""
    environment = _environment()
    return environment.loader.get_source(environment, name)[0]  # type: ignore[union-attr]


def refuse_without_charts(lesson: Lesson) -> None:
    """Raise UserError if the lesson has a chart, and nothing can draw it here."""
    has_chart = any(isinstance(figure, Chart) for frame in lesson.frames for figure in frame.figures)
    if has_chart and (why := no_matplotlib(", or leave out --out: the terminal shows all")):
        raise UserError(f"--out: {why}")


def _element(figure: Figure, title: str, frame: int, number: int) -> Markup:
    if isinstance(figure, Chart):
        return chart_svg(figure, f"frame{frame}-{number}", title)
    assert not isinstance(figure, TextTable)
    return drawn(figure, title).element()
