"""In: names of parts of a step, collectives. Out: ranges in a profile, while one is recorded; the page of the rank has
the last collective. Does not start a profiler (train/profile.py does) and reads no trace (trace/ does)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar

import torch.distributed as dist
from torch.profiler import record_function

from codescent.base.progress import OwnPage
from codescent.base.range_names import collective_name

_NOTHING = nullcontext()


class Recording:
    """What this process records now.

    Attributes:
        on: whether a profiler records.
        sees_flights: whether it also records when collectives end that nobody waits for. On CUDA their kernels tell it.
        axes: the mesh axis of each process group, by its name in torch.
        flights: name, begin and end (time.time_ns) of the collectives that have ended, since `on`.
    """

    on: ClassVar[bool] = False
    sees_flights: ClassVar[bool] = False
    axes: ClassVar[Mapping[str, str]] = {}
    flights: ClassVar[list[tuple[str, int, int]]] = []


def named(name: object) -> AbstractContextManager[Any]:
    """A range of the profile with the name `str(name)`."""
    return record_function(str(name)) if Recording.on else _NOTHING


def named_collective(kind: str, group: dist.ProcessGroup | None, memory: object = None) -> AbstractContextManager[Any]:
    """A range of a collective that returns when it is done. `kind`: as in the Plan's traffic. `memory`: its buffer."""
    begins(kind, group, memory)
    return record_function(_name(kind, group)) if Recording.on else _NOTHING


class Flight:
    """A collective that runs beside computations. It begins here."""

    def __init__(self, kind: str, group: dist.ProcessGroup | None, memory: object = None) -> None:
        begins(kind, group, memory)
        self.name = _name(kind, group) if Recording.on and Recording.sees_flights else ""
        self.begin_ns = time.time_ns() if self.name else 0
        self.tells = False

    def ends_with(self, work: Any) -> None:
        """The flight ends when the work is done, whether or not anybody waits for it. If its backend does not tell
        (gloo does not for messages and reduce-scatters), it ends with `waited`."""
        if self.name:
            with suppress(RuntimeError):
                work.get_future().add_done_callback(lambda _: self.end())
                self.tells = True

    def waited(self) -> None:
        """Somebody has waited until the work was done."""
        if not self.tells:
            self.end()

    def end(self) -> None:
        """The flight has ended."""
        if self.name:
            Recording.flights.append((self.name, self.begin_ns, time.time_ns()))
            self.name = ""


def know_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """From now on this rank belongs to these process groups. Write them on its page, so that others know who waits."""
    page = OwnPage.current
    if page is not None:
        page.leave_groups()
        for group in groups:
            if id(group) not in page.rows:
                _know(group, page)


def _know(group: dist.ProcessGroup, page: OwnPage) -> int:
    """Write a group on this rank's page. Returns its row."""
    everyone = "all ranks" if group is dist.group.WORLD else group.group_name
    axis = Recording.axes.get(group.group_name, everyone)
    row = page.rows[id(group)] = page.join(axis, dist.get_process_group_ranks(group))
    return row


def begins(kind: str, group: dist.ProcessGroup | None = None, memory: object = None) -> None:
    """Write on this rank's page that a collective begins. None: one of all ranks."""
    page = OwnPage.current
    if page is not None:
        group = group or dist.group.WORLD
        assert group is not None
        row = page.rows.get(id(group))
        page.collective(_know(group, page) if row is None else row, kind.encode(), getattr(memory, "nbytes", 0))


def _name(kind: str, group: dist.ProcessGroup | None) -> str:
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return collective_name(kind, Recording.axes.get(name, name))
