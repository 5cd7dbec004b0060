"""In: the name of a library that only some commands need. Out: the library, or the extra that brings it.
Does not import it before it is needed: an installation without it does all the rest."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from codescent.base.errors import UserError


def install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml."""
    return f'pip install "codescent[{extra}]"'


def is_installed(package: str) -> bool:
    """Whether there is such a package. A folder of this name alone is none: wandb writes one where it runs."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def library(name: str, form: str, extra: str) -> ModuleType:
    """Import the library `name`, which reads or writes `form`.

    Args:
        name: of the module, such as "pyarrow.parquet".
        form: what needs it, as people call it.
        extra: of the package: `pip install "codescent[EXTRA]"` installs the library.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{form} needs {package}, which is not installed: {install(extra)}") from error
