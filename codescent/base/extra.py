"""In: the name of a library that only some forms of data need. Out: the library.
Does not import it before it is needed: an installation without it works with all other data."""

from __future__ import annotations

import importlib
from types import ModuleType

from codescent.base.errors import UserError


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
        install = f'pip install "codescent[{extra}]"'
        raise UserError(f"{form} needs {package}, which is not installed: {install}") from error
