"""In: the folder of a study. Out: its definition, and the state of each repeat, which its run folders decide.
Does not start runs (runner.py does) and does not evaluate them (evaluate.py does)."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from codescent.base import writing
from codescent.base.durable import write_json
from codescent.base.errors import UserError
from codescent.base.formats import unreadable
from codescent.base.json_damage import json_problem
from codescent.base.published import in_words
from codescent.base.reading import read_json
from codescent.base.typed import Kind as TypeOfFact
from codescent.base.typed import mistyped
from codescent.record import CONFIG, RunFolder
from codescent.record.lines import user_errors
from codescent.results import Run, State, open_run
from codescent.study.file import Scalar, StudyFile
from codescent.study.points import Spec
from codescent.study.result import Kind, PointState

DEFINITION = "study.json"
FORMAT = 1
LOCK = ".lock"
RECORD: Mapping[str, TypeOfFact] = {
    "code": int,
    **dict.fromkeys(("why", "collected"), str),
    **dict.fromkeys(("load_before", "load_after", "wall_s", "others"), float),
}
"""What is noted about a run that has ended."""
REFUSED_CODE = 2
"""Exit code of a run that is refused before its first step, such as one for a device that is not there."""

NO_MEMORY = re.compile(
    r"(?<!perhaps the machine ran )out ?of ?memory|DefaultCPUAllocator|lack of memory"
    r"|(cannot|can't|could not|unable to) allocate memory",
    re.IGNORECASE,
)
"""Words of torch, of the kernel and of the launcher about a run that had too little memory."""


@dataclass(frozen=True)
class Definition:
    """A study as its folder keeps it.

    Attributes:
        axes: their names, in order.
        specs: all points.
        refused: why points cannot exist, by name.
    """

    name: str
    kind: Kind
    config: str
    repeats: int
    steps: int
    warmup: int
    baseline: Mapping[str, Scalar]
    axes: Sequence[str]
    specs: Sequence[Spec]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, study: StudyFile, specs: Sequence[Spec], refused: Mapping[str, str]) -> Definition:
        """That of a study file."""
        keys = study.study
        return cls(
            name=keys.name,
            kind=keys.kind,
            config=keys.config,
            repeats=keys.repeats,
            steps=keys.steps,
            warmup=keys.warmup,
            baseline=keys.baseline,
            axes=study.axis_names,
            specs=specs,
            refused=refused,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Definition:
        """Out of JSON data. Raises ValueError: it is none."""
        try:
            found = TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if wrong := [spec.slug for spec in found.specs if Path(spec.slug).name != spec.slug]:
            raise ValueError(f"slug: given {wrong[0]!r}; must be the name of a folder")
        return found


@dataclass(frozen=True)
class Attempt:
    """A repeat that was run, or that still runs.

    Attributes:
        number: from 1.
        state: DONE, FAILED, OUT_OF_MEMORY; REFUSED: by the machine, before its first step; TO_DO: its run has not
            ended, and is taken again.
        why: it failed.
        run: its folder; None: there is none.
        record: what was noted about it.
    """

    number: int
    state: PointState
    why: str
    run: Run | None
    record: Mapping[str, Any]


class StudyFolder:
    """The folder of a study: study.json, study.csv, and POINT/NUMBER, a run folder for each repeat.

    POINT/NUMBER.json is written when a run has ended: its exit code, why it failed, load of the machine, seconds.
    """

    def __init__(self, path: Path, definition: Definition) -> None:
        self.path, self.definition = path, definition

    @classmethod
    def create(cls, path: Path, definition: Definition, *, held: bool = False) -> StudyFolder:
        """Write the definition of a study that is new, or continues. `held`: this process runs it already.

        Raises UserError: the folder is not a study's, or its runs were made with other values; or the definition has
        changed while another process runs the study.
        """
        if (path / DEFINITION).is_file():
            before = cls.open(path)
            before._refuse_changes(definition)
            if json.dumps(before.definition.to_json()) == json.dumps(definition.to_json()):
                return cls(path, definition)
            if not held:
                with before.hold():
                    return cls.create(path, definition, held=True)
        elif path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()):
            raise UserError(f"{path}: is not empty, and has no {DEFINITION}: give another folder with --folder")
        try:
            writing.make_parents(path)
            write_json(path / DEFINITION, definition.to_json())
        except OSError as error:
            raise UserError(f"{path}: {in_words(error)}") from error
        return cls(path, definition)

    @classmethod
    def open(cls, path: Path | str) -> StudyFolder:
        """Open the folder of a study. Raises UserError: it is none, or its definition is damaged."""
        path = Path(path)
        file = path / DEFINITION
        if not file.is_file():
            raise UserError(f"{path}: not the folder of a study: it has no {DEFINITION}")
        try:
            data = read_json(file)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            if problem := unreadable(data.get("format"), FORMAT, FORMAT):
                raise UserError(f"{file}: {problem}")
            return cls(path, Definition.from_json(data))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: not readable as the definition of a study ({json_problem(error)})") from error

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes from running this study. Raises UserError: another one runs it, or a link is in it."""
        points = [self.path / spec.slug for spec in self.definition.specs]
        if links := [path for path in points if path.is_symlink()]:
            raise UserError(*(f"{path}: {writing.LINK}" for path in links))
        with user_errors(self.path / LOCK), writing.open_own(self.path / LOCK, makes=True) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.path}: another process runs this study; wait for its end, or stop it"
                ) from error
            yield

    def run_path(self, spec: Spec, number: int) -> Path:
        """The run folder of a repeat."""
        return self.path / spec.slug / str(number)

    def attempts(self, spec: Spec) -> list[Attempt]:
        """The repeats of a point that have begun, by number. Raises UserError: a run folder is damaged."""
        folder = self.path / spec.slug
        names = {entry.name.removesuffix(".json") for entry in folder.iterdir()} if folder.is_dir() else set()
        return [self._attempt(spec, number) for number in sorted(int(name) for name in names if name.isdecimal())]

    def make_point(self, spec: Spec) -> None:
        """Create the folder of a point, if it is not there. Raises UserError: it is a link by now, or has no place."""
        if not (self.path / DEFINITION).is_file():
            raise UserError(f"{self.path}: was removed or renamed while its study ran; --folder says where it is now")
        with user_errors(self.path / spec.slug):
            writing.make_folder(self.path / spec.slug, self.path)

    def note(self, spec: Spec, number: int, record: Mapping[str, Any]) -> None:
        """Keep what was noted about a run that has ended. Raises UserError: it cannot be written, or has no place."""
        path = self._record(spec, number)
        self.make_point(spec)
        try:
            write_json(path, dict(record), self.path)
        except OSError as error:
            raise UserError(f"{path}: {in_words(error)}") from error

    def forget(self, spec: Spec, number: int) -> None:
        """Remove a repeat, so that it can be run again. Raises UserError: it still trains, or cannot be removed."""
        path = self.run_path(spec, number)
        if (path / CONFIG).is_file():
            run = RunFolder.open(path)
            run.hold()
            run.release()
        try:
            if path.is_dir():
                writing.remove_folder(path, self.path)
            if self._record(spec, number).parent.is_dir():
                writing.remove_file(self._record(spec, number), self.path, missing_ok=True)
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be removed: {in_words(error)}") from error

    def state(self, spec: Spec, attempts: Sequence[Attempt]) -> tuple[PointState, str]:
        """The state of a point, and why it is one of FAILED, OUT_OF_MEMORY and REFUSED."""
        if spec.name in self.definition.refused:
            return PointState.REFUSED, self.definition.refused[spec.name]
        for state in (PointState.DONE, PointState.OUT_OF_MEMORY, PointState.FAILED, PointState.REFUSED):
            found = [attempt for attempt in attempts if attempt.state is state]
            if found:
                return state, found[-1].why
        return PointState.TO_DO, ""

    def seconds(self) -> dict[str, list[float]]:
        """Seconds of the runs so far, by point: those that were noted."""
        found: dict[str, list[float]] = {}
        for spec in self.definition.specs:
            for attempt in self.attempts(spec):
                if attempt.state is PointState.DONE and "wall_s" in attempt.record:
                    found.setdefault(spec.name, []).append(attempt.record["wall_s"])
        return found

    def _record(self, spec: Spec, number: int) -> Path:
        return self.path / spec.slug / f"{number}.json"

    def _attempt(self, spec: Spec, number: int) -> Attempt:
        path, file = self.run_path(spec, number), self._record(spec, number)
        try:
            record: dict[str, Any] = read_json(file) if os.path.lexists(file) else {}
            problem = mistyped(record, RECORD)
        except (OSError, ValueError, RecursionError) as error:
            problem = f"not readable as JSON ({json_problem(error)})"
        if problem:
            raise UserError(f"{file}: {problem}; delete the file, and the study goes on without it")
        run = open_run(path) if path.is_dir() and any(path.iterdir()) else None
        why = "; ".join(dict.fromkeys(filter(None, [record.get("why", ""), run.why if run else ""])))
        if run and (run.state is State.DONE or "collected" in record):
            return Attempt(number, PointState.DONE, "", run, record)
        if record.get("code") == REFUSED_CODE and run is None:
            return Attempt(number, PointState.REFUSED, why, run, record)
        if record.get("code") or (run and run.state is State.FAILED):
            state = PointState.OUT_OF_MEMORY if NO_MEMORY.search(why) else PointState.FAILED
            return Attempt(number, state, why, run, record)
        return Attempt(number, PointState.TO_DO, "", run, record)

    def _refuse_changes(self, definition: Definition) -> None:
        """Raise UserError if runs of this folder were made with other values than a definition has now."""
        before = {spec.name: spec.overrides for spec in self.definition.specs}
        changed: dict[str, str] = {}
        for spec in definition.specs:
            if not any(attempt.run for attempt in self.attempts(spec)):
                continue
            was = before.get(spec.name, {})
            for key in sorted(was.keys() | spec.overrides.keys()):
                if was.get(key) != spec.overrides.get(key):
                    changed[key] = f"{key}: was {was.get(key)}, is {spec.overrides.get(key)}"
        has_runs = any(attempt.run for spec in self.definition.specs for attempt in self.attempts(spec))
        if has_runs and Path(self.definition.config).stem != Path(definition.config).stem:
            changed["config"] = f"config: was {self.definition.config}, is {definition.config}"
        if changed:
            raise UserError(
                f"{self.path}: its runs were made with other values ({'; '.join(changed.values())}): give another "
                "folder with --folder, or delete this one"
            )
