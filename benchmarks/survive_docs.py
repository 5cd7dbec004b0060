"""In: the results of survive.py, docs/faults.md. Out: the page with the figures of these results between two markers.
Does not measure. tests/test_faults_page.py compares the page with the results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measure import ROOT
from survive_cost import COMPARING, SAVING, WATCHING
from survive_detection import CRASH, CUT, ENDED, HANG, STOPPED, TIMEOUT_S
from survive_losses import PEER

PAGE = ROOT / "docs" / "faults.md"
RESULTS = ROOT / "benchmarks" / "results" / "survive_cpu_2cores.json"
BEGIN = "<!-- `python benchmarks/survive.py --docs` writes this part; tests/test_faults_page.py compares -->"
END = "<!-- the end of this part -->"
NOT_MEASURED = "not measured"
HEAD = ("fault", "what is seen, and who says it", "after", "what happens", "what to do")
LAUNCH, TRAIN, CHECKPOINTS = "launch.md#when-ranks-stand-still", "train.md", "checkpoints.md"

Parts = Mapping[str, Any]


def write() -> None:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8"))), "utf-8")


def page(text: str, results: Mapping[str, Any]) -> str:
    """The page with the figures of these results. Raises ValueError: it has no markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{measured_part(results['parts'])}\n\n{END}{after}"


def measured_part(parts: Parts) -> str:
    """The tables, and how they were measured."""
    blocks = [
        _table(HEAD, rows(parts)),
        how(parts),
        "### Measured",
        _table(("what", "measured", "asked", "load of the machine"), claims(parts)),
    ]
    if "soak" in parts:
        blocks += ["### Where the time goes", *soak(parts["soak"]["result"])]
    return "\n\n".join(blocks)


def rows(parts: Parts) -> Iterator[Sequence[str]]:
    """A row for each fault."""
    yield (
        "a rank is killed, or ends by an error",
        "The launcher names the rank that fell first: host, process, signal, step. Event `crash`.",
        _seconds(parts, "detection", CRASH),
        "The others are stopped. The run has ended. With `survive.on_loss` it goes on: next rows.",
        "Read the output of the rank, which the launcher prints. Then `codescent train --resume`.",
    )
    for name, words in ON_LOSS.items():
        yield (
            f"the same with {words}",
            "The same line, then `start N, with n of m ranks`. Event `resume`.",
            f"first step {_loss(parts, name)}",
            *GOES_ON[name],
        )
    yield (
        "a rank is stopped (SIGSTOP) or frozen",
        f"The launcher: a line that names the rank. Then a [page]({LAUNCH}): who waits for whom, where. Event `hang`.",
        f"line {_seconds(parts, 'detection', STOPPED)}, page {_seconds(parts, 'detection', HANG)}",
        "The others wait, at most `parallel.timeout_s`. With `parallel.stopped_s` the rank is ended.",
        "`kill -CONT` the process. Or set `parallel.stopped_s`.",
    )
    yield (
        "no rank moves, for another reason",
        f"The launcher: the [page]({LAUNCH}), with the likely cause and the line of code.",
        "page as above: 5 median steps, at least 6 s",
        "The others wait, at most `parallel.timeout_s`.",
        "What the page says, by its cause.",
    )
    yield (
        "a link is cut, or a host is lost",
        f"The launcher of each side: the [page]({LAUNCH}). It says that the other host is silent.",
        f"{_seconds(parts, 'detection', CUT)} on the slower side",
        f"Both sides end: {_seconds(parts, 'detection', ENDED)} after the cut with `parallel.timeout_s = {TIMEOUT_S}`. "
        "A lease keeps a second writer out: below.",
        "`codescent doctor` finds the link. Then `--resume`.",
    )
    yield (
        "all links lose packets, or are slow",
        "Nobody says anything: it is no fault.",
        _alarms(parts),
        "TCP sends again. The steps take longer.",
        "`codescent doctor` measures links.",
    )
    yield (
        "a rank is slower than the others",
        "The launcher names it and the part that takes longer. Event `straggler`.",
        "two windows of 6 steps and 2 s",
        "The others wait for it in each step.",
        "[Slow ranks](launch.md#slow-ranks).",
    )
    yield (
        "a link between hosts is slower than the others",
        "The launcher of rank 0's host names the link, or the host. Event `straggler`, part `network`.",
        "20 steps",
        "The others wait for it in each step.",
        "[Slow ranks](launch.md#slow-ranks).",
    )
    yield from of_values(parts)
    yield from of_hosts()


def of_values(parts: Parts) -> Iterator[Sequence[str]]:
    """Rows of faults in numbers and files."""
    yield (
        "a bit of a weight or of optimizer state flips in one rank",
        "All ranks name the rank, its host and the tensor. Event `diverged`.",
        f"next comparison (`train.check_every`), {_flips(parts, 'memory')} found",
        "The run stops, or heals (`survive.on_divergence`). Nothing wrong is saved.",
        f"[Remove the machine]({TRAIN}#copies-that-have-diverged), then `--resume`.",
    )
    yield (
        "loss or gradients are not finite",
        "Rank 0 names the ranks and the first tensor. Event `skipped_steps`.",
        "the same step",
        "All ranks skip the update. Too many in a row end the run.",
        f"[Numbers that are not finite]({TRAIN}#numbers-that-are-not-finite).",
    )
    yield (
        "the loss leaps",
        "Rank 0: a line with loss, norm and limits. Event `spike`.",
        "the same step",
        "As `survive.on_spike` says: stops, skips the update, or goes back.",
        f"[Spikes]({TRAIN}#spikes).",
    )
    yield (
        "a bit of a checkpoint flips, a file is cut or lost",
        "Who loads it names the file, before a value is used.",
        f"at loading, {_flips(parts, 'checkpoint')} found",
        "It is refused. With `checkpoint.fall_back` or `survive.on_loss` it is set aside, and the one before is taken.",
        f"The message says the way back. [More]({CHECKPOINTS}#when-something-goes-wrong).",
    )
    yield (
        "the disk is full",
        "The rank that writes: path and bytes.",
        "at the save",
        "Old checkpoints stay. The run stops, or goes on (`checkpoint.on_failed_save`).",
        f"[A full disk]({CHECKPOINTS}#a-full-disk).",
    )
    yield (
        "memory runs out",
        "The rank: what it held. If the kernel kills it: the launcher, with the kernel's count.",
        "at once",
        "As if the rank was killed.",
        f"What the message says: [out of memory]({TRAIN}#out-of-memory).",
    )


def of_hosts() -> Iterator[Sequence[str]]:
    """Rows of launchers and schedulers."""
    yield (
        "the command, a launcher or a script is killed",
        "Nobody can.",
        "2 s",
        "Its ranks end with all that they have started. Temporary files are removed.",
        "`codescent train --resume`. [More](launch.md#ranks-on-this-machine).",
    )
    yield (
        "a scheduler wants the nodes, or the job's time is over",
        "Rank 0: a line, and event `stop`.",
        "the end of the step",
        "All ranks save, and end with an exit code for a requeue.",
        "[Exit codes](launch.md#stopping-and-exit-codes).",
    )
    yield (
        "two processes would write one run",
        "The second one, at its start. A host that was cut off: itself.",
        "[below](#one-writer)",
        "One of them writes.",
        "[One writer](#one-writer).",
    )
    yield (
        "somebody sets the clock of a host",
        "Nobody says anything: it is no fault.",
        "",
        "Waits, deadlines and leases go by a clock that nobody sets. Only the end of the job is a time of day.",
        "Nothing.",
    )


ON_LOSS = {
    "restart": "`survive.on_loss=restart`",
    "restart, a spare": "`survive.spares=1` besides",
    "shrink, copies": "`survive.on_loss=shrink`, copies",
    "shrink, no copies": "`survive.on_loss=shrink`, no copies",
}
NOTHING = "Nothing. Too many losses end the run (`survive.max_restarts`)."
GOES_ON = {
    "restart": ("A new process takes the place. No step is lost where others hold its tensors.", NOTHING),
    "restart, a spare": ("The spare takes the place, and another one is started.", NOTHING),
    "shrink, copies": ("The others go on from memory. The rank comes back at the end of a step.", NOTHING),
    "shrink, no copies": ("The others read the newest checkpoint. The rank comes back as above.", NOTHING),
}


def how(parts: Parts) -> str:
    """How it was measured."""
    records = {name: part["hardware"] for name, part in parts.items()}
    newest = max(record["date"] for record in records.values())
    some = next(iter(records.values()))
    return (
        f"Seconds are medians, measured on {some['cores']} cores ({some['cpu']}) with 4 ranks of a small model. The "
        f"last part is of {newest[:10]}. A load above {some['cores']} means that other programs ran, too. "
        "`benchmarks/survive.py` measures them again. Both policies of `survive.on_loss` were tried with gloo on CPUs. "
        "With NCCL they have not run yet."
    )


def claims(parts: Parts) -> Iterator[Sequence[str]]:
    """What was asked, and what was measured."""
    shares = (WATCHING, COMPARING, SAVING)
    for part in parts.values():
        load = f"{part['hardware']['load_average'][0]:.1f}"
        for must in part["musts"]:
            is_share = must["claim"] in shares
            value, bound = (_number(must[key], must["unit"], is_share=is_share) for key in ("value", "bound"))
            sign = "at least" if must["at_least"] else "at most"
            yield must["claim"], value + ("" if must["held"] else ": **does not hold**"), f"{sign} {bound}", load


def soak(found: Mapping[str, Any]) -> Iterator[str]:
    """Where the time of a run with many faults went."""
    faults = ", ".join(f"{often} x {kind}" for kind, often in sorted(found["faults"].items()))
    minutes = found["wall_s"] / 60
    yield (
        f"A run of {found['steps']:,} steps took {minutes:.0f} minutes, with a fault each 15 s. "
        f"The faults were {faults}. A run that was left alone took the same steps."
    )
    steps = found["steps"] * found["step_s_alone"] / found["wall_s"]
    shares = {name: seconds / found["wall_s"] for name, seconds in found["where_s"].items()}
    yield _table(("part", "share"), [(name, f"{share:.0%}") for name, share in {"steps": steps, **shares}.items()])
    yield "*Slower steps*: a process that starts, and a save after a loss, take processors from the steps."


def _number(value: float, unit: str, *, is_share: bool) -> str:
    return f"{value:.2%}" if is_share else f"{value:.3g}{unit}"


def _table(head: Sequence[str], lines: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def _seconds(parts: Parts, part: str, name: str) -> str:
    found = parts.get(part, {}).get("result", {}).get(name)
    return f"{statistics.median(found):.2g} s" if found else NOT_MEASURED


def _loss(parts: Parts, name: str) -> str:
    found = parts.get("losses", {}).get("result", {}).get(name)
    if not found:
        return NOT_MEASURED
    text = f"{statistics.median(found['first']):.2g} s"
    if found["grown"]:
        text += f", all ranks {statistics.median(found['grown']):.2g} s"
    peer = parts["losses"]["result"].get(PEER)
    if name == "restart" and peer:
        text += f" (`{PEER}`: {statistics.median(peer['first']):.2g} s)"
    return text


def _flips(parts: Parts, kind: str) -> str:
    found = [one for name, one in parts.get("flips", {}).get("result", {}).items() if kind in name]
    if not found:
        return NOT_MEASURED
    return f"{sum(one['found'] for one in found)} of {sum(one['tried'] for one in found)}"


def _alarms(parts: Parts) -> str:
    if "false-alarms" not in parts:
        return NOT_MEASURED
    found = parts["false-alarms"]["result"]
    hangs, slow = (must["value"] for must in parts["false-alarms"]["musts"])
    rates = f"{found['delay_ms']:g} ms, {found['mbit']:g} Mbit/s"
    link = f"{found['minutes']:g} minutes with {found['loss']:.0%} loss, {rates}"
    load = f"; a rank named as slow {slow:g} times, at a load of {found['load_mean']:.0f}" if slow else ""
    return f"never: {hangs or 'no'} false verdicts or restarts in {link}{load}"
