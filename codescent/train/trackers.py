"""In: log.wandb, log.mlflow, log.trackio of a config. Out: loggers that write rows, config and plan there, on rank 0.
Does not decide when they are called or what is said if they fail: loggers.py and report.py do."""

from __future__ import annotations

import importlib
import io
import netrc
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from codescent.base.errors import UserError
from codescent.base.extra import install, is_installed
from codescent.base.secret import without_user
from codescent.config.sections import Log
from codescent.train.loggers import END, METRICS, START, load
from codescent.train.loggers import Logger as Logger

INIT_S = 30
"""So long may a server take to answer at the start."""
PARAMETERS_AT_ONCE = 100
"""Largest number of parameters in one call of MLflow."""
PARAMETER_CHARS = 500
"""Longest value of a parameter that every version of MLflow takes."""

STARTED = "logger_started"
"""The event that keeps the id of a tracker's run, for --resume."""


class Tracker:
    """A tracker of experiments, as a logger. Each row of metrics.csv is logged with its step.

    Attributes:
        package: to import; also the key of [log] and the extra that installs it.
        project: of the tracker.
        id: of the run there; "" before it has begun. Set it to go on in a run.
        where: the run there, in words.
    """

    package = ""

    def __init__(self, project: str) -> None:
        self.project, self.id, self.where = project, "", ""

    def __call__(self, *, kind: str, data: dict[str, Any]) -> None:
        """Begin, log a row or end, as `kind` says; events are not logged. Raises whatever the package raises."""
        if kind == START:
            self.begin(data, importlib.import_module(self.package))
        elif kind == METRICS and self.id:
            numbers = {name: value for name, value in data.items() if isinstance(value, int | float)}
            self.row(int(data["step"]), {name: value for name, value in numbers.items() if name != "step"})
        elif kind == END and self.id:
            self.end(failed=data["problem"] is not None)

    def begin(self, run: Mapping[str, Any], package: Any) -> None:
        """Begin a run, or go on in the run `id`. `run`: see docs/loggers.md, kind "start"."""
        raise NotImplementedError

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        raise NotImplementedError

    def end(self, *, failed: bool) -> None:
        """End the run there."""
        raise NotImplementedError


class Wandb(Tracker):
    """Weights & Biases. Without a network, and without an account, files are written into the run folder."""

    package = "wandb"

    def begin(self, run: Mapping[str, Any], package: Any) -> None:
        """See `Tracker`. A question of the package would wait for ever, so nothing is asked: see `_mode`."""
        mode, key = _mode(os.environ), self.id or uuid.uuid4().hex[:12]
        folder = Path(os.environ.get("WANDB_DIR") or run["folder"])
        settings = package.Settings(silent=True, console="off", init_timeout=INIT_S, disable_git=True)
        self._run = package.init(
            project=self.project,
            name=run["name"],
            id=key,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config={**run["config"], "plan": run["plan"]},
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")  # a resumed run may repeat steps, which wandb's own may not
        self.id, self.where = key, f"run {key}"
        if mode == "online":
            self.where = f"run {key}, {self._run.url}"
        elif mode == "offline":
            self.where = f"run {key}, offline; later: wandb sync {folder / 'wandb' / f'offline-run-*-{key}*'}"

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **numbers})

    def end(self, *, failed: bool) -> None:
        """See `Tracker`. It waits until the server has what was logged."""
        self._run.finish(exit_code=int(failed))


def _mode(environ: Mapping[str, str]) -> str:
    """WANDB_MODE; without it online where there is an account, else offline."""
    if mode := environ.get("WANDB_MODE"):
        return mode
    if any(environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return "online"
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(environ.get("NETRC")).authenticators(host):
            return "online"
    return "offline"


class Mlflow(Tracker):
    """MLflow. Without MLFLOW_TRACKING_URI runs are files in the folder mlruns of the working directory."""

    package = "mlflow"

    def begin(self, run: Mapping[str, Any], package: Any) -> None:
        """See `Tracker`. A server that does not answer is given up after seconds, not after minutes."""
        for name, value in (
            ("MLFLOW_ALLOW_FILE_STORE", "true"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ):
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path.cwd() / "mlruns").as_uri()
        self._client = package.MlflowClient(tracking_uri=uri)
        self._entities = importlib.import_module("mlflow.entities")
        if self.id:
            self._client.get_run(self.id)  # raises if this store does not have it
            self._client.update_run(self.id, status="RUNNING")
        else:
            self.id = self._new(run)
        self.where = f"{without_user(uri)}, run {self.id}"  # of a database it has the password

    def _new(self, run: Mapping[str, Any]) -> str:
        """Make a run with the config and the plan as parameters. Returns its id."""
        found = self._client.get_experiment_by_name(self.project)
        experiment = self._client.create_experiment(self.project) if found is None else found.experiment_id
        key = str(self._client.create_run(experiment, run_name=run["name"]).info.run_id)
        sections = {**run["config"], "plan": run["plan"]}
        flat = [(f"{section}.{name}", value) for section, keys in sections.items() for name, value in keys.items()]
        texts = [self._entities.Param(name, str(value)[:PARAMETER_CHARS]) for name, value in flat]
        for first in range(0, len(texts), PARAMETERS_AT_ONCE):
            self._client.log_batch(key, params=texts[first : first + PARAMETERS_AT_ONCE])
        return key

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def end(self, *, failed: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class Trackio(Tracker):
    """Trackio, which writes a database of this machine."""

    package = "trackio"

    def begin(self, run: Mapping[str, Any], package: Any) -> None:
        """See `Tracker`. Trackio knows a run by its name, so the id is a part of it."""
        key = self.id or f"{run['name']}-{uuid.uuid4().hex[:8]}"
        self._package = package
        with redirect_stdout(io.StringIO()):  # it prints how to look at the run, which `where` says
            self._run = package.init(
                project=self.project,
                name=key,
                resume="allow",
                config={**run["config"], "plan": run["plan"]},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.id, self.where = key, f"run {key}; to look: trackio show --project {self.project}"

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(numbers), step=step)

    def end(self, *, failed: bool) -> None:
        """See `Tracker`. Trackio has no state of a run that failed."""
        with redirect_stdout(io.StringIO()):
            self._package.finish()


TRACKERS: Sequence[type[Tracker]] = (Wandb, Mlflow, Trackio)


def _wanted(log: Log) -> list[Tracker]:
    projects = {kind: getattr(log, kind.package) for kind in TRACKERS}
    return [kind(project) for kind, project in projects.items() if project is not None]


def find_packages(log: Log) -> None:
    """Check that the packages that [log] names are there, without importing them. Raises UserError: with all that are
    missing."""
    wanted = {one.package: f'"{one.project}"' for one in _wanted(log)}
    if log.tensorboard:
        wanted["tensorboard"] = "true"
    missing = {package: value for package, value in wanted.items() if not is_installed(package)}
    if missing:
        raise UserError(
            *(
                f"log.{package} = {value}: the package {package} is not installed: {install(package)}, or leave "
                f"log.{package} out"
                for package, value in missing.items()
            )
        )


def tracked(log: Log) -> list[Logger]:
    """The loggers of the trackers of [log]. Raises UserError: a package is missing."""
    find_packages(log)
    return [Logger(one.package, one, one.package, needs_start=True) for one in _wanted(log)]


def loggers_of(log: Log) -> list[Logger]:
    """All loggers of [log]: the functions of log.to, then the trackers.

    Raises UserError: a function cannot be imported, or a package is missing.
    """
    return [*load(log.to), *tracked(log)]


def trackers_of(loggers: Iterable[Logger]) -> list[Tracker]:
    """Those loggers that are trackers."""
    return [logger.function for logger in loggers if isinstance(logger.function, Tracker)]


def continue_in(trackers: Iterable[Tracker], events: Iterable[Mapping[str, Any]]) -> None:
    """Let trackers go on in the runs that earlier starts of this run have begun in the same projects."""
    ids = {(one["logger"], one["project"]): one["id"] for one in events if one["kind"] == STARTED}
    for tracker in trackers:
        tracker.id = ids.get((tracker.package, tracker.project), "")
