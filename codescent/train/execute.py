"""In: a plan's instruction list, model chunks, gradient reducer, optimizer, data loader. Out: training steps, timed.
Does not decide which instructions a step has (the plan does). cost/simulate.py predicts times from the same list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from codescent.base.device import offered, wide_dtype
from codescent.base.range_names import WAITING
from codescent.base.ranges import named
from codescent.base.stopwatch import Stopwatch
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.coupling import Coupling
from codescent.data.loader import Batch, Loader, Portion
from codescent.plan import AXES, SCALARS, Instruction, Plan, Verb
from codescent.strategies import Gradients
from codescent.train.chunk import Chunk, InFlight
from codescent.train.instruments import Instruments
from codescent.train.memory import MemoryWatch
from codescent.train.messages import message_shape
from codescent.train.result import ALONE, COLUMN, WAIT_COLUMN, Pending, StepResult
from codescent.train.world import World

OF_COUPLINGS = (Verb.AVERAGE, Verb.MERGE, Verb.EXCHANGE, Verb.PUSH, Verb.PULL, Verb.SERVE)
"""Verbs of which a rank executes those of its coupling."""

CHANGING = frozenset({Verb.STEP, *OF_COUPLINGS})
"""Verbs that change weights or the optimizer's state."""


class Executor:
    """Executes the instruction list of one pipeline stage, once for each step.

    `parts` are the chunks of this stage, divided by the strategies. `stop_requested` is called once in each step; all
    ranks stop if it returns True on one. `updated` are called after each update of the weights, with the step (from 1).
    `before_change` is called once, before weights or the optimizer's state change next; None: nobody reads them beside.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        parts: Sequence[torch.nn.Module],
        gradients: Gradients,
        coupling: Coupling,
        loader: Loader | None,
        stop_requested: Callable[[], bool],
        updated: Sequence[Callable[[int], None]],
    ) -> None:
        self.plan = plan
        self.updated = updated
        self.world = world
        self.program = plan.schedule.program(world.stage, 0)
        self.coupling = coupling
        self.first_sample = 0  # of the portion, relative to this rank's own part of the batch
        self.chunks = [Chunk(part) for part in parts]
        self.gradients = gradients
        self.loader = loader
        self.device = world.device
        self.dtype = TORCH_DTYPE[plan.work.precision]
        self.stop_requested = stop_requested
        self.everyone = plan.mesh.joint(*AXES)
        self.counts_loss = plan.counts_loss(world.this_rank.rank)
        first, last = (plan.samples(world.this_rank.rank, number) for number in (0, plan.work.num_microbatches - 1))
        samples = torch.arange(first.start, last.stop, device=self.device)
        self.sample_ids = torch.split(samples, plan.work.microbatch_size)  # by micro-batch, the same in every step
        self.pipelined = plan.mesh.pp > 1
        self.messages = world.messages(self.dtype, message_shape(plan))
        self.watch = Stopwatch(self.device, WAIT_COLUMN)
        arms = {verb: getattr(self, f"_{verb}") for verb in Verb if verb not in OF_COUPLINGS}
        self.arms: dict[Verb, Callable[[Instruction], None]] = {**arms, **coupling.verbs}
        self.before_change: Callable[[], None] | None = None
        self.number = 0
        self.rate = 0.0
        self.portion = Portion([], 1, 1)
        self.bad_data: dict[int, tuple[str, ...]] = {}  # what is not finite in the samples of a step (from 1)
        self.batch: Batch | None = None  # of the last LOAD; the FORWARD that reads it is the next instruction
        self.loss_sum = torch.zeros((), dtype=wide_dtype(self.device), device=self.device)
        self.sums = torch.zeros(SCALARS + plan.objective_sums, dtype=self.loss_sum.dtype, device=self.device)
        self.objective_sums = torch.zeros(plan.objective_sums, dtype=self.loss_sum.dtype, device=self.device)
        self.pins, self.memory = offered(self.device).pins, MemoryWatch(self)
        columns = COLUMN if plan.world_size > 1 else ALONE
        self.instruments = Instruments(self.watch, self.memory, columns, world.stage)
        coupling.bind(self)

    def step(self, number: int, rate: float) -> StepResult:
        """Execute step `number` (from 0) with learning rate `rate`. Waits until the device has computed it."""
        return self.launch(number, rate).read()

    def launch(self, number: int, rate: float) -> Pending:
        """Execute step `number` (from 0), without waiting for the device."""
        self.number, self.rate = number, rate
        with self.memory.step(number):
            self.watch.start(COLUMN[Verb.LOAD])
            for item in self.coupling.work(number, rate):
                self.number, self.rate = item.step, item.rate
                self.program = self.plan.schedule.program(self.world.stage, item.listed)
                self._walk(number)
            self.world.at(number + 1)
            measured = {name: value for chunk in self.chunks for name, value in chunk.part.measured.items()}
            return Pending(self.coupling.result(number), self.watch.stop(), measured, pins=self.pins)

    def _walk(self, number: int) -> None:
        """Execute the instructions of a work item once, in step `number`."""
        self.loss_sum.zero_()
        self.objective_sums.zero_()
        self._read_portion()
        if self.pipelined:
            self.messages.begin(self.program, self.plan.work.microbatch_size)
        with closing(self.instruments.each(self.program, number)) as instructions:  # also after an error
            for instruction in instructions:
                self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        if instruction.verb in CHANGING:
            self.let_change()
        self.arms[instruction.verb](instruction)

    def let_change(self) -> None:
        """Whoever changes weights or the optimizer's state calls this first: another thread may still read them."""
        call, self.before_change = self.before_change, None
        if call is not None:
            call()

    def gradients_of(self, portion: Portion, number: int, first_sample: int) -> tuple[Sequence[torch.Tensor], float]:
        """Gradients of a part of step `number`, and its loss. The weights stay as they are.

        Args:
            portion: micro-batches of the size that this rank has, and no more of them.
            number: of the step, for dropout.
            first_sample: index of the first sample in the step, relative to this rank's own.
        """
        self.number, self.portion, self.first_sample = number, portion, first_sample
        self.loss_sum.zero_()
        last = len(portion.batches) - 1
        for at in self.plan.schedule.program(self.world.stage, number):
            if at.microbatch is not None and at.microbatch <= last:
                self.arms[at.verb](replace(at, last=at.microbatch == last and at.verb is Verb.BACKWARD))
        self.gradients.reduce()
        found = [gradient.clone() for gradient in self.gradients.collect()]
        self.gradients.release()
        return found, self.loss_sum.item()

    def _read_portion(self) -> None:
        """Read this rank's samples of the present work item."""
        with self.instruments.reading():
            found = self.coupling.read(self.loader)
            if found is not None:
                self.portion, self.first_sample = found
                self.note_data(self.number + 1, self.portion)

    def note_data(self, step: int, portion: Portion) -> None:
        """Note what is not finite in the samples of a portion."""
        if portion.not_finite:
            self.bad_data[step] = self.bad_data.get(step, ()) + portion.not_finite

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[Batch], torch.Tensor]]:
        """Switch the chunks to evaluation mode; yield a function that takes a batch and returns the sum of its losses.

        The sum is 0 on stages without the head. Every stage must call the function for the same batches. Of samples
        whose references are not known it returns what these are made of: see `Part.compare`.
        """
        training = [chunk.part.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.part.train(False)
        try:
            with torch.no_grad():
                yield self._evaluate
            self.messages.end()
        finally:
            self.messages.forget()
            for chunk, mode in zip(self.chunks, training, strict=True):
                chunk.part.train(mode)

    def _evaluate(self, batch: Batch) -> torch.Tensor:
        batch = batch.to(self.device, self.dtype)
        stage, degree = self.world.stage, self.plan.mesh.pp
        loss = torch.zeros((), dtype=self.loss_sum.dtype, device=self.device)
        receives = [
            Instruction(Verb.RECEIVE_ACTIVATION, 0, chunk=number, peer=(stage - 1) % degree)
            for number, chunk in enumerate(self.chunks)
            if not chunk.part.embeds
        ]
        self.messages.begin(receives, len(batch.inputs))
        for number, chunk in enumerate(self.chunks):
            inputs = batch.inputs if chunk.part.embeds else self.messages.receive(receives.pop(0)).wait()
            if chunk.part.ends:
                loss = chunk.part(inputs, batch.targets, **batch.extras).to(loss.dtype)
            else:
                to = Instruction(Verb.SEND_ACTIVATION, 0, chunk=number, peer=(stage + 1) % degree)
                self.messages.send(to, chunk.part(inputs, **batch.extras))
        return loss

    def sum_of_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """Sum `loss` over all ranks, in place. Among ranks that have computed the same loss, only one is counted."""
        if not self.counts_loss:
            loss.zero_()
        return self.world.sum_over(loss, self.everyone)

    def close(self) -> None:
        """Drop the references to process groups."""
        self.gradients.close()
        self.messages.close()
        self.coupling.close()

    def _operands(self, instruction: Instruction) -> tuple[Chunk, InFlight]:
        """The chunk and the micro-batch that an instruction names."""
        assert instruction.microbatch is not None
        chunk = self.chunks[instruction.chunk]
        return chunk, chunk.in_flight[instruction.microbatch]

    def _wait(self, instruction: Instruction) -> None:
        """Wait for the message that a computation reads, if it reads one. The rest of its time is computation."""
        _, one = self._operands(instruction)
        if one.message is None:
            return
        with named(WAITING):
            received, one.message = one.message.wait(), None
            self.watch.lap(WAIT_COLUMN)
        if instruction.verb is Verb.FORWARD:
            one.inputs = received
        else:
            one.output_gradient = received

    def _load(self, instruction: Instruction) -> None:
        assert instruction.microbatch is not None
        self.batch = self.portion.batches[instruction.microbatch].to(self.device, self.dtype)

    def _forward(self, instruction: Instruction) -> None:
        self._wait(instruction)
        chunk, one = self._operands(instruction)
        assert instruction.microbatch is not None
        samples = self.sample_ids[instruction.microbatch]
        samples = samples + self.first_sample if self.first_sample else samples
        one.adapter_keys = chunk.part.set_dropout_context(self.plan.seed, self.number, samples)
        batch = self.batch
        inputs = batch.inputs if chunk.part.embeds and batch is not None else one.inputs
        assert inputs is not None
        if inputs is one.inputs:
            inputs.requires_grad_()
        extras = batch.extras if batch is not None and self.plan.task.extras else {}
        scale = 1.0 / max(1, self.coupling.divisor())
        if chunk.part.ends:
            assert batch is not None
            one.outputs = chunk.part(inputs, batch.targets, loss_scale=scale, **extras)
            self.loss_sum += one.outputs.detach()
            if chunk.part.objective_sums is not None:
                self.objective_sums += chunk.part.objective_sums.flatten()
        else:
            one.outputs = chunk.part(inputs, loss_scale=scale, **extras)

    def _backward(self, instruction: Instruction) -> None:
        self._wait(instruction)
        chunk, one = self._operands(instruction)
        self.gradients.before_backward(last=instruction.last, chunk=instruction.chunk, step=self.number)
        chunk.backward(one)

    def _backward_input(self, instruction: Instruction) -> None:
        self._wait(instruction)
        chunk, one = self._operands(instruction)
        chunk.backward_input(one)

    def _backward_weight(self, instruction: Instruction) -> None:
        chunk, one = self._operands(instruction)
        self.gradients.before_backward(last=instruction.last, chunk=instruction.chunk, step=self.number)
        chunk.backward_weight(one)

    def _send_activation(self, instruction: Instruction) -> None:
        _, one = self._operands(instruction)
        assert one.outputs is not None
        self.messages.send(instruction, one.outputs)

    def _send_gradient(self, instruction: Instruction) -> None:
        _, one = self._operands(instruction)
        assert one.input_gradient is not None
        self.messages.send(instruction, one.input_gradient)
        one.input_gradient = None

    def _receive_activation(self, instruction: Instruction) -> None:
        _, one = self._operands(instruction)
        one.message = self.messages.receive(instruction)

    _receive_gradient = _receive_activation

    def _reduce(self, instruction: Instruction) -> None:
        if self.pipelined:
            self.messages.end()
        self.gradients.reduce()
        if instruction.axis:
            self.coupling.sum_gradients(self.gradients.collect())

    def _step(self, instruction: Instruction) -> None:
        self.sums = self.coupling.optimizer.step(self.gradients.collect(), self.rate, self.coupling.agree)
        self.gradients.release()
        for call in self.updated:
            call(self.number + 1)
        self.coupling.stepped()

    def own(self) -> torch.Tensor:
        """This rank's loss, if it is counted, whether it was asked to stop, and its measures, if they are counted."""
        stop = torch.full_like(self.loss_sum, float(self.stop_requested()))
        own = torch.cat((self.loss_sum[None], stop[None], self.objective_sums))
        if not self.counts_loss:
            own[0], own[2:] = 0.0, 0.0
        return own
