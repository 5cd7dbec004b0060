"""In: arguments of `codescent train`. Out: a trained model in a run folder. This process is a rank, or starts ranks.
Does not contain the training loop (train/loop.py does) and does not start or watch ranks itself (launch/local.py does).
Only ranks import torch."""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from codescent.base import cause
from codescent.base.call import SURVIVES
from codescent.base.command import command, resume_command
from codescent.base.early import StopAsked, hand_on, listen, may_be_ended, may_end
from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.output import new_failures, progress, say, warn
from codescent.base.parent import end_with_command, handed_on
from codescent.base.rank import Rank
from codescent.base.stopping import LATER, SAVING, reported
from codescent.base.time_limit import forget_others, stop_at
from codescent.base.uncollected import uncollected
from codescent.build import check_own_names, saved_plan, task_request
from codescent.config.effects import is_default
from codescent.config.load import LoadedConfig
from codescent.config.sections import Config
from codescent.launch.allocator import needs_restart, tuned_environment, with_expandable_segments
from codescent.launch.environment import read
from codescent.launch.losses import LossCount
from codescent.launch.roles import Roles
from codescent.models import generates
from codescent.plan import Plan
from codescent.preflight import is_begun, notes, obtain_named, refuse_moved, run_folder
from codescent.record import RunFolder
from codescent.train import loggers
from codescent.train.trackers import find_packages
from codescent.verbs.resume import config_of

APART_OFF = {"parallel.average_every": "0", "parallel.gossip": "none", "parallel.servers": "0"}
"""Keys with which ranks do not know each step's loss, and the values with which they do."""
NEED_APART = {"parallel.outer_optimizer": "none", "parallel.restarts": "0"}
"""Keys that are refused without them, and the values that are not."""


def main(arguments: Namespace, loaded: LoadedConfig | None = None) -> int:
    """Train as a rank of a launcher, alone, or on ranks of this machine.

    `loaded`: the config that the arguments name; None: it is not read yet.
    """
    if arguments.find_learning_rate and arguments.resume is not False:
        raise UserError("--find-learning-rate: begins with the initial weights of a new run; leave out --resume")
    end_with_command()
    ignored = forget_others(os.environ)
    _listen()
    try:
        return _main(arguments, ignored, loaded)
    except StopAsked as asked:
        return _stopped_early(asked)


def _listen() -> None:
    """Until the run itself listens, SIGUSR1 and SIGUSR2 and the time limit end long work, where it may end.

    Other signals end the process at once: nothing is ever half written under its final name.
    """
    try:
        end_s = stop_at(os.environ)
    except UserError:  # the run refuses it, once for all ranks
        end_s = math.inf
    listen(SAVING, end_s)


def _stopped_early(asked: StopAsked) -> int:
    """Say on one rank that the run has stopped before it began. Returns the exit code."""
    rank = read(os.environ) or Rank()
    if not rank.rank:
        warn(f"codescent: {asked}")
    return reported(LATER, os.environ, writes=not rank.local_rank)


def _main(arguments: Namespace, ignored: Sequence[str], loaded: LoadedConfig | None) -> int:
    """See `main`. Raises StopAsked, too."""
    if (rank := read(os.environ)) is not None:
        cause.is_rank(rank)
    if rank is None or not rank.rank:
        warn(*(f"codescent: {sentence}" for sentence in ignored))
    loaded = loaded or config_of(arguments)
    may_be_ended()
    config = loaded.config
    _check_local_rank(arguments.local_rank, rank)
    resume = is_begun(config) if arguments.resume is None else arguments.resume
    if arguments.find_learning_rate:
        _refuse_apart(config)
    # A single task of a launcher, such as the shell of `srun --pty bash`, may start ranks.
    alone = rank is None or rank.world_size == 1
    survives = config.survive.on_loss != "stop" and not arguments.find_learning_rate
    starts = alone and SURVIVES not in os.environ and (config.parallel.ranks > 1 or survives)
    tunes = config.train.allocator == "auto"
    if tunes:  # before torch is imported, and for the ranks
        os.environ.update(with_expandable_segments(os.environ))
    restarts = not starts and arguments.may_restart and tunes and needs_restart(os.environ)
    if alone:  # several ranks download when they have met, one on each machine
        with may_end():
            obtain_named(config, resume=resume)
    found = notes(loaded) if rank is None or not rank.rank else []
    if arguments.local_rank is not None and rank is not None and not (rank.rank or restarts):
        warn("torch.distributed.launch and its --local-rank are deprecated: start the ranks by torchrun")
    if not restarts and (rank is None or not rank.child):  # else the process that replaces this one says it
        for sentence in found:
            warn(sentence)
    if restarts:
        # glibc reads its tunables when a process starts: replace this process once by itself.
        hand_on(SAVING)
        env = tuned_environment(os.environ) | handed_on()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
    if rank is not None and not alone and arguments.ranks not in (None, rank.world_size):
        raise UserError(
            f"--ranks {arguments.ranks}: this process is rank {rank.rank} of {rank.world_size}, numbered by "
            f"{rank.launcher}, and starts no other ranks: leave out --ranks, or let the launcher start "
            f"{arguments.ranks} ranks"
        )
    if alone:
        refuse_without_loopback()  # before torch is imported and the data is prepared
    if resume and alone:  # at once, as importing torch takes seconds; several ranks refuse together
        refuse_moved(config)
    _refuse_missing(config, rank, alone=alone)
    if starts:
        from codescent.verbs.train_ranks import start_ranks

        env = tuned_environment(os.environ) if tunes else dict(os.environ)
        return start_ranks(arguments, config, env, resume=resume)
    if arguments.find_learning_rate:
        return _find_learning_rate(config, rank or Rank())
    if rank is None or not (rank.rank or rank.child):
        introduce(config, resume=resume)
    return _train(config, rank or Rank(), found, resume=resume)


def _refuse_missing(config: Config, rank: Rank | None, *, alone: bool) -> None:
    """Look for packages and code that the config names, before the data is prepared. Raises UserError: all problems.

    Several ranks of a launcher look at the code of the user when they have met.
    """
    checks: list[Callable[[], None]] = []
    if rank is None or not rank.rank:  # other ranks need no logger, and machines without rank 0 may lack the module
        checks += [lambda: find_packages(config.log), lambda: loggers.find(config.log.to)]
    if alone:
        checks.append(lambda: check_own_names(config))
    problems: list[str] = []
    for check_this in checks:
        try:
            check_this()
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _check_local_rank(given: int | None, rank: Rank | None) -> None:
    """Raise UserError if --local-rank, which torch.distributed.launch gives, is not this process's local rank."""
    if given is not None and rank is None:
        raise UserError(
            f"--local-rank={given}: no launcher has set the variables of a rank (RANK, LOCAL_RANK, WORLD_SIZE ...); "
            "leave it out, and start ranks by torchrun or by --ranks N"
        )
    if given is not None and rank is not None and given != rank.local_rank:
        raise UserError(
            f"--local-rank={given}: the variables of {rank.launcher} say that this process is local rank "
            f"{rank.local_rank}; leave out --local-rank"
        )


def _refuse_apart(config: Config) -> None:
    """Raise UserError if a range test would not know the loss after a step."""
    given = [key for key in APART_OFF if not is_default(config, key)]
    if given:
        off = {key: value for key, value in (APART_OFF | NEED_APART).items() if not is_default(config, key)}
        raise UserError(
            "--find-learning-rate: needs the loss of all ranks after each step, which they do not know with "
            f"{' and '.join(given)}; add {' '.join(f'{key}={value}' for key, value in off.items())}"
        )


def introduce(config: Config, *, resume: bool) -> None:
    """Print what is known before torch is imported and the data is prepared, which take seconds or minutes.

    train/report.py prints the rest, as soon as it is known.
    """
    request, folder = task_request(config), run_folder(config)
    corpora = ", ".join(one.data.corpus for one in request.corpora.values()) or request.data.corpus
    prepared = f"prepared data: {request.data.folder}"
    progress([f"run     {folder}{' continues' if resume else ''}", f"data    {corpora}; {prepared}"])
    sys.stdout.flush()


def roles_of(plan: Plan, config: Config) -> Roles:
    """Servers are named. No run goes on without rank 0, which writes the run folder."""
    names = {rank: f"server {index}" for index, rank in enumerate(plan.servers)} if plan.layout.server_ranks else {}
    spare = frozenset(range(1, plan.mesh.world_size) if plan.layout.can_lose_workers else ())
    resume = resume_command(run_folder(config)) if plan.layout.served else ""
    losses = partial(
        LossCount,
        config.parallel.restarts,
        config.survive.restart_window_s,
        plan.work.global_batch_size,
        "parallel.restarts",
        together_s=0.0,
    )
    return Roles(names, spare, resume, losses)


def _train(config: Config, rank: Rank, found: Sequence[str], *, resume: bool) -> int:
    """Train as one rank. At the end, rank 0 prints a generated text, if there was a step to do, and the run's path."""
    with uncollected():  # torch's modules stay: each search for cycles would look at all of them
        from codescent.train.regroup import train_on

    before = 0 if rank.rank else _num_events(run_folder(config))
    outcome = train_on(config, rank, resume=resume, notes=found)
    folder, number = outcome.folder, rank.rank if outcome.rank is None else outcome.rank
    if not (number or outcome.exit_code):
        run = RunFolder.open(folder)
        is_saved = run.checkpoints.is_dir() and any(run.checkpoints.iterdir())
        if config.log.sample_tokens and outcome.has_trained and is_saved:
            say(["", "A text generated by the trained model:", ""])
            _sample(config, folder, best=outcome.suggests_best)
        writes = generates(saved_plan(run).model.kind)
        best = ["--best"] if outcome.suggests_best else []
        more = f"; more text: {command('sample', folder, *best)}" if writes else ""
        files = f"checkpoints){more}" if is_saved else "no checkpoint: checkpoint.last = false)"
        progress(
            [_LOST[event["kind"]].format(**event) for event in run.read_events()[before:] if event["kind"] in _LOST]
        )
        say(["", f"The run is in {folder} (metrics.csv, plan.json, {files}"])
    if not number:
        record_lost(folder, 0)
    return reported(outcome.exit_code, os.environ, writes=not rank.local_rank)


def _num_events(folder: Path) -> int:
    """The number of events that a run folder has before this command; 0 if it cannot be read: `train` says so."""
    with suppress(UserError):
        return len(RunFolder.open(folder).read_events())
    return 0


_LOST = {
    "worker_lost": "rank {rank} on {host} died in step {step}; the others went on without it",
    "worker_joined": "rank {rank} on {host} was started again and trained from step {step} on",
}
"""Sentences on events of workers."""


def _find_learning_rate(config: Config, rank: Rank) -> int:
    """Do a learning-rate range test as one rank. At the end, rank 0 prints what it suggests."""
    from codescent.train.range_test import range_test
    from codescent.verbs.learning_rate import report

    found = range_test(config, rank)
    if not rank.rank and found.exit_code:
        warn(f"stopped: {len(found.losses)} learning rates are too few to suggest one; nothing is written")
    elif not rank.rank:
        report(found, config.optimizer, run_folder(config))
    return reported(found.exit_code, os.environ, writes=not rank.local_rank)


def _sample(config: Config, folder: Path, *, best: bool) -> None:
    """Print a generated text. If none can be generated, the command does not fail: the run is done."""
    from codescent.verbs.sample import sample_run

    log = config.log
    prompts = [log.sample_prompt] if log.sample_prompt else None
    try:
        sample_run(
            folder,
            prompts,
            log.sample_tokens,
            log.sample_temperature,
            seed=config.run.seed,
            device="cpu",
            best=best,
            example=prompts is None,
            option="log.sample_prompt",
        )
    except UserError as error:
        for problem in error.problems:
            warn(f"no text (log.sample_tokens = {log.sample_tokens}): {problem}")


def record_lost(folder: Path, rank: int | None) -> None:
    """Record output that was lost after a rank's last step, or by the process that started the ranks (None)."""
    if (found := new_failures()) and folder.is_dir():
        for lost in found:
            RunFolder.open(folder).event("output_lost", rank=rank, **lost)
