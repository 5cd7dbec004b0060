"""In: the value of data.mixture, or an override of one of its entries. Out: the entries; everything that is wrong.
Does not look at corpora (tasks and data do) and does not read files."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, WithJsonSchema

from codescent.base.hub_name import is_hub_name, parse_dataset
from codescent.config.keys import Corpus, Text

if TYPE_CHECKING:
    from codescent.config.sections import Config

MIXTURE = "data.mixture"
MOST_NAME = 40
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MOST_NAME - 1}}}")
"""Names of corpora are parts of the names of columns, and of keys."""
MOST_WEIGHT = 1e9
WEIGHT = f"must be a number above 0, at most {MOST_WEIGHT:,.0f}"


class MixtureEntry(BaseModel):
    """One corpus of a mixture.

    Attributes:
        corpus: see data.corpus.
        name: of its columns and messages.
        weight: its share of the samples, relative to the sum of all weights; None: by its size.
        validation: what it is validated on; None: its end, see data.validation_fraction.
        text_key: see data.text_key; None: that one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    corpus: Corpus
    name: str
    weight: float | None = None
    validation: Corpus | None = None
    text_key: Text | None = None

    def values(self) -> dict[str, Any]:
        """The keys of [data] that it gives, with their values."""
        given = {"corpus": self.corpus, "validation": self.validation, "text_key": self.text_key}
        return {key: value for key, value in given.items() if value is not None}


FIELDS = tuple(MixtureEntry.model_fields)
TEXTS = ("corpus", "name", "validation", "text_key")
FORM = 'must be tables such as {corpus = "wiki.txt", weight = 3.0}: several [[data.mixture]] in a file'


def default_name(corpus: str) -> str:
    """The name of a corpus that is given none: the last part of its path with letters, or the repository of a hub."""
    try:
        last = parse_dataset(corpus).repo if is_hub_name(corpus) else corpus
    except ValueError:  # it is refused elsewhere
        last = corpus
    stems = (part.partition(".")[0] for part in reversed(PurePath(last).parts))
    names = (re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:MOST_NAME] for stem in stems)
    return next(filter(None, names), "corpus")


def _entries(value: object) -> object:
    """The entries of a mixture. Raises ValueError: everything that is wrong with them, as one text."""
    if isinstance(value, tuple) and all(isinstance(entry, MixtureEntry) for entry in value):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(FORM)
    problems: list[str] = [] if len(value) > 1 else ["needs two corpora or more; for one give data.corpus"]
    found = [_entry(number, entry, problems) for number, entry in enumerate(value, start=1)]
    problems += _twice(found)
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(MixtureEntry(**entry) for entry in found)


def _entry(number: int, given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The values of an entry, with its name. Adds what is wrong to `problems`."""
    where = f"corpus {number}"
    problems += [f"{where}: unknown key {key}{_near(key, FIELDS)}" for key in given if key not in FIELDS]
    values = {key: value for key, value in given.items() if key in FIELDS and value != "auto"}
    if "corpus" not in values:
        problems.append(f"{where}: has no corpus")
    for key in TEXTS:
        if key in values and (problem := _text_problem(key, values[key])):
            problems.append(f"{where}: {key} {problem}")
            values.pop(key)
    if isinstance(values.get("name"), str) and not NAME.fullmatch(values["name"]):
        problems.append(
            f"{where}: name = {values['name']!r} is part of the names of columns: write letters, digits, - and _, at "
            f"most {MOST_NAME}"
        )
    if "weight" in values and not _is_weight(values["weight"]):
        problems.append(f"{where}: weight = {values['weight']!r}: {WEIGHT}; leave out a corpus that shall not be read")
        values.pop("weight")
    elif "weight" in values:
        values["weight"] = float(values["weight"])
    return {"name": default_name(str(values.get("corpus", ""))), **values}


def _is_weight(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(float(str(value))) and 0 < float(str(value)) <= MOST_WEIGHT


def _text_problem(key: str, value: object) -> str:
    """What is wrong with a text of an entry; "": nothing."""
    if not isinstance(value, str):
        return "must be a string"
    try:
        TypeAdapter(Corpus if key in ("corpus", "validation") else Text).validate_python(value)
    except ValidationError as error:
        return "; ".join(str(one.get("ctx", {}).get("error", one["msg"])) for one in error.errors())
    return ""


def _twice(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Corpora and names that are given twice; weights that only some entries have."""
    corpora = [entry["corpus"] for entry in entries if "corpus" in entry]
    places = [Path(corpus).resolve() for corpus in corpora]
    twice = {place: corpus for place, corpus in zip(places, corpora, strict=True) if places.count(place) > 1}
    yield from (f"{corpus} is there twice: give it once, with the sum of the weights" for corpus in twice.values())
    names = [entry["name"] for entry in entries if Path(entry.get("corpus", "")).resolve() not in twice]
    for name in dict.fromkeys(one for one in names if names.count(one) > 1):
        yield f"{names.count(name)} corpora have the name {name}: give each another name"
    without = [entry["name"] for entry in entries if "weight" not in entry]
    if without and len(without) < len(entries):
        yield f"{', '.join(without)} has no weight, and others have: give every corpus a weight, or none"


def _near(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else f"; its keys are {', '.join(words)}"


SCHEMA = {
    "type": "array",
    "minItems": 2,
    "items": {
        "type": "object",
        "required": ["corpus"],
        "additionalProperties": False,
        "properties": {
            "corpus": {"type": "string", "description": "see data.corpus"},
            "name": {"type": "string", "pattern": f"^{NAME.pattern}$", "description": "of its columns and messages"},
            "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_WEIGHT},
            "validation": {"type": "string", "description": "see data.validation"},
            "text_key": {"type": "string", "description": "see data.text_key"},
        },
    },
}
Mixture = Annotated[tuple[MixtureEntry, ...], BeforeValidator(_entries), WithJsonSchema(SCHEMA)]
"""Two corpora or more, with different names; all have weights, or none has."""


class Place(NamedTuple):
    """A value of an entry, as a key names it: data.mixture.NAME.FIELD."""

    name: str
    field: str


def place_of(key: str) -> Place | None:
    """The place that a key such as data.mixture.wiki.weight names; None: it is another key."""
    rest = key.removeprefix(f"{MIXTURE}.")
    name, dot, field = rest.rpartition(".")
    return Place(name, field) if rest != key and dot else None


def place_problem(place: Place, value: object) -> str:
    """What is wrong with a value of a place; "": nothing that is known without the mixture."""
    if place.field not in FIELDS:
        return f"unknown key of a corpus{_near(place.field, FIELDS)}"
    if place.field == "weight":
        return "" if _is_weight(value) else f"given {value!r}; {WEIGHT}"
    problem = _text_problem(place.field, value)
    return f"given {value!r}; {problem}" if problem else ""


def with_place(value: object, place: Place, new: object) -> list[Any]:
    """The value of data.mixture with another value at a place. Raises ValueError: there is no such place."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"there is no {MIXTURE} that it could change")
    names = [entry.get("name") or default_name(str(entry.get("corpus", ""))) for entry in value]
    if place.name not in names:
        raise ValueError(f"no corpus has this name; there are {', '.join(map(str, names))}")
    if problem := place_problem(place, new):
        raise ValueError(problem)
    keeps = {"name": place.name} if place.field == "corpus" else {}
    return [
        {**entry, **keeps, place.field: new} if name == place.name else entry
        for name, entry in zip(names, value, strict=True)
    ]


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config by "section.key", as JSON data; those of a corpus of a mixture by data.mixture.NAME.KEY.

    data.mixture itself has the names. Values that are no mixture stay.
    """
    corpora = values.get(MIXTURE)
    if not isinstance(corpora, list) or not all(isinstance(one, dict) and "name" in one for one in corpora):
        return dict(values)
    each = {f"{MIXTURE}.{one['name']}.{key}": value for one in corpora for key, value in one.items() if key != "name"}
    return {**values, MIXTURE: ", ".join(str(one["name"]) for one in corpora), **each}


def mixture_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """See `contradictions.contradictions`: keys that a mixture excludes."""
    data = config.data
    if data.mixture is None:
        return
    if data.validation is not None:
        yield (
            ("data.validation", MIXTURE),
            "given, and data.mixture too, whose corpora are validated one by one: give the entries of data.mixture "
            "their own validation",
        )
    if data.mixture_temperature is not None and data.mixture[0].weight is not None:
        yield (
            ("data.mixture_temperature", MIXTURE),
            "given, but the corpora have weights: a temperature makes weights of their sizes; leave one of the two out",
        )
