"""In: the run folders of two trainings of one config. Out: a picture of their losses (SVG): `docs/loss.svg`.
Does not train: the runs are those of docs/features.md, section "The two pictures"."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.record import RunFolder
from codescent.verbs.timeline import PICTURES, SVG

MEAN_OF = 10  # steps in a point of a curve
DRAWN = Path(__file__).with_name("loss.svg")


def losses(folder: Path) -> tuple[list[float], dict[int, float]]:
    """Read the training loss of each step, and the validation losses by step."""
    rows = RunFolder.open(folder).read_metrics()
    validation = {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None}
    return [row["train_loss"] for row in rows], validation


def picture(curves: Sequence[tuple[str, list[float], dict[int, float]]], suffix: str = ".svg") -> bytes:
    """Draw the training losses of two runs of one config: the first as a broad line, the second on top of it.

    Each curve is a name, the training loss of each step, and the validation losses by step.
    """
    figure = Figure(figsize=(9.6, 3.6), dpi=110)
    axes = figure.add_axes((0.08, 0.15, 0.87, 0.63))
    for (name, train, _), colour, width in zip(curves, ("#E69F00", "#0072B2"), (6.0, 1.6)):
        ends = range(MEAN_OF, len(train) + 1, MEAN_OF)
        means = [sum(train[end - MEAN_OF : end]) / MEAN_OF for end in ends]
        axes.plot(list(ends), means, color=colour, linewidth=width, label=name)
    validation = curves[0][2]
    style = {"color": "black", "markersize": 5, "clip_on": False, "label": f"validation loss, {curves[0][0]}"}
    axes.plot(list(validation), list(validation.values()), "o", **style)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("loss (nats per token)", fontsize=9)
    axes.set_xlim(0, len(curves[0][1]))
    axes.tick_params(labelsize=8)
    axes.grid(color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.text(0.08, 0.92, "The loss of one run, trained twice", fontsize=12, fontweight="bold", va="center")
    figure.text(0.08, 0.84, _difference(curves), fontsize=9, va="center")
    content = io.BytesIO()
    with rc_context(SVG):
        figure.savefig(content, format=suffix[1:], metadata=PICTURES[suffix])
    return content.getvalue()


def _difference(curves: Sequence[tuple[str, list[float], dict[int, float]]]) -> str:
    first, second = curves[0][1], curves[1][1]
    most = max(abs(a - b) for a, b in zip(first, second, strict=True))
    return (
        f"in {len(first)} steps the two losses are never more than {most:.1e} nats apart; "
        f"a point is the mean of {MEAN_OF} steps"
    )


def main(words: Sequence[str] | None = None, drawn: Path = DRAWN) -> int:
    """Draw `drawn`. Returns 0, or 2 if the run folders are not two trainings of the same steps: they are all named."""
    parser = argparse.ArgumentParser(description=f"Draw the losses of two trainings of one config: {drawn.name}.")
    parser.add_argument("one", type=Path, metavar="RUN", help="run folder of one rank")
    parser.add_argument("two", type=Path, metavar="RUN", help="run folder of two ranks")
    folders = vars(parser.parse_args(words))
    curves, problems = [], []
    for name, folder in zip(("1 rank", "2 ranks"), folders.values()):
        try:
            curves.append((name, *losses(folder)))
        except UserError as error:
            problems += error.problems
            continue
        count = len(curves[-1][1])
        if count < MEAN_OF:
            problems.append(f"{folder}: has {count} steps; a point of the picture is the mean of {MEAN_OF}")
    if not problems and len(curves[0][1]) != len(curves[1][1]):
        counts = " and ".join(f"{folder} {len(curve[1])}" for folder, curve in zip(folders.values(), curves))
        problems.append(f"the runs have different numbers of steps: {counts}; train both with the same config")
    if problems:
        print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 2
    replace_file(drawn, picture(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
