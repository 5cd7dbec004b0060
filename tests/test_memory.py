"""In: runs of several layouts, and with little memory. Out: memory by part; what a run says that ran out of it.
Does not compare all layouts with their plans: test_declared does."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from declared_cases import case
from forker import Forker
from runs import make_project

from codescent.base.agreement import RanksFailed
from codescent.base.amounts import of_bytes
from codescent.base.refusal import Change
from codescent.build import build, saved_plan
from codescent.clusters.by_links import of_device
from codescent.clusters.files import load_cluster, software_of
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.cost.activations import activations_bytes
from codescent.cost.memory import head_bytes
from codescent.cost.price import price
from codescent.cost.stage_memory import PARTS as MEMORY_NAMES
from codescent.cost.stage_memory import StageMemory, memory
from codescent.launch.memory_kills import is_suspected
from codescent.plan.activations import COMPILED, CPU, CUDA
from codescent.plan.state import state_of_rank
from codescent.planner.less_memory import Shortage, advice, held_in_words, less_memory
from codescent.preflight import plan_of
from codescent.record import RunFolder
from codescent.record.memory import COLUMNS, PARTS
from codescent.train import machine
from codescent.train.failed_allocation import asked_bytes, is_out_of_memory
from codescent.train.memory import MOST_COUNTS, RUN, moments
from codescent.verbs.plan_memory import memory_rows
from codescent.verbs.train_ranks import of_memory

LAYOUTS = [
    (1, ()),
    (1, ("train.precision=bf16", "train.microbatch_size=2")),
    (2, ("parallel.dp_replicate=2",)),
    (2, ("parallel.dp_shard=2", "parallel.zero_stage=3")),
    (2, ("parallel.tp=2",)),
    (2, ("parallel.pp=2", "train.microbatch_size=2")),
]
MIB = 2**20


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_project(folder)
    return folder


@pytest.mark.parametrize(("number", "words"), LAYOUTS, ids=[" ".join(words) or "one" for _, words in LAYOUTS])
def test_parts_and_rest_sum_to_the_peak_of_every_rank(
    project: Path, forker: Forker, number: int, words: tuple[str, ...]
) -> None:
    name = "-".join(("run", *words)).replace("parallel.", "").replace("=", "")
    run = forker.train(project, name, number, *words, "train.num_steps=4", "log.every=1", "checkpoint.last=false")
    plan, rows = saved_plan(run), list(run.iter_memory())
    peaks = {(row["step"], row["rank"]): row["peak_memory_bytes"] for row in run.iter_ranks()}
    assert rows[0]["step"] == 1
    assert len(rows) % number == 0
    for row in rows:
        assert sum(row[part] for part in PARTS) + row["rest_bytes"] == row["peak_bytes"]
        assert row["rest_bytes"] > 0
        assert row["peak_bytes"] <= peaks[row["step"], row["rank"]]
        assert row["reserved_bytes"] is None
        program = plan.schedule.programs[plan.mesh.coordinates(row["rank"])["pp"]]
        places = [*map(str, program), "before the first step", "between steps"]
        assert row["peak_at"] in places
        assert row["counted_at"] in places
        assert 0 <= row["peak_step"] <= row["step"]
        assert all(row[f"most_{part}"] >= row[part] for part in PARTS)
        state = state_of_rank(plan, row["rank"])
        uneven = 1.02 if "parallel.dp_shard=2" in words else 1.0  # fully_shard pads a vocabulary of 257
        for part in PARTS[:3]:
            assert getattr(state, part) <= row[f"most_{part}"] <= uneven * getattr(state, part)
    assert sorted(run.last_memory()) == list(range(number))


def test_tables_that_a_model_reads_are_counted(project: Path, forker: Forker) -> None:
    """Rotary turns: fp32, cosine and sine of each two channels of a head. In fp32 one rank has no other buffer."""
    words = ("model.kind=llama", "model.ffn_dim=24", "train.num_steps=1", "checkpoint.last=false")
    (row,) = forker.train(project, "tables", 1, *words).iter_memory()
    seq_len, channels = 16, 16 // 2
    assert row["most_buffers_bytes"] == 4 * seq_len * channels


def test_rows_are_written_when_a_number_changes_and_cut_on_resume(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "one", "", {})
    row: dict[str, Any] = dict.fromkeys(COLUMNS, 5) | {"peak_at": "step", "counted_at": "forward 0", "rank": 0}
    row["reserved_bytes"] = None
    for step, peak in ((1, 10), (2, 10), (3, 12)):
        run.write_memory([row | {"step": step, "peak_bytes": peak}])
    assert [(one["step"], one["peak_bytes"]) for one in run.iter_memory()] == [(1, 10), (3, 12)]
    assert run.last_memory()[0] == row | {"step": 3, "peak_bytes": 12}
    run.rewind(2)
    assert [one["step"] for one in run.iter_memory()] == [1]
    assert list(RunFolder.create(tmp_path / "older", "", {}).iter_memory()) == []


@pytest.mark.parametrize("length", [1, 5, MOST_COUNTS, MOST_COUNTS + 1, 3 * MOST_COUNTS, 7 * MOST_COUNTS + 5])
def test_of_a_long_list_every_verb_is_counted(length: int) -> None:
    found = moments(length)
    assert len(found) <= MOST_COUNTS + 2 * RUN
    assert set(range(max(0, length - RUN), length)) <= found <= set(range(length))
    assert length > MOST_COUNTS or len(found) == length
    for period in range(1, min(RUN, length)):  # load, forward, backward, load, ...
        assert {index % period for index in found} == set(range(period))


L, D, H, V, T, SAMPLES = 3, 32, 4, 97, 16, 2
F, N = 4 * D, SAMPLES * T
END = N * (4 * D + 8) + N * 4 * D + 4 * V * D  # input of the last norm with two numbers a row; gradients of the head
READ = SAMPLES * (T + 1) * 8 + 4  # tokens and targets; the loss


@pytest.mark.parametrize(
    ("what", "block"),
    [
        # Inputs and outputs of two norms, each with two numbers a row; queries, keys, values; output of attention; its
        # probabilities; value and slope of GELU.
        ("none", N * (4 * (8 * D + 2 * F) + 16) + 4 * SAMPLES * H * T * T),
        ("selective", N * (4 * (8 * D + F) + 16)),
        # Its input; queries, keys, values, which attention has in its own order, too; its output; the input of GELU.
        ("products", N * 4 * (8 * D + F)),
        ("full", N * 4 * D),
    ],
)
def test_activations_of_a_gpt2_are_the_closed_form(forker: Forker, tmp_path: Path, what: str, block: int) -> None:
    cases = {"one": case(recompute=what)}
    (found,) = forker.call("declared_ranks:on_fake_ranks", tmp_path, cases=cases)
    counted = found["one"]["0"]["counted"]
    assert counted["activations_bytes"] == L * block + END + READ
    assert counted["buffers_bytes"] == 0


BIG = ("train.global_batch_size=128", "model.num_layers=6", "model.hidden_dim=64", "model.seq_len=64")
BIG = (*BIG, "train.num_steps=2", "train.eval_every=0", "checkpoint.last=false", "log.every=1")


def test_a_run_out_of_memory_says_what_held_it_and_what_fits(project: Path, forker: Forker) -> None:
    fault = "little_memory 40"
    done = forker.run(project, 1, ("run.name=short", *BIG), fault=fault)
    assert done.codes == [1], done.said
    said = done.said
    assert "Traceback" not in said
    assert re.search(
        r'error: runs/short: rank 0 of 1 ran out of memory in step 1, in "forward 0": \d.* were asked for', said
    )
    assert re.search(r"it held .*: weights .*, gradients 0 bytes, optimizer .*, activations \d.* MiB, .*the rest", said)
    (size,) = re.findall(r"nearest that fit, by these numbers: train.microbatch_size = (\d+) \(about", said)
    run = RunFolder.open(project / "runs" / "short")
    (event,) = [one for one in run.read_events() if one["kind"] == "out_of_memory"]
    assert event["rank"] == 0
    assert event["activations_bytes"] > 8 * MIB
    assert event["asked_bytes"] > 0
    assert not [one for one in run.read_events() if one["kind"] == "error"]
    assert f"codescent train --resume runs/short train.microbatch_size={size}" in said
    words = ("run.name=short", *BIG, f"train.microbatch_size={size}")
    again = forker.run(project, 1, words, resume=True, fault=fault)  # with as little memory
    assert again.codes == [0], again.said
    assert len(run.read_metrics()) == 2


def test_the_rank_that_ran_out_is_named(project: Path, forker: Forker) -> None:
    words = ("run.name=second", *BIG, "parallel.dp_replicate=2")
    done = forker.run(project, 2, words, fault="little_memory 40")
    assert done.codes[1] == 1
    assert "error: runs/second: rank 1 of 2 ran out of memory in step 1" in done.said
    events = RunFolder.open(project / "runs" / "second").read_events()
    assert [one["rank"] for one in events if one["kind"] == "out_of_memory"] == [1]


def test_an_error_after_the_last_instruction_keeps_its_words(project: Path, forker: Forker) -> None:
    short = forker.run(project, 1, ("run.name=late",), fault="late_failure CUDA error: out of memory")
    assert "rank 0 of 1 ran out of memory in step 1, at the end of its instructions" in short.said
    other = forker.run(project, 1, ("run.name=other",), fault="late_failure CUDA error: unspecified launch failure")
    assert "RuntimeError: CUDA error: unspecified launch failure" in other.said
    assert "During handling of the above exception" not in short.said + other.said


def test_a_killed_rank_is_described_by_its_last_row(project: Path, forker: Forker) -> None:
    run = forker.train(project, "killed", 1, *BIG)
    config = Config.model_validate({"model": {"preset": "gpt2"}, "run": {"folder": run.path}})
    last, more, *_ = of_memory(config, 0)
    step = run.last_memory()[0]["step"]  # 1, or 2 if the peak has risen
    assert last.startswith(f"codescent: rank 0 at step {step}, its last row in memory.csv: it held ")
    assert "nearest that fit" in more
    assert run.read_events()[-1]["kind"] == "out_of_memory"
    assert of_memory(config, 7) == []
    assert of_memory(Config.model_validate({"model": {"preset": "gpt2"}, "run": {"folder": "none"}}), 0) == []
    assert is_suspected(": out of memory: meanwhile the kernel has killed 1 process on this machine")
    assert is_suspected("; perhaps the machine ran out of memory")
    assert not is_suspected("; the kernel has counted no out-of-memory kill: a user or a program sent it")


Sections = dict[str, dict[str, Any]]


def shortage(held_bytes: int = 1000 * MIB, **parts: int) -> Shortage:
    split = {part: parts.get(part.removesuffix("_bytes"), 0) for part in PARTS}
    return Shortage(0, held_bytes, split, split["activations_bytes"], CPU)


def less(short: Shortage, ranks: int, **sections: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    model = {"num_layers": 8, "num_heads": 8, "hidden_dim": 512, "seq_len": 128, "vocab_size": 1000}
    config = Config.model_validate({"model": model, "train": {"global_batch_size": 16}, **sections})
    plan = build(config, 1000, ranks)
    return [(dict(one.change.values), one.same_losses) for one in less_memory(config, plan, 1000, short)]


def test_activations_need_a_smaller_batch_or_recompute() -> None:
    short = shortage(activations=900 * MIB)
    assert less(short, 1) == [
        # The state has 400 of the 820 MiB that may be taken. With 4 samples a CPU keeps the small probabilities.
        ({"train.microbatch_size": 2}, True),
        ({"parallel.recompute": "full"}, True),
        ({"train.precision": "bf16"}, False),
    ]


def test_state_is_sharded_over_the_same_ranks() -> None:
    short = shortage(weights=100 * MIB, gradients=100 * MIB, optimizer=200 * MIB, held_bytes=410 * MIB)
    found = less(short, 4)
    assert found[-2:] == [({"parallel.dp_shard": 4}, True), ({"train.precision": "bf16"}, False)]
    given = less(short, 4, parallel={"dp_replicate": 4, "zero_stage": 1})
    assert ({"parallel.dp_shard": 4, "parallel.dp_replicate": 1, "parallel.zero_stage": 3}, True) in given
    assert [values for values, _ in less(short, 4, parallel={"dp_shard": 4, "zero_stage": 1})][-3:-1] == [
        {"parallel.recompute": "full"},
        {"parallel.zero_stage": 3},
    ]


def test_every_change_has_a_plan() -> None:
    """An interleaved pipeline needs micro-batches in multiples of its stages; 48 samples of 4 stages."""
    parallel = {"pp": 4, "schedule": "interleaved", "virtual_stages": 2}
    train = {"global_batch_size": 48, "microbatch_size": 12}
    found = less(shortage(activations=900 * MIB), 4, parallel=parallel, train=train)
    sizes = [values["train.microbatch_size"] for values, _ in found if "train.microbatch_size" in values]
    assert all(48 // size % 4 == 0 for size in sizes)
    assert sizes


def test_what_fits_nowhere_is_said() -> None:
    config = Config.model_validate({"model": {"preset": "gpt2"}, "train": {"global_batch_size": 1}})
    plan = build(config, None, 1)
    said, change = advice(config, plan, None, shortage(held_bytes=400 * MIB, weights=300 * MIB))
    assert said.startswith("no change of batch, layout or precision alone needs less than that; the least is ")
    assert change is None
    assert Change({"a": None, "b": True}).words() == ["a=auto", "b=true"]


@pytest.mark.parametrize(
    ("make", "found", "asked"),
    [
        (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), True, 2 << 30),
        (lambda: MemoryError(), True, None),
        (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 77 bytes."), True, 77),
        (lambda: OSError(errno.ENOMEM, "Cannot allocate memory"), True, None),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), False, None),
        (lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
    ],
)
def test_what_is_a_lack_of_memory(make: Callable[[], Exception], found: bool, asked: int | None) -> None:
    error, around = make(), RuntimeError("a step failed")
    around.__cause__ = error
    assert is_out_of_memory(error) is is_out_of_memory(around) is found
    assert asked_bytes(error) == asked_bytes(around) == asked


def test_memory_that_ran_out_on_another_rank_did_not_on_this_one() -> None:
    error = RanksFailed("rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert not is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert is_out_of_memory(error)


def test_the_head_of_masked_tokens_holds_logits_of_the_masked_tokens() -> None:
    """7 of 50 tokens are masked: 4 x 50 x (7 / 50) is a little more than 28."""
    model = {"kind": "bert", "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "ffn_dim": 32, "seq_len": 50}
    values = {"model": model, "data": {"task": "mlm"}, "train": {"global_batch_size": 4, "precision": "fp32"}}
    assert head_bytes(build(Config.model_validate(values), 3000, 1), 0, on_cpu=True) == 28 * 3000 * 4


def test_the_least_memory_of_a_rank_counts_the_head_once() -> None:
    """In fp32 the sum of the head's gradients is what forward keeps; in bf16 there is a narrower copy besides."""
    for precision in ("fp32", "bf16"):
        train = {"global_batch_size": 4, "precision": precision}
        plan = build(Config.model_validate({"model": {"preset": "gpt2"}, "train": train}), None, 1)
        held = memory(plan, 0, of_device(CPU))
        assert held.whole
        assert held.activations == activations_bytes(plan, CPU)
        wide = 4 * plan.model.vocab_size * plan.model.hidden_dim
        counted = head_bytes(plan, 1024, on_cpu=True) - held.logits
        assert counted == pytest.approx(wide if precision == "fp32" else 0, rel=0.001)
        assert held.least == held.state - held.gradients + held.activations + held.logits
        assert memory(plan, 0, of_device(CUDA), compiled="blocks").activations == activations_bytes(plan, COMPILED)
        compiled = memory(plan, 0, of_device(CUDA), compiled="model")
        assert not compiled.whole
        assert compiled.activations == 12 * 4 * 1024 * 768 * (4 if precision == "fp32" else 2)


def test_all_who_ask_hear_the_same_of_a_rank() -> None:
    """A screen that counts for itself: plan, its price, launch and the advice on memory would name other bytes."""
    words = ["train.global_batch_size=16", "train.microbatch_size=4", "parallel.pp=2", "parallel.recompute=full",
             "parallel.dp_shard=2", "train.device=cuda", "train.precision=bf16"]  # fmt: skip
    plan = plan_of(load("gpt2_124m", words).config, 4, without_data=True)
    cluster = load_cluster("h100-sxm")
    priced, asked = price(plan, cluster, software_of(cluster)).memory, of_device(CUDA)
    for stage, held in enumerate(priced):
        bare = memory(
            plan, plan.mesh.rank_at({"pp": stage, "dp_replicate": 0, "dp_shard": 0, "ep": 0, "cp": 0, "tp": 0}), asked
        )
        assert bare.device == bare.fragments == 0
        assert held.parts() == bare.parts() | {"device": held.device, "fragments": held.fragments}
        assert 0 < bare.again < bare.activations
    most = max(priced, key=lambda held: held.activations)
    rows = dict(memory_rows(plan, load("gpt2_124m", words).config))
    (line,) = rows["  activations"]
    said = f"{of_bytes(most.activations)} on cuda, 2 passes in flight, {of_bytes(most.again)} of it computed again"
    assert line.startswith(said)
    state = max(priced, key=lambda held: held.state)
    assert rows["  weights"] == [of_bytes(state.weights)]
    assert rows["  together"] == [of_bytes(state.state)]
    assert list(StageMemory.parts(most)) == list(MEMORY_NAMES)
    machine.refuse_too_large(plan, torch.device("cpu"), 4)
    short = Shortage(0, 10 << 30, dict.fromkeys(PARTS, 0), 0.0, CUDA)
    assert f"weights {of_bytes(priced[0].weights)}, gradients {of_bytes(priced[0].gradients)}" in held_in_words(
        plan, short
    )
