"""In: the name or the path of a TOML file. Out: what it says, and what its base files say, with the line of each key.
Does not know which keys are valid, and does not parse TOML (toml_file.py does)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.config.given import Problem, shown
from codescent.config.toml_file import read_toml
from codescent.config.unseen_file import name_of

BASE = "base"
"""The key at the top of a file that names the file below it."""


class TomlFile(NamedTuple):
    """One file.

    Attributes:
        path: of the file.
        table: its content, without `base`.
        lines: the line of each key, by its path.
        is_shipped: whether the program has it.
    """

    path: Path
    table: dict[str, Any]
    lines: Mapping[tuple[str, ...], int]
    is_shipped: bool

    def origin(self, *path: str) -> str:
        """Where a key stands: "run.toml:3", "default.toml:46 (shipped)". A key without a line: that of its table."""
        parts = (path[:end] for end in range(len(path), 0, -1))
        line = next((f":{self.lines[part]}" for part in parts if part in self.lines), "")
        at = f"{self.path.name if self.is_shipped else self.path}{line}{' (shipped)' * self.is_shipped}"
        return name_of(self.path) or at


@dataclass(frozen=True)
class NamedFiles:
    """Files that have names, such as the shipped configs. All other files are given by their paths.

    Attributes:
        named: the files by name, without ".toml".
        others: what to say where no name is near: "shipped configs are a, b".
        option: the words before a name in a message, such as "--site"; empty: none.
        are_shipped: whether the program has these files.
    """

    named: Callable[[], Mapping[str, Path]]
    others: Callable[[], str]
    option: str = ""
    are_shipped: bool = True

    def find(self, name: Path | str) -> Path:
        """The file that a path or a name means. Raises UserError, with similar names: there is none."""
        path, own = expanded(name), self.named()
        where = f"{self.option} {shown(str(name))}" if self.option else str(path)
        if not str(name).strip():
            raise UserError(f"{self.option or 'config'} {shown(str(name))}: is empty; {self.others()}")
        try:
            if path.is_file():
                return path
            if path.name == str(path) and path.suffix in ("", ".toml") and path.stem in own:
                return own[path.stem]
            if path.is_dir():
                inner = path / "config.toml"
                is_run = not self.option and inner.is_file()
                raise UserError(f"{where}: is a folder; {f'did you mean {inner}?' if is_run else 'give a TOML file'}")
            if path.exists():
                raise UserError(f"{where}: is a pipe or a device, but it is read more than once; save it as a file")
            siblings = sorted(filter(Path.is_file, path.parent.glob("*.toml"))) if path.parent.is_dir() else []
        except OSError as error:
            raise UserError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:  # a NUL in it
            raise UserError(f"{where}: no such file: {error}") from error
        near = _near(path.stem, {one.stem: str(one) for one in siblings})
        others = [one for one, file in own.items() if file not in siblings]
        near += _near(path.stem, {one: f"{one}{' (shipped)' * self.are_shipped}" for one in others})
        reason = "no such file" if path.parent.is_dir() else f"no such file: there is no folder {path.parent}"
        hint = f"did you mean {' or '.join(near)}?" if near else self.others()
        raise UserError(f"{where}: {reason}; {hint}")

    def read(self, name: Path | str, problems: list[Problem]) -> list[TomlFile]:
        """A file and those below it (`base`); the last base comes first.

        What is wrong with a file that cannot be read is added to `problems`; those above it are returned.
        """
        chain: list[TomlFile] = []
        wanted: Path | str | None = name
        origin = key = ""
        while wanted is not None:
            try:
                path = self.find(wanted)
                if path.resolve() in [one.path.resolve() for one in chain]:
                    names = [str(one.path) for one in reversed(chain)]
                    raise UserError(f"{path} is its own base: {' -> '.join([*names, str(path)])}")
                table, lines = read_toml(path)
            except UserError as error:
                problems += [Problem(origin, key, text) for text in error.problems]
                break
            base = table.pop(BASE, None)
            chain.insert(0, TomlFile(path, table, lines, path in self.named().values() and self.are_shipped))
            origin, key = chain[0].origin(BASE), BASE
            if base is not None and not (isinstance(base, str) and base.strip()):
                problems.append(Problem(origin, key, f"given {shown(base)}; must be the path of a file, in quotes"))
                base = None
            wanted = None if base is None else self._base(path, base)
        return chain

    def _base(self, file: Path, base: str) -> Path | str:
        """A base is relative to `file`. If it does not exist there, a word without a folder may be a name."""
        found, own = file.parent / base, self.named()
        is_name = Path(base).name == base and Path(base).stem in own and not found.exists()
        return base if base.startswith("~") or is_name else found


def _near(stem: str, names: Mapping[str, str]) -> list[str]:
    """What is said of the names that are like one, without regard to case, _ and -. Those that begin so come first."""
    alike, wanted = {_plain(one): said for one, said in names.items()}, _plain(stem)
    near = difflib.get_close_matches(wanted, alike, n=1 if wanted in alike else 3)
    return [alike[one] for one in sorted(near, key=lambda one: not one.startswith(wanted))]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
