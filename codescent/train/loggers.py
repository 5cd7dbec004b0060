"""In: log.to of a config. Out: the user's functions, called with a run's description, its metrics, events and end.
Does not decide what is logged: they get what the run folder gets. Only rank 0 of `codescent train` imports them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Protocol

from codescent.base.errors import UserError
from codescent.base.reading import read_text
from codescent.base.secret import without_user
from codescent.record import PLAN

START, METRICS, EVENT, END = "start", "metrics", "event", "end"
"""Values of the argument `kind`; docs/loggers.md describes `data` of each."""

FAILURES_ALLOWED = 10
"""A function is not called any more after this many exceptions in a row."""


class Function(Protocol):
    """A user's function. The arguments have names, so that hardly any function of another purpose can be called."""

    def __call__(self, *, kind: str, data: dict[str, Any]) -> object:
        """Log `data`; the result is not used."""


@dataclass
class Logger:
    """A user's function, and how often it has failed.

    Attributes:
        name: as in log.to.
        function: to call.
        file: of its module.
        failures: number of exceptions.
        in_a_row: number of exceptions since the last call without one.
        needs_start: it is given up if its call at the start fails.
    """

    name: str
    function: Function
    file: str
    failures: int = 0
    in_a_row: int = 0
    needs_start: bool = False


@dataclass(frozen=True)
class Failure:
    """An exception of a user's function that is reported: the first one, and the one after which it is given up.

    Attributes:
        logger: name of the function, as in log.to.
        call: the `kind` with which it was called.
        problem: the exception, in one line.
        given_up: whether it is not called any more.
    """

    logger: str
    call: str
    problem: str
    given_up: bool


class Loggers:
    """Calls the functions of log.to in their order, each before the next step of the run.

    Args:
        loggers: loaded by `load`.
        report: called with the failures that the user should know of. The run goes on after each.
    """

    def __init__(self, loggers: Sequence[Logger], report: Callable[[Failure], None]) -> None:
        self.loggers, self.report = loggers, report

    def send(self, kind: str, data: Mapping[str, Any]) -> None:
        """Call every function that has not been given up. Each gets a dict of its own."""
        for logger in self.loggers:
            if logger.in_a_row < FAILURES_ALLOWED:
                self._call(logger, kind, dict(data))

    def _call(self, logger: Logger, kind: str, data: dict[str, Any]) -> None:
        try:
            logger.function(kind=kind, data=data)
            logger.in_a_row = 0
        except (Exception, SystemExit) as error:
            logger.failures += 1
            lost = logger.needs_start and kind == START
            logger.in_a_row = FAILURES_ALLOWED if lost else logger.in_a_row + 1
            given_up = logger.in_a_row == FAILURES_ALLOWED
            if logger.failures == 1 or given_up:
                self.report(Failure(logger.name, kind, _words(error, logger.file), given_up))


def add_folders(files: Iterable[Path]) -> None:
    """Append the working directory and the folders of config files to the folders of importable modules.

    Installed modules win over those in these folders. The folder of a run is left out: a run folder of somebody else
    must not bring code along.
    """
    for folder in (Path.cwd(), *(file.absolute().parent for file in files)):
        if not (folder / PLAN).is_file() and str(folder) not in sys.path:
            sys.path.append(str(folder))


def find(log_to: str | None) -> None:
    """Check that the modules of log.to exist, without running their code. Raises UserError: one does not."""
    if problems := [problem for name in _names(log_to) if (problem := _missing(name))]:
        raise UserError(*problems)


def load(log_to: str | None) -> list[Logger]:
    """Import the functions of log.to.

    Raises:
        UserError: all functions that cannot be imported or called, each with the reason.
    """
    found: list[Logger] = []
    problems: list[str] = []
    for name in _names(log_to):
        try:
            found.append(_load(name))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def _names(log_to: str | None) -> list[str]:
    return [] if log_to is None else list(dict.fromkeys(name.strip() for name in log_to.split(",")))


def _missing(name: str) -> str:
    """Why there is no module for a function; "" if there is one, or only its import can tell. No code of it runs."""
    above: str = ""
    folders: Sequence[str] | None = None
    for part in name.partition(":")[0].split("."):
        is_top, above = not above, f"{above}.{part}".lstrip(".")
        if above in sys.modules:
            folders = getattr(sys.modules[above], "__path__", None)
            continue
        spec = _spec(above, folders) if is_top or folders is not None else None
        if spec is None:
            return _no_module(name) if is_top or _is_plain(folders) else ""
        folders = spec.submodule_search_locations
    return ""


def _spec(module: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is; `folders`: those of its package. importlib's own function would import the package."""
    found = (finder.find_spec(module, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


def _is_plain(folders: Iterable[str] | None) -> bool:
    """Whether a package cannot add modules when it is imported: its __init__.py is missing or empty."""
    codes = [Path(folder) / "__init__.py" for folder in folders or ()]
    return not any(code.is_file() and read_text(code, errors="replace").strip() for code in codes)


def _no_module(name: str) -> str:
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    return (
        f"log.to = {name}: there is no module {module} in the working directory, in the folder of the config, or among "
        f"the installed ones; run the command in the folder of {top}, or add this folder to PYTHONPATH"
    )


def _load(name: str) -> Logger:
    if problem := _missing(name):
        raise UserError(problem)
    where, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise UserError(_no_module(name)) from error
        raise UserError(f"log.to = {name}: importing {where} raised {_words(error, where)}") from error
    file = getattr(module, "__file__", None) or where
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {where}:{near[0]}?" if near else ""
        raise UserError(f"log.to = {name}: {file} has no function {attribute}{hint}")
    if not (callable(function) and _takes(function)):
        raise UserError(f"log.to = {name}: must be a function of kind and data: def {attribute}(kind, data)")
    return Logger(name, function, file)


def _takes(function: Callable[..., object]) -> bool:
    """Whether a function can be called with the arguments `kind` and `data`."""
    try:
        inspect.signature(function).bind(kind="", data={})
    except (TypeError, ValueError):  # ValueError: a function of C without a signature
        return False
    return True


def _words(error: BaseException, file: str) -> str:
    """An exception in one line, without passwords of addresses; with the line of the user's file that raised it.
    If no line of `file` was running: the first line that is neither this module's nor the import system's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = (__file__, importlib.__file__)
    own = [frame for frame in frames if not frame.filename.startswith("<") and frame.filename not in others]
    of_user = [frame for frame in own if frame.filename == file][-1:] or own[:1]
    where = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in of_user)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {without_user(said)}' if said else ''}{where}"
