"""In: nothing. Out: the version; `train`, `plan` and `Run` for programs and notebooks (`codescent docs python`).
Also functions for loops of your own (own_module), and base classes of what a config may name of your code (own_names).
Does not import torch before a program uses one of these functions: a program that only plans needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import codescent.base.messages  # a program's own settings of the logger come after ours
import codescent.base.parent  # remembers the parent process, before torch is imported
import codescent.base.stacks  # noqa: F401 - says where this rank hangs, also while torch is imported

__version__ = "0.1.0"

__all__ = [
    "Documents",
    "Metrics",
    "ModelKind",
    "Planned",
    "RatePoint",
    "RateSchedule",
    "ReportPage",
    "Run",
    "RunFailed",
    "Task",
    "UpdateRule",
    "UserError",
    "accumulate",
    "averaged",
    "clip_",
    "distribute",
    "init",
    "load",
    "plan",
    "profile",
    "sampler",
    "save",
    "train",
    "validation_sampler",
]

_NAMES = {
    "api.plan": ("Planned",),
    "api.report_page": ("ReportPage",),
    "api.run": ("Run",),
    "base.errors": ("RunFailed", "UserError"),
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

_CALLED = ("plan", "train")
"""Rooms that are functions, too: base/callable_room.py."""

if TYPE_CHECKING:
    from codescent.api.plan import Planned, plan
    from codescent.api.report_page import ReportPage
    from codescent.api.run import Run
    from codescent.api.train import train
    from codescent.base.errors import RunFailed, UserError
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

        if name in _CALLED:
            return importlib.import_module(f"{__name__}.{name}")
        module = next((module for module, names in _NAMES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return value

    def __dir__():  # noqa: ANN202
        """All names of the package, imported already or not."""
        return sorted({*globals(), *__all__})
