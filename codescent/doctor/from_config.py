"""In: a config and a number of ranks. Out: what the checks need to know of its run: folders, sizes, time limits.
Does not look at the machine (facts.py does) and does not prepare a corpus."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from codescent.base.errors import UserError
from codescent.build import needs_vocab_size, task_request
from codescent.clusters.by_links import of_device
from codescent.config.decided import compiles, head_chunk_tokens, with_device
from codescent.config.sections import Config
from codescent.cost.stage_memory import memory
from codescent.doctor.finding import WRONG, Finding
from codescent.doctor.wanted import Wanted
from codescent.jobs.leftovers import mark_of
from codescent.jobs.room import checkpoints
from codescent.plan import Plan
from codescent.plan.activations import CUDA
from codescent.preflight import plan_of, prepared, run_folder, settled


def of_config(wanted: Wanted, config: Config, ranks: int, host: str) -> Wanted:
    """Add what a config says. `host`: of rank 0, for problems of the config."""
    path = run_folder(config)
    wanted = replace(
        wanted,
        device=config.train.device,
        listen=config.parallel.listen,
        run_folder=str(path),
        data_folder=str(task_request(config).data.folder),
        mark=mark_of(path),
        timeout_s=config.parallel.timeout_s,
    )
    try:
        dataset = prepared(config)
    except UserError as error:  # it is damaged, or no task reads it
        return replace(wanted, problems=_problems(error, host, "data that a task reads", "codescent data prepares it"))
    if dataset is not None:
        wanted = replace(wanted, data_ready=str(dataset.path))
    if needs_vocab_size(config) and dataset is None:
        return replace(wanted, notes=("the corpus is not prepared: sizes of checkpoints and messages are unknown",))
    try:
        plan = plan_of(config, ranks, without_data=not needs_vocab_size(config))
    except UserError as error:
        mend = f"codescent plan CONFIG --ranks {ranks} says what would do"
        return replace(wanted, problems=_problems(error, host, f"a config for {ranks} ranks", mend))
    sizes = [(one.wire_bytes(plan.mesh.degree(one.axis)), one.what) for one in plan.traffic if one.axis]
    message_bytes, message = max(sizes, default=(0.0, ""))
    more_bytes = None
    with suppress(OSError):  # the folder cannot be read here: the check of the folder says so
        more_bytes = checkpoints(config if dataset is None else settled(config, dataset), plan, path).more_bytes
    wanted = replace(wanted, checkpoint_bytes=more_bytes, message_bytes=message_bytes, message=message)
    return _with_memory(wanted, config, plan)


def _with_memory(wanted: Wanted, config: Config, plan: Plan) -> Wanted:
    """What the ranks hold: as `codescent plan` and a run that begins say it."""
    chunk, compiled = head_chunk_tokens(with_device(config, CUDA)), compiles(config, CUDA)
    firsts = {plan.role(rank): rank for rank in reversed(range(plan.world_size))}.values()
    there = [memory(plan, rank, of_device(CUDA), chunk_tokens=chunk, compiled=compiled) for rank in firsts]
    return replace(
        wanted,
        state_bytes=sum(held.state + held.host for held in there) / len(there),
        host_bytes=sum(held.host for held in there) / len(there),
        device_bytes=max(held.least for held in there),
    )


def _problems(error: UserError, host: str, expected: str, mend: str) -> tuple[Finding, ...]:
    return tuple(Finding(WRONG, "config", (host,), one, expected, mend) for one in error.problems)
