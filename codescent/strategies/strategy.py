"""In: nothing. Out: `Strategy`, the base class; `Candidate` (settings from which a plan may be built), `ThisRank`
(a rank and its process groups), `Gradients` (the interface of objects that sum gradients over ranks).
Does not contain a strategy: tensor.py, zero.py and others do. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from codescent.plan import (
    KeptTensor,
    Layout,
    Mesh,
    ModelFacts,
    Plan,
    Scalar,
    Schedule,
    TaskFacts,
    TensorPlan,
    Traffic,
    Work,
)
from codescent.plan.activations import SavedTensor
from codescent.plan.operators import LayerOperator

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Candidate:
    """The facts from which a plan is built. Strategies refuse a candidate, or search for the nearest possible one.

    `world_size`: number of ranks of the run. `microbatch_size`: the user's setting; None: all samples of a rank.
    `update`: see `Plan.update`. `batch_tokens`: of the global batch, if it is given in tokens; else 0. `sample_tokens`:
    of a sample. `due`: after how many steps a key acts, by its name. `advises`: False where only the number of refusals
    counts; then they need not name what would do.
    """

    mesh: Mesh
    model: ModelFacts
    task: TaskFacts
    work: Work
    layout: Layout
    world_size: int
    microbatch_size: int | None
    update: Mapping[str, Scalar] = field(default_factory=dict)
    batch_tokens: int = 0
    sample_tokens: int = 0
    advises: bool = True
    due: Mapping[str, int] = field(default_factory=dict)

    def multiple(self, mesh: Mesh) -> int:
        """The number of micro-batches must be a multiple of this: with the schedule interleaved, of the stages."""
        return mesh.pp if self.layout.schedule == "interleaved" else 1

    @property
    def whole_samples(self) -> bool:
        """Whether the tokens of a batch are a whole number of samples."""
        return not self.batch_tokens or self.batch_tokens % self.sample_tokens == 0

    def on(self, mesh: Mesh) -> Candidate | None:
        """This candidate with another mesh; None if the ranks cannot have equal parts of the batch."""
        share, rest = divmod(self.work.global_batch_size, mesh.dp)
        size = self.microbatch_size or share
        if rest or share % (size * self.multiple(mesh)) or not self.whole_samples:
            return None
        work = replace(self.work, microbatch_size=size, num_microbatches=share // size)
        return replace(self, mesh=mesh, work=work)


@dataclass(frozen=True)
class ThisRank:
    """A rank of a plan, with its process group for each axis in the plan's traffic."""

    plan: Plan
    rank: int
    groups: Mapping[str, ProcessGroup]

    @property
    def coordinates(self) -> dict[str, int]:
        """Index of this rank on each axis of the mesh."""
        return self.plan.mesh.coordinates(self.rank)

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The tensors of this rank's pipeline stage."""
        return self.plan.held_by(self.coordinates["pp"])

    @property
    def trained(self) -> tuple[TensorPlan, ...]:
        """The tensors of this stage that are trained; empty if all adapters are on other stages."""
        return tuple(tensor for tensor in self.tensors if tensor.parameter.trained)


@dataclass
class Held:
    """Tensors that a part of a run holds at a moment, to count their memory.

    Attributes:
        gradients: gradients and their sums, in the form and the dtypes in which the plan declares them.
        buffers: messages of collectives, and other memory that is free again after them.
        unseen_bytes: bytes of gradients that torch holds where no public call reaches them.
    """

    gradients: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    unseen_bytes: int = 0


class Gradients(Protocol):
    """Sums a step's gradients over micro-batches and ranks, between backward and the optimizer."""

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """Called before each backward pass of a chunk in step `step` (from 0). `last`: this pass completes the chunk's
        gradients."""

    def reduce(self) -> None:
        """The REDUCE verb: wait until the gradients are summed over all ranks that have a part of them."""

    def collect(self) -> Sequence[torch.Tensor]:
        """One gradient per trained tensor of this rank's stage, in the plan's order; valid after `reduce`."""

    def not_finite(self, step: int) -> Sequence[int] | None:
        """Indices of tensors whose gradients were not finite on this rank, before the sum over ranks.

        None: they are the gradients of `collect`, to which no other rank has added anything. Empty also where nobody
        can know. `step`: the number of the step (from 0), one of the last two.
        """

    def release(self) -> None:
        """Drop the gradients, after the optimizer has used them."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """What it keeps between steps, by the names of `Plan.kept`."""

    def held(self) -> Held:
        """What it holds now. Called between two instructions of the first step of a command."""

    def close(self) -> None:
        """Drop all references to process groups and parameters, before the process groups are destroyed."""


class Strategy:
    """One way to divide the work of a step over one mesh axis. It has no state and reads its keys from the layout.

    The methods of this base class change nothing. `variants`: values of layout keys that change the result's
    computation, not only its speed; `prove` tries each.
    """

    axis: ClassVar[str] = ""  # mesh axis; "": the strategy splits nothing over ranks
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    weights_apart_by: ClassVar[str] = ""  # the key by which ranks have other weights than the run after some steps

    def active(self, run: Candidate | Plan) -> bool:
        """Whether the run uses this strategy. If not, `place`, `schedule`, `traffic` and `divide` are not called."""
        return run.mesh.degree(self.axis) > 1

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """A `Refusal` for each value that the strategy does not support, with the nearest changes that would do."""
        yield from ()

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Change the placements and dtypes of a tensor's weights, gradients and optimizer state.

        `build` asks once for all tensors that differ in their names and in the numbers of their blocks alone.
        """
        return tensor

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """Change the instruction lists, as the strategies before this one in ORDER have left them."""
        return schedule

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Every collective that a rank of a pipeline stage issues in a step. The caller sets `Traffic.stage`."""
        yield from ()

    def kept(self, plan: Plan, stage: int) -> Iterator[KeptTensor]:
        """What a rank of a pipeline stage keeps between steps. The caller sets `KeptTensor.stage`."""
        yield from ()

    def saved(self, tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Iterator[SavedTensor]:
        """Change what forward keeps for backward of a micro-batch. Called for every strategy: a model also declares
        what only a value of parallel.recompute keeps."""
        yield from tensors

    def operators(self, operators: Sequence[LayerOperator], run: Candidate | Plan) -> Iterator[LayerOperator]:
        """Change what a rank computes beside products with matrices. Called for each active strategy."""
        yield from operators

    def decides(self, plan: Plan) -> Mapping[str, Scalar]:
        """The keys of [parallel] that decide the losses of this plan, with their values. Called for every strategy: a
        key may count before its strategy is active, such as a lossy format of messages on one rank."""
        return {}

    def exact(self, plan: Plan) -> bool:
        """Whether the losses of the plan are those of one process, up to rounding."""
        return True

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Reduce a part of the model, on the meta device, to what this rank holds of it."""

    def gradients(
        self, parts: Sequence[torch.nn.Module], this_rank: ThisRank, owner: Gradients | None
    ) -> Gradients | None:
        """The object that sums the parts' gradients. Called for every strategy, in ORDER; parameters have memory.

        `owner`: the object of the strategies before this one. Return it, wrap it, or create one if it is None.
        """
        return owner
