"""In: what a lesson shows. Out: the dataclasses of a lesson: frames, each with sentences and figures.
Does not compute what is shown (the files of topics do) and does not draw (text, svg and page do)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Tone(StrEnum):
    """What a cell, a bar or a node is. Each has a colour, and a letter where there are no colours."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    FORWARD = "forward"
    BACKWARD = "backward"
    MESSAGE = "message"
    SERVER = "server"
    WAITING = "waiting"
    NEW = "new"
    OTHER = "other"


@dataclass(frozen=True)
class GridCell:
    """A cell of a grid.

    Attributes:
        text: at most some ten characters.
        tone: what it is.
        is_new: whether it has changed in this frame; it has a frame of its own.
    """

    text: str = ""
    tone: Tone = Tone.NOTHING
    is_new: bool = False


@dataclass(frozen=True)
class Grid:
    """Cells in rows and columns: such as the tensors of layers by ranks.

    Attributes:
        columns: their heads.
        rows: a head and the cells of each.
        corner: above the heads of the rows.
        legend: what each tone means here, in words.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[GridCell]]]
    corner: str = ""
    legend: Sequence[tuple[Tone, str]] = ()


@dataclass(frozen=True)
class Bar:
    """What a lane does for a time. `lane`: index. Times are in the unit of the lanes."""

    lane: int
    start: float
    end: float
    tone: Tone
    text: str = ""


@dataclass(frozen=True)
class Arrow:
    """A message from a moment of a lane to a moment of another one."""

    sender: int
    sent: float
    receiver: int
    received: float
    text: str = ""


@dataclass(frozen=True)
class RankLanes:
    """A timeline: a lane for each rank, time to the right.

    Attributes:
        lanes: their names.
        bars, arrows: what happens.
        unit: of the time axis, in words, such as "ms".
        legend: see `Grid`.
    """

    lanes: Sequence[str]
    bars: Sequence[Bar]
    unit: str
    arrows: Sequence[Arrow] = ()
    legend: Sequence[tuple[Tone, str]] = ()

    @property
    def end(self) -> float:
        """The last moment; more than 0."""
        moments = [bar.end for bar in self.bars] + [arrow.received for arrow in self.arrows]
        return max(moments, default=0.0) or 1.0


@dataclass(frozen=True)
class Node:
    """A rank or a device in a network. `x`, `y`: its place, from 0 to 1, right and down."""

    name: str
    x: float
    y: float
    tone: Tone = Tone.OTHER


@dataclass(frozen=True)
class NodeLink:
    """Two nodes, by index, that talk to each other. `tone`: what they send; `is_new`: they talk in this frame."""

    first: int
    second: int
    text: str = ""
    tone: Tone = Tone.MESSAGE
    is_new: bool = False


@dataclass(frozen=True)
class NodeNetwork:
    """Who talks to whom."""

    nodes: Sequence[Node]
    links: Sequence[NodeLink]
    legend: Sequence[tuple[Tone, str]] = ()


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart: points (x, y), in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over one axis.

    Attributes:
        x, y: what the axes say, with units.
        is_log: whether y is logarithmic.
    """

    lines: Sequence[ChartLine]
    x: str
    y: str
    is_log: bool = False


@dataclass(frozen=True)
class TextTable:
    """Rows of text under heads. `numbers`: the columns, by index, that stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


Figure = Grid | RankLanes | NodeNetwork | Chart | TextTable


@dataclass(frozen=True)
class LessonFrame:
    """One step of a lesson.

    Attributes:
        title: in a few words.
        says: sentences above the figures.
        figures: from top to bottom.
        after: sentences below the figures.
    """

    title: str
    says: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Lesson:
    """What one topic shows of one config.

    Attributes:
        topic: its name on the command line.
        title: in words of the language.
        about: one sentence: what is shown.
        config: the line of the config: model, ranks, layout.
        frames: in order; at least one.
        see: commands that show more, each with what it shows.
    """

    topic: str
    title: str
    about: str
    config: str
    frames: Sequence[LessonFrame]
    see: Sequence[tuple[str, str]] = field(default=())
