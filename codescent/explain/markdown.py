"""In: a lesson. Out: the same as Markdown, for a README or notes of a course: figures as text of a terminal.
Does not decide what is said and does not write a file."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.console import as_text
from codescent.explain.content import Figure, Lesson, TextTable
from codescent.explain.language import Language
from codescent.explain.text import WIDTH, figure_text
from codescent.report.markdown import plain

MARK = "<!-- codescent explain -->"


def markdown(lesson: Lesson, say: Language) -> str:
    """The lesson as text."""
    return "\n".join(_lines(lesson, say)).strip() + "\n"


def _lines(lesson: Lesson, say: Language) -> Iterator[str]:
    yield from (MARK, "", f"# {plain(lesson.title)}", "", plain(lesson.about), "", plain(lesson.config))
    for number, frame in enumerate(lesson.frames, 1):
        yield from ("", f"## {number}. {plain(frame.title)}" if len(lesson.frames) > 1 else f"## {plain(frame.title)}")
        for sentence in frame.says:
            yield from ("", plain(sentence))
        for figure in frame.figures:
            yield ""
            yield from _figure(figure)
        for sentence in frame.after:
            yield from ("", plain(sentence))
    if lesson.see:
        yield from ("", f"## {plain(say('More:'))}", "")
        yield from (f"* `{command}`: {plain(shows)}" for command, shows in lesson.see)


def _figure(figure: Figure) -> Iterator[str]:
    if isinstance(figure, TextTable):
        yield "| " + " | ".join(map(plain, figure.columns)) + " |"
        yield "|" + "".join("---:|" if column in figure.numbers else "---|" for column in range(len(figure.columns)))
        yield from ("| " + " | ".join(map(plain, row)) + " |" for row in figure.rows)
        return
    lines = as_text(figure_text(figure), WIDTH).splitlines()
    yield from ("```text", *(line.rstrip() for line in lines), "```")
