"""In: [survive] of a run, the target of its script, its plan. Out: words for agents; why it cannot survive losses.
Does not start anything: agents do (launch/agent.py)."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.errors import UserError
from codescent.build.shrunk import shrunk
from codescent.build.survival import copies, wrong_survival
from codescent.config.sections import Config
from codescent.plan import Plan

BY_AGENTS = ("local", "ssh")
"""Targets whose ranks our own agents start. Other launchers own their ranks."""


def stopped_words(config: Config) -> tuple[str, ...]:
    """What each agent is told of ranks that are stopped."""
    stopped_s = config.parallel.stopped_s
    return () if stopped_s is None else ("--stopped", f"{stopped_s:g}")


def loss_words(config: Config) -> tuple[str, ...]:
    """What each agent is told of losses; nothing: the run ends by one."""
    keys = config.survive
    if keys.on_loss == "stop":
        return ()
    window = ("--restart-window", f"{keys.restart_window_s:g}")
    return "--on-loss", keys.on_loss, "--max-restarts", str(keys.max_restarts), *window


def problems(target: str, config: Config, plan: Plan | None) -> Iterator[str]:
    """Why the run cannot do what [survive] asks for. `plan`: None: it is not known here."""
    keys, restarts = config.survive, config.parallel.restarts
    if restarts:
        yield (
            f"parallel.restarts = {restarts}: only `codescent train --ranks` starts a worker again, no script does: "
            "set it to 0"
        )
    if keys.on_loss == "stop":
        return
    if target not in BY_AGENTS:
        yield (
            f'survive.on_loss = "{keys.on_loss}": --to {target} starts ranks that only {target} may start again; take '
            f"--to {' or --to '.join(BY_AGENTS)}, or set survive.on_loss to stop: --resume=auto of the script goes on"
        )
    if plan is None:
        return
    found = wrong_survival(
        keys,
        save_every=config.checkpoint.every,
        lost_whole=min(copies(plan), default=1) > 1,
        smaller=why_not_smaller(config, plan.model.vocab_size or None, plan.world_size),
    )
    yield from map(str, found)


def why_not_smaller(config: Config, vocab_size: int | None, ranks: int) -> str:
    """Why there is no layout with one rank less, where the run would need it; "": there is one."""
    if config.survive.on_loss != "shrink":
        return ""
    if ranks == 1:
        return "the run has one rank"
    try:
        shrunk(config, vocab_size, ranks, ranks - 1)
    except UserError as error:
        return str(error)
    return ""
