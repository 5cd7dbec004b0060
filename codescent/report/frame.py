"""In: a figure of matplotlib, its title, what was run, its notes. Out: the figure with them in it; nothing is cut.
Does not draw data (the other files of this room do) and does not write a file. What is too wide is wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from codescent.base.visible import one_line
from codescent.report.style import TEXT_GREY, literal, quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from codescent.report.content import Picture

EDGE_IN = 0.12
"""Between text and the edge of the figure, and between two texts."""
LINE_SPACING = 1.25
POINTS_PER_IN = 72.0
LEGEND_SIZE = 8.0
KEY_EMS = 4.8
"""Width of a key of a legend beside its label: the line, and the space before the next column."""


class FrameText(NamedTuple):
    """Text of one look. `size`: in points."""

    text: str
    size: float
    bold: bool = False
    colour: str = "black"

    @property
    def style(self) -> dict[str, Any]:
        """For matplotlib."""
        return {"fontsize": self.size, "fontweight": "bold" if self.bold else "normal", "color": self.colour}


def title_block(title: str) -> FrameText:
    """The title of a figure."""
    return FrameText(title, 11.0, bold=True)


def small_block(text: str) -> FrameText:
    """What was run; or a note."""
    return FrameText(text, 8.0, colour=TEXT_GREY)


def standing(picture: Picture, width_in: float | None = None) -> Figure:
    """A figure of a report that is understood without its page. `width_in`: None: its usual width."""
    figure = picture.draw() if width_in is None else picture.draw(width_in)
    return framed(figure, picture.title, picture.config, [picture.caption])


def framed(figure: Figure, title: str, config: str, notes: Sequence[str] = ()) -> Figure:
    """Write the title and what was run above, and notes below. The figure becomes higher by their height.

    `figure`: with the constrained layout.
    """
    layout = figure.get_layout_engine()
    assert layout is not None
    width_in, body_in = figure.get_size_inches()
    above = [title_block(title), *([small_block(config)] if config else [])]
    below = [small_block(note) for note in notes if note]
    top_in, bottom_in = (height_of(some, width_in - 2 * EDGE_IN) for some in (above, below))
    height_in = body_in + top_in + bottom_in
    figure.set_size_inches(width_in, height_in)
    write(figure, above, EDGE_IN, EDGE_IN)
    write(figure, below, EDGE_IN, height_in - bottom_in)
    left, low, wide, high = layout.get()["rect"]
    layout.set(rect=(left, (bottom_in + low * body_in) / height_in, wide, high * body_in / height_in))  # type: ignore[call-arg]
    for legend in figure.legends:
        legend.set_bbox_to_anchor(_corner(figure, top_in), figure.transFigure)
    return figure


def write(figure: Figure, blocks: Sequence[FrameText], left_in: float, top_in: float) -> float:
    """Write blocks below each other, wrapped to the figure's width. Returns where the next one would begin.

    `top_in`: inches from the top.
    """
    width_in, height_in = figure.get_size_inches()
    for block in blocks:
        lines = wrapped(block, width_in - left_in - EDGE_IN)
        figure.text(
            left_in / width_in, 1 - top_in / height_in, "\n".join(map(literal, lines)), va="top",
            linespacing=LINE_SPACING, **block.style,
        )  # fmt: skip
        top_in += _lines_in(block, len(lines))
    return float(top_in)


def wrapped(block: FrameText, width_in: float) -> list[str]:
    """The lines of a block that is at most so wide. Control characters are escaped; too long words are broken."""
    text = one_line(block.text)
    longest = max(1, len(text))
    while longest > 1:
        lines = wrap(text, longest)
        widest_in = max((_width_in(line, block) for line in lines), default=0.0)
        if widest_in <= width_in:
            return lines
        longest = min(longest - 1, max(1, int(longest * width_in / widest_in)))
    return wrap(text, 1)


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend above the axes, in as many columns as there is room for. The figure becomes higher by its height.

    `figure`: with the constrained layout. `labels`: as `literal` makes them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not handles:
        return
    layout = figure.get_layout_engine()
    assert layout is not None
    width_in, body_in = figure.get_size_inches()
    names, columns = legend_labels(labels, width_in - 2 * EDGE_IN)
    legend = figure.legend(
        handles, names, loc="upper left", ncols=columns, fontsize=LEGEND_SIZE, frameon=False, borderaxespad=0.0,
        borderpad=0.2,
    )  # fmt: skip
    with quiet():
        renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
        pixels = legend.get_window_extent(renderer).height
    height_in = body_in + pixels / figure.dpi
    figure.set_size_inches(width_in, height_in)
    layout.set(rect=(0.0, 0.0, 1.0, body_in / height_in))  # type: ignore[call-arg]
    legend.set_bbox_to_anchor(_corner(figure, 0.0), figure.transFigure)


def _corner(figure: Figure, top_in: float) -> tuple[float, float]:
    """Where a legend begins, `top_in` inches from the top of the figure."""
    width_in, height_in = figure.get_size_inches()
    return float((EDGE_IN - 0.05) / width_in), float(1 - top_in / height_in)


def legend_labels(labels: Sequence[str], width_in: float, size: float = LEGEND_SIZE) -> tuple[list[str], int]:
    """Labels of a legend, wrapped where one is too wide, and the number of columns for which there is room."""
    key_in = KEY_EMS * size / POINTS_PER_IN
    raw = [FrameText(label.replace(r"\$", "$"), size) for label in labels]
    lines = [wrapped(block, width_in - key_in) for block in raw]
    widest_in = max((_width_in(line, FrameText("", size)) for some in lines for line in some or [""]), default=0.0)
    names = ["\n".join(map(literal, some)) for some in lines]
    return names, max(1, min(len(names), int(width_in / (widest_in + key_in))))


def height_of(blocks: Sequence[FrameText], width_in: float) -> float:
    """The height of blocks in inches, with the distance to what is beside them."""
    return sum(_lines_in(block, len(wrapped(block, width_in))) for block in blocks) + EDGE_IN * bool(blocks)


def _lines_in(block: FrameText, lines: int) -> float:
    return lines * block.size * LINE_SPACING / POINTS_PER_IN + 0.04


def _width_in(line: str, block: FrameText) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(size=block.size, weight="bold" if block.bold else "normal")
    with quiet():
        width, _, _ = TextToPath().get_text_width_height_descent(line, font, ismath=False)
    return 1.03 * float(width) / POINTS_PER_IN  # hinting makes drawn text a little wider
