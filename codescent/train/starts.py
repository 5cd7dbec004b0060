"""In: the events of a run that is resumed, the environment of its job. Out: an error if it is started again in vain.
Does not end a run that a person has started: only a scheduler counts its starts."""

from __future__ import annotations

from collections.abc import Mapping

from codescent.base.errors import RunFailed
from codescent.record import RunFolder

COUNTS = ("SLURM_RESTART_COUNT", "CODESCENT_START")
"""Variables with the number of the starts before this one: of SLURM, and of our script for PBS."""
IDLE_STARTS = 2


def refuse_idle(folder: RunFolder, env: Mapping[str, str]) -> None:
    """Raise RunFailed if a scheduler starts a run again, and the last two starts have saved no step.

    Such a job would be started for ever: its machine fails, or its time is shorter than what a step and a save take.
    """
    texts = [env.get(name, "") for name in COUNTS]
    if max((int(text) for text in texts if text.isascii() and text.isdigit()), default=0) < IDLE_STARTS:
        return
    events = folder.read_events()
    starts = [event["step"] for event in events if event["kind"] in ("start", "resume")][-IDLE_STARTS:]
    saved = max((event["step"] for event in events if event["kind"] == "checkpoint"), default=0)
    if len(starts) == IDLE_STARTS and len(set(starts)) == 1 and saved <= starts[0]:
        raise RunFailed(
            f"the last {IDLE_STARTS} starts of this job began at step {starts[0]} and saved no further step: it is not "
            "started again; look at the job's log, give it more time, or save more often (checkpoint.every); a new "
            "submission of the script goes on"
        )
