"""In: tensors and states on one process. Out: whether checkpoints give them back, keep the right ones, refuse misfits.
Does not damage or kill anything: test_checkpoint_damage and test_checkpoint_faults do."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import make_tensors
from safetensors.torch import load_file
from syncs import noted

from codescent.checkpoint import parts as checkpoint_parts
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, read_tensors

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit: -0.0 is not 0.0, and a NaN is that NaN."""
    bits = BITS[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.detach().clone().view(bits), other.detach().clone().view(bits))


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())


@pytest.fixture(params=["one file", "several files"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several files":
        monkeypatch.setattr(checkpoint_parts, "PART_BYTES", 50_000)


@pytest.mark.usefixtures("parts")
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_name_after(tmp_path: Path) -> None:
    with noted() as steps:
        path = Checkpoints(tmp_path, 2, keep_best=False).save(3, make_tensors(3), {"step": 3})
    at = steps.at(path)
    assert [file.name for file in (*path.iterdir(), path) if not steps.is_synced(file, before=at)] == []
    assert steps.is_synced(tmp_path, after=at)


@pytest.mark.usefixtures("parts")
def test_every_kind_of_tensor_comes_back_bitwise(tmp_path: Path) -> None:
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, struct.unpack("<f", b"\x01\x02\xa0\x7f")[0]]
    )
    saved = make_tensors(3) | {
        "special.fp32": special,
        "special.fp64": torch.tensor([math.pi, 5e-324, -0.0], dtype=torch.float64),
        "special.bf16": torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16),
        "special.int64": torch.tensor([2**63 - 1, -(2**63)]),
        "special.bool": torch.tensor([[True], [False]]),
        "special.uint8": torch.arange(256, dtype=torch.uint8),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "every_other": torch.arange(20.0)[::2],
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "one": torch.randn(1, 1, 1),
        "no_elements_but_dims": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "näme with ] [0:1] and /slashes": torch.randn(2),
    }
    checkpoints = Checkpoints(tmp_path / "deep" / "checkpoints", 2, keep_best=True)
    path = checkpoints.save(3, saved, {"step": 3}, 0.5)
    assert path == tmp_path / "deep" / "checkpoints" / "step_00000003"
    newest = checkpoints.latest()
    assert newest is not None
    found = {name: torch.full_like(tensor, 1) for name, tensor in saved.items()}
    found["transposed"] = torch.ones(3, 4).t()
    found["every_other"] = torch.ones(20)[::2]
    places = {name: tensor.data_ptr() for name, tensor in found.items()}
    assert checkpoints.load(newest, found) == {"step": 3}
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places
    alone = read_tensors(path)
    assert list(alone) == sorted(saved)
    for name, tensor in saved.items():
        assert same_bits(found[name], tensor), name
        assert same_bits(alone[name], tensor), name


def test_the_files_are_safetensors_for_anyone(tmp_path: Path) -> None:
    saved = make_tensors(1)
    path = Checkpoints(tmp_path, 1, keep_best=False).save(1, saved, {}, None)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank_00000_part_000.safetensors"]
    found = load_file(path / "rank_00000_part_000.safetensors")
    assert found.keys() == saved.keys()
    assert all(same_bits(found[name], saved[name]) for name in saved)


def test_state_and_loss_come_back(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "tokens": 2**62,
        "best_validation_loss": math.inf,
        "config_hash": "ab" * 32,
        "data": {"position": [1, 2, {"epoch": 3}], "text": "größer\n"},
        "loss": 0.1 + 0.2,
        "none": None,
    }
    checkpoints = Checkpoints(tmp_path, 2, keep_best=True)
    checkpoints.save(7, {}, state, 1 / 3)
    newest = checkpoints.latest()
    assert newest is not None
    assert (newest.step, newest.validation_loss, newest.state) == (7, 1 / 3, state)
    assert checkpoints.load(newest, {}) == state


def test_no_checkpoints_yet(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, keep_best=True)
    assert checkpoints.latest() is None
    assert checkpoints.incomplete() == []
    checkpoints.clean()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "losses", "expected"),
    [
        (2, True, [3.0, 1.0, 2.0, 2.5, 2.6], [2, 4, 5]),
        (2, False, [3.0, 1.0, 2.0, 2.5, 2.6], [4, 5]),
        (1, True, [1.0, 2.0, 3.0], [1, 3]),
        (1, True, [3.0, 2.0, 1.0], [3]),
        (1, True, [None, None, None], [3]),
        (1, True, [5.0, None, math.nan], [1, 3]),
        (2, True, [math.nan, 4.0, -math.inf, 3.0, 3.0], [3, 4, 5]),
        (1, True, [2.0, 2.0, 9.0], [2, 3]),  # of equals the newer
        (9, True, [1.0, 2.0], [1, 2]),
    ],
)
def test_keep_rules(
    tmp_path: Path, keep_last: int, keep_best: bool, losses: list[float | None], expected: list[int]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last, keep_best)
    for step, loss in enumerate(losses, start=1):
        checkpoints.save(step, {"t": torch.tensor(step)}, {}, loss)
    assert steps(tmp_path) == expected


def test_the_newest_cannot_be_given_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        Checkpoints(tmp_path, 0, keep_best=True)


def test_latest_before_and_steps_beyond_eight_digits(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 5, keep_best=False)
    for step in (99_999_999, 100_000_000, 5):
        checkpoints.save(step, {"t": torch.tensor(step)}, {}, None)
    (tmp_path / "step_final").mkdir()
    (tmp_path / "step_00000006").write_text("a file of the user")
    found = []
    before = None
    while (saved := checkpoints.latest(before)) is not None:
        found.append(saved.step)
        before = saved.step
    assert found == [100_000_000, 99_999_999, 5]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    for value in (1.0, 2.0):
        checkpoints.save(4, {"t": torch.tensor(value)}, {"value": value}, value)
    newest = checkpoints.latest()
    assert newest is not None
    assert newest.state == {"value": 2.0}
    assert read_tensors(newest.path)["t"].item() == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_a_state_that_is_no_json_or_a_strange_dtype_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, {"t": torch.zeros(2)}, {"bad": object()}, None)
    with pytest.raises(TypeError, match=r"t: not a tensor of one of torch\.float64"):
        checkpoints.save(1, {"t": torch.zeros(2, dtype=torch.complex64)}, {}, None)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_config_is_listed_at_once_and_changes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    stored = {"a": torch.zeros(3, 4), "b": torch.zeros(5), "c": torch.zeros(6), "extra": torch.zeros(1)}
    path = checkpoints.save(1, stored, {}, None)
    newest = checkpoints.latest()
    assert newest is not None
    wanted = {
        "a": torch.full((4, 3), 7.0),
        "b": torch.full((5,), 7.0, dtype=torch.bfloat16),
        "c": torch.full((6,), 7.0),
        "more": torch.full((2,), 7.0),
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(newest, wanted)
    assert caught.value.problems == (
        f"{path} is of another model or config:",
        "a: [3, 4] float32 in the checkpoint, [4, 3] float32 in this run",
        "b: [5] float32 in the checkpoint, [5] bfloat16 in this run",
        "more: not in the checkpoint",
        "extra: in the checkpoint, but not in this run",
    )
    assert all(bool((tensor == 7).all()) for tensor in wanted.values())


def test_a_long_list_of_misfits_is_cut(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    checkpoints.save(1, {f"t{number:03d}": torch.zeros(1) for number in range(150)}, {}, None)
    newest = checkpoints.latest()
    assert newest is not None
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(newest, {})
    assert len(caught.value.problems) == 22
    assert caught.value.problems[-1] == "and 130 more"


def test_read_tensors_reads_and_verifies_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_parts, "PART_BYTES", 1)
    stored = {"model.a": torch.randn(5), "model.b": torch.randn(5), "optimizer.a": torch.randn(5)}
    path = Checkpoints(tmp_path, 1, keep_best=True).save(1, stored, {}, None)
    (path / "rank_00000_part_002.safetensors").unlink()
    found = read_tensors(path, ["model.b", "model.a"])
    assert same_bits(found["model.a"], stored["model.a"])
    assert same_bits(found["model.b"], stored["model.b"])
    with pytest.raises(CheckpointError, match=r"part_002\.safetensors: missing"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match=r"model\.c: not in the checkpoint"):
        read_tensors(path, ["model.a", "model.c"])


def test_a_moved_checkpoint_is_read_where_it_lies(tmp_path: Path) -> None:
    stored = make_tensors(2)
    path = Checkpoints(tmp_path / "run", 1, keep_best=True).save(2, stored, {}, None)
    moved = path.rename(tmp_path / "elsewhere")
    assert all(same_bits(tensor, stored[name]) for name, tensor in read_tensors(moved).items())


def test_tensors_on_their_way_to_autograd_are_loaded_and_stay_leaves(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 4)
    checkpoints = Checkpoints(tmp_path, 1, keep_best=True)
    checkpoints.save(1, dict(module.named_parameters()), {}, None)
    other = torch.nn.Linear(3, 4)
    newest = checkpoints.latest()
    assert newest is not None
    checkpoints.load(newest, dict(other.named_parameters()))
    assert torch.equal(other.weight, module.weight)
    assert other.weight.is_leaf
    other(torch.ones(1, 3)).sum().backward()
    assert other.weight.grad is not None
