"""In: a config, this rank's place. Out: a run folder with a trained model: the steps in the order in which they happen.
Does not know how a step is done (execute), or what a strategy, a model or a checkpoint file is."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.checkpoint.checkpoints import Checkpoints, Saved
from codescent.config.load import to_toml
from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.datasets import opened, prepare_dataset, prepared_with
from codescent.huggingface.folder import open_folder
from codescent.models.lora.declare import is_adapter
from codescent.plan import Plan
from codescent.preflight import chat_of, check_same_chat, check_same_trajectory, check_weights, plan_with, run_folder
from codescent.record import RunFolder
from codescent.tasks.conversations.chat_files import ChatFiles
from codescent.train import machine
from codescent.train.assemble import Trainer, assemble
from codescent.train.board import Board
from codescent.train.display import Display
from codescent.train.execute import StepResult
from codescent.train.optimize import learning_rate
from codescent.train.stop import StopRequest
from codescent.train.validate import validation_loss
from codescent.train.world import World

SKIPS_ALLOWED = 10
"""Steps in a row whose gradients are not finite, each skipped by all ranks, before the run gives up."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its folder, the steps done, and the exit code (0, or 128 + the signal that stopped it)."""

    folder: Path
    step: int
    exit_code: int


def train(config: Config, place: Rank, flops_of: Callable[[Plan], float], *, resume: bool) -> Outcome:
    """Train, as one of the ranks of `place`.

    Args:
        config: the resolved config.
        place: where this process stands among the ranks.
        flops_of: FLOPs of one step of a plan, for flops_per_s and mfu: what a step costs is not known on this floor.
        resume: continue the run of that name.

    Raises:
        UserError: on every rank, before the first step: whatever stands in the way; later: a full disk, a loss that
            is not finite any more.
    """
    world = World(place, config.train.device, config.train.num_threads, config.parallel.timeout_s)
    try:
        chat = _chat(config, world, resume=resume)
        world.in_turn(lambda: prepare_dataset(config, progress=world.is_first, chat=chat))
        dataset = opened(config, prepare_dataset(config, progress=False, chat=chat))
        check_alike(dataset, world)
        plan = plan_with(config, dataset, place.world_size)
        check_weights(config, dataset, resume=resume)
        world.from_first(lambda: machine.refuse_device(plan, world.device))
        world.divide(plan)
        world.from_first(lambda: machine.refuse_too_large(plan, world.device, place.local_world_size))
        with StopRequest(alone=place.world_size == 1) as stop:
            return _Run(config, plan, world, dataset, stop, flops_of(plan), resume=resume).run()
    finally:
        world.close()


def _chat(config: Config, world: World, *, resume: bool) -> ChatFiles | None:
    """The chat template as rank 0 reads it: the ranks must not disagree on it, nor on what day it is."""

    def read() -> dict[str, Any] | None:
        files = chat_of(config, resume=resume)
        return None if files is None else dataclasses.asdict(files)

    found = world.from_first(read)
    return None if found is None else ChatFiles(**found)


def check_alike(dataset: AnyDataset, world: World) -> None:
    """Refuse, on every rank, to train where nodes with disks of their own have other samples."""
    first: str = world.from_first(lambda: dataset.fingerprint)

    def compare() -> None:
        if dataset.fingerprint != first:
            raise UserError(
                f"rank {world.place.rank}: {dataset.path} holds other samples than rank 0's ({dataset.fingerprint}, "
                f"there {first}); give every node the same corpus and tokenizer"
            )

    together(UserError, compare)


def _as_json(saved: Saved | None) -> dict[str, Any] | None:
    return None if saved is None else {**dataclasses.asdict(saved), "path": str(saved.path)}


class _Run:
    """One rank's run, from opening the folder to the last checkpoint."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        world: World,
        dataset: AnyDataset,
        stop: StopRequest,
        flops: float,
        *,
        resume: bool,
    ) -> None:
        self.config, self.plan, self.world, self.dataset, self.stop = config, plan, world, dataset, stop
        self.path = run_folder(config)
        self.flops = flops
        self.skipped = 0
        self.folder: RunFolder | None = None
        opened: dict[str, Any] = world.from_first(lambda: self._open(resume))
        self.machine = self._choose(opened["environment"])
        self.resume = resume
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
        )
        self.saved = self._latest() if resume else None
        self.base = self._base()
        if self.saved is not None:
            self._check_data(self.saved.state)
        self.first_step = self.saved.step if self.saved else 0
        self.trainer: Trainer = assemble(config, plan, world, dataset, self.first_step, stop)
        self.display = Display(shown=world.is_first, num_steps=config.train.num_steps, first_step=self.first_step)
        self.board = Board(self.path, self.first_step, wanted=config.log.tensorboard and world.is_first)

    def _open(self, resume: bool) -> dict[str, Any]:
        """Rank 0: make the run folder, or open it and see that it is this run's. Returns what its machine chose."""
        if not resume:
            self.folder = RunFolder.create(self.path, to_toml(self.config), self.plan.to_json())
            self.folder.hold()
            return {"environment": {}}
        self.folder = RunFolder.open(self.path)
        self.folder.hold()
        check_same_trajectory(self.folder, self.config, self.plan)
        check_same_chat(self.folder, self.dataset)
        return {"environment": self.folder.read_environment()}

    def _latest(self) -> Saved | None:
        """The newest complete checkpoint as rank 0 sees it: the ranks must not disagree on where to go on."""
        found = self.world.from_first(lambda: _as_json(self.checkpoints.latest()))
        return None if found is None else Saved(**{**found, "path": Path(found["path"])})

    def _base(self) -> dict[str, Any] | None:
        """Which weights are not trained, and so not in a checkpoint, as the checkpoint knows them if they are the same;
        None: there are none, or they are drawn."""
        source, before = self.config.model.weights, self.saved.state.get("base") if self.saved else None
        if self.config.lora.rank is None or source is None:
            return None

        def look() -> dict[str, Any]:
            folder = open_folder(source)
            return folder.identity() if before is None or not folder.is_as(before) else dict(before)

        found: dict[str, Any] = self.world.from_first(look)
        return found

    def _choose(self, before: dict[str, Any]) -> dict[str, Any]:
        """The machine as it is and the levers used on it; a resumed run keeps the kernels that it began with."""
        device, precision, wanted = self.world.device, self.config.train.precision, self.config.train.matmul
        here = machine.describe(device, self.world.num_threads, self.world.place.world_size)
        kept = self.world.from_first(lambda: machine.recorded_matmul(before, here) if wanted == "auto" else None)
        chosen = {"choice": kept, "trial": "as at the beginning"} if kept else machine.try_matmul(wanted, device)
        if not self.world.all_wish(chosen["choice"] == "fast"):
            chosen["choice"] = "exact"
        machine.use_matmul(chosen["choice"])
        machine.set_deterministic(self.config.train.deterministic)
        peak = machine.peak_flops_per_s(device, precision)
        return here | {
            "matmul": chosen,
            "levers": machine.levers(self.config.train, self.config.optimizer),
            "peak_flops_per_s": peak,
            "warning": machine.slow_bf16(device, precision, peak),
            "dataset": self.dataset.description,
        }

    def run(self) -> Outcome:
        """All the steps that are left."""
        with self.display:
            try:
                self._begin()
                step = self.first_step
                while step < self.config.train.num_steps:
                    stopped = self._one_step(step)
                    step += 1
                    if stopped:
                        return self._stopped(step)
                return self._ended(step)
            finally:
                self.trainer.close()
                self.board.close()
                if self.folder is not None:
                    self.folder.release()

    def _begin(self) -> None:
        if self.folder is not None:
            self.folder.write_environment(self.machine)
            if self.dataset.tokenizer_text is not None:
                self.folder.write_tokenizer(self.dataset.tokenizer_text)
            if (chat := prepared_with(self.dataset)) is not None:
                self.folder.write_chat(chat.kept())
        if self.plan.work.synthetic:
            self._event("synthetic_data", **self.dataset.description)
            self.display.say("synthetic data: random numbers, to measure with; the loss says nothing")
        if self.machine["warning"]:
            self.display.say(f"warning: {self.machine['warning']}")
        if self.world.is_first:
            for left in self.checkpoints.incomplete():
                self.display.say(f"found {left}, a checkpoint that was not finished: removed")
                self._event("incomplete_checkpoint", path=str(left))
            self.checkpoints.clean()
        if self.saved is not None:
            self.checkpoints.load(self.saved, self.trainer.optimizer.tensors())
            self.trainer.optimizer.loaded()
        if self.resume:
            self._rejoin()
        else:
            self._start()

    def _start(self) -> None:
        """Say from which weights a new run begins."""
        source = self.config.model.weights
        if source is None or self.folder is None:
            self._event("start", step=0)
            if source is None and self.config.lora.rank is not None:
                self.display.say("no model.weights: adapters are trained beside weights that are drawn, and stay so")
            return
        weights = open_folder(source)
        held = [tensor.parameter for tensor in self.plan.tensors]
        adapters = sum(is_adapter(parameter) for parameter in held)
        own = [parameter for parameter in held if not is_adapter(parameter)]
        drawn = [parameter.name for parameter in own if not weights.has(parameter)]
        fingerprint = weights.fingerprint() if self.base is None else self.base["fingerprint"]
        found = {"folder": str(source), "fingerprint": fingerprint, "drawn": drawn}
        self._event("start", step=0, weights=found)
        beside = f"; {adapters} of adapters are new" if adapters else ""
        rest = f"; drawn, since it has none: {', '.join(drawn)}" if drawn else ""
        self.display.say(f"weights of {len(own) - len(drawn)} parameters read from {source}{beside}{rest}")

    def _rejoin(self) -> None:
        """Bring the run folder back to the step from which the run goes on."""
        if self.folder is not None:
            self.folder.rewind(self.first_step)
            self.folder.write_config(to_toml(self.config), self.plan.to_json())
        where = f"{self.saved.path} at" if self.saved is not None else "the beginning, there being no checkpoint yet:"
        self._event("resume", step=self.first_step)
        self.display.say(f"resumed from {where} step {self.first_step}")

    def _check_data(self, state: dict[str, Any]) -> None:
        if "imported" in state:
            raise UserError(
                f"{self.path}: was imported, and no step has been made in it: there is nothing to resume; begin a run "
                f"with its weights: codescent train {self.path}/config.toml run.folder=NEW"
            )
        if state.get("base") != self.base:
            raise UserError(
                f"model.weights = {self.config.model.weights}: not the weights beside which the adapters of "
                f"{self.path} were trained"
            )
        if state["dataset"] != self.dataset.fingerprint:
            raise UserError(
                f"{self.dataset.path}: not the tokens that the run in {self.path} was trained on "
                f"({state['dataset']}, here {self.dataset.fingerprint}); the order of samples would be another"
            )

    def _one_step(self, number: int) -> bool:
        """Step `number` (from 0) and what belongs to it. Returns whether the ranks have agreed to stop."""
        config = self.config
        rate = learning_rate(config.optimizer, config.train.num_steps, self.plan.mesh.dp, number)
        begin = time.perf_counter()
        result = self.trainer.executor.step(number, rate)
        step_s = time.perf_counter() - begin
        step = number + 1
        last = step == config.train.num_steps
        self._check_finite(step, result)
        due = config.train.eval_every and (last or step % config.train.eval_every == 0)
        if result.stop:  # a scheduler's patience is short: save first
            self._save(step, None)
        val_loss = self._validate() if due else None
        self._record(step, rate, result, step_s, val_loss)
        every = config.checkpoint.every
        if not result.stop and (last or (every and step % every == 0)):
            self._save(step, val_loss)
        return result.stop and not last

    def _check_finite(self, step: int, result: StepResult) -> None:
        if math.isfinite(result.grad_norm):
            self.skipped = 0
            return
        self.skipped += 1
        self._event("skipped_step", step=step, train_loss=result.train_loss, grad_norm=result.grad_norm)
        self.display.say(
            f"step {step}: gradients are not finite (loss {result.train_loss}); weights are left as they were"
        )
        if self.skipped >= SKIPS_ALLOWED:
            raise UserError(
                f"{self.path}: the gradients of {SKIPS_ALLOWED} steps in a row were not finite; lower "
                "optimizer.learning_rate, lengthen optimizer.warmup_steps, or set optimizer.max_grad_norm"
            )

    def _validate(self) -> float:
        work = self.plan.work
        source = self.dataset.source("validation", work.seq_len, work.positions(-1))
        return validation_loss(self.trainer.executor, source, self.config.train.eval_samples)

    def _record(self, step: int, rate: float, result: StepResult, step_s: float, val_loss: float | None) -> None:
        if self.folder is None:
            return
        tokens = self.plan.work.tokens
        peak = self.machine["peak_flops_per_s"] * self.world.place.world_size * self.plan.devices
        row = {
            "step": step,
            "train_loss": result.train_loss,
            "val_loss": val_loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "tokens": step * tokens,
            "tokens_per_s": tokens / step_s,
            "flops_per_s": self.flops / step_s,
            "mfu": self.flops / step_s / peak,
            "step_s": step_s,
            **result.seconds,
            "peak_memory_bytes": machine.peak_memory_bytes(self.world.device),
        }
        self.folder.metrics(row)
        due = step % self.config.log.every == 0 or step == self.config.train.num_steps
        if due or val_loss is not None:
            self.board.write(row)
        self.display.step(step, result.train_loss, tokens / step_s, due=due)
        if val_loss is not None:
            self.display.validation(step, val_loss)

    def _save(self, step: int, val_loss: float | None) -> None:
        state = {"step": step, "tokens": step * self.plan.work.tokens, "dataset": self.dataset.fingerprint}
        if self.base is not None:
            state["base"] = self.base
        begin = time.perf_counter()
        path = self.checkpoints.save(step, self.trainer.optimizer.tensors(), state, val_loss)
        self._event("checkpoint", step=step, path=str(path), seconds=time.perf_counter() - begin)

    def _stopped(self, step: int) -> Outcome:
        self._event("stop", step=step, exit_code=self.stop.exit_code)
        self.display.say(f"stopped at step {step}; saved in {self.checkpoints.folder}; continue with --resume")
        return Outcome(self.path, step, self.stop.exit_code)

    def _ended(self, step: int) -> Outcome:
        self._event("end", step=step)
        if step == self.first_step:
            self.display.say(f"{self.path} has all its {step} steps already; raise train.num_steps to go on")
        return Outcome(self.path, step, 0)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.folder is not None:
            self.folder.event(kind, **fields)
