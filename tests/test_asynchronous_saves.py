"""In: runs that save beside training, killed, stopped, refused or without room. Out: complete checkpoints, or none.
Does not test the bytes of one save: test_checkpoint_faults does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_disk
from forker import Forker, Runs
from runs import assert_same

from codescent.base.errors import UserError
from codescent.checkpoint import save_beside, storage
from codescent.checkpoint.checkpoints import Checkpoints, read_tensors
from codescent.checkpoint.manifest import CheckpointError
from codescent.checkpoint.save_beside import SaveBeside, Staging
from codescent.config.load import load
from codescent.record import RunFolder
from codescent.train.finite import all_finite

WORDS = ("train.eval_every=0", "train.num_steps=9", "checkpoint.every=2", "checkpoint.keep_last=9")
BESIDE = "checkpoint.asynchronous=true"


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, WORDS, ())


def saved(run: RunFolder) -> list[int]:
    """The steps of the complete checkpoints. Nothing else may be in their folder."""
    return [int(path.name.removeprefix("step_")) for path in sorted(run.checkpoints.iterdir())]


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == kind]


def same_weights(run: RunFolder, other: RunFolder, step: int) -> bool:
    one, two = (read_tensors(each.checkpoints / f"step_{step:08d}") for each in (run, other))
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.slow),
        (2, ("parallel.dp_shard=2",)),
        pytest.param(2, ("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.average_every=2", "train.num_steps=10"), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_those_of_a_run_that_waits(runs: Runs, ranks: int, layout: tuple[str, ...]) -> None:
    """Fault: a checkpoint has weights of a later step, or a step has no checkpoint, or two saves are under way."""
    waits = runs.run(ranks, *layout)
    beside = runs.run(ranks, *layout, BESIDE, fault="slow_write 0.05")
    last = 10 if layout[1:] else 9
    assert saved(beside) == saved(waits) == [2, 4, 6, 8, last]
    assert all(same_weights(beside, waits, step) for step in saved(waits))
    told = events(beside, "checkpoint")
    assert [event["step"] for event in told] == [2, 4, 6, 8, last]
    assert all(0 < event["blocked_s"] <= event["seconds"] for event in told[:-1])
    assert "blocked_s" not in told[-1]  # the last one of a run is waited for


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ("train.ema=0.9", "train.eval_every=1")),
        (2, ("parallel.wire=sign",)),
        pytest.param(2, ("parallel.dp_shard=2",), marks=pytest.mark.slow),
        pytest.param(2, ("optimizer.kind=muon", "train.precision=bf16"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.gossip=ring", "train.num_steps=10"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.average_every=2", "train.num_steps=10"), marks=pytest.mark.slow),
    ],
)
def test_what_changes_weights_waits_for_their_copy(runs: Runs, ranks: int, layout: tuple[str, ...]) -> None:
    """Fault: a step, a validation, a sum of gradients or an average changes tensors while they are being copied."""
    waits = runs.run(ranks, *layout)
    beside = runs.run(ranks, *layout, BESIDE, fault="slow_copy 0.003")
    assert saved(beside) == saved(waits)
    assert all(same_weights(beside, waits, step) for step in saved(waits))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_during_a_save_leaves_the_one_before(runs: Runs, ranks: int) -> None:
    """Fault: a killed save beside training leaves a checkpoint that is not complete; or the resumed run differs."""
    expected = runs.run(ranks, BESIDE)
    done = runs.start(ranks, BESIDE, "train.num_steps=9", fault="killed_in_save 4")
    assert done.codes[-1] == -9
    run = runs.last()
    assert [path.name[:14] for path in run.checkpoints.iterdir()] == [".partial_step_"]
    resumed = runs.run(ranks, BESIDE, resume=True)
    assert saved(resumed) == [2, 4, 6, 8, 9]
    assert_same(resumed, expected, 0.0)
    assert same_weights(resumed, expected, 9)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_save_ends_the_run_at_the_next_step(runs: Runs, ranks: int) -> None:
    """Fault: a run trains on for long although its checkpoints are lost, or one rank alone ends."""
    done = runs.start(ranks, BESIDE, "checkpoint.every=3", "train.num_steps=2000", fault="failing_write 6")
    assert done.codes == [2] * ranks, done.said
    assert "Input/output error: this checkpoint cannot be written" in done.said
    assert saved(runs.last()) == [3]
    assert len(runs.last().read_metrics()) < 60


@pytest.mark.timeout(120)
def test_a_save_that_fails_does_not_hide_why_the_run_ends(runs: Runs) -> None:
    """Fault: the failure of an older save is told instead of a spike, whose event a resumed run needs."""
    words = (BESIDE, "checkpoint.every=8", "survive.on_spike=stop", "survive.spike_window=5")
    done = runs.start(2, *words, fault="spike 8 slow_failing_write 2 8")
    assert done.codes == [1, 1], done.said
    assert [event["kind"] for event in runs.last().read_events()][-2:] == ["save_failed", "failed"]
    assert "step 8: not saved: " in done.said
    assert "a spike: the loss" in done.said


@pytest.mark.timeout(120)
def test_an_error_of_one_rank_costs_no_checkpoint(runs: Runs) -> None:
    """Fault: an error leaves a thread that writes into a run which others may have resumed, and half a checkpoint."""
    done = runs.start(1, BESIDE, "checkpoint.every=4", fault="error_in_save 1 5")
    assert done.codes == [1], done.said
    assert "no_such_method" in done.said
    assert saved(runs.last()) == [4]
    assert [event["step"] for event in events(runs.last(), "checkpoint")] == [4]


@pytest.mark.timeout(120)
def test_a_run_that_is_asked_to_stop_waits_for_its_last_save(runs: Runs) -> None:
    """Fault: a scheduler's signal ends a run before the save of its last step is complete."""
    done = runs.start(2, BESIDE, fault="slow_asked_to_stop 0.2 5")
    assert done.codes == [143, 143], done.said
    assert saved(runs.last()) == [2, 4, 5]


@pytest.mark.timeout(120)
def test_weights_that_are_not_finite_are_refused_beside_training_too(runs: Runs) -> None:
    """Fault: the check that a run does before it saves is lost where it saves beside training."""
    words = ("parallel.dp_shard=2", "checkpoint.every=3")  # the state of the last rank is its own
    done = runs.start(2, BESIDE, *words, fault="infinite_state")
    assert done.codes == [1, 1], done.said
    assert saved(runs.last()) == []
    (failed,) = events(runs.last(), "failed")
    assert failed["ruined_step"] == 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_folder_that_is_renamed_meanwhile_is_followed(runs: Runs, ranks: int) -> None:
    """Fault: a save fails because its folder has moved, and the run ends, or is saved at the old place."""
    done = runs.start(ranks, BESIDE, "checkpoint.every=4", fault="renamed_in_save 4")
    assert done.codes == [0] * ranks, done.said
    old = runs.project / "runs" / f"run{runs._number}"
    assert not old.exists()
    run = RunFolder.open(old.with_name(f"{old.name}-moved"))
    assert [event["step"] for event in events(run, "not_saved")] == [4]
    steps = saved(run)
    assert steps[-1] == 9
    assert 4 not in steps
    assert min(steps) < 8  # the next good step is saved instead


@pytest.mark.timeout(120)
@pytest.mark.parametrize("beside", ["true", "false"])
def test_without_room_a_run_goes_on_if_it_is_told_so(runs: Runs, tmp_path: Path, beside: str) -> None:
    """Fault: a full disk ends a run that should train on; or it costs an old checkpoint, or leaves half of one."""
    with small_disk(tmp_path / "disk", 1_400_000) as disk:
        words = ["run.name=full", f"run.folder={disk / 'run'}", *WORDS, "checkpoint.every=2", "checkpoint.last=false"]
        words += ["train.num_steps=25", f"checkpoint.asynchronous={beside}", "log.tensorboard=false"]
        done = runs.forker.run(runs.project, 2, [*words, "checkpoint.on_failed_save=go_on"])
        assert done.codes == [0, 0], done.said
        run = RunFolder.open(disk / "run")
        missed = [event["step"] for event in events(run, "save_failed")]
        assert missed
        assert all("no space left" in event["problems"][0] for event in events(run, "save_failed"))
        assert saved(run) == [step for step in range(2, 25, 2) if step not in missed]
        assert Checkpoints(run.checkpoints, 9, keep_best=False).latest()
        assert [row["step"] for row in run.read_metrics()] == list(range(1, 26))
        assert "the run goes on (checkpoint.on_failed_save)" in done.said


@pytest.mark.timeout(120)
def test_without_room_a_run_stops_by_default(runs: Runs, tmp_path: Path) -> None:
    """Fault: a run trains on without checkpoints although nobody has asked for it."""
    with small_disk(tmp_path / "disk", 1_400_000) as disk:
        words = [f"run.folder={disk / 'run'}", *WORDS, "checkpoint.every=1", BESIDE, "train.num_steps=40"]
        done = runs.forker.run(runs.project, 2, words)
        assert done.codes == [2, 2], done.said
        assert "no space left" in done.said
        assert all(read_tensors(path) for path in RunFolder.open(disk / "run").checkpoints.iterdir())


def begin(folder: Path, values: dict[str, torch.Tensor]) -> SaveBeside:
    return SaveBeside(Checkpoints(folder, 1, keep_best=False), 1, values, {}, None, Staging(), all_finite)


def test_a_rank_computes_while_its_tensors_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a rank waits for the copy before it has to; or it may change tensors that are not copied."""
    go, copied = threading.Event(), list[bool]()
    monkeypatch.setattr(save_beside, "_copy", lambda _: copied.append(go.wait(60)))
    save = begin(tmp_path, {"a": torch.arange(9.0), "b": torch.arange(9.0)})
    assert not copied
    waiting = threading.Thread(target=save.wait_for_copy, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go.set()
    waiting.join(60)
    assert copied == [True, True]
    save.wait()


def test_a_save_that_is_given_up_has_ended_and_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after a loss of ranks its thread writes on, and its checkpoint appears among those of the next start."""
    go = threading.Event()
    monkeypatch.setattr(save_beside, "_copy", lambda _: go.wait(60))
    save = begin(tmp_path, {"a": torch.arange(9.0)})
    giving = threading.Thread(target=save.give_up, daemon=True)
    giving.start()
    giving.join(0.1)
    assert giving.is_alive()
    go.set()
    giving.join(60)
    assert save.ready
    assert Checkpoints(tmp_path, 1, keep_best=False).newest_step() is None
    with pytest.raises(CheckpointError, match="given up"):
        save.go_on()


def test_a_copy_that_fails_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: where a copy fails, what the memory had before it is saved as the tensor."""

    def fail(pair: object) -> None:
        raise RuntimeError("this tensor cannot be copied")

    monkeypatch.setattr(save_beside, "_copy", fail)
    save = begin(tmp_path, {"a": torch.arange(9.0)})
    save.wait_for_copy()
    with pytest.raises(RuntimeError, match="cannot be copied"):
        save.go_on()
    assert list(tmp_path.iterdir()) == []


def test_its_thread_does_not_hold_up_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: after a second Ctrl-C the interpreter waits until the threads of a pool have written all files."""
    daemons: list[bool] = []
    whole = storage.write_part

    def write(*arguments: Any) -> Any:
        daemons.append(threading.current_thread().daemon)
        return whole(*arguments)

    monkeypatch.setattr(storage, "write_part", write)
    values = {"a": torch.arange(9.0), "empty": torch.empty(0, 3)}
    save = begin(tmp_path, values)
    save.wait_for_copy()
    values["a"].zero_()
    while (path := save.go_on()) is None:
        pass
    assert daemons == [True]
    assert {name: one.tolist() for name, one in read_tensors(path).items()} == {"a": list(range(9)), "empty": []}


def test_where_workers_may_be_lost_it_is_refused(runs: Runs) -> None:
    """Fault: a rank that comes late does not know of a save that is under way, and all wait for ever."""
    with pytest.raises(UserError, match="lost while a save is under way"):
        load(runs.project / "run.toml", [BESIDE, "parallel.servers=1"])
