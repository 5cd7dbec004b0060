"""In: the text of a chat template. Out: the template, compiled in a sandbox, and the text that it renders.
This module implements the functions that templates may call in `transformers`; it does not import `transformers`.
Does not read files (chat_files.py does) and does not choose the template's variables (chat_template.py does)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from codescent.base.errors import UserError
from codescent.tasks.conversations.chat_files import ChatFiles

TAGS = "{% generation %} … {% endgeneration %}"
MARKED = "codescent_marks"  # a template variable; if it is set, BEGIN and END are put around the text in TAGS
BEGIN, END = "\ufdd0", "\ufdd1"  # the marks: code points that are never characters in Unicode
NOW = "strftime_now"
MOST_WRITTEN = 1 << 26


def compiled(files: ChatFiles) -> tuple[Template, set[str], date | None]:
    """Compile a template. Returns it, the names of its variables, and its date (`ChatFiles.day`; None: not read).

    The template's time is midnight, so that all texts of one day are equal. Raises UserError: it is not Jinja.
    """
    where = f"data.chat_template: {files.name}"
    day = date.today() if files.day is None else date.fromisoformat(files.day)
    environment = _environment(datetime.combine(day, time()).strftime)
    try:
        parsed = environment.parse(files.text)
        variables = meta.find_undeclared_variables(parsed)
        is_dated = any(node.name == NOW for node in parsed.find_all(nodes.Name))
        return environment.from_string(files.text), variables, day if is_dated else None
    except TemplateSyntaxError as error:
        raise UserError(f"{where}: line {error.lineno} of the template: {error.message}") from error
    except MemoryError as error:
        raise UserError(f"{where}: asks for too much memory") from error
    except Exception as error:  # Jinja evaluates constants, and its code may be nested too deeply for Python
        raise UserError(f"{where}: cannot be compiled: {type(error).__name__}: {error}") from error


def rendered(template: Template, name: str, variables: dict[str, Any]) -> str:
    """The text that a template renders. Raises UserError: the template raises an error, or the text is too long."""
    pieces, length = [], 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_WRITTEN:
                raise UserError(f"{name}: writes more than {MOST_WRITTEN:,} characters of one conversation")
    except UserError:
        raise
    except TemplateError as error:
        raise UserError(f"{name}: {error.message}") from error
    except MemoryError as error:
        raise UserError(f"{name}: asks for too much memory for one conversation") from error
    except Exception as error:  # whatever an expression of the template raises
        raise UserError(f"{name}: {type(error).__name__}: {error}") from error
    return "".join(pieces)


class _Generation(Extension):
    """The tag by which a template marks what the assistant says, as in `transformers`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's text, between BEGIN and END if MARKED is set."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_around", [nodes.Name(MARKED, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _around(self, marked: Any, caller: Macro) -> str:
        text: str = caller()
        return f"{BEGIN}{text}{END}" if marked else text


class _Dict:
    """The `dict` of a template. It has no methods of Python's type, which could change the caller's objects."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Like dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The `namespace` of a template. It rejects names that begin with an underscore, which Python may use."""

    def __init__(*args: Any, **fields: Any) -> None:  # a field may be called self
        self, *rest = args
        attributes = dict(*rest, **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a field of a namespace may not begin with an underscore: {name!r}")


def _environment(strftime_now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """Jinja as in `transformers`, in a sandbox: a template can only read its variables and write text."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # Jinja's own is for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    named = {"raise_exception": raise_exception, NOW: strftime_now, "dict": _Dict(), "namespace": _Namespace}
    environment.globals.update(named)
    return environment
