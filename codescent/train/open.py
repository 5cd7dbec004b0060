"""In: a config, this rank's process groups. Out: the open run: its plan, dataset, run folder and newest checkpoint.
Does not take a step. It makes the last checks before the first step; every rank raises the same error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent import tasks
from codescent.base.agreement import together
from codescent.base.ending import end_now
from codescent.base.errors import RunFailed, UserError
from codescent.base.output import copy_to, warn
from codescent.base.progress import OwnPage
from codescent.base.rank import Rank
from codescent.build import Began, check_own_names, check_sizes, saved_plan, task_request
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, Saved
from codescent.config.decided import compiles, with_device
from codescent.config.effects import effective
from codescent.config.hub_keys import hub_key
from codescent.config.load import flat, to_toml
from codescent.config.own_keys import changed_code, code_facts, own_code
from codescent.config.sections import Config
from codescent.data.order import Ahead
from codescent.data.samples import AnyDataset, Source
from codescent.huggingface.merged import open_weights
from codescent.plan import Plan
from codescent.preflight import (
    check_same_files,
    check_same_trajectory,
    check_weights,
    ended_at,
    imported,
    obtain_named,
    pin,
    plan_with,
    refuse_moved,
    ruined_step,
    run_folder,
)
from codescent.record import CHECKPOINTS, RunFolder
from codescent.record.run_folder import LOGS
from codescent.train import machine
from codescent.train.choices import choose
from codescent.train.hang_up import meets_again
from codescent.train.holding import in_memory
from codescent.train.layout import laid_out
from codescent.train.newest import newest
from codescent.train.rolled_back import ROLLBACK, ahead_of, is_of_before
from codescent.train.same_tokens import check_same_tokens
from codescent.train.starts import is_started_again
from codescent.train.verification import verify_again
from codescent.train.world import World
from codescent.train.written import is_written

if TYPE_CHECKING:
    import torch

    from codescent.checkpoint.box import Box
    from codescent.train.trainer import Trainer

OF_A_MACHINE = ("data.corpus", "data.validation", "data.folder")
"""Keys whose values may differ between machines. The samples are compared instead."""


@dataclass
class OpenRun:
    """A run, open on one rank.

    Attributes:
        config: of this command.
        plan: of this command.
        dataset: the training and validation data.
        world: this rank's device and process groups.
        path: of the run folder.
        folder: writes the run folder; None except on rank 0.
        machine: the content of environment.json: the machine, and the settings chosen for it.
        checkpoints: of the run.
        saved: the checkpoint to resume from, on the disk or in memory; None: the run starts at step 0.
        base: identifies the frozen weights under adapters; None: no adapters, or random frozen weights.
        resumes: whether the command resumes a run.
        changes: keys of the update that a resumed, failed run changes: {key: [old value, new value]}.
        ended: the last step of an earlier command that took all its steps or ended early; None: there is none.
        ahead: batches that rollbacks have left out.
        remembered: what a generation keeps in the state of a checkpoint, as JSON data.
    """

    config: Config
    plan: Plan
    dataset: AnyDataset
    world: World
    path: Path
    folder: RunFolder | None
    machine: dict[str, Any]
    checkpoints: Checkpoints
    saved: Saved | None
    base: dict[str, Any] | None
    resumes: bool
    changes: dict[str, list[Any]]
    ended: int | None
    ahead: Ahead = ()
    remembered: Callable[[], dict[str, Any]] = dict

    @property
    def first_step(self) -> int:
        """The number of finished steps. It is also the number (from 0) of the next step."""
        return self.saved.step if self.saved else 0

    def source(self, split: str) -> Source:
        """The samples of a split."""
        work = self.plan.work
        return self.dataset.source(split, work.seq_len, work.positions(-1))

    def load(self, trainer: Trainer) -> None:
        """Load weights and optimizer state from the checkpoint, if there is one."""
        if self.saved is None:
            return
        self.saved.load_into(trainer.tensors(), self.checkpoints)
        trainer.optimizer.loaded()

    def save(self, step: int, tensors: Mapping[str, torch.Tensor | Box], val_loss: float | None) -> Path:
        """Save a checkpoint. Collective. Older checkpoints stay until rank 0 calls `checkpoints.rotate`.

        If the run folder is renamed during the save, the checkpoint is saved again at the new path.

        Raises:
            UserError: on every rank: the run folder was removed, or the disk is full.
        """
        self.all_follow()
        while True:
            tried = self.path
            try:
                return self.checkpoints.save(step, tensors, self.state(step), val_loss, rotates=False)
            except CheckpointError:
                if not self.was_renamed(tried):
                    raise

    def state(self, step: int) -> dict[str, Any]:
        """The JSON data of the checkpoint of a step."""
        state = {"step": step, "tokens": step * self.plan.work.tokens, "dataset": self.dataset.fingerprint}
        state |= {} if self.base is None else {"base": self.base}
        state |= {"ahead": self.ahead[-1][1]} if self.ahead else {}
        return {**state, **self.remembered()}

    def was_renamed(self, tried: Path) -> bool:
        """Whether a save has failed because the run folder was renamed. What it has written is deleted. Collective.

        `tried`: the path of the run folder when the save began, the same on every rank. Rank 0 may know the new one.
        """
        self.all_follow()
        if self.path != tried and self.world.is_first:  # it is incomplete, and in the new place
            self.checkpoints.clean()
        return self.path != tried

    def all_follow(self) -> None:
        """Every rank gets the present path of the run folder. Collective. Raises UserError: the folder was removed."""
        self.path = Path(self.world.from_first(lambda: str(self.follow())))
        self.checkpoints.folder = self.path / CHECKPOINTS

    def follow(self) -> Path:
        """The present path of the run folder, on the rank that holds it; elsewhere the last one known.

        Raises:
            UserError: the run folder was removed.
        """
        return self.folder.follow() if self.folder else self.path

    def close(self) -> None:
        """Release the lock on the run folder, so that other processes can write it. Delete it if no run has begun."""
        close_folder(self.folder, is_new=not self.resumes)


def connect(config: Config, this_rank: Rank) -> World:
    """Connect this process with the other ranks. Raises UserError: see `World`; a name of the user's code is wrong."""
    train = config.train
    named = flat(config)
    facts = {key: value for key, value in named.items() if hub_key(key) not in OF_A_MACHINE} | code_facts(config)
    restarts = config.parallel.restarts > 0
    parallel = config.parallel
    return World(
        this_rank,
        train.device,
        train.num_threads,
        parallel.timeout_s,
        facts,
        restarts=restarts,
        meet_s=parallel.meet_s,
        listen=parallel.listen,
        stopped_s=parallel.stopped_s,
    )


def open_resumed(config: Config, world: World) -> RunFolder | None:
    """The folder of the run to resume, on rank 0; None on the others. Raises UserError on every rank: there is none."""
    opened: list[RunFolder] = []
    world.from_first(lambda: opened.append(RunFolder.open(run_folder(config))))
    return opened[0] if opened else None


def open_data(
    config: Config, world: World, folder: RunFolder | None, *, resume: bool
) -> tuple[Config, Plan, AnyDataset, list[str]]:
    """Prepare and verify the dataset on one rank of each machine, open it, build the plan, create its process groups.

    Args:
        config: of this command.
        world: this rank's device and process groups.
        folder: on rank 0 the folder of the run to resume or to replay.
        resume: whether the command resumes a run.

    Returns:
        The config and the plan of `preflight.plan_with`; the dataset; a note on a layout that was chosen.

    Raises:
        UserError: on every rank: the data cannot be used, or what is named of a hub cannot be downloaded; ranks have
            different data or plans; or this machine lacks devices or memory.
    """
    world.in_turn(lambda: obtain_named(config, resume=resume), "hub")
    if resume:
        world.from_first(lambda: refuse_moved(config))
    world.from_first(lambda: check_own_names(config))
    request = task_request(config)
    if not resume:
        world.from_first(lambda: check_sizes(config, world.this_rank.world_size))
    # Rank 0 reads the date and files outside of the corpus (a chat template), and sends them to every rank.
    pinned = world.from_first(lambda: pin(request, folder))
    request = dataclasses.replace(request, pinned=pinned)
    world.in_turn(lambda: tasks.prepare_and_open(request, progress=world.is_first))
    dataset = tasks.prepare_and_open(request, progress=False)
    check_alike(dataset, world)
    began = world.from_first(lambda: None if folder is None else dataclasses.asdict(Began.of(saved_plan(folder))))
    began_so = None if began is None else Began(**began)
    of_device, said = laid_out(with_device(config, world.device.type), dataset, world, folder)
    if resume:
        said += world.from_first(lambda: _changed_code(config, folder))
    settled, plan = plan_with(of_device, dataset, world.this_rank.world_size, began_so)
    config = with_device(settled, config.train.device)
    world.refuse_differences(_plan_facts(plan))
    check_weights(plan, dataset, resume=resume)
    verify, num_steps = request.data.verify, config.train.num_steps

    def opened() -> AnyDataset:
        return tasks.prepare_and_open(request, progress=world.is_first)

    verify_again(verify, plan, num_steps, dataset, world, opened)
    asked = {"deterministic": config.train.deterministic, "profiles": config.profile.active > 0}
    world.from_first(lambda: machine.refuse_device(plan, world.device, **asked))
    world.divide(plan)
    compiled, ranks_here = compiles(of_device, world.device.type), world.this_rank.local_world_size
    world.from_first(lambda: machine.refuse_too_large(plan, world.device, ranks_here, compiled=compiled))
    return config, plan, dataset, said


def _changed_code(config: Config, folder: RunFolder | None) -> list[str]:
    """Warnings that code of the user is not the code of the last command of the run; rank 0 prints them here."""
    before = {} if folder is None else folder.read_environment().get("own_code", {})
    told = changed_code(before, own_code(config))
    warn(*told)
    return told


def open_run(
    config: Config, plan: Plan, dataset: AnyDataset, world: World, folder: RunFolder | None, *, resume: bool
) -> OpenRun:
    """Find the newest checkpoint of the run to resume (`open_resumed`), or create the folder of a new run on rank 0.

    Raises:
        UserError: on every rank: the folder belongs to another run, or another process writes it; the checkpoint
            belongs to other data or to adapters of other weights.
    """
    path = run_folder(config)
    opened: list[RunFolder] = []
    changes: dict[str, list[Any]] = {}

    def open_folder_() -> None:
        if world.is_first and not opened:
            held = folder or RunFolder.create(path, to_toml(effective(config)), plan.to_json())
            changes.update({} if folder is None else _changes(config, plan, dataset, folder))
            _become_writer(held, world, config)
            opened.append(held)

    def look() -> list[Any]:
        (held,) = opened
        # A failed run resumes before its bad weights only with a changed update: the old one would fail again.
        rolled_back = [event for event in held.read_events() if event["kind"] == ROLLBACK]
        return [held.read_environment(), changes, ruined_step(held) if changes else None, ended_at(held), rolled_back]

    def is_written_(step: int) -> bool:
        return is_written(step, config, plan, opened[0], checkpoints)

    try:
        world.in_turn(open_folder_, "writer")  # not in a collective: the lease of another writer may have to end first
        held = opened[0] if opened else None
        environment, changes, before, ended, rolled_back = world.from_first(look)
        checkpoints = Checkpoints(
            path / CHECKPOINTS, config.checkpoint.keep_last, config.checkpoint.keep_best, of_run=True
        )
        known = {"dataset": dataset.description, "own_code": own_code(config)}
        chosen = choose(config, plan, world, environment) | known
        falls_back = config.checkpoint.fall_back or meets_again()  # after a loss nobody is there to choose
        saved: Saved | None = in_memory(checkpoints, is_written_) if resume else None
        if saved is None and resume:
            saved = newest(checkpoints, world, before, held, falls_back=falls_back)
        ahead = ahead_of(rolled_back)
        if saved is not None and is_of_before(saved, ahead):
            saved = newest(checkpoints, world, ahead[-1][0] + 1, held, falls_back=falls_back)
        base = _base(plan, saved, world)
        run = OpenRun(
            config, plan, dataset, world, path, held, chosen, checkpoints, saved, base, resume, changes, ended, ahead
        )
        checkpoints.may_commit = object if held is None else held.may_write
        _check_saved(run)
        if OwnPage.current is not None:
            OwnPage.current.pages.folder = str(path.absolute())
        _keep_output(path, world.this_rank)
    except BaseException:
        close_folder(opened[0] if opened else None, is_new=not resume)
        raise
    return run


def _become_writer(folder: RunFolder, world: World, config: Config) -> None:
    """Let this process alone write the run. If it loses the run, it ends: the other ranks would wait for it. Alone it
    only says so, because it may be a notebook's process, and the next write raises an error.

    If a scheduler has started the job again, rank 0 of the start before may be cut off, and wait for the others. It
    renews its lease until parallel.timeout_s ends it.
    """
    patience_s = config.parallel.timeout_s if is_started_again(os.environ) else 0.0
    folder.hold()
    try:
        folder.lease(
            lambda why: warn(why) if world.this_rank.world_size == 1 else end_now(RunFailed(why)),
            config.survive.lease_s,
            patience_s,
        )
    except BaseException:
        folder.release()
        raise


def _keep_output(path: Path, this_rank: Rank) -> None:
    """Keep what each of several ranks prints in the run folder, under every launcher."""
    if this_rank.world_size == 1:
        return
    log = path / LOGS / f"rank-{this_rank.rank}.log"
    try:
        copy_to(log)
    except OSError as error:
        warn(f"codescent: rank {this_rank.rank}: {log}: what it prints is not kept there: {error.strerror}")


def close_folder(folder: RunFolder | None, *, is_new: bool) -> None:
    """Release the lock on a run folder, so that other processes can write it. A new one in which no run has begun is
    deleted."""
    if folder is not None:
        if is_new:
            folder.delete_unused()
        folder.release()


def _plan_facts(plan: Plan) -> dict[str, str]:
    """A hash of each field of the plan. Plans may differ with equal configs, as each machine reads its own files."""
    fields = plan.to_json().items()
    return {f"plan.{name}": hashlib.sha256(json.dumps(field).encode()).hexdigest()[:16] for name, field in fields}


def check_alike(dataset: AnyDataset, world: World) -> None:
    """Raise UserError on every rank if the samples of any rank differ from those of rank 0. Collective."""
    first: str = world.from_first(lambda: dataset.fingerprint)

    def compare() -> None:
        if dataset.fingerprint != first:
            raise UserError(
                f"rank {world.this_rank.rank} on {socket.gethostname()}: the samples in {dataset.path} differ from "
                f"those of rank 0 ({dataset.fingerprint}, on rank 0 {first}); give every machine the same corpus "
                "and tokenizer"
            )

    together(UserError, compare)


def _changes(config: Config, plan: Plan, dataset: AnyDataset, folder: RunFolder) -> dict[str, Any]:
    """The changed keys of the update of the run to resume: {key: [old value, new value]}.

    Raises:
        UserError: the folder belongs to a run with another trajectory, or with other files.
    """
    changes = check_same_trajectory(folder, plan, dataset, config.train.num_steps)
    check_same_files(task_request(config), folder, dataset)
    return changes


def _base(plan: Plan, saved: Saved | None, world: World) -> dict[str, Any] | None:
    """The identity of the frozen weights under adapters; the one in the checkpoint if the weights are the same.

    None: there are no adapters, or the frozen weights are random.
    """
    source, before = plan.model.weights, saved.state.get("base") if saved else None
    if plan.model.lora is None or source is None:
        return None
    before = before if isinstance(before, dict) else None  # anything else is refused by `_check_saved`

    def look() -> dict[str, Any]:
        weights = open_weights(plan.model)
        return weights.identity() if before is None or not weights.matches(before) else dict(before)

    found: dict[str, Any] = world.from_first(look)
    return found


def _check_saved(run: OpenRun) -> None:
    """Raise UserError if training cannot continue from the checkpoint with this data and these frozen weights."""
    if run.saved is None:
        return
    state = run.saved.state
    if "imported" in state:
        raise imported(run.path)
    if state.get("base") != run.base:
        raise UserError(
            f"model.weights = {run.plan.model.weights}: not the weights with which the adapters of {run.path} were "
            "trained"
        )
    check_same_tokens(run.dataset, run.saved)
