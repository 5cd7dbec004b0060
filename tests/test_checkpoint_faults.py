"""In: one or two ranks that save, killed at every point and at random, or on full disks. Out: what is left.
Does not damage files: test_checkpoint_damage does."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import make_tensors
from disks import small_disk
from forker import Forker

from codescent.base.agreement import FEW
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints

Scenario = Callable[..., Any]
KILLED, RAISED, SURVIVED = -9, 3, 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 6 << 20) as folder:
        yield folder


@pytest.fixture
def scenario(forker: Forker, tmp_path: Path) -> Scenario:
    """`scenario(name, folder, *words)`: what a scenario of checkpoint_ranks found."""

    def run(name: str, where: Path, *words: str) -> Any:
        return forker.call("checkpoint_ranks:run", tmp_path, scenario=name, where=str(where), words=words)[0]

    return run


@pytest.mark.parametrize(("world_size", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_killed_at_every_point_where_a_save_touches_the_disk(
    scenario: Scenario, tmp_path: Path, world_size: int, victim: int
) -> None:
    """Steps 1 and 2 are there; step 3 is saved with keep_last = 1, so that 1 and 2 are deleted by the same call."""
    rows = scenario("kill_points", tmp_path / "checkpoints", str(world_size), str(victim), "plain")
    assert len(rows) > (10 if victim == 0 else 3)
    for row in rows[:-1]:
        assert row["codes"][victim] == KILLED
        assert all(code == RAISED for rank, code in enumerate(row["codes"]) if rank != victim)
        assert row["step"] in (2, 3)
        assert row["variant"] == 0
        assert row["afterwards"] in (["step_00000002", "step_00000004"], ["step_00000003", "step_00000004"])
    assert rows[-1]["codes"] == [SURVIVED] * world_size
    assert rows[-1]["step"] == 3
    kinds = {name.split("_step_")[0] for row in rows for name in row["leftovers"]}
    assert kinds == ({".partial", ".deleted"} if victim == 0 else {".partial"})
    seen = [row["step"] for row in rows]
    assert seen == sorted(seen)


@pytest.mark.parametrize(("world_size", "victim"), [(1, 0), (2, 1)])
def test_killed_at_every_point_of_a_save_beside_training(
    scenario: Scenario, tmp_path: Path, world_size: int, victim: int
) -> None:
    """Fault: a kill between the copy and the commit leaves half a checkpoint, or takes the one before with it."""
    rows = scenario("kill_points", tmp_path / "checkpoints", str(world_size), str(victim), "beside")
    assert len(rows) > (8 if victim == 0 else 3)
    for row in rows[:-1]:
        assert row["codes"][victim] == KILLED
        assert row["step"] in (2, 3)
        assert row["variant"] == 0
    assert rows[-1]["codes"] == [SURVIVED] * world_size
    assert (rows[-1]["step"], rows[-1]["leftovers"]) == (3, [])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_beside_training_has_the_values_of_the_call(scenario: Scenario, tmp_path: Path, world_size: int) -> None:
    """Fault: what training changes after the call reaches the file; or a name shows a checkpoint before its end."""
    for answer in scenario("mutated", tmp_path / "checkpoints", str(world_size)):
        assert answer["result"] == {"before": [1], "variants": [0, 0], "steps": [2, 3]}


def test_ranks_divide_anew_what_has_changed(scenario: Scenario, tmp_path: Path) -> None:
    """Fault: a division that is kept from the save before leaves out a new tensor, or hides that steps differ."""
    for answer in scenario("divided_again", tmp_path / "checkpoints"):
        assert answer["result"]["anew"] == [True, False, True]
        assert answer["result"]["same"] == [True, True, True]
        assert "the ranks save different steps: [7, 8]" in answer["result"]["why"]
        assert answer["result"]["left"] == ["step_00000001", "step_00000002", "step_00000003"]


def test_what_rank_0_tells_arrives_whole_however_long_it_is(scenario: Scenario, tmp_path: Path) -> None:
    """Fault: a text that does not fit into the first message of a broadcast is cut, or the next one begins in it."""
    fits = FEW - len(json.dumps({"value": "", "problems": [], "faults": []}))
    sizes = (1, fits - 1, fits, fits + 1, 5 * FEW)
    for answer in scenario("told", tmp_path / "checkpoints", *map(str, sizes)):
        assert answer["result"] == [[size, "!"] for size in sizes]


def test_an_unsound_save_beside_training_leaves_nothing(scenario: Scenario, tmp_path: Path) -> None:
    """Fault: values that one rank refuses become the newest checkpoint."""
    for answer in scenario("unsound", tmp_path / "checkpoints"):
        assert answer["result"] == ["step_00000001"]


def test_killed_at_every_point_while_a_step_is_replaced(scenario: Scenario, tmp_path: Path) -> None:
    """Step 2 is saved again with other tensors: at every moment one of the two is there whole."""
    rows = scenario("kill_points", tmp_path / "checkpoints", "1", "0", "replace")
    assert {row["step"] for row in rows} == {2}
    variants = [row["variant"] for row in rows]
    assert variants == sorted(variants)
    assert set(variants) == {0, 1}
    for row in rows:
        hidden_one_counts = [".replaced_step_00000002", "step_00000004"]
        assert row["afterwards"] in (["step_00000002", "step_00000004"], hidden_one_counts)


@pytest.mark.parametrize(("world_size", "trials"), [(1, 20), (2, 10)])
def test_killed_at_random_moments_it_goes_on_from_the_last_complete_one(
    scenario: Scenario, tmp_path: Path, world_size: int, trials: int
) -> None:
    rows = scenario("random_kills", tmp_path / "checkpoints", str(world_size), str(trials), "1")
    last = 0
    for row in rows:
        assert row["variant"] == 0
        assert row["step"] - row["reported"] in (0, 1)  # one more may be complete than its save could report
        assert row["step"] > last
        assert row["codes"][row["victim"]] == KILLED
        assert all(code == RAISED for rank, code in enumerate(row["codes"]) if rank != row["victim"])
        last = row["step"]
    assert any(row["leftovers"] for row in rows)


def test_shards_are_loaded_into_any_other_layout(scenario: Scenario, tmp_path: Path) -> None:
    first, second, alone = scenario("layouts", tmp_path / "checkpoints")
    assert first["result"] == second["result"] == [True] * 6
    assert alone["result"] == [True, True]


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicated_tensors_are_written_once_and_divided_by_bytes(
    scenario: Scenario, tmp_path: Path, world_size: int
) -> None:
    done = scenario("division", tmp_path / "checkpoints", str(world_size))
    assert [answer.get("result") for answer in done["answers"]] == [True] * world_size
    of_rank = [
        sum(size for name, size in done["files"].items() if name.startswith(f"rank_{rank:05d}"))
        for rank in range(world_size)
    ]
    assert sum(of_rank) < done["data_bytes"] + 100_000
    assert max(of_rank) < 4 / 3 * sum(of_rank) / world_size  # the bound of "longest first" (Graham 1969)


def test_all_ranks_are_refused_alike(scenario: Scenario, tmp_path: Path) -> None:
    found = scenario("disagreement", tmp_path / "checkpoints")
    assert [answer["result"] for answer in found["halves"]] == [None, None]  # between them they have every tensor
    for kind, words in {
        "missing": "more: not in the checkpoint",
        "shape": "model.bias: [7] float32 in the checkpoint, [8] float32 in this run",
        "checkpoint": "not the same checkpoint on every rank",
        "damage": "rank_00000_part_001.safetensors: truncated",
    }.items():
        for answer in found[kind]:
            assert answer["kind"] == "CheckpointError"
            assert words in "\n".join(answer["problems"])
    assert [answer["code"] for answer in found["step"]] == [RAISED, RAISED]


def test_full_disk_on_one_of_two_ranks(scenario: Scenario, disk: Path) -> None:
    found = scenario("full_disk", disk / "checkpoints", str(6 << 20))
    for when, file in {"during": ".safetensors", "before": "/checkpoints"}.items():
        for answer in found[when]["answers"]:
            assert answer["kind"] == "NoRoom"
            assert f"{file}: no space left: this checkpoint needs" in answer["problems"][0]
            assert "step_00000001" in answer["problems"][-1]
        assert found[when]["names"] == ["step_00000001"]
        assert found[when]["step"] == 1
        assert found[when]["variant"] == 0


def test_full_disk_at_each_point_of_a_save(scenario: Scenario, disk: Path) -> None:
    """The disk fills up just before each of: the partial folder, its files, the manifest, the renaming."""
    rows = scenario("full_disk_points", disk / "checkpoints")
    refused = [row for row in rows if "problems" in row]
    assert len(refused) > 5
    for row in refused:
        assert row["kind"] == "NoRoom"
        assert re.search(r"no space left: this checkpoint needs [\d,]+ bytes, [\d,]+ are free", row["problems"][0])
        assert row["names"] == ["step_00000001"]
        assert (row["step"], row["variant"]) == (1, 0)
    for row in rows[len(refused) :]:  # it had been written before the disk filled up
        assert (row["step"], row["variant"]) == (2, 0)
        assert row["names"] == ["step_00000001", "step_00000002"]
    assert len(rows) > len(refused)


def test_a_read_only_disk_is_named(disk: Path) -> None:
    checkpoints = Checkpoints(disk / "checkpoints", 2, keep_best=True)
    checkpoints.save(1, make_tensors(1), {}, 1.0)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(CheckpointError, match=r"checkpoints/\.partial_step_00000002.*Read-only file system"):
        checkpoints.save(2, make_tensors(2), {}, 1.0)
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_checkpoint_deleted_while_it_is_looked_for_is_passed_over(tmp_path: Path) -> None:
    """`codescent sample` looks while the run deletes: the folder is gone between the listing and the reading."""
    checkpoints = Checkpoints(tmp_path, 9, keep_best=True)
    for step in (1, 2):
        checkpoints.save(step, {}, {}, None)
    newest = tmp_path / "step_00000002"
    found = checkpoints._found()
    real = Checkpoints._found
    calls = []

    def stale(self: Checkpoints) -> dict[int, Path]:
        calls.append(1)
        if len(calls) > 1:
            return real(self)
        newest.rename(tmp_path / ".deleted_step_00000002_x")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_found", stale)
        saved = checkpoints.latest()
    assert saved is not None
    assert saved.step == 1
    assert [path.name for path in checkpoints.incomplete()] == [".deleted_step_00000002_x"]
    checkpoints.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
