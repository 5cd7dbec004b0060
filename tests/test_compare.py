"""In: run folders, real ones and written ones. Out: what `codescent compare` prints of them, and its exit codes.
Does not check how long anything takes: the seconds of written folders are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from forker import Forker
from runs import called, make_project

from codescent.config.load import load, to_toml
from codescent.preflight import plan_of
from codescent.record import METRICS, RunFolder
from codescent.results import open_run
from codescent.results.compare import PartChange, Times, Way, times
from codescent.results.differences import Alike, Facts, facts, losses
from codescent.results.statistics import Interval
from codescent.results.typical import rows_of
from codescent.verbs.compare import verdict

PARTS_S = {"data_s": 0.001, "forward_s": 0.03, "backward_s": 0.06, "exposed_comm_s": 0.004, "optimizer_s": 0.005}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    make_project(folder)
    return folder


class Writer:
    """Writes run folders whose steps take given seconds."""

    def __init__(self, project: Path) -> None:
        self.project, self.number = project, 0
        self.plans: dict[tuple[str, ...], dict[str, object]] = {}

    def __call__(
        self,
        *words: str,
        steps: int = 60,
        losses: Sequence[float] | None = None,
        ended: str = "end",
        environment: dict[str, object] | None = None,
        seed: int | None = None,
        passes: bool = True,
        memory_bytes: int = 2**28,
        **extra: float,
    ) -> Path:
        """A run of `steps` steps that began after all others, with `extra` seconds in some parts; its folder."""
        self.number += 1
        generator = np.random.default_rng(self.number if seed is None else seed)
        loaded = load(str(self.project / "run.toml"), ["model.vocab_size=257", *words])
        if words not in self.plans:
            self.plans[words] = plan_of(loaded.config, 1).to_json()
        path = self.project / "written" / f"run{self.number}"
        folder = RunFolder.create(path, to_toml(loaded.config), self.plans[words])
        begin = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=self.number)
        whole_s = 0.0
        for step in range(steps):
            factor = generator.normal(1, 0.01)
            parts = {name: factor * (seconds + extra.get(name, 0.0)) for name, seconds in PARTS_S.items()}
            step_s = sum(parts.values())
            whole_s += step_s
            row = {
                **dict.fromkeys(METRICS), "step": step + 1, "tokens": 128 * (step + 1), "step_s": step_s, **parts,
                "train_loss": 5.0 - 0.01 * step if losses is None else losses[step], "other_s": 0.0,
                "compute_s": parts["forward_s"] + parts["backward_s"], "peak_memory_bytes": memory_bytes,
            }  # fmt: skip
            if not passes:
                row |= {"forward_s": None, "backward_s": None, "other_s": None}
            folder.metrics(row)
        events = [("start", 0.0), *([(ended, whole_s)] if ended else [])]
        lines = [
            {"kind": kind, "wall_time": (begin + timedelta(seconds=at)).isoformat(), "monotonic_s": at, "step": steps}
            for kind, at in events
        ]
        (folder.path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder.write_environment({"torch": "2.13", "cores": 2, "peak_flops_per_s": 1e11, **(environment or {})})
        return folder.path


@pytest.fixture(scope="module")
def write(project: Path) -> Writer:
    return Writer(project)


def compare(project: Path, *words: str | Path) -> tuple[int, list[str], str]:
    """The exit code, the lines and the errors of `codescent compare`."""
    done = called(project, "compare", *map(str, words))
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_real_runs_of_one_config_have_equal_losses_config_and_layout(project: Path, forker: Forker) -> None:
    words = ("train.num_steps=30", "log.every=2", "checkpoint.last=false")
    one, other = (forker.train(project, name, 2, *words) for name in ("one", "other"))
    code, lines, errors = compare(project, one.path, other.path, "--fail-above", "999%")
    assert (code, errors) == (0, "")
    assert "losses   equal, bitwise (30 steps)" in " ".join(lines).replace("losses    ", "losses   ")
    for name in ("config", "layout", "model", "software", "data"):
        assert f"{name:8}  same" in lines
    assert any(line.startswith("communication") for line in lines)
    assert all(len(line) <= 80 or line.startswith((" ", "losses", "note")) for line in lines)
    forked = forker.train(project, "seeded", 1, *words, "run.seed=5")
    code, lines, _ = compare(project, one.path, forked.path)
    assert code == 0
    text = "\n".join(lines)
    assert "different trajectory" in text
    assert "first difference at step 1:" in text
    assert "decided by run.seed" in text
    assert "parallel.ranks  2 | 1" in text


def test_a_layout_differs_by_rounding_alone(project: Path, forker: Forker) -> None:
    words = ("train.num_steps=8", "checkpoint.last=false")
    one, two = (forker.train(project, f"ranks{ranks}", ranks, *words) for ranks in (1, 2))
    found = losses([open_run(one.path)], [open_run(two.path)])
    assert found is not None
    assert found.alike is Alike.ROUNDING
    assert 0 < found.first < 1e-5
    assert found.decided == []


def test_a_slower_part_is_the_first_thing_said(project: Path, write: Writer) -> None:
    sides = [[write(), write(optimizer_s=0.01)] for _ in range(5)]
    a, b = ([pair[side] for pair in sides] for side in (0, 1))
    code, lines, _ = compare(project, *a, "--with", *b)
    assert code == 0
    assert lines[0].startswith("B is slower than A: +10.")
    assert lines[1].startswith("Optimizer explains ")
    assert "5 pairs of runs, taken in turns" in "\n".join(lines)
    found = json.loads(called(project, "compare", *map(str, a), "--with", *map(str, b), "--json").stdout)
    assert " ".join(found["verdict"]) in " ".join(lines)
    times_of = found["times"]
    assert (times_of["way"], times_of["samples"], times_of["cause"]) == ("pairs", {"A": 5, "B": 5}, "optimizer_s")
    step = times_of["step"]
    assert step["shown"]
    assert step["share"]["low"] < step["share"]["value"] < step["share"]["high"]
    assert f"{1e3 * step['a_s']:.3f}" in "\n".join(lines)
    assert found["differences"]["config"] == {}
    assert found["losses"]["alike"] == "equal, bitwise"
    assert found["fail_above"] is None
    code, lines, _ = compare(project, *b, "--with", *a)
    assert lines[0].startswith("B is faster than A: -")


def test_the_first_lines_are_no_wider_than_a_terminal() -> None:
    step = PartChange("step_s", 0.01, 0.02, Interval(1.131, 1.001, 1.262))
    waits = PartChange("communication_s", 0.005, 0.015, Interval(1.1309, 1.0035, 1.2583))
    found = Times(Way.BLOCKS, False, (6, 6), 5, 1.0, step, step, [waits], (1, 1))
    lines = list(verdict(found, Facts({"model.dim": (8, 16)}, {}, {}, {}, {}, {}, {}), 2))
    assert " ".join(lines) == (
        "The models differ. B is slower than A: +113 % a step (+100 to +126 %). "
        "Communication, on rank 1, explains 100 %: +113 % of A's step (+100 to +126 %)."
    )
    assert max(map(len, lines)) <= 80
    exact = PartChange("communication_s", 0.005, 0.015, Interval(-0.9876, -0.9123, -0.9999))
    lines = list(verdict(replace(found, parts=[exact], step=exact), Facts({}, {}, {}, {}, {}, {}, {}), 2))
    assert "on rank 1, explains 100 %: -98.8 % of A's step" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_continuous_integration_fails_only_where_the_whole_interval_is_above(project: Path, write: Writer) -> None:
    sides = [[write(), write(forward_s=0.01)] for _ in range(5)]
    a, b = ([pair[side] for pair in sides] for side in (0, 1))
    code, lines, _ = compare(project, *a, "--with", *b, "--fail-above", "3%")
    assert code == 1
    assert lines[-1] == "--fail-above: failed: B is slower by more than 3 %, with all of the interval"
    done = called(project, "compare", *map(str, a), "--with", *map(str, b), "--fail-above", "3%", "--json")
    judged = json.loads(done.stdout)["fail_above"]
    assert (done.returncode, judged) == (1, {"bound": 0.03, "failed": True, "said": lines[-1]})
    code, lines, _ = compare(project, *a, "--with", *b, "--fail-above", "20 %")
    assert code == 0
    assert lines[-1] == "--fail-above: passed: B is not slower by more than 20 %"
    code, lines, _ = compare(project, *a[:3], "--with", *b[:3], "--fail-above", "10%")
    assert code == 0
    assert lines[-1].startswith("--fail-above: passed, but the interval reaches above 10 %")
    assert compare(project, *b, "--with", *a, "--fail-above", "0%")[0] == 0


def test_one_run_each_is_compared_by_blocks_and_says_what_that_leaves_out(project: Path, write: Writer) -> None:
    _, lines, _ = compare(project, write(), write())
    text = "\n".join(lines)
    assert lines[0].startswith("No difference shown: ")
    assert "6 blocks of steps of A, 6 of B" in text
    assert "without the first 6 steps of each run (--warmup)" in text
    assert "take at least 5 of each, in turns or side by side" in text


def test_too_few_steps_have_no_interval(project: Path, write: Writer) -> None:
    a, b = write(steps=12), write(steps=12)
    code, lines, _ = compare(project, a, b)
    assert code == 0
    assert lines[0].startswith("Too few steps to tell: ")
    code, _, errors = compare(project, a, b, "--fail-above", "3%")
    assert code == 2
    assert "--fail-above: 1 sample after a warm-up of 5 steps allows no interval" in errors
    code, _, errors = compare(project, a, b, "--warmup", "12")
    assert code == 2
    assert errors.count("no step is left after a warm-up of 12: lower --warmup") == 2


def test_what_differs_is_listed_by_group(project: Path, write: Writer) -> None:
    codes = [{"model.kind": {"name": "mine:KIND", "sha256": sha256}} for sha256 in ("a1", "b2")]
    a = write(environment={"torch": "2.13", "cores": 2, "load": 1.0, "own_code": codes[0]})
    b = write(
        "train.z_loss=0.1",
        "parallel.recompute='full'",
        environment={"torch": "2.14", "cores": 4, "peak_flops_per_s": 2e11, "load": 3.0, "own_code": codes[1]},
        memory_bytes=2**29,
    )
    _, lines, _ = compare(project, a, b)
    text = "\n".join(lines)
    for row in (
        "config    train.z_loss  0.0 | 0.1",
        "layout    parallel.recompute  none | full",
        "software  torch  2.13 | 2.14",
        "code of model.kind  a1 | b2",
        "hardware  cores  2 | 4",
        "memory    peak 256 MiB | 512 MiB: +100 %",
        "products of matrices ran at 100 | 200 GFLOP/s",
        "load of the machine when the runs began: 1.0 | 3.0",
    ):
        assert row in text, text
    assert "model     same" in text


def test_other_models_and_unfinished_runs_are_said_and_compared(project: Path, write: Writer) -> None:
    a, b = write(ended=""), write("model.num_layers=4", ended="stop")
    RunFolder.open(b).event("profile", step=60, steps=[10, 14])
    code, lines, _ = compare(project, a, b)
    text = "\n".join(lines)
    assert code == 0
    assert lines[0].startswith("The models differ. ")
    assert "model.num_layers  2 | 4" in text
    assert f"A: {a.name} is not ended (step 60): the steps that it has are used" in text
    assert f"B: {b.name} is stopped (step 60)" in text
    assert f"B: {b.name}: a profiler recorded 5 steps, which makes them longer" in text


def test_losses_are_compared_step_by_step(project: Path, write: Writer) -> None:
    base = [5.0 - 0.01 * step for step in range(20)]
    rounded = [loss * (1 + 1e-7 * (step > 3)) for step, loss in enumerate(base)]
    other = [loss * (1 + 1e-3 * (step > 3)) for step, loss in enumerate(base)]
    broken = [loss if step != 7 else float("nan") for step, loss in enumerate(base)]
    a, b, c, d = (open_run(write(steps=20, losses=of_run)) for of_run in (base, rounded, other, broken))
    same = losses([a], [a])
    assert same is not None
    assert (same.alike, same.first_step, same.steps) == (Alike.BITWISE, 0, 20)
    found = losses([a], [b])
    assert found is not None
    assert (found.alike, found.first_step) == (Alike.ROUNDING, 5)
    assert found.first == pytest.approx(1e-7, rel=1e-3)
    found = losses([a, b], [c, c])
    assert found is not None
    assert (found.alike, found.first_step, found.repeats) == (Alike.DIFFERENT, 5, {"A": 5})
    found = losses([a], [d])
    assert found is not None
    assert (found.alike, found.first_step, found.worst) == (Alike.DIFFERENT, 8, float("inf"))
    parting = [loss * (1 + 1e-7 * 4**step) for step, loss in enumerate(base)]
    found = losses([a], [open_run(write(steps=20, losses=parting))])
    assert found is not None
    assert found.first < 1e-6
    assert (found.alike, found.worst_step) == (Alike.DIFFERENT, 20)


def test_a_step_of_more_tokens_may_take_longer(write: Writer) -> None:
    one, other = (open_run(write(seed=1)) for _ in range(2))
    other.columns["tokens"][:] *= 2
    found = times([one], [other])
    assert found.scale == 0.5
    assert found.step.share.value == pytest.approx(-0.5)


def test_folders_of_older_versions_have_one_part_for_both_passes(project: Path, write: Writer) -> None:
    code, lines, _ = compare(project, write(passes=False), write(backward_s=0.02))
    assert code == 0
    assert any(line.startswith("compute ") for line in lines)
    assert not any(line.startswith("forward") for line in lines)
    assert lines[1].startswith("Compute explains ")


def test_folders_of_older_versions_compiled_what_their_config_names(write: Writer) -> None:
    old = open_run(write("train.compile=none"))
    for choice, apart in (("none", False), ("blocks", True)):
        new = open_run(write(environment={"compile": {"choice": choice}}))
        assert ("compile.choice" in facts([old], [new]).software) == apart


def test_warm_up_steps_are_left_out_after_a_continuation_too(write: Writer) -> None:
    path = write(steps=40)
    events = path / "events.jsonl"
    start, end = events.read_text().splitlines()
    resume = json.dumps({**json.loads(start), "kind": "resume", "step": 20})
    events.write_text("\n".join([start, resume, end]) + "\n")
    rows = rows_of(open_run(path), warmup=5)
    assert len(rows) == 40 - 2 * 5
    assert (rows.every_rank, rows.pace) == (True, 0)
    seconds = open_run(path).columns["step_s"]
    kept = [*range(5, 20), *range(25, 40)]
    np.testing.assert_allclose(rows.step_s, seconds[kept])
    assert rows.at[-1] - rows.begin == pytest.approx(seconds.sum())


def test_the_rows_of_every_rank_are_used_where_there_are_enough(project: Path, forker: Forker) -> None:
    words = ("parallel.pp=2", "train.microbatch_size=2", "train.num_steps=26", "checkpoint.last=false")
    run = open_run(forker.train(project, "every2", 2, *words, "log.every=2").path)
    rows = rows_of(run, warmup=2)
    assert (len(rows), rows.every_rank, rows.seconds.shape) == (12, True, (12, 2, 6))
    typical = rows.typical()
    assert 0 <= typical["bubble_s"] <= rows.seconds[:, rows.pace, 3].max()
    assert sum(typical.values()) == pytest.approx(np.sort(rows.step_s)[3:9].mean(), rel=0.05)
    assert rows.pace == int(np.argmin(rows.waiting))
    few = rows_of(run, warmup=4)
    assert (len(few), few.every_rank, few.seconds.shape) == (22, False, (22, 1, 6))
    assert few.typical()["bubble_s"] == 0


def test_wrong_words_are_one_message_each(project: Path, write: Writer, tmp_path: Path) -> None:
    a = write()
    empty = write(steps=0)
    for words, expected in (
        ((a,), "1 run folder: give two, A and B"),
        ((a, a, a), "3 run folders: give two"),
        ((a, a), "given twice"),
        ((a, tmp_path / "none", "--with", tmp_path), "no such run folder"),
        ((a, tmp_path / "none", "--with", tmp_path), "not a run folder"),
        ((a, empty), "has no row of metrics"),
        ((a, empty, "--fail-above", "3"), "--fail-above 3: is not a percentage of at least 0; give one such as 3%"),
        ((a, empty, "--warmup", "-1"), "--warmup"),
    ):
        code, lines, errors = compare(project, *words)
        assert (code, lines) == (2, []), errors
        assert expected in errors
