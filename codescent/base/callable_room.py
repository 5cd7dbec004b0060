"""In: a room whose name is also a verb, such as `codescent.train`. Out: the room, which can be called as a function.
Does not contain the function (the file of the same name in api/ does) and imports it at the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """The module of a room that can be called: `codescent.train(...)` calls `train` of codescent/api/train.py.

    Python makes each imported submodule an attribute of its package. So a function would lose the name to the room
    (decision 34).
    """

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the function of the room's name."""
        return self._function()(*args, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        """What notebooks show of its arguments."""
        return inspect.signature(self._function())

    def getdoc(self) -> str:
        """What notebooks show for `codescent.train?`: IPython asks for a method of this name."""
        return inspect.getdoc(self._function()) or ""

    def _function(self) -> Callable[..., Any]:
        package, _, name = self.__name__.partition(".")
        function: Callable[..., Any] = getattr(import_module(f"{package}.api.{name}"), name)
        return function
