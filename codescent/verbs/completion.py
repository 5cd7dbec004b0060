"""In: a command line that is not finished, from a shell. Out: the words that could come next, for argcomplete to print.
Does not register anything in a shell (argcomplete does), and imports neither torch nor numpy: the shell waits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

RUN_FOLDERS = ("run", "runs", "others", "replay", "profile")
"""Destinations of arguments that are folders."""

Words = Callable[..., Iterable[str]]


def complete() -> None:
    """Answer the shell, and end the process. Without argcomplete there is no answer."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)
    argcomplete.autocomplete(parser_with_words(), always_complete_options="long")


def parser_with_words() -> argparse.ArgumentParser:
    """The parser; its arguments know which words they can be."""
    from codescent.base.pages import pages
    from codescent.verbs.argument_words import TARGETS
    from codescent.verbs.arguments import make_parser

    top, parsers = make_parser()
    words: dict[str, Words] = {
        "overrides": overrides,
        "to": lambda **_: TARGETS,
        "cluster": _clusters,
        "page": lambda **_: pages(),
    }
    words |= dict.fromkeys(("config",), _configs) | dict.fromkeys(RUN_FOLDERS, _folders)
    for parser in parsers.values():
        for action in parser._actions:
            if action.dest in words:
                vars(action)["completer"] = words[action.dest]
    return top


def _configs(prefix: str, **_: Any) -> list[str]:
    """Shipped configs and TOML files; values of keys, too, because an override may come first."""
    from argcomplete.completers import FilesCompleter

    from codescent.config.load import shipped

    files: list[str] = FilesCompleter(("toml",))(prefix)
    return [*shipped(), *files, *(overrides(prefix) if "." in prefix else ())]


def _folders(prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import DirectoriesCompleter

    found: list[str] = list(DirectoriesCompleter()(prefix))
    return found


def _clusters(**_: Any) -> list[str]:
    from codescent.clusters.read import shipped_clusters

    return list(shipped_clusters())


def overrides(prefix: str, **_: Any) -> list[str]:
    """Each key as "section.key="; behind the "=" the words that the key can be, as the JSON Schema has them."""
    from codescent.config.words import KEYS

    name, equals, _value = prefix.partition("=")
    if not equals:
        return [f"{key}=" for key in KEYS]
    if name not in KEYS:
        return []
    from codescent.config.schema import key_schema

    return [f"{name}={word}" for word in _choices(key_schema(name))]


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """The words that a schema allows: of an enumeration, "auto", or true and false."""
    if schema.get("type") == "boolean":
        return ["true", "false"]
    words = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return [*map(str, words), *(word for one in schema.get("anyOf", ()) for word in _choices(one))]
