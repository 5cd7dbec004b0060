"""In: a lesson. Out: the same for a terminal, in 80 columns, as renderables of rich.
Does not print and does not decide what is shown. Without colours each tone has a letter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from codescent.base.amounts import of_number
from codescent.base.visible import visible
from codescent.explain.content import Chart, Figure, Grid, Lesson, LessonFrame, NodeNetwork, RankLanes, TextTable, Tone
from codescent.explain.language import Language

WIDTH = 80
STYLES: dict[Tone, str] = {
    Tone.NOTHING: "dim",
    Tone.WEIGHTS: "white on blue",
    Tone.GRADIENTS: "black on green",
    Tone.OPTIMIZER: "white on black",
    Tone.ACTIVATIONS: "black on yellow",
    Tone.FORWARD: "white on blue",
    Tone.BACKWARD: "black on cyan",
    Tone.MESSAGE: "black on bright_red",
    Tone.SERVER: "black on magenta",
    Tone.WAITING: "dim",
    Tone.NEW: "bold",
    Tone.OTHER: "",
}
LETTERS: dict[Tone, str] = {
    Tone.NOTHING: " ",
    Tone.WEIGHTS: "W",
    Tone.GRADIENTS: "G",
    Tone.OPTIMIZER: "O",
    Tone.ACTIVATIONS: "A",
    Tone.FORWARD: "F",
    Tone.BACKWARD: "B",
    Tone.MESSAGE: "=",
    Tone.SERVER: "S",
    Tone.WAITING: ".",
    Tone.NEW: "*",
    Tone.OTHER: "#",
}
MARK = ">"
"""Before a cell that has changed."""
MOST_POINTS = 12
MOST_ARROWS = 24
"""Further ones are in the page and in the picture."""
BAR = 24


def lesson_text(lesson: Lesson, say: Language) -> Iterator[RenderableType]:
    """The whole lesson, from its title to further commands."""
    yield Text(visible(lesson.title), style="bold")
    yield Text(visible(lesson.about))
    yield Text(visible(lesson.config), style="dim")
    for number, frame in enumerate(lesson.frames, 1):
        yield Text()
        yield from _frame(frame, number, len(lesson.frames))
    if lesson.see:
        yield Text()
        yield Text(say("More:"), style="bold")
        for command, shows in lesson.see:
            yield Padding(Text(f"{command}\n  {visible(shows)}"), (0, 0, 0, 2))


def _frame(frame: LessonFrame, number: int, frames: int) -> Iterator[RenderableType]:
    of = f"{number}/{frames} " if frames > 1 else ""
    yield Text(f"{of}{visible(frame.title)}", style="bold")
    yield from (Text(visible(sentence)) for sentence in frame.says)
    for figure in frame.figures:
        yield Text()
        yield from figure_text(figure)
    if frame.after and frame.figures:
        yield Text()
    yield from (Text(visible(sentence)) for sentence in frame.after)


def figure_text(figure: Figure) -> Iterator[RenderableType]:
    """One figure."""
    if isinstance(figure, Grid):
        yield from _grid(figure)
    elif isinstance(figure, RankLanes):
        yield from _lanes(figure)
    elif isinstance(figure, NodeNetwork):
        yield from _network(figure)
    elif isinstance(figure, Chart):
        yield from _chart(figure)
    else:
        yield _table(figure)


def _legend(legend: Sequence[tuple[Tone, str]], *, letters: bool) -> Iterator[Text]:
    if not legend:
        return
    line = Text()
    for tone, meaning in legend:
        sign = LETTERS[tone] if letters else "  "
        one = Text.assemble((sign, STYLES[tone]), f" {visible(meaning)}", "   ")
        if line and line.cell_len + one.cell_len > WIDTH:
            yield line
            line = Text()
        line.append_text(one)
    yield line


def _grid(grid: Grid) -> Iterator[Text]:
    """The grid; one that is too wide in blocks of columns, one below the other."""
    marks = any(cell.is_new for _, cells in grid.rows for cell in cells)
    label = max(len(grid.corner), *(len(name) for name, _ in grid.rows)) + 1
    widths = [
        max(len(visible(text)) for text in (head, *(cells[column].text for _, cells in grid.rows))) + 1 + marks
        for column, head in enumerate(grid.columns)
    ]
    for number, part in enumerate(_blocks(widths, WIDTH - label)):
        if number:
            yield Text()
        heads = "".join((" " * marks + visible(grid.columns[column])).ljust(widths[column]) for column in part)
        if heads.strip():
            yield Text(f"{grid.corner.ljust(label)}{heads}".rstrip())
        for name, cells in grid.rows:
            line = Text(visible(name).ljust(label))
            for column in part:
                cell = cells[column]
                mark = (MARK if cell.is_new else " ") * marks
                line.append(mark, style="bold")
                line.append(visible(cell.text).ljust(widths[column] - 1 - marks), style=STYLES[cell.tone])
                line.append(" ")
            line.rstrip()
            yield line
    yield from _legend(grid.legend, letters=False)


def _blocks(widths: Sequence[int], room: int) -> Iterator[Sequence[int]]:
    """The columns, by index, that stand beside each other."""
    part: list[int] = []
    for column, width in enumerate(widths):
        if part and sum(widths[at] for at in part) + width > room + 1:  # the blank after the last one is not needed
            yield part
            part = []
        part.append(column)
    yield part


def _lanes(lanes: RankLanes) -> Iterator[Text]:
    """A row of characters for each lane: bars as letters, or as their texts where these fit."""
    label = max(len(name) for name in lanes.lanes) + 1
    columns = WIDTH - label
    whole = lanes.end
    for number, name in enumerate(lanes.lanes):
        line = Text(visible(name).ljust(label))
        at = 0
        bars = sorted((bar for bar in lanes.bars if bar.lane == number), key=lambda bar: bar.start)
        begins = [*(round(bar.start / whole * columns) for bar in bars[1:]), *([columns] if bars else [])]
        for bar, next_begin in zip(bars, begins, strict=True):
            begin = max(at, round(bar.start / whole * columns))
            end = max(begin, round(bar.end / whole * columns))
            text = visible(bar.text)
            if text and end - begin < len(text) <= next_begin - begin:  # a moment that has a name, such as a version
                end = begin + len(text)
            line.append(" " * (begin - at))
            fits = len(text) <= end - begin
            line.append((text if fits else "").ljust(end - begin, LETTERS[bar.tone]), style=STYLES[bar.tone])
            at = end
        yield line
    shown = of_number(whole)
    yield Text(" " * label + "0" + f"{shown} {lanes.unit}".rjust(columns - 1))
    yield from _legend(lanes.legend, letters=True)
    for arrow in sorted(lanes.arrows, key=lambda arrow: (arrow.sent, arrow.received))[:MOST_ARROWS]:
        yield Text(
            f"{of_number(arrow.sent):>7} -> {of_number(arrow.received)}: {lanes.lanes[arrow.sender]} -> "
            f"{lanes.lanes[arrow.receiver]}{': ' if arrow.text else ''}{visible(arrow.text)}"
        )


def _network(network: NodeNetwork) -> Iterator[Text]:
    """A line for each node: to whom it talks."""
    label = max(len(node.name) for node in network.nodes) + 1
    for number, node in enumerate(network.nodes):
        line = Text(visible(node.name).ljust(label))
        for link in network.links:
            if number not in (link.first, link.second):
                continue
            other = network.nodes[link.second if number == link.first else link.first]
            line.append("  ")
            line.append(f"-- {visible(other.name)}", style=STYLES[link.tone] if link.is_new else "")
            if link.text:
                line.append(f" ({visible(link.text)})")
        yield line
    yield from _legend(network.legend, letters=False)


def _chart(chart: Chart) -> Iterator[RenderableType]:
    """A table of at most MOST_POINTS points, with a bar for the first line."""
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    step = math.ceil(len(xs) / MOST_POINTS)
    shown = [*xs[::step], *(xs[-1:] if (len(xs) - 1) % step else [])]
    values = [dict(line.points) for line in chart.lines]
    first = [value for value in values[0].values() if math.isfinite(value) and (value > 0 or not chart.is_log)]
    rows = []
    for x in shown:
        at = [one.get(x) for one in values]
        rows.append([f"{x:g}", *map(_value, at), "#" * _length(at[0], first, is_log=chart.is_log)])
    heads = [chart.x, *(line.name for line in chart.lines), chart.y]
    yield _table(TextTable(heads, rows, numbers=range(len(chart.lines) + 1)), whole=len(heads) - 1)


def _value(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def _length(value: float | None, all_: Sequence[float], *, is_log: bool) -> int:
    """Characters of a bar."""
    if value is None or not all_ or not math.isfinite(value):
        return 0
    if is_log:
        low, high = math.log10(min(all_)), math.log10(max(all_))
        return 1 + round((BAR - 1) * (math.log10(value) - low) / ((high - low) or 1.0)) if value > 0 else 0
    return max(0, round(BAR * value / (max(all_) or 1.0)))


def _table(table: TextTable, whole: int | None = None) -> RichTable:
    """A table of rich. `whole`: the index of a column whose cells are not broken into lines."""
    shown = RichTable(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(table.columns):
        right = number in table.numbers
        name = Text(visible(head))
        shown.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=number == whole)
    for row in table.rows:
        shown.add_row(*(Text(visible(cell)) for cell in row))
    return shown
