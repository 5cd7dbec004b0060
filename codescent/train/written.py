"""In: a run folder, a step whose weights are in memory. Out: whether the folder has what follows from the step.
Does not write anything (report.py and saving.py do)."""

from __future__ import annotations

from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.sections import Config
from codescent.plan import Plan
from codescent.record import RunFolder
from codescent.train.dues import Dues


def is_written(step: int, config: Config, plan: Plan, folder: RunFolder, checkpoints: Checkpoints) -> bool:
    """Whether a run can go on from the weights of a step, and nothing is missing in its folder.

    A rank may be lost between the update of the weights and the row of that step, such as in its validation. Then the
    step has to be done again, because only its ranks knew the loss. So has the last step, if it was not saved.
    """
    dues, num_steps = Dues(config, plan.schedule), config.train.num_steps
    newest = max((int(row["step"]) for row in folder.iter_metrics()), default=0)
    if any(dues.row(number) for number in range(newest + 1, step + 1)):
        return False
    may_end = step >= num_steps or (config.train.stop_after > 0 and dues.at(step, num_steps).validation)
    return not may_end or checkpoints.newest_step() == step
