"""In: runs and devices of docs/which.md and docs/which_derived.md. Out: the layouts that these pages give.
Does not check prices: nothing is simulated here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.base.refusal import Change
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.cost.activations import activations_bytes
from codescent.cost.memory import state_bytes
from codescent.planner.by_rules import ByRules, Devices, TableRow, by_rules
from codescent.planner.search.space import SEARCHED as KEYS
from codescent.verbs.columns import columns
from codescent.verbs.plan_by_rules import NOT_SIMULATED, rows

PAGE = Path(__file__).parent.parent / "docs/which.md"
GIB = 1 << 30
FLOPS = {"old": 25e12, "a100": 150e12, "h100": 400e12}
"""F of the page."""
NVLINK, PCIE = 229e9, 15.8e9
XL = (
    "gpt2_124m",
    "model.preset=gpt2-xl",
    "train.global_batch_size=64",
    "train.microbatch_size=8",
    "train.compile=none",
)
SMALL = ("gpt2_124m", "train.global_batch_size=64", "train.microbatch_size=8")
LLAMA = ("llama3_8b",)
PLAIN = ("default", "data.corpus=synthetic", "model.vocab_size=2048", "train.global_batch_size=64")
ETHERNET = Devices(16 * GIB, 1, FLOPS["old"], 1.25e9)
"""Of the first worked example: 10 Gbit/s."""


def config_of(name: str, *words: str) -> Config:
    return load(name, words).config


def answer(words: tuple[str, ...], ranks: int, devices: Devices, *more: str, given: tuple[str, ...] = ()) -> ByRules:
    """The answer, which must build and fit, and change nothing that is given."""
    config = config_of(*words, *more)
    vocab_size = 50_257 if config.data.tokenizer == "gpt2" else None
    found = by_rules(config, vocab_size, ranks, devices, given)
    plan = build(changed(config, found.change), vocab_size, ranks)
    assert (plan.mesh, plan.layout, plan.work) == (found.plan.mesh, found.plan.layout, found.plan.work)
    printed = state_bytes(plan).device_bytes + activations_bytes(plan, "cuda")
    assert printed <= found.held.total <= 0.8 * devices.memory_bytes
    assert not set(given) & set(found.change.values)
    assert found.row in PAGE.read_text(encoding="utf-8")
    return found


def keys(found: ByRules) -> dict[str, Any]:
    """The changes without the names of their sections."""
    return {key.partition(".")[2]: value for key, value in found.change.values.items()}


def test_gpt2_on_eight_hosts_with_slow_ethernet() -> None:
    """The first worked example: pp = 8, zero-bubble, 64 micro-batches of one sample, because F/W is 20,000 tokens."""
    found = answer(XL, 8, ETHERNET)
    assert keys(found) == {"pp": 8, "microbatch_size": 1, "schedule": "zero-bubble"}
    assert found.row is TableRow.SLOW
    assert "4. A rank has 8,192 tokens; its network needs 20,000 (F/W), so pp between hosts" in found.why
    assert "5. 8 stages need 28 micro-batches or more, 4 x (pp - 1): there are 64" in found.why
    assert found.plan.work.num_microbatches == 64
    assert f"{found.held.state / GIB:.2f}" == "4.47"
    assert any(
        "of state and" in one and one.startswith("1. It does not fit on one device: 26.11 GiB") for one in found.why
    )


def test_a_schedule_that_is_refused_is_passed_over_and_said() -> None:
    """Compiled blocks cannot delay gradients of weights: an answer that no run accepts."""
    found = answer(XL, 8, ETHERNET, "train.compile=blocks")
    assert keys(found) == {"pp": 8, "microbatch_size": 1, "schedule": "1f1b"}
    assert any(one.startswith("Refused: parallel.schedule: ") and "train.compile" in one for one in found.why)


@pytest.mark.parametrize(
    ("link_bytes_per_s", "samples", "wanted", "row"),
    [
        # 400 Gbit/s per device, then 100 and 10 Gbit/s per node: the columns of the second worked example
        (400e9, 16, {"dp_shard": 8, "zero_stage": 3}, TableRow.FAST),
        (12.5e9, 32, {"pp": 2, "dp_shard": 8, "zero_stage": 1, "schedule": "1f1b"}, TableRow.SLOW),
        (1.25e9, 128, {"pp": 2, "dp_shard": 8, "zero_stage": 1, "schedule": "1f1b"}, TableRow.SLOW),
    ],
)
def test_llama_on_two_nodes(link_bytes_per_s: float, samples: int, wanted: dict[str, Any], row: TableRow) -> None:
    devices = Devices(80e9, 8, 352e12, link_bytes_per_s, NVLINK)
    found = answer(LLAMA, 16, devices, f"train.global_batch_size={samples}")
    assert {key: value for key, value in keys(found).items() if key not in ("recompute", "microbatch_size")} == wanted
    assert found.plan.work.microbatch_size == 1
    assert found.row is row
    if row is TableRow.FAST:  # 16.1 GB of state beside all activations
        assert found.plan.layout.recompute == "none"
        assert found.held.state == pytest.approx(16.06e9, rel=0.01)


def test_a_pipeline_with_too_few_samples_takes_tp_inside_its_hosts() -> None:
    """Question 5: 16 samples on 8 pipelines are 2 micro-batches, a bubble of half the computing."""
    found = answer(LLAMA, 16, Devices(80e9, 8, 352e12, 1.25e9, NVLINK), "train.global_batch_size=16")
    mesh = found.plan.mesh
    assert (mesh.pp, mesh.dp_shard, mesh.tp, found.plan.work.num_microbatches) == (2, 4, 2, 4)
    assert "5. Without tp there were 2 micro-batches, so tp = 2 inside a host" in found.why


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [
        (12 * GIB, {"recompute": "full"}),
        (8 * GIB, {"recompute": "full", "offload": "optimizer"}),
    ],
)
def test_old_cards_on_four_hosts(memory: int, wanted: dict[str, Any]) -> None:
    """1,558 million parameters in fp32 at 100 Mbit/s: activations travel, not weights; then the optimizer moves."""
    words = ("gpt2_1558m_openwebtext", "train.precision=fp32", "train.global_batch_size=32")
    found = answer(words, 4, Devices(memory, 1, 5e12, 12.5e6))
    assert keys(found) == {"pp": 4, "microbatch_size": 1, "schedule": "1f1b", **wanted}
    assert found.row is TableRow.OLD_CARDS
    assert "4. A rank has 8,192 tokens; its network needs 800,000 (2 F/W in fp32), so pp between hosts" in found.why
    assert f"{found.held.state / GIB:.1f}" == ("3.4" if "offload" in wanted else "6.7")


def test_old_cards_of_one_host_with_a_fast_bus_divide_the_state() -> None:
    """Weights on a slow bus, or stages where the bus carries all that is sent."""
    cards = Devices(2.2 * GIB, 4, 3e12, 6e6, PCIE)
    found = answer(SMALL, 4, cards, "train.precision=fp32")
    assert found.plan.mesh.dp_shard == 4
    assert found.row is TableRow.NODE_NOT
    slow = answer(SMALL, 4, dataclasses.replace(cards, inside_bytes_per_s=1e8), "train.precision=fp32")
    assert slow.plan.mesh.pp == 4
    assert any(one.endswith("so each device is a stage") for one in slow.why)


def test_the_rows_of_one_device() -> None:
    """Keys where none are needed; the optimizer in host memory before recompute was tried."""
    one = dataclasses.replace(ETHERNET, memory_bytes=40e9)
    fits = answer(PLAIN, 1, one)
    assert (fits.row, fits.change.values) == (TableRow.DEVICE_FITS, {})
    smaller = answer(SMALL, 1, dataclasses.replace(one, memory_bytes=4 * GIB))
    assert smaller.row is TableRow.DEVICE_FITS
    assert list(keys(smaller)) == ["microbatch_size"]
    tight = answer(XL, 1, dataclasses.replace(one, memory_bytes=24 * GIB))
    wanted = {"microbatch_size": 1, "recompute": "full", "offload": "optimizer"}
    assert (tight.row, keys(tight)) == (TableRow.DEVICE_NOT, wanted)


def test_the_rows_of_one_node() -> None:
    """Shards where replicas fit; a stage that is higher than needed."""
    node = Devices(16 * GIB, 8, FLOPS["a100"], 25e9, NVLINK)
    fits = answer(PLAIN, 8, node, "train.global_batch_size=256")
    assert (fits.row, fits.change.values) == (TableRow.NODE_FITS, {})
    shards = answer(XL, 8, node)
    assert (shards.row, shards.plan.mesh.dp_shard) == (TableRow.NODE_NOT, 8)
    lower = {
        "parallel.dp_shard": 8,
        "parallel.zero_stage": shards.plan.layout.zero_stage - 1,
        "train.microbatch_size": 1,
    }
    plan = build(changed(config_of(*XL), Change(lower)), 50_257, 8)
    assert state_bytes(plan).device_bytes + activations_bytes(plan, "cuda") > 0.8 * node.memory_bytes


def test_a_block_that_does_not_fit_is_divided_by_tp() -> None:
    """Shards alone: stage 3 gathers a whole block, which is larger than a device."""
    wide = (*PLAIN, "model.hidden_dim=2048", "model.num_heads=16", "model.num_layers=2", "data.seq_len=64")
    found = answer(wide, 16, Devices(0.25 * GIB, 16, 1e12, 1e9, NVLINK), "model.vocab_size=512", "model.seq_len=64")
    assert found.row is TableRow.BLOCK_NOT
    assert found.plan.mesh.tp >= 2
    assert found.plan.mesh.tp * found.plan.mesh.dp_shard == 16
    assert any(one.startswith("2. A single block has") for one in found.why)


def test_fast_networks() -> None:
    """Weights that are gathered over the network where those of one host would do."""
    fast = Devices(16 * GIB, 8, FLOPS["h100"], 8 * 50e9, 450e9)  # 400 Gbit/s per device: 8,000 tokens
    small = answer((*PLAIN, "train.global_batch_size=2048", "model.seq_len=1024", "data.seq_len=1024"), 16, fast)
    assert (small.row, small.change.values) == (TableRow.FAST, {})
    large = answer(XL, 16, fast, "train.global_batch_size=128")
    assert (large.row, large.plan.mesh.dp_shard, large.plan.mesh.dp_replicate) == (TableRow.FAST, 8, 2)
    assert any("needs 8,000 (F/W), so dp_shard inside a host" in one for one in large.why)
    larger = answer(LLAMA, 16, dataclasses.replace(fast, memory_bytes=24e9), "train.global_batch_size=16")
    assert (larger.row, larger.plan.mesh.dp_shard, larger.plan.layout.zero_stage) == (TableRow.FAST, 16, 3)
    assert any(one.startswith("3. The ranks of one host do not hold the state") for one in larger.why)


def test_a_small_batch_and_a_long_sequence() -> None:
    """Ranks without a sample; cp before tp."""
    node = Devices(80e9, 8, FLOPS["h100"], 400e9, 450e9)
    few = answer(LLAMA, 8, node, "train.global_batch_size=4")
    assert (few.row, few.plan.mesh.tp, few.plan.mesh.cp) == (TableRow.FEW, 2, 1)
    one = answer(LLAMA, 16, node, "train.global_batch_size=1")
    assert (one.row, one.plan.mesh.tp, one.plan.mesh.cp) == (TableRow.FEW, 8, 2)
    longer = ("model.seq_len=131072", "data.seq_len=131072", "train.global_batch_size=8")
    long = answer(LLAMA, 8, node, *longer)
    assert (long.row, long.plan.mesh.tp, long.plan.layout.recompute) == (TableRow.LONG, 2, "full")
    whole = answer(LLAMA, 8, node, *longer, given=("parallel.tp",))
    assert (whole.row, whole.plan.mesh.tp, whole.plan.mesh.cp > 1) == (TableRow.LONG, 1, True)
    assert any("parallel.tp = 1 is given: rules that need 2" in one for one in whole.why)


def test_slow_ethernet_gets_another_trajectory_beside_the_answer() -> None:
    """Keys that change the losses inside the answer itself, or a method that the network does not need."""
    due = ("train.eval_every=1600", "checkpoint.every=1600", "train.num_steps=16000", "optimizer.decay_steps=16000")
    slow = answer(SMALL, 2, Devices(16 * GIB, 1, 5e12, 6.1e6), *due)
    assert slow.row is TableRow.SLOW
    assert slow.plan.mesh.pp == 2
    assert not {"average_every", "wire"} & set(keys(slow))
    assert slow.other is not None
    assert slow.other.row is TableRow.ETHERNET
    assert slow.other.keys == {"parallel.average_every": 16, "parallel.wire": "sign"}
    other = build(changed(config_of(*SMALL, *due), slow.other.change), 50_257, 2)
    assert (other.mesh.dp_replicate, other.layout.average_every, other.layout.wire) == (2, 16, "sign")
    less = answer(SMALL, 2, Devices(16 * GIB, 1, 5e12, 60e6), *due)
    assert less.other is not None
    assert less.other.keys == {"parallel.wire": "int4"}
    odd = answer(SMALL, 2, Devices(16 * GIB, 1, 5e12, 6.1e6))  # 16 steps do not divide train.eval_every = 1000
    assert odd.other is not None
    assert odd.other.keys == {"parallel.average_every": 25, "parallel.wire": "sign"}
    assert any("not a multiple of parallel.average_every = 16" in one for one in odd.other.why)
    assert answer(XL, 8, ETHERNET).other is None  # it does not fit in one node


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("parallel.tp=2",), ("parallel.tp",)),
        (("parallel.cp=2",), ("parallel.cp",)),
        (("parallel.dp_shard=4", "parallel.zero_stage=3"), ("parallel.dp_shard", "parallel.zero_stage")),
        (("parallel.dp_replicate=2",), ("parallel.dp_replicate",)),
        (("parallel.pp=4", "parallel.schedule=gpipe"), ("parallel.pp",)),
        (("train.microbatch_size=2", "parallel.recompute=selective"), ("train.microbatch_size", "parallel.recompute")),
        (("parallel.offload=optimizer",), ("parallel.offload",)),
    ],
)
@pytest.mark.parametrize("devices", [Devices(1.2 * GIB, 1, 25e12, 1.25e9), Devices(2 * GIB, 4, 150e12, 400e9, NVLINK)])
def test_given_keys_stay(words: tuple[str, ...], given: tuple[str, ...], devices: Devices) -> None:
    """A rule that overwrites what the user gave, or none where one would do. `answer` looks whether it fits."""
    config = config_of(*SMALL, *words)
    found = answer(SMALL, 8, devices, *words, given=given)
    for key in given:
        section, _, name = key.partition(".")
        kept = getattr(getattr(config, section), name)
        now = getattr(getattr(changed(config, found.change), section), name)
        assert now == kept
    assert not set(given) & set(found.change.values)


def test_keys_that_are_not_given_lose_a_value_without_effect() -> None:
    """A zero_stage of the file on a layout without shards; recompute where memory does not ask for it."""
    words = (
        "parallel.dp_shard=8",
        "parallel.zero_stage=2",
        "parallel.recompute=full",
        "parallel.sequence_parallel=false",
    )
    found = answer(PLAIN, 8, Devices(16 * GIB, 8, 150e12, 25e9), *words)
    wanted = {"dp_shard": 1, "zero_stage": 3, "recompute": "none", "sequence_parallel": True}
    assert keys(found) == wanted


def test_what_fits_nowhere_says_the_fewest_devices() -> None:
    """A number of devices on which it does not fit either, or twice as many as needed."""
    devices = Devices(0.5 * GIB, 1, 25e12, 1.25e9)
    with pytest.raises(UserError) as few:
        by_rules(config_of(*SMALL), 50_257, 1, devices, ())
    message = few.value.problems[0]
    assert "fits on 1 rank of 512.00 MiB, of which 80 % count (409.60 MiB)" in message
    fewest = int(message.rsplit(" ", 1)[1])
    assert fewest > 2
    answer(SMALL, fewest, devices)
    with pytest.raises(UserError):
        by_rules(config_of(*SMALL), 50_257, fewest // 2, devices, ())


def test_a_block_that_no_host_can_divide_fits_nowhere() -> None:
    """tp over several hosts, or shards that gather the block."""
    with pytest.raises(UserError, match=r"a single block .* more than 8 ranks of a host can divide\. No power of two"):
        by_rules(config_of("llama3_405b"), None, 8, Devices(GIB, 8, 400e12, 400e9, 450e9), ())


def test_what_is_wrong_with_a_run_is_said_instead_of_a_lack_of_memory() -> None:
    """A batch that is refused on each layout, said as a model that does not fit."""
    devices = Devices(16 * GIB, 8, 150e12, 25e9, NVLINK)
    with pytest.raises(UserError, match=r"--ranks 12: do not fill hosts of 8 \(--per-host\); 8 or 16 do"):
        by_rules(config_of(*PLAIN), None, 12, devices, ())
    with pytest.raises(UserError, match=r"ranks that are given portions of work have no common step"):
        by_rules(config_of(*PLAIN, "parallel.gossip=pairs", "parallel.gossip_mode=asynchronous"), None, 8, devices, ())
    with pytest.raises(UserError, match=r"portions of work|data-parallel ranks"):
        by_rules(config_of(*PLAIN, "parallel.servers=1"), None, 8, devices, ())
    with pytest.raises(UserError, match=r"parallel.tp = 3"):
        by_rules(config_of(*PLAIN, "parallel.tp=3"), None, 8, devices, ("parallel.tp",))


def test_what_is_not_known_of_a_gpu_counts_as_on_a_cpu_and_is_said() -> None:
    """Attention in fp64 that cp divides has no kernel: its activations would count as nothing."""
    config = config_of(*PLAIN, "train.precision=fp64", "parallel.cp=2")
    found = by_rules(config, None, 8, Devices(192e9, 8, 100e12, 1e9, NVLINK), ("parallel.cp",))
    assert "What activations take on cuda in fp64 is not known; they count as on cpu" in found.why
    assert found.held.activations == activations_bytes(found.plan, "cpu")


def test_the_screen_begins_with_how_it_was_found() -> None:
    found = answer(SMALL, 2, Devices(16 * GIB, 1, 5e12, 6.1e6))
    lines = columns(list(rows(found))).splitlines()
    assert lines[0].endswith(NOT_SIMULATED)
    assert "many nodes, slow network" in lines[1]
    assert any(line.strip().endswith("parallel.pp = 2") for line in lines)
    assert any(line.startswith("another trajectory  nodes on slow Ethernet") for line in lines)
    nothing = dict(rows(answer(PLAIN, 1, ETHERNET)))
    assert nothing["  take"] == ["nothing: no key of a layout"]


def test_all_rows_and_keys_are_those_of_the_page_and_the_config() -> None:
    """A row that the page words otherwise, or a key that the config does not have."""
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| {row} |" in page for row in TableRow)
    config = config_of("default")
    assert all(hasattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS)
