"""In: what the routers of a stage have chosen in a step. Out: the loads of experts and the losses of routers of the
whole step, on every rank, as metrics.
Does not balance anything: the losses do (operators/routing.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from codescent.plan import DTYPE_BYTES, Collective, Plan, Traffic, Verb
from codescent.plan.measured import OF_EXPERTS
from codescent.strategies.strategy import Candidate, Gradients, Held, Strategy, ThisRank

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from codescent.models.part import Part

SUMS = 4
"""What a router sums beside the choices of each expert: see `operators.experts.Router.taken`."""


class ExpertLoads(Strategy):
    """One small all-reduce in each step, of all layers: it overlaps with nothing."""

    def active(self, run: Candidate | Plan) -> bool:
        """Whether the model has routers, and its ranks take each step together."""
        return run.model.num_experts > 0 and not run.layout.hands_out

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """The sum over the ranks that take a step together."""
        if plan.mesh.degree(plan.together) > 1:
            layers = plan.model.num_layers + plan.model.mtp_layers
            size = layers * (plan.model.num_experts + SUMS) * DTYPE_BYTES["fp64"]
            what = "loads of experts, losses of routers"
            yield Traffic(Collective.ALL_REDUCE, plan.together, size, "fp64", Verb.REDUCE, None, what)

    def gradients(
        self, parts: Sequence[torch.nn.Module], this_rank: ThisRank, owner: Gradients | None
    ) -> Gradients | None:
        """A wrapper that sums loads when gradients are summed."""
        if owner is None or not self.active(this_rank.plan):
            return owner
        plan = this_rank.plan
        group = this_rank.groups[plan.together] if plan.mesh.degree(plan.together) > 1 else None
        return LoadSums(owner, cast("Sequence[Part]", parts), plan, group, counts=this_rank.coordinates["tp"] == 0)


class LoadSums:
    """Wrap gradients: `reduce` also sums what routers have chosen, for `Part.measured` of the first part.

    `counts`: whether the choices of this rank count. All ranks of a tp group make the same.
    """

    def __init__(
        self, before: Gradients, parts: Sequence[Part], plan: Plan, group: ProcessGroup | None, *, counts: bool
    ) -> None:
        self.before, self.parts, self.plan, self.counts = before, parts, plan, counts
        self.group = group

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients."""
        self.before.before_backward(last=last, chunk=chunk, step=step)

    def reduce(self) -> None:
        """See Gradients."""
        import torch  # noqa: PLC0415 - keeps torch out of planning

        from codescent.base.device import wide_dtype  # noqa: PLC0415
        from codescent.strategies.collectives import all_reduce  # noqa: PLC0415

        self.before.reduce()
        taken = {layer: router.taken() for part in self.parts for layer, router in part.routers.items()}
        model = self.plan.model
        device = next(iter(taken.values())).device if taken else next(self.parts[0].parameters()).device
        sizes = model.num_layers + model.mtp_layers, model.num_experts + SUMS
        sums_LX = torch.zeros(sizes, dtype=wide_dtype(device), device=device)
        for layer, found in taken.items() if self.counts else ():
            sums_LX[layer] = found
        if self.group is not None:
            all_reduce(sums_LX, group=self.group)
        self.parts[0].measured = measured(sums_LX, model.num_experts)

    def collect(self) -> Sequence[Tensor]:
        """See Gradients."""
        return self.before.collect()

    def not_finite(self, step: int) -> Sequence[int] | None:
        """See Gradients."""
        return self.before.not_finite(step)

    def release(self) -> None:
        """See Gradients."""
        self.before.release()

    def state(self) -> Mapping[str, Tensor]:
        """See Gradients."""
        return self.before.state()

    def held(self) -> Held:
        """See Gradients."""
        return self.before.held()

    def close(self) -> None:
        """See Gradients."""
        self.before.close()
        self.group = None


def measured(sums_LX: Tensor, experts: int) -> dict[str, Tensor]:
    """Metrics of a step, by column.

    Loads are those of the most and of the least loaded expert of any layer, relative to the mean of its layer. Losses
    are means over tokens and layers that have experts.
    """
    counts_LE = sums_LX[:, :experts]
    tokens_L, balance_L, z_L, dropped_L = sums_LX[:, experts:].unbind(1)
    totals_L = counts_LE.sum(1)
    routed_L = totals_L > 0
    loads_LE = counts_LE * experts / totals_L.clamp(min=1.0)[:, None]
    tokens = tokens_L.sum().clamp(min=1.0)
    least = loads_LE.min(1).values.where(routed_L, experts).min()
    dropped = dropped_L.sum() / totals_L.sum().clamp(min=1.0)
    values = loads_LE.max(), least, dropped, balance_L.sum() / tokens, z_L.sum() / tokens
    return dict(zip(OF_EXPERTS, values, strict=True))
