"""In: a figure of matplotlib. Out: its bytes as PNG or SVG; the colours and the look that all figures share.
Does not draw (the other files of this room do) and does not write a file. It imports matplotlib only to write one."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from codescent.base.extra import install
from codescent.base.output import warn_once
from codescent.base.visible import visible
from codescent.cost.doing import Doing
from codescent.plan import Verb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES: dict[str, dict[str, str | None]] = {".png": {}, ".svg": {"Creator": None, "Date": None}}
"""The suffix of each picture format, with metadata for matplotlib. None leaves out the date and the version."""
SVG: dict[Any, str] = {"svg.hashsalt": "codescent", "svg.fonttype": "none"}
"""Settings of matplotlib for SVG: equal pictures are equal files, and text is stored as text."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of the palette of Okabe and Ito, which colour-blind readers can distinguish. Yellow is left out: too pale."""
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK = PALETTE
LINE_GREY, TEXT_GREY, PALE_GREY = "#DDDDDD", "#444444", "#999999"
"""Of grids; of captions; of loading and of what is left over."""
PICTURE_IN = (5.2, 3.3)
"""Width and height of a figure of a report: two stand beside each other, one fits a telephone."""
WAITING, COLLECTIVE = "#EEEEEE", VERMILION
BUBBLE = "#C8C8C8"
NO_UNIT = "(no unit)"
LOSS_UNIT = "nats per token, or the unit of the task"
YELLOW, BROWN, PURPLE, TEAL, CRIMSON, LIME = "#F0E442", "#8C564B", "#6A4C93", "#A6D5D0", "#C2185B", "#8DB600"
"""Colours of timelines alone, where they have an area."""

COLOURS: dict[Verb, str] = {
    Verb.LOAD: PALE_GREY,
    Verb.FORWARD: BLUE,
    Verb.BACKWARD: GREEN,
    Verb.BACKWARD_INPUT: ORANGE,
    Verb.BACKWARD_WEIGHT: PINK,
    Verb.SEND_ACTIVATION: BROWN,
    Verb.RECEIVE_ACTIVATION: BROWN,
    Verb.SEND_GRADIENT: BROWN,
    Verb.RECEIVE_GRADIENT: BROWN,
    Verb.REDUCE: BROWN,
    Verb.STEP: BLACK,
    Verb.AVERAGE: BROWN,
    Verb.MERGE: BROWN,
    Verb.PUSH: BROWN,
    Verb.PULL: BROWN,
    Verb.SERVE: BROWN,
    Verb.EXCHANGE: BROWN,
}
"""The colour of each instruction in a picture of a step, while the rank computes."""
VERB_NAMES: dict[Verb, str] = {
    **dict.fromkeys(COLOURS, "encodes, adds, copies"),
    Verb.LOAD: "data",
    Verb.FORWARD: "forward",
    Verb.BACKWARD: "backward",
    Verb.BACKWARD_INPUT: "backward input",
    Verb.BACKWARD_WEIGHT: "backward weight",
    Verb.STEP: "optimizer",
}
"""The name of each instruction in the legend of a step, planned or measured. There, equal names have one colour."""
DOING: dict[Doing, tuple[str, str]] = {
    Doing.COLLECTIVE: ("in a collective", COLLECTIVE),
    Doing.MESSAGE: ("message", SKY),
    Doing.SERVER: ("waits for a server", YELLOW),
    Doing.RANK: ("waits for another rank", BUBBLE),
    Doing.RECEIVE: ("server receives", TEAL),
    Doing.APPLY: ("server applies", CRIMSON),
    Doing.ANSWER: ("server answers", PURPLE),
}
"""The name and the colour of each wait, and of what a server does. What is sent beside computing looks like the wait
for it."""
GATHERED = "gathered unit", LIME
"""The name and the colour of weights that ranks gather from each other (ZeRO)."""
IDLE = "idle", WAITING
"""The name and the colour of the time in which nothing is drawn."""
PARTS: dict[str, tuple[str, str]] = {
    "forward_s": ("forward", COLOURS[Verb.FORWARD]),
    "backward_s": ("backward", COLOURS[Verb.BACKWARD]),
    "communication_s": ("communication", COLLECTIVE),
    "bubble_s": ("bubble", BUBBLE),
    "optimizer_s": ("optimizer", COLOURS[Verb.STEP]),
    "data_s": ("data", ORANGE),
    "other_s": ("other", PINK),
}
"""The name and the colour of each part of a step (results.PARTS), from the bottom of a bar to its top."""


MEMORY: dict[str, tuple[str, str]] = {
    "weights_bytes": ("weights", BLUE),
    "gradients_bytes": ("gradients", GREEN),
    "optimizer_bytes": ("optimizer", BLACK),
    "activations_bytes": ("activations", ORANGE),
    "buffers_bytes": ("buckets and gathered units", VERMILION),
    "rest_bytes": ("the rest", BUBBLE),
}
"""The name and the colour of each part of a rank's memory (memory.csv), from the left of a bar."""


def no_matplotlib(otherwise: str = "") -> str:
    """Why no picture can be drawn here, and what mends that; "" if one can.

    Args:
        otherwise: what else would do, such as ", or write a .json trace".
    """
    try:
        if importlib.util.find_spec("matplotlib") is not None:
            importlib.import_module("matplotlib.figure")  # an installation may be broken
            return ""
    except ImportError as error:
        return f"a picture needs matplotlib, which cannot be imported ({error}): {install('plots')}{otherwise}"
    return f"a picture needs matplotlib: {install('plots')}{otherwise}"


def picture_bytes(
    figure: Figure, suffix: str, metadata: Mapping[str, str] | None = None, salt: str = SVG["svg.hashsalt"]
) -> bytes:
    """The figure as a file with this suffix, one of `PICTURES`. Equal figures give equal bytes.

    Args:
        figure: of matplotlib.
        suffix: of the format.
        metadata: keys of the format's metadata, such as Software (PNG) or Title (SVG).
        salt: of the names inside of an SVG, so that those of two figures in one page differ.
    """
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({**SVG, "svg.hashsalt": salt}), quiet():
        figure.savefig(content, format=suffix[1:], metadata={**PICTURES[suffix], **(metadata or {})})
    if suffix == ".png" and lacks_letters(figure):
        warn_once("pictures: the font lacks letters of a name, and shows boxes in their place; an .svg has the letters")
    return content.getvalue()


@contextmanager
def quiet() -> Iterator[None]:
    """A block in which matplotlib does not warn of each letter that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+|Matplotlib currently does not support")
        yield


def lacks_letters(figure: Figure) -> bool:
    """Whether a text of the figure has letters that the font lacks. The reader of an SVG has fonts of its own."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.text import Text

    font = get_font(findfont(FontProperties()))
    texts: Any = figure.findobj(Text)
    letters = set("".join(text.get_text() for text in texts))
    return any(letter.isprintable() and not font.get_char_index(ord(letter)) for letter in letters)


def marked(suffix: str, mark: str) -> dict[str, str]:
    """Metadata of a picture that name the command that has drawn it."""
    return {"Software": mark} if suffix == ".png" else {"Title": mark}


def plain(axes: Axes) -> None:
    """The look of all figures with axes: a pale grid, small numbers, no frame at the top and at the right."""
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color=LINE_GREY, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def literal(name: str) -> str:
    """A name in a figure: $ begins no formula, and control characters are shown as text."""
    return visible(name).replace("$", r"\$")
