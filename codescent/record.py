"""In: a run's config, plan, metrics and events. Out: the files of its run folder, written and read here alone.
Does not write checkpoints (checkpoint/ does) and does not know ranks: the caller writes on rank 0 alone."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file, write_synced
from codescent.base.errors import UserError
from codescent.base.published import in_words, is_full, published

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
METRICS_CSV = "metrics.csv"
METRICS_JSONL = "metrics.jsonl"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"
LOCK = ".writer"

_TAKEN = "a run is there already: continue it with --resume, or choose a new run.name (or run.folder)"


class RunFolder:
    """One run on disk: `config.toml plan.json environment.json metrics.csv metrics.jsonl events.jsonl checkpoints/`,
    and the files of its data that its task keeps, such as `tokenizer.json`.

    Every method that writes raises UserError where the disk is full or may not be written to, naming the path.
    Rows are appended in one write each, straight to the kernel: a kill -9 loses no row that was written before it.

    Attributes:
        path: the folder.
        checkpoints: the folder of the run's checkpoints.
        tokenizer: the file of its tokenizer: a run folder that is moved can still be sampled.
        config_text: the resolved config with which the run started, as TOML.
        plan: the plan with which it started, as JSON data.
    """

    def __init__(self, path: Path, config_text: str, plan: dict[str, Any]) -> None:
        self.path, self.config_text, self.plan = path, config_text, plan
        self.checkpoints, self.tokenizer = path / CHECKPOINTS, path / TOKENIZER
        self._lock: int | None = None
        self._columns_known = False

    @classmethod
    def create(cls, path: Path | str, config_toml: str, plan: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run, whole or not at all. Raises UserError: `path` is taken or cannot be made."""
        path = Path(path)
        cls.refuse_taken(path)
        texts = {CONFIG: config_toml, PLAN: json.dumps(plan, indent=1) + "\n", METRICS_CSV: HEADER}
        with published(path, taken=_TAKEN) as making:
            (making / CHECKPOINTS).mkdir()
            for name, text in {**texts, METRICS_JSONL: "", EVENTS: ""}.items():
                write_synced(making / name, text)
        return cls(path, config_toml, json.loads(texts[PLAN]))

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
        """Open the folder of a run. Raises UserError: it is not one; every missing or unreadable part is named."""
        path = Path(path)
        if not path.is_dir():
            what = "is a file, not a run folder" if os.path.lexists(path) else "no such run folder"
            raise UserError(f"{path}: {what}")
        missing = [name for name in (CONFIG, PLAN) if not (path / name).is_file()]
        missing += [] if (path / CHECKPOINTS).is_dir() else [f"{CHECKPOINTS}/"]
        if missing:
            raise UserError(f"{path}: not a run folder: it has no {', no '.join(missing)}")
        return cls(path, _read_text(path / CONFIG), _read_object(path / PLAN))

    def hold(self) -> None:
        """Lock this run for writing until this process ends. Raises UserError: another process holds it."""
        with _told(self.path / LOCK):
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.read(descriptor, 64).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(f"{self.path}: is being written by {writer}: wait for its end, or stop it") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        self._lock = descriptor

    def release(self) -> None:
        """Let others write this run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
        text = json.dumps(plan, indent=1) + "\n"
        _replace(self.path / CONFIG, config_toml)
        _replace(self.path / PLAN, text)
        self.config_text, self.plan = config_toml, json.loads(text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json, atomically: what the machine is and what was chosen for it."""
        _replace(self.path / ENVIRONMENT, json.dumps(_strict(environment), indent=1, allow_nan=False) + "\n")

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
        path = self.path / METRICS_CSV
        if not self._columns_known and (lines := _whole_lines(path)) and lines[0] + "\n" != HEADER:
            raise UserError(f"{path}: its columns are not those of this version: resume the run, or name a new one")
        self._columns_known = True
        given = {name: row.get(name) for name in METRICS}
        _append_row(self.path, {name: _number(name, value) for name, value in given.items()})

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every row of metrics.csv in order, without a line torn by a kill. Raises UserError: a line that is no row.

        Each row has all the names of METRICS: INTEGERS as int, the others as float, None where the field is empty.
        """
        path = self.path / METRICS_CSV
        lines = _whole_lines(path)
        columns = lines[0].split(",") if lines else list(METRICS)
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines[1:], start=2):
            fields = line.split(",")
            try:
                if len(fields) != len(columns):
                    raise ValueError(f"{len(fields)} fields")
                read = {name: _number(name, field or None) for name, field in zip(columns, fields)}
                if "step" in read and read["step"] is None:
                    raise ValueError("no step")
                rows.append({name: read.get(name) for name in METRICS})
            except ValueError as error:
                raise UserError(f"{path} line {number}: not a row of {len(columns)} numbers ({error})") from error
        return rows

    def rewind(self, step: int) -> int:
        """On resume: drop the rows of the steps after `step`, each file atomically, and record it as an event.

        Returns:
            The number of rows dropped. A file that needs no change is not rewritten; 0 rows make no event.
        """
        rows = self.read_metrics()
        kept = [row for row in rows if row["step"] <= step]
        dropped = len(rows) - len(kept)
        texts = {
            METRICS_CSV: HEADER + "".join(_csv_line(row) for row in kept),
            METRICS_JSONL: "".join(_json_line(row) for row in kept),  # from the csv: a kill may part the two
        }
        for name, text in texts.items():
            path = self.path / name
            with _told(path):
                if not path.is_file() or path.read_bytes() != text.encode():
                    replace_file(path, text)
        if dropped:
            self.event("rewind", step=step, dropped_rows=dropped)
        return dropped

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event to events.jsonl: its kind, the wall time (UTC, ISO 8601), monotonic_s, and the fields.

        `monotonic_s` is the machine's monotonic clock: for the time between two events of one boot.
        Raises ValueError: a field named wall_time or monotonic_s.
        """
        if taken := {"wall_time", "monotonic_s"} & set(fields):
            raise ValueError(f"an event's own fields: {', '.join(sorted(taken))}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = _json_line({"kind": kind, "wall_time": now, "monotonic_s": round(time.monotonic(), 6), **fields})
        _append(self.path / EVENTS, line)

    def read_events(self) -> list[dict[str, Any]]:
        """Every event in order, without a last line torn by a kill. Raises UserError naming a line that is none."""
        path = self.path / EVENTS
        return [_object(line, f"{path} line {number}") for number, line in enumerate(_whole_lines(path), start=1)]


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        advice = ": free some, then resume the run" if is_full(error) else ""
        raise UserError(f"{where}: {in_words(error)}{advice}") from error


def _replace(path: Path, content: str) -> None:
    with _told(path):
        replace_file(path, content)


def _number(name: str, value: Any) -> float | int | None:
    if value is None:
        return None
    return int(value) if name in INTEGERS else float(value)


def _append_row(folder: Path, row: Mapping[str, float | int | None]) -> None:
    _append(folder / METRICS_CSV, _csv_line(row), ",".join(row) + "\n")
    _append(folder / METRICS_JSONL, _json_line(row))


def _csv_line(row: Mapping[str, Any]) -> str:
    return ",".join("" if value is None else repr(value) for value in row.values()) + "\n"


def _json_line(data: Mapping[str, Any]) -> str:
    return json.dumps(_strict(data), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become "nan", "inf" and "-inf", so that any reader can read the line."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _append(path: Path, line: str, header: str = "") -> None:
    """Append a line in one write. A tail torn by a kill is cut off first; a write that fails halfway leaves none."""
    with _told(path), path.open("ab+", buffering=0) as file:
        size = _without_torn_tail(file.fileno())
        data = (line if size or not header else header + line).encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def _without_torn_tail(descriptor: int) -> int:
    """Size of the file after whatever follows its last newline was cut off."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 4096)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
        if found >= 0:
            break
    if end != size:
        os.ftruncate(descriptor, end)
    return end


def _whole_lines(path: Path) -> list[str]:
    with _told(path):
        data = path.read_bytes() if path.is_file() else b""
    try:
        return data[: data.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error


def _read_text(path: Path) -> str:
    try:
        with _told(path):
            return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error


def _read_object(path: Path) -> dict[str, Any]:
    with _told(path):
        return _object(path.read_bytes(), str(path))


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: not a JSON object")
    return data


class Table:
    """metrics.csv and metrics.jsonl of a user's own loop: the columns are those of its first row.

    Existing files are continued. Raises UserError: the folder cannot be made, or its metrics.csv cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._columns: list[str] = []
        with _told(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        if lines := _whole_lines(self._folder / METRICS_CSV):
            self._columns = lines[0].split(",")

    def append(self, row: Mapping[str, float | int | None]) -> None:
        """Append one row, by the names of its columns; an absent or None value is an empty field (null).

        Raises:
            UserError: a name that the first row did not have, or that no column can have; a file cannot be written.
        """
        columns, path = self._columns or list(row), self._folder / METRICS_CSV
        if wrong := [name for name in row if not name or set(name) & set(',"\r\n')]:
            raise UserError(f'{path}: {wrong[0]!r} is no name of a column: leave out , and "')
        if more := [name for name in row if name not in columns]:
            raise UserError(
                f"{path}: has no column {', '.join(more)}, only {', '.join(columns)}: the first row names "
                "them all (None for what is not known yet)"
            )
        _append_row(self._folder, {name: row.get(name) for name in columns})
        self._columns = columns
