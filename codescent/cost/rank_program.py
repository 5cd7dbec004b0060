"""In: a plan, a stage, a step. Out: the list of a rank, with the collectives of each instruction.
Does not run it (ranks_walk.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from codescent.cost.coding import Coding, Exchanged, around
from codescent.cost.lengths import instructions_of
from codescent.plan import SENDS, Collective, Instruction, Plan, Traffic, Verb


@dataclass(frozen=True)
class Joined:
    """A collective of an instruction.

    Attributes:
        times: how often it runs.
        coding: what the rank computes before and after it each time; None: nothing.
        in_pieces: see strategies/pieces.py.
    """

    record: Traffic
    times: float
    coding: Exchanged | None = None
    in_pieces: bool = False


@dataclass
class Sums:
    """The collectives of an instruction: those that begin with it, and those that run after it."""

    begins: list[Joined] = field(default_factory=list)
    follows: list[Joined] = field(default_factory=list)


IN_PIECES = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)
"""Collectives of sums in a format of the wire. gloo, the backend of CPUs, sends them in pieces."""
Program = Sequence[tuple[Instruction, Sums]]


def program_of(plan: Plan, stage: int, number: int, coding: Coding) -> Program:
    """The list of a stage in step `number`, with its copies, and the collectives that more than one rank runs."""
    program = plan.schedule.program(stage, number)
    found, coded = {at: Sums() for at in program}, around(plan, coding, stage, number)
    for record in plan.traffic:
        if record.stage not in (None, stage) or record.verb in SENDS or not record.runs_in(number):
            continue
        copies = record.collective is Collective.COPY
        if (plan.mesh.degree(record.axis) == 1 and not copies) or record.collective in (
            Collective.PUSH,
            Collective.PULL,
        ):
            continue
        if plan.layout.averages_beside:  # pairs_walk.py has them
            continue
        instructions = instructions_of(record, plan, program)
        for at in instructions:
            begins = record.during is not None or record.verb is Verb.AVERAGE
            in_pieces = record.collective in IN_PIECES and record.verb in (Verb.REDUCE, Verb.AVERAGE)
            joined = Joined(record, record.times / len(instructions), coded.get(record), in_pieces)
            (found[at].begins if begins else found[at].follows).append(joined)
    return [(at, found[at]) for at in program]
