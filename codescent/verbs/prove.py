"""In: a config, layouts or numbers of ranks. Out: for each layout, its losses compared with the losses on one rank.
Does not train: it starts `codescent train` for every layout and compares the metrics of the runs."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from codescent.base.console import new_console
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.writing import remove_folder
from codescent.build.resolve import resolve_into
from codescent.config.decided import with_samples
from codescent.config.load import load
from codescent.config.sections import Config, Parallel
from codescent.plan import AXES, Plan
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.results import train_run
from codescent.strategies import ORDER, active
from codescent.verbs import prove_faults
from codescent.verbs.finding import LayoutResult, finding_of
from codescent.verbs.proof import TOLERANCE, folder_of_proof, refuse_without_effect, words_of_proof
from codescent.verbs.prove_table import proved_json, show, show_progress
from codescent.verbs.replay import replay_run

EXCHANGES = (
    *("average_every", "synchronous_steps", "outer_optimizer", "outer_learning_rate", "outer_momentum"),
    *("fragments", "overlap_steps", "wire", "wire_from"),
    *("gossip", "gossip_mode", "gossip_every", "gossip_rate", "agree_every"),
    *("servers", "updates", "staleness", "momentum_every", "local_steps", "quorum", "restarts"),
)
"""Keys of [parallel] with which replicas do something else than to sum the gradients of each step."""
DEFAULTS = {key: field.default for key, field in Parallel.model_fields.items()}
MAX_RANKS = 64  # per layout: all ranks of a layout run on this machine


@dataclass(frozen=True)
class LayoutCase:
    """A layout to try.

    Attributes:
        keys: of [parallel], each with its value.
        ranks: their number.
        microbatch_size: overrides the config's, if the config's does not fill the pipeline; else None.
    """

    keys: tuple[tuple[str, str], ...]
    ranks: int
    microbatch_size: int | None = None

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.keys] or ["one process"]
        return " ".join([*words, *self._microbatches("")])

    @property
    def overrides(self) -> list[str]:
        """The layout as overrides for a command line."""
        words = [f"parallel.{key}={value}" for key, value in self.keys]
        return [*words, f"parallel.ranks={self.ranks}", *self._microbatches("train.")]

    @property
    def period(self) -> int:
        """The steps of a round (`average_every`, `agree_every`, `gossip_every`); 1 if there are none."""
        given = dict(self.keys)
        steps = (given.get(key, "") for key in ("average_every", "agree_every", "gossip_every"))
        return next((int(one) for one in steps if one.isdecimal() and int(one)), 1)

    def _microbatches(self, section: str) -> list[str]:
        return [] if self.microbatch_size is None else [f"{section}microbatch_size={self.microbatch_size}"]

    def _degree(self, axis: str) -> int:
        given = dict(self.keys).get(axis, "")
        return int(given) if given.isdecimal() else 1

    def filled(self, config: Config) -> LayoutCase:
        """The layout with the smallest number of micro-batches that is a multiple of the pipeline stages.

        It is unchanged without a pipeline, if the config's number is a multiple, or if the batch does not divide.
        """
        stages, train = self._degree("pp"), config.train
        share, left = divmod(train.global_batch_size, self._degree("dp_replicate") * self._degree("dp_shard"))
        if stages == 1 or left or share // (train.microbatch_size or share) % stages == 0:
            return self
        return replace(self, microbatch_size=None if share % stages else share // stages)


ALONE = LayoutCase((), 1)


def layouts_of(ranks: Sequence[int], undivided: Collection[str] = ()) -> Iterator[LayoutCase]:
    """Every way to divide each number of ranks over the axes of the mesh.

    A layout with one axis is tried in each variant of the axis' strategy. A layout with several axes is tried once.
    On one rank the variants of strategies without an axis are tried. `undivided`: axes along which the model has
    nothing to divide: no layout has them.
    """
    if 1 in ranks:
        alone = (variant for kind in ORDER if not kind.axis for variant in kind.variants)
        yield from (LayoutCase(_keys(variant), 1) for variant in alone)
    variants = {kind.axis: kind.variants for kind in ORDER}
    served = [axis for axis in AXES if axis in variants and axis not in undivided]
    for number in ranks:
        for degrees in itertools.product(*([d for d in range(1, number + 1) if number % d == 0] for _ in served)):
            if number == 1 or math.prod(degrees) != number:
                continue
            used = {axis: degree for axis, degree in zip(served, degrees, strict=True) if degree > 1}
            for variant in variants[next(iter(used))] if len(used) == 1 else ({},):
                yield LayoutCase(_keys({**used, **variant}), number)


def _keys(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Keys and values, spelled as on a command line."""
    return tuple((key, _spelled(value)) for key, value in values.items())


def _spelled(value: Any) -> str:
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_layouts(text: str) -> list[LayoutCase]:
    """Parse layouts such as "dp_shard=2,zero_stage=1; dp_replicate=4".

    Raises UserError: parts that are not key=value, unknown or repeated keys, more ranks than MAX_RANKS.
    """
    found, problems = [], []
    keys = [key for key in Parallel.model_fields if key not in ("ranks", "layout")]
    for part in filter(None, (part.strip() for part in text.split(";"))):
        pairs = [tuple(word.strip() for word in pair.partition("=")) for pair in part.split(",")]
        problems += [f"--layouts: {key!r} is not key=value" for key, equals, value in pairs if not (equals and value)]
        unknown = [key for key, equals, _ in pairs if equals and key not in keys]
        problems += [f"--layouts: {key!r} is not a key of a layout; the keys are {', '.join(keys)}" for key in unknown]
        given = {key: value for key, _, value in pairs}
        if len(given) < len(pairs):
            problems.append(f"--layouts: {part!r} gives a key twice")
        ranks = math.prod(int(value[:20]) for key, value in given.items() if key in AXES and value.isdecimal())
        ranks += int(servers[:20]) if (servers := given.get("servers", "")).isdecimal() else 0
        if not 1 <= ranks <= MAX_RANKS:
            problems.append(
                f"--layouts: {part!r} is {counted(ranks, 'rank')}; from 1 to {MAX_RANKS} can be tried on one machine"
            )
        found.append(LayoutCase(tuple(given.items()), ranks))
    if not found:
        problems.append("--layouts: is empty; an example is dp_shard=2;dp_replicate=2,dp_shard=2")
    if problems:
        raise UserError(*problems)
    return found


class Prover:
    """Runs one config in several layouts, for `steps` steps each, in subfolders of `folder`.

    Validations are at multiples of `period`.
    """

    def __init__(
        self, config: str, overrides: Sequence[str], steps: int, precision: str, folder: Path, period: int = 1
    ) -> None:
        self.config, self.steps, self.folder = config, steps, folder
        self.precision, self.tolerance = precision, TOLERANCE[precision]
        given = load(config, overrides).config
        varied = (key for kind in ORDER if kind.axis for variant in kind.variants for key in variant)
        # The config file's values of keys that layouts vary may not fit other layouts: set them to their defaults.
        defaults = _keys({key: Parallel.model_fields[key].default for key in varied})
        self.words = [
            *(f"parallel.{key}={value}" for key, value in defaults),
            *overrides,
            "parallel.layout=given",  # each layout is tried as it is
            *words_of_proof(given, steps, precision, period),
            "checkpoint.every=0",
            "survive.on_loss=stop",
            "survive.spares=0",
            "parallel.cut=cost",  # one process has no stages; a layout may set another value
            *(f"parallel.{axis}={'auto' if axis == 'dp_replicate' else 1}" for axis in AXES),
            # One process has no replicas; a layout may set other values.
            *(f"parallel.{key}={value}" for key, value in _keys({key: DEFAULTS[key] for key in EXCHANGES})),
        ]
        self.number = 0

    def check(self, layouts: Sequence[LayoutCase]) -> None:
        """Check the config with the values of each layout. Raises UserError with every problem."""
        problems: list[str] = []
        for layout in (ALONE, *layouts):
            try:
                self._config(layout)
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*dict.fromkeys(problems))

    def filled(self, layout: LayoutCase) -> LayoutCase:
        """The layout with micro-batches that fill its pipeline."""
        config = self._config(ALONE)
        if config.train.global_batch_tokens is not None:
            config = with_samples(config, plan_of(config, 1).work.positions(-1))
        return layout.filled(config)

    def reference(self) -> list[dict[str, float]]:
        """The metrics of one process. Raises UserError if it fails or if a loss is not finite."""
        rows = self._train([ALONE])
        if isinstance(rows, str):
            raise UserError(f"one process: {rows}")
        for row in rows:
            if not (math.isfinite(row["train_loss"]) and math.isfinite(row["grad_norm"])):
                why = f"its loss is not finite at step {row['step']}: lower optimizer.learning_rate"
                raise UserError(f"one process: {why}")
        return rows

    def attempt(self, layouts: Sequence[LayoutCase], expected: list[dict[str, float]]) -> LayoutResult:
        """Run one layout and compare it. With two layouts, resume the first one's checkpoint in the second half-way."""
        name, ranks = " -> ".join(map(str, layouts)), max(layout.ranks for layout in layouts)
        if refused := next(filter(None, map(self._refused, layouts)), ""):
            return LayoutResult(name, ranks, {}, refused=refused)
        plans = [plan_of(self._config(layout), layout.ranks) for layout in layouts]
        found, exact = self._train(layouts), all(strategy.exact(plan) for plan in plans for strategy in active(plan))
        if not (exact or isinstance(found, str)):  # with asynchronous servers a row may stand for several steps
            steps = {row["step"] for row in found}
            expected = [row for row in expected if row["step"] in steps]
        if not isinstance(found, str):  # elsewhere a row has the loss of one replica
            found, expected = ([row for row in rows if _of_all(plans, row)] for rows in (found, expected))
        trains_apart = any(plan.apart or plan.layout.updates != "synchronous" for plan in plans)
        return replace(finding_of(name, ranks, found, expected, trains_apart=trains_apart), is_exact=exact)

    def continues(self, layout: LayoutCase) -> bool:
        """Whether a run of one process can go on in a layout: its keys decide no losses."""
        plans = [plan_of(self._config(one), one.ranks) for one in (ALONE, layout)]
        return plans[0].trajectory() == plans[1].trajectory()

    def _refused(self, layout: LayoutCase) -> str:
        try:
            plan_of(self._config(layout), layout.ranks)
        except UserError as error:
            return "; ".join(error.problems)
        return ""

    def _config(self, layout: LayoutCase) -> Config:
        return load(self.config, self._words(layout, self.steps)).config

    def _words(self, layout: LayoutCase, steps: int) -> list[str]:
        return [*self.words, f"train.num_steps={steps}", *layout.overrides]

    def _train(self, layouts: Sequence[LayoutCase]) -> list[dict[str, float]] | str:
        """Run the first layout, and resume in each further layout. Returns the metrics, or the reason of a failure."""
        self.number += 1
        folder = self.folder / f"run{self.number}"
        for number, layout in enumerate(layouts, 1):
            words = [*self._words(layout, self.steps * number // len(layouts)), f"run.folder={folder}"]
            if failure := train_run(self.config, [*words, *(["--resume"] if number > 1 else [])]).why:
                return failure
        rows = [dict(row) for row in RunFolder.open(folder).read_metrics()]
        remove_folder(folder, ignore_errors=True)
        return rows


def _of_all(plans: Sequence[Plan], row: Mapping[str, float]) -> bool:
    """Whether the loss of this row is that of all replicas. Where work is given out, each row is."""
    alone = [plan for plan in plans if plan.apart and not (plan.layout.served or plan.layout.averages_beside)]
    return all(plan.schedule.agrees_after(int(row["step"])) for plan in alone)


def main(arguments: Namespace) -> int:
    """Run the layouts and print the table. Returns 0 if a layout ran, and each that ran is the same or drifts, else 1.

    Raises UserError: invalid arguments, or a config that does not run on one process.
    """
    if arguments.replay is not None:
        refuse_without_effect(arguments, f"--replay {arguments.replay}", {"replay", "json"})
        return replay_run(Path(arguments.replay).expanduser(), as_json=arguments.json)
    if arguments.config is None:
        raise UserError("prove: give a config, or --replay RUN")
    if arguments.faults is not None:
        return prove_faults.main(arguments)
    ranks, layouts = list(dict.fromkeys(arguments.ranks)), arguments.layouts
    if arguments.steps < 2:
        raise UserError("--steps: give at least 2")
    if layouts is None and max(ranks) > MAX_RANKS:
        raise UserError(f"--ranks: {max(ranks)} ranks; at most {MAX_RANKS} can be tried on one machine")
    given = load(arguments.config, arguments.overrides).config
    resolved = resolve_into(given, None, [])  # what is wrong with the config, `check` says
    undivided = () if resolved is None else resolved.shape.undivided_axes
    tried = list(layouts_of(ranks, undivided)) if layouts is None else parse_layouts(layouts)
    console = new_console(stderr=arguments.json)
    with folder_of_proof() as folder:
        period = math.lcm(*(layout.period for layout in tried))
        words = arguments.config, arguments.overrides, arguments.steps, arguments.precision
        prover = Prover(*words, folder, period)
        prover.check(tried)
        tried = [prover.filled(layout) for layout in tried]
        with console.status("one process") as status:
            expected = prover.reference()
            findings = []
            for number, layout in enumerate(tried, 1):
                status.update(escape(f"{number} of {len(tried)}: {layout}"))
                findings.append(prover.attempt([layout], expected))
                show_progress(console, f"{number} of {len(tried)}: ", findings[-1], prover.tolerance)
            fit = [layout for layout, finding in zip(tried, findings, strict=True) if not finding.refused]
            fit = [layout for layout in fit if arguments.resume and prover.continues(layout)]
            for pair in itertools.pairwise([ALONE, *fit, ALONE]) if fit else ():
                status.update(escape(" -> ".join(map(str, pair))))
                findings.append(prover.attempt(pair, expected))
                show_progress(console, "", findings[-1], prover.tolerance)
    said = findings, prover.steps, prover.precision, prover.tolerance
    if arguments.json:
        print(json_text(proved_json(*said)))
    else:
        show(console, *said)
    verdicts = {finding.verdict(prover.tolerance) for finding in findings} - {"refused"}
    return 0 if verdicts and verdicts <= {"same", "drift"} else 1
