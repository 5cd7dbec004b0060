"""In: a simulated step. Out: the boxes of its picture: row, band, begin, end, colour, name in the legend.
Does not draw (step_picture.py does) and does not simulate (codescent/cost does)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from codescent.cost.doing import SERVES, Activity, Doing, OrderedSpans, parts_without
from codescent.cost.lengths import InstructionCollectives
from codescent.cost.simulate import SimulatedMessage, Simulation, Span
from codescent.plan import Collective, Instruction, Traffic, Verb
from codescent.report.style import COLOURS, DOING, GATHERED, IDLE, VERB_NAMES
from codescent.trace.intervals import union, without


class PictureBand(StrEnum):
    """Where a box is: in the row of a rank or stage, or in a lane below it."""

    ROW = "row"
    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    SERVES = "serves"  # of a worker that serves; a server of its own has a row


@dataclass(frozen=True)
class PictureLook:
    """A kind of box: its colour, and its name in the legend."""

    name: str
    colour: str


@dataclass(frozen=True)
class PictureBox:
    """A box of a picture, in units of time.

    Attributes:
        row: the index of the rank or stage.
        text: inside of the box, if it is wide enough: a micro-batch, or the blocks whose weights are gathered.
        third: a server does three things at once; this is the one of them, from 0. None: the box has the whole height.
    """

    row: int
    band: PictureBand
    start: float
    end: float
    look: PictureLook
    text: str = ""
    third: int | None = None


ANOTHER_STAGE = "waits for another stage"
"""Of a pipeline: the bubble."""
IDLE_LOOK = PictureLook(*IDLE)
GATHER = PictureLook(*GATHERED)


def boxes_of(
    simulation: Simulation, exchanges: Mapping[tuple[int, Instruction], InstructionCollectives]
) -> list[PictureBox]:
    """All boxes of a picture; `exchanges`: of the instructions of stages."""
    waits = defaultdict[int, list[Activity]](list)
    for at in simulation.activities:
        if at.doing not in SERVES:
            waits[at.stage].append(at)
    spans = [span for span in simulation.timeline if span.end_s > span.start_s]
    of_row = {row: OrderedSpans(found) for row, found in waits.items()}
    nothing = OrderedSpans(())
    computing = [box for span in spans for box in _computing(span, of_row.get(span.stage, nothing))]
    rows = {span.stage for span in spans}
    return [
        *computing,
        *(box for row, found in waits.items() for box in _waiting(row, found, simulation.lane)),
        *sent(simulation, exchanges),
        *(_serving(at, PictureBand.SERVES if at.stage in rows else PictureBand.ROW) for at in services(simulation)),
    ]


def services(simulation: Simulation) -> Iterator[Activity]:
    """What a server does."""
    return (at for at in simulation.activities if at.doing in SERVES)


def sent(
    simulation: Simulation, exchanges: Mapping[tuple[int, Instruction], InstructionCollectives]
) -> Iterator[PictureBox]:
    """Collectives that overlap with computing, and messages: of ranks while their cards are busy."""
    for span in simulation.timeline:
        exchange = exchanges.get((span.stage, span.instruction))
        if exchange is not None and exchange.overlapped_s:
            end = span.start_s + exchange.overlapped_s
            yield PictureBox(span.stage, PictureBand.COLLECTIVES, span.start_s, end, wait_look(Doing.COLLECTIVE, ""))
    for at in simulation.messages:
        if at.end_s > at.start_s:
            yield _flying(at)


def is_idle(boxes: Iterable[tuple[int, float, float]], rows: Iterable[int], end: float, least: float) -> bool:
    """Whether a row is empty for at least so long before the end. `boxes`: row, begin and end of each."""
    covered = defaultdict[int, list[tuple[float, float]]](list)
    for row, first, last in boxes:
        covered[row].append((first, last))
    gaps = (gap for row in rows for gap in without([(0.0, end)], union(covered[row])))
    return any(last - first >= least for first, last in gaps)


def wait_look(why: Doing, lane: str) -> PictureLook:
    """The look of a wait or a service; `lane`: whose row has it, stage or rank."""
    name, colour = DOING[why]
    return PictureLook(ANOTHER_STAGE if why is Doing.RANK and lane == "stage" else name, colour)


def gathers_weights(record: Traffic) -> bool:
    """Whether a collective gathers the weights of a unit from all ranks (ZeRO)."""
    return record.collective is Collective.ALL_GATHER and "dp_shard" in record.axis.split("*")


def unit_of(record: Traffic) -> str:
    """The blocks of a collective, such as "0" or "0-3"; "root": what is outside of blocks; "": none."""
    first, end = record.depths
    if not end:
        return ""
    if first == 0:
        return "root"
    return f"{first - 1}" if end == first + 1 else f"{first - 1}-{end - 2}"


def _computing(span: Span, waits: OrderedSpans) -> Iterator[PictureBox]:
    """What is left of an instruction without its waits."""
    at, own = span.instruction, waits.during(span)
    text = "" if at.microbatch is None else str(at.microbatch)
    look = verb_look(at.verb, is_odd=at.chunk % 2 == 1)
    for start, end in parts_without(span, own):
        yield PictureBox(span.stage, PictureBand.ROW, start, end, look, text)


def verb_look(verb: Verb, *, is_odd: bool) -> PictureLook:
    """The look of computing an instruction; paler for the odd chunks of a rank."""
    parts = [int(COLOURS[verb][i : i + 2], 16) for i in (1, 3, 5)]
    colour = "#" + "".join(f"{round(part + (255 - part) * (0.55 if is_odd else 0)):02X}" for part in parts)
    return PictureLook(VERB_NAMES[verb] + (", odd chunks" if is_odd else ""), colour)


def _waiting(row: int, waits: Sequence[Activity], lane: str) -> Iterator[PictureBox]:
    """The waits of a row; those for the same that follow each other are one box."""
    for why in dict.fromkeys(wait.doing for wait in waits):
        look = wait_look(why, lane)
        for start, end in union((wait.start_s, wait.end_s) for wait in waits if wait.doing is why):
            yield PictureBox(row, PictureBand.ROW, start, end, look)


def _flying(at: SimulatedMessage) -> PictureBox:
    if at.record is None:
        return PictureBox(at.stage, PictureBand.MESSAGES, at.start_s, at.end_s, wait_look(Doing.MESSAGE, ""))
    look = GATHER if gathers_weights(at.record) else wait_look(Doing.COLLECTIVE, "")
    text = unit_of(at.record) if "dp_shard" in at.record.axis.split("*") else ""
    return PictureBox(at.stage, PictureBand.COLLECTIVES, at.start_s, at.end_s, look, text)


def _serving(at: Activity, band: PictureBand) -> PictureBox:
    return PictureBox(at.stage, band, at.start_s, at.end_s, wait_look(at.doing, ""), third=SERVES.index(at.doing))
