"""In: what has become of the processes of a host; what is decided about them. Out: the same as messages of JSON.
Decides nothing (decider.py does) and sends nothing (hosts.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ProcessDeath:
    """A process that has ended, and that the run may survive.

    Attributes:
        slot: the number of its start.
        pid: its process.
        code: as subprocess has it.
        ending: how it has ended, in words.
        where: where it was, in words.
        step: that it had under way, from 1; None: none.
    """

    slot: int
    pid: int
    code: int
    ending: str
    where: str = ""
    step: int | None = None


@dataclass(frozen=True)
class HostPlace:
    """What a host brings to a run.

    Attributes:
        name: of the machine.
        count: ranks that it has at first.
        spares: processes that wait for a place, while all is well.
    """

    name: str
    count: int
    spares: int = 0

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class HostReport:
    """What a host says of its processes.

    Attributes:
        deaths: of all processes that have died so far.
        ready: slots of those that wait for a place and can take one.
        ends: whether its ranks end, by themselves or on request. From then on no loss is survived.
        step: that its ranks have under way, from 1; None: none.
        progressed: whether they have done a step since they met.
        number: of the call that they follow.
        failed: why the run ends, if a rank has an error of its own; "": none has.
        code: the exit code that follows from `failed`.
    """

    deaths: tuple[ProcessDeath, ...] = ()
    ready: tuple[int, ...] = ()
    ends: bool = False
    step: int | None = None
    progressed: bool = False
    number: int = 0
    failed: str = ""
    code: int = 0

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self)

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> HostReport:
        """From `to_json`. Raises TypeError, LookupError: it is another object."""
        deaths = tuple(ProcessDeath(**one) for one in read["deaths"])
        return cls(**{**read, "deaths": deaths, "ready": tuple(read["ready"])})


@dataclass(frozen=True)
class Orders:
    """What a host does now.

    Attributes:
        number: of the last call; 0: the ranks take part as they were started.
        ranks: the slot of each rank, of all hosts.
        values: keys of the config that the call changes.
        notes: what a user should know of it.
        urgent: the number of the last call that was made because ranks had died.
        slots: the processes that this host has to have.
        over: why the run ends, in words; "": it goes on, or has ended well.
        code: the exit code that follows from `over`.
        ends: whether ranks end, on any host.
        done: the ranks of host 0 have ended, and all is well.
        kills: with `over`: the ranks of this host end at once, as others may go on without them.
    """

    number: int = 0
    ranks: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    urgent: int = 0
    slots: tuple[int, ...] = ()
    over: str = ""
    code: int = 0
    ends: bool = False
    done: bool = False
    kills: bool = False

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON. Its parts are not copied: there are many ranks, and many hosts that ask."""
        return {**vars(self)}

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> Orders:
        """From `to_json`. Raises TypeError, LookupError: it is another object."""
        return cls(**{**read, **{name: tuple(read[name]) for name in ("ranks", "notes", "slots")}})
