"""In: a figure of a lesson. Out: the same as SVG: a grid, lanes or a network of shapes, a chart of matplotlib.
Does not choose colours (lesson.css has them, for light and dark) and makes no page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from markupsafe import Markup

from codescent.base.amounts import of_number
from codescent.base.visible import visible
from codescent.explain.content import Arrow, Chart, Grid, NodeNetwork, RankLanes, TextTable, Tone
from codescent.report.content import Picture
from codescent.report.page import inline_svg
from codescent.report.style import PALETTE, PICTURE_IN, literal, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

LETTER = 7.4
"""Mean width of a letter of 13 pixels; of the widest fonts that a page may have."""
ROW, GAP, LINE, LANE, NODE = 26.0, 3.0, 20.0, 28.0, 17.0
LABEL = 12.0
"""Height of the text of an arrow."""
SHARES = tuple(share / 20 for share in (10, 8, 12, 6, 14, 5, 15, 4, 16, 3, 17, 9, 11, 7, 13))
"""Places on an arrow that its text may have; the middle is tried first."""
STEPS = 24
"""Points of an arrow at which a text may be in its way."""
WIDE = 720.0
"""Of lanes and networks, in pixels."""


@dataclass(frozen=True)
class Drawn:
    """A figure as shapes. FormulaSizes are in pixels. `said`: what a reader hears who does not see it."""

    width: float
    height: float
    body: Markup
    said: str = ""

    def element(self) -> Markup:
        """As an element of a page, as wide as there is room, at most `width`."""
        sizes = '<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" style="min-width:min({0:.0f}px,34rem)" '
        shape = sizes + 'role="img" aria-label="{2}">{3}</svg>'
        return Markup(shape).format(self.width, self.height, self.said, self.body)


def drawn(figure: Grid | RankLanes | NodeNetwork, title: str) -> Drawn:
    """The shapes of a figure. `title`: of its frame."""
    if isinstance(figure, Grid):
        shapes = _grid(figure)
    elif isinstance(figure, RankLanes):
        shapes = _lanes(figure)
    else:
        shapes = _network(figure)
    legend, high = _legend(figure.legend, shapes.width)
    body = shapes.body + _group(0, shapes.height + LINE / 2, legend)
    return Drawn(shapes.width, shapes.height + (high + LINE / 2 if high else 0), body, visible(title))


def table_drawn(table: TextTable) -> Drawn:
    """The shapes of a table, for a picture; a page has its own."""
    rows = [table.columns, *table.rows]
    widths = [_wide([row[column] for row in rows]) + 18 for column in range(len(table.columns))]

    def parts() -> Iterator[Markup]:
        for number, row in enumerate(rows):
            x = 0.0
            for column, cell in enumerate(row):
                right = column in table.numbers
                at = x + widths[column] - 18 if right else x
                yield _text(at, number * LINE + 14, cell, "" if number else "small", "end" if right else "start")
                x += widths[column]

    return Drawn(sum(widths), LINE * len(rows) + 4, _joined(parts()))


def chart_svg(chart: Chart, name: str, title: str) -> Markup:
    """A chart as an element of a page. `name`: unique in the page. Needs matplotlib."""
    return inline_svg(Picture(name, title, "", lambda: _chart(chart)))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> Markup:
    shape = '<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>'
    return Markup(shape).format(x, y, kind, anchor, visible(text))


def _box(x: float, y: float, width: float, height: float, tone: Tone, more: str = "", title: str = "") -> Markup:
    said = Markup("<title>{}</title>").format(visible(title)) if title else Markup()
    shape = '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="t-{} {}">{}</rect>'
    return Markup(shape).format(x, y, max(width, 0.5), height, tone.value, more, said)


def _group(x: float, y: float, body: Markup) -> Markup:
    return Markup('<g transform="translate({:.1f} {:.1f})">{}</g>').format(x, y, body)


def _joined(parts: Iterator[Markup]) -> Markup:
    return Markup("\n").join(parts)


def _wide(texts: Sequence[str]) -> float:
    return LETTER * max(map(len, texts), default=0)


def _legend(legend: Sequence[tuple[Tone, str]], width: float) -> tuple[Markup, float]:
    """The legend in as many lines as it needs, and its height."""
    parts: list[Markup] = []
    x, y = 0.0, 0.0
    for tone, meaning in legend:
        wide = 22 + LETTER * len(meaning) + 14
        if x and x + wide > width:
            x, y = 0.0, y + LINE
        parts += [_box(x, y, 14, 14, tone), _text(x + 20, y + 12, meaning, "small")]
        x += wide
    return Markup("").join(parts), y + LINE if legend else 0.0


def _grid(grid: Grid) -> Drawn:
    left = _wide([grid.corner, *(name for name, _ in grid.rows)]) + 10
    cell = max(30.0, _wide([*grid.columns, *(cell.text for _, cells in grid.rows for cell in cells)]) + 12)

    def parts() -> Iterator[Markup]:
        yield _text(0, ROW - 9, grid.corner, "small")
        for column, head in enumerate(grid.columns):
            yield _text(left + (column + 0.5) * cell, ROW - 9, head, "small", "middle")
        for row, (name, cells) in enumerate(grid.rows, 1):
            yield _text(0, row * ROW + 17, name)
            for column, one in enumerate(cells):
                x, y = left + column * cell, row * ROW
                more = "is-new" if one.is_new else ""
                yield _box(x + GAP / 2, y + GAP / 2, cell - GAP, ROW - GAP, one.tone, more)
                yield _text(x + cell / 2, y + 17.5, one.text, f"on-{one.tone.value}", "middle")

    return Drawn(left + cell * len(grid.columns), ROW * (len(grid.rows) + 1), _joined(parts()))


def _lanes(lanes: RankLanes) -> Drawn:
    left = _wide(lanes.lanes) + 10
    unit = (WIDE - left) / lanes.end
    high = LANE * len(lanes.lanes)

    def parts() -> Iterator[Markup]:
        for lane, name in enumerate(lanes.lanes):
            yield _text(0, lane * LANE + 18, name)
            yield _box(left, lane * LANE + 4, WIDE - left, LANE - 8, Tone.NOTHING)
        for bar in lanes.bars:
            x, wide = left + bar.start * unit, (bar.end - bar.start) * unit
            times = f"{of_number(bar.start)} - {of_number(bar.end)} {lanes.unit}"
            yield _box(x, bar.lane * LANE + 4, wide, LANE - 8, bar.tone, "bar", f"{bar.text} {times}".strip())
            if bar.text and LETTER * len(bar.text) <= wide:
                yield _text(x + wide / 2, bar.lane * LANE + 18, bar.text, f"on-{bar.tone.value}", "middle")
        ways = [_way(arrow, left, unit) for arrow in lanes.arrows]
        yield from map(_arrow, ways)
        for (x, y), arrow in zip(_label_places(lanes.arrows, ways), lanes.arrows, strict=True):
            if arrow.text:
                yield _text(x, y + 4, arrow.text, "small on-line", "middle")
        for tick in range(5):
            at = left + (WIDE - left) * tick / 4
            anchor = ("start", "middle", "middle", "middle", "end")[tick]
            yield _text(at, high + 15, of_number(lanes.end * tick / 4), "small", anchor)
        yield _text(WIDE, high + 15 + LINE * 0.8, lanes.unit, "small", "end")

    return Drawn(WIDE, high + 2 * LINE, _joined(parts()))


_Place = tuple[float, float]


def _way(arrow: Arrow, left: float, unit: float) -> tuple[_Place, _Place]:
    """Where an arrow begins and ends."""
    begin = left + arrow.sent * unit, arrow.sender * LANE + LANE / 2
    return begin, (left + arrow.received * unit, arrow.receiver * LANE + LANE / 2)


def _arrow(way: tuple[_Place, _Place]) -> Markup:
    """A line that ends in a head."""
    (x, y), (to_x, to_y) = way
    angle = math.atan2(to_y - y, to_x - x)
    sides = [(to_x - 9 * math.cos(angle + turn), to_y - 9 * math.sin(angle + turn)) for turn in (0.4, -0.4)]
    head = " ".join(f"{one:.1f},{other:.1f}" for one, other in [(to_x, to_y), *sides])
    line = Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="arrow"/>').format(x, y, to_x, to_y)
    return line + Markup('<polygon points="{}" class="arrow-head"/>').format(head)


def _label_places(arrows: Sequence[Arrow], ways: Sequence[tuple[_Place, _Place]]) -> list[_Place]:
    """The middle of each arrow's text: on its arrow, away from other texts, and from other arrows as far as can be."""
    found: list[_Place] = []
    taken: list[tuple[_Place, float]] = []
    for number, (arrow, (begin, end)) in enumerate(zip(arrows, ways, strict=True)):
        half = LETTER * len(arrow.text) / 2
        others = [way for index, way in enumerate(ways) if index != number]
        places = [(begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])) for share in SHARES]
        found.append(min(places, key=partial(_crowd, half=half, taken=taken, others=others)))
        if arrow.text:
            taken.append((found[-1], half))
    return found


def _crowd(
    at: _Place, half: float, taken: Sequence[tuple[_Place, float]], others: Sequence[tuple[_Place, _Place]]
) -> tuple[int, int]:
    """How many texts and arrows are in the way of a text, which is twice `half` wide."""
    texts = sum(abs(at[0] - x) < half + wide and abs(at[1] - y) < LABEL for (x, y), wide in taken)
    return texts, sum(_is_near(at, way, half) for way in others)


def _is_near(at: _Place, way: tuple[_Place, _Place], half: float) -> bool:
    """Whether an arrow goes through a text."""
    (x, y), (to_x, to_y) = way
    for step in range(STEPS + 1):
        share = step / STEPS
        if abs(x + share * (to_x - x) - at[0]) < half + 4 and abs(y + share * (to_y - y) - at[1]) < 0.7 * LABEL:
            return True
    return False


def _network(network: NodeNetwork) -> Drawn:
    deep = 50.0 + 55.0 * min(8, len({round(node.y, 3) for node in network.nodes}))
    margin = max(NODE + 4, _wide([node.name for node in network.nodes]) / 2)
    width = min(WIDE, 120.0 + 2 * margin + 90.0 * len({round(node.x, 3) for node in network.nodes}))
    places = [
        (margin + node.x * (width - 2 * margin), NODE + 4 + node.y * (deep - 2 * NODE - 26)) for node in network.nodes
    ]

    def parts() -> Iterator[Markup]:
        for link in network.links:
            (x, y), (to_x, to_y) = places[link.first], places[link.second]
            kind = f"link s-{link.tone.value}{' is-new' if link.is_new else ''}"
            line = '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>'
            yield Markup(line).format(x, y, to_x, to_y, kind)
            if link.text:
                yield _text((x + to_x) / 2, (y + to_y) / 2 - 3, link.text, "small on-line", "middle")
        circle = '<circle cx="{:.1f}" cy="{:.1f}" r="{:.0f}" class="t-{}"/>'
        for node, (x, y) in zip(network.nodes, places, strict=True):
            yield Markup(circle).format(x, y, NODE, node.tone.value)
            inside = LETTER * len(node.name) < 2 * NODE
            kind = f"on-{node.tone.value}" if inside else "small on-line"
            yield _text(x, y + 5 if inside else y + NODE + 13, node.name, kind, "middle")

    return Drawn(width, deep, _joined(parts()))


def _chart(chart: Chart) -> MatplotlibFigure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=PICTURE_IN, layout="constrained")
    axes = figure.add_subplot()
    for number, line in enumerate(chart.lines):
        xs, ys = zip(*line.points, strict=True)
        colour = PALETTE[number % len(PALETTE)]
        axes.plot(xs, ys, marker="o", ms=3.5, lw=1.4, color=colour, label=literal(line.name))
    if chart.is_log:
        axes.set_yscale("log")
    axes.set_xlabel(literal(chart.x), fontsize=9)
    axes.set_ylabel(literal(chart.y), fontsize=9)
    if all(x.is_integer() for line in chart.lines for x, _ in line.points):  # such as ranks: half a rank is none
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)
    axes.legend(fontsize=8, frameon=False)
    return figure
