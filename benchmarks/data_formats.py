"""In: nothing. Out: the time to load a batch from memory, HDF5, .pt and safetensors, next to a step's compute time.
Does not start `codescent train`: it uses one trainer, and gives it another data loader in each turn."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json

sys.path.insert(0, str(ROOT))

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.config.load import load
from codescent.data.loader import Loader, Sampler
from codescent.data.samples import Source
from codescent.preflight import plan_with
from codescent.tasks.tensors.dataset import TensorDataset, in_memory, open_prepared
from codescent.tasks.tensors.prepare import prepare_synthetic
from codescent.tasks.tensors.synthetic import Sizes, Synthetic
from codescent.train.assemble import assemble
from codescent.train.machine import try_matmul
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer
from codescent.train.world import World

FORMATS = ("memory", "hdf5", "pt", "safetensors")
LAB_S = {"memory": 950e-6, "hdf5": 3e-3}
"""The slowest data-loading steps of the lab experiment that `synthetic_transformer` repeats, on the lab's machine."""

NOTES = """A step is that of a lab experiment: torch.nn.Transformer with its default sizes, {batch} samples of
source {source} and target {target}, fp32, forward, backward, Adam. A data-loading step reads samples of
random numbers in random order, equal for all formats, into one array. Files are in the system's cache. us in a step:
not prefetched, read when the step needs them. prefetched: read by a thread, up to {prefetch} steps ahead; the column is
the time that a step still waits (only steps whose samples were read during other steps count). ms compute: over all
steps of a format. Device: {device}, with {threads} thread(s)."""


@dataclass
class Times:
    """Seconds of one format: data-loading steps alone; exposed loading by number of prefetched steps; compute."""

    alone: list[float] = field(default_factory=list)
    exposed: dict[int, list[float]] = field(default_factory=dict)
    compute: list[float] = field(default_factory=list)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time reading tensors from memory, HDF5, .pt and safetensors, alone and during training steps.")
    parsed.add_argument("--samples", type=positive, default=2048, help="number of samples of the training split")
    parsed.add_argument("--reads", type=positive, default=200, help="data-loading steps of each format alone")
    parsed.add_argument("--rounds", type=positive, default=5, help="number of turns of every format")
    parsed.add_argument("--steps", type=positive, default=2, help="training steps of a turn")
    parsed.add_argument("--prefetch", type=positive, default=4, help="largest number of steps that are read ahead")
    parsed.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parsed.add_argument("--threads", type=positive, help="threads of the computation; default: all cores")
    parsed.add_argument("overrides", metavar="section.key=value", nargs="*", help="overrides, such as other sizes")
    return parsed.parse_args()


def datasets_of(recipe: Synthetic, folder: Path) -> dict[str, TensorDataset]:
    """A dataset for each format; all have the same numbers."""
    found = {"memory": in_memory(recipe, f"synthetic:{recipe.train}")}
    for storage in FORMATS[1:]:
        say(f"writing {storage}")
        found[storage] = open_prepared(prepare_synthetic(recipe, storage, folder))
    return found


class Bench:
    """One trainer, and the data loaders that it gets in turns."""

    def __init__(self, trainer: Trainer, datasets: Mapping[str, TensorDataset], batch: int, seq_len: int) -> None:
        self.trainer, self.batch, self.numbers = trainer, batch, 0
        self.sources: dict[str, Source] = {
            name: dataset.source("train", seq_len, dataset.sizes.target_len) for name, dataset in datasets.items()
        }
        self.sample_numbers = seq_len * next(iter(datasets.values())).sizes.width
        self.times = {name: Times() for name in datasets}

    def loader(self, name: str, prefetch: int, first_step: int = 0) -> Loader:
        """A data loader of the whole global batch."""
        source = self.sources[name]
        sampler = Sampler(1, source.num_samples, self.batch)
        pinned = self.trainer.executor.device.type == "cuda"
        return Loader(source, sampler, self.sample_numbers, [(0, self.batch)], first_step, prefetch, pinned)

    def read_alone(self, reads: int) -> None:
        """Time data-loading steps without computation; formats take turns."""
        loaders = {name: self.loader(name, 0) for name in self.sources}
        for number in range(reads + 10):
            for name, loader in loaders.items():
                begin = time.perf_counter()
                loader.next()
                if number >= 10:
                    self.times[name].alone.append(time.perf_counter() - begin)

    def train(self, rounds: int, steps: int, prefetch: int) -> None:
        """Time training steps with each format, without and with prefetching.

        The first steps of a turn do not count: their samples may have been read before the turn began.
        """
        length = steps + max(1, prefetch)
        for turn in range(rounds):
            cases = [(name, ahead) for name in self.sources for ahead in (0, prefetch)]
            for name, ahead in cases if turn % 2 == 0 else reversed(cases):
                with self.loader(name, ahead, turn * length) as loader:
                    self.trainer.executor.loader = loader
                    uncounted = max(1, ahead)
                    for step in range(uncounted + steps):
                        result = self.trainer.executor.step(self.numbers, 1e-3)
                        self.numbers += 1
                        if step >= uncounted:
                            self.times[name].exposed.setdefault(ahead, []).append(result.seconds["data_s"])
                            self.times[name].compute.append(result.parts["compute_s"])
                say(
                    f"round {turn + 1}/{rounds}  {name:12} prefetch {ahead:3}  {result.seconds['data_s'] * 1e6:8.0f} us"
                )


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Times], dict[str, Any]]:
    """Measure. Returns the times by format, and a description of a step."""
    words = [f"data.corpus=synthetic:{arguments.samples}", "train.eval_every=0", f"train.device={arguments.device}"]
    config = load("synthetic_transformer", [*words, *arguments.overrides]).config
    model = config.model
    assert model.source_len is not None
    assert model.target_len is not None
    assert model.hidden_dim is not None
    sizes = Sizes(model.source_len, model.target_len, model.hidden_dim)
    datasets = datasets_of(Synthetic(arguments.samples, 1, sizes), folder)
    world = World(Rank(), arguments.device, arguments.threads, timeout_s=600.0)
    config, plan = plan_with(config, datasets["memory"], 1)
    world.divide(plan)
    kernels = try_matmul("auto", world.device)
    with StopRequest(alone=True) as stop:
        trainer = assemble(config, plan, world, datasets["memory"], 0, stop)
        bench = Bench(trainer, datasets, plan.work.global_batch_size, plan.work.seq_len)
        try:
            bench.read_alone(arguments.reads)
            bench.train(arguments.rounds, arguments.steps, arguments.prefetch)
        finally:
            trainer.close()
            world.close()
    work = {
        "batch": plan.work.global_batch_size,
        "source": f"{sizes.source_len}x{sizes.width}",
        "target": f"{sizes.target_len}x{sizes.width}",
        "prefetch": arguments.prefetch,
        "samples": arguments.samples,
        "parameters": plan.num_parameters,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "matmul": kernels["choice"],
    }
    return bench.times, work


def entry(name: str, times: Times, prefetch: int) -> dict[str, Any]:
    """The results of one format, as numbers."""
    compute_s, hidden = statistics.median(times.compute), times.exposed[prefetch]
    return {
        "format": name,
        "alone_median_s": statistics.median(times.alone),
        "alone_slowest_s": max(times.alone),
        "lab_slowest_s": LAB_S.get(name),
        "exposed_median_s": statistics.median(times.exposed[0]),
        "prefetched_exposed_median_s": statistics.median(hidden),
        "prefetched_exposed_slowest_s": max(hidden),
        "compute_median_s": compute_s,
        "share_alone": statistics.median(times.alone) / compute_s,
        "share_prefetched": statistics.median(hidden) / compute_s,
        "steps": len(hidden),
    }


def main() -> int:
    """Measure and print."""
    arguments = arguments_of()
    record = hardware()
    try:
        with tempfile.TemporaryDirectory(prefix="codescent-formats-") as name:
            times, work = measure(arguments, Path(name))
    except UserError as error:
        say(f"data_formats.py: {error}")
        return 2
    entries = [entry(name, found, arguments.prefetch) for name, found in times.items()]
    claims = [
        must(f"{e['format']}, prefetched: share of compute", e["share_prefetched"], 0.01, at_least=False)
        for e in entries
    ]
    rows = [
        [
            e["format"],
            *(
                f"{1e6 * e[key]:.0f}"
                for key in (
                    "alone_median_s",
                    "alone_slowest_s",
                    "exposed_median_s",
                    "prefetched_exposed_median_s",
                    "prefetched_exposed_slowest_s",
                )
            ),
            f"{1e3 * e['compute_median_s']:.1f}",
        ]
        for e in entries
    ]
    header = ["format", "us alone", "slowest", "us in a step", "prefetched", "slowest", "ms compute"]
    print(machine_line(record), NOTES.format(**work), "", table(header, rows), "", sep="\n")
    print("\n".join(must_lines(claims)))
    write_json(
        arguments.json,
        {"benchmark": "data_formats", "hardware": record, "work": work, "formats": entries, "musts": claims},
    )
    return 0


if __name__ == "__main__":
    finish(main)
