"""In: a config of which a topic has nothing to show. Out: words of a command line with which it has something.
Gives only words that were tried: their config has a plan, and the topic shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.config.load import with_values
from codescent.config.sections import Config
from codescent.config.words import toml_value
from codescent.explain.topic import Topic, planned
from codescent.plan import AXES, Scalar

RANKS = "parallel.ranks"


def words_that_show(topic: Topic, config: Config) -> str:
    """Such as "--ranks 2 parallel.tp=2"; "": none of what was tried is admitted."""
    for values in _tried(topic, config):
        try:
            _, plan = planned(with_values(config, values))
        except (UserError, ValidationError):
            continue
        if topic.shows(plan):
            return " ".join(_word(key, value) for key, value in values.items())
    return ""


def _tried(topic: Topic, config: Config) -> Iterator[Mapping[str, Scalar]]:
    """The values of the topic, then the same without the other axes that the config divides."""
    divided = [f"parallel.{axis}" for axis in AXES if getattr(config.parallel, axis) not in (None, 1)]
    for values in topic.gives:
        yield values
        if others := {key: 1 for key in divided if key not in values}:
            yield {**values, **others}


def _word(key: str, value: Scalar) -> str:
    return f"--ranks {value}" if key == RANKS else f"{key}={toml_value(value)}"
