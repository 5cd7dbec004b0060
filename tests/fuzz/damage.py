"""In: a file, a random generator. Out: the file damaged in one way, and a sentence that says how.
Does not know what the file is for; by its name it is JSON, TOML, CSV, a template, packed, or bytes."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 7, 2**31, 2**63, 10**18, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "../" * 40, "/dev/zero", "\ud800", "\0", "é\u202e", "10", "{{ 7 }}", [], {}, [[]], {"": ""}),
)
"""What takes the place of a value of a JSON file or a config."""

TEMPLATES = (
    "{% for a in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{% set x = namespace(s='ab') %}{% for a in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
    "{% set x = namespace(a=[]) %}{% for a in range(45) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a == [x.a] }}",
    "{% set x = namespace(a=[]) %}{% for a in range(45) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a | tojson }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ 10**10**8 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% include '/etc/passwd' %}",
    "{{ undefined.name }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ '\\ud800' }}",
    "",
)


def damage(path: Path, rng: random.Random) -> str:
    """Damage the file. Returns what was done."""
    ways: list[Callable[[bytes, random.Random], tuple[bytes, str]]] = [_bytes]
    if path.suffix in (".json", ".jsonl"):
        ways += [_json, _json, _json]
    elif path.suffix == ".toml":
        ways += [_toml, _toml, _toml]
    elif path.suffix == ".csv":
        ways += [_csv, _csv]
    elif path.suffix == ".gz":
        ways += [_gz, _gz, _gz]
    elif path.suffix == ".jinja":
        ways += [_template, _template]
    before = path.read_bytes()
    after, how = rng.choice(ways)(before, rng)
    path.write_bytes(after)
    return f"{path.name}: {how}"


def _bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """As disks, copies and people do."""
    place = rng.randrange(len(data) + 1)
    end = min(len(data), place + rng.choice([1, 2, 16, 512]))
    some = rng.randbytes(max(1, end - place))
    ways = {
        "a bit flipped": data[:place] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[place : place + 1]),
        "zeros": data[:place] + bytes(end - place),
        "other bytes": data[:place] + some,
        "bytes removed": data[:place],
        "bytes put in": data[:place] + some + data[place:end],
        "bytes twice": data[:end] + data[place:end],
    }
    how = rng.choice([*ways, "cut", "empty"])
    if how in ways:
        rest = data[place + 1 :] if how == "a bit flipped" else data[end:]
        return ways[how] + rest, f"{how} at {place}"
    return (data[:place], f"cut at {place}") if how == "cut" else (b"", "empty")


def _json(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """One value replaced, removed or nested; of JSON lines one line."""
    lines = data.splitlines()
    try:
        number, value = -1, json.loads(data)
    except ValueError:
        number = rng.randrange(max(1, len(lines)))
        try:
            value = json.loads(lines[number])
        except (ValueError, IndexError):
            return _bytes(data, rng)
    holder = {"": value}
    at, key = rng.choice(list(_places(holder)))
    how = rng.choice(["replaced", "replaced", "replaced", "removed", "nested", "deep"])
    where = f"{key!r} {how}"
    if how == "removed" and at is not holder:
        del at[key]
    elif how == "nested":
        at[key] = [at[key]]
    elif how == "deep":
        at[key] = "DEEP"
    else:
        at[key] = rng.choice(VALUES)
        where += f" by {str(at[key])[:30]!r}"
    text = json.dumps(holder[""], ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    text = text.replace(b'"DEEP"', DEEP.encode())
    if number < 0:
        return text, where
    return b"\n".join([*lines[:number], text, *lines[number + 1 :]]) + b"\n", f"line {number + 1}: {where}"


def _csv(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """One cell replaced, one line twice, or one removed."""
    lines = data.split(b"\n")
    number = rng.randrange(len(lines))
    how = rng.choice(["replaced", "replaced", "replaced", "twice", "removed"])
    if how == "replaced":
        cells = lines[number].split(b",")
        value = str(rng.choice(VALUES)).encode("utf-8", "surrogatepass")
        cells[rng.randrange(len(cells))] = value
        lines[number] = b",".join(cells)
        how += f" by {value[:30]!r}"
    else:
        lines[number : number + 1] = [lines[number]] * (2 if how == "twice" else 0)
    return b"\n".join(lines), f"line {number + 1}: a cell {how}"


def _gz(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """What is packed: bytes damaged, or one line replaced, of which a value is replaced where it is JSON."""
    text = gzip.decompress(data)
    if rng.random() < 0.3:
        after, how = _bytes(text, rng)
        return gzip.compress(after), how
    lines = text.splitlines(keepends=True)
    number = rng.randrange(min(30, len(lines))) if rng.random() < 0.3 else rng.randrange(len(lines))
    comma = b"," if lines[number].rstrip().endswith(b",") else b""
    after, how = _json(lines[number].rstrip().removesuffix(b","), rng)
    lines[number] = after.rstrip() + comma + b"\n"
    return gzip.compress(b"".join(lines)), f"line {number + 1}: {how}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(list or dict, index or key) of every value inside this one; at most some of a long list."""
    found: list[tuple[Any, Any]] = []
    entries = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, entry in entries[:40]:
        found.append((value, key))
        if isinstance(entry, (dict, list)):
            found += _places(entry)
    return found


def _toml(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """One value replaced, or one line twice or in another section."""
    lines = data.decode("utf-8", "replace").splitlines()
    keys = [number for number, line in enumerate(lines) if "=" in line]
    if not keys:
        return _bytes(data, rng)
    number = rng.choice(keys)
    name = lines[number].partition("=")[0].strip()
    how = rng.choice(["replaced", "replaced", "replaced", "twice", "moved"])
    if how == "replaced":
        value = rng.choice(VALUES)
        lines[number] = f"{name} = {_toml_text(value)}"
        how += f" by {str(value)[:30]!r}"
    elif how == "twice":
        lines.insert(number, lines[number])
    else:
        lines.insert(rng.randrange(len(lines)), lines.pop(number))
    return "\n".join(lines).encode("utf-8", "surrogatepass"), f"{name} {how}"


def _toml_text(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii="\0" in value or "\ud800" in value)
    return "''" if value is None else json.dumps(value)


def _template(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A part of the template replaced by one that asks for too much, or that is wrong."""
    parts = re.split(r"(\{[{%].*?[%}]\})", data.decode("utf-8", "replace"), flags=re.DOTALL)
    number, new = rng.randrange(len(parts)), rng.choice(TEMPLATES)
    parts[number] = new
    return "".join(parts).encode(), f"part {number} replaced by {new[:50]!r}"
