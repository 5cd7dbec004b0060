"""In: a config and a number of ranks; options. Out: `Wanted`: what the checks need to know of the run that will begin.
Does not look at the machine (facts.py does). Without a config only what every run needs is checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from codescent.base.errors import UserError
from codescent.build import needs_vocab_size, task_request
from codescent.config.sections import Config
from codescent.cost.network import HostLinks
from codescent.doctor.finding import WRONG, Finding
from codescent.plan import DTYPE_BYTES, Plan
from codescent.preflight import plan_of, prepared, run_folder


@dataclass(frozen=True)
class Wanted:
    """What is checked.

    Attributes:
        device: train.device.
        run_folder: of the run, as the config has it: relative to the folder in which ranks start.
        data_folder: data.folder; "": it is not checked.
        checkpoint_bytes: of all checkpoints that the run keeps, and the one that is being written; None: unknown.
        mark: by which the run's processes are found; "": unknown.
        timeout_s: parallel.timeout_s.
        message_bytes: the most that a rank sends in one collective.
        message: its purpose.
        link: the declared links.
        bandwidth: whether it is measured.
        wait_s: how long rank 0 waits for the others.
        problems: why the config does not fit.
        notes: what could not be found out.
    """

    device: str = "auto"
    run_folder: str = "runs"
    data_folder: str = ""
    checkpoint_bytes: int | None = None
    mark: str = ""
    timeout_s: float = 0.0
    message_bytes: float = 0.0
    message: str = ""
    link: HostLinks | None = None
    bandwidth: bool = True
    wait_s: float = 30.0
    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = field(default=())


def of_config(wanted: Wanted, config: Config, ranks: int, host: str) -> Wanted:
    """Add what a config says. `host`: of rank 0, for problems of the config."""
    path = run_folder(config)
    wanted = replace(
        wanted,
        device=config.train.device,
        run_folder=str(path),
        data_folder=str(task_request(config).data.folder),
        mark=str(path.absolute()),
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
