"""In: a topic, words of a command line, a language. Out: what `codescent explain` makes of it, as objects and as text.
Does not check anything. A lesson is made once in a process."""

from __future__ import annotations

from functools import cache

from codescent.base.console import as_text
from codescent.explain.content import Chart, Figure, Grid, Lesson, LessonFrame, NodeNetwork, RankLanes, TextTable
from codescent.explain.language import language
from codescent.explain.text import WIDTH, lesson_text
from codescent.explain.topic import LessonInput
from codescent.explain.topics import TOPICS
from codescent.verbs.arguments import parse
from codescent.verbs.explain import asked_of

OF_REAL_RANKS = "ring"
WITHOUT_RANKS = [name for name in TOPICS if name != OF_REAL_RANKS]
"""Topics whose lessons start no process."""


def asked(topic: str, *words: str, lang: str = "en") -> LessonInput:
    """What the topic is given."""
    return asked_of(parse(["explain", topic, *words]), TOPICS[topic], language(lang))


@cache
def lesson(topic: str, *words: str, lang: str = "en") -> Lesson:
    """The lesson on a topic."""
    return TOPICS[topic].lesson(asked(topic, *words, lang=lang))


def text(one: Lesson, lang: str = "en") -> list[str]:
    """The lines of a terminal."""
    return as_text(lesson_text(one, language(lang)), WIDTH).splitlines()


def said(one: Lesson) -> list[str]:
    """All texts of a lesson that a reader sees as words, those of its figures, too."""
    found = [one.title, one.about, *(shows for _, shows in one.see)]
    for frame in one.frames:
        found += [frame.title, *frame.says, *frame.after]
        for figure in frame.figures:
            found += _of_figure(figure)
    return found


def _of_figure(figure: Figure) -> list[str]:
    if isinstance(figure, Chart):
        return [figure.x, figure.y, *(line.name for line in figure.lines)]
    if isinstance(figure, TextTable):
        return [*figure.columns, *(cell for row in figure.rows for cell in row)]
    legend = [meaning for _, meaning in figure.legend]
    if isinstance(figure, Grid):
        cells = [cell.text for _, cells in figure.rows for cell in cells]
        return [*legend, figure.corner, *figure.columns, *(name for name, _ in figure.rows), *cells]
    if isinstance(figure, RankLanes):
        return [*legend, figure.unit, *figure.lanes, *(bar.text for bar in figure.bars)]
    assert isinstance(figure, NodeNetwork)
    return [*legend, *(node.name for node in figure.nodes), *(link.text for link in figure.links)]


def grid(frame: LessonFrame) -> Grid:
    """The grid of a frame that has one figure."""
    (figure,) = frame.figures
    assert isinstance(figure, Grid)
    return figure


def table(frame: LessonFrame) -> TextTable:
    """The table of a frame that has one figure."""
    (figure,) = frame.figures
    assert isinstance(figure, TextTable)
    return figure


def lanes(frame: LessonFrame) -> RankLanes:
    """The timeline of a frame that has one figure."""
    (figure,) = frame.figures
    assert isinstance(figure, RankLanes)
    return figure
