"""In: a division of a forward pass, a micro-batch. Out: the bytes that parts of the model keep for backward.
Does not know weights (held.py does), or how many passes are in flight (cuts.py does)."""

from __future__ import annotations

from dataclasses import replace

from codescent.build.plan import activations, made_again
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.activations import is_known
from codescent.cost.stage_memory import block_bytes, stage_memory, where
from codescent.plan import Mesh, Plan
from codescent.plan.activations import chunk_bytes, kept_on
from codescent.planner.search.depths import Depths, candidate_of_piece, piece
from codescent.planner.search.space import LayoutFrame, Options, Space


class Kept:
    """What parts of a model keep for one micro-batch. Where it is not declared, they keep nothing here.

    Of the frame tp, cp and the micro-batch count, and whether there are several stages.

    Attributes:
        logits: bytes that the head holds while it computes the loss.
        again: by kind of depth: bytes of what backward computes again of a depth.
    """

    def __init__(
        self, space: Space, depths: Depths, frame: LayoutFrame, options: Options, cluster: Cluster, software: Software
    ) -> None:
        pp, cp, tp = min(2, frame.mesh.pp), frame.mesh.cp, frame.mesh.tp
        self.mesh, self.last = Mesh(pp=pp, cp=cp, tp=tp), depths.last
        candidate = candidate_of_piece(space, LayoutFrame(self.mesh, frame.microbatch_size, 1), options)
        whole = piece(space, depths, candidate, [(depths.last, depths.last + 1)], ())
        keeps, again = (made(candidate, whole.objective) for made in (activations, made_again))
        plan = replace(whole, activations=keeps, again=again)
        self.device = where(plan, cluster.device.kind, software)
        known = is_known(plan, self.device)
        self.tensors = list(kept_on(plan.activations, self.device)) if known else []
        self.logits = stage_memory(replace(plan, mesh=replace(self.mesh, pp=1)), 0, cluster, software).logits
        self.again = [self._again(plan, first) for first in depths.first]
        self._found: dict[range, int] = {}

    def _again(self, plan: Plan, depth: int) -> int:
        schedule = replace(plan.schedule, depths=((depth, depth + 1),))
        return block_bytes(replace(plan, schedule=schedule), 0, 0, self.device)

    def bytes(self, part: range) -> int:
        """Bytes that a part of the model keeps."""
        if part not in self._found:
            self._found[part] = chunk_bytes(self.tensors, part, self.last, self.mesh, self.device)
        return self._found[part]
