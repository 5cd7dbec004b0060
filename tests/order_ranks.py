"""In: a number of pipeline stages, cases. Out: what each stage really runs in which order, and how much it holds, JSON.
Does not assert anything: test_execute_order does. Real gloo ranks, one per stage, forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_ranks import fork, join
from declared_ranks import plan_of, trainer_of

from codescent.plan import Instruction, Verb
from codescent.train.execute import Executor

Live = dict[tuple[int, int | None], "weakref.WeakSet[Kept]"]


class Kept:
    """A tensor that autograd keeps for a backward pass; gone when that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def observed(executor: Executor) -> dict[str, Any]:
    """A step: its instructions in the order in which they ended, and the most micro-batches of which, after one of
    them, activations were still there (counted for each chunk)."""
    ran: list[str] = []
    live: Live = {}
    peak = 0

    def watched(act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def arm(instruction: Instruction) -> None:
            nonlocal peak
            if instruction.verb is Verb.FORWARD:
                kept = live[instruction.chunk, instruction.microbatch] = weakref.WeakSet()

                def pack(tensor: torch.Tensor) -> Kept:
                    kept.add(one := Kept(tensor))
                    return one

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
                    act(instruction)
            else:
                act(instruction)
            ran.append(str(instruction))
            held = {place for place, kept in live.items() if kept}
            held |= {
                (number, mb)
                for number, chunk in enumerate(executor.chunks)
                for mb, one in chunk.in_flight.items()
                if one.deferred
            }
            peak = max(peak, len(held))

        return arm

    executor.arms = {verb: watched(act) for verb, act in executor.arms.items()}
    executor.step(0, 1e-3)
    return {"ran": ran, "peak_live": peak}


def work(stage: int, cases: dict[str, Any], folder: str) -> None:
    """All the cases, as one stage."""
    degree = next(iter(cases.values()))["world_size"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=stage, world_size=degree)
    answers = {}
    for name, case in cases.items():
        trainer = trainer_of(case, plan_of(case), stage)
        answers[name] = observed(trainer.executor)
        trainer.close()
    Path(folder, str(stage)).write_text(json.dumps(answers))
    dist.barrier()


def run(cases: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Of each case, all of one number of stages, what every stage did, from processes of their own."""
    repository = Path(__file__).resolve().parent.parent
    python_path = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, folder],
            input=json.dumps(cases),
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        degree = next(iter(cases.values()))["world_size"]
        stages = [json.loads(Path(folder, str(stage)).read_text()) for stage in range(degree)]
    return {name: [stage[name] for stage in stages] for name in cases}


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = json.loads(sys.stdin.read())
    world_size = next(iter(wanted.values()))["world_size"]
    sys.exit(any(join(pid) for pid in [fork(partial(work, stage, wanted, sys.argv[1])) for stage in range(world_size)]))
