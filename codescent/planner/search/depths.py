"""In: a space. Out: the depths of its model by kind, and plans of few depths, whose parts cost/ prices.
Does not price them. Such a plan has the mesh, the batch and the model of a whole one, and few of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from codescent.base.refusal import Value
from codescent.build.plan import operators, parameters_of, placed
from codescent.plan import CROSS_ENTROPY, Instruction, Parameter, Plan, Schedule, Verb
from codescent.planner.search.space import OPTIONS, LayoutFrame, Options, Space, default_of
from codescent.strategies import Candidate, active

SHARE_SAMPLES = ("cp", "tp")
"""Axes whose ranks send parts of layers, and no weights or gradients."""
SOME = 4
"""Blocks of a kind in a plan of few depths: the first and the last one of a chunk may differ from the others."""


class Depths:
    """The depths of a model by kind: those of a kind follow each other, and compute and hold the same.

    Attributes:
        last: the depth of the head.
        kind: of each depth.
        first: the first depth of each kind.
        some: a few depths of each kind.
    """

    def __init__(self, space: Space) -> None:
        self.last = space.resolved.model.num_layers + 1
        self._held: list[list[Parameter]] = [[] for _ in range(self.last + 1)]
        for parameter in parameters_of(space.resolved):
            for depth in parameter.depths:
                self._held[depth].append(parameter)
        declared = operators(space.candidate, CROSS_ENTROPY)  # they say which depths are alike, whatever is minimised
        begins = set() if self._held[0] else {1, space.resolved.model.encoder_layers + 1}
        before: tuple[object, ...] = ()
        self.kind, self.first = list[int](), list[int]()
        for depth in range(self.last + 1):
            alike = (
                depth if depth in (0, self.last) else -1,
                depth in begins,
                tuple((one.shape, one.role, one.stream, one.trained, one.alternating) for one in self._held[depth]),
                tuple(one.depths[0] <= depth < one.depths[1] for one in declared),
            )
            if alike != before:
                self.first.append(depth)
            self.kind.append(len(self.first) - 1)
            before = alike
        ends = [*self.first[1:], self.last + 1]
        self.runs = [(first, end) for first, end in zip(self.first, ends, strict=True)]
        self.some = {depth for first, end in self.runs for depth in range(first, min(first + SOME, end))}
        self.some |= {self.last - 1}
        self._counts: dict[range, tuple[int, ...]] = {}

    def counts(self, part: range) -> tuple[int, ...]:
        """How many depths of each kind a part of the model has."""
        if part not in self._counts:
            runs = (range(max(first, part.start), min(end, part.stop)) for first, end in self.runs)
            self._counts[part] = tuple(map(len, runs))
        return self._counts[part]

    def chunks(self, pp: int) -> list[tuple[int, int]]:
        """The chunks of a piece. Without a pipeline all depths are one; else each kind has one of some of its depths,
        because any chunk may have them."""
        if pp == 1:
            return [(0, self.last + 1)]
        return [(first, min(first + SOME, end)) for first, end in self.runs]

    def like(self, depth: int) -> int:
        """One of `some` that is like a depth, and neither the first nor the last one."""
        return depth if depth in self.some else self.first[self.kind[depth]] + 1

    def parameters(self, depths: Iterable[int]) -> list[Parameter]:
        """The parameters of some depths, each once."""
        found = {parameter.name: parameter for depth in depths for parameter in self._held[depth]}
        return list(found.values())


def candidate_of_piece(space: Space, frame: LayoutFrame, options: Options) -> Candidate:
    """The candidate of a frame with these options, and the others as if nothing else were divided."""
    others: dict[str, Value] = {key: default_of(key) for key in OPTIONS}
    return space.candidate_with(frame, {**others, **options})


def piece(
    space: Space, depths: Depths, candidate: Candidate, chunks: Sequence[tuple[int, int]], axes: Collection[str]
) -> Plan:
    """A plan with the parameters of `Depths.some` alone. Its first stage has all the chunks, and there is no other.

    `axes`: the traffic is that of the strategies of these axes.
    """
    here = [depth for first, end in chunks for depth in range(first, end) if depth in depths.some]
    strategies = [strategy for strategy in active(candidate) if strategy.axis != "pp"]
    program: list[Instruction] = []
    for microbatch in range(candidate.work.num_microbatches):
        last = microbatch == candidate.work.num_microbatches - 1
        program += [Instruction(Verb.FORWARD, microbatch, chunk=chunk) for chunk in range(len(chunks))]
        program += [Instruction(Verb.BACKWARD, microbatch, last=last, chunk=chunk) for chunk in range(len(chunks))]
    schedule = Schedule(((*program, Instruction(Verb.REDUCE), Instruction(Verb.STEP)),), tuple(chunks))
    plan = placed(space.config, candidate, depths.parameters(here), schedule, strategies)
    traffic = (record for one in strategies if one.axis in axes for record in one.traffic(plan, 0))
    return replace(plan, traffic=tuple(traffic))
