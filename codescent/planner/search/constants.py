"""In: a space, a cluster, a software. Out: what all of its layouts have in common: shares and constants; messages.
Does not know a layout (bounds.py puts them together)."""

from __future__ import annotations

from codescent.build.plan import parameters_of, placed
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.stage_memory import stage_memory
from codescent.cost.stage_time import StageTime
from codescent.cost.transfers import between_neighbours, transfers
from codescent.plan import Instruction, Schedule, Verb
from codescent.planner.search.depths import candidate_of_piece
from codescent.planner.search.space import LayoutFrame, Options, Space
from codescent.strategies.pipeline import Pipeline


class Constants:
    """What all layouts have in common.

    Attributes:
        weights: the share of a backward pass that computes gradients of weights.
        device_bytes: memory of a device beside what a plan holds.
        allocated: bytes that are allocated for each byte that is held.
    """

    def __init__(self, space: Space, cluster: Cluster, software: Software) -> None:
        self.space, self.cluster, self.software = space, cluster, software
        program = Instruction(Verb.FORWARD, 0), Instruction(Verb.BACKWARD, 0, last=True)
        depths = 0, space.resolved.model.num_layers + 2
        whole = placed(
            space.config, space.candidate, parameters_of(space.resolved), Schedule((program,), (depths,)), ()
        )
        time = StageTime(whole, 0, cluster, software)
        both, weights = (time.parts_of(Instruction(verb, 1)).total_s for verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT))
        self.weights = weights / both
        memory = stage_memory(whole, 0, cluster, software)
        self.device_bytes = memory.device
        self.allocated = 1.0 + memory.fragments / (memory.total - memory.device - memory.fragments)

    def messages_s(self, frame: LayoutFrame, options: Options) -> list[float]:
        """Seconds of a message between stages, by link (cost/transfers.py)."""
        if frame.mesh.pp == 1:
            return [0.0, 0.0]
        sends = Schedule(((Instruction(Verb.SEND_ACTIVATION, 0, peer=1),),), ((0, 1),))
        plan = placed(self.space.config, candidate_of_piece(self.space, frame, options), (), sends, ())
        (record,) = Pipeline().traffic(plan, 0)
        records = between_neighbours(record, frame.mesh.pp)
        return [one.seconds for one in transfers(records, frame.mesh, self.cluster, self.software)]
