"""In: torch modules whose authors never heard of us. Out: that our strategies train them as one process does.
Does not run the example (test_own_example does); the ranks are own_ranks', real processes over gloo."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.own import sampler
from codescent.own.average import _OneKind
from codescent.trace.measure import Measured, measure

TESTS = Path(__file__).resolve().parent
ALL = ("ddp", "zero1", "zero2", "zero3")
MOST = ("ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2")), "zero3")
"""Quick tests take the two ends; what lies between is slow."""
Run = Callable[..., list[Any]]


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Run:
    """`run(ranks, job, **options)`: what each rank returned; all must end well."""

    def ask(ranks: int, job: str, **options: Any) -> list[Any]:
        return forker.call("own_ranks:act", tmp_path, ranks, job=job, options=options)

    return ask


@pytest.fixture(scope="module")
def alone(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The trajectory of torch alone in one process, computed once."""
    known: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("alone")

    def ask(**options: Any) -> Any:
        key = json.dumps(options)
        if key not in known:
            (known[key],) = forker.call("own_ranks:act", folder, job="train", options={**options, "clip": "torch"})
        return known[key]

    return ask


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    assert found["none"] == wanted["none"]
    assert found["lr"] == wanted["lr"]
    for mine, other in zip(found["seen"], wanted["seen"], strict=True):
        assert mine == pytest.approx(other, rel=tolerance)
    for name, values in wanted["final"].items():
        assert found["final"][name] == pytest.approx(values, rel=tolerance, abs=tolerance), name


def test_the_names_are_there_and_torch_is_not_until_one_is_asked_for() -> None:
    program = """
import sys, codescent
assert set(codescent.__all__) <= set(dir(codescent)) and "torch" not in sys.modules
assert all(callable(getattr(codescent, name)) for name in codescent.__all__) and "torch" in sys.modules
try:
    codescent.nonsense
except AttributeError as error:
    print(error)
for call in (lambda: codescent.sampler([0], 1), lambda: codescent.init("cuda"), lambda: codescent.init("tpu")):
    try:
        call()
    except codescent.UserError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "module 'codescent' has no attribute 'nonsense'"
    assert lines[1] == "codescent.sampler: the ranks are not connected: call codescent.init() first"
    assert lines[2].startswith('codescent.init: device = "cuda": this machine has 0 CUDA devices')
    assert lines[3] == 'codescent.init: device "tpu"; must be one of auto, cpu, cuda, xpu, mps'


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("odd", strategy) for strategy in ALL),
        ("convolutions", "zero3"),
        ("sequences", "fsdp"),
        ("channels last", "ddp"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("convolutions", "ddp"),
                ("channels last", "zero3"),
                *(("sequences", strategy) for strategy in ("ddp", "zero1", "zero2")),
            )
        ),
    ],
)
def test_two_ranks_walk_the_trajectory_of_one_process(run: Run, alone: Any, kind: str, strategy: str) -> None:
    for found in run(2, "train", kind=kind, strategy=strategy):
        assert_same(found, alone(kind=kind))


def test_torchs_ddp_walks_the_same_trajectory(run: Run) -> None:
    (wanted, _) = run(2, "train", kind="sequences", strategy="torch", clip="torch")
    for strategy in ("ddp", "zero3"):
        assert_same(run(2, "train", kind="sequences", strategy=strategy)[0], wanted)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_one_rank_is_no_special_case(run: Run, alone: Any, strategy: str) -> None:
    assert_same(run(1, "train", strategy=strategy)[0], alone(kind="odd"))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "zero2"])
def test_three_ranks(run: Run, alone: Any, strategy: str) -> None:
    for found in run(3, "train", strategy=strategy):
        assert_same(found, alone(kind="odd"))


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_copies_of_divided_models(run: Run, alone: Any, strategy: str) -> None:
    for found in run(4, "train", strategy=strategy, replicas=2):
        assert_same(found, alone(kind="odd"))


@pytest.mark.parametrize("strategy", MOST)
@pytest.mark.parametrize("parts", [3, pytest.param(-3, marks=pytest.mark.slow)], ids=["said", "unsaid"])
def test_accumulated_gradients(run: Run, alone: Any, strategy: str, parts: int) -> None:
    for found in run(2, "train", strategy=strategy, parts=parts):
        assert_same(found, alone(kind="odd"))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_other_optimizers(run: Run, alone: Any, strategy: str, optimizer: str) -> None:
    for found in run(2, "train", strategy=strategy, optimizer=optimizer):
        assert_same(found, alone(kind="odd", optimizer=optimizer))


@pytest.mark.parametrize("strategy", MOST)
def test_several_dtypes(run: Run, alone: Any, strategy: str) -> None:
    for found in run(2, "train", kind="mixed", strategy=strategy):
        assert_same(found, alone(kind="mixed"), 1e-5)


@pytest.mark.parametrize("strategy", MOST)
def test_torchs_own_clipping(run: Run, alone: Any, strategy: str) -> None:
    for found in run(2, "train", kind="sequences", strategy=strategy, clip="torch"):
        assert_same(found, alone(kind="sequences"))


def test_blocks_of_the_users_choice(run: Run, alone: Any) -> None:
    for blocks in ([], ["layers.1", "outward"]):
        assert_same(run(2, "train", strategy="zero3", blocks=blocks)[0], alone(kind="odd"))


def test_what_a_rank_holds_is_divided(run: Run) -> None:
    whole = run(1, "held", strategy="ddp")[0]
    assert run(2, "held", strategy="ddp")[1] == whole
    for strategy in ("zero1", "zero2", "zero3"):
        for found in run(2, "held", strategy=strategy):
            assert found == {name: size // 2 for name, size in whole.items()}


def test_gradients_of_what_some_ranks_use(run: Run) -> None:
    for found in run(2, "unused"):
        assert found["0.weight"] == [[1.0, 1.0], [1.0, 1.0]]
        assert found["1.bias"] == [0.5, 0.5]
        assert found["2.weight"] is None


def test_a_gradient_of_an_earlier_pass_counts(run: Run) -> None:
    for found in run(2, "earlier"):
        assert (found["0.bias"], found["1.bias"]) == ([2.0, 2.0], [1.0, 1.0])


def test_a_backward_pass_with_all_gradients_copies_no_number_to_the_device(run: Run) -> None:
    assert run(2, "copies") == [[0, 0, 0], [0, 0, 1]]


def test_counters_of_a_rank_that_lacks_a_gradient_come_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the host waits for a copy from other memory. A stand-in for the device notes what is asked of it."""
    asked: list[Any] = []

    def noting(numbers: list[bool], *, dtype: torch.dtype, pin_memory: bool) -> Any:
        return SimpleNamespace(to=lambda *to, **how: asked.append((numbers, dtype, pin_memory, to, how)))

    part = _OneKind.__new__(_OneKind)
    part.ones = SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.bfloat16)  # type: ignore[assignment]
    monkeypatch.setattr(torch, "tensor", noting)
    part._counted([True, False])
    assert asked == [([True, False], torch.bfloat16, True, (torch.device("cuda", 1),), {"non_blocking": True})]


def test_products_of_an_own_loop_are_summed_in_fp32(run: Run) -> None:
    assert run(1, "sums") == [[False, False]]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_module_that_is_let_go_leaves_nothing(run: Run, strategy: str) -> None:
    assert run(2, "forgotten", strategy=strategy) == [[True] * 3] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_running_statistics_are_one_for_all_ranks(run: Run, strategy: str) -> None:
    first, second = run(2, "statistics", strategy=strategy)
    assert first["now"] == second["now"]
    assert first["own"] != second["own"]
    mean = [(a + b) / 2 for a, b in zip(first["own"][1], second["own"][1], strict=True)]
    assert first["now"] == pytest.approx(mean, rel=1e-6)
    assert first["constant"] == second["constant"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "zero3", 1), (1, "ddp", 1)),
        ((1, "ddp", 1), (2, "zero3", 1)),
        ((2, "zero1", 1), (3, "zero2", 1)),
        ((4, "zero3", 2), (2, "ddp", 1)),
        pytest.param((2, "ddp", 1), (4, "zero2", 2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_elsewhere(run: Run, before: Any, after: Any, optimizer: str) -> None:
    ranks, strategy, replicas = before
    wanted = run(ranks, "keep", kind="odd", strategy=strategy, optimizer=optimizer, replicas=replicas)[0]
    ranks, strategy, replicas = after
    for found in run(ranks, "go_on", kind="odd", strategy=strategy, optimizer=optimizer, replicas=replicas):
        assert found["extra"] == {"epoch": 2, "note": "a"}
        for mine, other in zip(found["seen"], wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-10)


def test_a_save_replaces_the_one_before(run: Run, tmp_path: Path) -> None:
    run(2, "keep", kind="odd", strategy="zero3", optimizer="sgd")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step_00000008"]
    assert {path.suffix for path in (tmp_path / "kept" / "step_00000008").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_saves_count_optimizer_steps(run: Run, tmp_path: Path, strategy: str) -> None:
    names = [f"step_{number:08d}" for number in (3, 3, 5, 1, 1)]
    assert run(2, "steps", strategy=strategy) == [names, names]
    said = (tmp_path / "said.txt").read_text()
    assert said.count(f"saves: replaced {names[2]}, the save of a run that was not loaded") == 1


@pytest.mark.parametrize(
    ("ranks", "strategy", "replicas", "what", "said"),
    [
        (2, "ddp", 1, "weight", "rank 0 (HOST), rank 1 (HOST): values differ, and no majority of ranks shows"),
        (3, "ddp", 1, "weight", "rank 1 (HOST): values differ from those of the majority (ranks 0, 2): "),
        (3, "ddp", 1, "exp_avg", "rank 1 (HOST): values differ from those of the majority (ranks 0, 2): "),
        (6, "zero3", 3, "exp_avg", "rank 1 (HOST): values differ from those of the majority (ranks 3, 5): "),
        pytest.param(
            *(4, "zero1", 2, "weight"),
            "rank 1 (HOST), rank 3 (HOST): values differ, and no majority of ranks shows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_have_diverged_save_nothing(
    run: Run, tmp_path: Path, ranks: int, strategy: str, replicas: int, what: str, said: str
) -> None:
    name = {"weight": "model.2.weight", "exp_avg": "optimizer.exp_avg.2.weight"}[what]
    for problems in run(ranks, "diverge", strategy=strategy, what=what, replicas=replicas):
        first, second, _ = problems
        assert first.startswith(f"codescent.save: {tmp_path / 'kept'}: copies of the same tensors have diverged")
        assert second.startswith(said.replace("HOST", socket.gethostname()))
        of_two = "; two copies have no majority: with three the odd one is known" if "no majority" in said else ""
        assert second.endswith(f": {name}{of_two}")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step_00000001"]


def test_buffers_may_be_of_each_rank(run: Run, tmp_path: Path) -> None:
    assert run(2, "diverge", strategy="ddp", what="buffer") == [[], []]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step_00000001"]


def test_forward_passes_without_backward_see_the_weights_of_now(run: Run) -> None:
    wanted = run(1, "evaluate", strategy="ddp")[0]
    assert wanted[4] == wanted[2]
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        for found in run(2, "evaluate", strategy=strategy):
            assert found == pytest.approx(wanted, rel=1e-10)


def test_the_samples_of_a_step_do_not_depend_on_the_ranks(run: Run) -> None:
    (one,) = run(1, "epochs")
    first, second = run(2, "epochs")
    joined = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    assert joined == one
    assert [len(epoch) for epoch in one] == [3, 3, 3, 1]
    assert one[3] == one[1][2:]
    assert one[0] != one[1]
    for epoch in one[:3]:
        samples = [sample for batch in epoch for sample in batch]
        assert len(set(samples)) == len(samples) == 24


def test_a_data_loader_with_workers_has_the_same_batches(run: Run) -> None:
    for found in run(2, "workers"):
        assert found["1"] == found["0"]
        assert [len(epoch) for epoch in found["1"]["seen"]] == [3, 3, 1]
        assert found["1"]["epoch"] == 2


@pytest.mark.parametrize(
    ("ranks", "samples", "batch_size", "strategy"),
    [(1, 7, 3, "ddp"), (2, 13, 4, "fsdp"), (2, 5, 4, "ddp"), (3, 20, 6, "zero1"), (3, 3, 9, "zero3")],
)
def test_a_validation_has_every_sample_once_in_order(
    run: Run, ranks: int, samples: int, batch_size: int, strategy: str
) -> None:
    found = run(ranks, "validated", samples=samples, batch_size=batch_size, strategy=strategy)
    order = [sample for rank in found for batch in rank["batches"] for sample in batch]
    assert order == list(range(samples))
    assert len({(rank["length"], rank["steps"], len(rank["batches"])) for rank in found}) == 1
    for rank in found:
        assert all(0 < len(batch) <= batch_size // ranks for batch in rank["batches"])
        assert rank["again"]
        assert rank["rows"] == [[0.5 * sample + 0.5] for sample in range(samples)]
        assert rank["mean"] == pytest.approx(0.25 * (samples - 1) + 0.5, rel=1e-14)


@given(ranks=st.integers(1, 9), samples=st.integers(1, 60), per_rank=st.integers(1, 9))
def test_a_validation_of_any_size_has_every_sample_once_in_order(ranks: int, samples: int, per_rank: int) -> None:
    found = []
    for rank in range(ranks):
        here = SimpleNamespace(rank=rank, world_size=ranks)
        with patch.object(sampler, "joined", lambda _, here=here: here):
            try:
                found.append(sampler.validation_sampler(range(samples), ranks * per_rank))
            except UserError:
                assert samples < ranks or (per_rank == 1 and samples % ranks)
                return
    assert samples >= ranks
    assert [sample for one in found for batch in one for sample in batch] == list(range(samples))
    assert {len(list(one)) for one in found} == {len(found[0])}
    assert all(0 < len(batch) <= per_rank for one in found for batch in one)
    assert len(found[0]) == math.ceil(math.ceil(samples / ranks) / per_rank)  # no more than the longest part needs


def test_gather_and_mean_of_unequal_parts(run: Run) -> None:
    for found in run(3, "gathers"):
        assert found["rows"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert found["flags"] == [True, False, False]
        assert found["numbers"] == [0, 1, 2]
        assert found["complex"] == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]
        assert found["strided"] == [[10 * n + a, 10 * n + a + 3] for n in range(3) for a in range(3)]
        assert found["empty"] == [0, 3]
        assert found["mean"] == pytest.approx(5 / 3)
        assert found["of ranks"] == 1.0
        assert not found["grad"]


@pytest.mark.parametrize("head", [True, False])
def test_gradients_of_what_is_recomputed_either_way(run: Run, head: bool) -> None:
    first, second = run(2, "recomputed", head=head)
    assert first == second
    old, new = first
    assert len(new) == (8 if head else 6)
    assert set(old) == set(new)
    for name, gradient in new.items():
        assert old[name] == pytest.approx(gradient, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_pass_that_failed_leaves_nothing(run: Run, again: bool) -> None:
    for gradient, said in run(2, "failed", again=again):
        assert gradient == [1.0, 1.0]
        assert "on purpose" in said[0]
        assert all("got a second gradient in one backward pass" in words for words in said[1:])
        assert len(said) == (3 if again else 2)


def test_a_distributed_module_is_compiled_in_one_piece(run: Run) -> None:
    assert run(2, "compiled") == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_of_a_module_is_not_distributed(run: Run, ranks: int) -> None:
    moves = (ranks - 1) / 2  # the mean of the ranks' gradients
    for rank, (mean, gradient) in enumerate(run(ranks, "copied")):
        assert mean == [1 - 1.5 * moves] * 4
        assert gradient == [float(rank)] * 4


def test_every_dtype_is_averaged_after_each_pass(run: Run) -> None:
    for found in run(2, "dtypes"):
        assert found["b"] == [0.5, 0.5]
        assert found["scale"] == pytest.approx(found["sum"] / 2)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_values_arrive_however_they_lie_in_memory(run: Run, strategy: str) -> None:
    for found in run(2, "sliced", strategy=strategy):
        assert found["gaps"] == [0.0, 1.0, 4.0, 5.0, 8.0, 9.0]
        assert found["turned"] == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
        assert (found["small"], found["flag"], found["none"]) == ([0.0, 2.0, 4.0], [1.0], [])


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_clipping_after_a_forward_pass_without_backward(run: Run, strategy: str) -> None:
    wanted = run(1, "clipped", strategy="ddp")[0]
    assert wanted[:2] == ["torch.float32", []]
    assert wanted[2] > wanted[3]
    for found in run(2, "clipped", strategy=strategy):
        assert found[:2] == wanted[:2]
        assert found[2:] == pytest.approx(wanted[2:], rel=1e-5)
    for dtype, of_norm in {"bfloat16": "torch.float32", "float64": "torch.float64"}.items():
        assert [found[:2] for found in run(2, "clipped", strategy=strategy, dtype=dtype)] == [[of_norm, []]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_gradient_of_a_mean_over_labels_that_lie_unequally_over_the_ranks(run: Run, strategy: str) -> None:
    (wanted,) = run(1, "tokens", strategy="ddp", parts=1)
    for parts in (1, 2):
        for found in run(2, "tokens", strategy=strategy, parts=parts):
            assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def test_weights_are_gathered_on_every_path_of_the_backward_pass(run: Run) -> None:
    hows = ["attribute", "penalty", "closure", "convolution", "view", "object", "slots", "namespace"]
    wanted = run(2, "aside", strategy="ddp", hows=hows)[0]
    for found in run(2, "aside", strategy="zero3", hows=hows):
        for how, mine, other in zip(hows, found, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-5), how


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("own weight", "zero3: backward reached the weights of layers.0 or layers.1 before they were gathered"),
        ("input in place", "zero3: layers.1 changes its input in place: write"),
    ],
)
def test_what_sharded_blocks_cannot_do_is_one_sentence_with_the_block(run: Run, how: str, said: str) -> None:
    for (found,) in run(2, "aside", strategy="zero3", hows=[how]):
        assert found.startswith(f"codescent.distribute: {said}"), found


def test_a_compiled_sharded_module_has_the_same_losses_or_one_sentence(run: Run) -> None:
    hows = ["attribute", "view"]
    wanted = run(2, "aside", strategy="ddp", hows=hows)[0]
    for *found, said in run(2, "aside", strategy="zero3", hows=[*hows, "namespace"], is_compiled=True):
        for how, mine, other in zip(hows, found, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-5), how
        assert said.startswith("codescent.distribute: zero3: backward reached the weights of "), said
        assert "with torch.compile, return no other objects than tuples, lists and dicts" in said


def test_ranks_agree_on_which_buffers_have_changed(run: Run) -> None:
    first, second = run(2, "some_buffers")
    assert first == [[0.0, 0.0], [2.0, 2.0, 2.0], [0.0]]
    assert second == [[0.0, 0.0], [2.0, 2.0, 2.0], [1.0, 1.0]]


REFUSALS = {
    "strategy": [
        'strategy "zero4": must be one of ddp, zero1, zero2, zero3, fsdp (did you mean',
        "replicas = 3: must divide 2 ranks",
    ],
    "hsdp": ['hybrid sharding (HSDP) is "zero3" with replicas='],
    "optimizer": ["4 parameters outside of this module", "create it with module.parameters()"],
    "twice": ["is distributed already, by ddp"],
    "compiled twice": ["OptimizedModule, or a part of it, is distributed already, by ddp"],
    "a part before": ["Sequential, or a part of it, is distributed already, by ddp"],
    "meta": ["has no values yet (meta device): first call module.to"],
    "differ": ["rank 0 has weight [2, 2] torch.float32 trained, rank 1 has weight [3, 2]"],
    "one rank": ["4 parameters outside of this module"],
    "blocks": ["blocks[0] (Sequential): must be a submodule", "blocks[1] (Linear): must be a submodule"],
    "sparse": ["create it with sparse=False"],
    "half": ["weight is of torch.float16: trained parameters must be of torch.float64"],
    "complex parameter": ["turns is of torch.complex64: trained parameters must be of torch.float64"],
    "compiled before": ["the module is compiled already: call torch.compile after distribute"],
    "whole": ["LBFGS computes with whole parameters"],
    "container": ['strategy "zero3": ModuleList has no forward'],
    "container block": ["blocks[0] (listed): a ModuleList has no forward: give its submodules"],
    "wrapper": ["DistributedDataParallel sums gradients or divides the module itself: leave it out"],
    "wrapper around": ["DistributedDataParallel sums gradients or divides the module itself: leave it out"],
    "wrapper later": ["DistributedDataParallel around a module that is distributed already would sum its gradients"],
    "wrapper of another": ["DistributedDataParallel around a module that is distributed already"],
    "wrapper of a part": ["DistributedDataParallel around a module that is distributed already"],
    "asks": ["rank 0 asks for strategy ddp, rank 1 for zero3: every rank must make the same call"],
    "replicas": ["rank 0 asks for replicas 1, rank 1 for 2"],
    "wrong on one rank": ["codescent.distribute: strategy: must be a string, not 3"],
    "three numbers on one rank": ["codescent: ranks.mean: value: must be one number, not a tensor of shape [3]"],
    "save": ["codescent.save: this Sequential is not distributed: call codescent.distribute first"],
    "load": ["codescent.load: this Sequential is not distributed: call codescent.distribute first"],
    "clip_": ["codescent.clip_: this Sequential is not distributed: call codescent.distribute first"],
    "swapped": ["module: must be a torch.nn.Module, not", "optimizer: must be a torch.optim.Optimizer, not"],
    "overlap": ["mask: some of its elements share memory"],
    "accumulate": ["call codescent.distribute first"],
    "batch": ["batch_size = 5: must divide among 2 ranks: 4 or 6"],
    "small": ["3 samples, fewer than one step of batch_size = 4"],
    "file": ["/file is a file, but a checkpoint is a folder"],
    "no json": ["what: JSON cannot represent"],
    "milestones": ["scheduler.milestones: a dict whose keys are not strings, such as 2"],
    "complex": ["turns: is of torch.complex64, which checkpoints cannot store"],
    "validation": ["codescent.validation_sampler: batch_size = 5: must divide among 2 ranks: 4 or 6"],
    "fewer": ["the dataset has 1 sample, fewer than 2 ranks"],
    "one each": ["batch_size = 2: one sample for each of 2 ranks, but 5 samples do not divide among them: 4 or more"],
    "counts": ["count must be at least 0 on every rank, and above 0 on one"],
    "negative": ["count must be at least 0 on every rank, and above 0 on one"],
    "widths": ["rank 0 has [2, 3] of torch.float32 on cpu, rank 1 has [2, 4]", "only the first dim may differ"],
    "kinds": ["rank 1 has [2] of torch.float64 on cpu"],
    "no tensor": ["ranks.gather: a list: give a tensor"],
    "nothing": ["/nothing: has no checkpoint"],
    "other": ["is of Adam, this optimizer is SGD"],
    "device": ['device "cuda": an earlier call has chosen cpu'],
}


@pytest.mark.parametrize("what", list(REFUSALS))
def test_refusals(run: Run, what: str) -> None:
    for problems in run(2, "refused", what=what):
        text = "\n".join(problems)
        assert all(part in text for part in REFUSALS[what]), text


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("everywhere", 'codescent.distribute: strategy "zero4": must be one of'),
        ("each", "codescent.sampler: batch_size = 3: must divide among 2 ranks"),
        ("init", 'codescent.init: device "gpu"; must be one of'),
    ],
)
def test_a_wrong_argument_on_every_rank_is_told_once(run: Run, tmp_path: Path, what: str, problem: str) -> None:
    assert run(2, "ends", what=what) == [2, 2]
    (line,) = (tmp_path / "said.txt").read_text().splitlines()
    assert re.match(rf"error: \S+/own_ranks\.py:\d+: {re.escape(problem)}", line), line


def test_different_wrong_arguments_are_told_by_each_rank(run: Run, tmp_path: Path) -> None:
    assert run(2, "ends", what="different") == [2, 2]
    said = (tmp_path / "said.txt").read_text()
    assert all(f"codescent.sampler: batch_size = {size}: must divide" in said for size in (3, 5))
    assert re.search(r"codescent: rank (\d) ends because rank (?!\1)\d failed: UserError: codescent.sampler", said)


def test_a_wrong_argument_on_one_rank_is_told_by_it(run: Run, tmp_path: Path) -> None:
    assert run(2, "ends", what="one rank") == [None, 2]
    said = (tmp_path / "said.txt").read_text()
    assert len(re.findall(r"^error: \S+: codescent.sampler: batch_size = 3", said, re.MULTILINE)) == 1
    assert "rank 0 ends because rank 1 failed: UserError: codescent.sampler" in said


def test_metrics_and_profile(run: Run, tmp_path: Path) -> None:
    found = run(2, "measured")
    for rank, profile in enumerate(found):
        assert Path(profile["trace"]) == tmp_path / "traces" / f"rank_{rank:05d}.json"
        assert json.loads(Path(profile["trace"]).read_text())["traceEvents"]
        assert 0 < profile["exposed_s"] <= profile["communication_s"] < profile["wall_s"]
        assert 0 < profile["compute_s"] < profile["wall_s"]
    said = (tmp_path / "said.txt").read_text()
    assert said.count("communicating") == 2
    lines = (tmp_path / "numbers" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,rank,loss,later"
    assert [line.split(",")[:2] for line in lines[1:]] == [["0", "0.5"], ["1", "0.5"], ["2", "0.5"]]
    rows = [json.loads(line) for line in (tmp_path / "numbers" / "metrics.jsonl").read_text().splitlines()]
    assert [row["later"] for row in rows] == [None] * 3


def test_what_a_profile_counts() -> None:
    def span(name: str, category: str, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": duration * 1e6}

    on_cpu = [
        span("aten::linear", "cpu_op", 0, 4),
        span("aten::addmm", "cpu_op", 1, 2),  # inside the one before
        span("gloo:all_reduce", "user_annotation", 3, 4),
        span("c10d::allreduce_", "cpu_op", 3, 1),
        span("aten::add", "cpu_op", 6, 2),
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    assert measure(on_cpu) == Measured(wall_s=8, compute_s=6, communication_s=4, exposed_s=2)
    on_device = [
        span("aten::mm", "cpu_op", 0, 9),
        span("gemm", "kernel", 1, 2),
        span("ncclDevKernel_AllReduce", "kernel", 2, 3),
    ]
    assert measure(on_device) == Measured(wall_s=9, compute_s=2, communication_s=3, exposed_s=2)
