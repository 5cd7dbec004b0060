"""In: a study file of kind "widths"; measured sizes of activations. Out: its points; how sizes follow the width.
Does not train (verbs/study_widths.py has it done) and does not print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.plan import ModelFacts
from codescent.study.accept import plan_for
from codescent.study.file import StudyFile
from codescent.study.points import is_of, name_of, specs_of

GROWS = 0.2
"""An activation grows if it follows a power of the width above this one. Of AdamW without mu-P powers are 0.5 to 1."""
FEWEST_WIDTHS = 2


@dataclass(frozen=True)
class WidthPoint:
    """A width, and the config with which it trains.

    Attributes:
        width: hidden_dim.
        mup: whether it has mu-P.
    """

    width: int
    mup: bool
    config: Config


@dataclass(frozen=True)
class PlaceSizes:
    """The mean absolute activations of a place of the model.

    Attributes:
        place: "embedding", "block 1" and so on, "logits".
        mup: whether the models have mu-P.
        sizes: after the last step, by width, ascending.
    """

    place: str
    mup: bool
    sizes: Mapping[int, float]

    @property
    def power(self) -> float:
        """The power of the width that fits the sizes best (least squares of logarithms); NaN: a size is no number."""
        if not all(math.isfinite(size) and size > 0 for size in self.sizes.values()):
            return math.nan
        widths, sizes = [math.log(width) for width in self.sizes], [math.log(size) for size in self.sizes.values()]
        middle, mean = fmean(widths), fmean(sizes)
        along = sum((x - middle) ** 2 for x in widths)
        return sum((x - middle) * (y - mean) for x, y in zip(widths, sizes, strict=True)) / along

    @property
    def grows(self) -> bool:
        """Whether it grows with the width, or is no number at some width."""
        return not self.power <= GROWS


def width_points(study: StudyFile, baseline: Mapping[str, object]) -> list[WidthPoint]:
    """Every width without and with mu-P, by width; the baseline is the base of mu-P.

    Raises:
        UserError: points of equal width, fewer than two widths, a baseline that is not one point, several ranks, a
            config that has no plan.
    """
    keys, specs = study.study, specs_of(study)
    words = {spec.name: [*spec.words, f"train.num_steps={keys.steps}"] for spec in specs}
    bases = [spec.name for spec in specs if is_of(spec.axes, baseline)]
    if len(bases) != 1:
        found = ", ".join(bases) or "no point"
        raise UserError(f"{keys.name}: baseline {name_of(baseline)}: is {found}; must be one point, the base of mu-P")
    models = {name: _model(study, name, of_point) for name, of_point in words.items()}
    base, widths = models[bases[0]], _by_width(study, models)
    of_base = {"mup_base_dim": base.hidden_dim, "mup_base_head_dim": base.head_dim}
    points = []
    for width, name in widths.items():
        for mup in (False, True):
            more = [f"model.{key}={value if mup else 'auto'}" for key, value in of_base.items()]
            points.append(WidthPoint(width, mup, load(keys.config, [*words[name], *more]).config))
            plan_for(points[-1].config, 1)  # refuses what has no mu-P
    return points


def _model(study: StudyFile, name: str, words: Sequence[str]) -> ModelFacts:
    """The model of a point."""
    config = load(study.study.config, words).config
    if (ranks := config.parallel.ranks) > 1:
        raise UserError(
            f"{study.study.name}: {name}: parallel.ranks = {ranks}: activations are the same on every layout, and a "
            "study of widths measures them in one process; leave it out"
        )
    return plan_for(config, 1).model


def _by_width(study: StudyFile, models: Mapping[str, ModelFacts]) -> dict[int, str]:
    """The point of each width, ascending."""
    found: dict[int, str] = {}
    for name, model in sorted(models.items(), key=lambda one: one[1].hidden_dim):
        other = found.setdefault(model.hidden_dim, name)
        if other != name:
            raise UserError(f"{study.study.name}: {other} and {name} have one hidden_dim; leave one out")
    if len(found) < FEWEST_WIDTHS:
        raise UserError(
            f"{study.study.name}: {counted(len(found), 'width')}; needs an axis such as model.hidden_dim = [64, 128]"
        )
    return found


def judged(places: Sequence[PlaceSizes]) -> str:
    """What a study of widths says, in a sentence for each parametrization."""
    said = []
    for mup in (False, True):
        mine = [one for one in places if one.mup is mup]
        most = max(mine, key=lambda one: -math.inf if math.isnan(one.power) else one.power)
        infinite = [one.place for one in mine if math.isnan(one.power)]
        grows = any(one.grows for one in mine)
        what = f"{most.place} has the highest power, {most.power:.2f}"
        if infinite:
            what = f"{', '.join(infinite)} is no number at some width"
        verdict = "activations grow with the width" if grows else "no activation grows with the width"
        said.append(f"{'With' if mup else 'Without'} mu-P {verdict}: {what}.")
    return " ".join(said)
