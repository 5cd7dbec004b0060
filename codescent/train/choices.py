"""In: a config, a plan, this rank's process groups, environment.json of the run to resume. Out: the kernels, the way of
bf16 products and the number of threads, chosen and in use; the content of the new environment.json.
Does not measure: machine.py and threads.py do. A resumed run keeps its choices on the same kind of machines."""

from __future__ import annotations

import socket
from typing import Any, get_args

import torch

from codescent.base.agreement import together
from codescent.base.device import unique_name
from codescent.base.errors import UserError
from codescent.config.sections import Compiled, Config
from codescent.operators import products
from codescent.plan import Plan
from codescent.train import compiling, machine, threads
from codescent.train.hang_up import meets_again
from codescent.train.world import World

KEPT = "as at the beginning"
"""In place of a trial: the choice that the run began with."""

CHOICES = {
    "matmul": "kernels of fp32 products",
    "bf16_products": "number format in which bf16 products are computed",
    "threads": "threads per rank",
    "compile": "what torch.compile compiles",
}
"""Settings that a run chooses by a trial, and that change the rounding of its sums."""

KIND = ("torch", "processor", "instructions", "cores", "device")
"""Facts of a rank's machine, in environment.json, that decide the choices."""


def choose(config: Config, plan: Plan, world: World, before: dict[str, Any]) -> dict[str, Any]:
    """Choose by trials, unless the config or the run to resume has chosen. Collective.

    Args:
        config: `train` has the keys that choose.
        plan: of the run.
        world: this rank's device and number of threads.
        before: environment.json of the run to resume; empty: the run is new.

    Returns:
        the content of environment.json; under "notes" lines for people.
    """
    device, precision = world.device, plan.work.precision
    here = machine.describe(device, world.num_threads, world.this_rank.world_size)
    mine = {"host": socket.gethostname(), "device": unique_name(world.device)}
    here["ranks"] = together(UserError, lambda: mine)
    here["machines"] = _distinct(together(UserError, lambda: {fact: here[fact] for fact in KIND}))
    kept: dict[str, Any] = world.from_first(lambda: _kept(before, here))
    machine.set_deterministic(config.train.deterministic)
    products.sum_wide()
    compiles = compiling.chosen(config.train, plan, world)
    chosen: dict[str, Any] = {
        "matmul": _matmul(config.train.matmul, world, kept),
        "bf16_products": _bf16_products(plan, world, kept),
        "compile": compiles,
    }
    chosen["threads"] = _threads(plan, world, kept, fixed=config.train.deterministic)
    widens = precision == "bf16" and (chosen["bf16_products"] or {}).get("choice") == "fp32"
    of_products = "fp32" if widens else precision
    again = meets_again() and before.get("peak_precision") == of_products
    peak, others = (before["peak_flops_per_s"], before["peak_others"]) if again else _peak(device, of_products)
    return (
        here
        | chosen
        | {
            "num_threads": torch.get_num_threads(),
            "levers": machine.levers(config.train, config.optimizer) | compiling.levers(compiles, plan, device),
            "peak_precision": of_products,
            "peak_flops_per_s": peak,
            "peak_others": others,
            "spec": machine.published_peak([one["device"] for one in here["machines"]], precision, chosen["matmul"]),
            "notes": [
                *_moved(before, here),
                *changed(before, chosen),
                *compiling.said(compiles, plan),
                *threads.said(chosen["threads"]),
            ],
        }
    )


def _peak(device: torch.device, precision: str) -> tuple[float, dict[str, float] | None]:
    """The peak of this rank, and the cores that other programs used meanwhile (`used_by_others`); None: on a device
    that is not a CPU nothing is known of other programs. Collective."""
    load = threads.Load()
    peak = machine.peak_flops_per_s(device, precision)
    everyone = together(UserError, lambda: (torch.get_num_threads(), load.end()))
    return peak, threads.used_by_others(everyone) if device.type == "cpu" else None


def restore(config: Config, recorded: dict[str, Any]) -> str:
    """Put in use what a run has chosen, for a process that computes again what it has computed. Without trials.

    Args:
        config: of the run; `train` has the keys that choose.
        recorded: environment.json of the run.

    Returns:
        What torch.compile compiles.

    Raises:
        UserError: environment.json does not say what the run has chosen.
    """
    try:
        kernels, compiles, threads_per_rank = (
            recorded["matmul"]["choice"],
            recorded["compile"]["choice"],
            recorded["num_threads"],
        )
        wide = (recorded["bf16_products"] or {}).get("choice") == "fp32"
        known = kernels in machine.TORCH_SETTING and compiles in get_args(Compiled) and threads_per_rank >= 1
    except (LookupError, TypeError, AttributeError):
        known = False
    if not known:
        raise UserError(
            "environment.json: does not say which kernels and threads the run had; it cannot be computed again"
        )
    machine.set_deterministic(config.train.deterministic)
    products.sum_wide()
    machine.use_matmul(kernels)
    products.widen_bf16(wide)
    torch.set_num_threads(threads_per_rank)
    return str(compiles)


def other_machine(recorded: dict[str, Any], device: torch.device) -> list[str]:
    """The facts of this machine that differ from those of a run, and that decide how it rounds: for people."""
    here = machine.describe(device, 1, 1)
    known = _known(recorded)
    if any(all(one.get(fact) == here[fact] for fact in KIND) for one in known):
        return []
    of_run = known[0] if known else {}
    return [f"{fact} {here[fact]}, of the run {of_run.get(fact)}" for fact in KIND if of_run.get(fact) != here[fact]]


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each choice of a resumed run that is not the one it had before."""
    lines = []
    for name, what in CHOICES.items():
        old, new = ((of.get(name) or {}).get("choice") for of in (before, now))
        if None not in (old, new) and old != new:
            lines.append(f"{what}: {new}, before {old}; from here on the losses differ by rounding")
    return lines


def _distinct(machines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kind of machine once."""
    return [one for number, one in enumerate(machines) if one not in machines[:number]]


def _known(before: dict[str, Any]) -> list[dict[str, Any]]:
    """The kinds of machines on which the run has been; none: an earlier version has not recorded them."""
    found = before.get("machines")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _moved(before: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """A line for people if a resumed run is on another kind of machine, so that it chooses again."""
    known = _known(before)
    new = next((one for one in here["machines"] if one not in known), None)
    if new is None or not known:
        return []
    facts = [f"{fact} {new[fact]}, before {known[0].get(fact)}" for fact in KIND if new[fact] != known[0].get(fact)]
    return [f"changed since the last command: {'; '.join(facts)}; so kernels, products and threads are chosen again"]


def _kept(before: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """By name: the choices of `before`, if every rank is on a machine of a known kind. Those of threads: `by_most`."""
    known = _known(before)
    if any(one not in known for one in here["machines"]):
        return {}
    kept = {name: before[name]["choice"] for name in ("matmul", "bf16_products") if before.get(name)}
    if before.get("world_size") == here["world_size"]:
        kept["threads"] = (before.get("threads") or {}).get("by_most", {})
    return kept


def _matmul(wanted: str, world: World, kept: dict[str, Any]) -> dict[str, Any]:
    """The kernels of fp32 products. If a rank needs the exact ones, all ranks use them."""
    if wanted == "auto" and "matmul" in kept:
        chosen = {"choice": kept["matmul"], "trial": KEPT}
    else:
        chosen = machine.try_matmul(wanted, world.device)
    if not world.all_agree(chosen["choice"] == "fast"):
        chosen["choice"] = "exact"
    machine.use_matmul(chosen["choice"])
    return chosen


def _bf16_products(plan: Plan, world: World, kept: dict[str, Any]) -> dict[str, Any] | None:
    """How bf16 products are computed, the same on every rank; None: there are none on a CPU.

    They are those of the model, or of Muon (`optimizer.muon_precision`).
    """
    if "bf16_products" in kept:
        chosen: dict[str, Any] | None = {"choice": kept["bf16_products"], "trial": KEPT}
    else:
        of_muon = plan.update.get("muon_precision") == "bf16"
        chosen = machine.try_bf16(world.device, "bf16" if of_muon else plan.work.precision)
    if chosen is not None and not world.all_agree(chosen["choice"] == "bf16"):
        chosen["choice"] = "fp32"
    products.widen_bf16(chosen is not None and chosen["choice"] == "fp32")
    return chosen


def _threads(plan: Plan, world: World, kept: dict[str, Any], *, fixed: bool) -> dict[str, Any]:
    """The number of threads of this rank. `fixed`: without a trial, whose result may vary between identical runs.

    Ranks that may use as many threads as another one use as many as it does: `by_most`, which a resumed run keeps.
    """
    most = world.num_threads
    chosen: dict[str, Any] = {"choice": most, "most": most, "trial": {}}
    tries = world.tries_threads and not fixed and world.device.type == "cpu" and most > 1
    is_kept = str(most) in kept.get("threads", {})
    load = threads.Load()
    trial = threads.of_slowest_rank(threads.try_threads(plan, most) if tries and not is_kept else {})
    if tries and is_kept:
        chosen |= {"choice": min(kept["threads"][str(most)], most), "trial": KEPT}
    elif trial:
        chosen |= {"choice": threads.fastest(trial), "trial": {str(number): s for number, s in trial.items()}}
    everyone = together(UserError, lambda: [tries, most, chosen["choice"], load.end()])
    chosen["by_most"] = {str(its_most): choice for its_tries, its_most, choice, _ in everyone if its_tries}
    if trial:
        chosen["others"] = threads.used_by_others([(choice, load) for _, _, choice, load in everyone])
    torch.set_num_threads(chosen["choice"])
    return chosen
