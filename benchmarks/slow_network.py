"""In: methods, hosts, links. Out: how fast each method trains over slow links, and at which loss, beside DDP.
Does not touch the machine's network: hosts are namespaces (hosts.py). Skips, saying so, where they cannot be made."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hosts import CONGESTION, QUEUE_MS, Hosts, HostsFailed, missing
from measure import (
    ROOT,
    SystemFailed,
    finish,
    hardware,
    machine_line,
    must,
    must_lines,
    not_negative,
    parser,
    positive,
    say,
    whole,
    write_json,
)
from slow_link import Calibrated, calibrate
from slow_losses import Learnt, Losses, mean_curve
from slow_methods import DDP, EQUAL_LOSSES, METHODS
from slow_runs import CHAR, EXACT, GPT2, SEQ_LEN, WORKS, Case, Method, Recorded, Runner
from slow_state import State
from slow_table import Sitting, musts_of, rows_of, text_of, unequal
from work import write_tokens

sys.path.insert(0, str(ROOT))

from codescent.base.counted import counted
from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.cost.arithmetic import arithmetic
from codescent.cost.coding import Coding
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk

MOST_HOSTS = 64
FULL = 0.75
"""How full the shaper's queue is behind a long message, on average: reno halves what is under way when it is full."""
ALONE_STEPS = 20
"""Steps of the ranks that run without network."""

NOTES = """{model}, dropout 0, fp32, {seq_len} tokens per rank and step, one thread a rank; {cores} cores for all ranks.
Each host is a network namespace with a link of its own, shaped in both directions. The rate of a link is payload: what an
all_reduce of two ranks carries, measured before each sitting. Times: medians of {rounds}, each of {periods} whole periods
after one of warm-up, methods in turns. MB: of a rank and step, by the plan, and counted at the busiest interface (with headers
and the start of the run). exposed: ranks wait for communication. val loss: {loss}; in
brackets the number of seeds, or = where the loss is that of another method, up to rounding. over DDP: over the same seeds.
simulated: tokens/s by the simulator, with the measured link, arithmetic and speed of coding, and how far it is from those
measured.
The hosts' TCP controls congestion by {congestion}. without network: as many ranks at the same time, each by itself."""  # noqa: E501


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 for an argument that cannot be used."""
    parsed = parser(__doc__.splitlines()[0])
    names = [method.name for method in METHODS]
    parsed.add_argument("--work", choices=WORKS, default=CHAR, help=f"the model; {GPT2} has times only")
    parsed.add_argument("--methods", nargs="+", default=names, metavar="NAME", help="rows of the table")
    parsed.add_argument("--hosts", nargs="+", type=positive, default=[2, 4], metavar="N", help="with a rank each")
    parsed.add_argument(
        "--rates", nargs="+", type=not_negative, default=[49.0, 100.0, 1000.0], metavar="MBIT",
        help="payload of the links, in million bits a second",
    )  # fmt: skip
    parsed.add_argument("--seeds", nargs="+", type=whole, default=[1, 2, 3], metavar="N", help="of the runs for losses")
    parsed.add_argument("--steps", type=positive, default=2000, help="of a run for losses")
    parsed.add_argument(
        "--matmul", choices=(EXACT, "fast"), default=EXACT,
        help="kernels of the runs for losses: fast ones are fp32 too, and round differently",
    )  # fmt: skip
    parsed.add_argument("--rounds", type=positive, default=3, help="runs for times of each method")
    parsed.add_argument("--ddp-rounds", type=positive, metavar="N", help="fewer of DDP, whose steps take minutes")
    parsed.add_argument("--periods", type=positive, default=3, help="timed periods of a run, after one of warm-up")
    parsed.add_argument("--losses", type=Path, metavar="FILE", help="of whole trainings: known ones are not run again")
    parsed.add_argument("--no-losses", action="store_true", help="do not run whole trainings")
    parsed.add_argument("--no-times", action="store_true", help="run whole trainings only")
    parsed.add_argument("--state", type=Path, metavar="DIR", help="keeps results: a later call continues")
    parsed.add_argument("--sitting", default="1", metavar="NAME", help="times of another sitting are not used again")
    parsed.add_argument("--figures", type=Path, metavar="DIR", help="write loss curves as PNG files")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    arguments = parsed.parse_args()
    for problem in problems_of(arguments):
        parsed.error(problem)
    return arguments


def problems_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield why the arguments cannot be used."""
    names = [method.name for method in METHODS]
    unknown = [name for name in arguments.methods if name not in names]
    if unknown:
        yield f"--methods: no {', '.join(unknown)}; the methods are {', '.join(names)}"
    elif DDP.name not in arguments.methods:
        yield f"--methods: give {DDP.name} too: the others are compared with it"
    if not all(2 <= hosts <= MOST_HOSTS for hosts in arguments.hosts):
        yield f"--hosts {' '.join(map(str, arguments.hosts))}: give 2 to {MOST_HOSTS}: one host has no network"
    if 0.0 in arguments.rates:
        yield "--rates: 0 carries nothing; give more"
    if arguments.no_losses and arguments.no_times:
        yield "--no-losses with --no-times leaves nothing to measure"
    if (arguments.ddp_rounds or 1) > arguments.rounds:
        yield f"--ddp-rounds {arguments.ddp_rounds}: there are {arguments.rounds} rounds"
    if arguments.steps <= EQUAL_LOSSES:
        yield f"--steps {arguments.steps}: give more than the {EQUAL_LOSSES} whose losses are compared"
    for name in ("state", "figures"):
        folder = getattr(arguments, name)
        if folder is not None and not folder.is_dir():
            yield f"--{name} {folder}: there is no such folder"
    text = None if arguments.data is None else arguments.data / "tinyshakespeare" / "input.txt"
    if arguments.work == CHAR and (text is None or not text.is_file()):
        yield f"no tinyshakespeare/input.txt in {arguments.data}: give --data or set CODESCENT_DATA_DIR"


class Bench:
    """Runs what the state does not have yet."""

    def __init__(
        self, arguments: argparse.Namespace, runner: Runner, state: State, losses: Losses, folder: Path, cores: int
    ) -> None:
        self._arguments, self._runner, self._folder = arguments, runner, folder
        self._trainer = runner.with_words(f"train.matmul={arguments.matmul}")
        self._state, self._losses = state, losses
        self._cores = cores
        self.methods = [method for method in METHODS if method.name in arguments.methods]

    def case(self, method: Method, hosts: int, seed: int, **fields: Any) -> Case:
        """A case of this call."""
        return Case(self._arguments.work, method, hosts, seed, self._arguments.steps, **fields)

    def losses(self, cpu: str) -> dict[tuple[str, int], list[Learnt]]:
        """Whole trainings on links without a limit: for each method and number of hosts a run for each seed."""
        found: dict[tuple[str, int], list[Learnt]] = {}
        for hosts in self._arguments.hosts:
            for seed in self._arguments.seeds:
                for method in self.methods:
                    case = self.case(method, hosts, seed, steps=self._arguments.steps, validates=True)
                    one = self._losses.get(case)
                    if one is None and not method.learns_as and not self._arguments.no_losses:
                        one = Learnt.of(case, self._run(case), cpu, self._arguments.matmul)
                        self._losses.put(one)
                    if one is not None:
                        found.setdefault((method.name, hosts), []).append(one)
        return found

    def sitting(self, hosts: int, mbit: float) -> Sitting:
        """The runs for times of all methods, in turns, on links that are calibrated first."""
        link: dict[str, Any] | None = None
        times: dict[str, list[Recorded]] = {method.name: [] for method in self.methods}
        alone: list[list[Recorded]] = []
        with Hosts(hosts + max(method.servers for method in self.methods)) as made:
            for turn in range(self._arguments.rounds):
                for method in self.methods if turn % 2 == 0 else reversed(self.methods):
                    if method is DDP and turn >= (self._arguments.ddp_rounds or self._arguments.rounds):
                        continue
                    case = self._timed(method, hosts, mbit, turn)
                    if link is None and self._state.get("time", self._key(case)) is None:
                        link = self._calibrated(made, hosts, mbit)
                    times[method.name].append(self._one(case, made))
                alone.append(self._alone(hosts, mbit, turn, made))
        kept = self._state.get("link", f"{hosts} {mbit:g} {self._arguments.sitting}")
        assert kept is not None  # a run that was kept came after its calibration
        return Sitting(hosts, mbit, kept, SEQ_LEN * hosts, times, alone, self._coding(hosts, mbit))

    def simulated(self, sitting: Sitting) -> dict[str, Walk]:
        """What the ranks of each method do in the simulator: with the measured link and arithmetic, and with the speed
        of coding that `coding` has. Runs of portions are as long as those measured: they end where all ranks meet.

        More ranks than cores share them, as they do here: those that wait leave theirs to the others.
        """
        cluster = of_links(Link(sitting.link["payload_mbit"] * 1e6 / 8, queue_s=FULL * QUEUE_MS / 1e3))
        share = min(1.0, self._cores / sitting.hosts)  # of a core, for each rank where all compute
        compute_s = share * sitting.tokens / sitting.bound()
        found = {}
        for method in self.methods:
            case = self._timed(method, sitting.hosts, sitting.mbit, 0)
            plan = self._runner.plan(case)
            coding = Coding(*(share * seconds for seconds in sitting.coding[method.name]))
            whole: dict[str, Any] = {"rounds": case.steps // method.period - 1}
            if plan.layout.hands_out:
                warm_up = method.period // plan.schedule.period
                whole = {"steps": case.steps, "warm_up": warm_up, "end_steps": method.end_steps}
            found[method.name] = walk(
                plan, arithmetic(plan, compute_s), cluster, coding=coding, cores=self._cores, **whole
            )
        return found

    def _coding(self, hosts: int, mbit: float) -> dict[str, list[float]]:
        """By method how fast a rank codes while all others code too."""
        found: dict[str, list[float]] = {}
        missing_cases = []
        for method in self.methods:
            case = self._timed(method, hosts, mbit, 0)
            kept = self._state.get("coding", self._key(case))
            if kept is None:
                missing_cases.append((method.name, case))
            else:
                found[method.name] = kept["seconds"]
        if missing_cases:
            say(f"how fast {hosts} ranks code")
            made = self._runner.coding([case for _, case in missing_cases])
            for name, case in missing_cases:
                found[name] = made[case.key]
                self._state.put("coding", self._key(case), {"seconds": found[name]}, case.words())
        return found

    def _timed(self, method: Method, hosts: int, mbit: float | None, turn: int) -> Case:
        steps = max(method.period * (1 + self._arguments.periods), EQUAL_LOSSES, method.least_steps)
        return self.case(method, hosts, self._arguments.seeds[0], steps=steps, mbit=mbit, round=turn)

    def _calibrated(self, made: Hosts, hosts: int, mbit: float) -> dict[str, Any]:
        """Shape the links. A sitting that goes on takes its own rate again."""
        key = f"{hosts} {mbit:g} {self._arguments.sitting}"
        kept = self._state.get("link", key)
        if kept is not None:
            made.shape(kept["shaper_mbit"])
            return kept
        link: Calibrated = calibrate(made, mbit, self._folder)
        self._state.put("link", key, link.to_json(), f"{hosts} hosts, {mbit:g} Mbit/s")
        return link.to_json()

    def _key(self, case: Case) -> str:
        return case.key if case.mbit is None else f"{case.key} {self._arguments.sitting}"

    def _one(self, case: Case, made: Hosts) -> Recorded:
        """A run, or what an earlier call recorded of it."""
        kept = self._state.get("time", self._key(case))
        if kept is not None:
            return Recorded(**kept)
        recorded = self._run(case, made)
        self._state.put("time", self._key(case), recorded.to_json(), case.words())
        return recorded

    def _run(self, case: Case, made: Hosts | None = None) -> Recorded:
        """A run on these hosts, or on hosts whose links have no limit."""
        say(case.words())
        with contextlib.nullcontext(made) if made is not None else Hosts(case.ranks) as hosts:
            recorded = (self._runner if made is not None else self._trainer).run(case, hosts)
        say(f"  median step {1e3 * statistics.median(recorded.seconds):.0f} ms, {recorded.wall_s:.0f} s in all")
        return recorded

    def _alone(self, hosts: int, mbit: float, turn: int, made: Hosts) -> list[Recorded]:
        case = self.case(DDP, hosts, self._arguments.seeds[0], steps=ALONE_STEPS, mbit=mbit, round=turn)
        kept = self._state.get("alone", self._key(case))
        if kept is None:
            say(f"without network, {hosts} ranks")
            kept = {"ranks": [one.to_json() for one in self._runner.alone(case, made)]}
            self._state.put("alone", self._key(case), kept, f"without network, {case.words()}")
        return [Recorded(**one) for one in kept["ranks"]]


def measured(arguments: argparse.Namespace, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Measure; print tables; draw. Returns the results as JSON data."""
    machine = {name: record[name] for name in ("cpu", "cores", "torch")}
    state = State(folder, machine)
    tokens = None if arguments.work == CHAR else _tokens(folder)
    runner = Runner(folder, arguments.data, tokens)
    runner.prepare()
    bench = Bench(
        arguments, runner, state, Losses(arguments.losses or folder / "losses.jsonl"), folder, record["cores"]
    )
    losses = {} if arguments.work == GPT2 else bench.losses(record["cpu"])
    result: dict[str, Any] = {"sittings": [], "musts": [], "losses": _curves(losses)}
    for hosts in arguments.hosts if not arguments.no_times else ():
        for mbit in arguments.rates:
            sitting = bench.sitting(hosts, mbit)
            rows = rows_of(bench.methods, sitting, losses, bench.simulated(sitting))
            print("", text_of(sitting, rows), sep="\n", flush=True)
            result["sittings"].append({"link": sitting.link, "bound_tokens_per_s": sitting.bound(), "rows": rows})
            result["musts"] += [
                *musts_of(arguments.work, sitting, rows),
                *_equal(bench.methods, sitting, losses, arguments.seeds[0], record["cpu"]),
            ]
    if arguments.figures is not None and losses:
        _draw(arguments, losses, result)
    return result


def _tokens(folder: Path) -> Path:
    """The random tokens for GPT-2: written once."""
    written = folder / "tokens-50257" / "train.bin"
    return written if written.exists() else write_tokens(folder, 50257)


def _equal(
    methods: list[Method], sitting: Sitting, losses: dict[tuple[str, int], list[Learnt]], seed: int, cpu: str
) -> Iterator[dict[str, Any]]:
    """The requirement that shaped links do not change what is computed."""
    for method in methods:
        for learnt in losses.get((method.name, sitting.hosts), []):
            is_same = (learnt.seed, learnt.cpu, learnt.matmul) == (seed, cpu, EXACT) and learnt.first_losses
            if method.repeatable and is_same:
                claim = f"{method.name} on {sitting.hosts} hosts, {sitting.mbit:g} Mbit/s: runs with other first losses"
                yield must(claim, unequal(sitting.times[method.name], learnt), 0, at_least=False)


def _curves(losses: dict[tuple[str, int], list[Learnt]]) -> list[dict[str, Any]]:
    """Validation losses of each seed, and points of the mean training loss."""
    return [
        {
            "method": name, "hosts": hosts, "val_losses": {str(run.seed): run.val_loss for run in runs},
            "wall_s": [run.wall_s for run in runs], "steps_a_point": runs[0].steps_a_point,
            "train_losses": mean_curve(runs),
        }
        for (name, hosts), runs in losses.items()
    ]  # fmt: skip


def _draw(arguments: argparse.Namespace, losses: dict[tuple[str, int], list[Learnt]], result: dict[str, Any]) -> None:
    from slow_figures import draw  # noqa: PLC0415 - matplotlib is slow to import

    rows = [row for sitting in result["sittings"] for row in sitting["rows"]]
    for hosts in arguments.hosts:
        curves = {name: (runs[0].steps_a_point, mean_curve(runs)) for (name, of), runs in losses.items() if of == hosts}
        mine = [row for row in rows if row["hosts"] == hosts]
        draw(arguments.figures / f"slow_network_{hosts}_hosts.png", hosts, SEQ_LEN * hosts, curves, mine)


def notes_of(arguments: argparse.Namespace, cores: int) -> str:
    """The text above the tables."""
    whole_split = f"over the whole validation split after {arguments.steps:,} steps, mean of seeds {arguments.seeds}"
    return NOTES.format(
        model={CHAR: f"the model of {CHAR}", GPT2: "GPT-2 124M on random tokens"}[arguments.work],
        seq_len=SEQ_LEN, cores=cores, congestion=CONGESTION,
        rounds=counted(arguments.rounds, "run"), periods=arguments.periods,
        loss=whole_split if arguments.work == CHAR else "not measured",
    )  # fmt: skip


def main() -> int:
    """Measure and print. Returns the exit code."""
    arguments = arguments_of()
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    record = hardware()
    print(machine_line(record), notes_of(arguments, record["cores"]), sep="\n", flush=True)
    with ExitStack() as stack:
        folder = arguments.state or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="codescent-slow-")))
        try:
            result = measured(arguments, folder.resolve(), record)
        except (SystemFailed, HostsFailed) as failure:
            say(str(failure))
            return 1
    print("", *must_lines(result["musts"]), sep="\n")
    for entry in result["losses"]:
        minutes = statistics.median(entry["wall_s"]) / 60
        print(
            f"{entry['method']}, {entry['hosts']} hosts: {arguments.steps:,} steps took {minutes:.1f} minutes unshaped"
        )
    write_json(arguments.json, {
        "benchmark": "slow_network", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "work": arguments.work, "steps": arguments.steps, "seeds": arguments.seeds, "rounds": arguments.rounds,
        "ddp_rounds": arguments.ddp_rounds or arguments.rounds,
        "periods": arguments.periods, "notes": notes_of(arguments, record["cores"]).splitlines(), **result,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    finish(main)
