"""In: the least seconds of the passes of each stage, a schedule. Out: the least seconds of a step.
Does not know how long passes take (passes.py does), and is no simulation (cost/lanes.py is)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from codescent.cost.lanes import Kind, StageLanes
from codescent.cost.transfers import link_of
from codescent.plan import Instruction, Verb
from codescent.planner.search.cuts import StageCut
from codescent.planner.search.passes import PartTimes

NAIVE, ONE_BY_ONE, INTERLEAVED, ZERO_BUBBLE = "naive", "1f1b", "interleaved", "zero-bubble"


@dataclass(frozen=True)
class Paths:
    """Chains of instructions of which each waits for the one before it. A step is at least as long as the longest one.

    Attributes:
        cut: the stages.
        times: by part of the cut.
        microbatches: of a step.
        messages_s: of a message between stages, by link (cost/transfers.py).
        weights: the share of a backward pass that computes gradients of weights.
        reduce_s: of REDUCE of the first stage, beside what its last backward pass has sent.
        ends_s: by stage: of its STEP.
    """

    cut: StageCut
    times: tuple[PartTimes, ...]
    microbatches: int
    messages_s: Sequence[float]
    weights: float
    reduce_s: float
    ends_s: tuple[float, ...]

    def longest_s(self, schedule: str) -> float:
        """The longest of a few chains of a schedule (plan/pipeline.py has their order)."""
        if self.cut.stages == 1:
            return self._busy_s(0) + self._waits_s(0) + self.reduce_s + self.ends_s[0]
        chains = [*self._through_stages(schedule)]
        round_s, steady_s = self._rounds_s
        if schedule == NAIVE:  # a micro-batch goes to the last stage and back, then the next one
            chains.append(round_s + (self.microbatches - 1) * steady_s + self.end_s)
        elif schedule == ONE_BY_ONE:  # as many micro-batches are on their way as there are stages
            rounds, more = divmod(self.microbatches - 1, self.cut.stages)
            chains.append(more * self.times[self.cut.virtual[0]].forward + round_s + rounds * steady_s + self.end_s)
        elif schedule == INTERLEAVED:
            chains.append(self._interleaved_s())
        return max(chains)

    @property
    def end_s(self) -> float:
        """From the last backward pass of the first stage to its end."""
        return self._waits_s(0) + self.reduce_s + self.ends_s[0]

    def _waits_s(self, stage: int) -> float:
        """For gradients that the last backward pass of a stage has sent."""
        return self.times[self.cut.virtual[stage]].left

    def _busy_s(self, stage: int) -> float:
        """All passes of a stage."""
        spent_s = 0.0
        for part, number in self.cut.numbers[stage].items():
            found = self.times[part]
            spent_s += number * (self.microbatches * (found.forward + found.backward) + found.last - found.backward)
        return spent_s + sum(self.begins_s[stage :: self.cut.stages])

    @cached_property
    def begins_s(self) -> list[float]:
        """By virtual stage: what its first forward pass takes more than another one.

        Its weights are gathered from the begin of the step on: beside the passes of all virtual stages before it.
        The virtual stages that are left out take no more.
        """
        begin = self.times[self.cut.virtual[0]]
        found = [max(begin.first - begin.forward, begin.gathers) if begin.gathers > 0.0 else 0.0]
        for number, part in enumerate(self.cut.virtual[1:], 1):
            found.append(self.times[part].gathers - number * self.times[part].most)
            if found[-1] <= 0.0:
                return found[:-1]
        return found

    def _begin_s(self, virtual: int) -> float:
        return self.begins_s[virtual] if virtual < len(self.begins_s) else 0.0

    @cached_property
    def _rounds_s(self) -> tuple[float, float]:
        """A micro-batch through all virtual stages and back: the last one, and one in between."""
        found = [(number, self.times[part]) for part, number in self.cut.alike.items()]
        messages_s = sum(number * self.messages_s[link] for link, number in self.cut.hops.items())
        steady_s = sum(number * (one.forward + one.backward) for number, one in found) + messages_s
        return steady_s + sum(number * (one.last - one.backward) for number, one in found), steady_s

    def _there_s(self, virtual: int) -> float:
        """Of activations of a virtual stage to the one behind it."""
        return self.messages_s[link_of(virtual % self.cut.stages, self.cut.stages, forward=True)]

    def _back_s(self, virtual: int) -> float:
        """Of gradients of a virtual stage to the one before it."""
        return self.messages_s[link_of(virtual % self.cut.stages, self.cut.stages, forward=False)]

    def _through_stages(self, schedule: str) -> Iterator[float]:
        """To a stage, all that it computes, and to its end; or back to the end of the first stage.

        Of stages that are alike, the last one has the longest chains, unless some gradients are computed later.
        """
        there_s = back_s = 0.0
        split = schedule == ZERO_BUBBLE
        for stage in range(self.cut.stages):
            found = self.times[self.cut.virtual[stage]]
            if split or stage in self.cut.unlike:
                busy_s = self._busy_s(stage)
                yield there_s + busy_s + self._waits_s(stage) + self.ends_s[stage] + self.reduce_s * (stage == 0)
                if stage:
                    later_s = self._later_s(stage) if split else 0.0
                    yield there_s + busy_s - later_s + back_s + self._back_s(stage) + self.end_s
            there_s += found.forward + self._begin_s(stage) + self._there_s(stage)
            back_s += found.backward * (1.0 - self.weights) if split else found.last
            back_s += self._back_s(stage) if stage else 0.0
            if split and stage == 0:
                back_s += self._weight_s(0, last=True)

    def _later_s(self, stage: int) -> float:
        """What a stage computes after it has sent its last gradient: gradients of weights of the last micro-batches."""
        later = min(self.microbatches, stage + 1)
        return (later - 1) * self._weight_s(stage, last=False) + self._weight_s(stage, last=True)

    def _weight_s(self, stage: int, *, last: bool) -> float:
        found = self.times[self.cut.virtual[stage]]
        return self.weights * (found.last if last else found.backward)

    def _interleaved_s(self) -> float:
        """The first micro-batch to the last virtual stage; what its rank computes from there to the last backward pass
        of this virtual stage; back to the first one.

        A rank begins with all its other chunks for the first `stages` micro-batches, and ends with them.
        """
        stages, last = self.cut.stages, self.times[self.cut.virtual[-1]]
        here = [self.times[part] for part in self.cut.virtual[stages - 1 :: stages]]
        each_s = [one.forward + one.backward for one in here]
        middle_s = self.microbatches * sum(each_s) - stages * sum(each_s[:-1])
        round_s, _ = self._rounds_s
        return round_s - last.forward - last.backward + middle_s + self._begin_s(0) + self.end_s

    def in_lanes_s(self, lanes: StageLanes) -> float:
        """The makespan of all instructions of a schedule."""
        return lanes.run(self._instruction_s, self.messages_s)[0]

    def _instruction_s(self, kind: Kind, at: Instruction) -> float:
        stage, verb, chunk, _ = kind
        virtual = chunk * self.cut.stages + stage
        found = self.times[self.cut.virtual[virtual]]
        if verb is Verb.FORWARD:
            return found.forward + (self._begin_s(virtual) if at.microbatch == 0 else 0.0)
        if verb is Verb.BACKWARD:
            return found.last if at.last else found.backward
        if verb is Verb.BACKWARD_INPUT:
            return found.backward * (1.0 - self.weights)
        if verb is Verb.BACKWARD_WEIGHT:
            return self._weight_s(stage, last=at.last)
        if verb is Verb.REDUCE:
            return self._waits_s(stage) + self.reduce_s * (stage == 0)
        return self.ends_s[stage] if verb is Verb.STEP else 0.0
