"""In: study files with mistakes, tables, the shipped studies. Out: one clear message each; what tables say; points.
Does not run a point (test_study.py does)."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.results import PARTS
from codescent.study import Kind, PointState, Study
from codescent.study.accept import refusals
from codescent.study.evaluate import Taken, evaluated
from codescent.study.file import read_study
from codescent.study.marks import MarkKind, mark
from codescent.study.points import specs_of
from codescent.study.repeat import Repeat
from codescent.study.result import Group
from codescent.study.shipped import find, shipped_studies
from codescent.study.table import lacking, read_table

PUBLISHED = Path(__file__).resolve().parent.parent / "studies" / "bert_squad_published.csv"

HEAD = '[study]\nname = "s"\nconfig = "run.toml"\nkind = "strong"\nbaseline = { ranks = 1 }\n'
RANKS = "[axes]\nranks = [1, 2]\n"

WRONG = {
    "no baseline": (HEAD.replace("baseline", "# ") + RANKS, "baseline: not given; name the point"),
    "a baseline of another axis": (HEAD.replace("ranks", "batch") + RANKS, "batch is no axis of this study"),
    "a baseline that is no point": (HEAD.replace("= 1", "= 7") + RANKS, "baseline ranks=7: is no point"),
    "an axis that is no key": (HEAD + RANKS + "bach = [1]\n", "axis bach: is no key of a config; did you mean batch?"),
    "an axis of a key elsewhere": (HEAD + RANKS + "compile = [1]\n", "did you mean train.compile?"),
    "a value of the wrong type": (HEAD + RANKS + 'batch = ["x"]\n', "axis batch: given 'x'; must be whole number"),
    "a choice that is none": (
        HEAD + RANKS + 'train.compile = ["blok"]\n',
        'must be "none", "blocks", "model" or "auto"',
    ),
    "a value twice": (HEAD + "[axes]\nranks = [1, 1]\n", "axis ranks: has a value twice"),
    "no value": (HEAD + RANKS + "batch = []\n", "axis batch: has no value"),
    "no list": (HEAD + RANKS + "batch = 4\n", "axis batch: must be a list of values, or a table of choices"),
    "no axis": (HEAD, "no axis: write [axes]"),
    "an unknown section": (HEAD + RANKS + "[sets]\na = 1\n", "[sets]: unknown; did you mean set?"),
    "an unknown key": (HEAD + "repeat = 3\n" + RANKS, "[study] repeat: unknown; did you mean repeats?"),
    "a kind that is none": (HEAD.replace('"strong"', '"stronk"') + RANKS, "must be strong or weak or threads or grid"),
    "a kind without its axis": (HEAD.replace("strong", "threads") + RANKS, "needs the axis threads; or write"),
    "no repeats": (HEAD + "repeats = 0\n" + RANKS, "[study] repeats: given 0; input should be greater than or equal"),
    "a key of the study": (HEAD + "[set]\ntrain.num_steps = 3\n" + RANKS, "the study sets it for each run"),
    "a key of [set] that is none": (HEAD + "[set]\nbach = 3\n" + RANKS, "[set] bach: is no key of a config"),
    "a layout": (HEAD + RANKS + 'layout = ["dp_shard"]\n', "'dp_shard' is not key=value"),
    "a layout's key": (HEAD + RANKS + 'layout = ["dpshard=2"]\n', "parallel.dpshard: is no key"),
    "machines": (HEAD + RANKS + "nodes = [0]\n", "must be a number of machines"),
    "points of unlike axes": (
        HEAD + "[[points]]\nranks = 1\n[[points]]\nbatch = 2\n",
        "every point needs the same axes",
    ),
    "a point twice": (
        HEAD + "[[points]]\nranks = 1\n[[points]]\nranks = 2\n[[points]]\nranks = 1\n",
        "s: ranks=1 is there twice; leave one",
    ),
    "choices with one name": (
        HEAD + RANKS + 'mode = { a = { run.seed = 1 }, "a " = { run.seed = 2 } }\n',
        "s: ranks=1 mode=a is there twice; leave one, or name it differently",
    ),
    "an axis twice": (HEAD + RANKS + "[[points]]\nranks = 1\n", "ranks: is an axis of [axes] already"),
    "too many points": (
        HEAD + f"[axes]\nranks = [1]\nrun.seed = {list(range(10_001))}\n",
        "ranks 1 x run.seed 10001 = 10,001 points; at most 10,000",
    ),
    "no config": (
        HEAD.replace("run.toml", "none.toml") + RANKS,
        "s.toml:3: [study] config: none.toml does not exist, and no shipped config has the name 'none.toml'; shipped",
    ),
    "the name of a shipped config in a folder that is not there": (
        HEAD.replace("run.toml", "nowhere/default.toml") + RANKS,
        "config: nowhere/default.toml does not exist, and no shipped config has the name 'nowhere/default.toml'; did "
        "you mean default?",
    ),
    "no point can exist": (HEAD.replace("= 1", "= 3") + "[axes]\nranks = [3]\n", "no point can exist"),
    "no TOML": ("[study", "not TOML"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_have_one_clear_message(project: Path, what: str) -> None:
    text, message = WRONG[what]
    (project / "s.toml").write_text(text)
    done = called(project, "study", "s.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "study-runs").exists(), "a study that is refused leaves nothing"


def test_a_study_of_many_points_says_what_it_does(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "s.toml").write_text(HEAD + RANKS)
    monkeypatch.setattr("codescent.verbs.study.MANY", 2)
    said = called(project, "study", "s.toml", "--list").stderr
    assert said.startswith("planning 2 points, to find those that cannot exist\n")


def test_a_study_is_named_by_file_folder_or_name(project: Path) -> None:
    (project / "runs").mkdir()
    assert "is a folder, and not one of a study" in called(project, "study", "runs").stderr
    assert "did you mean threads_batch?" in called(project, "study", "thread_batch").stderr
    assert find(Path("nodes")) == shipped_studies()["nodes"]
    both = called(project, "study", "nodes", "--list", "--retry", "failed")
    assert both.returncode == 2
    assert "is not AXIS=VALUE" in called(project, "study", "nodes", "--baseline", "x").stderr


def published(baseline: dict[str, object]) -> Study:
    file = read_study(find(Path("bert_squad")))
    return evaluated("bert_squad", Kind.STRONG, baseline, read_table(PUBLISHED, Kind.STRONG, file.axis_names))


def test_what_it_says_of_the_published_table_of_bert() -> None:
    """Its authors say: 0.94, 1.67, 2.72 against Hugging Face's Trainer; "almost linear"; FSDP 1.30 and 2.92."""
    study = published({"strategy": "HF"})
    points = {(point.axes["strategy"], point.workers): point for group in study.groups for point in group.points}

    def speed_up(strategy: str, ranks: int) -> float:
        found = points[strategy, ranks].speed_up.total
        assert found is not None
        return round(found.value, 2)

    assert [speed_up("ddp", ranks) for ranks in (1, 2, 4)] == [0.94, 1.67, 2.72]
    assert [speed_up("fsdp", ranks) for ranks in (2, 4)] == [1.30, 2.92]
    text = {group.label: said for group, said in zip(study.groups[1:], study.paragraphs, strict=True)}
    assert (
        "2.72 times as fast as the baseline (strategy=HF nodes=1 ranks=1), an efficiency of 68 %"
        in text["strategy=ddp"]
    )
    assert "That is not linear" in text["strategy=ddp"]
    assert "Inconsistent: 4 ranks on 2 nodes: faster than ideal: 2.25 times as fast as 2" in text["strategy=fsdp"]
    assert [key for key, point in points.items() if point.marks] == [("fsdp", 4)]
    share = study.groups[1].fits[0].parameters["serial share"]
    assert share.value == pytest.approx(0.128, abs=0.001)


def test_other_baselines_of_a_table() -> None:
    with pytest.raises(UserError, match="baseline strategy=ddp of strategy=HF: is strategy=ddp nodes=1 ranks=1, "):
        published({"strategy": "ddp"})
    own = published({"strategy": "ddp", "ranks": 1})
    assert own.groups[1].points[2].speed_up.total is not None
    assert own.groups[1].points[2].speed_up.total.value == pytest.approx(13.77 / 4.77)


TABLES = {
    "strategy,nodes,minutes\nddp,1,2\n": "has no column ranks: the study has this axis",
    "strategy,nodes,ranks\nddp,1,2\n": "has no column for the time: step_s, seconds, minutes",
    "strategy,nodes,ranks,step_s,minutes\nddp,1,2,3,4\n": "has several columns for the time (step_s, minutes)",
    "strategy,nodes,ranks,minutes\nddp,1,2,3 min\n": "line 2: minutes: given '3 min'; must be a number",
    "strategy,nodes,ranks,minutes\nddp,1,2,0\n": "line 2: minutes: given '0'; must be a number above 0",
    "strategy,nodes,ranks,minutes\n" + "ddp,1,2,0\n" * 23: "wrong, too: 3 more lines",
    "strategy,nodes,ranks,minutes\n": "has no row",
    "": "has no column strategy",
    "strategy;nodes;ranks;minutes\nddp;1;2;3\n": "has one column, 'strategy;nodes;ranks;minutes': a comma must ",
    "strategy,nodes,ranks,minutes\nddp,1,2,3,5\n": "line 2: 5 cells in 4 columns; a number has a point, not a comma",
    "strategy,nodes,ranks,ranks,minutes\nddp,1,2,2,3\n": "has the column ranks twice; leave one",
    "strategy,nodes,ranks,minutes,minutes\nddp,1,2,3,3\n": "has the column minutes twice; leave one",
    "strategy,nodes,ranks,minutes\n\nddp,1,two,3\n": "line 3: ranks: given 'two'; must be a whole number of at least 1",
    "strategy,nodes,ranks,minutes\nddp,1,0,3\n": "ranks: given 0; must be a whole number of at least 1",
    "strategy,nodes,ranks,minutes\nddp,1,2,1_0\n": "minutes: given '1_0'; must be a number",
    "strategy,nodes,ranks,minutes\nddp,1,2,1e308\n": "minutes: given '1e308'; must be a number above 0 (from",
    "strategy,nodes,ranks,minutes,mfu\nddp,1,2,3,-1\n": "line 2: mfu: given '-1'; must be a number of at least 0",
    "strategy,nodes,ranks,minutes,compute_s\nddp,1,2,3,0\n": "compute_s: given '0'; must be a number above 0",
    "strategy,nodes,ranks,minutes,state\nddp,1,2,3,good\n": "state: given 'good'; must be done, failed, ",
    f"strategy,nodes,ranks,minutes\nddp,1,2,{'0' * 200_000}\n": "cannot be read: field larger than field limit",
}


@pytest.mark.parametrize("text", TABLES, ids=[text[-40:] for text in TABLES])
def test_tables_that_lack_something(project: Path, text: str) -> None:
    (project / "table.csv").write_text(text)
    done = called(project, "study", "bert_squad", "--table", "table.csv")
    assert done.returncode == 2
    assert TABLES[text] in done.stderr


def test_a_table_with_parts_that_are_all_zero_has_no_computation(project: Path) -> None:
    (project / "s.toml").write_text(HEAD + RANKS)
    names, zeros = ",".join(PARTS), ",".join("0" * len(PARTS))
    (project / "t.csv").write_text(f"\ufeffranks,step_s,{names}\r\n1,2,{zeros}\r\n2,1,{zeros}\r\n", newline="")
    done = called(project, "study", "s.toml", "--table", "t.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert "computation  " not in done.stdout


def test_rates_of_an_even_number_of_repeats_agree_with_the_speed_up(project: Path) -> None:
    """0.2 and 0.4 s for 1,000 tokens, as 0.05 and 0.55 s: both have a median of 0.3 s, so 3,333 tokens/s."""
    (project / "s.toml").write_text(HEAD + RANKS)
    lines = "1,0.2,1000,0.3\n1,0.4,1000,0.15\n2,0.05,1000,0.6\n2,0.55,1000,0.05454545\n"
    (project / "t.csv").write_text(f"ranks,step_s,tokens,mfu\n{lines}")
    study = evaluated("s", Kind.STRONG, {"ranks": 1}, read_table(project / "t.csv", Kind.STRONG, ["ranks"]))
    one, two = study.groups[0].points
    for point, mfu in ((one, 0.06 / 0.3), (two, 0.03 / 0.3)):
        assert point.tokens_per_s is not None
        assert point.mfu is not None
        assert point.tokens_per_s.value == pytest.approx(1000 / 0.3)
        assert point.mfu.value == pytest.approx(mfu, rel=1e-6)
    assert two.speed_up.total is not None
    assert two.speed_up.total.value == pytest.approx(1)


def test_the_table_of_a_study_is_a_table(project: Path) -> None:
    """A study.csv of another machine: repeats, states and parts come through."""
    (project / "s.toml").write_text(HEAD + RANKS)
    parts = {"data_s": 0.0, "forward_s": 0.3, "backward_s": 0.6, "communication_s": 0.0, "bubble_s": 0.0}
    names = ",".join([*parts, "optimizer_s", "other_s"])
    lines = [
        f"1,done,1.0,64,{','.join(map(str, parts.values()))},0.1,0.0",
        f"1,done,1.2,64,{','.join(str(1.2 * part) for part in parts.values())},0.12,0.0",
        "2,done,0.75,64,0,0.15,0.3,0.2,0,0.1,0",
        "4,out of memory,,,,,,,,,",
    ]
    (project / "t.csv").write_text(f"ranks,state,step_s,tokens,{names}\n" + "\n".join(lines) + "\n")
    one, two, four = read_table(project / "t.csv", Kind.STRONG, ["ranks"])
    assert [len(point.repeats) for point in (one, two, four)] == [2, 1, 0]
    assert four.state is PointState.OUT_OF_MEMORY
    study = evaluated("s", Kind.STRONG, {"ranks": 1}, [one, two, four])
    assert study.groups[0].points[0].marks == [mark(MarkKind.SPREADS, share="18 %")]
    said, _ = study.paragraphs
    assert "exposed communication 27 %" in said, "2 x 0.2 s of 2 x 0.75 s"
    assert "grew from 0 % to 27 %: the ranks wait for each other" in said
    # The median step, 1.1 s, has 0.99 s of passes: (0.8 x 2 x 0.3 - 0.11) / ((0.99 - 0.8 x 2 x 0.45) / 64) = 88 tokens.
    # Steps of 1.0 and 1.2 s allow 64 to 135 of them: one digit counts.
    assert "80 % at 2 ranks would need about 90 tokens a step instead of 64" in said
    done = called(project, "study", "s.toml", "--table", "t.csv")
    assert done.returncode == 0
    assert max(map(len, done.stdout.split("Amdahl")[0].splitlines())) <= 80


def test_points_that_a_table_lacks_are_said(project: Path) -> None:
    """1 and 1.0 are one value; a point that has failed is there."""
    axes = '[axes]\nranks = [1, 2]\n"optimizer.learning_rate" = [1, 0.5]\n'
    (project / "s.toml").write_text(HEAD + axes)
    rows = ["1,1.0,2,", "1,0.50,2,", "2,1.0,,failed"]
    (project / "t.csv").write_text("ranks,optimizer.learning_rate,step_s,state\n" + "\n".join(rows) + "\n")
    done = called(project, "study", "s.toml", "--table", "t.csv")
    assert done.returncode == 0, done.stderr
    assert "t.csv lacks 1 of 4 points of the study: ranks=2 learning_rate=0.5." in " ".join(done.stdout.split())
    (said,) = lacking([{"a": number} for number in range(9)], [], Path("t.csv"))
    assert said == "t.csv lacks 9 of 9 points of the study: a=0, a=1, a=2, a=3, a=4 and 4 more."
    there = [Taken({"a": "True", "b": 4.0}, None, PointState.FAILED)]
    assert lacking([{"a": True, "b": 4}], there, Path("t.csv")) == []
    assert lacking([{"a": 1, "b": 4}], there, Path("t.csv")) != []


def test_what_never_keeps_the_efficiency_is_said(project: Path) -> None:
    (project / "s.toml").write_text(HEAD + RANKS)
    (project / "t.csv").write_text(
        "ranks,step_s,tokens,data_s,forward_s,backward_s,communication_s,bubble_s,optimizer_s,other_s\n"
        "1,1.0,64,0,0.5,0.5,0,0,0,0\n2,1.0,64,0,0.4,0.5,0.1,0,0,0\n"
    )
    assert "computation alone reaches 56 %" in called(project, "study", "s.toml", "--table", "t.csv").stdout


def test_the_batch_of_a_weak_study(project: Path) -> None:
    """Efficiency with batch B over 2 ranks: (2 x 0.1 + B / 80) / (2 x (0.6 + B / 160)); 0.8 at B = 304."""
    (project / "s.toml").write_text(HEAD.replace("strong", "weak") + RANKS)
    (project / "t.csv").write_text(
        "ranks,step_s,tokens,data_s,forward_s,backward_s,communication_s,bubble_s,optimizer_s,other_s\n"
        "1,1.1,80,0,0.5,0.5,0,0,0.1,0\n2,1.6,160,0,0.5,0.5,0.5,0,0.1,0\n"
    )
    said = called(project, "study", "s.toml", "--table", "t.csv").stdout
    assert "80 % at 2 ranks would need about 304 tokens a step instead of 160" in said
    assert "2 ranks are 1.38 times as fast as 1 rank, an efficiency of 69 %" in said


def test_the_work_of_a_weak_table_without_tokens_grows_with_the_ranks(project: Path) -> None:
    """Three ranks take 1.2 s for three times the work: 2.5 times as fast. Gustafson: 2.5 = s + 3 (1 - s), s = 0.25."""
    (project / "t.csv").write_text("ranks,batch,seconds\n1,4,1.0\n2,4,1.1\n3,4,1.2\n1,8,2.0\n3,8,2.4\n")
    four, eight = evaluated(
        "s", Kind.WEAK, {"ranks": 1}, read_table(project / "t.csv", Kind.WEAK, ["ranks", "batch"])
    ).groups
    third = four.points[-1]
    assert third.speed_up.total is not None
    assert third.speed_up.total.value == pytest.approx(2.5)
    assert third.serial_share is not None
    assert third.serial_share.value == pytest.approx(0.25)
    (gustafson,) = [fit for fit in four.fits if fit.law == "Gustafson"]
    assert gustafson.curve[3] == pytest.approx(2.5, rel=0.03)
    one = evaluated(
        "s", Kind.WEAK, {"ranks": 1, "batch": 4}, read_table(project / "t.csv", Kind.WEAK, ["ranks", "batch"])
    ).groups[1]
    assert eight.points[-1].speed_up == third.speed_up
    assert one.points[0].speed_up.total is not None
    assert one.points[0].speed_up.total.value == pytest.approx(1.0), "twice the batch in twice the time"


def strong(seconds: dict[int, list[float]], *crowded: int) -> Group:
    """The group of a study of ranks. `crowded`: those with more threads than cores."""
    taken = []
    for ranks, times in seconds.items():
        notes = (mark(MarkKind.OVERSUBSCRIBED, threads=4, cores=2),) if ranks in crowded else ()
        repeats = [Repeat(step_s, number, tokens=64.0, notes=notes) for number, step_s in enumerate(times, 1)]
        taken.append(Taken({"ranks": ranks}, ranks, PointState.DONE, repeats=repeats))
    return evaluated("s", Kind.STRONG, {"ranks": 1}, taken).groups[0]


def test_the_interval_of_a_serial_share_contains_it() -> None:
    share = strong({1: [1.0, 1.01, 0.99], 4: [0.4, 0.42, 0.41]}).points[1].serial_share
    assert share is not None
    assert share.low < share.value < share.high


def test_points_without_a_core_for_each_thread_are_no_part_of_a_fit() -> None:
    group = strong({1: [1.0], 2: [0.55], 4: [0.325], 8: [3.0]}, 8)
    assert group.fits[0].parameters["serial share"].value == pytest.approx(0.1)


def test_repeats_that_spread_are_counted_where_each_thread_has_a_core(project: Path) -> None:
    """Passes take 90 % of each step. Of 2 threads one repeat of three was disturbed: the median step is 0.6 s."""
    parts = "data_s,forward_s,backward_s,communication_s,bubble_s,optimizer_s,other_s"
    steps = [(1, 1.0, ""), (1, 1.0, ""), (2, 0.6, ""), (2, 0.6, ""), (2, 0.9, "")]
    steps += [(4, seconds, "oversubscribed: 4 threads on 2 cores") for seconds in (1.0, 2.0)]
    lines = [f"{threads},{s},0,{0.3 * s},{0.6 * s},0,0,{0.1 * s},0,{note}" for threads, s, note in steps]
    (project / "t.csv").write_text(f"threads,step_s,{parts},notes\n" + "\n".join(lines) + "\n")
    table = read_table(project / "t.csv", Kind.THREADS, ["threads"])
    study = evaluated("s", Kind.THREADS, {"threads": 1}, table)
    two = study.groups[0].points[1]
    assert sum(two.parts_s.values()) == pytest.approx(0.6)
    assert two.parts_s["backward_s"] == pytest.approx(0.36)
    said, trust = study.paragraphs
    assert "The share of backward passes in a step stays 60 %: " in said
    assert trust.startswith("1 of 2 points with a core for each thread spread by more than 5 %")


def test_a_grid_compares_the_seconds_of_equal_work(project: Path) -> None:
    rows = [
        f"{batch},{seconds * (1 + 0.02 * n)},{batch * 8}" for batch, seconds in ((4, 1.0), (8, 2.0)) for n in (0, 1)
    ]
    (project / "t.csv").write_text("batch,step_s,tokens\n" + "\n".join(rows) + "\n")
    said = evaluated("s", Kind.GRID, {"batch": 4}, read_table(project / "t.csv", Kind.GRID, ["batch"])).paragraphs
    assert said[0] == (
        "batch 8 instead of 4: no difference is shown, the intervals overlap; the medians say 0 % less time."
    )


COMPILED = [f"data={data} mode=compile profiler={on}" for data in ("memory", "hdf5") for on in ("off", "on")]


@pytest.mark.parametrize(
    ("name", "points", "refused"),
    [
        ("threads_batch", 15, []),
        ("devices_strong", 12, ["tokens=1024 ranks=8"]),
        ("nodes", 9, []),
        ("bert_squad", 6, []),
        ("io_compile_profile", 8, COMPILED),
        ("compile_profile", 6, []),
    ],
)
def test_the_shipped_studies_have_their_points(
    name: str, points: int, refused: list[str], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = read_study(find(Path(name)))
    specs = specs_of(study)
    assert study.study.name == name
    assert len(specs) == points
    found = refusals(study, specs)
    assert list(found) == refused
    reasons = "not a multiple of 2048 = 256 tokens of a sample", 'train.compile = "model": model.kind = "transformer"'
    assert all(any(reason in why for reason in reasons) for why in found.values())
    listed = called(tmp_path, "study", name, "--list")
    assert listed.returncode == 0, listed.stderr
    head, *listing = listed.stdout.splitlines()
    assert head == f"# config: {study.study.config} (shipped)"
    assert sum(line.startswith("#") for line in listing) == points
    torchrun = "for repeat in 1 2 3 4 5; do torchrun --nnodes"
    assert listed.stdout.count(torchrun) == sum(spec.nodes > 1 for spec in specs)


def test_every_shipped_study_is_tested() -> None:
    names = {"mup", "threads_batch", "devices_strong", "nodes", "bert_squad", "io_compile_profile", "compile_profile"}
    assert set(shipped_studies()) == names
