"""In: the trace of one rank, as torch wrote it; the clock of rank 0. Out: the rank's file in a run's profile folder, on
that clock; from the files of all ranks one file. Reads both back.
Does not measure clocks (meeting/clocks.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from codescent.base.errors import UserError
from codescent.trace.chrome import ChromeTrace, Event, line_of, lines_of, write

FOLDER = "profile"
MERGED = "merged.json.gz"
FORMAT = 1
"""Format number of what is in the head of our files."""
FLIGHT = "flight"
"""Category of a collective that ran beside computations."""
_HEAD = "codescent"
_MOST_IDS = 2**34
"""The numbers of one rank's processes and arrows in a merged file lie in an interval of this length."""


@dataclass(frozen=True)
class RankHead:
    """What the file of a rank says about itself.

    Attributes:
        rank: of the run.
        world_size: number of ranks.
        window: number of the window, from 1.
        steps: the first and the last recorded step, numbered as in metrics.csv.
        offset_s: what was added to this rank's clock; after that it shows the time of rank 0.
        error_s: largest error of `offset_s`.
        device: "cpu" or the kind of GPU, such as "cuda".
        torch: version.
        axes: mesh axis of each process group, by torch's name.
        complete: False: the run ended within the window.
    """

    rank: int
    world_size: int
    window: int
    steps: tuple[int, int]
    offset_s: float
    error_s: float
    device: str
    torch: str
    axes: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True


def folder_of(run: Path, window: int) -> Path:
    """The folder of a window's files: the first one is `profile`, the second `profile/window_2`."""
    return run / FOLDER if window == 1 else run / FOLDER / f"window_{window}"


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank_{rank:05d}.json.gz"


def write_rank(
    path: Path,
    raw: Path,
    head: RankHead,
    flights: Iterable[tuple[str, int, int]],
    origin_ns: int,
    look: Callable[[Event], object] = lambda event: None,
) -> None:
    """Write the file of a rank.

    Args:
        path: of the file.
        raw: as torch has written it.
        head: of the file.
        flights: name, begin and end (nanoseconds since 1970, on this rank's clock) of collectives.
        origin_ns: where the times of the file begin, on the clock of rank 0.
        look: is called with each event of the raw trace, as it stands in the file.

    Raises:
        UserError: the raw trace is damaged.
        OSError: the file cannot be written.
    """
    trace = ChromeTrace(raw)
    kept: dict[str, object] = {
        name: trace.head[name] for name in ("deviceProperties", "distributedInfo") if name in trace.head
    }
    values = {"displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns, _HEAD: {"format": FORMAT, **asdict(head)}}
    shift_ns = int(trace.head.get("baseTimeNanoseconds", 0)) - origin_ns + round(head.offset_s * 1e9)
    flown = _flights(flights, head, round(head.offset_s * 1e9) - origin_ns)
    write(path, {**kept, **values}, map(line_of, chain(_on_one_clock(trace, head.rank, shift_ns, look), flown)))


def _on_one_clock(trace: ChromeTrace, rank: int, shift_ns: int, look: Callable[[Event], object]) -> Iterator[Event]:
    """The events of a rank, on the clock of rank 0, with numbers that no other rank has."""
    numbers: dict[str, int] = {}
    for event in trace.events():
        if "pid" in event:
            process = str(event["pid"])
            number = numbers.setdefault(process, rank * 1000 + len(numbers))
            event["pid"] = number
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', process)}"}
            elif event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": number}
        if "id" in event and isinstance(event["id"], int):
            event["id"] += rank * _MOST_IDS
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift_ns / 1e3, 3)
        look(event)
        yield event


def _flights(flights: Iterable[tuple[str, int, int]], head: RankHead, shift_ns: int) -> Iterator[Event]:
    """An event for each begin and for each end: flights may overlap, which spans of one thread must not."""
    process = head.rank * 1000 + 999
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"rank {head.rank}: collectives"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for number, (name, begin_ns, end_ns) in enumerate(flights):
        same = {"cat": FLIGHT, "name": name, "id": head.rank * _MOST_IDS + number, "pid": process, "tid": 0}
        yield {"ph": "b", **same, "ts": (begin_ns + shift_ns) / 1e3}
        yield {"ph": "e", **same, "ts": (end_ns + shift_ns) / 1e3}


class RankTrace:
    """The file of a rank, open for reading.

    Raises:
        UserError: it cannot be read, is damaged, or another program or version wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.trace = ChromeTrace(path)
        found = self.trace.head.get(_HEAD)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            what = "no trace of a codescent run" if not isinstance(found, dict) else "written by another codescent"
            raise UserError(f"{path}: {what}: record the profile again")
        try:
            first, last = map(int, found["steps"])
            values = {name: value for name, value in found.items() if name != "format"}
            self.head = RankHead(**{**values, "steps": (first, last)})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged: {error}") from error

    def events(self) -> Iterator[Event]:
        """All events. Raises UserError: the file is damaged."""
        return self.trace.events()


def merge(paths: Sequence[Path], path: Path) -> None:
    """Write the files of all ranks as one file. They are on one clock already.

    Raises:
        UserError: a file is not there, is damaged, or belongs to another recording.
        OSError: the file cannot be written.
    """
    traces = [RankTrace(one) for one in paths]
    first = traces[0]
    alike = ("window", "steps", "world_size")
    problems = [
        f"{other.trace.path}: of another recording than {first.trace.path}: its {name} is {getattr(other.head, name)}, "
        f"not {getattr(first.head, name)}"
        for other in traces
        for name in alike
        if getattr(other.head, name) != getattr(first.head, name)
    ]
    if problems:
        raise UserError(*problems)
    clocks = [{"rank": one.head.rank, "offset_s": one.head.offset_s, "error_s": one.head.error_s} for one in traces]
    about = {"format": FORMAT, **{name: getattr(first.head, name) for name in alike}, "clocks": clocks}
    base = first.trace.head["baseTimeNanoseconds"]
    head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, _HEAD: about}
    write(path, head, (line for one in traces for line in lines_of(one.trace.path)))
