"""In: a run's config, plan, metrics and events. Out: the files of the run folder, written and read back.
Does not write checkpoints (checkpoint/ does) and does not know ranks: only rank 0 may write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.formats import unreadable
from codescent.base.json_damage import json_problem
from codescent.base.own_names import PLAN_FILE
from codescent.base.published import in_words, published
from codescent.base.reading import MOST_BYTES, read_bytes, read_text
from codescent.plan.measured import measured_columns
from codescent.record import answers, memory, ranks
from codescent.record.beginning import ANOTHER, MAKING, delete_new, refuse_taken, write_beside_jobs, write_new
from codescent.record.beginning import CHECKPOINTS as CHECKPOINTS
from codescent.record.beginning import CONFIG as CONFIG
from codescent.record.beginning import JOBS as JOBS
from codescent.record.corpora import columns_of
from codescent.record.lease import CLOCK, LEASE_S, Lease
from codescent.record.lines import append, forward, user_errors
from codescent.record.rows import FINITE, METRICS_CSV, METRICS_JSONL, TIME, WHOLE, Kind, Rows, json_line, strict

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
    "forward_s",
    "backward_s",
    "other_s",
    "mfu_spec",
    "hfu",
    "sent_bytes",
    "staleness_mean",
    "staleness_max",
    "consensus",
    "val_loss_ema",
    "padding",
)
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("step", "tokens", "peak_memory_bytes"), WHOLE),
    **dict.fromkeys((*ranks.PARTS, "compute_s"), FINITE),
    "step_s": TIME,
}
"""Of columns of METRICS; the others are FLOAT, as a loss may be NaN."""

PLAN = PLAN_FILE
ENVIRONMENT = "environment.json"
PREDICTION = "prediction.json"
EVENTS = "events.jsonl"
LOGS = "logs"
"""Folder with what each of several ranks has printed: rank-0.log and so on."""
TOKENIZER = "tokenizer.json"
LOCK = ".writer"
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems without locks. There the lease alone keeps other writers out."""
MOST_CONFIG_BYTES = 1 << 20
REMOVAL_S = 0.5
"""Seconds after which the config of a folder that is being removed is gone, too."""

FORMAT = 2
"""Format number of the run folders that this program writes, in plan.json. docs/versions.md lists all formats."""
OLDEST_FORMAT = 1
"""The oldest format that this program reads. A folder without a number has format 1."""


class RunFolder:
    """One run on disk: `config.toml plan.json environment.json metrics.csv metrics.jsonl events.jsonl checkpoints/`,
    and files of the task, such as `tokenizer.json`.

    Every method that writes raises UserError with the path: the disk is full or not writable.
    Each row is appended in one unbuffered write, so kill -9 loses no written row.

    Attributes:
        path: the current path of the folder.
        config_text: the resolved config at the start of the run, as TOML.
        plan: the plan at the start of the run, as JSON data, without the format number.
        columns: names of the columns of the metrics: METRICS, those of each corpus of a mixture, and what model and
            objective measure beside the loss.
        listeners: functions that are called with "metrics" and each row, or "event" and each event, once it is written.
    """

    def __init__(self, path: Path, config_text: str, plan: dict[str, Any]) -> None:
        self.path, self.config_text, self.plan = path, config_text, plan
        self.listeners: list[Callable[[str, Mapping[str, Any]], object]] = []
        self.columns = _columns(plan)
        self._rows = Rows(path, self.columns, KINDS)
        self._memory = memory.Changes(path)
        self._held: list[int] = []  # open descriptors of the folder and the lock file, while this process writes
        self._lease: Lease | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def writer(self) -> int:
        """The number of this process among all that have written the run, from 1; 0: it has no lease."""
        return 0 if self._lease is None else self._lease.generation

    @property
    def tokenizer(self) -> Path:
        """The file of the run's tokenizer. Sampling needs only files of the run folder."""
        return self.path / TOKENIZER

    @classmethod
    def create(cls, path: Path | str, config_toml: str, plan: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run atomically. What a job that starts it has put there before stays.

        Raises UserError: `path` has other things, or cannot be created.
        """
        path = Path(path)
        refuse_taken(path)
        header = ",".join(_columns(plan)) + "\n"
        texts = {METRICS_CSV: header, METRICS_JSONL: "", EVENTS: "", PLAN: _plan_text(plan), CONFIG: config_toml}
        run = cls(path, config_toml, _without_format(json.loads(texts[PLAN])))
        try:
            with published(path, taken=f"is there already: {ANOTHER}") as making:
                write_new(making, texts)
        except UserError:
            if not (path / JOBS).is_dir():
                raise
            with user_errors(path):
                writing.make_folder(path / MAKING)
                run.hold()
                try:
                    write_beside_jobs(path, texts)
                finally:
                    run.release()
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the folder of a run.

        Raises UserError: it is not a run folder, with the missing or unreadable files; or its format is not supported.
        """
        path = Path(path)
        if not path.is_dir():
            what = "is a file, not a run folder" if os.path.lexists(path) else "no such run folder"
            raise UserError(f"{path}: {what}")
        missing = [name for name in (CONFIG, PLAN) if not os.path.lexists(path / name)]
        missing += [] if (path / CHECKPOINTS).is_dir() else [f"{CHECKPOINTS}/"]
        if missing:
            raise UserError(f"{path}: not a run folder: it has no {', no '.join(missing)}")
        config_text, plan = _read_text(path / CONFIG, MOST_CONFIG_BYTES), _read_object(path / PLAN)
        if problem := unreadable(plan.get("format", 1), OLDEST_FORMAT, FORMAT, _writer(path)):
            raise UserError(f"{path / PLAN}: run folder of {problem}")
        return cls(path, config_text, _without_format(plan))

    def hold(self) -> None:
        """Lock this run for writing until this process ends. Raises UserError: another process has locked it."""
        with user_errors(self.path / LOCK), writing.open_own(self.path / LOCK, makes=True) as file:
            descriptor = os.dup(file.fileno())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.read(descriptor, 64).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(f"{self.path}: is being written by {writer}: wait for its end, or stop it") from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(descriptor)
                raise UserError(f"{self.path / LOCK}: cannot be locked: {in_words(error)}") from error
        try:
            with user_errors(self.path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
                self._held = [os.open(self.path, os.O_RDONLY | os.O_DIRECTORY), descriptor]
        except UserError:
            os.close(descriptor)
            raise

    def lease(self, lost: Callable[[str], object], lease_s: float = LEASE_S, patience_s: float = 0.0) -> None:
        """Be the only writer of this run, on all hosts, until `release`.

        Where `hold` does not reach (another host, a file system without locks), this waits until the lease of the
        writer before has ended. From now on each write first makes sure that no other process has taken the run.

        Args:
            lost: ends this process, with a sentence: see Lease.
            lease_s: seconds for which a lease holds, without a renewal.
            patience_s: seconds for which this waits for another writer that still renews its lease.

        Raises:
            UserError: another process writes it.
        """
        self._lease = Lease(self.path, lost, lease_s, self._renamed, patience_s)

    def delete_unused(self) -> None:
        """Delete the folder that this process has created, if it has no event: the run was refused before it began.

        What a job that starts it has put there stays.
        """
        if self._is_at(self.path) and not self.read_events():
            with user_errors(self.path):
                delete_new(self.path)

    def release(self) -> None:
        """Unlock this run."""
        if self._lease is not None:
            self._lease.release()
        while self._held:
            os.close(self._held.pop())

    def write_task_files(self, files: Mapping[str, str]) -> None:
        """Save text files of the task by name, each atomically."""
        for name, text in files.items():
            _replace(self.path / name, text)

    def read_task_files(self, names: Iterable[str]) -> dict[str, str]:
        """Read the existing files among `names`. Raises UserError: a file is unreadable."""
        found = {}
        for name in names:
            if os.path.lexists(path := self.path / name):
                found[name] = _read_text(path)
        return found

    def write_config(self, config_toml: str, plan: Mapping[str, Any]) -> None:
        """Replace config.toml and plan.json, each atomically. A resumed run may have another layout."""
        text = _plan_text(plan)
        _replace(self.path / CONFIG, config_toml)
        _replace(self.path / PLAN, text)
        self.config_text, self.plan = config_toml, _without_format(json.loads(text))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json atomically: facts about the machine, and settings chosen for it."""
        _replace(self.path / ENVIRONMENT, json.dumps(strict(environment), indent=1, allow_nan=False) + "\n")

    def write_prediction(self, prediction: Mapping[str, Any]) -> None:
        """Replace prediction.json atomically: what was predicted before the first step (planner/prediction.py)."""
        _replace(self.path / PREDICTION, json.dumps(strict(prediction), indent=1, allow_nan=False) + "\n")

    def read_prediction(self) -> dict[str, Any] | None:
        """Read prediction.json; None: nothing was predicted. Raises UserError: it is unreadable, or no JSON object."""
        path = self.path / PREDICTION
        return _read_object(path) if os.path.lexists(path) else None

    def remove_prediction(self) -> None:
        """Delete prediction.json of an earlier start, whose plan may have been another one."""
        with user_errors(self.path / PREDICTION):
            writing.remove_file(self.path / PREDICTION, missing_ok=True)

    def read_environment(self) -> dict[str, Any]:
        """Read environment.json; empty if the run was killed before it was written. Raises UserError: unreadable."""
        path = self.path / ENVIRONMENT
        return _read_object(path) if os.path.lexists(path) else {}

    def metrics(self, row: Mapping[str, float | int | None]) -> None:
        """Append a row, by names of `columns`, to metrics.jsonl and metrics.csv. None is an empty field (null in JSON).

        Raises ValueError: a name is unknown, or the step is missing. Raises UserError: a file cannot be written, or a
        row of before cannot be read.
        """
        if unknown := sorted(set(row) - set(self.columns)):
            raise ValueError(f"not metrics: {', '.join(unknown)}")
        if row.get("step") is None:
            raise ValueError("a row of metrics needs its step")
        self.follow()
        try:
            self._rows.append(row)
        except UserError:  # the first files of a folder that is being removed may be gone, and the config not yet
            time.sleep(REMOVAL_S)
            self.follow()
            raise
        for listen in self.listeners:
            listen("metrics", row)

    def write_ranks(self, rows: Sequence[ranks.RankRow]) -> None:
        """Append a row for each rank to ranks.csv. Raises UserError: the file cannot be written."""
        self.follow()
        ranks.write(self.path, rows)

    def write_memory(self, rows: Sequence[memory.MemoryRow]) -> None:
        """Append a row for each rank to memory.csv, if a number has changed. Raises UserError: it cannot be written."""
        self._memory.folder = self.follow()
        self._memory.write(rows)

    def write_answers(self, row: Mapping[str, Any]) -> None:
        """Append a row to answers.jsonl. Raises UserError: the file cannot be written."""
        answers.write(self.follow(), row)

    def iter_memory(self) -> Iterator[memory.MemoryRow]:
        """Read memory.csv: the memory of each rank by part. Raises UserError: a line is not a row."""
        yield from memory.TABLE.read(self.path)

    def last_memory(self) -> dict[int, memory.MemoryRow]:
        """The last row of memory.csv of each rank. Raises UserError: a line is not a row."""
        return memory.last_rows(self.path)

    def iter_ranks(self) -> Iterator[ranks.RankRow]:
        """Read ranks.csv: the parts of a step and the memory of each rank. Raises UserError: a line is not a row."""
        yield from ranks.read(self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics as a list; see `iter_metrics`."""
        return list(self.iter_metrics())

    def iter_metrics(self) -> Iterator[dict[str, Any]]:
        """Read all rows of metrics in order, without an incomplete last line. Raises UserError: a line is not a row.

        Each row has all names of `columns`: those of WHOLE as int, the others as float, empty fields as None.
        """
        yield from self._rows.read()

    def rewind(self, step: int) -> int:
        """On resume: delete the rows of steps after `step` (event "rewind"). Returns their number.

        metrics.csv then has the rows of metrics.jsonl. Rows of ranks.csv, memory.csv, answers.jsonl are not counted.
        """
        ranks.rewind(self.path, step)
        memory.TABLE.rewind(self.path, step)
        answers.rewind(self.path, step)
        if dropped := self._rows.rewind(step):
            self.event("rewind", step=step, dropped_rows=dropped)
        return dropped

    def derive(self) -> None:
        """Give metrics.csv the rows of metrics.jsonl. Raises UserError: a file cannot be read or written."""
        self._rows.derive()

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to events.jsonl: its kind, the wall time (UTC, ISO 8601), monotonic_s, and the fields.

        `monotonic_s` is the machine's monotonic clock. Its differences are valid until the machine restarts.
        Raises ValueError: a field has the name wall_time or monotonic_s.
        """
        if taken := {"wall_time", "monotonic_s"} & set(fields):
            raise ValueError(f"reserved fields of an event: {', '.join(sorted(taken))}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.follow()
        event = {"kind": kind, "wall_time": now, "monotonic_s": round(time.monotonic(), 6), **fields}
        append(self.path / EVENTS, json_line(event))
        for listen in self.listeners:
            listen("event", event)

    def read_events(self) -> list[dict[str, Any]]:
        """All events in order, without an incomplete last line. Raises UserError with the number of a wrong line."""
        path = self.path / EVENTS
        return [_object(line, f"{path} line {number}") for number, line in enumerate(forward(path), start=1)]

    def follow(self) -> Path:
        """The current path of the folder. If the folder was renamed during the run, writes an event "moved".

        Raises UserError: the folder was deleted, or is being deleted. It is not created again.
        Raises RunFailed: another process writes the run.
        """
        if self._held and not self._is_at(self.path):
            before, self.path = self.path, self._renamed()
            self._rows.folder = self.path
            if self._lease is not None:
                self._lease.follow(self.path)
            self.event("moved", before=str(before), after=str(self.path))
        self.may_write()
        return self.path

    def may_write(self) -> None:
        """Make sure that no other process has taken the run. Any thread may ask. Raises RunFailed: one has."""
        lease = self._lease
        if lease is not None and (time.clock_gettime(CLOCK) > lease.ends_s or not os.path.lexists(lease.path)):
            lease.check()

    def _renamed(self) -> Path:
        """The new path of the renamed folder, from its open descriptor (Linux only)."""
        with suppress(OSError):
            name = Path(f"/proc/self/fd/{self._held[0]}").readlink()
            if self._is_at(name):
                return name
        raise UserError(
            f"{self.path}: the run folder was removed, or moved to another disk, while the run was writing it: the "
            "steps since its last checkpoint cannot be saved, and the run ends"
        )

    def _is_at(self, path: Path) -> bool:
        """Whether `path` is the folder that this process has locked, and still has a config."""
        with user_errors(path):
            try:
                (path / CONFIG).stat()
                return os.path.samestat(path.stat(), os.fstat(self._held[0]))
            except (FileNotFoundError, NotADirectoryError):
                return False


def _plan_text(plan: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **plan}, indent=1) + "\n"


def _columns(plan: Mapping[str, Any]) -> tuple[str, ...]:
    return (*METRICS, *columns_of(plan), *measured_columns(plan))


def _without_format(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != "format"}


def _writer(path: Path) -> str | None:
    """The version of codescent that wrote the folder, from environment.json; None: unknown."""
    try:
        found = _read_object(path / ENVIRONMENT).get("codescent")
    except UserError:
        return None
    return found if isinstance(found, str) else None


def _replace(path: Path, content: str) -> None:
    with user_errors(path):
        replace_file(path, content)


def _read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    try:
        with user_errors(path):
            return read_text(path, most_bytes)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {json_problem(error)}") from error


def _read_object(path: Path) -> dict[str, Any]:
    with user_errors(path):
        return _object(read_bytes(path), str(path))


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({json_problem(error)})") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: not a JSON object")
    return data
