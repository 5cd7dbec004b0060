"""In: runs. Out: the page of `codescent report` as an object: text as HTML and Markdown, a file, a frame in a notebook.
Does not evaluate or draw (the room report/ does)."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from codescent.api.short_errors import with_short_errors
from codescent.base.errors import UserError
from codescent.report.markdown import markdown
from codescent.report.page import page
from codescent.report.sections import report
from codescent.results import Run as OpenedRun
from codescent.verbs.report import refusals, write

FRAME_PX = 700


class ReportPage:
    """A report of runs, made when it is first read.

    Args:
        runs: at least one.
    """

    def __init__(self, runs: Sequence[OpenedRun]) -> None:
        self._report, self._names = report(runs), [run.name for run in runs]

    @cached_property
    def html(self) -> str:
        """The page, which contains all it shows."""
        return page(self._report)

    @cached_property
    def markdown(self) -> str:
        """The tables and sentences as Markdown, without figures."""
        return markdown(self._report)

    @with_short_errors
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page into a file, .html or .md, and return its path. Raises UserError: it cannot be written."""
        file = Path(path)
        is_markdown = file.suffix.lower() == ".md"
        if problems := list(refusals(file, None, is_markdown=is_markdown)):
            raise UserError(*(problem.removeprefix("--out ") for problem in problems))
        write(file, self.markdown if is_markdown else self.html)
        return file

    def __repr__(self) -> str:
        return f"ReportPage of {', '.join(self._names)}: its text is in markdown and html; save(path) writes it"

    def _repr_html_(self) -> str:
        """The page in a frame: its styles do not change the notebook."""
        return f'<iframe srcdoc="{html.escape(self.html)}" width="100%" height="{FRAME_PX}"></iframe>'
