"""In: the values of [survive]. Out: a frozen pydantic class with its keys: what a run does about faults.
Does not act on a fault (train/ does)."""

from __future__ import annotations

from typing import Literal

from codescent.config.keys import Section, key, one_of, other_than

LOOKS = other_than("survive.on_spike", "none")
"""Only a run that looks for spikes reads the key."""

BACK = one_of("survive.on_spike", "rollback")
"""Only a run that goes back reads the key."""

RESTARTS = other_than("survive.on_loss", "stop")
"""Only a run that goes on after a loss reads the key."""


class Survive(Section):
    """What a run does about faults that it survives (`codescent docs faults`)."""

    lease_s: float = key(
        30.0,
        "seconds after which another host may write the run, if the host that writes it is cut off; that one then ends",
        ge=1,
        le=3600,
    )
    on_loss: Literal["stop", "restart", "shrink"] = key(
        "stop",
        "what a run does if a rank dies. stop: it ends. restart: the others wait until it is started again. shrink: "
        "they go on with fewer ranks until then",
    )
    max_restarts: int = key(
        3, "the run ends at one more loss of ranks within survive.restart_window_s", ge=1, le=1000, only=RESTARTS
    )
    restart_window_s: float = key(
        3600.0, "seconds in which losses of ranks are counted, also for parallel.restarts", gt=0
    )
    spares: int = key(
        0,
        "processes that have imported torch and wait: one of them takes the place of a rank that dies",
        ge=0,
        le=32,
        only=RESTARTS,
    )
    on_divergence: Literal["stop", "heal"] = key(
        "stop",
        "what a run does if copies of tensors differ between ranks (train.check_every): stop; or heal: copy them from "
        "a rank of the majority. Two copies have no majority",
    )
    on_spike: Literal["none", "stop", "skip", "rollback"] = key(
        "none",
        "what a run does if the loss or the norm of the gradients is far above those of the steps before: nothing; "
        "stop; skip the update; or rollback: go back to a checkpoint, and on with later batches",
    )
    spike_window: int = key(100, "steps before, whose median a spike is compared with", ge=5, le=10_000, only=LOOKS)
    spike_factor: float = key(
        10.0,
        "a spike is above the median by so many times the usual deviation from it (1.4826 times the median deviation)",
        gt=0,
        only=LOOKS,
    )
    rollback_steps: int = key(
        1, "a rollback goes to the newest checkpoint that is at least so many steps before the spike", ge=1, only=BACK
    )
    skip_batches: int = key(
        1, "batches that are left out after a rollback, from that of the spike on; at least 1", ge=1, only=BACK
    )
