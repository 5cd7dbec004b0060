"""In: a job's JSON file, a rank's environment. Out: a file with the begin and end of each instruction of each step.
Does not evaluate the times, and does not change the run, except that the job may replace arithmetic by sleeps."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from measure import ROOT

sys.path.insert(0, str(ROOT))

from codescent.base.progress import ENDED
from codescent.base.stopwatch import Laps as StepLaps
from codescent.base.stopwatch import Stopwatch
from codescent.build import build
from codescent.config.sections import Config
from codescent.data.text.dataset import Dataset, open_dataset
from codescent.launch.environment import read
from codescent.models.gpt2.module import GPT2
from codescent.plan import Instruction
from codescent.train.assemble import assemble
from codescent.train.execute import Executor
from codescent.train.result import COLUMN, WAIT_COLUMN
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer
from codescent.train.world import World

LEARNING_RATE = 6e-4
PREFETCH = 2
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Job:
    """The job of all ranks.

    `cases` has pairs of schedule and number of micro-batches. `forward_s` is the sleep that replaces a stage's forward
    pass, and half of that for its backward pass; 0: ranks compute.
    """

    ranks: int
    chunks: int
    cases: tuple[tuple[str, int], ...]
    forward_s: float
    rounds: int
    precision: str
    num_layers: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    seq_len: int
    microbatch_size: int
    tokens: str

    def chunks_of(self, schedule: str) -> int:
        """Virtual stages per rank."""
        return self.chunks if schedule == "interleaved" else 1

    def text(self) -> str:
        """The job as JSON, for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        """Inverse of `text`."""
        fields = json.loads(text)
        return cls(**{**fields, "cases": tuple((name, count) for name, count in fields["cases"])})


def config_of(job: Job, schedule: str, num_microbatches: int) -> Config:
    """The config of a run with that schedule; all other keys have their defaults."""
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": job.num_layers, "num_heads": job.num_heads, "hidden_dim": job.hidden_dim,
            "vocab_size": job.vocab_size, "seq_len": job.seq_len,
        },
        "data": {"corpus": job.tokens, "prefetch": PREFETCH},
        "train": {
            "global_batch_size": num_microbatches * job.microbatch_size, "microbatch_size": job.microbatch_size,
            "precision": job.precision,
        },
        "parallel": {"pp": job.ranks, "schedule": schedule, "virtual_stages": job.chunks_of(schedule)},
    }  # fmt: skip
    return Config(**cast(Any, sections))


class Waiting:
    """Replaces a chunk of the model. It has the chunk's weights and message shapes, but sleeps instead of computing.

    The core is free during a sleep, as if a device computed. Gradients are zeros, which are summed and used for the
    update as usual.

    Args:
        part: the chunk that is replaced.
        forward_s: seconds of the sleep in a forward pass, and in each half of a backward pass.
    """

    def __init__(self, part: GPT2, forward_s: float) -> None:
        self.part, self.forward_s = part, forward_s
        self.embeds, self.ends, self.deferred, self.training = part.embeds, part.ends, part.deferred, part.training
        self.tables = part.tables
        self.zeros = [torch.zeros_like(weight) for weight in part.parameters()]

    def train(self, mode: bool = True) -> object:
        """See `Part`."""
        self.training = mode
        return self

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: torch.Tensor) -> None:
        """See `Part`."""
        self.part.set_dropout_context(seed, step, sample_ids_B)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """See `Part`."""
        return self.part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """See `Part`."""
        return self.part.named_parameters()

    def __call__(
        self, inputs: torch.Tensor, targets_BT: torch.Tensor | None = None, *, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Return a loss of zero, or activations of zero."""
        outputs: torch.Tensor = Wait.apply(inputs, self, *self.parameters())  # type: ignore[no-untyped-call]
        return outputs

    def gradient(self, index: int) -> torch.Tensor:
        """The deferred gradient of a weight. The first one of a chunk sleeps for the whole second half of backward."""
        if index == 0:
            time.sleep(self.forward_s)
        return self.zeros[index]


class Wait(torch.autograd.Function):
    """See `Waiting`."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, part: Waiting, *weights: torch.nn.Parameter) -> torch.Tensor:
        """Sleep once."""
        ctx.part = part
        ctx.save_for_backward(inputs)
        time.sleep(part.forward_s)
        if part.ends:
            return weights[0].new_zeros(())
        return weights[0].new_zeros(*inputs.shape[:2], part.part.shape.hidden_dim)

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> Any:
        """Sleep twice; with deferred weight gradients once, and once later in `Waiting.gradient`."""
        part, (inputs,) = ctx.part, ctx.saved_tensors
        d_inputs = None if part.embeds else torch.zeros_like(inputs)
        if part.deferred is None:
            time.sleep(2 * part.forward_s)
            return d_inputs, None, *part.zeros
        time.sleep(part.forward_s)
        gradients = (partial(part.gradient, index=index) for index, _ in enumerate(part.zeros))
        part.deferred += [*zip(part.parameters(), gradients, strict=True)]
        return d_inputs, None, *[None for _ in part.zeros]


class Laps(Stopwatch):
    """The executor's stopwatch, which also records the end of each lap, and the micro-batches times chunks in memory.

    A micro-batch is in memory if it has an autograd graph or deferred weight gradients.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor.device, WAIT_COLUMN)
        self.chunks = executor.chunks
        self.begin_s = 0.0
        self.held: list[int] = []
        self.spans: list[tuple[str, float, float, int]] = []

    def lap(self, part: str) -> None:
        """See Stopwatch."""
        if not self.laps:
            self.begin_s, self.held = time.perf_counter(), []
        else:
            flying = (one for chunk in self.chunks for one in chunk.in_flight.values())
            self.held.append(sum(one.outputs is not None or one.deferred is not None for one in flying))
        super().lap(part)

    def pause(self) -> None:
        """See Stopwatch. A lap is a whole instruction here."""

    def go_on(self) -> None:
        """See Stopwatch."""

    def stop(self) -> StepLaps:
        """See Stopwatch. Waits for the device. Sets `spans` to all laps: (part, begin, end, held)."""
        if self.events:
            torch.cuda.synchronize()
        first: Any = self.laps[0][1]
        marks: list[tuple[str, Any]] = list(self.laps)
        ends_s = [self.begin_s + (first.elapsed_time(at) / 1e3 if self.events else at - first) for _, at in marks]
        self.spans = [
            (part, begin_s, end_s, held)
            for (part, _), begin_s, end_s, held in zip(marks[1:], ends_s[:-1], ends_s[1:], self.held, strict=True)
        ]
        return super().stop()


class Case:
    """A trainer of one schedule, and its laps."""

    def __init__(self, job: Job, case: tuple[str, int], world: World, dataset: Dataset, stop: StopRequest) -> None:
        config = config_of(job, *case)
        plan = build(config, dataset.vocab_size, job.ranks)
        world.divide(plan)
        self.trainer: Trainer = assemble(config, plan, world, dataset, 0, stop)
        executor = self.trainer.executor
        self.program: Sequence[Instruction] = executor.program
        if job.forward_s:
            for chunk, part in zip(executor.chunks, self.trainer.parts, strict=True):
                chunk.part = cast(Any, Waiting(cast(GPT2, part), job.forward_s / len(executor.chunks)))
        self.laps = executor.watch = executor.instruments.watch = Laps(executor)

    def step(self, number: int) -> list[dict[str, Any]]:
        """Take one step. Returns for each instruction its begin and end, and how long it waited for a message before.

        Times are of the clock that all ranks of this machine share.
        """
        self.trainer.executor.step(number, LEARNING_RATE)
        laps, spans = iter(self.laps.spans), []
        for at in self.program:
            part, begin_s, end_s, held = next(laps)
            wait_s = 0.0
            if part != COLUMN[at.verb]:
                wait_s = end_s - begin_s
                part, begin_s, end_s, held = next(laps)
            assert part == COLUMN[at.verb]
            place = {"verb": str(at.verb), "microbatch": at.microbatch, "chunk": at.chunk}
            spans.append({**place, "wait_s": wait_s, "begin_s": begin_s, "end_s": end_s, "held": held})
        return spans


def main() -> None:
    """Build a trainer for each case, then let them take turns. The first round is a warm-up and is not written."""
    path = Path(sys.argv[1])
    job, this_rank = Job.parse(path.read_text(encoding="utf-8")), read(os.environ)
    assert this_rank is not None, "a rank needs a launcher: pipeline.py starts it"
    on_devices = not job.forward_s and torch.cuda.device_count() >= this_rank.local_world_size
    threads = 1 if job.forward_s else None
    world = World(this_rank, "cuda" if on_devices else "cpu", threads, TIMEOUT_S)
    dataset = open_dataset(Path(job.tokens))
    steps: list[dict[str, Any]] = []
    with StopRequest(alone=False) as stop:
        cases = [Case(job, case, world, dataset, stop) for case in job.cases]
        for number in range(job.rounds + 1):
            for (schedule, num_microbatches), case in zip(job.cases, cases, strict=True):
                world.all_agree(True)  # a barrier: all ranks begin together
                spans = case.step(number)
                if number:
                    steps.append({"schedule": schedule, "num_microbatches": num_microbatches, "spans": spans})
        for case in cases:
            case.trainer.close()
    path.with_name(f"rank-{this_rank.rank}.json").write_text(json.dumps(steps), encoding="utf-8")
    cases.clear()
    world.at(ENDED)
    world.close()


if __name__ == "__main__":
    main()
