"""In: a config and a number of ranks. Out: what the checks need to know of its run: folders, sizes, time limits.
Does not look at the machine (facts.py does) and does not prepare a corpus."""

from __future__ import annotations

from dataclasses import replace

from codescent.base.errors import UserError
from codescent.build import needs_vocab_size, task_request
from codescent.config.sections import Config
from codescent.doctor.finding import WRONG, Finding
from codescent.doctor.wanted import Wanted
from codescent.jobs.leftovers import mark_of
from codescent.plan import DTYPE_BYTES, Plan
from codescent.preflight import plan_of, prepared, run_folder


def of_config(wanted: Wanted, config: Config, ranks: int, host: str) -> Wanted:
    """Add what a config says. `host`: of rank 0, for problems of the config."""
    path = run_folder(config)
    wanted = replace(
        wanted,
        device=config.train.device,
        run_folder=str(path),
        data_folder=str(task_request(config).data.folder),
        mark=mark_of(path),
        timeout_s=config.parallel.timeout_s,
    )
    if needs_vocab_size(config) and prepared(config) is None:
        return replace(wanted, notes=("the corpus is not prepared: sizes of checkpoints and messages are unknown",))
    try:
        plan = plan_of(config, ranks, without_data=not needs_vocab_size(config))
    except UserError as error:
        mend = f"codescent plan CONFIG --ranks {ranks} says what would do"
        found = (Finding(WRONG, "config", (host,), one, f"a config for {ranks} ranks", mend) for one in error.problems)
        return replace(wanted, problems=tuple(found))
    kept = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best
    sizes = [(one.wire_bytes(plan.mesh.degree(one.axis)), one.what) for one in plan.traffic if one.axis]
    message_bytes, message = max(sizes, default=(0.0, ""))
    return replace(
        wanted, checkpoint_bytes=kept * _checkpoint_bytes(plan), message_bytes=message_bytes, message=message
    )


def _checkpoint_bytes(plan: Plan) -> int:
    """Weights, or their masters, and optimizer state of all trained parameters."""
    return sum(
        tensor.parameter.numel
        * (
            DTYPE_BYTES[tensor.master_dtype or tensor.weight_dtype]
            + tensor.optimizer_tensors * DTYPE_BYTES[tensor.optimizer_dtype]
        )
        for tensor in plan.trained
    )
