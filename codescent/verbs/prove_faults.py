"""In: a config, a script of faults. Out: the losses of a run that loses ranks, compared with the run left alone.
Does not make the faults (launch/inject.py does) and does not decide how a run goes on (its config does)."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.base.call import INVITED
from codescent.base.console import new_console
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.writing import make_folder
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.launch.fault_script import Fault, FaultKind, parse_faults
from codescent.launch.inject import Hit, Injection
from codescent.launch.local_ranks import LocalRanks
from codescent.plan import Plan
from codescent.planner.prediction import has_common_step
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.results import train_run
from codescent.strategies import active
from codescent.verbs.finding import finding_of
from codescent.verbs.proof import TOLERANCE, folder_of_proof, refuse_without_effect, words_of_proof
from codescent.verbs.prove_table import proved_json, show

STOPPED_S = 3.0
"""Seconds for which others wait for a stopped rank, if the config does not say it (parallel.stopped_s)."""
JOIN_STOPPED_S = 150.0
"""The same where a rank joins: until it is there, all ranks are stopped."""
JOIN_LEASE_S = 600.0
"""For as long rank 0 stays the writer of its run while it is stopped (survive.lease_s), where a rank joins."""
SAVES = 4
"""Checkpoints in the steps of a proof, at least."""
USED = {"config", "overrides", "faults", "steps", "precision", "json"}
ALONE = "the run left alone"


def main(arguments: Namespace) -> int:
    """Train twice, with and without the faults, and print the comparison. Returns 0 if the losses are the same, else 1.

    Raises:
        UserError: all problems of the script and of the config; or the run left alone fails.
    """
    refuse_without_effect(arguments, f'--faults "{arguments.faults}"', USED)
    given = load(arguments.config, arguments.overrides).config
    faults = parse_faults(arguments.faults, given.parallel.ranks, arguments.steps)
    words = [*arguments.overrides, *_words(given, faults, arguments.steps, arguments.precision)]
    config = load(arguments.config, words).config
    plan = _checked(config, faults)
    console, name = new_console(stderr=arguments.json), "; ".join(map(str, faults))
    with folder_of_proof() as folder:
        proof = _Proof(arguments.config, words, config, folder)
        with console.status(ALONE) as status:
            expected = proof.run("alone", ())
            if isinstance(expected, str):
                raise UserError(f"{ALONE}: {expected}")
            status.update(name)
            found = proof.run("faults", faults)
    result = finding_of(name, config.parallel.ranks, found, expected)
    result = dataclasses.replace(result, is_exact=_repeats(plan))
    tolerance = TOLERANCE[arguments.precision]
    said = [result], arguments.steps, arguments.precision, tolerance
    if arguments.json:
        print(json_text({**proved_json(*said), "faults": [_as_json(hit) for hit in proof.hits]}))
    else:
        show(console, *said, what="faults", reference=ALONE)
        for hit in proof.hits:
            console.print(str(hit), markup=False)
        if not result.failed:
            steps = counted(arguments.steps, "step")
            console.print(f"each of {steps} is there once, and a step's number decides its samples")
    return 0 if result.verdict(tolerance) in ("same", "drift") else 1


def _words(given: Config, faults: Sequence[Fault], steps: int, precision: str) -> Iterator[str]:
    """What of the config is changed: a short run, which saves often enough."""
    yield f"train.num_steps={steps}"
    yield from words_of_proof(given, steps, precision)
    yield "log.metrics_every=1"
    if given.checkpoint.every:
        yield f"checkpoint.every={min(given.checkpoint.every, max(1, steps // SAVES))}"
    if _joins(faults):
        yield f"survive.lease_s={max(given.survive.lease_s, JOIN_LEASE_S):g}"
    if given.parallel.stopped_s is None and any(fault.kind is FaultKind.STOP for fault in faults):
        yield f"parallel.stopped_s={JOIN_STOPPED_S if _joins(faults) else STOPPED_S:g}"


def _joins(faults: Sequence[Fault]) -> bool:
    return any(fault.kind is FaultKind.JOIN for fault in faults)


def _checked(config: Config, faults: Sequence[Fault]) -> Plan:
    """The plan of a run that goes on after these faults. Raises UserError: all reasons why there is none."""
    problems = [f"--faults: {problem}" for problem in _without_policy(config, faults)]
    try:
        plan = plan_of(config, config.parallel.ranks)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems:
        raise UserError(*problems)
    return plan


def _without_policy(config: Config, faults: Sequence[Fault]) -> Iterator[str]:
    """Why the run would end at a fault: then there is nothing to compare."""
    ranks = config.parallel.ranks
    if ranks == 1:
        yield "parallel.ranks = 1: nobody is left when this rank is lost; give at least 2"
    elif not config.parallel.restarts and config.survive.on_loss == "stop":
        yield (
            "a run ends when it loses a rank: set survive.on_loss to restart or shrink (codescent docs faults); "
            "where work is given out, parallel.restarts (codescent docs parameter_server)"
        )
    joins = [fault for fault in faults if fault.kind is FaultKind.JOIN]
    if config.survive.on_loss != "shrink":
        for fault in joins:
            yield (
                f"'{fault}': a rank that is lost comes again by itself, and no other one can; leave it out, or set "
                "survive.on_loss=shrink"
            )
        return
    if joins and config.survive.spares:
        yield (
            f"survive.spares = {config.survive.spares}: a spare takes the place of a lost rank at once, so no "
            "other one can join; give 0"
        )
    if joins and config.parallel.stopped_s is not None and config.parallel.stopped_s < JOIN_STOPPED_S:
        yield (
            f"parallel.stopped_s = {config.parallel.stopped_s:g}: all ranks are stopped until the one that joins is "
            f"there; give at least {JOIN_STOPPED_S:g}"
        )
    yield from _not_left(faults, ranks)


def _not_left(faults: Sequence[Fault], ranks: int) -> Iterator[str]:
    """Ranks that are not there any more when they shall be lost: those that are left are numbered anew."""
    left = ranks
    for fault in faults:
        if fault.rank is not None and left <= fault.rank < ranks:
            yield f"'{fault}': there is no rank {fault.rank} then: the run has {counted(left, 'rank')}, counted from 0"
        left += 1 if fault.kind is FaultKind.JOIN else -1
    if left < 1:
        yield "no rank is left at the end; let one join before"


def _repeats(plan: Plan) -> bool:
    """Whether a run has the same losses each time. Where ranks take other steps than others, only exact methods do."""
    return has_common_step(plan) or all(strategy.exact(plan) for strategy in active(plan))


class _Proof:
    """Two runs of one config. `hits`: the faults that were made."""

    def __init__(self, config: str, words: Sequence[str], checked: Config, folder: Path) -> None:
        self.config, self.words, self.folder, self.checked = config, words, folder, checked
        self.hits: list[Hit] = []

    def run(self, name: str, faults: Sequence[Fault]) -> list[dict[str, float]] | str:
        """The metrics of a run with these faults, or why there is nothing to compare."""
        path, ranks, survive = self.folder / name, self.checked.parallel.ranks, self.checked.survive
        invited = self.folder / f"{name} invited"
        injections: list[Injection] = []

        def beside(process: int) -> Injection:
            injections.append(Injection(faults, LocalRanks(process, ranks), invited))
            return injections[-1]

        make_folder(invited)
        waits = {INVITED: str(invited)} if survive.on_loss == "shrink" and not survive.spares else {}
        ended = train_run(self.config, [*self.words, f"run.folder={path}"], waits, beside)
        self.hits = [hit for injection in injections for hit in injection.hits]
        if ended.why:
            return ended.why
        if missed := faults[len(self.hits) :]:
            return f"'{missed[0]}': was not made: {_why_not(missed[0])}"
        folder = RunFolder.open(path)
        self.hits = [*_at_their_step(self.hits, folder)]
        rows = [dict(row) for row in folder.read_metrics()]
        return _not_once(rows, self.checked.train.num_steps) or rows


def _why_not(fault: Fault) -> str:
    if fault.rank is None:
        return "no rank was missing, no process has come in its place, or all steps were taken"
    return f"rank {fault.rank} was not there, or had taken all its steps"


def _at_their_step(hits: Sequence[Hit], folder: RunFolder) -> Iterator[Hit]:
    """Ranks that join, with the first step in which they took part, as the run has recorded it."""
    firsts = iter([int(event["step"]) + 1 for event in folder.read_events() if event["kind"] == "regroup"])
    for hit in hits:
        joined = hit.fault.kind is FaultKind.JOIN and hit.rank is not None
        yield dataclasses.replace(hit, step=next(firsts, hit.step)) if joined else hit


def _not_once(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """A sentence if a step is missing, or is there more often than once; else ""."""
    times = Counter(int(row["step"]) for row in rows)
    if wrong := [step for step in range(1, steps + 1) if times[step] != 1]:
        return f"step {wrong[0]} is there {times[wrong[0]]} times; each step must be there once"
    return ""


def _as_json(hit: Hit) -> dict[str, Any]:
    fault = hit.fault
    return {
        "kind": fault.kind.value,
        "rank": hit.rank,
        "step": fault.step,
        "made_in_step": hit.step,
        "instruction": hit.instruction,
    }
