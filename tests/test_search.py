"""In: small spaces of layouts. Out: a search finds what pricing each of them finds; no bound is above a price.
Does not look at the screen: test_plan_search.py does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.base.refusal import Change
from codescent.build.accept import changed
from codescent.build.plan import build, trajectory
from codescent.clusters.files import load_cluster, software_of
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.plan import Mesh, Verb
from codescent.plan.pipeline import SCHEDULES
from codescent.planner.prediction import not_priced
from codescent.planner.search.apart import apart
from codescent.planner.search.best import LayoutSearch
from codescent.planner.search.cuts import forward_runs, in_flight
from codescent.planner.search.found import LayoutChoice
from codescent.planner.search.space import Space

SIZES = ("model.preset=auto", "model.num_layers=4", "model.num_heads=4", "model.hidden_dim=256", "model.seq_len=128")
TEXT = ("data.corpus=synthetic", "data.tokenizer=byte", "model.vocab_size=512", "train.precision=bf16")
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("default", "model.kind=gpt2", *SIZES, *TEXT, "train.global_batch_size=16"),
    "llama": ("default", "model.kind=llama", *SIZES, *TEXT, "model.num_kv_heads=2", "train.global_batch_size=24"),
    "bert": ("bert_squad", "data.corpus=synthetic", "model.vocab_size=512"),
    "adapters": ("llama3_8b_lora", "model.vocab_size=128256"),
    "large": ("llama3_70b",),
}


def config_of(model: str, *words: str, device: str = "cuda") -> Config:
    name, *overrides = MODELS[model]
    return load(name, [*overrides, f"train.device={device}", *words]).config


def search_of(config: Config, ranks: int, cluster: str = "h100-sxm", given: tuple[str, ...] = (), *, wanted: int = 10,
              changes: tuple[str, ...] = ()) -> LayoutSearch:  # fmt: skip
    found = load_cluster(cluster, changes)
    space = Space(config, config.model.vocab_size or 512, ranks, given, found.device.kind)
    return LayoutSearch(space, found, software_of(found), wanted)


def all_of(search: LayoutSearch) -> Iterator[LayoutChoice]:
    """Each admissible layout."""
    for family in search.families.values():
        for frame, factors in family:
            for options in search.factors.all(factors):
                yield LayoutChoice(frame, options)


BATCH, AGAIN = "train.microbatch_size", "parallel.recompute"
FULL = ("device.memory=0.35GB", "software.codescent.held_bytes=0.3e9")
SLOW = ("links.between=1gbit,50us", "node.devices=4")
SMALL = [
    ("gpt2", 4, "p4000-lab", (), (BATCH, AGAIN)),
    ("llama", 8, "h100-sxm", FULL, ("parallel.cp", BATCH, "parallel.sequence_parallel", AGAIN)),
    pytest.param("gpt2", 8, "h100-sxm", SLOW, ("parallel.tp", AGAIN, BATCH), marks=pytest.mark.slow),
]
"""Model, ranks, cluster, what is changed of it, keys that are given. In one of them most layouts do not fit."""


@pytest.mark.parametrize(("model", "ranks", "cluster", "changes", "given"), SMALL)
def test_a_search_finds_what_pricing_every_layout_finds(
    model: str, ranks: int, cluster: str, changes: tuple[str, ...], given: tuple[str, ...]
) -> None:
    """A bound above a price, which rules out one of the ten; a layout that is counted twice, or not at all."""
    config = config_of(model, "train.microbatch_size=2")
    search = search_of(config, ranks, cluster, given, changes=changes)
    found = search.run()
    whole = [search.found(layout) for layout in all_of(search)]
    assert found.counts.admissible == len(whole) > 60
    fit = sorted(one.price.step_s for one in whole if one.over_bytes <= 0)
    assert [one.price.step_s for one in found.best] == pytest.approx(fit[:10])
    assert all(one.over_bytes <= 0 for one in found.best)
    assert found.least.memory.total == min(one.memory.total for one in whole)
    assert found.counts.unfit + found.counts.ruled_out + found.counts.simulated == len(whole)
    assert found.counts.unfit <= len(whole) - len(fit)
    assert found.counts.simulated < len(whole) / 2
    assert (found.first_unfit is not None) == (found.counts.unfit > 0)
    if found.first_unfit is not None:
        assert found.first_unfit.over_bytes > 0


def test_a_search_admits_what_build_admits_and_no_other() -> None:
    """A rule that is asked once for layouts that it tells apart: one is refused later, another is never tried."""
    config = config_of("gpt2", "train.microbatch_size=4")
    keys: dict[str, list[Any]] = {
        "parallel.pp": [1, 2, 4],
        "parallel.tp": [1, 2, 4],
        "parallel.cp": [1, 2, 4],
        "parallel.dp_shard": [1, 2, 4],
        "parallel.zero_stage": [1, 2, 3],
        "parallel.schedule": ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"],
    }
    given = ("train.microbatch_size", "parallel.recompute", "parallel.sequence_parallel", "parallel.context",
             "parallel.offload")  # fmt: skip
    search = search_of(config, 4, given=given)
    search.admit()
    found = {
        tuple(values[key] for key in keys)
        for layout in all_of(search)
        for values in [
            {f"parallel.{axis}": degree for axis, degree in vars(layout.frame.mesh).items()} | dict(layout.options)
        ]
    }
    expected = set()
    for values in itertools.product(*keys.values()):
        change = dict(zip(keys, values, strict=True))
        without = [("parallel.zero_stage", "parallel.dp_shard", 3), ("parallel.schedule", "parallel.pp", "1f1b")]
        if any(change[axis] == 1 and change[key] != usual for key, axis, usual in without):
            continue  # without an effect: the search has the default alone
        virtual = {"parallel.virtual_stages": 2} if change["parallel.schedule"] == "interleaved" else {}
        try:
            other = changed(config, Change({**change, **virtual, "parallel.dp_replicate": None}))
            plan = build(other, 512, 4)
        except (UserError, ValueError):
            continue
        assert trajectory(other, 512, 4) == trajectory(config, 512, 4)
        assert not [*not_priced(plan, search.cluster, "cuda")]
        expected.add(values)
    assert found == expected


SAMPLED = [("gpt2", 16, "a100-40gb-pcie", 20), ("llama", 24, "h100-sxm", 15), ("bert", 8, "polaris", 10),
           ("adapters", 8, "p4000-lab", 8), ("large", 32, "mi300x", 4)]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ranks", "cluster", "number"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] == "large")) for one in SAMPLED],
)
def test_no_bound_is_above_a_price(model: str, ranks: int, cluster: str, number: int) -> None:
    """A change of cost/ that the bounds of a search do not follow."""
    search, chosen = search_of(config_of(model), ranks, cluster), random.Random(0)
    search.admit()
    families = [one for family in search.families.values() for one in family]
    for _ in range(number):
        frame, factors = chosen.choice(families)
        options = {key: value for factor in factors for key, value in chosen.choice(factor).items()}
        layout = LayoutChoice(frame, options)
        found, scheduled = search.found(layout), search.bounds.scheduled(frame, options)
        bounds_s = [search.bounds.least_s(frame, options), scheduled.computing_s,
                    scheduled.busy_s(frame, options), scheduled.step_s(frame, options),
                    search.bounds.step_s(frame, options), search.closest_s(layout)]  # fmt: skip
        assert max(bounds_s) <= found.price.step_s * (1 + 1e-9), (layout, bounds_s, found.price.step_s)
        assert scheduled.kept_bytes <= scheduled.bytes(frame, options) <= found.memory.total * (1 + 1e-9), layout
        assert bounds_s[-1] > 0.5 * found.price.step_s, layout


def test_messages_of_layers_and_of_weights_slow_a_computation_once() -> None:
    """Catches a bound that adds both, of ring attention beside weights that are gathered: it was above the price."""
    search = search_of(config_of("large"), 32, "mi300x")
    search.admit()
    mesh = Mesh(pp=1, dp_shard=2, cp=2, tp=8)
    found = [
        (frame, options)
        for family in search.families.values()
        for frame, factors in family
        if frame.mesh == mesh and frame.microbatch_size == 32
        for options in search.factors.all(factors)
        if (options["parallel.context"], options["parallel.recompute"]) == ("ring", "full")
    ]
    assert found
    for frame, options in found:
        assert search.bounds.step_s(frame, options) < search.found(LayoutChoice(frame, options)).price.step_s


def test_a_key_that_is_given_stays_and_the_losses_too() -> None:
    """A layout that is fast because it does something else."""
    config = config_of("gpt2", "parallel.tp=2", "train.microbatch_size=2")
    given = ("parallel.tp", "train.microbatch_size")
    found = search_of(config, 8, given=given).run()
    for one in found.best:
        assert one.layout.frame.mesh.tp == one.layout.frame.microbatch_size == 2
        assert not set(one.change.values) & set(given)
        assert trajectory(changed(config, one.change), 512, 8) == trajectory(config, 512, 8)


def test_replicas_that_send_less_are_named_where_links_are_slow_alone() -> None:
    """Another trajectory that is offered where nobody waits, or that changes a given key."""
    config = config_of("gpt2", "train.microbatch_size=2")
    given = (AGAIN, "train.microbatch_size")
    slow = search_of(config, 4, "p4000-lab", given, changes=("links.between=10mbit,1ms",)).run()
    methods = [one.method for one in apart(slow, ())]
    assert {"average_every": 16, "wire": "sign"} in methods
    assert all("wire" not in one.method for one in apart(slow, ("parallel.wire",)))
    fast = slow.best[0].price.step_s
    assert all(one.price.step_s < fast for one in apart(slow, ()))
    assert not apart(search_of(config, 4, given=given).run(), ())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe", "zero-bubble"])
def test_passes_in_flight_are_those_of_the_list(schedule: str) -> None:
    """A shortened list that has not reached its fullest moment."""
    chunks = 3 if schedule == "interleaved" else 1
    for stage, microbatches in itertools.product(range(4), (4, 8, 24)):
        held, most = [0] * chunks, 0
        for at in SCHEDULES[schedule](stage, 4, microbatches, chunks):
            if at.verb is not Verb.BACKWARD_WEIGHT:
                held[at.chunk] += 1 if at.verb is Verb.FORWARD else -1
                most = max(most, sum(held))
        assert sum(in_flight(schedule, stage, 4, microbatches, chunks)) == most
        assert all(1 <= one <= microbatches for one in forward_runs(schedule, stage, 4, microbatches, chunks))
