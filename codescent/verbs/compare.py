"""In: arguments of `codescent compare`. Out: what differs between runs A and B, in words; an exit code for CI.
Does not compute what differs (results/ does) and does not write a run folder. It does not import torch."""

from __future__ import annotations

import os
import re
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from codescent.base.amounts import of_change
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import say
from codescent.results import Run, State, open_run
from codescent.results.compare import FEWEST_PAIRS, PartChange, Times, Way, times
from codescent.results.differences import (
    Alike,
    Amount,
    Facts,
    Losses,
    Values,
    facts,
    load,
    losses,
    memory,
    refuse_empty,
    speed,
)
from codescent.verbs.columns import columns

SHOWN_KEYS = 12
"""Largest number of keys that are listed in a group."""
SHOWN_CHARS = 60
SHOWN_COLUMNS = 80
"""Width of the first lines. Every terminal has it."""
FAILED = 1
"""Exit code if B is slower than --fail-above allows."""


def main(arguments: Namespace) -> int:
    """Print what differs. Returns 1 if B is slower by more than --fail-above, else 0.

    Raises UserError: wrong folders or options; --fail-above without an interval.
    """
    bound = None if arguments.fail_above is None else _bound(arguments.fail_above)
    a, b = _sides(arguments.runs, arguments.others)
    found, differences = times(a, b, arguments.warmup), facts(a, b)
    if bound is not None and not found.has_interval:
        raise UserError(f"--fail-above: {too_few(found)}, so nothing can be said; let the runs take more steps")
    fails = bound is not None and found.step.share.low > bound
    if arguments.json:
        print(json_text(compared_json(a, b, found, differences, bound)))
        return FAILED if fails else 0
    say(verdict(found, differences, max(run.num_ranks for run in (*a, *b))))
    say(["", *table(found), ""])
    say([columns(list(rows(a, b, found, differences)))])
    if bound is not None:
        say(["", judgement(found, bound)])
    return FAILED if fails else 0


def compared_json(
    a: Sequence[Run], b: Sequence[Run], found: Times, differences: Facts, bound: float | None
) -> dict[str, Any]:
    """What is printed, for programs. Seconds, bytes and shares are numbers; docs/compare.md describes each key."""
    most = max(run.num_ranks for run in (*a, *b))
    judged = None
    if bound is not None:
        judged = {"bound": bound, "failed": found.step.share.low > bound, "said": judgement(found, bound)}
    return {
        "runs": {"A": [run.folder.path for run in a], "B": [run.folder.path for run in b]},
        "verdict": list(_sentences(found, differences, most)),
        "times": {
            "way": found.way,
            "side_by_side": found.beside,
            "samples": _both(found.samples),
            "warmup_steps": found.warmup,
            "tokens_a_per_b": found.scale,
            "step": _change(found.step),
            "mean_step": _change(found.mean),
            "parts": {change.part: _change(change) for change in found.parts},
            "cause": None if found.cause is None else found.cause.part,
            "rank": None if found.rank is None else _both(found.rank),
        },
        "memory_bytes": _amounts(memory(a, b)),
        "peak_flops_per_s": _amounts(speed(a, b)),
        "losses": losses(a, b),
        "differences": {
            name: {key: _both(sides) for key, sides in getattr(differences, name).items()}
            for name in ("model", "config", "layout", "data", "software", "hardware")
        },
        "inside": differences.inside,
        "notes": list(_notes(a, b, found, differences)),
        "fail_above": judged,
    }


def _both(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip("AB", values, strict=True))


def _change(change: PartChange) -> dict[str, Any]:
    return {"a_s": change.a_s, "b_s": change.b_s, "share": change.share, "shown": change.shown}


def _amounts(amount: Amount | None) -> dict[str, Any] | None:
    return None if amount is None else {"A": amount.a, "B": amount.b, "change": amount.change, "shown": amount.shown}


def _bound(text: str) -> float:
    """A percentage as a share. Raises UserError: it is none."""
    if not re.fullmatch(r"\d{1,3}(\.\d+)?\s*%", text.strip()):
        raise UserError(f"--fail-above {text}: is not a percentage of at least 0; give one such as 3%")
    return float(text.strip().rstrip("% ")) / 100


def _sides(runs: Sequence[Path], others: Sequence[Path] | None) -> tuple[list[Run], list[Run]]:
    """The runs of A and of B. Raises UserError with all problems."""
    if others is None and len(runs) != 2:
        raise UserError(
            f"{counted(len(runs), 'run folder')}: give two, A and B; or several of each: A1 A2 A3 --with B1 B2 B3"
        )
    left, right = (runs, others) if others is not None else (runs[:1], runs[1:])
    problems: list[str] = []
    opened: list[list[Run]] = []
    for paths in (left, right):
        opened.append([])
        for path in paths:
            try:
                opened[-1].append(open_run(path))
            except UserError as error:
                problems += error.problems
    resolved = [Path(os.path.realpath(path)) for path in (*left, *right)]  # resolve() raises on a circle of links
    problems += [f"{path}: given twice; a run is compared with others" for path in _twice(resolved)]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    refuse_empty([*opened[0], *opened[1]])
    return opened[0], opened[1]


def _twice(paths: Sequence[Path]) -> list[Path]:
    return [path for path in dict.fromkeys(paths) if paths.count(path) > 1]


def verdict(found: Times, differences: Facts, num_ranks: int) -> Iterator[str]:
    """The first lines: whether B is slower, and by which part. `num_ranks`: the most that a run has."""
    for sentence in _sentences(found, differences, num_ranks):
        yield from textwrap.wrap(sentence, SHOWN_COLUMNS, break_on_hyphens=False)


def _sentences(found: Times, differences: Facts, num_ranks: int) -> Iterator[str]:
    model = "The models differ. " if differences.model else ""
    step, cause = found.step, found.cause
    if not found.has_interval:
        yield f"{model}Too few steps to tell: {of_change(step.share.value)} a step."
        yield f"{too_few(found).capitalize()}."
    elif step.shown:
        word = "slower" if step.share.value > 0 else "faster"
        yield f"{model}B is {word} than A: {changed(step, 'a step')}."
    else:
        yield f"{model}No difference{' of the step' if cause else ''} shown: {changed(step, 'a step')}."
    if cause is None:
        return
    of_ranks = found.rank if num_ranks > 1 else None
    where = "" if of_ranks is None else f", on rank {of_ranks[cause.share.value > 0]},"
    whole = changed(cause, "of A's step")
    if not cause.shown:
        yield "No part alone is shown to explain it. The largest change is"
        yield f"{name_of(cause)}{where or ':'} {whole}."
    elif step.shown:
        share = f"{100 * cause.share.value / step.share.value:.0f} %"
        yield f"{name_of(cause).capitalize()}{where} explains {share}: {whole}."
    else:
        yield f"But {name_of(cause)}{where} changes: {whole}."


def too_few(found: Times) -> str:
    """Why there is no interval."""
    few = min(found.samples)
    allow = "allows" if few == 1 else "allow"
    return f"{counted(few, 'sample')} after a warm-up of {counted(found.warmup, 'step')} {allow} no interval"


def name_of(change: PartChange) -> str:
    """A part in words: the name of its column without the unit."""
    return change.part.removesuffix("_s").replace("_", " ")


def changed(change: PartChange, of: str = "") -> str:
    """A change with its interval, such as "+3.1 % a step (+2.0 to +4.2 %)"."""
    value, low, high = map(of_change, change.share)
    return f"{value}{of and f' {of}'} ({low.removesuffix(' %')} to {high})"


def table(found: Times) -> Iterator[str]:
    """The seconds of the step and of its parts on both sides. Bubble and waiting are listed where there is some."""
    yield f"{'':14}{'A, ms':>10}{'B, ms':>10}   change, share of A's step"
    for change in (*found.parts, found.step, found.mean):
        if change.a_s == change.b_s == 0:
            continue
        name = {found.step.part: "typical step", found.mean.part: "mean step"}.get(change.part, name_of(change))
        interval = changed(change) if found.has_interval else of_change(change.share.value)
        mark = "" if not found.has_interval or change.shown else "   not shown"
        yield f"{name:14}{1e3 * change.a_s:10.3f}{1e3 * change.b_s:10.3f}   {interval}{mark}"


Row = tuple[str, list[str]]


def rows(a: Sequence[Run], b: Sequence[Run], found: Times, differences: Facts) -> Iterator[Row]:
    """All that is said below the table: a name and lines for each row."""
    yield "samples", list(_samples(a, b, found))
    yield "memory", [_memory(memory(a, b))]
    yield "losses", list(_losses(losses(a, b)))
    groups = {
        "model": differences.model,
        "config": differences.config,
        "layout": differences.layout,
        "data": differences.data,
        "software": differences.software,
        "hardware": differences.hardware,
    }
    for name, values in groups.items():
        yield name, list(_values(values))
    if notes := list(_notes(a, b, found, differences)):
        yield "note", notes


def _samples(a: Sequence[Run], b: Sequence[Run], found: Times) -> Iterator[str]:
    """What the intervals rest on."""
    left, right = found.samples
    said = {
        Way.PAIRS: f"{counted(left, 'pair')} of runs, {'side by side' if found.beside else 'taken in turns'}",
        Way.RUNS: f"{counted(left, 'run')} of A, {right} of B",
        Way.BLOCKS: f"{counted(left, 'block')} of steps of A, {right} of B",
    }
    yield said[found.way] + (", side by side" if found.way is Way.BLOCKS and found.beside else "")
    yield f"without the first {counted(found.warmup, 'step')} of each run (--warmup)"
    if found.way is Way.BLOCKS:
        yield "the intervals leave out how much runs of one config differ from run to run:"
        yield f"take at least {FEWEST_PAIRS} of each, in turns or side by side"


def _memory(amount: Amount | None) -> str:
    if amount is None:
        return "unknown"
    said = f"peak {amount.a / 2**20:,.0f} MiB | {amount.b / 2**20:,.0f} MiB"
    return f"{said}: {of_change(amount.change) if amount.shown else 'no difference shown'}"


def _losses(found: Losses | None) -> Iterator[str]:
    """How the losses compare, and where they part."""
    if found is None:
        yield "A and B have no step in common"
        return
    yield f"{found.alike} ({counted(found.steps, 'step')})"
    if found.alike is not Alike.BITWISE:
        yield f"first difference at step {found.first_step}: {found.first:.1e} relative"
        yield f"largest at step {found.worst_step}: {found.worst:.1e}"
        yield f"at step {found.last_step}: {found.last[0]:.6g} | {found.last[1]:.6g}"
    if found.validation is not None:
        step, left, right = found.validation
        yield f"validation at step {step}: {left:.6g} | {right:.6g}"
        yield from (f"validation of {name}: {one:.6g} | {other:.6g}" for name, (one, other) in found.by_corpus.items())
    if found.decided and found.alike is not Alike.BITWISE:
        yield f"decided by {', '.join(found.decided[:SHOWN_KEYS])}"
    for side, step in found.repeats.items():
        yield f"the runs of {side} differ among themselves, from step {step}"


def _values(values: Values) -> Iterator[str]:
    """A line per key that differs: the value in A, and that in B."""
    if not values:
        yield "same"
    for name, (left, right) in list(values.items())[:SHOWN_KEYS]:
        yield f"{name.removeprefix('levers.')}  {_shown(left)} | {_shown(right)}"
    if len(values) > SHOWN_KEYS:
        yield f"and {counted(len(values) - SHOWN_KEYS, 'key')} more"


def _shown(values: Sequence[Any]) -> str:
    """The values of one side."""
    text = " or ".join("not set" if value is None else str(value) for value in values)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def _notes(a: Sequence[Run], b: Sequence[Run], found: Times, differences: Facts) -> Iterator[str]:
    """What a reader must know before he trusts the numbers."""
    for side, runs in (("A", a), ("B", b)):
        for run in runs:
            if run.state is not State.DONE:
                last = int(run.columns["step"][-1])
                yield f"{side}: {run.name} is {run.state} (step {last:,}): the steps that it has are used"
            if steps := run.profiled:
                yield f"{side}: {run.name}: a profiler recorded {counted(steps, 'step')}, which makes them longer"
    for side, names in differences.inside.items():
        yield f"the runs of {side} differ in {', '.join(names[:SHOWN_KEYS])}"
    if abs(found.scale - 1) > 1e-9:
        yield f"a step of B has {1 / found.scale:.3g} times the tokens of A's: its seconds are those of A's tokens"
    if found.rank is None and max(run.num_ranks for run in (*a, *b)) > 1:
        yield "the parts are those of rank 0: ranks.csv has too few rows (a smaller log.every gives more)"
    if found.mean.shown and not found.step.shown:
        yield "the mean step differs, the typical one does not: some steps are much slower than the others"
    if (peak := speed(a, b)) is not None and peak.shown:
        left, right = (f"{value / 1e9:,.0f}" for value in (peak.a, peak.b))
        yield (
            f"products of matrices ran at {left} | {right} GFLOP/s when the runs began: the processors were not "
            "equally fast, or other programs used them"
        )
    if (busy := load(a, b)) is not None:
        yield f"load of the machine when the runs began: {busy[0]:.1f} | {busy[1]:.1f}"


def judgement(found: Times, bound: float) -> str:
    """What --fail-above says."""
    share, limit = found.step.share, f"{100 * bound:g} %"
    if share.low > bound:
        return f"--fail-above: failed: B is slower by more than {limit}, with all of the interval"
    if share.high > bound:
        return f"--fail-above: passed, but the interval reaches above {limit}: more runs would make it narrower"
    return f"--fail-above: passed: B is not slower by more than {limit}"
