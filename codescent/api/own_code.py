"""In: a config that names code of the user's program. Out: nothing, or the names that this process cannot stand for.
Does not find or load code (base/own_names.py does) and looks at no command: each one is a new process."""

from __future__ import annotations

from codescent.base.errors import UserError, of_each
from codescent.base.own_names import code_of, load
from codescent.config.own_keys import own_names_in
from codescent.config.sections import Config

_first: dict[str, tuple[object, str]] = {}  # by name: the object of an earlier run, and the hash of its files then


def refuse_stale(config: Config) -> None:
    """Raise UserError for each name whose code is not that of its file, or that other ranks do not have.

    A process imports a file once, and environment.json would have the hash of a file that was changed since.
    """
    names = own_names_in(config)
    loggers = {} if config.log.to is None else {"log.to": config.log.to}
    if config.parallel.ranks > 1:
        problems = [
            f"{key} = {name}: with parallel.ranks = {config.parallel.ranks} each rank is a process with another "
            "__main__; move this code into a module"
            for key, name in (names | loggers).items()
            if name.startswith("__main__:")
        ]
        if problems:
            raise UserError(*problems)
    of_each(names, lambda key: _refuse_changed(key, names[key]))


def _refuse_changed(key: str, name: str) -> None:
    """Raise UserError if the file of an object has changed since an earlier run; the object is still the same one."""
    found, file = load(key, name)
    digest = code_of(key, name)["sha256"]
    first, before = _first.setdefault(name, (found, digest))
    if first is not found:
        _first[name] = found, digest
    elif before != digest:
        module = name.partition(":")[0]
        raise UserError(
            f"{key} = {name}: {file} has changed since this program imported it: call importlib.reload on the module "
            f"{module}, or start the program again"
        )
