"""In: the place of an instruction in the lists of pipeline stages. Out: the message that it reads, sends or receives.
Does not say when anything happens: simulate.py, lanes.py and ranks_walk.py do, each on this one description."""

from __future__ import annotations

from typing import NamedTuple

from codescent.plan import SENDS, Instruction, Schedule, Verb

READS_GRADIENTS = (Verb.BACKWARD, Verb.BACKWARD_INPUT)
ACTIVATIONS = (Verb.SEND_ACTIVATION, Verb.RECEIVE_ACTIVATION)


StageMessage = tuple[bool, int, int | None]
"""Whether it is an activation (else a gradient), the virtual stage that computed it, its micro-batch. A plain tuple:
a schedule may have a hundred thousand of them."""


class Dataflow(NamedTuple):
    """What instructions of the lists exchange. Chunk c of stage s of p is virtual stage c p + s.

    Attributes:
        stages: their number.
        last: the last virtual stage.
    """

    stages: int
    last: int

    @classmethod
    def of(cls, schedule: Schedule) -> Dataflow:
        """That of a schedule."""
        stages = len(schedule.programs)
        return cls(stages, max(at.chunk * stages + s for s, program in enumerate(schedule.programs) for at in program))

    def virtual(self, stage: int, at: Instruction) -> int:
        """The virtual stage of an instruction."""
        return at.chunk * self.stages + stage

    def reads(self, stage: int, at: Instruction) -> StageMessage | None:
        """See `read_by`."""
        return read_by(at, self.virtual(stage, at), self.last)

    def message(self, stage: int, at: Instruction) -> StageMessage:
        """The message of a send or a receive: equal for both ends."""
        activation, computed_by = at.verb in ACTIVATIONS, self.virtual(stage, at)
        if at.verb not in SENDS:
            computed_by += -1 if activation else 1
        return activation, computed_by, at.microbatch

    def awaited(self, stage: int, at: Instruction) -> str:
        """What a blocked instruction waits for, in words."""
        if at.peer is not None:
            return f"stage {at.peer} to {'receive' if at.verb in SENDS else 'send'} it"
        forward = at.verb is Verb.FORWARD
        source = (self.virtual(stage, at) + (-1 if forward else 1)) % self.stages
        return f"{'the activation' if forward else 'the gradient'} from stage {source}"


def read_by(at: Instruction, virtual: int, last: int) -> StageMessage | None:
    """What a computation of a virtual stage needs of another one: the output of the one before it, or the gradient of
    the one behind it; None: nothing. `last`: the last virtual stage."""
    verb = at.verb
    if verb is Verb.FORWARD:
        return (True, virtual - 1, at.microbatch) if virtual else None
    if verb in READS_GRADIENTS and virtual < last:
        return False, virtual + 1, at.microbatch
    return None
