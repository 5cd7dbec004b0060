"""In: this machine. Out: what the planner predicts of small runs here, beside what they take: seconds, memory, order.
Measures the machine by `codescent measure` first. Nothing else may run meanwhile."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from measure import finish, hardware, machine_line, parser, say, table, write_json
from prediction_scores import tau

from codescent.planner import beside
from codescent.record.memory import last_rows
from codescent.results import open_run
from codescent.verbs.argument_types import positive

MODELS = {
    "GPT-2 14M": ("model.num_layers=6", "model.num_heads=6", "model.hidden_dim=384", "model.vocab_size=8192",
                  "train.global_batch_size=8", "train.num_steps=11"),
    "GPT-2 124M": ("model.num_layers=12", "model.num_heads=12", "model.hidden_dim=768", "model.vocab_size=50304",
                   "train.global_batch_size=4", "train.num_steps=6"),
}  # fmt: skip
SAME = ("model.preset=auto", "model.kind=gpt2", "model.seq_len=256", "data.seq_len=256",
        "train.num_threads=1", "train.eval_every=0", "checkpoint.every=0", "log.every=1")  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "dp_replicate": ("parallel.dp_replicate=2",),
    "dp_shard, stage 1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "dp_shard, stage 3": ("parallel.dp_shard=2", "parallel.zero_stage=3"),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2", "parallel.schedule=1f1b"),
}
MICROBATCH, WARM_UP = 2, 2
ROUNDS = 3
"""A shared machine is fast and slow for seconds or minutes at a time. So all layouts run in turns, some rounds of them,
and every second round in the reverse order."""
RESAMPLED, CONFIDENT = 2000, 0.95
"""The order of two layouts counts if that share of so many samples of their rounds has it (Efron 1979, "Bootstrap
Methods")."""
MUST_MEDIAN, MUST_WORST, MUST_MEMORY, MUST_TAU = 0.15, 0.30, 0.10, 0.7


@dataclass(frozen=True)
class Compared:
    """The runs of a layout: predicted and measured.

    Attributes:
        rounds_s: median step of each round.
        measured_s: median step of all rounds.
        measured_bytes: of the fullest rank, the most of all rounds.
    """

    model: str
    layout: str
    predicted_s: float
    rounds_s: list[float]
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def time(self) -> float:
        """Relative error of the step."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def memory(self) -> float:
        """Relative error of the memory of the fullest rank."""
        return self.predicted_bytes / self.measured_bytes - 1.0


@dataclass
class Layout:
    """What the rounds of a layout have found so far: predictions, steps by round, memory."""

    predicted: tuple[float, float] = (math.nan, math.nan)
    rounds: list[list[float]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def compared(self, model: str, layout: str) -> Compared:
        """All rounds in one."""
        whole = [step for one in self.rounds for step in one]
        medians = [statistics.median(one) for one in self.rounds]
        times = (self.predicted[0], medians, statistics.median(whole))
        return Compared(model, layout, *times, self.predicted[1], max(self.sizes, default=math.nan))


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Compare predictions with small runs on this machine.")
    parsed.add_argument("--cluster", type=Path, metavar="FILE", help="a measured cluster; the default: measure now")
    parsed.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="number format (default fp32)")
    parsed.add_argument("--rounds", type=positive, default=ROUNDS, help=f"rounds of all layouts (default {ROUNDS})")
    parsed.add_argument("--keep", type=Path, metavar="FILE", help="keep the measured cluster")
    parsed.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the folders of the runs there")
    return parsed.parse_args()


def called(folder: Path, *words: str) -> None:
    """Run a command of codescent. Raises RuntimeError: it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "codescent", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"codescent {' '.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def measured_cluster(folder: Path) -> Path:
    """A cluster file of this machine, with two ranks busy at once."""
    out = folder / "here.toml"
    called(folder, "measure", "--ranks", "2", "--out", str(out))
    return out


def run(folder: Path, cluster: Path, model: str, layout: str, precision: str, found: Layout) -> None:
    """Run a layout once more, and read its prediction and its metrics."""
    ranks = 1 + bool(LAYOUTS[layout])
    place = folder / f"{model}-{layout}-{len(found.rounds)}".replace(" ", "-").replace(",", "")
    words = (*SAME, *MODELS[model], f"train.microbatch_size={MICROBATCH}")
    own = (f"train.precision={precision}", f"parallel.ranks={ranks}", f"run.folder={place}", f"run.cluster={cluster}")
    called(folder, "train", "default", *words, *LAYOUTS[layout], *own)
    prediction = json.loads((place / "prediction.json").read_text())
    opened, rows = open_run(place), last_rows(place)
    assert opened.plan is not None
    fullest = max(rows, key=lambda rank: float(rows[rank]["peak_bytes"] or 0))
    held = beside.memory(prediction, opened.plan.role(fullest), rows[fullest])[0]
    found.predicted = prediction["step_s"], held.predicted
    found.rounds.append([float(one) for one in opened.columns["step_s"][WARM_UP:]])
    found.sizes += [held.measured] if held.measured else []
    shutil.rmtree(place / "checkpoints", ignore_errors=True)


def clear(runs: Sequence[Compared]) -> list[tuple[Compared, Compared]]:
    """The pairs of layouts whose order the rounds show: the first one is faster.

    A round is drawn for both at once: layouts of one round have met the same machine.
    """
    draw, found = random.Random(0), []
    for one, other in itertools.combinations(runs, 2):
        rounds = range(len(one.rounds_s))
        samples = [draw.choices(rounds, k=len(rounds)) for _ in range(RESAMPLED)]
        faster = sum(
            statistics.median(one.rounds_s[at] / other.rounds_s[at] for at in sample) < 1.0 for sample in samples
        )
        if faster >= CONFIDENT * RESAMPLED:
            found.append((one, other))
        elif faster <= (1.0 - CONFIDENT) * RESAMPLED:
            found.append((other, one))
    return found


def requirements(runs: Sequence[Compared]) -> Iterator[tuple[str, float, float, bool]]:
    """What, the value, its bound, whether it holds."""
    times, sizes = [abs(one.time) for one in runs], [abs(one.memory) for one in runs]
    yield "step, median error", statistics.median(times), MUST_MEDIAN, statistics.median(times) <= MUST_MEDIAN
    yield "step, worst error", max(times), MUST_WORST, max(times) <= MUST_WORST
    yield "memory, worst error", max(sizes), MUST_MEMORY, max(sizes) <= MUST_MEMORY
    for model in MODELS:
        some = [one for one in runs if one.model == model and one.layout != "one process"]
        pairs = clear(some)
        signs = [1 if first.predicted_s < second.predicted_s else -1 for first, second in pairs]
        order = sum(signs) / len(signs) if signs else math.nan
        every = tau([one.measured_s for one in some], [one.predicted_s for one in some])
        of = f"{len(pairs)} of {math.comb(len(some), 2)} pairs; of all: {every:.2f}"
        yield f"order of the layouts, tau, {model} ({of})", order, MUST_TAU, order >= MUST_TAU


def main() -> int:
    """Measure, predict, run, compare."""
    arguments = arguments_of()
    record = hardware()
    say(machine_line(record))
    with tempfile.TemporaryDirectory(prefix="codescent-here-") as name:
        folder = Path(name) if arguments.runs is None else arguments.runs.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        cluster = arguments.cluster.absolute() if arguments.cluster else measured_cluster(folder)
        if arguments.keep is not None:
            arguments.keep.write_text(cluster.read_text("utf-8"), "utf-8")
        layouts = {(model, layout): Layout() for model in MODELS for layout in LAYOUTS}
        for number in range(arguments.rounds):
            turn = list(layouts) if number % 2 == 0 else list(reversed(layouts))
            for at in turn:
                run(folder, cluster, *at, arguments.precision, layouts[at])
                say(f"round {number + 1}: " + ", ".join(_row(layouts[at].compared(*at))))
        runs = [found.compared(*at) for at, found in layouts.items()]
    musts = [*requirements(runs)]
    say("")
    say(table(HEADER, [_row(one) for one in runs]))
    for what, value, bound, holds in musts:
        say(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}: {value:.3g}, bound {bound:g}")
    result = {
        "benchmark": "prediction_here",
        "hardware": record,
        "precision": arguments.precision,
        "rounds": arguments.rounds,
        "runs": [asdict(one) for one in runs],
        "musts": [
            {"claim": what, "value": value, "bound": bound, "held": holds} for what, value, bound, holds in musts
        ],
    }
    write_json(arguments.json, result)
    return 0


HEADER = ["model", "layout", "step s, predicted", "measured", "error %", "MiB, predicted", "measured", "error %"]


def _row(one: Compared) -> list[str]:
    seconds = [f"{one.predicted_s:.4g}", f"{one.measured_s:.4g}", f"{100 * one.time:+.1f}"]
    sizes = [f"{size / 2**20:.0f}" for size in (one.predicted_bytes, one.measured_bytes)]
    return [one.model, one.layout, *seconds, *sizes, f"{100 * one.memory:+.1f}"]


if __name__ == "__main__":
    finish(main)
