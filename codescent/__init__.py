"""In: nothing. Out: the version, the functions for training loops of your own (`codescent docs own_module`), and the
base classes of what a config may name of your code (`codescent docs own_names`).
Does not import torch before a program uses one of these functions: a program that only plans needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import codescent.base.parent  # noqa: F401 - remembers the parent process, before torch is imported

__version__ = "0.1.0"

__all__ = [
    "Documents",
    "Metrics",
    "ModelKind",
    "RatePoint",
    "RateSchedule",
    "Task",
    "UpdateRule",
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
    "config.rate_schedules": ("RatePoint", "RateSchedule"),
    "config.update_rules": ("UpdateRule",),
    "data.text.own_documents": ("Documents",),
    "models.own": ("ModelKind",),
    "own.distribute": ("accumulate", "clip_", "distribute"),
    "own.metrics": ("Metrics",),
    "own.profile": ("profile",),
    "own.rounds": ("averaged",),
    "own.sampler": ("sampler", "validation_sampler"),
    "own.saved": ("load", "save"),
    "own.session": ("init",),
    "tasks.task": ("Task",),
}

if TYPE_CHECKING:
    from codescent.base.errors import UserError
    from codescent.config.rate_schedules import RatePoint, RateSchedule
    from codescent.config.update_rules import UpdateRule
    from codescent.data.text.own_documents import Documents
    from codescent.models.own import ModelKind
    from codescent.own.distribute import accumulate, clip_, distribute
    from codescent.own.metrics import Metrics
    from codescent.own.profile import profile
    from codescent.own.rounds import averaged
    from codescent.own.sampler import sampler, validation_sampler
    from codescent.own.saved import load, save
    from codescent.own.session import init
    from codescent.tasks.task import Task
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
