"""In: `codescent measure --from`: real runs of a tiny model on the CPU, wrong words. Out: files with fitted constants.
Does not compare times with anything: a machine has no right ones. test_price.py checks the fit itself."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from forker import Forker
from reported import plan_of
from runs import called, make_project

from codescent.clusters.cluster import Software
from codescent.clusters.files import OWN, load_cluster, software_of
from codescent.planner.bands import band_of, falls, grows
from codescent.planner.fitted import CONSTANTS, MeasuredRun
from codescent.planner.measured import MeasuredStep
from codescent.planner.refit import FittingRun, constants_of, most_of, refit

SIZES = {
    "one": (), "wide": ("model.hidden_dim=64",), "long": ("train.global_batch_size=32",),
    "deep": ("model.num_layers=4", "train.microbatch_size=4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    """Four runs of different sizes, predicted on the laptop."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    for name, words in SIZES.items():
        forker.train(folder, name, 1, "train.num_steps=6", "train.eval_every=0", "run.cluster=laptop", *words)
    return folder


@pytest.fixture
def runs(project: Path, tmp_path: Path) -> Path:
    """A copy of the project: a test may change it."""
    return Path(shutil.copytree(project, tmp_path / "copy"))


def test_constants_come_from_runs_and_the_file_is_read_again(runs: Path) -> None:
    """A file that does not load; a run whose prediction by the file is not what the table says."""
    paths = [f"runs/{name}" for name in SIZES]
    done = called(runs, "measure", "--from", *paths, "--out", "here.toml")
    assert done.returncode == 0, done.stderr
    assert "is of 8 cores with AVX2: the constants then make up for that" in done.stderr
    before, cluster = software_of(load_cluster("laptop")), load_cluster(runs / "here.toml")
    after = software_of(cluster)
    assert after.fitted_on == "4 runs on laptop: one, wide, long and 1 more"
    names = [one.name for one in CONSTANTS if getattr(after, one.name) != getattr(before, one.name)]
    assert 1 <= len(names) <= 3
    for name in (*names, "held_bytes"):
        assert name in done.stdout
        assert cluster.sources[f"software.{OWN}.{name}"].startswith(f"fitted on {after.fitted_on}; before ")
    assert after.band != before.band, "four runs say something of it"
    assert after.band[0] < 1 < after.band[1]
    assert cluster.sources[f"software.{OWN}.band"].startswith("each of the 4 runs")
    assert "# run " in (runs / "here.toml").read_text()
    for words in SIZES.values():
        asked = called(runs, "plan", "run.toml", "--cluster", "here.toml", "--json", *words)
        found = json.loads(asked.stdout)
        assert found["fitted_on"] == after.fitted_on
        assert found["band_s"] == pytest.approx([share * found["step_s"] for share in after.band])


def test_the_error_after_is_that_of_the_file(runs: Path) -> None:
    """Residuals with other constants than the file has, or with their sign turned round."""
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml", "--constants", "host_s")
    assert done.returncode == 0, done.stderr
    assert "as before: fewer than four runs say nothing of it" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("one "))
    found = json.loads(called(runs, "plan", "run.toml", "--cluster", "here.toml", "--json").stdout)["step_s"]
    rows = (runs / "runs/one/metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("step_s")
    measured = float(rows[-1].split(",")[place])  # of six steps five are warm-up
    after = float(line.replace(" %", "%").split()[-2].rstrip("%")) / 100.0
    assert found / measured - 1.0 == pytest.approx(after, abs=0.002)


def test_an_existing_file_stays(runs: Path) -> None:
    (runs / "here.toml").write_text("mine")
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml")
    assert (done.returncode, (runs / "here.toml").read_text()) == (2, "mine")
    assert done.stderr == "error: --out here.toml: is there already; delete it, or give another name\n"


def test_everything_wrong_is_said_at_once(runs: Path) -> None:
    """A first problem that hides the others; a run that was never measured, fitted to."""
    for name in ("metrics.csv", "metrics.jsonl"):
        whole = (runs / "runs/long" / name).read_text()
        (runs / "runs/long" / name).write_text(whole.splitlines()[0] + "\n" if name.endswith("csv") else "")
    facts = json.loads((runs / "runs/wide/environment.json").read_text())
    (runs / "runs/wide/environment.json").write_text(json.dumps({**facts, "processor": "another one"}))
    words = ("--out", "here.txt", "--constants", "hst_s,step_s,microbatch_s,inside_efficiency", "--ranks", "2")
    done = called(runs, "measure", "--from", "runs/one", "runs/wide", "runs/long", "corpus.txt", *words)
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert [line.split(";")[0].split("(")[0].strip() for line in said] == [
        "error: --out here.txt: is a cluster file, whose name ends with .toml",
        "error: --ranks: with --from no rank measures",
        "error: runs/long: has no measured step",
        "error: corpus.txt: is a file, not a run folder",
        "error: --from: these runs are of different devices",
        "error: --constants: 'hst_s' cannot be fitted",
        "error: --constants: 4 constants cannot be fitted to 2 runs: each needs a run",
    ]
    assert "did you mean host_s?" in done.stderr
    assert not (runs / "here.txt").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--cluster", "nix"), 'cluster "nix": no such file'),
        (("--cluster", "h100-sxm"), 'runs/one: train.device = "cpu": the devices of h100-sxm are "cuda"'),
        (("--nccl-tests", "a.txt"), "--nccl-tests: gives links, and --from constants; give one of them"),
        (("--constants", "step_s,host_s"), "--constants: 2 constants cannot be fitted to 1 run: each needs a run"),
    ],
)
def test_what_is_refused(runs: Path, words: tuple[str, ...], problem: str) -> None:
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert not (runs / "here.toml").exists()


def test_steps_that_took_centuries_are_refused(runs: Path) -> None:
    file = runs / "runs/one/metrics.jsonl"
    rows = [json.loads(line) | {"step_s": 1e12} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml")
    assert done.returncode == 2
    assert "runs/one: its median step took 1e+12 s: metrics.jsonl is damaged" in done.stderr
    assert not (runs / "here.toml").exists()


def test_a_plan_without_a_price_is_refused(runs: Path) -> None:
    """A traceback where the parts of a damaged plan are priced."""
    file = runs / "runs/one/plan.json"
    plan = json.loads(file.read_text())
    plan["tensors"][0]["weight_dtype"] = "fp31"
    file.write_text(json.dumps(plan))
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: runs/one/plan.json: damaged: it has no price (KeyError: 'fp31')")
    assert not (runs / "here.toml").exists()


def test_constants_that_no_machine_has_are_refused(runs: Path) -> None:
    """A file that the next command refuses."""
    slow = ("[peaks]\nfp32 = 1e8\n", "[links]\nbus = '10MB/s'\n")
    text = f'base = "laptop"\n{slow[0]}[software.codescent]\nproduct_efficiency = 3.9\nhost_s = 0.0\n'
    (runs / "slow.toml").write_text(text)
    words = ("--out", "here.toml", "--cluster", "slow.toml", "--constants", "product_efficiency")
    done = called(runs, "measure", "--from", "runs/wide", *words)
    assert done.returncode == 2, done.stdout
    assert "error: --from: these runs would need product_efficiency = " in done.stderr
    assert not (runs / "here.toml").exists()


def test_runs_that_name_no_cluster_need_one(runs: Path) -> None:
    config = (runs / "runs/one/config.toml").read_text()
    (runs / "runs/one/config.toml").write_text(config.replace('cluster = "laptop"\n', ""))
    done = called(runs, "measure", "--from", "runs/one", "--out", "here.toml")
    assert done.returncode == 2
    assert "name no cluster (run.cluster); give the one to begin with: --cluster NAME|FILE" in done.stderr


def test_bands_are_of_predictions_without_the_run(tmp_path: Path) -> None:
    """Residuals of the fit itself, which are smaller: the band looks too narrow."""
    cluster, software = load_cluster("laptop", ["node.devices=8"]), Software()
    rng = np.random.default_rng(0)
    found = []
    for at, words in enumerate((("model.num_layers=2",), ("model.num_layers=6",), ("data.seq_len=64",), ())):
        run = MeasuredRun(plan_of(1, *words), cluster, software, 1.0)
        step_s = run.priced(np.zeros(0), ()).step_s * math.exp(0.4 + 0.1 * rng.standard_normal())
        timed = MeasuredRun(run.plan, cluster, software, step_s)
        memory = {"peak_bytes": 2e9 + 1e8 * at, "reserved_bytes": None}
        found.append(FittingRun(str(at), timed, MeasuredStep(step_s, {}, 0, memory)))
    fitted = refit(found, software, constants_of([run.timed for run in found], None))
    inside = np.abs(np.asarray(fitted.fitted.residuals))
    outside = np.abs(np.asarray(fitted.left_out))
    assert outside.mean() > 1.1 * inside.mean()
    assert fitted.software.band == pytest.approx(band_of(list(fitted.left_out), 1.28155 * 0.06), rel=1e-5)
    assert fitted.software.memory_band != software.memory_band
    assert [most_of(runs) for runs in (1, 2, 3, 7, 8, 100)] == [1, 2, 3, 3, 8, 8]


def test_bands_turn_round_for_what_falls() -> None:
    assert grows(2.0, (0.5, 4.0)) == (1.0, 8.0)
    assert falls(2.0, (0.5, 4.0)) == (0.5, 4.0)
    assert band_of([0.1, 0.2, 0.3], 0.05) is None
    low, high = band_of([0.0] * 4, 0.05) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(math.exp(-0.05)), pytest.approx(math.exp(0.05)))
