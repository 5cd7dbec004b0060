"""In: a candidate, a config. Out: the same, which note the searched keys that are read of them.
Does not ask a rule (rules.py does). So a rule's answer is known for all that differ in other keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from codescent.config.sections import Config
from codescent.plan import AXES, Layout, Mesh, Work
from codescent.planner.search.space import DEGREES, MICROBATCH, OPTIONS, LayoutFrame, Options, Space, fields_of
from codescent.strategies import Candidate

MICROBATCHES = "micro-batches"
"""Stands for `Work.num_microbatches` among the keys of a frame."""
READ = {key.partition(".")[2]: key for key in (*DEGREES, *OPTIONS, MICROBATCH)} | {"num_microbatches": MICROBATCHES}
"""The keys by the attributes that have their values."""

Reads = dict[str, Any]
"""Searched keys that were read, with their values."""


class _NotesReads:
    """A dataclass whose reads are noted in `reads`."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in READ:
            super().__getattribute__("__dict__")["reads"][READ[name]] = value
        return value


class _Mesh(_NotesReads, Mesh):
    @property
    def world_size(self) -> int:
        """All meshes of a space have as many ranks. So what reads it alone depends on no degree."""
        return math.prod(vars(self)[axis] for axis in AXES)


class _Work(_NotesReads, Work):
    pass


class _Layout(_NotesReads, Layout):
    pass


class _Candidate(_NotesReads, Candidate):
    pass


class _Section:
    """A section of a config with other values, whose reads are noted."""

    def __init__(self, section: object, values: Mapping[str, Any], reads: Reads) -> None:
        self.section, self.values, self.reads = section, values, reads

    def __getattr__(self, name: str) -> Any:
        value = self.values[name] if name in self.values else getattr(self.section, name)
        if name in READ:
            self.reads[READ[name]] = value
        return value


def _noting(value: object, kind: type, reads: Reads, values: Mapping[str, Any]) -> Any:
    found: Any = object.__new__(kind)
    found.__dict__.update(vars(value), **values, reads=reads)
    return found


def noting(space: Space, frame: LayoutFrame, options: Options, reads: Reads) -> tuple[Config, Candidate]:
    """The config of a layout, and its candidate. What is read of them is noted in `reads`."""
    base, layout = space.candidate, fields_of(options)
    sections = {name: getattr(space.config, name) for name in Config.model_fields}
    sections["parallel"] = _Section(space.config.parallel, layout | vars(frame.mesh), reads)
    sections["train"] = _Section(space.config.train, {"microbatch_size": frame.microbatch_size}, reads)
    sizes = {"microbatch_size": frame.microbatch_size, "num_microbatches": frame.microbatches}
    values = {
        "mesh": _noting(frame.mesh, _Mesh, reads, {}),
        "work": _noting(base.work, _Work, reads, sizes),
        "layout": _noting(base.layout, _Layout, reads, layout),
        "microbatch_size": frame.microbatch_size,
        "update": space.update(frame.mesh),
    }
    return cast(Config, SimpleNamespace(**sections)), cast(Candidate, _noting(base, _Candidate, reads, values))
