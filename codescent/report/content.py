"""In: nothing. Out: the nouns of a report: sections of paragraphs, tables, figures and timelines.
Does not know HTML (page.py does) or Markdown (markdown.py does), and does not read run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent.base.amounts import NOTHING
from codescent.report.walk import StepTimeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        order: by which a column is sorted; None: by the text.
        odd: whether a reader should look at it.
    """

    text: str
    order: float | None = None
    odd: bool = False


NO_CELL = Cell(NOTHING)


@dataclass(frozen=True)
class Column:
    """A column of a table. `meaning`: what it is, with its unit, in a sentence; "": its title says it."""

    title: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A table. The first cell of a row is its name."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        name: unique in a report, and a file's name without its suffix.
        title: what it shows.
        caption: how to read it, and what is missing in it.
        draw: makes the figure, for which matplotlib is imported; of a width in inches, if one is given.
        config: what was run on what, in a line.
    """

    name: str
    title: str
    caption: str
    draw: Callable[..., Figure]
    config: str = ""


@dataclass(frozen=True)
class Timeline:
    """Ranks x time of one step of a run: what was computed from the plan, and what was measured, on one time axis.

    `config`: what was run on what, in a line.
    """

    run: str
    walks: Sequence[StepTimeline]
    caption: str = ""
    config: str = ""


@dataclass(frozen=True)
class Words:
    """Paragraphs; or the points of a list."""

    paragraphs: Sequence[str]
    listed: bool = False


@dataclass(frozen=True)
class Listing:
    """Text that is shown as it is, such as a config; closed until the reader opens it."""

    title: str
    text: str


Item = Words | Table | Picture | Timeline | Listing


@dataclass(frozen=True)
class ReportSection:
    """A part of a report. `name`: of its anchor. Without items it is left out."""

    name: str
    title: str
    items: Sequence[Item]


Said = tuple[str, str]
"""What a sentence is about, such as a run's name ("": nothing in particular), and the sentence."""


@dataclass(frozen=True)
class KeyQuestion:
    """A question that a reader has first, and what the runs say to it."""

    question: str
    sentences: Sequence[Said]


@dataclass(frozen=True)
class Report:
    """What is reported about runs or a study.

    Attributes:
        title: names of the runs, or of the study.
        about: what was run on what, in a sentence or two.
        figures: what a reader sees first.
        answers: what a reader wants to know first.
        sections: the details, in order.
    """

    title: str
    about: Sequence[str]
    answers: Sequence[KeyQuestion]
    sections: Sequence[ReportSection]
    figures: Sequence[Picture] = ()

    @property
    def pictures(self) -> list[Picture]:
        """All figures, in order."""
        items = [*self.figures, *(item for section in self.sections for item in section.items)]
        return [item for item in items if isinstance(item, Picture)]
