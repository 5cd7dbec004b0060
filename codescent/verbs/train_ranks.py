"""In: a config with several ranks, or a policy about losses. Out: its ranks, started on this machine; an exit code.
Does not train (each rank calls `codescent train`) and reads no command line."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from functools import partial

from codescent.base.call import ON_LOSS
from codescent.base.command import resume_command
from codescent.base.cores import refuse_more_ranks
from codescent.base.early import may_end, raise_if_signalled
from codescent.base.output import warn
from codescent.base.stopping import SAVING
from codescent.base.time_limit import stop_at
from codescent.build import saved_plan
from codescent.config.hub_keys import words_of
from codescent.config.sections import Config
from codescent.config.toml_file import loads
from codescent.launch.local import run_ranks
from codescent.launch.supervisor import Stopped
from codescent.plan.activations import CPU, CUDA
from codescent.planner.less_memory import Shortage, advice, held_in_words
from codescent.preflight import check, run_folder
from codescent.record import RunFolder
from codescent.record.memory import MEMORY_CSV, PARTS
from codescent.train.starts import counted_if_stopped
from codescent.verbs.survive import notes_of, survive_of
from codescent.verbs.train import introduce, record_lost, roles_of


def start_ranks(arguments: Namespace, config: Config, env: dict[str, str], *, resume: bool) -> int:
    """Prepare the data, check the run, then start the ranks. Returns the exit code."""
    env.pop(ON_LOSS, None)  # of an agent that has started this command as its one rank
    ranks = config.parallel.ranks
    refuse_more_ranks(f"parallel.ranks = {ranks}", ranks)
    finds = arguments.find_learning_rate
    if not finds:
        introduce(config, resume=resume)
    stop_at(os.environ)  # refuses what is no time, before the ranks do
    with counted_if_stopped(None if finds or resume else run_folder(config)):
        with may_end():
            checked = check(config, ranks, resume=resume, creates_folder=not finds)
            survive = None if finds else survive_of(checked, resume=resume)
            warn(*notes_of(checked))
        raise_if_signalled()
    command = [sys.executable, "-P", "-m", "codescent", "train", arguments.config, *arguments.overrides]
    command += words_of(config)  # with their commits: no rank asks the hub again
    flags = [*(["--resume"] if resume else []), *(["--find-learning-rate"] if finds else [])]
    stopped = Stopped(config.parallel.stopped_s, config.parallel.timeout_s)
    words = [*command, *checked.chosen, *flags, "--ranks", str(ranks)]
    start = partial(run_ranks, words, ranks, env, blocked=SAVING, reports=True, stopped=stopped)
    if finds:  # a run folder of this name would be that of another run
        return start(saves=False)
    code = start(
        of_memory=partial(of_memory, config),
        roles=roles_of(checked.plan, config),
        survive=survive,
    )
    record_lost(run_folder(config), None)
    return code


def of_memory(config: Config, rank: int) -> list[str]:
    """What a killed rank held last, and what needs less; also as an event of the run folder. Empty: it wrote no row."""
    path = run_folder(config)
    if not (path / MEMORY_CSV).is_file():
        return []
    folder = RunFolder.open(path)
    config = Config.model_validate(loads(folder.config_text))  # with all that the data has decided
    plan, row = saved_plan(folder), folder.last_memory().get(rank)
    if row is None:
        return []
    split = {part: row[part] for part in PARTS}
    environment = folder.read_environment()
    kind = CPU if environment.get("device", CPU) == CPU else CUDA
    compiled = str(environment.get("levers", {}).get("compile", "none"))
    short = Shortage(rank, row["peak_bytes"], split, row["most_activations_bytes"], kind, compiled)
    more, change = advice(config, plan, plan.model.vocab_size or None, short)
    lines = [f"rank {rank} at step {row['step']}, its last row in memory.csv: {held_in_words(plan, short)}", more]
    if change is not None:
        lines.append(f"to go on with the first of them: {resume_command(path, *change.words())}")
    where = f"after step {row['step']}"
    held = {"asked_bytes": None, "held_bytes": short.held_bytes, **split}
    folder.event("out_of_memory", rank=rank, where=where, **held, problems=lines)
    return [f"codescent: {line}" for line in lines]
