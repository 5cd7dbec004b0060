"""In: a name of a user's code, such as mymodule:NAME. Out: what it names; the hash of its file; its errors in words.
Does not know what the code is for. Imports nothing before somebody asks for what a name stands for."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import os
import re
import reprlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from codescent.base.counted import a_type
from codescent.base.errors import UserError
from codescent.base.reading import read_bytes, read_text
from codescent.base.returned import check_methods
from codescent.base.secret import without_user

PLAN_FILE = "plan.json"
"""A folder with such a file is a run folder. No code is looked for in it: somebody else's must not bring code along."""
FOLDERS = "CODESCENT_FOLDERS"
"""Variable with folders that may hold modules, separated as in PATH: a program gives its own to the ranks it starts."""
FORM = '"module:NAME"'
RESERVED = "synthetic:"
"""data.corpus = "synthetic:2048" names no module."""
PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$"
"""Of a name: "package.module:NAME"."""
_NAME = re.compile(PATTERN)
_PACKAGE = Path(__file__).parents[1]
_HASHED = 16
_PLAIN: Mapping[str, type] = {"str": str, "bool": bool}

T = TypeVar("T")
_loaded: dict[str, str] = {}  # the files of names that were loaded: path -> "key = name"
_made: dict[type, Any] = {}  # what `instance` has made


def is_own_name(value: object) -> bool:
    """Whether a value has the form of a name of a user's code: "package.module:NAME"."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and not value.startswith(RESERVED)


def check_form(value: str) -> str:
    """The value, if it is the name of an object of a module. Raises ValueError: it is not; the form that is right."""
    module, colon, attribute = value.partition(":")
    if colon and module.endswith(".py"):
        raise ValueError(f'must be {FORM}: write "{module[:-3].replace("/", ".")}:{attribute}", without .py')
    if not is_own_name(value):
        raise ValueError(f"must be {FORM}" if colon else "")
    return value


def add_folders(files: Iterable[Path] = ()) -> None:
    """Append the working directory, the folders of config files and those of FOLDERS to those of importable modules.

    Installed modules win over those in these folders. The folder of a run is left out (`PLAN_FILE`).
    """
    given = map(Path, filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)))
    for folder in (Path.cwd(), *(file.resolve().parent for file in files), *given):
        if not (folder / PLAN_FILE).is_file() and str(folder) not in sys.path:
            sys.path.append(str(folder))


def missing(key: str, name: str) -> str:
    """Why there is no module for a name; "" if there is one, or only its import can tell. No code of it runs."""
    above: str = ""
    folders: Sequence[str] | None = None
    for part in name.partition(":")[0].split("."):
        is_top, above = not above, f"{above}.{part}".lstrip(".")
        if above in sys.modules:
            folders = getattr(sys.modules[above], "__path__", None)
            continue
        spec = _spec(above, folders) if is_top or folders is not None else None
        if spec is None:
            return _no_module(key, name) if is_top or _is_plain(folders) else ""
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


def _no_module(key: str, name: str) -> str:
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    return (
        f"{key} = {name}: there is no module {module} in the working directory, in the folder of the config, or among "
        f"the installed ones; run the command in the folder of {top}, or add this folder to PYTHONPATH"
    )


def load(key: str, name: str, what: str = "object") -> tuple[Any, str]:
    """Import the module of a name. Returns the object that it names, and the file of the module.

    Args:
        key: the config key that has the name, for messages.
        name: as "package.module:NAME".
        what: what the key names, in a word.

    Raises:
        UserError: there is no such module, its import raised an exception, or it has no such object.
    """
    add_folders()
    if problem := missing(key, name):
        raise UserError(problem)
    where, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise UserError(_no_module(key, name)) from error
        raise UserError(f"{key} = {name}: importing {where} raised {in_words(error, where)}") from error
    file = getattr(module, "__file__", None) or where
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {where}:{near[0]}?" if near else ""
        raise UserError(f"{key} = {name}: {file} has no {what} {attribute}{hint}")
    return found, file


def subclass(key: str, name: str, base: type[T], needs: Sequence[str] = ()) -> type[T]:
    """The class of a name.

    Args:
        key, name: see `load`.
        base: the documented base class, a name of the package `codescent`.
        needs: methods and attributes that it must define.

    Raises:
        UserError: see `load`; it is no subclass of `base`, or lacks something of `needs`.
    """
    found, file = load(key, name, "class")
    if not (inspect.isclass(found) and issubclass(found, base)) or found is base:
        is_what = "this class itself" if found is base else a_type(found)
        if inspect.isclass(found) and found is not base:
            is_what = f"a class without it (its bases: {', '.join(one.__name__ for one in found.__bases__)})"
        raise UserError(f"{key} = {name}: {file}: must be a subclass of codescent.{base.__name__}, and is {is_what}")
    own = {one for cls in found.__mro__ if cls not in base.__mro__ for one in vars(cls)}
    lacking = [one for one in needs if one not in own]
    if lacking:
        raise UserError(f"{key} = {name}: {file}: must define {' and '.join(lacking)}: see codescent docs own_names")
    for path in _files(found, name, file).values():
        _loaded[path] = f"{key} = {name}"
    return found


def object_of(key: str, name: str, kind: type[T]) -> T:
    """The object of a name, of a documented class. Raises UserError: see `load`; it is none of that class."""
    found, file = load(key, name)
    if not isinstance(found, kind):
        is_what = "the class itself" if found is kind else a_type(found)
        raise UserError(
            f"{key} = {name}: {file}: must be an object of the class codescent.{kind.__name__}, and is {is_what}"
        )
    for path in _files(found, name, file).values():
        _loaded[path] = f"{key} = {name}"
    return found


def instance(key: str, name: str, base: type[T], needs: Sequence[str] = ()) -> T:
    """An object of the class of a name, made without arguments, the same one each time. What its methods return is
    checked (returned.py). Raises UserError: see `subclass`; it cannot be made; an attribute has another type than that
    of the base class, a method other arguments."""
    found = subclass(key, name, base, needs)
    if found not in _made:
        try:
            _made[found] = found()
        except (Exception, SystemExit) as error:
            raise UserError(f"{key} = {name}: making it without arguments raised {in_words(error, '')}") from error
        if wrong := [*_mistyped(_made[found], base)]:
            del _made[found]
            raise UserError(*(f"{key} = {name}: {one}: see codescent docs own_names" for one in wrong))
        try:
            check_methods(_made[found], base, f"{key} = {name}")
        except UserError:
            del _made[found]
            raise
    made: T = _made[found]
    return made


def _mistyped(made: object, base: type) -> Iterator[str]:
    """Attributes that are no text, bool, tuple of texts or method, though those of the base class are, in clauses."""
    hints = {name: hint for cls in base.__mro__ for name, hint in inspect.get_annotations(cls).items()}
    for name, hint in hints.items():
        kind = tuple if hint.startswith("tuple[") else _PLAIN.get(hint)
        value = getattr(made, name, None)
        if kind is None or not hasattr(made, name):
            continue
        if kind is not tuple and not isinstance(value, kind):
            yield f"{name} = {reprlib.repr(value)}: must be a {hint}"
        elif kind is tuple and not (isinstance(value, tuple) and all(isinstance(one, str | Path) for one in value)):
            yield f'{name} = {reprlib.repr(value)}: must be a tuple of texts, such as ("one",)'
    for name, _ in inspect.getmembers(base, inspect.isfunction):
        if not callable(getattr(made, name)):
            yield f"{name} is {a_type(getattr(made, name))}: must be a method"


def code_of(key: str, name: str) -> dict[str, Any]:
    """What is known of the code that a name stands for, as JSON data: its name, its files, and the hash of them.

    Covered are the file of the module, and those of the class and its base classes, without those of Python, torch
    and codescent; also what an object names itself (`other_names`). Modules that these import are not covered.

    Raises:
        UserError: see `load`.
    """
    found, file = load(key, name)
    files = _files(found, name, file)
    for other in () if inspect.isclass(found) else getattr(found, "other_names", tuple)():
        named, its_file = load(key, other)
        files |= _files(named, other, its_file)
    digest = hashlib.sha256()
    for module, path in files.items():
        digest.update(f"{module}\n".encode() + read_bytes(Path(path)))
    return {"name": name, "files": list(files.values()), "sha256": digest.hexdigest()[:_HASHED]}


def _files(found: object, name: str, file: str) -> dict[str, str]:
    """The files of an object, by module: see `code_of`."""
    kind = found if inspect.isclass(found) else type(found)
    modules = [one.__module__ for one in kind.__mro__ if _is_users(one.__module__)]
    files = {module: getattr(sys.modules.get(module), "__file__", None) for module in modules}
    files[name.partition(":")[0]] = file
    return {module: path for module, path in sorted(files.items()) if path and path.endswith(".py")}


def _is_users(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in (*sys.stdlib_module_names, "torch", "numpy", "codescent")


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """A block in which users' code runs: an exception of this code leaves it as a UserError, without a traceback.

    It is the user's if the last line of a traceback that is ours or the user's is in a file that a name has loaded.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if told := of_user(error):
            raise UserError(told) from error
        raise


def of_user(error: BaseException) -> str:
    """The sentence on an error that users' code has raised; "": it is not of users' code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _loaded:
            return f"{_loaded[frame.filename]}: raised {in_words(error, frame.filename)}"
        if Path(frame.filename).is_relative_to(_PACKAGE):
            return ""
    return ""


def in_words(error: BaseException, file: str) -> str:
    """An exception in one line, without passwords of addresses; with the line of the user's file that raised it.
    If no line of `file` was running: the first line that is neither this package's nor the import system's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<") and frame.filename != importlib.__file__]
    own = [frame for frame in own if not Path(frame.filename).is_relative_to(_PACKAGE)]
    of_user = [frame for frame in own if frame.filename == file][-1:] or own[:1]
    where = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in of_user)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {without_user(said)}' if said else ''}{where}"
