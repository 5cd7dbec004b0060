"""In: a report. Out: one HTML page that contains all it shows. JavaScript only sorts and zooms; no network.
Does not decide what is said (sections.py does) and does not write a file. All text is escaped by the template."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from codescent import __version__
from codescent.base.amounts import of_seconds
from codescent.base.visible import visible
from codescent.report.bars import shortened
from codescent.report.content import Column, Item, Listing, Picture, Report, ReportSection, Table, Timeline, Words
from codescent.report.run_figures import has_idle, kind_colour, legend
from codescent.report.style import IDLE, no_matplotlib, picture_bytes
from codescent.report.walk import StepTimeline

MARK = "codescent report"
"""Stands in every file of this command, which replaces only such files."""
MOST_OPEN = 4
"""Timelines of a page that are open; the reader opens the others."""
ROW = 20
"""Height of a rank in a timeline, in pixels."""
VARIABLES = {
    "#000000": "ink", "#444444": "grey", "#dddddd": "rule", "#eeeeee": "waiting", "#c8c8c8": "bubble",
    "#ffffff": "paper", "#999999": "pale", "#0072b2": "blue", "#d55e00": "vermilion", "#009e73": "green",
    "#cc79a7": "pink", "#e69f00": "orange", "#56b4e9": "sky",
    "#8c564b": "brown", "#f0e442": "yellow",
}  # fmt: skip
"""The colours of style.py as variables of page.css, which has each for light and for dark."""
KINDS: Sequence[tuple[type, str]] = (
    (Picture, "pictures"), (Words, "words"), (Table, "table"), (Listing, "source"), (Timeline, "timeline"),
)  # fmt: skip


@dataclass(frozen=True)
class Lanes:
    """The time axis of a timeline.

    Attributes:
        end: seconds at its right end.
        scale, unit: seconds x scale are units of the axis.
        ticks: place in per cent, and label.
        legend: class and name of each kind of box.
    """

    end: float
    scale: float
    unit: str
    ticks: Sequence[tuple[float, str]]
    legend: Sequence[tuple[str, str]]


def page(report: Report) -> str:
    """The page. Without matplotlib it has no figures, and says so."""
    environment = Environment(
        loader=PackageLoader("codescent.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.finalize = lambda value: visible(value) if type(value) is str else value
    source = environment.loader.get_source  # type: ignore[union-attr]
    script = source(environment, "page.js")[0]
    kinds = {box.kind for timeline in _timelines(report) for walk in timeline.walks for box in walk.boxes}
    colours = [(kind, _themed(kind_colour(kind))) for kind in sorted(kinds)] + [("waiting", "var(--waiting)")]
    style = source(environment, "page.css")[0] + "".join(
        f".k-{kind} {{ fill: {colour}; background: {colour}; }}\n" for kind, colour in colours
    )
    missing = no_matplotlib()
    return environment.get_template("page.html").render(
        report=report,
        mark=f"{MARK} {__version__}",
        written=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        style=Markup(style),
        script=Markup(script),
        script_hash=Markup("sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        without_figures=f"This page has no figures: {missing}." if missing else "",
        groups=lambda section: list(_groups(section, with_pictures=not missing)),
        svg=inline_svg,
        told_columns=_told,
        lanes_of=_lanes,
        boxes=_boxes,
        seconds=of_seconds,
        shortened=shortened,
        most_open=MOST_OPEN,
    )


def _timelines(report: Report) -> Iterator[Timeline]:
    for section in report.sections:
        yield from (item for item in section.items if isinstance(item, Timeline))


def _kind(item: Item) -> str:
    return next(kind for of, kind in KINDS if isinstance(item, of))


def _groups(section: ReportSection, *, with_pictures: bool) -> Iterator[tuple[str, list[Item]]]:
    """Neighbouring items of one kind."""
    for kind, items in groupby(section.items, key=_kind):
        if with_pictures or kind != "pictures":
            yield kind, list(items)


def _told(table: Table) -> list[Column]:
    """The columns whose title does not say all."""
    return [column for column in table.columns if column.meaning]


def inline_svg(picture: Picture) -> Markup:
    """A figure as an element of the page, in the page's colours and font. Its names are unique in the page."""
    figure = picture.draw()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = picture_bytes(figure, ".svg", salt=picture.name).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda found: _themed(found[0]), text)
    text = re.sub(r"<[^>]+>", lambda tag: _shortened(tag[0]), re.sub(r"\s*\n\s*", "\n", text))
    label = escape(picture.title)
    root = re.search(r'viewBox="([^"]*)"', text)
    begin = f'<svg viewBox="{root[1] if root else ""}" role="img" aria-label="{label}">'
    return Markup(begin + text[text.index(">") + 1 :].strip())


def _shortened(tag: str) -> str:
    """The tag with at most two digits behind the points of its coordinates. Words and numbers between tags stay."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag)


def _themed(colour: str) -> str:
    """The colour as a variable of the page, if it is one of the style's."""
    name = VARIABLES.get(colour.lower())
    return f"var(--{name})" if name else colour


def _lanes(timeline: Timeline) -> Lanes:
    end = max(walk.step_s for walk in timeline.walks)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    ticks = [(25.0 * n, f"{end * scale * n / 4:.3g} {unit}") for n in range(4)]
    idle = [(IDLE[0], "waiting")] if has_idle(timeline.walks) else []
    kinds = [*legend(timeline.walks).items(), *idle]
    return Lanes(end, scale, unit, ticks, [(kind, name) for name, kind in kinds])


def _boxes(walk: StepTimeline, lanes: Lanes) -> Markup:
    """The boxes of a timeline as rectangles; 1000 units are the whole time axis."""
    unit = 1000 / lanes.end
    row = {rank: number * ROW for number, rank in enumerate(walk.ranks)}
    back = "".join(
        f'<rect class="k-waiting" x="0" y="{y + 2}" width="{walk.step_s * unit:.2f}" height="{ROW - 4}"/>'
        for y in row.values()
    )
    boxes = "".join(
        f'<rect class="k-{box.kind}" x="{box.start_s * unit:.2f}" y="{row[box.rank] + 2}" '
        f'width="{box.length_s * unit:.2f}" height="{ROW - 4}"><title>{escape(visible(box.what))}</title></rect>\n'
        for box in walk.boxes
    )
    return Markup(back + boxes)
