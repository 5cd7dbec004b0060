"""In: the arguments of `codescent train`. Out: a trained model in its run folder, on one rank or on ranks started here.
Does not train (train/loop does) and does not watch ranks (launch/local does); torch is imported in a rank alone."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import new_failures, say
from codescent.base.rank import Rank
from codescent.config.sections import Config
from codescent.launch.allocator import needs_restart, tuned_environment
from codescent.launch.environment import read
from codescent.launch.local import run_ranks
from codescent.models import GENERATING
from codescent.preflight import check, run_folder, saved_plan
from codescent.record import RunFolder
from codescent.verbs.config import resolved_of

RANK_BYTES = 64 << 20
"""What a rank takes of its machine's memory before it has a model, at the very least."""


def main(arguments: Namespace) -> int:
    """Train as a rank of a launcher, alone, or on ranks of this machine."""
    config = resolved_of(arguments).config
    rank = read(os.environ)
    # One task of a launcher, such as the shell of `srun --pty bash`, is free to start ranks of its own.
    alone = rank is None or rank.world_size == 1
    if rank is not None and not alone and arguments.ranks not in (None, rank.world_size):
        raise UserError(
            f"--ranks {arguments.ranks}: this process is rank {rank.rank} of {rank.world_size}, numbered by "
            f"{rank.launcher}, and starts no others: leave --ranks away, or have {arguments.ranks} started there"
        )
    tunes = config.train.allocator == "auto"
    if alone and config.parallel.ranks > 1:
        return _start_ranks(arguments, config, tuned_environment(os.environ) if tunes else dict(os.environ))
    if arguments.may_restart and tunes and needs_restart(os.environ):
        # glibc reads its tunables when a process starts: start again, once, as the same process.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned_environment(os.environ))
    return _train(config, rank or Rank(), resume=arguments.resume)


def _start_ranks(arguments: Namespace, config: Config, env: dict[str, str]) -> int:
    """Prepare the data and refuse what can be refused, before a single rank is started."""
    ranks = config.parallel.ranks
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // RANK_BYTES
    if ranks > most:
        raise UserError(
            f"parallel.ranks = {ranks}: each is a process on this machine, whose memory has room for no more than "
            f"{most}; give at most that"
        )
    check(config, ranks, resume=arguments.resume)
    command = [sys.executable, "-P", "-m", "codescent", "train", arguments.config, *arguments.overrides]
    code = run_ranks([*command, *(["--resume"] if arguments.resume else []), "--ranks", str(ranks)], ranks, env)
    _record_lost(run_folder(config), None)
    return code


def _train(config: Config, rank: Rank, *, resume: bool) -> int:
    """One rank. At the end, rank 0 shows what the model writes and where the run is."""
    from codescent.train.loop import train
    from codescent.verbs.sample import sample_run

    outcome = train(config, rank, resume=resume)
    folder = outcome.folder
    if not (rank.rank or outcome.exit_code):
        if config.log.sample_tokens:
            say(["", "A sample of what it writes now:", ""])
            sample_run(folder, tokens=config.log.sample_tokens, seed=config.run.seed, device="cpu")
        writes = saved_plan(RunFolder.open(folder)).model.kind in GENERATING
        more = f"; more text: codescent sample {folder}" if writes else ""
        say(["", f"The run is in {folder} (metrics.csv, plan.json, checkpoints){more}"])
    if not rank.rank:
        _record_lost(folder, 0)
    return outcome.exit_code


def _record_lost(folder: Path, rank: int | None) -> None:
    """Record output that was lost after a rank's last step, or by the process that started the ranks (None)."""
    if (found := new_failures()) and folder.is_dir():
        for lost in found:
            RunFolder.open(folder).event("output_lost", rank=rank, **lost)
