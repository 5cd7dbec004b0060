"""In: training loops of users, with mistakes. Out: each mistake is told in one sentence, on every rank; none is silent.
Does not test what the strategies compute (test_own does)."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker

import codescent
from codescent.base.errors import UserError
from codescent.own import metrics
from codescent.own.failure import ErrorHook, _place

Run = Callable[..., list[Any]]
MODULE: Any = torch.nn.Linear(2, 2)
RULE: Any = torch.optim.SGD(MODULE.parameters())


class Stream(torch.utils.data.IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Run:
    """`run(ranks, job, **options)`: what each rank returned; all must end well."""

    def ask(ranks: int, job: str, **options: Any) -> list[Any]:
        return forker.call("own_ranks:act", tmp_path, ranks, job=job, options=options)

    return ask


CHANGES = {
    "unfrozen": "0.weight, 0.bias, 1.weight and 5 more: trained now, but frozen",
    "unfrozen, another optimizer": "0.weight, 0.bias: trained now, but frozen",
    "added": "5.weight, 5.bias: added or replaced after the call",
    "added, another optimizer": "5.weight, 5.bias: added or replaced after the call",
    "replaced": "0.weight, 0.bias: added or replaced after the call",
}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_module_that_is_changed_later_is_refused_at_the_next_step(run: Run, what: str, strategy: str) -> None:
    for before, (after,) in run(2, "changed", strategy=strategy, what=what):
        assert before == []
        assert after.startswith(f"codescent.distribute: {CHANGES[what]}")


def test_an_optimizer_of_the_parameters_of_before_is_refused(run: Run) -> None:
    said = "codescent.distribute: this SGD has parameters that zero3 has replaced by shards"
    for before, (after,) in run(2, "changed", strategy="zero3", what="old optimizer"):
        assert before == []
        assert after.startswith(said)
    assert run(2, "changed", strategy="ddp", what="old optimizer") == [[[], []]] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero1", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_a_layer_may_be_frozen_later_and_trained_again(run: Run, strategy: str) -> None:
    ((wanted, _),) = run(1, "frozen", strategy="ddp")
    for found, layer in run(2, "frozen", strategy=strategy):
        for mine, other in zip(found, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-10, abs=1e-10)
        assert layer[0] == layer[1] == layer[2] != layer[3]


@pytest.mark.parametrize(("ranks", "least"), [(2, 10), (1, 7)])
def test_a_script_that_forgets_init_is_told_so_by_each_name(run: Run, tmp_path: Path, ranks: int, least: int) -> None:
    for said in run(ranks, "unmet"):
        told = [words for words in said if words.endswith("call codescent.init() first")]
        assert len(told) == least, said
        assert ranks == 1 or not {path.name for path in tmp_path.iterdir()} & {"kept", "numbers", "traces"}
    assert run(ranks, "ends", what="forgotten") == [2] * ranks
    (line,) = (tmp_path / "said.txt").read_text().splitlines()
    assert re.match(r"error: \S+/own_ranks\.py:\d+: codescent.save: the ranks are not connected: call", line), line


def test_a_sampler_that_is_forgotten_or_given_as_another_argument_is_told(run: Run, tmp_path: Path) -> None:
    said = {}
    for kind in ("forgotten", "given", "twice"):
        problems = run(2, "batches", kind=kind)
        said[kind] = (tmp_path / "said.txt").read_text()
        assert problems == [problems[0]] * 2
        assert bool(problems[0]) == (kind == "twice")
    assert "codescent.sampler: it was given as sampler=" in problems[0][0]
    assert said["forgotten"].count("training batch 1 is the same on ranks 0, 1") == 1
    assert "training batch" not in said["given"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_leaves_the_others_waiting_is_named(run: Run, tmp_path: Path, first: int) -> None:
    run(2, "left", first=first)
    lines = (tmp_path / "said.txt").read_text().splitlines()
    failed, left = [line for line in lines if line.startswith("codescent: ")]
    assert failed.startswith(f"codescent: rank {1 - first} failed: RuntimeError: ")
    assert left.startswith(f"codescent: rank {first} had ended before: ")


def test_ranks_that_make_different_calls_are_named_with_their_lines(run: Run, tmp_path: Path) -> None:
    assert run(2, "other_calls") == [1, 1]
    (line,) = re.findall(r"^codescent: all ranks waited .*", (tmp_path / "said.txt").read_text(), re.MULTILINE)
    where = r"at \S+own_ranks\.py:(\d+), in {} of backward after step 2"
    found = re.search(f"rank 0 {where.format('all-gather')}, rank 1 {where.format('reduce-scatter')}\\.", line)
    assert found, line
    assert found[1] == found[2]  # both wait in backward: rank 0 has made two gathers more


@pytest.mark.parametrize("before", [False, True])
def test_metrics_after_a_kill_and_a_resume_have_each_step_once(run: Run, tmp_path: Path, before: bool) -> None:
    assert run(2, "killed", resumes=False) == [-9, -9]
    (tmp_path / "run").rename(tmp_path / "moved")
    for _ in range(2):
        assert run(2, "killed", resumes=True, before=before, name="moved") == [-9, -9]
        lines = (tmp_path / "moved" / "metrics.csv").read_text().splitlines()
        assert [line.split(",") for line in lines[1:]] == [[str(n), "0.5", str(int(n > 2))] for n in range(5)]
        rows = [json.loads(line) for line in (tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(5))
        assert "deleted 2 rows, written after the save that was loaded" in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("before", [False, True])
def test_a_script_that_may_continue_begins_where_nothing_was_saved(run: Run, tmp_path: Path, before: bool) -> None:
    said = []
    for saves_at in (-1, 2, 2):
        assert run(2, "killed", resumes=True, before=before, saves_at=saves_at) == [-9, -9]
        lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines[1:]] == [str(step) for step in range(5)]
        said.append((tmp_path / "said.txt").read_text())
    assert "deleted" not in said[0]
    assert "deleted 5 rows, of an earlier start, which saved nothing" in said[1]
    assert "deleted 2 rows, written after the save that was loaded" in said[2]


def test_rows_after_a_load_stay_if_their_folder_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, empty in (("_tables", {}), ("_kept", {}), ("_begins", False)):
        monkeypatch.setattr(metrics, name, empty)
    metrics.continue_from(tmp_path, {"numbers": 0})
    for step in range(2):
        codescent.Metrics(tmp_path / "numbers").log(step=step)
    assert (tmp_path / "numbers" / "metrics.csv").read_text().split() == ["step", "0", "1"]


_PATH = "must be a path (str or pathlib.Path), not"
_DATASET = "must be a dataset with a length (not a DataLoader), not an object of type"
WRONG: list[tuple[Callable[..., Any], list[Any], dict[str, Any], list[str]]] = [
    (codescent.sampler, [[0], "32"], {}, ["sampler: batch_size: must be a whole number, not '32'"]),
    (codescent.sampler, [[0]], {"batch_size": 32.0}, ["sampler: batch_size: must be a whole number, not 32.0"]),
    (codescent.sampler, [[0], 1], {"seed": None}, ["sampler: seed: must be a whole number, not None"]),
    (codescent.sampler, [torch.utils.data.DataLoader([0]), 4], {}, [f"sampler: dataset: {_DATASET} DataLoader"]),
    (codescent.validation_sampler, [Stream(), 4], {}, [f"validation_sampler: dataset: {_DATASET} Stream"]),
    (
        codescent.sampler,
        [[0]],
        {},
        [
            "sampler: missing a required argument: 'batch_size': the form is "
            "codescent.sampler(dataset, batch_size, seed=0)"
        ],
    ),
    (codescent.clip_, [MODULE, None], {}, ["clip_: max_norm: must be a number above 0, not None"]),
    (codescent.clip_, [MODULE, -1], {}, ["clip_: max_norm: must be a number above 0, not -1"]),
    (codescent.clip_, [MODULE, math.nan], {}, ["clip_: max_norm: must be a number above 0, not nan"]),
    (
        codescent.save,
        [],
        {"module": 1},
        ["save: missing a required argument: 'path': the form is codescent.save(path, module, optimizer, **extra)"],
    ),
    (
        codescent.save,
        [None, 1, MODULE],
        {},
        [
            f"save: path: {_PATH} None",
            "save: module: must be a torch.nn.Module, not 1",
            "save: optimizer: must be a torch.optim.Optimizer, not an object of type Linear",
        ],
    ),
    (codescent.load, ["x", MODULE], {"missing_ok": 1}, ["load: missing_ok: must be True or False, not 1"]),
    (codescent.load, ["x", MODULE, 3], {}, ["load: optimizer: must be a torch.optim.Optimizer, or None, not 3"]),
    (
        codescent.distribute,
        [MODULE, torch.ones(2)],
        {"blocks": "layers"},
        [
            "distribute: optimizer: must be a torch.optim.Optimizer, not a tensor of shape [2]",
            "distribute: blocks: must be a list of torch.nn.Modules, or None, not 'layers'",
        ],
    ),
    (
        codescent.distribute,
        [MODULE, RULE, ["ddp"]],
        {"replicas": 0},
        [
            "distribute: strategy: must be a string, not an object of type list",
            "distribute: replicas: must be a whole number above 0, not 0",
        ],
    ),
    (codescent.accumulate, [None], {}, ["accumulate: module: must be a torch.nn.Module, not None"]),
    (codescent.init, [0], {}, ["init: device: must be a string, not 0"]),
    (codescent.init, [], {"timeout_s": "9"}, ["init: timeout_s: must be a number of seconds above 0, not '9'"]),
    (codescent.Metrics, [7], {}, [f"Metrics: folder: {_PATH} 7"]),
    (codescent.profile, [7], {}, [f"profile: folder: {_PATH} 7"]),
]


@pytest.fixture
def _hooks() -> Iterator[None]:
    """Retire the hooks of this process."""
    yield
    while ErrorHook.active:
        ErrorHook.active[-1].retire()


@pytest.mark.usefixtures("_hooks")
@pytest.mark.parametrize(("function", "words", "named", "problems"), WRONG)
def test_an_argument_of_a_wrong_type_is_told_in_one_sentence(
    function: Callable[..., Any], words: list[Any], named: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        function(*words, **named)
    assert list(error.value.problems) == [f"codescent.{problem}" for problem in problems]
    assert isinstance(sys.excepthook, ErrorHook)  # prints it, if nobody catches it


def test_functions_that_torch_compile_has_written_are_not_the_users_lines() -> None:
    with pytest.raises(UserError) as error:
        exec("from codescent.base.errors import UserError\nraise UserError('here')", {})  # without a module's name
    assert _place(error.tb) == f"{__file__}:{error.tb.tb_lineno}: "


def test_a_wrong_call_at_a_prompt_does_not_end_the_session() -> None:
    words = "import codescent\ncodescent.Metrics(3)\nprint('go', 'on')\n"
    done = subprocess.run([sys.executable, "-i", "-q"], input=words, capture_output=True, text=True, timeout=60)
    assert "error: <stdin>:1: codescent.Metrics: folder: must be a path" in done.stderr
    assert done.stdout == "go on\n"
