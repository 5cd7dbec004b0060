"""In: configs with parallel.layout = "auto". Out: which layout a run has, what it says, what a resumed run keeps.
Does not check that a layout is the fastest one: test_search.py does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from forker import Forker
from runs import called, codescent, environment, losses, make_project, train

from codescent.base.errors import UserError
from codescent.build import saved_plan
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.clusters.cluster import Cluster
from codescent.clusters.files import load_cluster, software_of
from codescent.config.effects import value_of
from codescent.config.load import load
from codescent.config.parallel import CHOSEN
from codescent.config.sections import Config
from codescent.cost.price import price
from codescent.cost.stage_memory import Fitting
from codescent.planner.search.auto import Chosen, choose, layout_of
from codescent.planner.search.best import LayoutSearch
from codescent.planner.search.space import DEGREES, MICROBATCH, Space
from codescent.record import RunFolder
from codescent.study.accept import plan_for
from codescent.verbs.prove import Prover

AUTO = ("parallel.layout=auto", "run.cluster=laptop")
NO_REPLICAS = "parallel.dp_replicate=1"
"""Without it two ranks have a layout by default; with it a choice that is forgotten is refused."""
STEPS = ("train.num_steps=4", "train.eval_every=0")
VOCABULARY = 257


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    make_project(folder)
    return folder


def config_of(project: Path, *words: str) -> Config:
    return load(project / "run.toml", words).config


def choose_on_laptop(project: Path, *words: str, ranks: int = 2) -> Chosen:
    return choose(config_of(project, *AUTO, *words), VOCABULARY, ranks, load_cluster("laptop"))


def keys_of(run: RunFolder) -> dict[str, object]:
    """The keys of a layout in the run's own config."""
    saved = load(run.path / "config.toml").config
    return {key: value_of(saved, key) for key in CHOSEN}


def notes_of(run: RunFolder) -> list[str]:
    return [event["text"] for event in run.read_events() if event["kind"] == "note"]


@pytest.fixture(scope="module")
def by_hand(project: Path, forker: Forker) -> RunFolder:
    """A run of two ranks that is given the layout by its keys."""
    words = choose_on_laptop(project, NO_REPLICAS).change.words()
    return forker.train(project, "hand", 2, *words, NO_REPLICAS, *STEPS)


def assert_chosen(project: Path, name: str, said: str, by_hand: RunFolder) -> None:
    run, wanted = RunFolder.open(project / "runs" / name), choose_on_laptop(project, NO_REPLICAS)
    line = f"layout  {wanted.said}\n"
    assert said.count(line) == 1
    assert said.index(line) < said.index("\nmodel   ")
    assert load(run.path / "config.toml").config.parallel.layout == "given"
    assert keys_of(run) == keys_of(by_hand)
    assert {key: keys_of(run)[key] for key in wanted.keys} == dict(wanted.keys)
    assert notes_of(run) == [f"layout: {wanted.said}"]
    assert losses(run) == losses(by_hand)


def test_ranks_train_with_the_layout_that_is_chosen_and_the_run_folder_keeps_it(
    project: Path, by_hand: RunFolder
) -> None:
    """Ranks with another layout than the one that is told, a run folder without it, or a choice that is not told."""
    done = codescent(project, "train", "run.toml", "run.name=parent", *AUTO, NO_REPLICAS, *STEPS, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert_chosen(project, "parent", done.stdout, by_hand)


@pytest.mark.slow
def test_ranks_of_a_launcher_train_with_the_layout_that_the_first_one_chooses(
    project: Path, by_hand: RunFolder
) -> None:
    """Each rank with a layout of its own; a choice that comes after the process groups are made."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "codescent",
    ]
    done = subprocess.run(
        [*command, "train", "run.toml", "run.name=torchrun", *AUTO, NO_REPLICAS, *STEPS],
        cwd=project, env=environment(), text=True, capture_output=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_chosen(project, "torchrun", done.stdout, by_hand)


@pytest.mark.slow
def test_a_run_goes_on_with_its_layout(project: Path) -> None:
    """A resume from the config that chooses again: other sums, other losses. With the word that has chosen gone, only
    the run folder knows the layout. A run folder that chooses again."""
    words, word = ("train.eval_every=0", "optimizer.decay_steps=6"), "train.microbatch_size=2"
    assert choose_on_laptop(project, ranks=1).keys[MICROBATCH] != 2
    first = train(project, "kept", *AUTO, *words, "train.num_steps=4", word)
    layout, plan = keys_of(first), saved_plan(first)
    kept = train(project, "kept", *AUTO, *words, "train.num_steps=6", "--resume")
    assert layout[MICROBATCH] == 2
    assert keys_of(kept) == layout
    assert saved_plan(kept) == plan
    assert notes_of(kept)[-1].endswith("4 micro-batches of 2: as the run began")
    done = called(project, "plan", "runs/kept/config.toml")
    assert "4 micro-batches of 2" in done.stdout
    assert "layout: " not in done.stderr


def test_a_resumed_run_chooses_again_only_where_its_layout_cannot_stay(project: Path) -> None:
    """A layout of two ranks on four; a key of the command that is not obeyed; a choice where none is needed."""
    one = config_of(project, *AUTO, "run.cluster=auto", "parallel.tp=2")
    began = build(changed(one, Chosen({"parallel.dp_replicate": 1, MICROBATCH: 4}, "x").change), VOCABULARY, 2)
    config = config_of(project, *AUTO)
    kept = layout_of(config_of(project, *AUTO, "run.cluster=auto"), VOCABULARY, 2, began)  # it needs no cluster
    assert kept.said == "tp 2, 2 micro-batches of 4: as the run began"
    assert build(changed(config, kept.change), VOCABULARY, 2) == began
    assert "chosen for laptop" in layout_of(config, VOCABULARY, 4, began).said
    other = layout_of(config_of(project, *AUTO, "parallel.cp=2"), VOCABULARY, 2, began)
    assert other.said.startswith("cp 2, ")
    assert "parallel.cp" not in other.keys
    assert layout_of(config_of(project), VOCABULARY, 2, began).change.values == {}


def squeezed(cluster: Cluster, memory_bytes: float) -> Cluster:
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=int(memory_bytes)))


def test_a_layout_that_fits_is_chosen_before_a_faster_one_that_is_tight(project: Path) -> None:
    """A run that ends out of memory because a prediction errs, while another layout would have had room."""
    cluster = load_cluster("laptop")
    words = ("model.hidden_dim=512", "train.global_batch_size=64", "model.seq_len=256")
    config = config_of(project, *AUTO, *words)
    space = Space(config, VOCABULARY, 2, (), "cpu")
    first, *_ = LayoutSearch(space, cluster, software_of(cluster), wanted=1).fastest()
    small = squeezed(cluster, first.memory.total / 0.9)
    chosen = choose(config, VOCABULARY, 2, small)
    plan = build(changed(config, chosen.change), VOCABULARY, 2)
    assert price(plan, small, software_of(small)).verdict is Fitting.FITS
    assert "tight" not in chosen.said
    least = LayoutSearch(space, cluster, software_of(cluster))
    least.admit()
    size = least.least_memory().memory.total
    assert "; tight: " in choose(config, VOCABULARY, 2, squeezed(cluster, size / 0.9)).said
    with pytest.raises(UserError, match=r"no layout of 2 ranks fits: .* Give 4 ranks, on which one does"):
        choose(config, VOCABULARY, 2, squeezed(cluster, size * 0.99))


def test_a_batch_in_tokens_has_the_layout_of_its_samples(project: Path) -> None:
    """Samples that follow from tokens, taken for a key that contradicts them: every layout is refused."""
    of_tokens, of_samples = (
        choose_on_laptop(project, word) for word in ("train.global_batch_tokens=256", "train.global_batch_size=16")
    )
    assert of_tokens == of_samples


REFUSED = {
    "no cluster": (("run.cluster=auto",), 'parallel.layout = "auto": needs run.cluster, such as run.cluster = '),
    "an unknown cluster": (("run.cluster=lapdog",), 'run.cluster: cluster "lapdog": no such file'),
    "other devices": (("run.cluster=h100-sxm",), 'parallel.layout = "auto": train.device = "cpu": the devices of'),
    "servers": (("parallel.servers=1", "parallel.updates=asynchronous"), 'parallel.layout = "auto": ranks that are'),
    "a degree": (("model.num_heads=1", "parallel.tp=2"), 'parallel.layout = "auto": every layout of these'),
    "sizes": (("model.hidden_dim=17", "parallel.ranks=16"), "model.num_heads: 2 heads do not divide"),
    "an unknown value": (("parallel.layout=best",), 'parallel.layout: given "best"; must be "given" or "auto"'),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_nothing_can_be_chosen_for_is_refused_before_a_run_begins(project: Path, what: str) -> None:
    """A run that begins with any layout; a folder of a run that never began."""
    words, said = REFUSED[what]
    for command in (("plan",), ("train", "run.name=refused")):
        verb, *more = command
        done = called(project, verb, "run.toml", "parallel.ranks=2", *AUTO, *words, *more)
        assert done.returncode == 2
        assert done.stderr.count("error: ") == 1, done.stderr
        assert f"error: {said}" in done.stderr.replace("command line: ", ""), done.stderr
    assert not (project / "runs/refused").exists()


def test_a_plan_and_a_script_say_the_layout_that_a_run_would_choose(project: Path) -> None:
    """A plan of the default layout; a key without effect, only because nothing is chosen yet; a winner chosen again."""
    wanted = choose_on_laptop(project, NO_REPLICAS, "parallel.zero_stage=2")
    words = ("run.toml", *AUTO, NO_REPLICAS, "parallel.zero_stage=2")
    done = called(project, "plan", *words, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"layout: {wanted.said}\n"
    degrees = " x ".join(f"{key.partition('.')[2]} {wanted.keys.get(key, 1)}" for key in DEGREES)
    assert f"{degrees} = 2 ranks" in done.stdout
    done = called(project, "launch", *words, "--to", "torchrun", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert f"layout of 2 ranks: {wanted.said}" in done.stderr
    done = called(project, "plan", *words, "--ranks", "2", "--cluster", "laptop", "--search", "--out", "won.toml")
    assert done.returncode == 0, done.stderr
    assert load(project / "won.toml").config.parallel.layout == "given"


def test_each_point_of_a_study_chooses_and_a_proof_chooses_nothing(project: Path) -> None:
    """Points that all have the layout of the first one; layouts of a proof that are all the same one."""
    points = [layout_of(config_of(project, *AUTO), VOCABULARY, ranks).said for ranks in (1, 2)]
    assert plan_for(config_of(project, *AUTO), 2).mesh.world_size == 2
    assert [said.startswith("one rank") for said in points] == [True, False]
    prover = Prover(str(project / "run.toml"), AUTO, 4, "fp32", project)
    assert "parallel.layout=given" in prover.words[prover.words.index("parallel.layout=auto") :]
