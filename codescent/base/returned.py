"""In: users' code, and the base class that says what its methods return. Out: the same, whose values are checked.
Does not check values that only torch could name. Does not load the code (own_names.py does)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, TypeVar, cast
from weakref import WeakSet

from codescent.base.counted import counted
from codescent.base.errors import UserError

T = TypeVar("T")
_HEADS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a str"),
    "bool": ((bool,), "a bool"),
    "int": ((int,), "an int"),
    "float": ((int, float), "a number"),
    "list": ((list,), "a list"),
    "tuple": ((tuple,), "a tuple"),
    "dict": ((dict,), "a dict"),
    "Mapping": ((Mapping,), "a dict"),
    "Iterator": ((Iterable,), "an iterator"),
}
"""Heads of annotations: the types that fit, and what a message calls them."""
_HELP = "see codescent docs own_names"
_CHECKED = WeakSet[Callable[..., Any]]()
"""Methods whose return values are checked."""


def check_methods(made: object, base: type, what: str) -> None:
    """Replace each method that a class of the user overrides by one whose return value is checked.

    The class has these methods, not the object: a copy of the object, also one of pickle, has methods of its own.
    Methods that are no functions, and those of classes of this package, stay as they are.

    Args:
        made: the object of the user's class.
        base: the base class, or the protocol, whose annotations say what is due.
        what: what a message begins with, such as "data.task = mine:Mine".

    Raises:
        UserError: methods that cannot be called as those of the base class.
    """
    cls = type(made)
    methods = {
        name: method
        for name, method in inspect.getmembers(base, inspect.isfunction)
        if not name.startswith("_") and getattr(cls, name, None) is not method
    }
    if problems := [
        one for name, method in methods.items() for one in _arguments(f"{what}: {name}", getattr(made, name), method)
    ]:
        raise UserError(*problems)
    if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
        for name, method in methods.items():
            _check_method(cls, name, method, f"{what}: {name}")


def _check_method(cls: type, name: str, method: Callable[..., Any], what: str) -> None:
    """Replace a method of a class by one whose return value is checked, if it is none yet."""
    found = inspect.getattr_static(cls, name, None)
    is_wrapped = isinstance(found, staticmethod | classmethod)
    function = found.__func__ if is_wrapped else found
    if not inspect.isfunction(function) or (function in _CHECKED and name in vars(cls)):
        return
    function = inspect.unwrap(function, stop=lambda one: one not in _CHECKED)  # else a message names a base class
    call = checked(function, what, _parsed(inspect.get_annotations(method)["return"]), method.__globals__)
    _CHECKED.add(call)
    with suppress(TypeError, AttributeError):  # a class of C, or one that stays as it is
        setattr(cls, name, type(found)(call) if is_wrapped else call)


def check_values(made: object, protocol: type, what: str) -> None:
    """Check the attributes and properties that a protocol names. Raises UserError: all that are something else."""
    names = vars(sys.modules[protocol.__module__])
    properties = {name: one.fget for name, one in inspect.getmembers(protocol, lambda one: isinstance(one, property))}
    hints = {name: inspect.get_annotations(one)["return"] for name, one in properties.items() if one is not None}
    for cls in protocol.__mro__:
        hints |= {name: hint for name, hint in inspect.get_annotations(cls).items() if not name.startswith("_")}
    found = {name: (getattr(made, name), _parsed(hint)) for name, hint in hints.items()}
    if problems := [
        f"{what}: {name} is {_is_what(value, due, names)}; must be {_words(due, names)}: {_HELP}"
        for name, (value, due) in found.items()
        if not _fits(value, due, names)
    ]:
        raise UserError(*problems)


def check_fields(made: T, base: type, what: str) -> T:
    """A frozen dataclass of the user with functions as fields: the same with functions whose values are checked.

    Raises:
        UserError: fields that are no functions, or none of so many arguments.
    """
    changed, problems = dict[str, Any](), list[str]()
    for cls in (one for one in base.__mro__ if dataclasses.is_dataclass(one)):
        for name, hint in inspect.get_annotations(cls).items():
            if hint.startswith("Callable["):
                arguments, due = _inside(_parsed(hint))
                function, count = getattr(made, name), len(cast(ast.List, arguments).elts)
                if not _takes(function, [""] * count, []):
                    problems.append(f"{what}: {name} must be a function of {counted(count, 'argument')}: {_HELP}")
                else:
                    changed[name] = checked(function, f"{what}: {name}", due, vars(sys.modules[cls.__module__]))
    if problems:
        raise UserError(*problems)
    return dataclasses.replace(made, **changed)  # type: ignore[type-var]


def checked(function: Callable[..., Any], what: str, due: ast.expr, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that raises UserError where its return value is not what an annotation says.

    Args:
        what: what a message begins with.
        due: the annotation.
        names: the names that it uses. A name that is not among them fits every value.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        value = _plain(function(*args, **options))
        if not _fits(value, due, names):
            raise UserError(f"{what} returns {_is_what(value, due, names)}; must be {_words(due, names)}: {_HELP}")
        if _is_iterator(due):
            return _each(value, what, _inside(due)[0], names)
        if (protocol := _protocol(value, due, names)) is not None:
            check_values(value, protocol, what)
            check_methods(value, protocol, what)
        return value

    return call


def _plain(value: Any) -> Any:
    """A number of numpy as int or float, also in a tuple or a list. All else as it is."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if type(value) in (tuple, list):
        plain = [_plain(one) for one in value]
        return value if all(map(operator.is_, plain, value)) else type(value)(plain)
    return value


@functools.cache
def _parsed(hint: str) -> ast.expr:
    return ast.parse(hint, mode="eval").body


def _inside(due: ast.expr) -> list[ast.expr]:
    """What is in the brackets of an annotation; empty: it has none."""
    if not isinstance(due, ast.Subscript):
        return []
    return due.slice.elts if isinstance(due.slice, ast.Tuple) else [due.slice]


def _head(due: ast.expr) -> str:
    return ast.unparse(due.value if isinstance(due, ast.Subscript) else due)


def _is_iterator(due: ast.expr) -> bool:
    return _head(due) == "Iterator"


def _choices(due: ast.expr) -> list[ast.expr]:
    """The alternatives of an annotation: A | B."""
    if isinstance(due, ast.BinOp):
        return [*_choices(due.left), *_choices(due.right)]
    return [due]


def _fits(value: Any, due: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether a value is what an annotation says. Of an iterator the elements are not looked at."""
    choices = _choices(due)
    if len(choices) > 1:
        return any(_fits(value, one, names) for one in choices)
    head = _head(due)
    if head == "None":
        return value is None
    if _is_iterator(due):
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if head in _HEADS:
        is_kind = isinstance(value, _HEADS[head][0])
        return is_kind and all(_fits(one, of_one, names) for one, of_one in _elements(value, due))
    kind = names.get(head)
    if kind is None or head == "Any":
        return True
    if not inspect.isclass(kind):  # an alias, such as tuple[str, int]
        return _fits(value, _parsed(str(kind)), names)
    return not _lacking(value, kind) if getattr(kind, "_is_protocol", False) else isinstance(value, kind)


def _elements(value: Any, due: ast.expr) -> Iterator[tuple[Any, ast.expr]]:
    """The elements of a list, tuple or dict, each with what it must be; of a tuple of another length what cannot be."""
    inside = _inside(due)
    if not inside:
        return
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from ((key, inside[0]), (one, inside[1]))
    elif isinstance(value, tuple) and not (len(inside) > 1 and ast.unparse(inside[-1]) == "..."):
        if len(value) != len(inside):
            yield value, _parsed("None")
        yield from zip(value, inside, strict=False)
    else:
        yield from ((one, inside[0]) for one in value)


def _lacking(value: object, protocol: type) -> list[str]:
    """Members of a protocol that a value does not have. Properties are not computed, unless `__getattr__` may be."""
    members = {name for cls in protocol.__mro__ for name in (*vars(cls), *inspect.get_annotations(cls))}
    wanted = sorted(name for name in members if not name.startswith("_"))
    found = set(dir(value))
    found |= {name for name in wanted if hasattr(type(value), "__getattr__") and hasattr(value, name)}
    return [name for name in wanted if name not in found]


def _protocol(value: object, due: ast.expr, names: Mapping[str, Any]) -> type | None:
    """The protocol that an annotation names and a value has; None: it names none."""
    found = [names.get(_head(one)) for one in _choices(due)]
    protocols = [one for one in found if inspect.isclass(one) and getattr(one, "_is_protocol", False)]
    return next((one for one in protocols if value is not None), None)


def _each(values: Iterable[Any], what: str, due: ast.expr, names: Mapping[str, Any]) -> Iterator[Any]:
    """The elements of an iterator, each checked."""
    for value in values:
        if not _fits(value, due, names):
            raise UserError(f"{what} gives {_is_what(value, due, names)}; must give {_words(due, names)}: {_HELP}")
        yield value


def _is_what(value: object, due: ast.expr, names: Mapping[str, Any]) -> str:
    """What a value is, in a few words."""
    if value is None:
        return "None"
    name = type(value).__name__
    text = f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"
    if isinstance(value, str | Real | tuple | list | Mapping):
        text = f"{value!r}" if len(repr(value)) <= 60 else text
    if (protocol := _protocol(value, due, names)) is not None:
        text += f", which lacks {', '.join(_lacking(value, protocol))}"
    return text


def _words(due: ast.expr, names: Mapping[str, Any]) -> str:
    """What an annotation says, in words; of one with several types inside, as it is written."""
    choices = _choices(due)
    if len(choices) > 1:
        return " or ".join(_words(one, names) for one in choices)
    head, inside = _head(due), [one for one in _inside(due) if ast.unparse(one) != "..."]
    alias = names.get(head)
    if head not in _HEADS and alias is not None and not inspect.isclass(alias):
        return _words(_parsed(str(alias)), names)
    if head not in _HEADS or len(inside) > 1:
        return head if head == "None" else f"{'an' if head[0] in 'AEIOU' else 'a'} {ast.unparse(due)}"
    return _HEADS[head][1] + "".join(f" of {_written(one, names)}" for one in inside)


def _written(due: ast.expr, names: Mapping[str, Any]) -> str:
    """An annotation as it is written; of an alias what it stands for."""
    alias = names.get(_head(due))
    return ast.unparse(due) if alias is None or inspect.isclass(alias) else str(alias)


def _arguments(what: str, function: Callable[..., Any], method: Callable[..., Any]) -> Iterator[str]:
    """Why a function cannot be called with the arguments of a method of the base class."""
    wanted = [*inspect.signature(method).parameters.values()]
    named = [one.name for one in wanted if one.kind is inspect.Parameter.KEYWORD_ONLY]
    plain = [one.name for one in wanted if one.name not in named]
    if not _takes(function, plain[1:], named):  # without self
        shown = ", ".join([*plain, *(["*", *named] if named else [])])
        yield f"{what} has other arguments than codescent calls it with; must be {method.__name__}({shown}): {_HELP}"


def _takes(function: object, plain: Sequence[str], named: Sequence[str]) -> bool:
    """Whether something can be called with these arguments, as far as it tells."""
    try:
        signature = inspect.signature(cast(Callable[..., Any], function))
    except ValueError:  # a function of C, such as dict, without a signature
        return True
    except TypeError:  # it cannot be called at all
        return False
    try:
        signature.bind(*plain, **dict.fromkeys(named))
    except TypeError:
        return False
    return True
