"""In: runs with [profile] on one, two and four ranks. Out: files of every rank; a report that agrees with ranks.csv.
Does not read hand-written traces: test_trace and test_report_profile do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from forker import Forker
from runs import called, make_project, train

from codescent.base.errors import UserError
from codescent.build import saved_plan
from codescent.cost.memory import wire_bytes
from codescent.record import RunFolder
from codescent.report.profile import ProfileReport, profile_report
from codescent.trace.chrome import ChromeTrace
from codescent.trace.operators import file_of as operators_file
from codescent.trace.operators import read_csv
from codescent.trace.ranks import RankTrace, file_of, folder_of

FILES = (("rank", ".json.gz"), ("operators", ".csv"))

WINDOW = ("profile.active=3", "profile.wait=2", "train.num_steps=6", "log.every=3", "train.eval_every=0")
"""Steps 4 to 6 are recorded, and the last rows of ranks.csv are about the same steps."""

UNSEEN_S = 0.002
"""Another program may take the processor between two stamps of one moment: that of the trace, that of ranks.csv."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    make_project(folder)
    return folder


def report_of(run: RunFolder, window: int = 1) -> ProfileReport:
    return profile_report(run.path, saved_plan(run), window)


def assert_agrees(run: RunFolder, report: ProfileReport) -> None:
    rows = [row for row in run.iter_ranks() if row["step"] == report.ranks[0].head.steps[1]]
    assert len(rows) == len(report.ranks)
    for row, one in zip(rows, report.ranks):
        near = 0.03 * row["step_s"] + UNSEEN_S
        assert one.step_s == pytest.approx(row["step_s"], abs=near)
        assert one.waiting_s == pytest.approx(row["exposed_comm_s"], abs=near)
        assert one.data_s == pytest.approx(row["data_s"], abs=near)


def test_every_rank_writes_each_window(project: Path, forker: Forker) -> None:
    words = ("profile.active=2", "profile.wait=1", "profile.warmup=1", "profile.repeat=2", "train.num_steps=9")
    more = ("profile.shapes=true", "profile.memory=true", "train.microbatch_size=2", "train.eval_every=0")
    done = forker.run(project, 2, ("run.name=windows", *words, *more))
    assert done.codes == [0, 0], done.said
    assert "Warning" not in done.said
    run = RunFolder.open(project / "runs" / "windows")
    events = [event for event in run.read_events() if event["kind"] == "profile"]
    assert [(event["step"], event["steps"], event["complete"]) for event in events] == [
        (4, [3, 4], True),
        (8, [7, 8], True),
    ]
    names = [*(f"{name}_{rank:05d}{end}" for name, end in FILES for rank in (0, 1)), "merged.json.gz"]
    folders = [folder_of(run.path, window) for window in (1, 2)]
    assert sorted(path.name for path in folders[0].iterdir()) == sorted([*names, "window_2"])
    assert sorted(path.name for path in folders[1].iterdir()) == sorted(names)
    plan = saved_plan(run)
    for rank in (0, 1):
        trace = RankTrace(file_of(folders[1], rank))
        assert (trace.head.rank, trace.head.world_size, trace.head.window, trace.head.steps) == (rank, 2, 2, (7, 8))
        ranges = Counter(event["name"] for event in trace.events() if event.get("cat") == "user_annotation")
        assert {name: ranges[name] for name in map(str, plan.schedule.programs[0])} == dict.fromkeys(
            map(str, plan.schedule.programs[0]), 2
        )
        assert ranges["step 7"] == ranges["step 8"] == 1
        assert any(row.shapes for row in read_csv(operators_file(folders[1], rank)))
    merged = {event["pid"] // 1000 for event in ChromeTrace(folders[0] / "merged.json.gz").events()}
    assert merged == {0, 1}
    report = report_of(run, 2)
    assert report.windows == [1, 2]
    rows = {(row.kind, row.axis): row for row in report.collectives}
    assert {key: (row.calls, row.planned) for key, row in rows.items()} == {("all_reduce", "dp_replicate"): (2, 2)}
    assert rows["all_reduce", "dp_replicate"].sent_bytes == wire_bytes(plan)
    printed = called(project, "report", "--profile", str(run.path), "--window", "2")
    assert printed.returncode == 0, printed.stderr
    assert "steps 7 to 8 of 2 ranks" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80
    refused = called(project, "report", "--profile", str(run.path), "--window", "3")
    assert (refused.returncode, refused.stderr) == (2, f"error: --window 3: {run.path} has the windows 1, 2\n")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("average_every=5", "outer_optimizer=nesterov", "fragments=2", "overlap_steps=1")),
        (3, ("gossip=ring", "gossip_every=2", "agree_every=10", "wire=int8", "wire_from=3")),
    ],
)
def test_a_window_within_rounds_has_the_calls_that_are_planned_there(
    project: Path, forker: Forker, ranks: int, words: tuple[str, ...]
) -> None:
    """Steps 4 to 8: a fragment leaves after steps 4 and 7, neighbours exchange after 4, 6 and 8."""
    window = ("profile.active=5", "profile.wait=2", "train.num_steps=10", "train.eval_every=0")
    batch = ("train.global_batch_size=12", *(f"parallel.{word}" for word in words))
    run = forker.train(project, f"rounds-{ranks}", ranks, *window, *batch)
    report = report_of(run)
    assert {row.kind for row in report.collectives} == {"all_reduce" if ranks == 2 else "send"}
    assert all(row.calls == row.planned > 0 for row in report.collectives)


def test_a_run_that_stops_within_a_window_writes_it_and_goes_on(project: Path, forker: Forker) -> None:
    words = [*WINDOW, "run.name=stopped", "train.num_steps=9"]
    done = forker.run(project, 2, words, fault="asked_to_stop 5")
    assert "profile of steps 4 to 5" in done.said
    assert "the run ended in the window, whose last step is 6" in done.said
    run = RunFolder.open(project / "runs" / "stopped")
    report = report_of(run)
    assert [(one.head.steps, one.head.complete) for one in report.ranks] == [((4, 5), False)] * 2
    assert "the run ended within the window" in called(project, "report", "--profile", str(run.path)).stdout
    again = forker.run(project, 2, words, resume=True)
    assert again.codes == [0, 0]
    assert "profile of step 6 in" in again.said  # what was left of the window
    last = forker.run(project, 2, [*words, "train.num_steps=12"], resume=True)
    assert last.codes == [0, 0]
    assert "profile" not in last.said


def test_a_run_that_fails_within_a_window_leaves_each_ranks_file(project: Path, forker: Forker) -> None:
    words = [*WINDOW, "run.name=failed", "train.check_every=5", "parallel.dp_replicate=2"]
    done = forker.run(project, 2, words, fault="flip_at_step 4 final_norm.weight")
    assert done.codes == [1, 1], done.said
    assert "each rank has written its own trace, without a merged one" in done.said
    folder = folder_of(project / "runs" / "failed", 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}_{rank:05d}{end}" for name, end in FILES for rank in (0, 1)
    )


def test_a_run_that_ends_before_a_window_says_so(project: Path, forker: Forker) -> None:
    done = forker.run(project, 1, [*WINDOW, "run.name=early"], fault="asked_to_stop 2")
    assert "no profile: the run ended at step 2, before the window" in done.said
    refused = called(project, "report", "--profile", "runs/early")
    assert refused.returncode == 2
    assert "runs/early: has no profile: no runs/early/profile/rank_00000.json.gz; record one with" in refused.stderr


def test_windows_beyond_the_steps_are_refused_with_the_numbers(project: Path) -> None:
    words = ("profile.active=3", "profile.repeat=2", "train.num_steps=17")
    said = "2 x (5 wait + 1 warmup + 3 active) = 18 steps, but the run has 17 (train.num_steps)"
    for verb in ("plan", "train"):
        done = called(project, verb, "run.toml", *words)
        assert done.returncode == 2
        assert said in done.stderr
    epochs = called(project, "train", "run.toml", "train.num_epochs=0.01", "profile.active=3", "--ranks", "2")
    assert epochs.returncode == 2
    assert "(5 wait + 1 warmup + 3 active) = 9 steps, but the run has " in epochs.stderr


def test_traces_of_another_layout_or_without_a_rank_are_refused(project: Path, forker: Forker) -> None:
    run = forker.train(project, "pair", 2, *WINDOW, fault="other_clock")
    heads = [RankTrace(file_of(folder_of(run.path, 1), rank)).head for rank in (0, 1)]
    assert (heads[0].offset_s, heads[0].error_s) == (0.0, 0.0)
    assert 0 < abs(heads[1].offset_s) <= heads[1].error_s  # measured by way of the store; it is the same clock
    assert "the clocks of the ranks were compared to " in called(project, "report", "--profile", str(run.path)).stdout
    forker.train(project, "pair", 1, *WINDOW, "train.num_steps=8", resume=True)
    with pytest.raises(UserError, match="recorded on 2 ranks, but the run was continued on 1"):
        report_of(RunFolder.open(run.path))
    forker.train(project, "pair", 2, *WINDOW, "train.num_steps=9", resume=True)
    file_of(folder_of(run.path, 1), 1).unlink()
    with pytest.raises(UserError, match=r"traces of 1 of 2 ranks are missing: .*rank_00001\.json\.gz"):
        report_of(RunFolder.open(run.path))


LONG = ("profile.active=10", "profile.wait=9", "train.num_steps=20", "log.every=10", "train.eval_every=0")
LARGER = ("model.hidden_dim=128", "model.num_layers=4", "model.num_heads=4", "model.seq_len=64")
FOUR = ("parallel.dp_replicate=4", "parallel.dp_shard=4", "parallel.tp=4", "parallel.cp=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        *((2, (word.replace("4", "2"),)) for word in FOUR),
        (2, ("parallel.pp=2", "train.microbatch_size=2")),
        *((4, (word,)) for word in FOUR),
        (4, ("parallel.pp=4", "train.microbatch_size=2")),
        (4, ("parallel.dp_shard=2", "parallel.tp=2")),
    ],
    ids=lambda value: "-".join(value).replace("parallel.", "") if isinstance(value, tuple) else str(value),
)
def test_what_nothing_hides_is_that_of_ranks_csv(
    project: Path, forker: Forker, ranks: int, words: tuple[str, ...]
) -> None:
    name = "-".join(("run", str(ranks), *words)).replace("parallel.", "").replace("=", "")
    run = forker.train(project, name, ranks, *LONG, *LARGER, *words)
    report = report_of(run)
    assert_agrees(run, report)
    assert [row for row in report.collectives if row.calls != row.planned] == []


@pytest.mark.slow
def test_a_rank_slowed_by_1_3_is_named(project: Path, forker: Forker) -> None:
    words = [*WINDOW, "parallel.dp_replicate=2", "run.name=slow"]
    # Sleep, beside which the computation is short: what other programs take of the cores then matters little.
    assert forker.run(project, 2, words, fault="paced 0.2 1.3").codes == [0, 0]
    printed = called(project, "report", "--profile", "runs/slow").stdout
    assert "Rank 1 is slow: it works 1." in printed
    assert [one.rank for one in report_of(RunFolder.open(project / "runs" / "slow")).slow] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("parallel.dp_replicate=2",), ("parallel.tp=2",)], ids=" ".join)
def test_compiled_blocks_are_recorded_too(project: Path, words: tuple[str, ...]) -> None:
    name = f"compiled-{words[0].partition('.')[2]}"
    run = train(project, name, "--ranks", "2", *LONG, *words, "train.compile=blocks")
    report = report_of(run)
    assert_agrees(run, report)
    printed = called(project, "report", "--profile", str(run.path)).stdout
    assert ("Compiled code waited" in printed) == (words == ("parallel.tp=2",))
