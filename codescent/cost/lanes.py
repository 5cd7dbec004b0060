"""In: a schedule. Out: its computations in an order in which each comes after what it needs; how long they take.
Has no spans and no messages to draw (simulate.py has, and takes ten times as long for the same makespan)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codescent.cost.dataflow import READS_GRADIENTS, Dataflow, StageMessage, read_by
from codescent.cost.simulate import Deadlock
from codescent.cost.transfers import link_of
from codescent.plan import Instruction, Schedule, Verb

Kind = tuple[int, Verb, int, bool]
"""A stage, a verb, a chunk, and whether it is the first forward or the last backward pass of its chunk, or the first
LOAD: instructions with the same kind take the same time."""
HERE = -1
BEGINS = (Verb.FORWARD, Verb.LOAD)


def kind_of(stage: int, at: Instruction) -> Kind:
    """The kind of an instruction of a stage."""
    return stage, at.verb, at.chunk, at.last or (at.verb in BEGINS and at.microbatch == 0)


@dataclass(frozen=True)
class StageLanes:
    """The computations of a step. Each stage is a lane.

    Attributes:
        kinds: the different ones, each with an instruction of it.
        order: for each computation its stage, the index of its kind, the index in `order` of the computation whose
            output it reads (HERE: none of another stage), and the link over which its own leaves (`link_of`; HERE:
            none).
    """

    kinds: dict[Kind, Instruction]
    order: tuple[tuple[int, int, int, int], ...]
    stages: int

    def run(
        self, seconds: Callable[[Kind, Instruction], float], messages_s: Sequence[float]
    ) -> tuple[float, list[float]]:
        """The makespan, and how long each stage computes.

        `seconds`: of an instruction. `messages_s`: by link (`link_of`), a message keeps it busy for so long; the next
        one on the same link waits.
        """
        each_s = [seconds(kind, at) for kind, at in self.kinds.items()]
        clock_s, busy_s = [0.0] * self.stages, [0.0] * self.stages
        ends_s = [0.0] * len(self.order)
        free_s = [0.0] * (2 * self.stages)
        arrives_s = [0.0] * len(self.order)
        for number, (stage, kind, needs, link) in enumerate(self.order):
            now_s = clock_s[stage]
            if needs >= 0 and arrives_s[needs] > now_s:
                now_s = arrives_s[needs]
            spent_s = each_s[kind]
            now_s += spent_s
            busy_s[stage] += spent_s
            clock_s[stage] = ends_s[number] = now_s
            if link >= 0:
                leaves_s = free_s[link]
                arrives_s[number] = free_s[link] = (now_s if now_s > leaves_s else leaves_s) + messages_s[link]
            else:
                arrives_s[number] = now_s
        return max(clock_s), busy_s


def lanes_of(schedule: Schedule) -> StageLanes:
    """The computations of a schedule, each behind what it needs.

    Raises:
        Deadlock: the lists of the stages wait for each other.
    """
    stages = len(schedule.programs)
    programs = [[at for at in program if at.peer is None] for program in schedule.programs]
    flow = Dataflow.of(schedule)
    last = flow.last
    places, done = [0] * stages, dict[StageMessage, int]()
    kinds: dict[Kind, Instruction] = {}
    numbers: dict[Kind, int] = {}
    order: list[tuple[int, int, int, int]] = []
    while True:
        before = len(order)
        for stage, program in enumerate(programs):
            while places[stage] < len(program):
                at = program[places[stage]]
                virtual = at.chunk * stages + stage
                needs, link, forward = HERE, HERE, at.verb is Verb.FORWARD
                if forward or at.verb in READS_GRADIENTS:
                    if wanted := read_by(at, virtual, last):
                        if wanted not in done:
                            break
                        needs = done[wanted]
                    done[forward, virtual, at.microbatch] = len(order)
                    sends = stages > 1 and (virtual < last if forward else virtual > 0)
                    link = link_of(stage, stages, forward=forward) if sends else HERE
                kind = kind_of(stage, at)
                kinds.setdefault(kind, at)
                order.append((stage, numbers.setdefault(kind, len(numbers)), needs, link))
                places[stage] += 1
        if len(order) == before:
            break
    if waiting := {s: p[places[s]] for s, p in enumerate(programs) if places[s] < len(p)}:
        raise Deadlock({stage: (at, flow.awaited(stage, at)) for stage, at in waiting.items()})
    return StageLanes(kinds, tuple(order), stages)
