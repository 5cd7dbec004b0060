"""In: folders of runs, a cluster. Out: the cluster with constants that these runs give; what changed, in rows.
Does not fit (planner/refit.py does) and does not write the file (verbs/measure_runs.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from codescent.base.amounts import of_bytes, of_change, of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.clusters.described import to_toml
from codescent.clusters.files import OWN, load_cluster, software_of
from codescent.clusters.sections import SoftwareKeys
from codescent.config.sections import Config
from codescent.config.toml_file import loads
from codescent.measure.file import rounded
from codescent.plan import Plan
from codescent.plan.device_specs import spec_of
from codescent.planner.fitted import MeasuredRun
from codescent.planner.measured import MeasuredStep
from codescent.planner.prediction import as_run, not_priced
from codescent.planner.refit import FittingRun, Refit, constants_of, refit, refusals
from codescent.results import Run, State, open_run

CPU = "cpu"
MOST_NAMED = 3
MOST_STEP_S = 1e9
"""No step takes so long."""
GLOBAL = "the global constants of codescent, where no other source is named"


def read_runs(paths: Sequence[Path], problems: list[str]) -> list[Run]:
    """The runs of folders, each once. What is wrong with one, and runs of different devices, are problems."""
    found: dict[Path, Run] = {}
    for path in paths:
        try:
            run = open_run(path)
            if not len(run.columns["step_s"]):
                problems.append(f"{path}: has no measured step; give runs that have trained")
            elif run.plan is None:
                problems.append(f"{path}: its plan is of another version, and has no price; train it again")
            else:
                found.setdefault(run.folder.path.resolve(), run)
        except UserError as error:
            problems += error.problems
    runs = list(found.values())
    devices: dict[str, list[str]] = {}
    for run in runs:
        devices.setdefault(device_of(run), []).append(str(run.folder.path))
    if len(devices) > 1:
        which = "; ".join(f"{device}: {_named(names)}" for device, names in devices.items())
        problems.append(f"--from: these runs are of different devices ({which}); give those of one device")
    return runs


def device_of(run: Run) -> str:
    """The device of a run: that of CUDA, or the processor."""
    facts = run.environment
    return str(facts.get("processor") if facts.get("device") in (None, CPU) else facts["device"])


def cluster_of_runs(runs: Sequence[Run], given: str | None, problems: list[str]) -> Cluster | None:
    """The cluster that is given, else the one that all runs name. None: there is a problem."""
    names = list(dict.fromkeys(str(name) for run in runs if (name := run.keys.get("run.cluster"))))
    if given is None and len(names) != 1:
        if runs:
            what = f"name different clusters ({', '.join(names)})" if names else "name no cluster (run.cluster)"
            problems.append(f"--from: these runs {what}; give the one to begin with: --cluster NAME|FILE")
        return None
    try:
        return load_cluster(names[0] if given is None else given)
    except UserError as error:
        hint = "" if given is not None else "; give another one with --cluster NAME|FILE"
        problems += [f"{problem}{hint}" for problem in error.problems]
        return None


def fitted_to(runs: Sequence[Run], cluster: Cluster, names: Sequence[str] | None, problems: list[str]) -> Refit | None:
    """The constants of codescent on a cluster that runs give. None: there is a problem.

    `names`: constants to fit; None: those that tell these runs apart best.
    """
    problems += [f"--constants: {problem}" for problem in refusals(names or (), len(runs))]
    start = software_of(cluster)
    found = []
    for run in runs:
        plan, path = run.plan, run.folder.path
        assert plan is not None, "read_runs refuses it"
        kind = CPU if run.environment.get("device") in (None, CPU) else "cuda"
        try:
            problems += [f"{path}: {reason}" for reason in not_priced(plan, cluster, kind)]
            cluster.device.peak(plan.work.precision)
            found.append(_fitting(run, plan, cluster, start, kind, run.measured(plan)))
        except UserError as error:
            problems += [one if one.startswith(str(path)) else f"{path}: {one}" for one in error.problems]
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # parts that do not fit together
            problems.append(f"{path}/plan.json: damaged: it has no price ({type(error).__name__}: {error})")
    if problems:
        return None
    return refit(found, start, constants_of([run.timed for run in found], names))


def _fitting(run: Run, plan: Plan, cluster: Cluster, start: Software, kind: str, measured: MeasuredStep) -> FittingRun:
    """A run with its software, which has a price.

    Raises UserError: its config is damaged, or no step of its last start is measured. Others: its plan is damaged.
    """
    try:
        config = Config.model_validate(loads(run.folder.config_text))
    except ValidationError as error:
        raise UserError(f"its config.toml is not of this version ({error.errors()[0]['msg']})") from error
    if measured.step_s is None:
        raise UserError("has no measured step since it was continued last")
    if not 0 < measured.step_s < MOST_STEP_S:
        raise UserError(
            f"its median step took {measured.step_s:g} s: metrics.jsonl is damaged, or a clock was set back"
        )
    timed = MeasuredRun(plan, cluster, as_run(start, config, kind), measured.step_s)
    found = FittingRun(run.name, timed, measured)
    predicted_s, held = timed.priced(np.zeros(0), ()).step_s, found.held(start)
    if not (0 < predicted_s < MOST_STEP_S and math.isfinite(held.total)):
        raise ValueError(f"a step of {predicted_s:g} s, {held.total:g} bytes")
    return found


def notes_of(runs: Sequence[Run], cluster: Cluster) -> Iterator[str]:
    """What to know of these runs: it is told, not refused."""
    device, file = device_of(runs[0]), cluster.device.name
    spec = spec_of(device)
    if file not in (device, spec.name if spec else device):
        yield f"measured on {device}, and {cluster.name} is of {file}: the constants then make up for that"
    for run in runs:
        if run.state is not State.DONE:
            yield f"{run.folder.path}: has not ended ({run.state}); its steps so far are used"
    threads = sorted({int(run.environment.get("num_threads") or 0) for run in runs})
    if len(threads) > 1 and runs[0].environment.get("device") == CPU:
        yield f"ranks of these runs have {' and '.join(map(str, threads))} threads, which no constant tells apart"


def refitted_cluster(name: str, cluster: Cluster, found: Refit) -> Cluster:
    """The cluster with the new constants, each with its source. Raises UserError: one is out of any range.

    `name`: of its file.
    """
    names = [run.name for run in found.runs]
    fitted_on = f"{counted(len(names), 'run')} on {cluster.name}: {_named(names)}"
    software, sources = found.software, dict(cluster.sources)
    own = f"software.{OWN}"
    values: dict[str, float] = {one: rounded(getattr(software, one)) for one in found.changed}
    _refuse(values, cluster)
    sources.setdefault(own, GLOBAL)
    for one in values:
        was = getattr(found.start, one)
        sources[f"{own}.{one}"] = f"fitted on {fitted_on}; before {was:g}: {_source(cluster.sources, one)}"
    for one in ("band", "memory_band"):
        if getattr(software, one) != getattr(found.start, one):
            sources[f"{own}.{one}"] = f"each of the {fitted_on}, predicted with the constants that the others give"
    band, memory = (tuple(map(rounded, one)) for one in (software.band, software.memory_band))
    new = replace(software, **values, band=band, memory_band=memory, fitted_on=fitted_on)  # type: ignore[arg-type]
    return replace(cluster, name=name, software={**cluster.software, OWN: new}, sources=sources)


def _source(sources: Mapping[str, str], name: str) -> str:
    """Where a constant was from, in a few words."""
    found = sources.get(f"software.{OWN}.{name}") or sources.get(f"software.{OWN}") or GLOBAL
    return found.partition("; before ")[0].partition(", where no other")[0]


def _refuse(values: Mapping[str, float], cluster: Cluster) -> None:
    try:
        SoftwareKeys.model_validate(dict(values))
    except ValidationError as error:
        wrong = ", ".join(f"{one['loc'][0]} = {values[str(one['loc'][0])]:g}" for one in error.errors())
        raise UserError(
            f"--from: these runs would need {wrong} on {cluster.name}, which no machine has: it is of other machines; "
            "give a file of theirs, such as codescent measure writes"
        ) from error


def changes_table(found: Refit, cluster: Cluster) -> Iterator[str]:
    """What changed, and how far the prediction of each run is off: before, after, and without the run."""
    new = cluster.software[OWN]
    rows = [("constant", "before", "after")]
    rows += [
        (name, _shown(name, getattr(found.start, name)), _shown(name, getattr(new, name))) for name in found.changed
    ]
    yield from _columns(rows)
    yield ""
    after = [float(one) for one in found.fitted.residuals]
    residuals: list[Sequence[str]] = [("run", "measured", "predicted before", "after", "without it")]
    residuals += [
        (run.name, of_seconds(run.timed.step_s), *map(_error, errors))
        for run, *errors in zip(found.runs, found.before, after, found.left_out, strict=True)
    ]
    yield from _columns(residuals)
    yield ""
    same = "" if new.band != found.start.band else ", as before: fewer than four runs say nothing of it"
    yield f"8 of 10 predictions of time: {new.band[0]:.2f} to {new.band[1]:.2f} times what is predicted{same}"
    same = "" if new.memory_band != found.start.memory_band else ", as before"
    yield f"8 of 10 predictions of memory: {new.memory_band[0]:.2f} to {new.memory_band[1]:.2f} times{same}"


def text_of_runs(cluster: Cluster, found: Refit) -> str:
    """The text of the file. Comments at its end have the residuals."""
    lines = ["What the constants were fitted on, and how far they err.", *changes_table(found, cluster)]
    return to_toml(cluster) + "".join(f"# {line}\n" if line else "#\n" for line in lines)


def _error(residual: float) -> str:
    """Of a logarithm of measured over predicted: predicted over measured, less one."""
    return of_change(math.exp(-residual) - 1.0)


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return of_bytes(value)
    return of_seconds(value) if name.endswith("_s") else of_number(value)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield "  ".join(cells).rstrip()


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
