"""In: a number of ranks, schedules, micro-batches. Out: the measured bubble of real pipelines, and the closed form's.
Does not measure a stage's speed: with fewer cores than ranks, sleeps replace arithmetic. Writes a temporary folder."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, write_json
from rich import box
from rich.console import Console
from rich.table import Table
from work import environment, write_tokens

sys.path.insert(0, str(ROOT))

from codescent.base.cores import available_cores
from codescent.cost.bubble import bubble_s
from codescent.cost.simulate import Costs, Simulation, simulate
from codescent.launch.local import run_ranks
from codescent.plan.pipeline import SCHEDULES, pipeline, refusals

BACKWARDS = ("backward", "backward_input", "backward_weight")
COMPUTES = ("forward", *BACKWARDS)
ENDS = ("reduce", "step")
"""Verbs after the pipeline's makespan."""

WITHIN = 0.10
"""Largest allowed difference between the measured bubble and the closed form, as a fraction of the ideal time."""

SUMS_WITHIN = 0.05
"""Largest allowed difference between the measured bubble and that of cost/bubble.py, as a fraction of the ideal."""

MODEL = ("layers", "heads", "hidden", "seq_len", "batch_size", "precision")
DEVICE_MS = 100.0
"""Long beside a message (1 to 2 ms): cost/bubble.py counts messages as communication, the measured bubble has them."""
VOCAB_SIZE = 256

NOTES = """GPT-2 of {layers} layers, width {hidden}, {batch} x {seq} tokens a micro-batch, {precision}: messages of {mib:.2g} MiB over {backend}; {ranks} ranks.
{arithmetic}
bubble: makespan / ideal - 1 (docs/schedules.md). Ideal: the time of the busiest stage's forward and backward passes.
Makespan: from the begin of the first stage to the end of the last, without reduce and step. Medians of {rounds} rounds.
closed form: equal stages, messages without cost. from sums: by cost/bubble.py, from each stage's sums of forward_s and
backward_s alone, which a run's ranks.csv has, without messages. points: how much longer the bubble is measured, in
hundredths of the ideal; most of it is messages. simulated: each verb with its mean seconds on its stage, each message with
the median of those that were waited for (message ms).
held: largest number of micro-batches (times chunks) with activations in memory, for each stage."""  # noqa: E501

WAITED = """RANKS SLEEP INSTEAD OF COMPUTING: {cores} cores for {ranks} ranks. A sleep of {ms:g} ms replaces a stage's forward pass, one of {twice:g} ms
its backward pass, as if each rank had its own device. Instruction lists, executor, messages and gradients are real."""  # noqa: E501

COMPUTED = "Every rank computes, on its own device or on its share of {cores} cores."


@dataclass(frozen=True)
class Step:
    """One step of one case. `spans[stage]` has the instructions of a stage in order, without reduce and step."""

    num_chunks: int
    spans: list[list[dict[str, Any]]]

    @cached_property
    def makespan_s(self) -> float:
        """From the first begin of any stage to the last end of any."""
        begin_s: float = min(stage[0]["begin_s"] for stage in self.spans)
        end_s: float = max(stage[-1]["end_s"] for stage in self.spans)
        return end_s - begin_s

    def seconds(self, stage: int, *verbs: str) -> float:
        """The seconds that a stage spends in some verbs."""
        return float(sum(at["end_s"] - at["begin_s"] for at in self.spans[stage] if at["verb"] in verbs))

    def waits_s(self, stage: int) -> float:
        """The seconds that a stage waits for messages."""
        return float(sum(at["wait_s"] for at in self.spans[stage]))

    @property
    def ideal_s(self) -> float:
        """The seconds of the busiest stage's computation."""
        return max(self.seconds(stage, *COMPUTES) for stage in range(len(self.spans)))

    @property
    def bubble(self) -> float:
        """The time beyond the ideal, as a fraction of the ideal."""
        return self.makespan_s / self.ideal_s - 1

    @property
    def held(self) -> list[int]:
        """For each stage, the largest number of micro-batches times chunks in memory."""
        return [max(at["held"] for at in stage) for stage in self.spans]

    def messages_s(self) -> Iterator[float]:
        """The seconds from each send to the computation that reads the message, if this computation already waited."""
        num_stages = len(self.spans)
        sent = {
            (at["verb"] == "send_activation", at["chunk"] * num_stages + stage, at["microbatch"]): at["begin_s"]
            for stage, spans in enumerate(self.spans)
            for at in spans
            if at["verb"].startswith("send")
        }
        for stage, spans in enumerate(self.spans):
            for at in spans:
                forward = at["verb"] == "forward"
                maker = at["chunk"] * num_stages + stage + (-1 if forward else 1)
                left_s = sent.get((forward, maker, at["microbatch"])) if at["wait_s"] else None
                if left_s is not None and at["begin_s"] - at["wait_s"] <= left_s:
                    yield at["begin_s"] - left_s

    def means_s(self, verb: str) -> tuple[float, ...]:
        """Mean seconds of a verb on each virtual stage; 0 if the stage does not have the verb."""
        num_stages = len(self.spans)
        found: list[list[float]] = [[] for _ in range(num_stages * self.num_chunks)]
        for stage, spans in enumerate(self.spans):
            for at in spans:
                if at["verb"] == verb:
                    found[at["chunk"] * num_stages + stage].append(at["end_s"] - at["begin_s"])
        return tuple(statistics.mean(seconds) if seconds else 0.0 for seconds in found)


def closed_form(name: str, p: int, m: int, v: int) -> float | None:
    """The bubble by docs/schedules.md with f = x = w = b/2; None if there is no formula (zero-bubble with m < p)."""
    if name == "zero-bubble":
        return (p - 1) / (3 * m) if m >= p else None
    return {"naive": p - 1.0, "interleaved": (p - 1) / (v * m)}.get(name, (p - 1) / m)


def held_formula(name: str, p: int, m: int, v: int) -> list[int]:
    """For each stage, the largest number of micro-batches (times chunks) in memory, by docs/schedules.md."""
    if name == "interleaved":
        return [min(m * v, 2 * (p - 1 - stage) + (v - 1) * p + 1) for stage in range(p)]
    equal = {"naive": 1, "gpipe": m, "zero-bubble": min(m, p)}  # on all stages
    return [equal.get(name, min(m, p - stage)) for stage in range(p)]


def simulated(name: str, p: int, m: int, step: Step, message_s: float) -> Simulation:
    """Simulate the schedule with this step's mean seconds of each verb on each virtual stage."""
    costs = Costs(**{f"{verb}_s": step.means_s(verb) for verb in COMPUTES}, latency_s=message_s)
    return simulate(pipeline(name, p, m, step.num_chunks), costs)


def from_sums(name: str, m: int, step: Step) -> float:
    """The bubble by cost/bubble.py, of a step of which only the sums of each stage are known; in the definition of
    `Step.bubble`. Without messages every stage ends with the makespan, so the busiest stage waits for all beyond the
    ideal."""
    p = len(step.spans)
    sums = [
        {"forward_s": step.seconds(stage, "forward"), "backward_s": step.seconds(stage, *BACKWARDS)}
        for stage in range(p)
    ]
    busy_s = [sum(of_stage.values()) for of_stage in sums]
    bubbles_s = bubble_s(pipeline(name, p, m, step.num_chunks), sums)
    return bubbles_s[busy_s.index(max(busy_s))] / max(busy_s)


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if a pipeline is not possible with it."""
    parsed = parser("Run real pipelines of GPT-2; compare bubble and micro-batches in memory with the closed forms.")
    parsed.add_argument("--ranks", type=positive, default=4, help="number of pipeline stages; each is a process")
    parsed.add_argument("--schedules", default=",".join(SCHEDULES), help="schedules to run, with commas")
    parsed.add_argument("--microbatches", default="4,8,16", help="numbers of micro-batches of a step, with commas")
    parsed.add_argument("--virtual-stages", type=positive, default=2, help="chunks per rank, for interleaved")
    way = parsed.add_mutually_exclusive_group()
    way.add_argument(
        "--device-ms",
        type=float,
        metavar="F",
        help="sleep so long instead of a stage's forward pass, and twice as long instead of its backward pass; "
        f"{DEVICE_MS:g} if not given and there are fewer cores than ranks",
    )
    way.add_argument("--real", action="store_true", help="compute; on CUDA if there is a device for each rank")
    parsed.add_argument("--layers", type=positive, default=8, help="at least one for each virtual stage")
    parsed.add_argument("--heads", type=positive, default=4)
    parsed.add_argument("--hidden", type=positive, default=256, help="width of the model")
    parsed.add_argument("--seq-len", type=positive, default=256, help="tokens per sample")
    parsed.add_argument("--batch-size", type=positive, default=4, help="samples per micro-batch")
    parsed.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parsed.add_argument("--rounds", type=positive, default=5, help="steps of each case, after one of warm-up")
    arguments = parsed.parse_args()
    for problem in problems_of(arguments):
        parsed.error(problem)
    return arguments


def problems_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield why a pipeline is not possible with these arguments."""
    if arguments.ranks < 2:
        yield "--ranks 1: a pipeline has at least 2"
    if arguments.device_ms is not None and arguments.device_ms <= 0:
        yield f"--device-ms {arguments.device_ms:g}: must be more than 0; to compute instead, give --real"
    for text in arguments.microbatches.split(","):
        if not text.isdecimal() or int(text) < 1:
            yield f"--microbatches: {text!r} is not a whole number of at least 1"
            return
    for name, num_microbatches in cases_of(arguments):
        yield from refusals(name, arguments.ranks, num_microbatches, chunks_of(arguments, name))
        parts = arguments.ranks * chunks_of(arguments, name)
        if arguments.layers < parts:
            yield f"--layers {arguments.layers}: fewer than the {parts} virtual stages of {name}"


def cases_of(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Every schedule with every number of micro-batches."""
    counts = [int(text) for text in arguments.microbatches.split(",")]
    return [(name, count) for name in arguments.schedules.split(",") for count in counts]


def chunks_of(arguments: argparse.Namespace, name: str) -> int:
    """Virtual stages per rank."""
    return int(arguments.virtual_stages) if name == "interleaved" else 1


def forward_s_of(arguments: argparse.Namespace) -> float:
    """Seconds of the sleep that replaces a stage's forward pass; 0: ranks compute."""
    if arguments.device_ms is not None:
        return float(arguments.device_ms) / 1e3
    return 0.0 if arguments.real or available_cores() >= arguments.ranks else DEVICE_MS / 1e3


def run(arguments: argparse.Namespace, cases: list[tuple[str, int]], folder: Path) -> dict[tuple[str, int], list[Step]]:
    """Start the ranks and wait for them. Returns the steps of each case; empty if a rank failed (it printed why)."""
    job = {
        "ranks": arguments.ranks, "chunks": arguments.virtual_stages, "cases": cases,
        "forward_s": forward_s_of(arguments), "rounds": arguments.rounds, "precision": arguments.precision,
        "num_layers": arguments.layers, "num_heads": arguments.heads, "hidden_dim": arguments.hidden,
        "vocab_size": VOCAB_SIZE, "seq_len": arguments.seq_len, "microbatch_size": arguments.batch_size,
        "tokens": str(write_tokens(folder, VOCAB_SIZE).parent),
    }  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    program = [sys.executable, str(Path(__file__).with_name("pipeline_rank.py")), str(path)]
    if run_ranks(program, arguments.ranks, environment()) != 0:
        return {}
    written = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(arguments.ranks)]
    steps: dict[tuple[str, int], list[Step]] = {case: [] for case in cases}
    for of_ranks in zip(*written, strict=True):
        spans = [[at for at in rank["spans"] if at["verb"] not in ENDS] for rank in of_ranks]
        name, num_microbatches = of_ranks[0]["schedule"], of_ranks[0]["num_microbatches"]
        steps[name, num_microbatches].append(Step(chunks_of(arguments, name), spans))
    return steps


def entry_of(name: str, m: int, steps: Sequence[Step]) -> dict[str, Any]:
    """The results of one case, as numbers: medians over its steps."""
    p, v = len(steps[0].spans), steps[0].num_chunks
    message_s = statistics.median([seconds for step in steps for seconds in step.messages_s()] or [0.0])
    simulations = [simulated(name, p, m, step, message_s) for step in steps]

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return {
        "schedule": name, "num_microbatches": m, "virtual_stages": v,
        "makespan_s": median(step.makespan_s for step in steps),
        "ideal_s": median(step.ideal_s for step in steps),
        "bubble": median(step.bubble for step in steps),
        "bubble_of_makespan": median(1 - step.ideal_s / step.makespan_s for step in steps),
        "closed_form": closed_form(name, p, m, v),
        "from_sums": median(from_sums(name, m, step) for step in steps),
        "points": median(100 * (step.bubble - from_sums(name, m, step)) for step in steps),
        "simulated": median(simulation.bubble_of_ideal for simulation in simulations),
        "message_s": message_s,
        "held": [max(held) for held in zip(*(step.held for step in steps), strict=True)],
        "held_formula": held_formula(name, p, m, v),
        "bubbles": [step.bubble for step in steps],
        "stages": [
            {
                "busy_s": median(step.seconds(stage, *COMPUTES) for step in steps),
                "waits_s": median(step.waits_s(stage) for step in steps),
                "sends_s": median(step.seconds(stage, "send_activation", "send_gradient") for step in steps),
                "receives_s": median(step.seconds(stage, "receive_activation", "receive_gradient") for step in steps),
                "loads_s": median(step.seconds(stage, "load") for step in steps),
                "mean_s": {
                    verb: [median(step.means_s(verb)[chunk * p + stage] for step in steps) for chunk in range(v)]
                    for verb in dict.fromkeys(at["verb"] for at in steps[0].spans[stage])
                },
            }
            for stage in range(p)
        ],
    }  # fmt: skip


def show(entries: list[dict[str, Any]]) -> None:
    """The table for people."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    headings = (
        "m",
        "makespan ms",
        "ideal ms",
        "bubble",
        "from sums",
        "points",
        "closed form",
        "simulated",
        "message ms",
    )
    for heading in (*headings, "held", "formula"):
        table.add_column(heading, justify="right", min_width=11 if heading in ("held", "formula") else None)
    for entry in entries:
        closed = entry["closed_form"]
        table.add_row(
            entry["schedule"] + (f", v = {entry['virtual_stages']}" if entry["virtual_stages"] > 1 else ""),
            str(entry["num_microbatches"]),
            f"{1e3 * entry['makespan_s']:.0f}",
            f"{1e3 * entry['ideal_s']:.0f}",
            f"{entry['bubble']:.3f}",
            f"{entry['from_sums']:.3f}",
            f"{entry['points']:+.1f}",
            "-" if closed is None else f"{closed:.3f}",
            f"{entry['simulated']:.3f}",
            f"{1e3 * entry['message_s']:.2f}",
            " ".join(map(str, entry["held"])),
            " ".join(map(str, entry["held_formula"])),
        )
    Console(highlight=False, width=150).print(table)


def musts_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requirements: bubbles near the closed forms, and micro-batches in memory as by the formulas."""
    musts = []
    for name in dict.fromkeys(entry["schedule"] for entry in entries):
        mine = [entry for entry in entries if entry["schedule"] == name]
        apart = [abs(entry["bubble"] - entry["closed_form"]) for entry in mine if entry["closed_form"] is not None]
        claim = f"{name}: largest difference between measured bubble and closed form, as a fraction of the ideal"
        musts.append(must(claim, max(apart) if apart else None, WITHIN, at_least=False))
        apart = [abs(entry["points"]) / 100 for entry in mine]
        claim = f"{name}: largest difference between measured bubble and that from sums, as a fraction of the ideal"
        musts.append(must(claim, max(apart), SUMS_WITHIN, at_least=False))
        other = sum(entry["held"] != entry["held_formula"] for entry in mine)
        musts.append(must(f"{name}: cases whose held micro-batches differ from the formula", other, 0, at_least=False))
    return musts


def notes_of(arguments: argparse.Namespace) -> str:
    """The text above the table."""
    forward_s, cores = forward_s_of(arguments), available_cores()
    arithmetic = WAITED if forward_s else COMPUTED
    width = {"fp32": 4, "bf16": 2}[arguments.precision]
    return NOTES.format(
        layers=arguments.layers, hidden=arguments.hidden, batch=arguments.batch_size, seq=arguments.seq_len,
        precision=arguments.precision, ranks=arguments.ranks, rounds=arguments.rounds,
        mib=arguments.batch_size * arguments.seq_len * arguments.hidden * width / 2**20,
        backend="gloo" if forward_s else "gloo, or NCCL between devices",
        arithmetic=arithmetic.format(cores=cores, ranks=arguments.ranks, ms=1e3 * forward_s, twice=2e3 * forward_s),
    )  # fmt: skip


def main() -> int:
    """Measure and print. Returns 1 if a rank failed, else 0."""
    arguments = arguments_of()
    record, notes, cases = hardware(), notes_of(arguments), cases_of(arguments)
    if forward_s_of(arguments):
        say(notes.splitlines()[1])
    say(f"{arguments.ranks} ranks run {len(cases)} cases, {arguments.rounds} times after a warm-up")
    with tempfile.TemporaryDirectory(prefix="codescent-pipeline-") as folder:
        steps = run(arguments, cases, Path(folder))
    if not steps:
        return 1
    entries = [entry_of(*case, steps[case]) for case in cases]
    claims = musts_of(entries)
    print(machine_line(record), notes, sep="\n")
    show(entries)
    print(*must_lines(claims), sep="\n")
    result = {
        "benchmark": "pipeline", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "ranks": arguments.ranks, "device_ms": 1e3 * forward_s_of(arguments) or None, "rounds": arguments.rounds,
        "model": {name: getattr(arguments, name) for name in MODEL},
        "notes": notes.splitlines(), "cases": entries, "musts": claims,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    finish(main)
