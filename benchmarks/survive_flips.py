"""In: a number of trials. Out: how many flipped bits are found: in the memory of a rank, in a checkpoint.
Does not measure what the comparison costs (alike.py does)."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alike import JOB, job_of, replicas
from measure import SystemFailed, must, table
from work import environment

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints
from codescent.launch.local import run_ranks
from codescent.train.alike import Copies, Diverged, compare

RANKS = 3
"""With three copies the majority shows which one is odd."""
FILES = ("header", "data", "manifest")
SENTINEL = 12345.0


def measured(place: Path, trials: int, rng: random.Random) -> dict[str, dict[str, int]]:
    """So many flips of each kind: those found with their place named, and those tried."""
    place.mkdir()
    found = {"memory of a rank": in_memory(place, trials, rng.randrange(2**31))}
    for kind in FILES:
        found[f"checkpoint, {kind}"] = in_files(place / kind, kind, trials, rng)
    return found


def in_memory(place: Path, trials: int, seed: int) -> dict[str, int]:
    """Flips in weights and optimizer state of the ranks of a trainer. Raises SystemFailed."""
    job = {**job_of("small", "fp32", place), "trials": trials, "seed": seed}
    path = place / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    if run_ranks([sys.executable, __file__], RANKS, {**environment(), JOB: str(path)}) != 0:
        raise SystemFailed("a rank has failed; its output is above")
    found: dict[str, int] = json.loads((place / "found.json").read_text(encoding="utf-8"))
    return found


def rank_main(path: Path) -> None:
    """Run one rank: in each trial the same one has a flipped bit, and every rank must name it and the tensor."""
    job = json.loads(path.read_text(encoding="utf-8"))
    rng, named = random.Random(job["seed"]), 0
    with replicas(job) as (world, trainer, copies):
        trainer.executor.step(0, 1e-4)  # the optimizer has state
        places = [(part, name) for part, of in copies.items() for name in of if of[name].numel()]
        for _ in range(job["trials"]):
            odd, (part, name) = rng.randrange(RANKS), rng.choice(places)
            bit = rng.randrange(8 * copies[part][name].nbytes)
            if odd == world.this_rank.rank:
                flip(copies[part][name], bit)
            named += found_in(copies, odd, name)
            if odd == world.this_rank.rank:
                flip(copies[part][name], bit)
        compare(copies, "at the end")  # all are equal again
        least = torch.tensor(named)
        dist.all_reduce(least, dist.ReduceOp.MIN)  # it has to be found on every rank
    if world.is_first:
        result = {"tried": job["trials"], "found": int(least)}
        path.with_name("found.json").write_text(json.dumps(result), encoding="utf-8")


def found_in(copies: Copies, odd: int, name: str) -> bool:
    """Whether the comparison names this rank and this tensor, and nothing else."""
    try:
        compare(copies, "trial")
    except Diverged as error:
        (difference,) = error.differences
        return difference.ranks == (odd,) and [one.partition(" ")[0] for one in difference.tensors] == [name.split()[0]]
    return False


@torch.no_grad()
def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of a tensor."""
    data = tensor.detach().view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def in_files(folder: Path, kind: str, trials: int, rng: random.Random) -> dict[str, int]:
    """Flips in the files of a checkpoint: found if the loading names the file, and has changed no tensor."""
    tensors = {f"model.{number}": torch.randn(50, 7) for number in range(8)}
    checkpoints = Checkpoints(folder, 1, keep_best=False)
    checkpoints.save(1, tensors, {"step": 1})
    found = 0
    for _ in range(trials):
        file, start, stop = part_of(folder, kind, rng)
        bit = rng.randrange(8 * start, 8 * stop)
        flip_file(file, bit)
        found += is_refused(checkpoints, tensors, file)
        flip_file(file, bit)
    if is_refused(checkpoints, tensors, folder):
        raise SystemFailed("a checkpoint without damage is refused")
    return {"tried": trials, "found": found}


def part_of(folder: Path, kind: str, rng: random.Random) -> tuple[Path, int, int]:
    """A file of the checkpoint, and the bytes that belong to this kind."""
    (saved,) = folder.glob("step_*")
    if kind == "manifest":
        return (file := saved / "manifest.json"), 0, file.stat().st_size
    file = rng.choice(sorted(saved.glob("*.safetensors")))
    with file.open("rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    return (file, 0, header) if kind == "header" else (file, header, file.stat().st_size)


def flip_file(file: Path, bit: int) -> None:
    """Flip a bit of a file."""
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def is_refused(checkpoints: Checkpoints, tensors: Mapping[str, torch.Tensor], file: Path) -> bool:
    """Whether the newest checkpoint is refused with the name of the file, and nothing of it is used."""
    into = {name: torch.full_like(tensor, SENTINEL) for name, tensor in tensors.items()}
    try:
        saved = checkpoints.latest()
        assert saved is not None
        checkpoints.load(saved, into)
    except (CheckpointError, UserError) as error:
        return str(file) in str(error) and all(bool((tensor == SENTINEL).all()) for tensor in into.values())
    return False


def text(found: Mapping[str, Mapping[str, int]]) -> str:
    """How many of each kind were found."""
    rows = [[name, str(one["tried"]), str(one["found"])] for name, one in found.items()]
    return table(["a flipped bit in", "tried", "found"], rows)


def claims(found: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """All must be found."""
    return [must(f"flipped bits found, {name}", one["found"] / one["tried"], 1.0) for name, one in found.items()]


if __name__ == "__main__":
    rank_main(Path(os.environ[JOB]))
