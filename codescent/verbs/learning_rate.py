"""In: the losses of a learning-rate range test. Out: suggested learning rates, printed; the losses as CSV and picture.
Does not train: train/range_test.py does. It does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from codescent.base.amounts import rounded
from codescent.base.durable import replace_file
from codescent.base.errors import RunFailed, UserError
from codescent.base.output import say, warn
from codescent.base.published import in_words
from codescent.base.writing import make_parents
from codescent.config.sections import Optimizer
from codescent.report.frame import framed, legend_above
from codescent.report.style import BLACK, LOSS_UNIT, NO_UNIT, PALETTE, no_matplotlib, picture_bytes, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from codescent.train.range_test import RangeTest

HALF = 3  # a smoothed loss is the mean of this many losses before, of as many after, and of its own
FIRST = 10  # losses at rates that are too low to change anything: their deviation is that of the batches
CLEAR = 3.0  # a loss has fallen if it is so many deviations below the first losses


FILES = ("-learning-rate.csv", "-learning-rate.png")
"""Ends of the names of the files, which are beside the run folders."""


@dataclass(frozen=True)
class Suggestion:
    """Learning rates that a range test suggests.

    Attributes:
        steepest: where the smoothed loss falls most per factor of the rate (fastai's "steep").
        tenth: a tenth of the rate with the lowest smoothed loss (fastai's "minimum").
        lowest: the index of that rate.
    """

    steepest: float
    tenth: float
    lowest: int


def smoothed(losses: Sequence[float]) -> list[float]:
    """The centred moving average of losses; the window is narrower at both ends."""
    halves = [min(HALF, index, len(losses) - 1 - index) for index in range(len(losses))]
    return [fmean(losses[index - half : index + half + 1]) for index, half in enumerate(halves)]


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion | None:
    """The learning rates that the losses suggest; None: the loss has not clearly fallen at any rate."""
    means = smoothed(losses)
    if len(means) <= FIRST:
        return None
    first, deviation = fmean(losses[:FIRST]), pstdev(losses[:FIRST])
    lowest = min(range(len(means)), key=means.__getitem__)
    if lowest < FIRST or means[lowest] >= first - CLEAR * deviation:
        return None
    # The rates are equally spaced on a logarithmic axis, so the difference over 2 HALF steps is a slope.
    slopes = {index: means[min(index + HALF, lowest)] - means[index - HALF] for index in range(HALF, lowest + 1)}
    return Suggestion(rates[min(slopes, key=slopes.__getitem__)], rates[lowest] / 10, lowest)


def report(test: RangeTest, optimizer: Optimizer, run: Path) -> None:
    """Write the CSV and the picture beside the run folder, and print the suggestion.

    Args:
        test: on rank 0.
        optimizer: the section of the config.
        run: the path that the run folder of this config would have.

    Raises:
        UserError: a file cannot be written.
        RunFailed: no rate can be suggested, because the loss has not fallen.
    """
    files = [run.with_name(run.name + end) for end in FILES]
    found = suggest(test.rates, test.losses)
    lines = [
        f"{rate!r},{loss!r},{mean!r}\n" for rate, loss, mean in zip(test.rates, test.losses, smoothed(test.losses))
    ]
    _write(files[0], "learning_rate,loss,smoothed_loss\n" + "".join(lines))
    if problem := no_matplotlib():
        warn(f"{files.pop()}: {problem}")
    else:
        _write(files[1], picture_bytes(draw(test, found, optimizer), ".png"))
    if test.ending:
        say([f"ended after {len(test.losses)} rates, because {test.ending}"])
    written = f"the losses are in {' and '.join(map(str, files))}"
    if found is None:
        raise RunFailed(f"no learning rate clearly lowered the loss, so none is suggested; {written}")
    say(["", *_table(found, optimizer), "", f"to train with it: {_overrides(found, optimizer)}", written])


def _write(path: Path, content: str | bytes) -> None:
    try:
        make_parents(path.parent)
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {in_words(error)}") from error


def _table(found: Suggestion, optimizer: Optimizer) -> list[str]:
    rows = [
        (found.steepest, "suggested: the loss falls most at this rate"),
        (found.tenth, "a tenth of the rate with the lowest loss"),
        (10 * found.tenth, "the loss is lowest at this rate; too high for a whole run"),
        (optimizer.learning_rate, "optimizer.learning_rate of the config"),
    ]
    return [f"  {rounded(rate):>8}  {meaning}" for rate, meaning in rows]


def _overrides(found: Suggestion, optimizer: Optimizer) -> str:
    """The words of a command line that set the suggested rate, and a lower end of the decay if it is above it."""
    words = [f"optimizer.learning_rate={rounded(found.steepest)}"]
    if optimizer.min_learning_rate > float(rounded(found.steepest)):
        words.append(f"optimizer.min_learning_rate={rounded(found.steepest / 10)}")
    return " ".join(words)


def draw(test: RangeTest, found: Suggestion | None, optimizer: Optimizer) -> Figure:
    """Draw the losses over the learning rate, and the suggested rates as vertical lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(test.rates, test.losses, color=PALETTE[0], alpha=0.3, lw=1.0)
    means = smoothed(test.losses)
    axes.plot(test.rates, means, color=PALETTE[0], lw=1.8, label=f"training loss, mean of {2 * HALF + 1} steps")
    if found is not None:
        axes.axvline(found.steepest, color=PALETTE[1], label=f"suggested: {rounded(found.steepest)}")
        axes.axvline(found.tenth, color=PALETTE[2], ls="--", label=f"a tenth of the lowest: {rounded(found.tenth)}")
    axes.axvline(optimizer.learning_rate, color=BLACK, ls=":", label=f"config: {rounded(optimizer.learning_rate)}")
    axes.set_xscale("log")
    axes.set_xlabel(f"learning rate {NO_UNIT}", fontsize=9)
    axes.set_ylabel(f"loss ({LOSS_UNIT})", fontsize=9)
    low, first = min(means, default=0.0), fmean(test.losses[:FIRST]) if test.losses else 1.0
    axes.set_ylim(low - 0.1 * (first - low or 1.0), first + 0.6 * (first - low or 1.0))
    plain(axes)
    legend_above(figure, *axes.get_legend_handles_labels())
    return framed(figure, f"Learning-rate range test, {optimizer.kind}", test.ran)
