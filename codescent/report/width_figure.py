"""In: mean absolute activations by width. Out: a figure of matplotlib: without and with mu-P, a line for each place.
Does not measure (train/coordinates.py does) and does not write files."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from codescent.report.curves import DASHES
from codescent.report.frame import framed, legend_above
from codescent.report.style import NO_UNIT, PALETTE, plain
from codescent.study.widths import PlaceSizes

SIZE_IN = (9.0, 4.0)


def draw_widths(places: Sequence[PlaceSizes], steps: int, config: str = "", width_in: float = SIZE_IN[0]) -> Figure:
    """Draw the sizes after `steps` steps over the width, on logarithmic axes that both panels share.

    `config`: what was trained on what, in a line.
    """
    figure = Figure(figsize=(width_in, SIZE_IN[1]), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(one.place for one in places))
    for axes, mup in zip(panels, (False, True), strict=True):
        for one in (one for one in places if one.mup is mup):
            number = names.index(one.place)
            colour, dashes = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
            axes.plot(
                list(one.sizes), list(one.sizes.values()), color=colour, ls=dashes, marker="o", ms=4, label=one.place
            )
            widths = list(one.sizes)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("hidden_dim (channels)", fontsize=9)
        axes.set_title(f"{'with' if mup else 'without'} mu-P", fontsize=10, fontweight="bold", loc="left")
        plain(axes)
    panels[0].set_ylabel(f"mean |activation| {NO_UNIT}", fontsize=9)
    legend_above(figure, *panels[0].get_legend_handles_labels())
    return framed(figure, f"Sizes of activations in step {steps}, by width of the model", config)
