"""In: plans, clusters with round numbers. Out: seconds and bytes of a price that follow from closed forms.
Does not compare with measurements: benchmarks/prediction_error.py does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.build import build
from codescent.clusters.cluster import PRECISIONS, Cluster, ClusterDevice, Software
from codescent.clusters.files import load_cluster, shipped_clusters, software_of
from codescent.clusters.link import CurvePoint, Link
from codescent.config.sections import Config
from codescent.cost.collective_time import BETWEEN, INSIDE, group_of, seconds
from codescent.cost.device_time import utilization
from codescent.cost.lanes import Kind, kind_of, lanes_of
from codescent.cost.loading import microbatch_bytes
from codescent.cost.price import StageCosts, price
from codescent.cost.second_products import kept_shares
from codescent.cost.simulate import Costs, simulate
from codescent.cost.stage_memory import PARTS as MEMORY_NAMES
from codescent.cost.stage_memory import Fitting
from codescent.cost.time_parts import COMPUTED, NAMES
from codescent.cost.transfers import transfers
from codescent.plan import AXES, SENDS, Collective, Instruction, Mesh, Plan, Traffic, Verb
from codescent.plan.pipeline import SCHEDULES, pipeline
from codescent.planner.checkpoints import best_interval
from codescent.planner.fitted import CONSTANTS, MeasuredRun, changed, fit, most_telling
from codescent.planner.prediction import not_priced

IDEAL = Software(
    memory_efficiency=1.0, inside_efficiency=1.0, between_efficiency=1.0, collective_s=0.0, hop_s=0.0, host_s=0.0,
    microbatch_s=0.0, step_s=0.0, load_s=0.0, contention=1.0, held_bytes=0.0, fragments=0.0,
)  # fmt: skip
"""Nothing is lost but what products lose."""
DEVICE = ClusterDevice("device", "cuda", 10**12, 1e15, {"fp32": 1e12, "bf16": 1e12})
"""Copies take no time beside products."""
CLUSTER = Cluster("lab", "", DEVICE, 4, 2, Link(1e11), Link(1e10), Link(1e10))


def plan_of(ranks: int = 1, *, layers: int = 4, batch: int = 8, train: dict | None = None,
            optimizer: dict | None = None, **parallel: Any) -> Plan:  # fmt: skip
    model = {"kind": "llama", "num_layers": layers, "hidden_dim": 256, "num_heads": 4, "ffn_dim": 512,
             "vocab_size": 512, "seq_len": 128}  # fmt: skip
    sections = {
        "model": model,
        "data": {"corpus": "synthetic"},
        "train": {"global_batch_size": batch, "microbatch_size": 1, "precision": "bf16", **(train or {})},
        "optimizer": optimizer or {},
        "parallel": parallel,
    }
    return build(Config.model_validate(sections), None, ranks)


def all_reduce(axis: str, payload_bytes: int) -> Traffic:
    return Traffic(Collective.ALL_REDUCE, axis, payload_bytes, "fp32", Verb.REDUCE, None, "")


def test_a_step_on_one_device_computes_its_products_at_the_peak_and_moves_its_state() -> None:
    """A product, a pass or a micro-batch that is left out of the price."""
    plan, device = plan_of(), dataclasses.replace(DEVICE, memory_bytes_per_s=1e30)
    found = price(plan, dataclasses.replace(CLUSTER, device=device), IDEAL)
    products = 0.0
    for tensor in plan.tensors:
        shape = tensor.parameter.shape
        if len(shape) > 1 and tensor.parameter.depths != (0,):
            outputs, inputs = math.prod(shape[:-1]), shape[-1]
            sizes = ((128, outputs, inputs), (128, inputs, outputs), (outputs, inputs, 128))
            products += sum(2.0 * math.prod(size) / (1e12 * utilization(device, 1e12, *size)) for size in sizes)
    assert found.parts.products_s == pytest.approx(8 * products, rel=1e-9)
    assert found.step_s == pytest.approx(sum(getattr(found.parts, name) for name in NAMES))
    assert found.parts.exposed_s == found.parts.bubble_s == 0.0
    assert found.tokens_per_s == pytest.approx(8 * 128 / found.step_s)


def test_ranks_wait_for_the_slowest_of_them() -> None:
    """What ranks compute is longer where one of several is slower; a rank alone waits for nobody."""
    uneven = dataclasses.replace(IDEAL, imbalance=1.25)
    for ranks in (1, 2):
        even, waits = (price(plan_of(ranks, dp_replicate=ranks), CLUSTER, one).parts for one in (IDEAL, uneven))
        computed_s = sum(getattr(even, name) for name in COMPUTED)
        assert waits.imbalance_s == pytest.approx(0.25 * computed_s * (ranks > 1))
        assert waits.total_s == pytest.approx(even.total_s + waits.imbalance_s)


def test_small_products_leave_units_idle_and_large_ones_do_not() -> None:
    """A device whose small products are as fast as its large ones: small models look cheap."""
    device = ClusterDevice("gpu", "cuda", 1, 1.0, {"fp32": 1e13, "bf16": 3e14}, sustained=0.8, units=100)
    large, small = utilization(device, 3e14, 25600, 12800, 8192), utilization(device, 3e14, 128, 256, 64)
    assert large == pytest.approx(0.8 * 8192 / 8292, rel=0.01)
    assert small < 0.1 * large
    assert utilization(device, 1e13, 25600, 12800, 8192) > large  # slower formats wait less, and keep the clock


@pytest.mark.parametrize(
    ("mesh", "axis", "link", "expected"),
    [
        # Four ranks of one node: 2 (n - 1) / n of the payload over a device's own link.
        (Mesh(tp=4), "tp", INSIDE, 2 * 3 / 4 * 8e9 / 1e11),
        # Two nodes of four: four rings share two cards, so 2 (n - 1) / n over two cards in all.
        (Mesh(dp_replicate=8), "dp_replicate", BETWEEN, 2 * 7 / 8 * 8e9 / 2e10),
        # One rank of each group on each node: each has half of a card, because three more groups send.
        (Mesh(dp_replicate=2, tp=4), "dp_replicate", BETWEEN, 2 * 1 / 2 * 8e9 / 5e9),
    ],
)
def test_a_collective_crosses_the_cards_that_its_ranks_share(mesh: Mesh, axis: str, link: str, expected: float) -> None:
    """A group that has all cards of a node for itself, or none of its own."""
    assert seconds(all_reduce(axis, 8 * 10**9), mesh, 0, CLUSTER, IDEAL) == (link, pytest.approx(expected))


def test_a_bus_that_devices_share_and_a_program_that_uses_one_card() -> None:
    """Cards without peer access are as fast as NVLink; a program that sends over one card uses all."""
    shared = dataclasses.replace(CLUSTER, shares_inside=True)
    assert seconds(all_reduce("tp", 8 * 10**9), Mesh(tp=4), 0, shared, IDEAL)[1] == pytest.approx(4 * 1.5 * 8e9 / 1e11)
    pairs = Mesh(dp_replicate=2, tp=2)  # two groups on the bus
    assert seconds(all_reduce("tp", 8 * 10**9), pairs, 0, shared, IDEAL)[1] == pytest.approx(4 * 1.0 * 8e9 / 1e11)
    one = dataclasses.replace(IDEAL, rings=1)
    assert seconds(all_reduce("dp_replicate", 10**9), Mesh(dp_replicate=8), 0, CLUSTER, one)[1] == pytest.approx(
        1.75e9 / 1e10
    )


def test_latencies_follow_one_another_in_a_ring_and_in_levels_of_a_tree() -> None:
    """A sum over hundreds of nodes that takes hundreds of latencies; a gather that takes one."""
    slow = dataclasses.replace(CLUSTER, devices=1, cards=1, between=Link(1e30, 1e-3), inside=Link(1e30, 1e-3))
    mesh = Mesh(dp_replicate=64)
    assert seconds(all_reduce("dp_replicate", 8), mesh, 0, slow, IDEAL)[1] == pytest.approx(2 * 6e-3)
    gather = dataclasses.replace(all_reduce("dp_replicate", 8), collective=Collective.ALL_GATHER)
    assert seconds(gather, mesh, 0, slow, IDEAL)[1] == pytest.approx(63e-3)
    assert seconds(gather, mesh, 0, slow, IDEAL, messages=3)[1] == pytest.approx(3 * 63e-3)


def test_a_group_lies_on_nodes_by_the_order_of_ranks() -> None:
    """Groups of tp that cross nodes although they fit into one."""
    mesh = Mesh(pp=2, dp_shard=4, tp=4)
    assert dataclasses.astuple(group_of(mesh, "tp", 0, 8)) == (4, 1, 4, 2)
    assert dataclasses.astuple(group_of(mesh, "dp_shard", 0, 8)) == (4, 2, 2, 4)
    assert dataclasses.astuple(group_of(mesh, "pp", 0, 8)) == (2, 2, 1, 8)


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), st.floats(0.0, 3.0),
    st.lists(st.floats(0.1, 5.0), min_size=18, max_size=18),
)  # fmt: skip
@example("interleaved", 2, 4, 2, 2.0, [1.0] * 18)  # activations and gradients go to the same stage, on one link
@settings(max_examples=150, deadline=None)
def test_the_makespan_of_lanes_is_that_of_the_simulation(
    name: str, stages: int, microbatches: int, chunks: int, message_s: float, each: list[float]
) -> None:
    """A dependency or a busy link that the fast walk does not see."""
    chunks = chunks if name == "interleaved" and stages > 1 else 1
    if name == "interleaved" and (chunks == 1 or microbatches % stages):
        return
    virtual = stages * chunks
    costs = Costs(
        forward_s=tuple(each[:virtual]), backward_s=tuple(each[-virtual:]), backward_input_s=tuple(each[:virtual]),
        backward_weight_s=tuple(each[-virtual:]), transfer_s=message_s,
    )  # fmt: skip
    schedule = pipeline(name, stages, microbatches, chunks)

    def of(kind: tuple[int, Verb, int, bool], at: Instruction) -> float:
        return costs.compute_s(kind[0], at, kind[2] * stages + kind[0])

    makespan_s, busy_s = lanes_of(schedule).run(of, [message_s] * 2 * stages)
    found = simulate(schedule, costs)
    assert makespan_s == pytest.approx(found.makespan_s, rel=1e-12)
    assert busy_s == pytest.approx([stage.busy_s for stage in found.stages])


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 4, "schedule": "1f1b"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"pp": 2, "schedule": "zero-bubble"},
        {"dp_shard": 4, "zero_stage": 3},
        {"tp": 2, "dp_shard": 2, "recompute": "full"},
    ],
)
def test_a_price_is_what_its_simulation_draws(parallel: dict[str, Any]) -> None:
    """A picture of seconds that are not those of the price."""
    plan = plan_of(4, batch=32, **parallel)
    found = price(plan, CLUSTER, Software())
    assert found.simulate().makespan_s == pytest.approx(found.step_s, rel=1e-9)
    busiest = {kind_of(0, at): at for at in plan.computing.programs[0]}
    assert sum(found.costs.parts_of(kind, at).total_s > 0 for kind, at in busiest.items()) >= 3


def test_gathers_hide_behind_blocks_but_for_the_first_and_gradients_but_for_the_last() -> None:
    """Weights of ZeRO that take no time, or are waited for although a block computes meanwhile."""
    sizes: dict[str, Any] = {"dp_shard": 4, "zero_stage": 3, "layers": 8, "batch": 4, "train": {"microbatch_size": 1}}
    plan = plan_of(4, **sizes)
    fast = price(plan, dataclasses.replace(CLUSTER, inside=Link(1e30)), IDEAL)
    hidden = price(plan, CLUSTER, IDEAL)
    exposed = price(plan, CLUSTER, dataclasses.replace(IDEAL, overlaps=()))
    assert fast.step_s < hidden.step_s < exposed.step_s
    sent_s = sum(
        record.times * record.wire_bytes(4) / 1e11 for record in plan.traffic if record.axis.startswith("dp_shard")
    )
    assert exposed.parts.inside_s == pytest.approx(sent_s)
    assert hidden.parts.inside_s < 0.6 * sent_s
    slow = dataclasses.replace(CLUSTER, inside=Link(1e7))
    assert price(plan, slow, IDEAL).parts.inside_s > 0.9 * 1e4 * sent_s


def test_a_slow_rank_slows_its_stage_and_the_others_wait() -> None:
    """A slow rank that nobody waits for."""
    plan = plan_of(4, batch=32, pp=2, dp_replicate=2)
    usual, slow = price(plan, CLUSTER, IDEAL), price(plan, CLUSTER, IDEAL, slow={3: 2.0})
    assert usual.step_s < slow.step_s < 2 * usual.step_s + 1e-9
    assert slow.parts.products_s == pytest.approx(2 * usual.parts.products_s, rel=0.3)  # of the slow stage


def test_memory_has_state_activations_and_gathered_units_and_a_verdict() -> None:
    """A part that is counted twice or not; a verdict that is always the same."""
    plan = plan_of(4, dp_shard=4, zero_stage=3, batch=4)
    found = price(plan, CLUSTER, IDEAL)
    held = found.memory[0]
    assert held.total == sum(float(getattr(held, name)) for name in MEMORY_NAMES)
    units = sorted({record.payload_bytes for record in plan.traffic if record.collective is Collective.ALL_GATHER})
    assert held.gathered >= units[-1]
    whole = price(plan_of(4, dp_replicate=4, batch=4), CLUSTER, IDEAL).memory[0]
    assert whole.gathered == 0
    assert held.optimizer + held.weights < 0.5 * (whole.optimizer + whole.weights)
    kept = price(plan, CLUSTER, dataclasses.replace(IDEAL, units="kept")).memory[0]
    assert kept.gathered > held.gathered
    for size, calibrated, verdict in (
        (held.total / 0.79, False, Fitting.FITS),
        (held.total / 0.85, False, Fitting.TIGHT),
        (held.total / 0.85, True, Fitting.FITS),
        (held.total / 1.01, True, Fitting.TOO_LARGE),
    ):
        device = dataclasses.replace(DEVICE, memory_bytes=int(size))
        assert held.verdict(device, calibrated=calibrated) is verdict


def test_units_that_are_gathered_once_for_a_micro_batch_stay_whole() -> None:
    """Two units of all virtual stages: memory of the root, and of the last block of each chunk, that is not there."""
    plan = plan_of(4, layers=8, batch=32, dp_shard=2, zero_stage=3, pp=2, schedule="interleaved", virtual_stages=2)
    gathers = [one for one in plan.traffic if one.collective is Collective.ALL_GATHER and one.stage in (None, 0)]
    sizes = {one.what.removeprefix("weights of "): one.payload_bytes for one in gathers}
    assert list(sizes) == ["the root", "block 0", "block 1", "block 4", "block 5"]
    stay = ("the root", "block 1", "block 5")  # blocks 0 and 4 are gathered in forward, and in backward
    gradients = max(one.payload_bytes for one in plan.traffic if one.collective is Collective.REDUCE_SCATTER)
    held = price(plan, CLUSTER, IDEAL).memory[0].gathered
    assert held == sum(sizes[name] for name in stay) + sizes["block 0"] + sizes["block 4"] + gradients
    again = price(plan, CLUSTER, dataclasses.replace(IDEAL, units="again")).memory[0].gathered
    assert again == sizes["the root"] + 2 * sizes["block 0"] + gradients


def test_a_recomputed_block_is_in_memory_while_its_gradients_are_computed() -> None:
    """Recomputation that needs the inputs of blocks alone: it runs out of memory in the first backward pass."""
    full, none = (price(plan_of(recompute=kind), CLUSTER, IDEAL).memory[0].activations for kind in ("full", "none"))
    assert none / 4 < full < none / 2


def test_a_program_keeps_every_second_product_and_computes_the_others_again() -> None:
    """Of q, k, v, out, gate, up, down: k, out and up are gone. Three matrices that count as one keep too much."""
    plan, tokens, width, ffn, layers = plan_of(recompute="products"), 128, 256, 512, 4
    second = dataclasses.replace(IDEAL, second_products=True)
    assert kept_shares(plan) == {"attn.qkv": 2 / 3, "attn.out": 0.0, "mlp.gate_up": 0.5, "mlp.down": 1.0}
    usual, other = (price(plan, CLUSTER, software) for software in (IDEAL, second))
    kept = 2 * tokens * layers * (width + ffn - width)  # bytes of k and up; down comes instead
    assert usual.memory[0].activations - other.memory[0].activations == kept
    seconds = 2 * tokens * width * (width + ffn)  # k and up; out was computed again already
    idle = price(plan, CLUSTER, dataclasses.replace(second, product_efficiency=2.0)).parts.products_s
    assert other.parts.products_s == pytest.approx(2 * idle)
    least = 8 * layers * seconds / 1e12
    assert least < other.parts.products_s - usual.parts.products_s < 3 * least  # units wait for data, too
    assert kept_shares(plan_of(recompute="full")) == {}


def test_the_last_stage_joins_the_logits_of_all_micro_batches() -> None:
    """Logits of earlier micro-batches that are not there, or those of a run without a pipeline that are."""
    at_once, tokens, size = dataclasses.replace(IDEAL, logit_bytes=12, joins_outputs=True), 128, 512
    piped = price(plan_of(2, pp=2), CLUSTER, at_once).memory
    assert [stage.logits for stage in piped] == [0.0, tokens * size * (12 + 2 * (2 * 8 - 1))]
    assert price(plan_of(), CLUSTER, at_once).memory[0].logits == tokens * size * 12


@pytest.mark.parametrize(("batch", "stage", "parts"), [(2, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_a_program_that_divides_the_optimizer_alone_has_whole_gradients(batch: int, stage: int, parts: int) -> None:
    """Gradients of one micro-batch that stage 1 divides, where the program does not; or those of stage 2 whole."""
    plan = plan_of(2, batch=batch, dp_shard=2, zero_stage=stage)
    wide = price(plan, CLUSTER, dataclasses.replace(IDEAL, gradient_bytes=4)).memory[0].gradients
    assert wide == pytest.approx(4 * plan.num_parameters / parts, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "keys", "words"),
    [
        (1, {}, "forward pass of micro-batch 1, in the head"),  # the first one with gradients beside it
        (1, {"recompute": "full"}, "backward pass of micro-batch 1"),  # a block again is more than the logits
        (1, {"batch": 1}, "the update of the weights"),  # activations go while gradients come
        (4, {"batch": 4, "dp_shard": 4, "zero_stage": 3, "recompute": "full"}, "backward pass of micro-batch 0"),
        (2, {"pp": 2}, "forward pass of micro-batch 2"),  # behind the first backward pass, two in flight again
        (2, {"pp": 2, "batch": 1, "layers": 8}, "the update of the weights"),
        (2, {"pp": 2, "layers": 8, "schedule": "zero-bubble"}, "forward pass of micro-batch 2, in the head"),
    ],
)
def test_the_peak_is_where_parts_that_are_there_together_are_largest(
    ranks: int, keys: dict[str, Any], words: str
) -> None:
    """A place where logits, a block again, gradients or gathered units are not there yet, or no longer."""
    found = price(plan_of(ranks, **keys), CLUSTER, IDEAL)
    peak = found.peak
    assert peak is not None
    assert peak.words == words
    held = found.memory[peak.stage]
    both = max if found.plan.work.num_microbatches == 1 else sum  # gradients come while activations go
    expected = {
        Verb.FORWARD: held.state + held.activations - held.again + (held.logits if peak.in_head else 0.0),
        Verb.BACKWARD: held.weights + held.optimizer + both((held.gradients, held.activations)) + held.gathered,
        Verb.STEP: held.state,
    }
    assert peak.stage == found.fullest
    assert peak.held_bytes == pytest.approx(expected[peak.instruction.verb])
    assert peak.held_bytes <= held.total


def test_the_place_of_the_peak_is_not_said_where_activations_are_not_declared() -> None:
    """A place by the inputs of blocks alone: no kernel of a GPU divides attention in fp64."""
    device = dataclasses.replace(DEVICE, peaks={"fp64": 1e12, **DEVICE.peaks})
    found = price(plan_of(2, cp=2, train={"precision": "fp64"}), dataclasses.replace(CLUSTER, device=device), IDEAL)
    assert found.peak is None


HOST = dataclasses.replace(CLUSTER, host_bytes_per_s=1e9)
"""Memory of a host that is far slower than the bus."""


@pytest.mark.parametrize(
    ("ranks", "keys", "each", "shares"),
    [
        (1, {"batch": 1}, 2 * 12 + 2 + 2, 1),  # masters and moments; gradients and weights in bf16
        (1, {}, 2 * 12 + 4 + 2, 1),  # gradients of several micro-batches are summed in fp32
        (2, {"dp_shard": 2, "zero_stage": 3, "batch": 2}, (2 * 12 + 4 + 4) / 2, 2),  # weights are sharded in fp32
        (8, {"dp_shard": 8, "zero_stage": 1}, (2 * 12 + 4) / 8, 4),  # four devices of a node share its memory
        (2, {"dp_shard": 2, "zero_stage": 3, "offload": "all", "batch": 2}, (2 * 8 + 2 * 4 + 4) / 2, 2),
    ],
)
def test_an_update_on_the_host_moves_its_bytes_once_and_hides_copies(
    ranks: int, keys: dict[str, Any], each: float, shares: int
) -> None:
    """An update at the speed of the device; a host that each device has for itself; copies that are waited for."""
    plan = plan_of(ranks, **{"offload": "optimizer", **keys})
    found = price(plan, HOST, IDEAL)
    assert found.parts.update_s == pytest.approx(each * plan.num_parameters * shares / 1e9, rel=0.01)
    half = price(plan, HOST, dataclasses.replace(IDEAL, memory_efficiency=0.5))
    assert half.parts.update_s == pytest.approx(2 * found.parts.update_s)
    assert all(size >= 0 for size in found.memory[0].parts().values())
    if ranks == 1:
        assert found.parts.bus_s == 0.0
        fast = price(plan, dataclasses.replace(CLUSTER, host_bytes_per_s=1e14), IDEAL).parts
        copied = sum(one.inside_bytes for one in plan.traffic if one.collective is Collective.COPY)
        assert fast.bus_s + fast.update_s == pytest.approx(copied / 1e10)


def test_muon_waits_for_copies_beside_an_update_on_the_host() -> None:
    """Matrices that are orthogonalised on the device before they have come."""
    plan = plan_of(offload="optimizer", optimizer={"kind": "muon"})
    copied = sum(one.inside_bytes for one in plan.traffic if one.collective is Collective.COPY)
    assert price(plan, HOST, IDEAL).parts.bus_s == pytest.approx(copied / 1e10)


def test_a_host_whose_memory_is_not_known_has_no_update_and_a_cpu_nothing_to_offload() -> None:
    """A price without the update, or advice to give a key that helps nothing."""
    plan = plan_of(offload="optimizer")
    with pytest.raises(
        UserError, match=r'^lab: how long .*; give node.host_bandwidth of the cluster, such as "400GB/s"'
    ):
        price(plan, CLUSTER, IDEAL)
    assert [*not_priced(plan, HOST, "auto")] == []
    (said,) = not_priced(plan, CLUSTER, "auto")
    assert said.startswith("parallel.offload: how long the update in host memory takes is not known; give node.host_")
    cpu = dataclasses.replace(HOST, device=dataclasses.replace(DEVICE, kind="cpu"))
    assert [*not_priced(plan, cpu, "auto")] == [
        "parallel.offload: the memory of the devices of lab is that of their host"
    ]


def test_layers_that_are_sent_in_pieces_wait_for_the_first_piece() -> None:
    plan = plan_of(4, tp=4)
    usual = price(plan, CLUSTER, IDEAL).parts.inside_s
    pieces = price(plan, CLUSTER, dataclasses.replace(IDEAL, overlaps=("gathers", "sums", "layers"))).parts.inside_s
    assert 0 < pieces < usual / 2


@pytest.mark.parametrize("name", sorted(shipped_clusters()))
def test_each_shipped_cluster_prices_a_run(name: str) -> None:
    """A cluster file with which nothing can be priced."""
    cluster = load_cluster(name)
    plan = plan_of(2, dp_replicate=2)
    found = price(plan, cluster, software_of(cluster))
    assert math.isfinite(found.step_s)
    assert 0 < found.utilization(plan.flops().total_flops) < 1


def test_constants_are_found_again_from_times_that_they_made() -> None:
    """A fit that explains measured times by the wrong constant, or takes the measured time of a row to predict it."""
    device = ClusterDevice("gpu", "cuda", 10**11, 2e12, {"fp32": 2e13, "bf16": 3e14}, sustained=0.8, units=100)
    cluster = dataclasses.replace(CLUSTER, device=device, between=Link(1e9, 1e-6))
    plans = [
        plan_of(8, layers=layers, batch=batch, train={"microbatch_size": size}, **parallel)
        for layers in (4, 8)
        for batch, size in ((64, 1), (512, 64))
        for parallel in ({"dp_replicate": 8}, {"dp_shard": 2, "tp": 4}, {"dp_replicate": 4, "pp": 2})
    ]
    names = ("host_s", "between_efficiency")
    chosen = [one for one in CONSTANTS if one.name in names]
    truth = changed(Software(), np.array([0.5 if one.name == "host_s" else -0.4 for one in chosen]), chosen)
    runs = [MeasuredRun(plan, cluster, Software(), price(plan, cluster, truth).step_s) for plan in plans]
    found = fit(runs, chosen)
    for one, change in zip(chosen, found.changes):
        assert change == pytest.approx(0.5 if one.name == "host_s" else -0.4, abs=0.08)
    assert np.abs(found.residuals).max() < 0.03
    wrong = [*runs[:-1], dataclasses.replace(runs[-1], step_s=100 * runs[-1].step_s)]
    assert fit(wrong, chosen).without([len(runs) - 1]) == pytest.approx(found.changes, abs=0.2)
    assert len(most_telling(runs, 3)) == 3
    few = [runs[0], runs[4], dataclasses.replace(runs[8], step_s=1.3 * runs[8].step_s)]
    bent = fit(few, chosen[:1])
    alone = bent.without([2])
    assert abs(float(alone[0]) - float(fit(few[:2], chosen[:1]).changes[0])) < 0.03
    assert abs(float(alone[0]) - float(bent.changes[0])) > 0.05


def test_a_run_that_the_model_does_not_explain_has_hardly_a_part_in_the_constants() -> None:
    """One strange run of four that bends the constants, and with them the predictions of the others."""
    chosen = [one for one in CONSTANTS if one.name == "product_efficiency"]
    truth = changed(Software(), np.array([-0.2]), chosen)
    plans = [plan_of(layers=layers, batch=512, train={"microbatch_size": 64}) for layers in (4, 6, 8, 12)]
    runs = [MeasuredRun(plan, CLUSTER, Software(), price(plan, CLUSTER, truth).step_s) for plan in plans]
    strange = dataclasses.replace(runs[-1], step_s=1.5 * runs[-1].step_s)
    (right,), (bent,) = fit(runs, chosen).changes, fit([*runs[:-1], strange], chosen).changes
    assert right == pytest.approx(-0.2, abs=0.01)
    assert abs(bent - right) < 0.03  # without weights 0.1, with those of Huber 0.04


def test_the_best_interval_of_checkpoints_wastes_least() -> None:
    """Young's formula with a factor that is wrong, or a share that it does not belong to."""
    mtbf_s, save_s = 36_000.0, 60.0
    best = best_interval(mtbf_s, save_s)

    def effective(seconds: float) -> float:
        return seconds / (mtbf_s * math.expm1((seconds + save_s) / mtbf_s))

    assert best.effective == pytest.approx(effective(best.seconds))
    assert best.effective == pytest.approx(
        max(effective(best.seconds * factor) for factor in np.linspace(0.3, 3, 200)), rel=1e-3
    )
    shares = [best_interval(1000.0, save_s).effective for save_s in (1.0, 499.0, 501.0, 1999.0, 2001.0, 1e9)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("name", sorted(shipped_clusters()))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_faster_format_is_never_slower_and_no_price_beats_the_peak(name: str, precision: str) -> None:
    """A speed that is negative, or falls as the peak rises: a device whose products cost nothing."""
    cluster, plan = load_cluster(name), plan_of(batch=64, train={"microbatch_size": 64})
    device, software = cluster.device, dataclasses.replace(Software(), precision=precision)
    if precision not in device.peaks:
        return
    times = []
    for factor in (0.25, 1.0, 1.5, 2.0, 4.0, 16.0):
        faster = dataclasses.replace(device, peaks={**device.peaks, precision: factor * device.peaks[precision]})
        found = price(plan, dataclasses.replace(cluster, device=faster), software)
        times.append(found.step_s)
        assert 0 < found.utilization(plan.flops().total_flops) <= 1
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"dp_shard": 4, "zero_stage": 1}),
        (4, {"dp_shard": 4, "zero_stage": 2}),
        (4, {"dp_shard": 4, "zero_stage": 3}),
        (8, {"dp_shard": 2, "zero_stage": 3, "pp": 4, "schedule": "1f1b"}),
        (4, {"dp_shard": 2, "zero_stage": 3, "pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
        (4, {"dp_replicate": 2, "tp": 2, "recompute": "full"}),
        (4, {"dp_replicate": 4}),
        (4, {"dp_shard": 2, "zero_stage": 3, "cp": 2, "context": "all-gather"}),
        (4, {"pp": 2, "tp": 2, "train": {"microbatch_size": 64}}),
    ],
)
def test_what_nothing_hides_is_waited_for_as_often_as_it_is_sent(ranks: int, parallel: dict[str, Any]) -> None:
    """Sums of some micro-batches that are sent and have no time: a step that is shorter than its bytes need."""
    plan = plan_of(ranks, batch=64, **parallel)
    lab = dataclasses.replace(CLUSTER, devices=8, inside=Link(1e8))
    costs = StageCosts(plan, lab, dataclasses.replace(IDEAL, overlaps=()))
    for stage in range(plan.mesh.pp):
        program = plan.computing.programs[stage]
        kinds: dict[Kind, Instruction] = {}
        for at in program:  # the first instruction of a kind is priced for all
            kinds.setdefault(kind_of(stage, at), at)
        time = costs.stages[stage]  # without messages to other stages, which may share links with sums
        waited = sum(time.parts_of(kinds[kind]).exposed_s for at in program for kind in [kind_of(stage, at)])
        rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
        sent = sum(
            record.times * seconds(record, plan.mesh, rank, lab, IDEAL)[1]
            for record in plan.traffic
            if record.stage in (None, stage) and record.verb not in SENDS
        )
        assert waited == pytest.approx(sent, rel=1e-9)


@pytest.mark.parametrize("stage", [2, 3])
def test_gathered_weights_are_copied_out_of_buffers_and_gradients_into_them(stage: int) -> None:
    """Copies of units that have no time: on a device with slow memory ZeRO looks as fast as replicas."""
    slow = dataclasses.replace(CLUSTER, device=dataclasses.replace(DEVICE, memory_bytes_per_s=1e6))
    sharded, replicas = (
        plan_of(4, batch=64, **one) for one in ({"dp_shard": 4, "zero_stage": stage}, {"dp_replicate": 4})
    )
    # Products take as long as their bytes do, on both.
    more_s = price(sharded, slow, IDEAL).parts.moved_s - price(replicas, slow, IDEAL).parts.moved_s
    units = [one for one in sharded.traffic if one.verb in (Verb.FORWARD, Verb.BACKWARD)]
    assert units
    assert more_s == pytest.approx(sum(2.0 * one.times * one.payload_bytes for one in units) / 1e6, rel=1e-6)


def test_one_rank_sends_over_one_card_and_all_to_all_shares_them() -> None:
    """A message of one rank over all cards of its node: ring attention between nodes looks eight times as fast."""
    nodes = dataclasses.replace(CLUSTER, devices=8, cards=8)
    send = dataclasses.replace(all_reduce("cp", 8 * 10**9), collective=Collective.SEND)
    assert seconds(send, Mesh(cp=16), 0, nodes, IDEAL)[1] == pytest.approx(8e9 / 1e10)
    each = dataclasses.replace(send, collective=Collective.ALL_TO_ALL)
    assert seconds(each, Mesh(cp=16), 0, nodes, IDEAL)[1] == pytest.approx(8e9 / 2 / 1e10)


def test_an_average_hides_behind_the_steps_that_it_runs_beside() -> None:
    """An overlap that has no effect on the price."""
    slow = dataclasses.replace(CLUSTER, devices=1, cards=1, between=Link(1e6))
    plans = [plan_of(2, dp_replicate=2, average_every=10, overlap_steps=steps) for steps in (0, 5, 9)]
    waits = [price(plan, slow, IDEAL).parts.between_s for plan in plans]
    assert waits[0] > waits[1] > waits[2]


def test_number_formats_that_nobody_knows_are_refused() -> None:
    with pytest.raises(UserError, match=r"device: FLOP/s in fp64 are not known, only in fp32, bf16; give peaks.fp64"):
        price(plan_of(), CLUSTER, dataclasses.replace(IDEAL, precision="fp64"))


def test_samples_that_are_read_ahead_take_no_time_until_reading_takes_longer_than_a_step() -> None:
    """Loading that is free without a thread, or that is never hidden; a part beside a simulation without it."""
    plan = plan_of(2, pp=2, schedule="1f1b", batch=8)
    cpu = dataclasses.replace(CLUSTER, device=dataclasses.replace(DEVICE, kind="cpu"))
    read_bytes = 8 * 128 * 16  # of a rank: inputs and targets in int64
    free = price(plan, cpu, IDEAL)
    assert free.parts.data_s == 0.0
    slow = dataclasses.replace(IDEAL, load_bytes_per_s=read_bytes / (free.step_s + 3.0))
    late = price(plan, cpu, slow)
    assert late.step_s == pytest.approx(free.step_s + 3.0)
    assert late.parts.data_s == pytest.approx(3.0)
    assert late.simulate().makespan_s == pytest.approx(late.step_s)
    needed = dataclasses.replace(plan, work=dataclasses.replace(plan.work, prefetch=0))
    found = price(needed, cpu, dataclasses.replace(IDEAL, load_bytes_per_s=read_bytes / 2.0))
    assert found.parts.data_s == pytest.approx(2.0)
    assert found.step_s == pytest.approx(free.step_s + 2.0)  # the last stage reads at the same time
    reads = dataclasses.replace(IDEAL, load_s=8.0, load_bytes_per_s=1e30)
    assert price(needed, cpu, reads).parts.data_s == pytest.approx(8.0)
    ahead = dataclasses.replace(plan, work=dataclasses.replace(plan.work, prefetch=16))
    assert price(ahead, cpu, reads).parts.data_s == pytest.approx(1.0 - free.step_s)  # eight steps are one read


def test_each_micro_batch_is_copied_to_a_device_over_its_bus() -> None:
    """A copy that is forgotten, or that is made once for all micro-batches; vectors that count as tokens."""
    found = price(plan_of(batch=8), CLUSTER, IDEAL)
    assert found.parts.data_s == pytest.approx(8 * 128 * 16 / 1e10)
    vectors = dataclasses.replace(found.plan.model, vocab_size=0)
    assert microbatch_bytes(dataclasses.replace(found.plan, model=vectors)) == 2 * 128 * 256 * 4


CURVE = (CurvePoint(1e3, 1e7), CurvePoint(1e5, 1e9), CurvePoint(1e7, 5e9))
CURVED = Link(1e10, 50e-6, curve=CURVE)


@pytest.mark.parametrize(
    ("message_bytes", "expected"),
    [
        (0.0, 50e-6),  # the latency
        (500.0, 75e-6),  # half of the way to the first point, which takes 100 us
        (1e3, 100e-6),
        (1e4, 100e-6),  # both of its neighbours take as long
        (1e6, math.sqrt(100e-6 * 2e-3)),  # in the middle of logarithms
        (1e7, 2e-3),
        (2e7, 2e-3 + 1e7 / 1e10),  # beyond the last one with the bandwidth of the link
    ],
)
def test_a_message_takes_what_the_curve_of_its_link_says(message_bytes: float, expected: float) -> None:
    """A curve that jumps at a point or at its ends; one that interpolates bandwidths instead of seconds."""
    assert CURVED.seconds(message_bytes) == pytest.approx(expected)
    assert CURVED.shared(4.0).seconds(4 * message_bytes) == pytest.approx(expected)
    assert CURVED.fastest.seconds(message_bytes) <= CURVED.seconds(message_bytes)


def test_collectives_take_the_curve_of_their_messages() -> None:
    """A curve that is read at the payload, and not at the messages of a ring; one that counts latencies twice."""
    inside, between = (dataclasses.replace(CLUSTER, **{name: CURVED}) for name in ("inside", "between"))
    ring = seconds(all_reduce("tp", 4 * 10**6), Mesh(tp=4), 0, inside, IDEAL)[1]
    assert ring == pytest.approx(6 * CURVED.seconds(1e6))  # 2 (n - 1) messages of a quarter
    hop = seconds(all_reduce("tp", 4 * 10**6), Mesh(tp=4), 0, inside, dataclasses.replace(IDEAL, hop_s=1e-3))[1]
    assert hop == pytest.approx(6 * (CURVED.seconds(1e6) + 1e-3))
    three = seconds(all_reduce("tp", 12 * 10**6), Mesh(tp=4), 0, inside, IDEAL, messages=3)[1]
    assert three == pytest.approx(3 * ring)
    # two nodes with two cards for four groups: half of a card, so a message of 1e6 is as long as one of 2e6
    mesh = Mesh(dp_replicate=2, tp=4)
    assert seconds(all_reduce("dp_replicate", 2 * 10**6), mesh, 0, between, IDEAL)[1] == pytest.approx(
        2 * CURVED.seconds(2e6)
    )
    straight = dataclasses.replace(
        CURVED, curve=tuple(CurvePoint(x, x / Link(1e10, 50e-6).seconds(x)) for x in (1e3, 1e9))
    )
    line, same = (dataclasses.replace(CLUSTER, inside=link) for link in (Link(1e10, 50e-6), straight))
    of_both = [seconds(all_reduce("tp", 4 * 10**9), Mesh(tp=4), 0, one, IDEAL)[1] for one in (line, same)]
    assert of_both[0] == pytest.approx(of_both[1])


def test_stages_of_one_node_exchange_inside_of_it_and_others_over_cards() -> None:
    """One time for the messages of all stages: those inside of a node wait as long as those between nodes."""
    cluster = dataclasses.replace(CLUSTER, devices=2, cards=1, inside=Link(1e9), between=Link(1e6))
    plan = plan_of(4, batch=1, pp=4, schedule="1f1b")
    message_bytes = 128 * 256 * 2
    inside_s, between_s = message_bytes / 1e9, message_bytes / (1e6 / 2)  # two devices share a card
    # To the next stage and back, by stage. The last one and the first one are on different nodes, and send nothing.
    expected = [inside_s, 0.0, between_s, inside_s, inside_s, between_s, 0.0, inside_s]
    assert StageCosts(plan, cluster, IDEAL).messages_s == pytest.approx(expected)
    at_once = dataclasses.replace(cluster, inside=Link(1e30), between=Link(1e30))
    found, free = (price(plan, one, IDEAL) for one in (cluster, at_once))
    added_s = sum(expected)  # a micro-batch there and back; then the loss is summed over stages, and the norm
    ends_s = found.parts.between_s - free.parts.between_s
    assert found.step_s - free.step_s == pytest.approx(added_s + ends_s, rel=1e-6)
    assert found.simulate().makespan_s == pytest.approx(found.step_s)


def test_stages_that_do_not_fill_nodes_send_some_messages_between_nodes() -> None:
    """The first rank of a stage speaks for all, though only others leave the node."""
    cluster = dataclasses.replace(CLUSTER, devices=8, cards=8, inside=Link(1e9), between=Link(1e6))
    record = Traffic(Collective.SEND, "pp[0,1]", 1000, "bf16", Verb.SEND_ACTIVATION, Verb.FORWARD, "")
    mesh = Mesh(pp=4, dp_replicate=6)  # ranks 2 to 5 send to the next node
    assert seconds(record, mesh, 0, cluster, IDEAL) == (INSIDE, pytest.approx(1e-6))
    assert transfers([record], mesh, cluster, IDEAL)[0] == ("between", pytest.approx(1e-3))
