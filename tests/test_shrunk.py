"""In: layouts, ranks that are left. Out: the layout with which a run goes on, its batch and what is said.
Loses no rank (tests/faults/ does): a run is resumed on the ranks that are left."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from forker import Forker
from refused import Keys, config_of
from runs import assert_same

from codescent.base.errors import UserError
from codescent.base.nearest import divisors
from codescent.base.refusal import Change
from codescent.build import shrunk as module
from codescent.build.plan import build, trajectory
from codescent.build.shrunk import shrunk
from codescent.config.effects import value_of
from codescent.config.load import load
from codescent.config.sections import Config
from codescent.plan import AXES, Mesh, Plan
from codescent.planner.fits import fits_cluster
from codescent.preflight import vocabulary_of
from codescent.record import RunFolder
from codescent.verbs.prove import layouts_of

VOCABULARY = 11
EIGHT: Keys = {"train.global_batch_size": 8}
SHARDS: Keys = {"parallel.dp_shard": 4}
HYBRID: Keys = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
TP: Keys = {"parallel.tp": 2}
STAGES: Keys = {"parallel.pp": 2, "train.microbatch_size": 2}

TABLE: list[tuple[Keys, int, dict[str, int], int]] = [
    # A batch of 12 can be shared by 3, one of 8 cannot. 3 divides the heads and the sequence: those are not cut finer.
    ({}, 3, {"dp_replicate": 3}, 2),
    ({}, 2, {"dp_replicate": 2}, 3),
    ({}, 1, {}, 3),
    (EIGHT, 3, {"dp_replicate": 2}, 2),
    (SHARDS, 3, {"dp_shard": 3}, 2),
    (SHARDS, 2, {"dp_shard": 2}, 3),
    ({**SHARDS, **EIGHT}, 3, {"dp_shard": 2}, 2),
    (HYBRID, 3, {"dp_shard": 3}, 2),
    (HYBRID, 2, {"dp_shard": 2}, 3),
    ({**HYBRID, **EIGHT}, 3, {"dp_shard": 2}, 2),
    (TP, 3, {"dp_replicate": 3}, 4),
    (TP, 2, {"tp": 2}, 6),
    ({**TP, **EIGHT}, 3, {"tp": 2}, 4),
    (STAGES, 3, {"dp_replicate": 3}, 2),
    (STAGES, 2, {"pp": 2}, 2),
    ({**STAGES, **EIGHT}, 3, {"pp": 2}, 2),
    ({"parallel.cp": 4}, 3, {"cp": 3}, 12),
    ({"parallel.pp": 4, "train.microbatch_size": 3}, 3, {"pp": 3}, 3),
    ({"parallel.pp": 2, "parallel.tp": 2, "train.microbatch_size": 2}, 3, {"dp_replicate": 3}, 2),
    ({"parallel.servers": 1}, 3, {"dp_replicate": 2}, 3),
    ({"train.global_batch_tokens": 12 * 48}, 3, {"dp_replicate": 3}, 2),
]
"""Keys of a run of 4 ranks, the ranks that are left, degrees above one, samples of a micro-batch."""


@pytest.mark.parametrize(("keys", "left", "degrees", "microbatch"), TABLE)
def test_the_largest_layout_then_the_nearest(
    keys: Keys, left: int, degrees: Mapping[str, int], microbatch: int
) -> None:
    """Fault: a run goes on with fewer ranks than it could, with another layout than it had, or with more memory."""
    found = shrunk(config_of(keys), VOCABULARY, 4, left)
    plan = build(found.config, VOCABULARY, found.ranks)
    servers = found.ranks - plan.mesh.world_size
    assert {axis: plan.mesh.degree(axis) for axis in AXES if plan.mesh.degree(axis) > 1} == degrees
    assert (found.ranks, found.spares) == (math.prod(degrees.values()) + servers, left - found.ranks)
    assert plan.work.microbatch_size == microbatch
    assert found.keeps_losses
    assert any(note.startswith(f"{found.spares} rank") for note in found.notes) == (found.spares > 0)


def meshes_of(ranks: int) -> list[Mesh]:
    degrees = itertools.product(divisors(ranks), repeat=len(AXES))
    return [Mesh(*each) for each in degrees if math.prod(each) == ranks]


@cache
def admitted(batch: int, mesh: Mesh) -> bool:
    """Whether some micro-batch makes a plan of this mesh."""
    share, rest = divmod(batch, mesh.dp)
    return not rest and any(_builds(batch, mesh, size) for size in divisors(share))


@cache
def _builds(batch: int, mesh: Mesh, size: int) -> bool:
    degrees = {f"parallel.{axis}": mesh.degree(axis) for axis in AXES}
    keys = {"train.global_batch_size": batch, "train.microbatch_size": size, **degrees}
    try:
        build(config_of(keys), VOCABULARY, mesh.world_size)
    except (UserError, ValueError):
        return False
    return True


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("batch", [8, 12, 30])
def test_every_layout_finds_the_largest_with_its_losses(ranks: int, batch: int) -> None:
    """Fault: a larger layout was left out, or the batch, the samples or a method are others than before."""
    tried = 0
    for mesh in meshes_of(ranks):
        sizes = [size for size in divisors(max(1, batch // mesh.dp)) if _builds(batch, mesh, size)]
        if batch % mesh.dp or not sizes:
            continue
        degrees = {f"parallel.{axis}": mesh.degree(axis) for axis in AXES}
        config = config_of({"train.global_batch_size": batch, "train.microbatch_size": max(sizes), **degrees})
        losses = trajectory(config, VOCABULARY, ranks)
        for left in range(1, ranks):
            found = shrunk(config, VOCABULARY, ranks, left)
            plan = build(found.config, VOCABULARY, found.ranks)
            assert plan.trajectory() == losses
            assert found.ranks == plan.world_size
            assert found.ranks + found.spares == left
            assert all(plan.mesh.degree(axis) <= mesh.degree(axis) for axis in ("tp", "cp", "pp"))
            larger = (one for number in range(found.ranks + 1, left + 1) for one in meshes_of(number))
            no_finer = (one for one in larger if one.tp <= mesh.tp and one.cp <= mesh.cp and one.pp <= mesh.pp)
            assert not [one for one in no_finer if admitted(batch, one)]
            tried += 1
    assert tried > 20


def test_options_of_a_layout_stay_or_have_no_effect() -> None:
    """Fault: with an option such as a schedule, a smaller layout is not found, or is refused when the run goes on."""
    tried = set[str]()
    for case in layouts_of([4, 8]):
        values = {f"parallel.{key}": json.loads(value) if value.isdigit() else value for key, value in case.keys}
        values |= {key: value == "true" for key, value in values.items() if value in ("true", "false")}
        config = config_of({"train.global_batch_size": 48, "train.microbatch_size": 3, **values})
        try:
            losses = trajectory(config, VOCABULARY, case.ranks)
        except UserError:
            continue
        tried.add(str(case))
        for left in range(1, case.ranks):
            found = shrunk(config, VOCABULARY, case.ranks, left)
            assert build(found.config, VOCABULARY, found.ranks).trajectory() == losses
            assert found.keeps_losses
    assert {"dp_shard=4 zero_stage=1", "tp=4 sequence_parallel=false", "pp=4 schedule=zero-bubble"} <= tried
    assert len(tried) > 40


def test_a_run_grows_back_to_what_the_user_asked_for() -> None:
    """Fault: a run takes more ranks than it was given, or does not come back to the layout with which it began."""
    config = config_of({**HYBRID, "parallel.ranks": 4})
    less = shrunk(config, VOCABULARY, 4, 3)
    assert less.config.parallel.ranks == 3
    for left, spares in ((4, 0), (6, 2)):
        found = shrunk(config, VOCABULARY, 4, left)
        assert (found.config, found.ranks, found.spares, found.notes) == (config, 4, spares, ())


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        ({"optimizer.scale_learning_rate": "linear"}, 4),
        ({"optimizer.scale_learning_rate": "sqrt", "train.global_batch_tokens": 12 * 48}, 4),
        ({"optimizer.scale_learning_rate": "linear", "optimizer.scale_ranks": 6}, 6),  # it was resumed on 4 ranks
    ],
)
def test_a_scaled_learning_rate_stays_that_of_the_batch(keys: Keys, counted: int) -> None:
    """Fault: fewer ranks have the same batch, and a lower learning rate."""
    config = config_of(keys)
    found = shrunk(config, VOCABULARY, 4, 3)
    plan = build(found.config, VOCABULARY, 3)
    assert (plan.mesh.dp, plan.scale_ranks) == (3, counted)
    assert plan.trajectory() == trajectory(config, VOCABULARY, 4)
    assert any(f"learning rate stays that of {counted} data-parallel ranks" in note for note in found.notes)


OFTEN: Keys = {"train.eval_every": 4, "checkpoint.every": 4}
METHODS: dict[str, tuple[Keys, int]] = {
    "parallel.average_every = 4": ({"parallel.average_every": 4, **OFTEN}, 3),
    'parallel.gossip = "ring"': ({"parallel.gossip": "ring", **OFTEN}, 3),
    'parallel.wire = "int8"': ({"parallel.wire": "int8"}, 3),
    "parallel.servers = 1": ({"parallel.servers": 1, "parallel.updates": "asynchronous"}, 2),
}


@pytest.mark.parametrize("said", METHODS)
def test_a_method_of_replicas_goes_on_with_fewer_and_says_so(said: str) -> None:
    """Fault: the losses of another method are told as those of the run left alone."""
    keys, replicas = METHODS[said]
    config = config_of(keys)
    found = shrunk(config, VOCABULARY, 4, 3)
    plan = build(found.config, VOCABULARY, found.ranks)
    assert plan.mesh == Mesh(dp_replicate=replicas)
    assert not found.keeps_losses
    differs = {key for key, value in plan.trajectory().items() if value != trajectory(config, VOCABULARY, 4)[key]}
    assert differs == {"parallel.dp_replicate"}
    assert any(note.startswith(f"{said}: the losses depend on the number of replicas") for note in found.notes)


def test_replicas_of_a_method_stay_where_shards_can_go() -> None:
    """Fault: one replica less changes the losses, although one shard less would not."""
    found = shrunk(config_of({**HYBRID, "parallel.average_every": 4, **OFTEN}), VOCABULARY, 4, 3)
    mesh = build(found.config, VOCABULARY, found.ranks).mesh
    assert (mesh.dp_replicate, mesh.dp_shard, found.ranks, found.spares) == (2, 1, 2, 1)
    assert found.keeps_losses


@pytest.mark.parametrize(
    ("keys", "ranks", "left", "why"),
    [
        ({}, 4, 0, "none is left to train"),
        ({"parallel.servers": 1}, 3, 1, "none is left to train, beside 1 rank that must only serve"),
        ({"parallel.dp_shard": 2, "parallel.offload": "all"}, 2, 1, 'on one rank, parallel.offload = "all" with'),
    ],
)
def test_nothing_to_shrink_to(keys: Keys, ranks: int, left: int, why: str) -> None:
    """Fault: a run goes on as something else, or ends with a traceback."""
    with pytest.raises(UserError) as caught:
        shrunk(config_of(keys), VOCABULARY, ranks, left)
    (problem,) = caught.value.problems
    assert problem.startswith(f"no layout of at most {left} rank")
    assert why in problem


def test_what_does_not_fit_is_left_out() -> None:
    """Fault: a rank gets so much of the model that its memory is too small, and the run is lost after all."""
    found = shrunk(config_of(TP), VOCABULARY, 4, 3, lambda plan: plan.mesh.tp == 2)
    assert (found.config.parallel.tp, found.ranks, found.spares) == (2, 2, 1)
    with pytest.raises(UserError, match="do not fit in memory"):
        shrunk(config_of(TP), VOCABULARY, 4, 1, lambda plan: plan.mesh.tp == 2)


LARGE = ("model.preset=auto", "model.num_layers=24", "model.num_heads=16", "model.hidden_dim=2048", "model.seq_len=128")
TEXT = ("data.corpus=synthetic", "data.tokenizer=byte", "model.vocab_size=512", "train.global_batch_size=8")
SHARED = ("parallel.dp_shard=8", "train.device=cuda", "run.cluster=p4000-lab", "train.compile=none")


def test_the_memory_of_a_cluster_is_known() -> None:
    """Fault: 1.2 billion parameters, which take 20 GB, are put onto two devices of 8 GB."""
    config = load("default", ["model.kind=gpt2", *LARGE, *TEXT, *SHARED]).config
    fits = fits_cluster(config)
    assert fits is not None
    assert shrunk(config, 512, 8, 7, fits).ranks == 4
    with pytest.raises(UserError, match="do not fit in memory"):
        shrunk(config, 512, 8, 2, fits)
    assert shrunk(config, 512, 8, 2).ranks == 2
    assert fits_cluster(config_of({})) is None


def test_a_thousand_ranks_need_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each candidate is planned, which takes minutes while the ranks wait."""
    built: list[Plan] = []

    def counted(*words: object) -> Plan:
        built.append(build(*words))  # type: ignore[arg-type]
        return built[-1]

    monkeypatch.setattr(module, "build", counted)
    words = ("parallel.tp=8", "parallel.pp=8", "parallel.dp_shard=16", "train.microbatch_size=1")
    config = load("llama3_70b", [*words, "train.global_batch_size=1024"]).config
    found = shrunk(config, 128256, 1024, 1023)
    assert (found.ranks, found.spares) == (896, 127)
    assert found.config.parallel.model_dump(include={"pp", "dp_shard", "tp"}) == {"pp": 7, "dp_shard": 16, "tp": 8}
    assert len(built) == 1


FP64 = ("train.precision=fp64", "train.global_batch_size=12", "train.eval_every=4", "train.check_every=1")
COMMON = (*FP64, "model.dropout=0.1", "optimizer.decay_steps=30")
CHAINS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "replicas": ((), (4, 3, 4)),
    "replicas, to one": ((), (4, 2, 1, 4)),
    "shards": (("parallel.dp_shard=4",), (4, 2, 4)),
    "hybrid": (("parallel.dp_replicate=2", "parallel.dp_shard=2"), (4, 3, 4)),
    "tp": (("parallel.tp=2",), (4, 3, 4)),
    "pp": (("parallel.pp=2", "train.microbatch_size=2"), (4, 3, 4)),
    "scaled rate": (("optimizer.scale_learning_rate=linear",), (4, 3, 4)),
}
"""Words of a run, and its ranks in each part of it."""
PART = 4


def words_of(config: Config) -> list[str]:
    """The keys that shrinking may change, as words of a command line."""
    keys = [f"parallel.{axis}" for axis in AXES] + ["train.microbatch_size", "optimizer.scale_ranks"]
    return Change({key: value_of(config, key) for key in keys}).words()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHAINS)
def test_the_losses_are_those_of_the_run_left_alone(project: Path, forker: Forker, name: str) -> None:
    """Fault: a plan is called the same trajectory, and a run on it has other samples, masks, rates or sums."""
    words, ranks = CHAINS[name]
    words = (*COMMON, *words)
    began = load(str(project / "run.toml"), words).config
    vocab_size = vocabulary_of(began, ranks[0])
    folder = f"chain {name}"
    for part, left in enumerate(ranks):
        found = shrunk(began, vocab_size, ranks[0], left)
        assert found.ranks == left
        steps = f"train.num_steps={PART * (part + 1)}"
        forker.train(project, folder, left, *words, *words_of(found.config), steps, resume=part > 0)
    alone = forker.train(project, f"{folder}, alone", ranks[0], *words, f"train.num_steps={PART * len(ranks)}")
    assert_same(RunFolder.open(project / "runs" / folder), alone, 1e-9)
