"""In: the path of a run folder. Out: its keys, plan, environment, state, and columns of its metrics.
Does not compare or draw, and does not load torch. A run that is still training can be read, too."""

from __future__ import annotations

import math
import os
import tomllib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base import warm_up
from codescent.base.errors import UserError
from codescent.base.output import warn_once
from codescent.base.typed import Kind, mistyped
from codescent.build import plan_of
from codescent.config.mixture import flattened
from codescent.config.toml_file import loads
from codescent.cost.simulate import Deadlock, simulate
from codescent.plan import MOST_RANKS, OlderPlan, Plan
from codescent.planner.measured import MeasuredStep, measured_step
from codescent.planner.prediction import problem_of
from codescent.record import ENVIRONMENT, EVENTS, PLAN, PREDICTION, RunFolder
from codescent.record.ranks import RankRow
from codescent.results import damage
from codescent.results.statistics import Values

FACTS: Mapping[str, Kind] = {
    **dict.fromkeys(("cores", "memory_bytes", "num_threads", "world_size"), int),
    **dict.fromkeys(("load", "peak_flops_per_s"), float),
    "ranks": list,
}
"""Facts of environment.json that are computed with; the others are only shown."""
EVENT: Mapping[str, Kind] = {"kind": str, "wall_time": str, "step": int}
BEGINS = ("start", "resume")
"""Events with which a run, or its continuation, begins."""


class State(StrEnum):
    """How a run ended, by its last events."""

    DONE = "done"  # all steps, or ended early by train.stop_after
    STOPPED = "stopped"  # it was asked to stop, and has saved
    FAILED = "failed"  # an error, or numbers that are not finite
    UNFINISHED = "not ended"  # it still trains, or it was killed


STATES: Mapping[str, State] = {
    "end": State.DONE,
    "stop": State.STOPPED,
    "error": State.FAILED,
    "failed": State.FAILED,
    "diverged": State.FAILED,
}
"""The state that an event gives a run. Later events change it; other events do not."""


@dataclass(frozen=True)
class Run:
    """What a run folder says.

    Attributes:
        folder: the files.
        name: the folder's name.
        keys: the values of all config keys, by name such as "train.num_steps"; a key without a value is missing.
        environment: environment.json; empty if the run was killed before it was written.
        events: all events in order.
    """

    folder: RunFolder
    name: str
    keys: Mapping[str, Any]
    environment: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]

    @cached_property
    def plan(self) -> Plan | None:
        """The plan; None: an older version wrote it in another form. Raises UserError: the file is damaged."""
        path = self.folder.path / PLAN
        try:
            plan = plan_of(self.folder.plan)
            simulate(plan.computing)  # lists that wait for each other, or that lack a pass, cannot be evaluated
        except OlderPlan:
            return None
        except (Deadlock, KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a plan ({type(error).__name__}: {error})") from error
        return plan

    @cached_property
    def prediction(self) -> Mapping[str, Any] | None:
        """What was predicted before the first step (planner/prediction.py); None: nothing, or the plan is not known.

        Raises UserError: prediction.json or plan.json is damaged.
        """
        found = self.folder.read_prediction()
        if found is None or self.plan is None:
            return None
        if problem := problem_of(found, self.plan.mesh.pp):
            raise UserError(f"{self.folder.path / PREDICTION}: not a prediction: {problem}")
        return found

    @property
    def first_step(self) -> int:
        """The step after which it was begun or continued last: since then it has its plan."""
        return next((event.get("step") or 0 for event in reversed(self.events) if event["kind"] in BEGINS), 0)

    def measured(self, plan: Plan, warmup: int | None = None) -> MeasuredStep:
        """What it measured of what a price of its plan predicts, since it was begun or continued last.

        `warmup`: None: by the number of steps. Raises UserError: a file of the folder is damaged.
        """
        steps, seconds = self.columns["step"], self.columns["step_s"]
        memory = self.folder.last_memory()
        return measured_step(steps, seconds, self.ranks, memory, plan, self.first_step, warmup)

    @property
    def state(self) -> State:
        """How the run ended."""
        return STATES[self._ending["kind"]] if self._ending else State.UNFINISHED

    @property
    def why(self) -> str:
        """Why the run failed, in the words that it printed; "": it did not fail, or it was killed."""
        if self.state is not State.FAILED or not self._ending:
            return ""
        return "; ".join(map(str, self._ending.get("problems") or [self._ending.get("reason", self._ending["kind"])]))

    @property
    def _ending(self) -> Mapping[str, Any] | None:
        """The last event that ends a run, if none of BEGINS follows it. Of several errors the first: the cause."""
        found = [event for event in self.events if event.get("kind") in (*BEGINS, *STATES)]
        while len(found) > 1 and found[-1]["kind"] == found[-2]["kind"] == "error":
            found.pop()
        return found[-1] if found and found[-1]["kind"] in STATES else None

    @cached_property
    def columns(self) -> Mapping[str, Values]:
        """All columns of the metrics, one value per row. NaN: no value. An infinite loss stays infinite.

        Raises UserError: a line of the metrics is damaged.
        """
        columns = {name: array("d") for name in self.folder.columns}
        for row in self.folder.iter_metrics():
            for name, values in columns.items():
                values.append(math.nan if (value := row[name]) is None else value)
        return {name: np.frombuffer(values) if values else np.empty(0) for name, values in columns.items()}

    def after(self, warmup: int, column: str) -> Values:
        """The values of a column in the rows of all steps after the first `warmup` ones."""
        return self.columns[column][self.columns["step"] > warmup]

    @cached_property
    def ranks(self) -> Sequence[RankRow]:
        """The rows of ranks.csv; none in folders of older versions. Raises UserError: a line is damaged."""
        rows = list(self.folder.iter_ranks())
        known = self.plan is not None or "world_size" in self.environment
        problem = damage.problem_of_ranks(self.folder, rows, self.events, self.num_ranks) if known else ""
        if problem:
            raise UserError(problem)
        return rows

    @property
    def num_ranks(self) -> int:
        """Number of ranks with which the run began, or was continued last; those outside of the mesh count."""
        return self.plan.world_size if self.plan is not None else int(self.environment.get("world_size", 1))

    @property
    def num_workers(self) -> int:
        """Number of ranks that compute: those of the mesh. Other ranks come after them."""
        return self.plan.mesh.world_size if self.plan is not None else self.num_ranks

    @property
    def steps(self) -> int:
        """Number of steps done."""
        known = self.columns["step"][np.isfinite(self.columns["step"])]
        return int(known[-1]) if len(known) else 0

    @property
    def profiled(self) -> int:
        """Number of steps that a profiler recorded, which makes them longer."""
        return sum(last - first + 1 for first, last in map(_window, self.events))

    @property
    def hosts(self) -> list[str]:
        """The host of each rank; "": unknown."""
        ranks = self.environment.get("ranks")
        known = ranks[: self.num_ranks] if isinstance(ranks, list) else []
        hosts = [str(rank.get("host", "")) if isinstance(rank, Mapping) else "" for rank in known]
        return hosts + [""] * (self.num_ranks - len(hosts))

    @property
    def crowd(self) -> tuple[int, int] | None:
        """Threads on the host with most ranks, and its cores, if ranks on CPUs have more threads than cores."""
        hosts, facts = self.hosts, self.environment
        cores, threads = facts.get("cores"), facts.get("num_threads")
        if facts.get("device") != "cpu" or not isinstance(cores, int) or not isinstance(threads, int):
            return None
        wanted = max(Counter(hosts).values()) * threads
        return (wanted, cores) if wanted > cores else None

    @property
    def busy_at_peak(self) -> tuple[float, int] | None:
        """Cores that other programs used while the peak of products was measured, and cores; None: unknown."""
        found = self.environment.get("peak_others")
        used, cores = (found.get(name) for name in ("used", "cores")) if isinstance(found, Mapping) else (None, None)
        if not isinstance(used, int | float) or not isinstance(cores, int):
            return None
        return (max(0.0, float(used)), cores) if math.isfinite(used) else None

    @cached_property
    def peak_memory_bytes(self) -> list[float]:
        """The largest memory use of each rank; of rank 0 alone without rows of ranks.csv; empty: unknown."""
        peaks: dict[int, float] = {}
        for row in self.ranks:
            if row["rank"] < self.num_ranks:
                rank = int(row["rank"])
                peaks[rank] = max(peaks.get(rank, 0.0), float(row["peak_memory_bytes"]))
        column = self.columns["peak_memory_bytes"]
        known = column[np.isfinite(column)]
        return [peaks[rank] for rank in sorted(peaks)] or ([float(known.max())] if len(known) else [])


def default_warmup(runs: Iterable[Run]) -> int:
    """Steps to leave out at the begin of each of the runs: the warm-up of the shortest one."""
    return warm_up.wanted(min((run.steps for run in runs), default=0))


def open_run(path: Path | str) -> Run:
    """Read a run folder. Says once what is damaged and left out.

    Raises UserError: it is no run folder, or a file of it is damaged.
    """
    folder = RunFolder.open(path)
    try:
        sections = loads(folder.config_text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{folder.path / 'config.toml'}: not valid TOML ({error})") from error
    unknown = dict(damage.unknown_keys(folder, sections))
    known = {name: table for name, table in sections.items() if name not in unknown}
    given = {f"{name}.{key}": value for name, table in known.items() for key, value in table.items()}
    keys = flattened({name: value for name, value in given.items() if name not in unknown})
    environment = folder.read_environment()
    problem = mistyped(environment, FACTS)
    if not problem and not 1 <= (environment.get("world_size") or 1) <= MOST_RANKS:
        problem = f"world_size: given {environment['world_size']}; must be 1 to {MOST_RANKS:,}"
    if problem:
        raise UserError(f"{folder.path / ENVIRONMENT}: {problem}")
    if problem := damage.problem_of_environment(folder, environment):
        raise UserError(problem)
    run = Run(folder, folder.path.resolve().name, keys, environment, _events(folder))
    cut = damage.cut_row(folder) if run.state is State.DONE else ()
    for sentence in (*unknown.values(), *cut):
        warn_once(sentence)
    return run


def open_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Read several run folders, each once. Raises UserError with the problems of all of them."""
    runs: list[Run] = []
    problems: list[str] = []
    given: dict[Path, Path | str] = {}
    for path in paths:
        given.setdefault(Path(os.path.realpath(path)), path)  # resolve() raises on a circle of links
    for path in given.values():  # as the user has named them
        try:
            runs.append(open_run(path))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return runs


def differing(runs: Sequence[Run], but: Iterable[str] = ("run.name", "run.folder")) -> dict[str, list[Any]]:
    """The keys with different values, without those of `but`; for each key its value in every run, None: no value."""
    keys = sorted({key for run in runs for key in run.keys} - set(but))
    values = {key: [run.keys.get(key) for run in runs] for key in keys}
    return {key: of_runs for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def _events(folder: RunFolder) -> list[dict[str, Any]]:
    """All events. Raises UserError: a line is none."""
    events = folder.read_events()
    for number, event in enumerate(events, start=1):
        problem = mistyped(event, EVENT)
        try:
            _window(event)
        except (TypeError, ValueError):
            problem = problem or f"steps: given {str(event['steps'])[:40]}; must be the first and last recorded step"
        try:
            datetime.fromisoformat(str(event.get("wall_time", "2000-01-01")))
        except ValueError:
            problem = problem or "wall_time: must be a date with a time"
        if problem or "kind" not in event:
            raise UserError(f"{folder.path / EVENTS} line {number}: not an event: {problem or 'it has no kind'}")
    return events


def _window(event: Mapping[str, Any]) -> tuple[int, int]:
    """The first and the last step that a profiler recorded; (1, 0): none. Raises TypeError, ValueError: damaged."""
    first, last = event["steps"] if event.get("kind") == "profile" and "steps" in event else (1, 0)
    if not (isinstance(first, int) and isinstance(last, int) and first <= last + 1):
        raise ValueError
    return first, last
