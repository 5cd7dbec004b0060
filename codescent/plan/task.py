"""In: nothing. Out: the noun for the task of a run: what a plan has to know of its samples.
Does not know any task: `tasks` makes these facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = int | float | bool | str | None


@dataclass(frozen=True)
class TaskFacts:
    """The task of a run, resolved.

    `extras`: layers at every depth read more of a sample than the activations of those before them, so that every
    pipeline stage loads it. `head_share` is the share of the positions that the head reads, where it is not all: what a
    batch really has differs a little. `synthetic`: samples are random numbers, to measure with. `identity`: the keys of
    [data] that decide the samples, each with its value.
    """

    name: str
    extras: bool = False
    head_share: float = 1.0
    synthetic: bool = False
    identity: Mapping[str, Scalar] = field(default_factory=dict)
