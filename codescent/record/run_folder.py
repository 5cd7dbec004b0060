"""In: a run's config, plan, metrics and events. Out: the files of its run folder, written and read here alone.
Does not write checkpoints (checkpoint/ does) and does not know ranks: the caller writes on rank 0 alone."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file, write_synced
from codescent.base.errors import UserError
from codescent.base.formats import unreadable
from codescent.base.published import published
from codescent.record.lines import append, forward, told
from codescent.record.rows import METRICS_CSV, METRICS_JSONL, Rows, header_of, json_line, strict

METRICS: tuple[str, ...] = (
    "step",
    "train_loss",
    "val_loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "flops_per_s",
    "mfu",
    "step_s",
    "data_s",
    "compute_s",
    "exposed_comm_s",
    "optimizer_s",
    "peak_memory_bytes",
)
INTEGERS = frozenset({"step", "tokens", "peak_memory_bytes"})
HEADER = ",".join(METRICS) + "\n"

CONFIG = "config.toml"
PLAN = "plan.json"
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
LOCK = ".writer"

FORMAT = 2
"""Of the run folders that this program writes, in plan.json; docs/versions.md says what each number holds."""
OLDEST_FORMAT = 1
"""The first format that this program continues. A folder of format 1 has no number."""

_TAKEN = "a run is there already: continue it with --resume, or choose a new run.name (or run.folder)"


class RunFolder:
    """One run on disk: `config.toml plan.json environment.json metrics.csv metrics.jsonl events.jsonl checkpoints/`,
    and the files of its data that its task keeps, such as `tokenizer.json`.

    Every method that writes raises UserError where the disk is full or may not be written to, naming the path.
    Rows are appended in one write each, straight to the kernel: a kill -9 loses no row that was written before it.

    Attributes:
        path: the folder, under the name that it has now.
        config_text: the resolved config with which the run started, as TOML.
        plan: the plan with which it started, as JSON data, without the number of the folder's format.
    """

    def __init__(self, path: Path, config_text: str, plan: dict[str, Any]) -> None:
        self.path, self.config_text, self.plan = path, config_text, plan
        self._rows = Rows(path, METRICS, INTEGERS)
        self._held: list[int] = []  # descriptors of the lock and of the folder, while this process writes
        self._columns_known = False

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def tokenizer(self) -> Path:
        """The file of its tokenizer: a run folder that is moved can still be sampled."""
        return self.path / TOKENIZER

    @classmethod
    def create(cls, path: Path | str, config_toml: str, plan: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run, whole or not at all. Raises UserError: `path` is taken or cannot be made."""
        path = Path(path)
        cls.refuse_taken(path)
        texts = {CONFIG: config_toml, PLAN: _plan_text(plan), METRICS_CSV: HEADER}
        with published(path, taken=_TAKEN) as making:
            (making / CHECKPOINTS).mkdir()
            for name, text in {**texts, METRICS_JSONL: "", EVENTS: ""}.items():
                write_synced(making / name, text)
        return cls(path, config_toml, _without_format(json.loads(texts[PLAN])))

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Raise UserError where a run could not be created at `path`: a file, or a folder with anything in it."""
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path}: {_TAKEN}")
        if not path.is_dir() and os.path.lexists(path):
            raise UserError(f"{path}: is a file, not a folder: choose another run.name or run.folder")
        above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        if not above.is_dir():
            raise UserError(f"{path}: {above} is a file, no folder can be made in it: choose another run.folder")

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the folder of a run.

        Raises UserError: it is not one, with every missing or unreadable part; this program does not read its format.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file, not a run folder" if os.path.lexists(path) else "no such run folder"
            raise UserError(f"{path}: {what}")
        missing = [name for name in (CONFIG, PLAN) if not (path / name).is_file()]
        missing += [] if (path / CHECKPOINTS).is_dir() else [f"{CHECKPOINTS}/"]
        if missing:
            raise UserError(f"{path}: not a run folder: it has no {', no '.join(missing)}")
        config_text, plan = _read_text(path / CONFIG), _read_object(path / PLAN)
        if problem := unreadable(plan.get("format", 1), OLDEST_FORMAT, FORMAT, _writer(path)):
            raise UserError(f"{path / PLAN}: run folder of {problem}")
        return cls(path, config_text, _without_format(plan))

    def hold(self) -> None:
        """Lock this run for writing until this process ends. Raises UserError: another process holds it."""
        with told(self.path / LOCK):
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.read(descriptor, 64).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(f"{self.path}: is being written by {writer}: wait for its end, or stop it") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        self._held = [os.open(self.path, os.O_RDONLY | os.O_DIRECTORY), descriptor]

    def release(self) -> None:
        """Let others write this run."""
        while self._held:
            os.close(self._held.pop())

    def write_kept(self, files: Mapping[str, str]) -> None:
        """Keep files of the run's data, each text under its name, each atomically."""
        for name, text in files.items():
            _replace(self.path / name, text)

    def read_kept(self, names: Iterable[str]) -> dict[str, str]:
        """The texts of those of these files that are there. Raises UserError: unreadable."""
        found = {}
        for name in names:
            if (path := self.path / name).is_file():
                found[name] = _read_text(path)
        return found

    def write_config(self, config_toml: str, plan: Mapping[str, Any]) -> None:
        """Replace config.toml and plan.json, each atomically: a resumed run may have another layout."""
        text = _plan_text(plan)
        _replace(self.path / CONFIG, config_toml)
        _replace(self.path / PLAN, text)
        self.config_text, self.plan = config_toml, _without_format(json.loads(text))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json, atomically: what the machine is and what was chosen for it."""
        _replace(self.path / ENVIRONMENT, json.dumps(strict(environment), indent=1, allow_nan=False) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """environment.json; empty where a run was killed before it was written. Raises UserError: unreadable."""
        path = self.path / ENVIRONMENT
        return _read_object(path) if path.is_file() else {}

    def metrics(self, row: Mapping[str, float | int | None]) -> None:
        """Append one row, by the names of METRICS, to metrics.csv and metrics.jsonl; None is an empty field (null).

        Raises ValueError: an unknown name, or no step; UserError: the file cannot be written, or has other columns.
        """
        if unknown := sorted(set(row) - set(METRICS)):
            raise ValueError(f"not metrics: {', '.join(unknown)}")
        if row.get("step") is None:
            raise ValueError("a row of metrics needs its step")
        self.follow()
        if not self._columns_known and header_of(self._rows.csv) not in ([], list(METRICS)):
            what = "its columns are not those of this version: resume the run, or name a new one"
            raise UserError(f"{self._rows.csv}: {what}")
        self._columns_known = True
        self._rows.append(row)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every row in order, without a line torn by a kill; `iter_metrics` in a list."""
        return list(self.iter_metrics())

    def iter_metrics(self) -> Iterator[dict[str, Any]]:
        """Every row in order, one at a time, without a line torn by a kill. Raises UserError: a line that is no row.

        Each row has all the names of METRICS: INTEGERS as int, the others as float, None where the field is empty.
        """
        yield from self._rows.read()

    def rewind(self, step: int) -> int:
        """On resume: cut off the rows of the steps after `step`, which is an event; returns how many. Then `mend`."""
        if dropped := self._rows.rewind(step):
            self.event("rewind", step=step, dropped_rows=dropped)
        self.mend()
        return dropped

    def mend(self) -> None:
        """Write metrics.csv and metrics.jsonl anew where one lacks rows that the other has, which is an event."""
        if not self._rows.alike():
            csv, jsonl = self._rows.mend()
            self.event("mend", csv_rows=csv, jsonl_rows=jsonl)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event to events.jsonl: its kind, the wall time (UTC, ISO 8601), monotonic_s, and the fields.

        `monotonic_s` is the machine's monotonic clock: for the time between two events of one boot.
        Raises ValueError: a field named wall_time or monotonic_s.
        """
        if taken := {"wall_time", "monotonic_s"} & set(fields):
            raise ValueError(f"an event's own fields: {', '.join(sorted(taken))}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.follow()
        line = json_line({"kind": kind, "wall_time": now, "monotonic_s": round(time.monotonic(), 6), **fields})
        append(self.path / EVENTS, line)

    def read_events(self) -> list[dict[str, Any]]:
        """Every event in order, without a last line torn by a kill. Raises UserError naming a line that is none."""
        path = self.path / EVENTS
        return [_object(line, f"{path} line {number}") for number, line in enumerate(forward(path), start=1)]

    def follow(self) -> Path:
        """Where the folder is: a rename while this process holds it is recorded, and the run goes on there.

        Raises UserError: it was removed, or is being removed. Nothing is made under its old name.
        """
        if self._held and not self._is_at(self.path):
            before, self.path = self.path, self._renamed()
            self._rows.folder = self.path
            self.event("moved", before=str(before), after=str(self.path))
        return self.path

    def _renamed(self) -> Path:
        """The present name of the folder that this process holds, as Linux knows it."""
        with suppress(OSError):
            name = Path(f"/proc/self/fd/{self._held[0]}").readlink()
            if self._is_at(name):
                return name
        raise UserError(
            f"{self.path}: the run folder was removed, or moved to another disk, while the run was writing it: the "
            "steps since its last checkpoint cannot be saved, and the run ends"
        )

    def _is_at(self, path: Path) -> bool:
        """Whether the folder that this process holds has this name, and is still that of a run."""
        with told(path):
            try:
                (path / CONFIG).stat()
                return os.path.samestat(path.stat(), os.fstat(self._held[0]))
            except (FileNotFoundError, NotADirectoryError):
                return False


def _plan_text(plan: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **plan}, indent=1) + "\n"


def _without_format(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != "format"}


def _writer(path: Path) -> str | None:
    """The version of codescent that environment.json names; None: it does not say."""
    try:
        found = _read_object(path / ENVIRONMENT).get("codescent")
    except UserError:
        return None
    return found if isinstance(found, str) else None


def _replace(path: Path, content: str) -> None:
    with told(path):
        replace_file(path, content)


def _read_text(path: Path) -> str:
    try:
        with told(path):
            return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error


def _read_object(path: Path) -> dict[str, Any]:
    with told(path):
        return _object(path.read_bytes(), str(path))


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: not a JSON object")
    return data
