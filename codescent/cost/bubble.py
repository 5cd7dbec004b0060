"""In: a plan's instruction lists, the measured seconds of each stage. Out: the part of its waiting that is bubble.
Does not measure (train/execute.py does). Without a pipeline there is no bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from codescent.cost.simulate import Costs, simulate
from codescent.plan import Schedule, Verb

SPLIT = (Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT)


def bubble_s(schedule: Schedule, stages: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Seconds of a step in which each stage waits for others' work, if messages take no time.

    The rest of what the stage waits is communication. The passes of a stage are taken to be equally long, and the two
    halves of a divided backward pass, too: they are measured together.

    Args:
        schedule: of the plan.
        stages: for each stage its "forward_s" and "backward_s" of a step, as in ranks.csv.

    Raises:
        ValueError: another number of stages.
    """
    if len(stages) != len(schedule.programs):
        raise ValueError(f"{len(stages)} stages were measured, the plan has {len(schedule.programs)}")
    forward, backward = [], []
    for program, measured in zip(schedule.programs, stages, strict=True):
        times = Counter(at.verb for at in program)
        forward.append(measured["forward_s"] / max(1, times[Verb.FORWARD]))
        backward.append(measured["backward_s"] / max(1, times[Verb.BACKWARD] + sum(times[verb] for verb in SPLIT)))
    chunks = 1 + max(at.chunk for program in schedule.programs for at in program)
    costs = Costs(
        forward_s=tuple(forward) * chunks,
        backward_s=tuple(backward) * chunks,
        backward_input_s=tuple(backward) * chunks,
        backward_weight_s=tuple(backward) * chunks,
    )
    return tuple(stage.data_wait_s + stage.idle_end_s for stage in simulate(schedule, costs).stages)
