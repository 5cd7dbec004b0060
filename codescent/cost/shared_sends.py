"""In: the passes of pipeline stages, the messages between stages. Out: how much longer both take on a link they share.
Does not say when messages leave (lanes.py and simulate.py do), and knows no single collective (stage_time.py does)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from codescent.cost.collective_time import BETWEEN, BUS, INSIDE
from codescent.cost.stage_time import PASSES, StageTime
from codescent.cost.time_parts import TimeParts
from codescent.cost.transfers import Transfer, link_of
from codescent.plan import Instruction, Verb


class LinkUse(NamedTuple):
    """Of the time of a stage's passes: by link, the shares in which its collectives are on it, and in which its ranks
    wait for them there."""

    busy: dict[str, float]
    waited: dict[str, float]


class SharedSends:
    """A message leaves while its stage computes the next pass. That pass has collectives on the same link.

    Each of both has half of the link while both are there. When a message leaves within a pass is not known here. So it
    meets collectives for their share of the time: it takes longer by as much, and a pass that waits for them, too.

    Args:
        stages: of a plan, in order.
        transfers: of the messages between them, by link (transfers.py).
    """

    def __init__(self, stages: Sequence[StageTime], transfers: Sequence[Transfer]) -> None:
        self.stages, self.transfers = stages, transfers
        self.last = len(stages) * len(stages[0].chunks) - 1
        sends = any(one.seconds for one in transfers)
        self.uses = [link_use(stage) for stage in stages] if sends else []

    @property
    def messages_s(self) -> list[float]:
        """By link: a message keeps it busy for so long."""
        if not self.uses:
            return [one.seconds for one in self.transfers]
        return [
            one.seconds * (1.0 + self.uses[number // 2].busy.get(one.link, 0.0))
            for number, one in enumerate(self.transfers)
        ]

    def delay(self, stage: int, at: Instruction) -> TimeParts:
        """By how much the message that leaves behind a pass delays what the passes of its stage wait for."""
        if not self.uses or at.verb not in PASSES or at.verb is Verb.BACKWARD_WEIGHT:
            return TimeParts()
        virtual, forward = at.chunk * len(self.stages) + stage, at.verb is Verb.FORWARD
        if virtual == (self.last if forward else 0):
            return TimeParts()  # nothing leaves
        one = self.transfers[link_of(stage, len(self.stages), forward=forward)]
        longer_s = one.seconds * self.uses[stage].waited.get(one.link, 0.0)
        return TimeParts(**{f"{one.link}_s": longer_s})


def link_use(stage: StageTime) -> LinkUse:
    """Of the passes of micro-batches that are neither the first nor the last one."""
    busy_s, waited_s, passes_s = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for chunk in range(len(stage.chunks)):
        for verb in (Verb.FORWARD, Verb.BACKWARD):
            parts = stage.parts_of(Instruction(verb, 1, chunk=chunk))
            passes_s += parts.total_s
            for link, waits_s in ((INSIDE, parts.inside_s), (BETWEEN, parts.between_s), (BUS, parts.bus_s)):
                waited_s[link] += waits_s
            for link, sent_s in stage.collectives(PASSES[verb], chunk).items():
                busy_s[link] += sent_s
    busy, waited = (
        {link: min(1.0, each_s / passes_s) for link, each_s in seconds.items() if each_s}
        for seconds in (busy_s, waited_s)
    )
    return LinkUse(busy, waited)
