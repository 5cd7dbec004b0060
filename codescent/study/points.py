"""In: a study file. Out: its points: values of the axes, overrides of the base config, and what baseline names.
Does not run a point and does not know whether it can exist (accept.py asks build)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.config.words import toml_value
from codescent.study.file import LAYOUT, NODES, SHORT, WORKERS, Scalar, StudyFile, layout_keys
from codescent.study.result import Kind

MOST = 10_000
"""Points of a study: more is a mistake in the file."""

MEASURED_WITH: Mapping[str, Scalar] = {
    "train.eval_every": 0,
    "checkpoint.every": 0,
    "checkpoint.last": False,
    "log.sample_tokens": 0,
    "log.tensorboard": False,
    "survive.on_loss": "stop",
    "survive.spares": 0,
}
"""Keys of a run that is only measured, unless the study file sets them: nothing runs beside the steps."""


@dataclass(frozen=True)
class Spec:
    """A point as the study file describes it.

    Attributes:
        name: such as "ranks=2 batch=8".
        slug: the name of its folder.
        axes: value of each axis; of an axis of choices, the name of the choice.
        overrides: of the base config, by key.
        ranks: on all machines together.
        nodes: number of machines.
    """

    name: str
    slug: str
    axes: Mapping[str, Scalar]
    overrides: Mapping[str, Scalar]
    ranks: int
    nodes: int = 1

    @property
    def words(self) -> list[str]:
        """The overrides as words of a command line."""
        return [
            f"{key}={value if isinstance(value, str) else toml_value(value)}" for key, value in self.overrides.items()
        ]


def axes_of(study: StudyFile) -> list[dict[str, Scalar]]:
    """The values of the axes of each point of a study, in the order of its file: the last axis changes fastest.

    Raises UserError: there are more than MOST points.
    """
    number = math.prod(map(len, study.axes.values())) * max(1, len(study.points))
    if number > MOST:
        sizes = [*(f"{name} {len(values)}" for name, values in study.axes.items())]
        sizes += [f"[[points]] {len(study.points)}"] if study.points else []
        raise UserError(
            f"{study.study.name}: {' x '.join(sizes)} = {number:,} points; at most {MOST:,}: leave some out"
        )
    return list(_products(study))


def specs_of(study: StudyFile) -> list[Spec]:
    """All points of a study, in the order of `axes_of`.

    Raises UserError: the base config is wrong, or there are more than MOST points.
    """
    points = axes_of(study)
    base = load(study.study.config, _words({**_fixed(study), **study.fixed})).config
    found = [_spec(study, base, values) for values in points]
    slugs: dict[str, Spec] = {}
    for spec in found:
        other = slugs.setdefault(spec.slug, spec)
        if other is not spec:
            names = f"{other.name} is there twice" if other.name == spec.name else ""
            why = names or f"the points {other.name} and {spec.name} would have one folder"
            raise UserError(f"{study.study.name}: {why}; leave one, or name it differently")
    return found


def is_of(axes: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a point has these values of axes."""
    return all(name in axes and alike(axes[name], value) for name, value in values.items())


def alike(one: Any, other: Any) -> bool:
    """Whether two values of an axis are the same: those of a table are text."""
    return str(one) == str(other)


def name_of(axes: Mapping[str, Any]) -> str:
    """The name of a point, such as "ranks=2 batch=8". A key is named without its section."""
    return " ".join(f"{shown(name).rpartition('.')[2]}={shown(value)}" for name, value in axes.items())


def values_of(axes: Mapping[str, Any]) -> str:
    """The name of a point without those of its axes, such as "2, 8"."""
    return ", ".join(map(shown, axes.values()))


def axes_named(axes: Mapping[str, Any]) -> str:
    """The names of axes, without sections, such as "ranks, batch"."""
    return ", ".join(name.rpartition(".")[2] for name in axes)


def shown(value: Any) -> str:
    """A value of an axis as it is printed: without spaces and line ends: `--list` prints comments of a shell."""
    if isinstance(value, bool):
        return str(value).lower()
    return "".join(str(value).split()) or "none"


def _fixed(study: StudyFile) -> dict[str, Scalar]:
    """What every run of the study has."""
    keys = study.study
    # ranks.csv has a mean for every log.every steps: the warm-up must be whole rows.
    return {**MEASURED_WITH, "train.num_steps": keys.warmup + keys.steps, "log.every": keys.warmup or keys.steps}


def _products(study: StudyFile) -> Iterator[dict[str, Scalar]]:
    for point in study.points or [{}]:
        for values in itertools.product(*study.axes.values()):
            yield {**point, **dict(zip(study.axes, values, strict=True))}


def _spec(study: StudyFile, base: Config, values: Mapping[str, Scalar]) -> Spec:
    """A point with these values of the axes."""
    nodes, ranks = int(values.get(NODES, 1)), int(values.get("ranks", base.parallel.ranks))
    overrides: dict[str, Scalar] = {}
    for name, value in values.items():
        choices = study.axes.get(name)
        if isinstance(choices, dict):
            overrides |= choices[str(value)]
        elif name == LAYOUT:
            overrides |= layout_keys(str(value))
        elif name != NODES:
            overrides[SHORT.get(name, name)] = value
    ranks = int(overrides.get("parallel.ranks", ranks))
    # Several machines: a launcher starts the ranks, and says how many there are.
    overrides = {key: ranks if value == "ranks" else value for key, value in overrides.items()}
    if study.study.kind is Kind.WEAK:
        overrides |= _grown(base, overrides, ranks)
    name = name_of(values)
    slug = re.sub(r"[^\w.+-]+", "_", name.replace("=", "-")).strip("_").encode()[:150].decode(errors="ignore")
    return Spec(name, slug, dict(values), {**_fixed(study), **study.fixed, **overrides}, ranks, nodes)


def _grown(base: Config, overrides: Mapping[str, Scalar], ranks: int) -> dict[str, Scalar]:
    """The global batch of a weak study: the batch of the file is that of one rank."""
    for key in ("train.global_batch_tokens", "train.global_batch_size"):
        of_rank = overrides.get(key, getattr(base.train, key.partition(".")[2]))
        if of_rank not in (None, "auto"):
            return {key: int(of_rank) * ranks}
    return {}


def _words(values: Mapping[str, Scalar]) -> Sequence[str]:
    return Spec("", "", {}, values, 1).words


def growing(kind: Kind, axes: Mapping[str, Any]) -> int | None:
    """The number of workers of a point; None: its study has no axis of them."""
    found = axes.get(WORKERS.get(kind, "ranks"))
    return int(found) if found is not None and str(found).isdecimal() else None
