"""In: nothing. Out: the version, and the functions for training loops of your own (`codescent docs own_module`).
Does not import torch before a program uses one of these functions: a program that only plans needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import codescent.base.parent  # noqa: F401 - remembers the parent process, before torch is imported

__version__ = "0.1.0"

__all__ = [
    "Metrics",
    "UserError",
    "accumulate",
    "averaged",
    "clip_",
    "distribute",
    "init",
    "load",
    "profile",
    "sampler",
    "save",
    "validation_sampler",
]

_NAMES = {
    "base.errors": ("UserError",),
    "own.distribute": ("accumulate", "clip_", "distribute"),
    "own.metrics": ("Metrics",),
    "own.profile": ("profile",),
    "own.rounds": ("averaged",),
    "own.sampler": ("sampler", "validation_sampler"),
    "own.saved": ("load", "save"),
    "own.session": ("init",),
}

if TYPE_CHECKING:
    from codescent.base.errors import UserError
    from codescent.own.distribute import accumulate, clip_, distribute
    from codescent.own.metrics import Metrics
    from codescent.own.profile import profile
    from codescent.own.rounds import averaged
    from codescent.own.sampler import sampler, validation_sampler
    from codescent.own.saved import load, save
    from codescent.own.session import init
else:

    def __getattr__(name):  # noqa: ANN001, ANN202 - type checkers read the imports above
        """Import the module of a public name at its first use."""
        import importlib  # noqa: PLC0415 - `codescent --help` does not need it

        module = next((module for module, names in _NAMES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return value

    def __dir__():  # noqa: ANN202
        """All names of the package, imported already or not."""
        return sorted({*globals(), *__all__})
