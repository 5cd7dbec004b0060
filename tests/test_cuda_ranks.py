"""In: two or four CUDA devices. Out: ranks over NCCL walk the trajectory of one device, and end together.
Skipped where there are fewer devices, saying so. Does not measure speed: benchmarks/gpu_step.py does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from forker import TESTS
from runs import assert_same, environment, losses, make_project, train

from codescent.record import RunFolder

DEVICE = "cuda"
WORDS = (f"train.device={DEVICE}", "model.num_layers=4", "train.microbatch_size=2", "train.check_every=1")
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2}
LAYOUTS = {
    2: (
        "tp=2",
        "cp=2",
        "cp=2 context=all-gather",
        "pp=2 schedule=1f1b",
        "pp=2 schedule=zero-bubble",
        "pp=2 schedule=interleaved virtual_stages=2",
        "dp_replicate=2",
        "dp_shard=2 zero_stage=1",
        "dp_shard=2 zero_stage=2",
        "dp_shard=2",
        "dp_shard=2 recompute=full",
    ),
    4: (
        "dp_replicate=2 dp_shard=2",
        "dp_shard=4",
        "tp=2 pp=2 schedule=zero-bubble",
        "dp_shard=2 tp=2",
        "dp_shard=2 cp=2",
        "dp_replicate=2 pp=2 schedule=1f1b",
    ),
}

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


def needs(ranks: int) -> pytest.MarkDecorator:
    """The mark of a test that has so many ranks, one on each device."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < ranks, reason=f"needs {ranks} CUDA devices, and here is {found or 'none'}")


def of_ranks(numbers: Sequence[int] = (2, 4)) -> list[object]:
    """A parameter (ranks, layout) for each layout of so many ranks."""
    return [
        pytest.param(ranks, layout, marks=needs(ranks), id=layout) for ranks in numbers for layout in LAYOUTS[ranks]
    ]


def keys(layout: str) -> list[str]:
    return [f"parallel.{word}" for word in layout.split()]


@pytest.fixture(scope="module")
def alone(project: Path) -> RunFolder:
    """The run of one device in fp64, with dropout; nothing is compiled."""
    return train(project, "alone", *WORDS, "train.compile=none", "train.precision=fp64", "model.dropout=0.1")


@pytest.mark.parametrize(("ranks", "layout"), of_ranks())
def test_ranks_walk_the_trajectory_of_one_device(project: Path, alone: RunFolder, ranks: int, layout: str) -> None:
    words = ("train.precision=fp64", "model.dropout=0.1", *keys(layout))
    found = train(project, f"ranks-{layout.replace(' ', '-')}", *WORDS, *words, "--ranks", str(ranks))
    assert_same(found, alone, TOLERANCES["fp64"])


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def other(project: Path, request: pytest.FixtureRequest) -> tuple[str, RunFolder]:
    """Another precision, and the run of one device in it."""
    words = (f"train.precision={request.param}", "train.num_steps=10")
    return request.param, train(project, f"alone-{request.param}", *WORDS, *words)


@pytest.mark.parametrize(("ranks", "layout"), of_ranks([2]))
def test_they_do_in_other_precisions(project: Path, other: tuple[str, RunFolder], ranks: int, layout: str) -> None:
    """Copies are not compared in each step, so results are read a step late."""
    precision, expected = other
    words = (f"train.precision={precision}", "train.num_steps=10", "train.check_every=0", *keys(layout))
    found = train(project, f"{precision}-{layout.replace(' ', '-')}", *WORDS, *words, "--ranks", str(ranks))
    assert losses(found) == pytest.approx(losses(expected), rel=TOLERANCES[precision])


@pytest.mark.parametrize("layout", [pytest.param(x, marks=needs(2)) for x in ("dp_shard=2", "tp=2", "dp_replicate=2")])
def test_compiled_blocks_follow_eager_ones(project: Path, alone: RunFolder, layout: str) -> None:
    words = ("train.precision=fp64", "model.dropout=0.1", "train.compile=blocks", *keys(layout))
    found = train(project, f"compiled-{layout}", *WORDS, *words, "--ranks", "2")
    assert losses(found) == pytest.approx(losses(alone), rel=TOLERANCES["fp64"])


@needs(4)
def test_a_checkpoint_goes_on_with_one_device(project: Path, alone: RunFolder) -> None:
    words = (*WORDS, "train.precision=fp64", "model.dropout=0.1", "optimizer.decay_steps=20")
    train(project, "moved", *words, *keys("tp=2 dp_shard=2"), "train.num_steps=10", "--ranks", "4")
    found = train(project, "moved", *words, "--resume")
    assert losses(found) == pytest.approx(losses(alone), rel=TOLERANCES["fp64"])


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *(pytest.param(2, x, marks=needs(2)) for x in ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "cp=2")),
        *(pytest.param(4, x, marks=needs(4)) for x in ("dp_replicate=2 dp_shard=2", "tp=2 pp=2")),
    ],
)
def test_one_rank_raises_and_all_end_in_30_seconds(tmp_path: Path, ranks: int, layout: str) -> None:
    """The others wait in NCCL for a message that does not come. 30 s is a deadline, and no measurement."""
    make_project(tmp_path)
    plant(tmp_path, ranks - 1)
    command = [sys.executable, "-m", "codescent", "train", "run.toml", "run.name=ended", *WORDS, *keys(layout)]
    path = os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [*command, "--ranks", str(ranks)], cwd=tmp_path, env=environment(PYTHONPATH=path), stdout=said, stderr=said
        )
    try:
        started = time.monotonic()
        while not (tmp_path / "raised").exists() and process.poll() is None and time.monotonic() < started + 150:
            time.sleep(0.05)
        code = process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "said.txt").read_text()
    assert (tmp_path / "raised").exists(), text
    assert code == 1, text
    assert "RuntimeError: planted" in text
    assert f"rank {ranks - 1} of {ranks} (pid " in text


def plant(folder: Path, rank: int) -> None:
    """From now on this rank of a run that is started in the folder raises in step 3, and leaves the file `raised`."""
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"if os.environ.get('RANK') == '{rank}':\n"
        "    import layout_ranks\n"
        "    def raises(executor):\n"
        f"        pathlib.Path({str(folder / 'raised')!r}).touch()\n"
        "        raise RuntimeError('planted')\n"
        "    layout_ranks.at_step(3, '_forward', raises)\n"
    )
