"""In: this machine. Out: what the planner predicts of small runs here, beside what they take: seconds, memory, order.
Measures the machine by `codescent measure` first. Nothing else may run meanwhile."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import finish, hardware, machine_line, parser, say, table, write_json
from prediction_scores import tau

from codescent.planner import beside
from codescent.record.memory import last_rows
from codescent.results import open_run

MODELS = {
    "GPT-2 14M": ("model.num_layers=6", "model.num_heads=6", "model.hidden_dim=384", "model.vocab_size=8192",
                  "train.global_batch_size=8", "train.num_steps=24"),
    "GPT-2 124M": ("model.num_layers=12", "model.num_heads=12", "model.hidden_dim=768", "model.vocab_size=50304",
                   "train.global_batch_size=4", "train.num_steps=10"),
}  # fmt: skip
"""Many short steps: a shared machine is fast and slow for seconds at a time."""
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
MICROBATCH, WARM_UP = 2, 3
MUST_MEDIAN, MUST_WORST, MUST_MEMORY, MUST_TAU = 0.15, 0.30, 0.10, 0.7


@dataclass(frozen=True)
class Compared:
    """A run: predicted and measured."""

    model: str
    layout: str
    predicted_s: float
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


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Compare predictions with small runs on this machine.")
    parsed.add_argument("--cluster", type=Path, metavar="FILE", help="a measured cluster; the default: measure now")
    parsed.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="number format (default fp32)")
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


def compared(folder: Path, cluster: Path, model: str, layout: str, precision: str) -> Compared:
    """Run a layout, and read its prediction and its metrics."""
    ranks, name = 1 + bool(LAYOUTS[layout]), f"{model}-{layout}".replace(" ", "-").replace(",", "")
    run = folder / name
    words = (*SAME, *MODELS[model], f"train.microbatch_size={MICROBATCH}")
    own = (f"train.precision={precision}", f"parallel.ranks={ranks}", f"run.folder={run}", f"run.cluster={cluster}")
    called(folder, "train", "default", *words, *LAYOUTS[layout], *own)
    prediction = json.loads((run / "prediction.json").read_text())
    found, rows = open_run(run), last_rows(run)
    assert found.plan is not None
    fullest = max(rows, key=lambda rank: float(rows[rank]["peak_bytes"] or 0))
    held = beside.memory(prediction, found.plan.role(fullest), rows[fullest])[0]
    measured_s = statistics.median(float(one) for one in found.columns["step_s"][WARM_UP:])
    return Compared(model, layout, prediction["step_s"], measured_s, held.predicted, held.measured or float("nan"))


def requirements(runs: Sequence[Compared]) -> Iterator[tuple[str, float, float, bool]]:
    """What, the value, its bound, whether it holds."""
    times, sizes = [abs(one.time) for one in runs], [abs(one.memory) for one in runs]
    yield "step, median error", statistics.median(times), MUST_MEDIAN, statistics.median(times) <= MUST_MEDIAN
    yield "step, worst error", max(times), MUST_WORST, max(times) <= MUST_WORST
    yield "memory, worst error", max(sizes), MUST_MEMORY, max(sizes) <= MUST_MEMORY
    for model in MODELS:
        some = [one for one in runs if one.model == model and one.layout != "one process"]
        order = tau([one.measured_s for one in some], [one.predicted_s for one in some])
        yield f"order of the layouts, tau, {model}", order, MUST_TAU, order >= MUST_TAU


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
        runs = []
        for model in MODELS:
            for layout in LAYOUTS:
                runs.append(compared(folder, cluster, model, layout, arguments.precision))
                say(", ".join(_row(runs[-1])))
    musts = [*requirements(runs)]
    say("")
    say(table(HEADER, [_row(one) for one in runs]))
    for what, value, bound, holds in musts:
        say(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}: {value:.3g}, bound {bound:g}")
    result = {
        "benchmark": "prediction_here",
        "hardware": record,
        "precision": arguments.precision,
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
