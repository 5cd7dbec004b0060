"""In: ranks of which one fails alone. Out: it ends at once, without the others, names its error and loses nothing.
Does not need NCCL: a teardown that waits for other ranks is planted. Real processes; a deadline is no measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import TESTS, Done, Forker
from runs import environment, make_project

from codescent.record import RunFolder
from codescent.results.run import open_run

WORDS = ("train.num_steps=6", "train.eval_every=0", "checkpoint.every=2", "log.metrics_every=1")


def act(forker: Forker, function: str, folder: Path, ranks: int, **options: Any) -> Done:
    """Ranks of a module that end by themselves, however; their codes and what they said."""
    codes, _, said = forker._ask(f"ending_ranks:{function}", folder, ranks, options)
    return Done(codes, said)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_fails_alone_ends_without_the_others(project: Path, forker: Forker, hangs: bool) -> None:
    name = f"alone-{hangs}"
    done = act(forker, "train", project, 2, words=[f"run.name={name}", *WORDS], hangs=hangs)
    assert done.codes == [1, 1], done.said
    assert "RuntimeError: planted" in done.said
    assert "called: " not in done.said  # no collective and no teardown
    assert ("after its error this rank still runs" in done.said) == hangs
    run = RunFolder.open(project / "runs" / name)
    errors = [event for event in run.read_events() if event["kind"] == "error"]
    assert [event["rank"] for event in errors] == [1, 0]  # rank 0 fails when the message does not come
    assert errors[0]["problems"] == ["RuntimeError('planted')"]
    assert "/gloo/" in errors[1]["problems"][0]
    assert open_run(run.path).why == "RuntimeError('planted')"
    again = forker.run(project, 2, [f"run.name={name}", *WORDS], resume=True)
    assert again.codes == [0, 0], again.said
    assert [event["step"] for event in run.read_events() if event["kind"] == "resume"] == [2]
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 7))


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, two_devices])])
def test_the_launcher_names_it(tmp_path: Path, device: str) -> None:
    """The whole command; in its ranks every teardown hangs, as NCCL's may. On CUDA the other rank waits in NCCL."""
    make_project(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK'):\n    import ending_ranks, layout_ranks\n    ending_ranks.watch()\n"
        "    if os.environ['RANK'] == '1':\n"
        "        layout_ranks.at_step(3, '_reduce', lambda executor: ending_ranks.planted())\n"
    )
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent)]))
    command = [sys.executable, "-m", "codescent", "train", "run.toml", "run.name=named", *WORDS, "--ranks", "2"]
    command += [f"train.device={device}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "RuntimeError: planted" in done.stderr
    assert "rank 1 of 2 (pid " in done.stderr
    assert "destroy_process_group" not in done.stderr


@pytest.mark.parametrize("what", ["", "the script's handler hangs"])
def test_a_script_of_its_own_ends_so_too(forker: Forker, tmp_path: Path, what: str) -> None:
    done = act(forker, "own", tmp_path, 2, what=what)
    assert done.codes == [1, 1], done.said
    assert "called: " not in done.said
    assert done.said.count("codescent: rank 1 failed: RuntimeError: planted") == 1
    assert "codescent: rank 0 ends because rank 1 failed" in done.said or "rank 0 failed" in done.said
    assert ("after its error this rank still runs" in done.said) == bool(what)
    assert ("rank 1: the script's own handler" in done.said) == (not what)


def test_an_error_of_all_ranks_keeps_its_exit_code(forker: Forker, tmp_path: Path) -> None:
    done = act(forker, "own", tmp_path, 2, what="everywhere")
    assert done.codes == [2, 2], done.said
    assert done.said.count("error: ") == 1
    assert "destroy_process_group" not in done.said


@pytest.mark.parametrize("hangs", [False, True])
def test_groups_of_nccl_are_given_up_within_a_time(forker: Forker, tmp_path: Path, hangs: bool) -> None:
    done = act(forker, "alone_on_cuda", tmp_path, 1, hangs=hangs)
    assert done.codes == [1], done.said
    assert done.said.index("RuntimeError: planted") < done.said.index("given up")
    assert "called: " not in done.said


def test_an_error_that_the_script_catches_does_not_tear_down(forker: Forker, tmp_path: Path) -> None:
    done = act(forker, "own", tmp_path, 2, what="caught")
    assert done.codes[1] == 0, done.said
    assert done.said.index("awaited") < done.said.index("given up")
    assert "destroy_process_group" not in done.said
