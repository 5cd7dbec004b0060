"""In: runs on every kind of layout, whose ranks kill themselves. Out: a loss in any instruction changes no loss.
The kills are those of SIGKILL, at exact points; test_restart.py and test_shrink.py kill from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import codescent, losses, make_project, start

from codescent.config.load import load
from codescent.plan import Plan
from codescent.preflight import plan_of
from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS_BETWEEN = 2
WORDS = ("run.toml", "train.global_batch_size=12", "train.precision=fp64", "train.eval_every=0", "checkpoint.every=3")
SURVIVES = ("survive.on_loss=restart", "survive.spares=1", "survive.max_restarts=1000")
HOOK = f"""
import json, math, os, signal
from pathlib import Path

from codescent.base.progress import PAGE_BYTES, OwnPage

FOLDER = Path(os.environ["KILLS"])
POINTS = json.loads((FOLDER.parent / "points.json").read_text())
at, collective = OwnPage.at, OwnPage.collective
now = {{"step": 0, "stage": 0, "verb": "load"}}  # of this rank


def reach(page, inside, moves=False):
    done = sorted(os.listdir(FOLDER))
    if len(done) == len(POINTS):
        return
    rank, stage, verb, wants_inside = POINTS[len(done)]
    step = int(done[-1].split("-")[1]) if done else 0
    here = page._start // PAGE_BYTES, now["stage"], now["verb"]
    if here != (rank, stage, verb) or now["step"] < step + {STEPS_BETWEEN}:
        return
    if moves and wants_inside:  # the instruction is over, and had no collective
        (FOLDER / f"{{len(done):03}}-{{step}}-none").mkdir()
    elif not moves and inside == wants_inside:
        (FOLDER / f"{{len(done):03}}-{{now['step']}}").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)


def moved(page, position, stage=0, instruction=""):
    reach(page, False, moves=True)
    at(page, position, stage, instruction)
    if math.isfinite(position):
        now.update(step=math.floor(position) + bool(instruction), stage=stage, verb=instruction)
        reach(page, False)


def begun(page, row, kind, size_bytes=0):
    reach(page, True)
    collective(page, row, kind, size_bytes)


OwnPage.at, OwnPage.collective = moved, begun
"""
"""Python imports it in each process (sitecustomize). A rank kills itself at the next point of POINTS, and leaves a
folder of that number and step. `now`: the instruction under way; "": the step is done, and its row is not written."""


@dataclass(frozen=True)
class Point:
    """Where a rank dies: at the beginning of an instruction, or `inside` at its first collective."""

    rank: int
    stage: int
    verb: str
    inside: bool

    def row(self) -> list[object]:
        """As the hook reads it."""
        return [self.rank, self.stage, self.verb, self.inside]


def points_of(plan: Plan) -> Iterator[Point]:
    """The points of a plan's instruction lists, each kind once. The ranks of a stage take turns."""
    each, turn = plan.world_size // plan.mesh.pp, 0
    for stage in range(plan.mesh.pp):
        verbs = dict.fromkeys(instruction.verb.value for instruction in plan.schedule.program(stage, 1))
        for verb in (*verbs, ""):
            for inside in (False, True) if verb else (False,):
                yield Point(stage * each + turn % each, stage, verb, inside)
                turn += 1


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2",
        "dp_shard=2",
        "dp_replicate=2 dp_shard=2",
        "tp=2",
        "dp_replicate=2 tp=2",
        "pp=2",
        "dp_replicate=2 pp=2",
    ],
)
def test_f2_a_rank_is_lost_in_any_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Fault: a rank dies in one kind of instruction, and the others wait for it, or go on with half of a step, with
    weights that some have updated, or with a row that nobody has written."""
    make_project(tmp_path)
    words = [f"parallel.{word}" for word in layout.split()]
    if "pp" in layout:
        words += ["parallel.schedule=1f1b", "train.microbatch_size=3"]
    ranks = 4 if " " in layout else 2
    words += [f"parallel.ranks={ranks}"]
    monkeypatch.chdir(tmp_path)
    points = [*points_of(plan_of(load(WORDS[0], [*WORDS[1:], *words]).config, ranks))]
    steps = f"train.num_steps={STEPS_BETWEEN * (len(points) + 3)}"
    alone = codescent(tmp_path, "train", *WORDS, *words, steps, "run.name=alone")
    assert alone.returncode == 0, alone.stderr

    kills, hook = tmp_path / "kills", tmp_path / "hook"
    kills.mkdir()
    hook.mkdir()
    (tmp_path / "points.json").write_text(json.dumps([point.row() for point in points]))
    (hook / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", f"{hook}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("KILLS", str(kills))
    with start(tmp_path, "train", *WORDS, *words, *SURVIVES, steps, "run.name=faults") as run:
        said, errors = run.communicate(timeout=1500)  # of some twenty starts
    assert run.returncode == 0, said + errors
    made = sorted(path.name for path in kills.iterdir())
    assert len(made) == len(points), f"the run has ended before {points[len(made)]}"
    print(layout, len([name for name in made if "none" not in name]), "kills")
    found, expected = (RunFolder.open(tmp_path / "runs" / name) for name in ("faults", "alone"))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9), said + errors
    assert [row["step"] for row in found.read_metrics()] == [row["step"] for row in expected.read_metrics()]
    if "dp_replicate" in layout:  # copies
        assert "resumed from the memory of the ranks" in said
