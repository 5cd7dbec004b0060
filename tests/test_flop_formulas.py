"""In: a small config, a study of made runs. Out: FLOPs by each formula are those of its closed form, also in a study.
Does not draw: test_figures_alone.py does. What operators count: test_cost_operators.py."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from reported import make_run, plan_of
from runs import called

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.load import load
from codescent.cost.flop_formulas import flops_by
from codescent.cost.operators import operators_of_depth
from codescent.plan import FlopFormula, Plan
from codescent.plan.activations import CPU, CUDA
from codescent.results import open_run
from codescent.study import Kind, accept
from codescent.study.file import read_study
from codescent.study.folder import Definition, StudyFolder
from codescent.study.points import Spec, specs_of
from codescent.study.repeat import repeat_of
from codescent.study.shipped import find

L, C, T, B, V = 2, 16, 8, 4, 64
SIZES = (
    "model.preset=auto", "model.kind=gpt2", f"model.num_layers={L}", "model.num_heads=2", f"model.hidden_dim={C}",
    f"model.seq_len={T}", f"data.seq_len={T}", f"train.global_batch_size={B}", "train.microbatch_size=2",
)  # fmt: skip


def plan(*words: str, ranks: int = 1) -> Plan:
    return build(load("default", [*SIZES, *words]).config, V, ranks)


def executed(*, recompute: bool = False) -> int:
    """FLOPs of a token, by letters: products, attention, norms, residuals, activations, embeddings, the loss."""
    products = 6 * (12 * C * C * L + C * V)
    attention = 12 * L * C * T
    norms, residuals, activations = 20 * C * (2 * L + 1), 4 * L * C, 25 * 4 * C * L
    again = 2 * 12 * C * C * L + 4 * L * C * T + 8 * C * (2 * L + 1) + 2 * L * C + 10 * 4 * C * L + C
    return products + attention + norms + residuals + activations + 3 * C + 8 * V + recompute * again


def test_each_formula_has_its_closed_form() -> None:
    """Fault: a formula has another factor, or counts what it leaves out."""
    n = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
    small = plan()
    assert flops_by(FlopFormula.DENSE, small) == 6 * n * B * T
    assert flops_by(FlopFormula.ATTENTION, small) == (6 * n + 12 * L * C * T) * B * T
    assert flops_by(FlopFormula.EXECUTED, small) == executed() * B * T


def test_what_is_executed_has_recompute_and_no_layout() -> None:
    """Fault: recompute is left out; ranks, stages or micro-batches are counted twice."""
    again = plan("parallel.recompute=full")
    assert flops_by(FlopFormula.EXECUTED, again) == executed(recompute=True) * B * T
    assert flops_by(FlopFormula.ATTENTION, again) == flops_by(FlopFormula.ATTENTION, plan())
    for words in (("parallel.dp_shard=2",), ("parallel.dp_shard=1", "parallel.pp=2"), ("train.microbatch_size=1",)):
        split = plan(*words, ranks=2 if words[0].startswith("parallel") else 1)
        assert flops_by(FlopFormula.EXECUTED, split) == executed() * B * T, words


def test_parts_of_a_vocabulary_that_does_not_divide_are_counted_one_by_one() -> None:
    """Fault: all ranks are taken for the first one, which has the largest part."""
    split = build(load("default", [*SIZES, "parallel.tp=2"]).config, V - 1, 2)
    depths = [depth for part in split.schedule.parts(0) for depth in part]
    each = [
        sum(
            one.forward_flops + one.backward_flops
            for depth in depths
            for one in operators_of_depth(split, depth, CPU, rank)
        )
        for rank in (0, 1)
    ]
    assert each[0] > each[1]
    assert flops_by(FlopFormula.EXECUTED, split) == sum(each) * split.work.num_microbatches


def make_study(folder: Path) -> StudyFolder:
    """A study of one and two ranks; each made run has an MFU of 0.4."""
    specs = [Spec(f"ranks={n}", f"ranks-{n}", {"ranks": n}, {"parallel.ranks": n}, n) for n in (1, 2)]
    definition = Definition(
        name="scaling", kind=Kind.STRONG, config="default", repeats=1, steps=30, warmup=10, baseline={"ranks": 1},
        axes=["ranks"], specs=specs, refused={},
    )  # fmt: skip
    found = StudyFolder.create(folder / "scaling", definition)
    for spec in specs:
        make_run(found.run_path(spec, 1), spec.ranks, keys=f"dp_replicate = {spec.ranks}\n")
    return found


@pytest.mark.parametrize("formula", FlopFormula)
def test_a_study_counts_by_the_formula_that_is_asked_for(tmp_path: Path, formula: FlopFormula) -> None:
    """Fault: tables, JSON, study.csv or MFU stay at another formula than the one that they name."""
    make_study(tmp_path)
    wanted = [flops_by(formula, plan_of(n)) for n in (1, 2)]
    usual = [flops_by(FlopFormula.ATTENTION, plan_of(n)) for n in (1, 2)]
    done = called(tmp_path, "study", "scaling", "--formula", formula)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"GFLOP/s and MFU count FLOPs by {formula.said}" in done.stdout
    with (tmp_path / "scaling" / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(float(row["flops"]), row["formula"]) for row in rows] == [(flops, formula) for flops in wanted]
    assert [float(row["mfu"]) for row in rows] == pytest.approx([0.4 * a / b for a, b in zip(wanted, usual)])
    found = json.loads(called(tmp_path, "study", "scaling", "--formula", formula, "--json").stdout)
    assert found["formula"] == formula
    points = found["groups"][0]["points"]
    rates = [point["flops_per_s"]["total"]["value"] * point["step_s"]["total"]["value"] for point in points]
    assert rates == pytest.approx(wanted)


def test_without_a_formula_a_study_counts_attention(tmp_path: Path) -> None:
    """Fault: the default moves, and studies of two versions do not compare."""
    make_study(tmp_path)
    assert "count FLOPs by 6N + attention\n" in called(tmp_path, "study", "scaling").stdout
    run = open_run(tmp_path / "scaling" / "ranks-1" / "1")
    assert repeat_of(run, 1, 10, {}).flops == plan_of(1).flops().total_flops


def test_a_run_without_a_plan_has_one_formula(tmp_path: Path) -> None:
    """Fault: FLOPs of metrics are taken for those of another formula."""
    make_study(tmp_path)
    run = open_run(tmp_path / "scaling" / "ranks-1" / "1")
    run.__dict__["plan"] = None  # as of an older version
    assert repeat_of(run, 1, 10, {}).flops == pytest.approx(4e11 * 0.1, rel=0.02)
    with pytest.raises(UserError, match="--formula executed: needs a plan of this version"):
        repeat_of(run, 1, 10, {}, FlopFormula.EXECUTED)


def test_a_plan_without_its_operators_has_no_executed_flops(tmp_path: Path) -> None:
    """Fault: a model of transformers, whose norms and softmax no plan knows, executes fewer FLOPs than 6 N B T."""
    make_study(tmp_path)
    run = open_run(tmp_path / "scaling" / "ranks-1" / "1")
    run.__dict__["plan"] = dataclasses.replace(plan_of(1), operators=())
    assert repeat_of(run, 1, 10, {}).flops == plan_of(1).flops().total_flops
    with pytest.raises(UserError, match="--formula executed: its plan does not say all operators; take 6nbt or"):
        repeat_of(run, 1, 10, {}, FlopFormula.EXECUTED)


def test_a_study_is_refused_before_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: hours of a run are over when its formula turns out to have no operators to count."""
    monkeypatch.setattr(accept, "plan_for", lambda config, ranks: dataclasses.replace(plan_of(1), operators=()))
    study = read_study(find(Path("threads_batch")))
    specs = specs_of(study)[:1]
    accept.check_formula(study, specs, FlopFormula.DENSE)
    with pytest.raises(UserError, match=r"threads_batch: .*: --formula executed: its plan does not say all operators"):
        accept.check_formula(study, specs, FlopFormula.EXECUTED)


def test_on_a_gpu_the_operators_of_its_kernels_count(tmp_path: Path) -> None:
    """Fault: what is executed on a GPU is counted as on a CPU."""
    make_run(tmp_path / "run", environment={"device": "NVIDIA H200"})
    found = repeat_of(open_run(tmp_path / "run"), 1, 10, {}, FlopFormula.EXECUTED)
    assert found.flops == flops_by(FlopFormula.EXECUTED, plan_of(1), CUDA) != flops_by(FlopFormula.EXECUTED, plan_of(1))


def test_formulas_that_have_no_effect_or_are_unknown_are_refused(tmp_path: Path) -> None:
    """Fault: a formula is ignored in silence, or a wrong one ends without the list."""
    make_study(tmp_path)
    done = called(tmp_path, "study", "scaling", "--formula", "8n")
    assert done.returncode == 2
    assert all(formula in done.stderr for formula in FlopFormula), done.stderr
    done = called(tmp_path, "study", "threads_batch", "--list", "--formula", "executed")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --formula: has no effect with --list; give it when the study is evaluated\n",
    )
    done = called(tmp_path, "study", "bert_squad", "--table", "absent.csv", "--formula", "executed")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --formula: has no effect on a table, whose column flops says the FLOPs; leave it out\n",
    )
    done = called(tmp_path, "study", "mup", "--formula", "executed")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --formula: has no effect on a study of widths, which measures activations; leave it out\n",
    )
    done = called(tmp_path, "report", "scaling/ranks-1/1", "absent", "--formula", "executed")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --formula: is for the folder of a study; speeds of runs are by 6n+attention\n"
        "error: absent: no such run folder\n",
    )
    done = called(tmp_path, "report", "scaling", "--formula", "executed", "--figures", "figures")
    assert done.returncode == 0, done.stderr
    assert "(FLOPs: what is executed)" in (tmp_path / "figures" / "mfu.svg").read_text()
