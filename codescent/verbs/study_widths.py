"""In: arguments of `codescent study`, a study file of kind "widths". Out: its tables, printed; a file, a picture.
Does not take steps (train/coordinates.py does) and does not evaluate (study/widths.py does)."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from codescent.base.amounts import of_measured
from codescent.base.console import new_console
from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import say, warn
from codescent.base.published import in_words
from codescent.base.visible import visible
from codescent.base.writing import make_parents
from codescent.plan.line import layout_line, model_line
from codescent.report.style import no_matplotlib, picture_bytes
from codescent.study.accept import plan_for
from codescent.study.file import StudyFile, config_named
from codescent.study.widths import PlaceSizes, WidthPoint, judged, width_points
from codescent.study.words import KIND_WORDS

NO_OPTIONS = ("list", "to", "site", "collect", "table", "retry")
"""Options of other studies. Here each point is measured in this process, and nothing is kept to go on from."""
CSV, PNG = "coordinates.csv", "coordinates.png"
COLUMNS = ("mup", "width", "repeat", "place", "step", "mean_abs")


def main(arguments: Namespace, study: StudyFile, baseline: Mapping[str, Any], folder: Path) -> int:
    """Measure all widths without and with mu-P. Returns 1 if activations grow with mu-P, else 0.

    Raises:
        UserError: an option of other studies, or a wrong study: see `width_points`; a file that cannot be written.
    """
    if given := [name for name in NO_OPTIONS if getattr(arguments, name)]:
        raise UserError(f'--{given[0]}: kind = "widths" measures its points in this process; leave it out')
    keys, as_json = study.study, arguments.json
    points = width_points(study, baseline or keys.baseline)
    tell = warn if as_json else (lambda *lines: say(list(lines)))
    tell(
        f"study   {keys.name}: {counted(len(points), 'point')}, each with {counted(keys.repeats, 'seed')}",
        f"config  {config_named(keys.config)}",
        f"folder  {folder}",
    )
    rows = []
    for number, point in enumerate(points):
        rows += [row for repeat in range(keys.repeats) for row in _measured(point, repeat)]
        tell(f"{number + 1} of {len(points)}  hidden_dim={point.width} {_named(point.mup)} mu-P")
    places = _places(rows, keys.steps)
    files = _write(folder, rows, places, study, points)
    if as_json:
        print(json_text(_json(study, places, files)))
    else:
        _show(study, places, files)
    return int(any(one.grows for one in places if one.mup))


def _named(mup: bool) -> str:
    return "with" if mup else "without"


def _measured(point: WidthPoint, repeat: int) -> list[dict[str, Any]]:
    """The rows of a point with one seed: one for each place and step."""
    from codescent.train.coordinates import coordinates

    run = point.config.run.model_copy(update={"seed": point.config.run.seed + repeat})
    found = coordinates(point.config.model_copy(update={"run": run}))
    common = {"mup": point.mup, "width": point.width, "repeat": repeat + 1}
    return [
        {**common, "place": place, "step": step, "mean_abs": size}
        for place, sizes in found.items()
        for step, size in enumerate(sizes, start=1)
    ]


def _places(rows: Sequence[Mapping[str, Any]], steps: int) -> list[PlaceSizes]:
    """The sizes in the last step, as means over seeds."""
    found: dict[tuple[bool, str], dict[int, list[float]]] = {}
    for row in (row for row in rows if row["step"] == steps):
        of_width = found.setdefault((row["mup"], row["place"]), {})
        of_width.setdefault(row["width"], []).append(row["mean_abs"])
    return [
        PlaceSizes(place, mup, {width: fmean(sizes) for width, sizes in of_width.items()})
        for (mup, place), of_width in found.items()
    ]


def _ran(study: StudyFile, points: Sequence[WidthPoint]) -> str:
    """What was run, in a line. Sizes of activations do not depend on the machine, so it is not named."""
    keys, plans = study.study, [plan_for(points[index].config, 1) for index in (0, -1)]
    models = " / ".join(dict.fromkeys(map(model_line, plans)))
    return f"config {config_named(keys.config)}; {models}; {layout_line(plans[0])}; {counted(keys.repeats, 'seed')}"


def _write(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[PlaceSizes],
    study: StudyFile,
    points: Sequence[WidthPoint],
) -> list[Path]:
    """Write the numbers and, where there is matplotlib, the picture. Raises UserError: a file cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "mup": str(row["mup"]).lower()} for row in rows)
    contents: dict[str, str | bytes] = {CSV: text.getvalue()}
    if problem := no_matplotlib():
        warn(f"{folder / PNG}: {problem}")
    else:
        from codescent.report.width_figure import draw_widths

        contents[PNG] = picture_bytes(draw_widths(places, study.study.steps, _ran(study, points)), ".png")
    try:
        make_parents(folder)
        for name, content in contents.items():
            replace_file(folder / name, content)
    except OSError as error:
        raise UserError(f"{folder}: {in_words(error)}") from error
    return [folder / name for name in contents]


def _show(study: StudyFile, places: Sequence[PlaceSizes], files: Sequence[Path]) -> None:
    """Print a table for each parametrization, and what they say."""
    console, keys = new_console(), study.study
    say([
        f"{keys.name}: {KIND_WORDS[keys.kind]}",
        f"mean absolute values in step {keys.steps}; power: of the width that they follow",
        f"every value is in {' and '.join(map(str, files))}",
    ])  # fmt: skip
    for mup in (False, True):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(f"{_named(mup)} mu-P", overflow="fold")
        mine = [one for one in places if one.mup is mup]
        for heading in (*map(str, mine[0].sizes), "power"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in mine:
            table.add_row(Text(visible(one.place)), *map(of_measured, one.sizes.values()), f"{one.power:.2f}")
        console.print()
        console.print(table)
    say(["", judged(places)])


def _json(study: StudyFile, places: Sequence[PlaceSizes], files: Sequence[Path]) -> dict[str, Any]:
    """The same as data: each place with its sizes by width and its power; NaN is null."""
    found = [
        {"place": one.place, "mup": one.mup, "sizes": dict(one.sizes), "power": one.power, "grows": one.grows}
        for one in places
    ]
    keys = study.study
    return {"name": keys.name, "kind": keys.kind, "step": keys.steps, "places": found, "files": list(files)}
