"""In: run folders made without training. Out: the report names speed, slow ranks, differences, what is odd; it is safe.
Does not judge beauty: people have looked at the pages. test_report_browser.py drives a browser."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reported import STEP_S, make_run, plan_of
from runs import called

from codescent.base.amounts import of_rate
from codescent.cost.doing import Doing
from codescent.plan.pipeline import SCHEDULES
from codescent.report import findings
from codescent.report.markdown import markdown, plain
from codescent.report.page import page
from codescent.report.run_tables import overview
from codescent.report.sections import MOST_BOXES, report, timelines
from codescent.report.slow import work_of_stages
from codescent.report.summary import summaries
from codescent.report.walk import OTHER, computed, measured
from codescent.results import PARTS, open_run, open_runs, parts_of_ranks
from codescent.study import Kind, open_study
from codescent.study.folder import Definition, StudyFolder
from codescent.study.points import Spec

SCRIPT = "<script>alert(1)</script>"
EVIL = "<script>alert(1)<|script>$x$"
"""A name that a folder can have."""
LARGEST_BYTES = 3_000_000


class Page(HTMLParser):
    """The tags, ids and texts of a page. It has no errors if each tag that is opened is closed in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def said(path: Path, *names: str) -> dict[str, list[str]]:
    """The answers of a report, as sentences with their subject."""
    found = report(open_runs(path / name for name in names)).answers
    return {
        answer.question: [f"{about}: {what}" if about else what for about, what in answer.sentences] for answer in found
    }


def test_a_page_says_what_was_run_and_contains_all_it_shows(tmp_path: Path) -> None:
    make_run(tmp_path / "one", keys="tp = 1\n")
    make_run(tmp_path / "pipeline", 4, "parallel.pp=4", keys="tp = 1\npp = 4\n")
    done = called(tmp_path, "report", "one", "pipeline", "one/", "one-learning-rate.csv", "--out", "a.HTML")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "a.HTML: 2 runs\n")
    text = (tmp_path / "a.HTML").read_text()
    shown = Page(text)
    for part in (
        "llama with 1,377,408 parameters, 8 samples of 128 positions a step, fp32",
        "a processor with 64 cores, device cpu, torch 2.13.0",
        "the pipeline's bubble",
        "parallel.pp",
        "node0 (2 ranks), node1 (2 ranks)",
        "1.00 GiB",
        "Loss over tokens",
    ):
        assert part in shown.text, part
    assert re.search(r"one: 10,2\d0 tokens/s on 1 rank; a step takes 100 ms", shown.text)
    addresses = [
        value for tag, attrs in shown.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")
    ]
    assert all(value and value.startswith(("#", "data:")) for value in addresses), "nothing is fetched"
    names = [attrs["id"] for _, attrs in shown.tags if "id" in attrs]
    assert len(names) == len(set(names)), "ids of figures are unique"
    assert {value[1:] for value in addresses if value and value.startswith("#")} <= set(names)
    assert "url(http" not in text
    assert "@import" not in text
    clips = set(re.findall(r"url\(#(\w+)\)", text))
    assert clips <= set(names)


def test_shares_of_a_peak_have_a_column_if_they_say_something(tmp_path: Path) -> None:
    make_run(tmp_path / "cpu")
    make_run(tmp_path / "gpu", peaks={"mfu_spec": 0.31, "hfu": 0.52})

    def columns(*names: str) -> list[str]:
        return [column.title for column in overview(summaries(open_runs(tmp_path / name for name in names))).columns]

    assert [name for name in columns("cpu") if name in ("mfu", "mfu_spec", "hfu")] == ["mfu"]
    assert [name for name in columns("cpu", "gpu") if name in ("mfu", "mfu_spec", "hfu")] == ["mfu", "mfu_spec", "hfu"]
    row = overview(summaries(open_runs([tmp_path / "gpu"]))).rows[0]
    assert [cell.text for cell in row][8:11] == ["40 %", "31 %", "52 %"]


def test_names_and_configs_are_text_whatever_they_contain(tmp_path: Path) -> None:
    make_run(tmp_path / EVIL, 2, keys=f'tp = 1\n[data]\ncorpus = "{SCRIPT}"\n', environment={"processor": SCRIPT})
    make_run(tmp_path / "b\x1b[31m", 2, slower={1: 1.3}, events=(("error", {"problems": [SCRIPT]}),))
    runs = open_runs(path for path in tmp_path.iterdir())
    text = page(report(runs))
    assert SCRIPT not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x1b" not in text
    Page(text)
    written = markdown(report(runs), {"loss_tokens": "a b.svg"})
    assert "<script>" not in written
    assert "\x1b" not in written
    assert plain("a|b *c* <d> $e$ [f](g)\n# h") == r"a\|b \*c\* \<d\> \$e\$ \[f\](g) \# h"


def test_a_long_name_is_shortened_and_whole_in_its_title(tmp_path: Path) -> None:
    """Fault: a name of 200 letters fills the heading, and pushes the columns of the tables off the page."""
    name = "x" * 100 + '"<y>' + "z" * 96
    make_run(tmp_path / name, 2)
    text = page(report(open_runs([tmp_path / name])))
    shown = Page(re.sub("<pre>.*?</pre>", "", text, flags=re.DOTALL))  # a config is shown as it is
    whole = [attrs for tag, attrs in shown.tags if tag == "span" and attrs.get("title") == name]
    assert len(whole) > 4
    words = [word for text in shown.texts for word in text.split() if word.startswith("xxx")]
    assert len(words) > 4
    assert max(map(len, words)) < 120, max(words, key=len)


@pytest.mark.parametrize("words", [(), ("parallel.dp_shard=4",), ("parallel.tp=4",)])
def test_a_rank_that_others_wait_for_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_run(tmp_path / "even", 4, *words, slower={1: 1.02})
    make_run(tmp_path / "slow", 4, *words, slower={2: 1.3})
    found = said(tmp_path, "even", "slow")
    assert "slow: rank 2 is slow, and the others wait for it." in found["What limits it?"]
    assert found["What is odd?"] == [
        "slow: rank 2 on node1 computes 30 % longer than the other ranks of its part; the others wait 18.0 ms a step "
        "longer than it."
    ]


def test_a_server_counts_as_a_rank_and_has_a_row(tmp_path: Path) -> None:
    make_run(tmp_path / "served", 3, "parallel.servers=1", "train.global_batch_size=8")
    run = open_run(tmp_path / "served")
    assert (run.num_ranks, run.num_workers, len(run.hosts), len(run.peak_memory_bytes)) == (3, 2, 3, 3)
    assert [parts.rank for parts in parts_of_ranks(run)] == [0, 1], "means are over the ranks that compute"
    text = markdown(report([run]))
    assert "on 3 ranks" in text
    assert "dp\\_replicate 2, 1 server" in text
    assert "served, rank 2: server" in text


def test_a_slow_stage_is_compared_by_the_work_that_the_plan_gives_it(tmp_path: Path) -> None:
    """More work is not slow."""
    words = ("parallel.pp=4",)
    plan = plan_of(4, *words)
    work = work_of_stages(plan)
    uneven = {rank: work[rank] / max(work) for rank in range(4)}
    make_run(tmp_path / "planned", 4, *words, slower=uneven)
    make_run(tmp_path / "slow", 4, *words, slower={**uneven, 3: 1.4})
    (one,) = summaries([open_run(tmp_path / "planned")])
    assert findings.stragglers(one) == []
    (two,) = summaries([open_run(tmp_path / "slow")])
    assert [(slow.rank, slow.planned, slow.steady) for slow in findings.stragglers(two)] == [(3, True, True)]


def test_what_is_odd_is_said(tmp_path: Path) -> None:
    losses = [5.0] * 20 + [float("nan"), 4.0]
    make_run(
        tmp_path / "nan", steps=22, losses=losses, events=(("resume", {}), ("slow_steps", {"advice": "look at it"}))
    )
    make_run(tmp_path / "failed", events=(("error", {"problems": ["the disk is full"]}),))
    make_run(tmp_path / "other", losses=[9.0] * 40, environment={"cores": 1, "num_threads": 2})
    make_run(tmp_path / "stopped", events=(("profile", {"steps": [4, 6]}), ("stop", {})))
    odd = said(tmp_path, "nan", "failed", "other", "stopped")["What is odd?"]
    assert odd == [
        "nan: has not ended: it still trains, or was killed. Its 22 steps so far are used.",
        "failed: failed after 40 steps: the disk is full",
        "stopped: was stopped after 40 steps, which are used.",
        "nan: the loss of 1 step was not finite.",
        "nan: was resumed 1 time; times of several machines may be mixed.",
        "nan: look at it",
        "other: 2 threads share 1 core, so its times say little.",
        "stopped: the profiler recorded 3 steps, which makes them longer; they count.",
        *(line for line in odd if "should have the losses of" in line),
    ]
    assert any(line.startswith("other: should have the losses of nan") for line in odd)


def test_a_run_that_computes_much_slower_on_the_same_processor_is_named(tmp_path: Path) -> None:
    """Computing is compared, by core. Waiting for others, another processor, and less than 3 times name no run."""
    others = {"peak_others": {"cores": 64, "used": 60.25, "wanted": 1}}
    alike = {0: 13.0, 1: 13.0}
    make_run(tmp_path / "fast", 2, environment={"peak_others": {"x": 1}})
    make_run(tmp_path / "waits", 2, slower={0: 0.9, 1: 2.9})
    make_run(tmp_path / "slow", 2, slower=alike, environment={"peak_flops_per_s": 1e11, **others})
    make_run(tmp_path / "elsewhere", 2, slower=alike, environment={"processor": "another"})
    make_run(tmp_path / "as slow", 2, slower=alike)
    answers = said(tmp_path, "fast", "waits", "slow", "elsewhere", "as slow")
    plan = plan_of(2)
    fast, slow = (of_rate(plan.flops().total_flops / seconds / 2, "FLOP/s") for seconds in (0.06, 0.78))
    begin = f"computes 13 times slower than fast, the same model on the same processor: {slow} a core, not {fast}."
    assert [line for line in answers["What is odd?"] if "times slower" in line] == [
        f"slow: {begin} Why: products of matrices were 10.0 times slower when it began, while other programs used "
        "60.2 of 64 cores.",
        f"as slow: {begin} Other programs may have used the cores.",
    ]
    (line,) = [line for line in answers["How fast is it?"] if line.startswith("slow:")]
    assert line.endswith("of the measured peak (other programs used 60.2 of 64 cores then).")
    make_run(tmp_path / "none", 2, environment=others, peaks={"mfu": None, "hfu": None})
    (line,) = said(tmp_path, "none")["How fast is it?"]
    assert line.endswith("; mfu is not known, because other programs used 60.2 of 64 cores when the peak was measured.")


def test_one_process_does_not_communicate(tmp_path: Path) -> None:
    """Older versions counted as waiting what one rank does to complete its gradients."""
    make_run(tmp_path / "one", slower={0: 0.5})
    (one,) = summaries([open_run(tmp_path / "one")])
    assert one.shares["communication_s"] == 0
    assert one.shares["other_s"] > 0.2
    assert sum(one.shares.values()) == pytest.approx(1)
    lines = [line for line in markdown(report([one.run])).splitlines() if line.startswith("|")]
    for column in ("communication", "bubble", "sent", "bubble, measured"):
        titles, cells = next(
            (lines[number].split("|"), lines[number + 2].split("|"))
            for number, line in enumerate(lines)
            if f"| {column} |" in line
        )
        assert cells[titles.index(f" {column} ")].strip() == "–", column


def test_what_runs_do_beside_their_steps_is_said(tmp_path: Path) -> None:
    events = [("beside", {"seconds": {"validation": 2.0, "save": 0.5}}), ("beside", {"seconds": {"validation": 1.0}})]
    make_run(tmp_path / "run", 2, events=(*events, ("beside", {"seconds": "damaged"}), ("end", {})))
    text = markdown(report([open_run(tmp_path / "run")]))
    assert "run: 3.50 s beside its steps: validation 3.00 s, save 500 ms." in " ".join(text.split())


def test_one_plan_and_one_config_are_called_the_same(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run")
    make_run(tmp_path / "b" / "run")
    found = report(open_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"]))
    assert found.title == "a/run, b/run"
    text = markdown(found)
    assert "The configs of the 2 runs are the same, except for names and folders." in text
    assert "should have the losses" not in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_measured_step_has_the_seconds_of_each_rank(tmp_path: Path, name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    words = (
        "parallel.pp=2",
        "parallel.dp_replicate=2",
        f"parallel.schedule={name}",
        f"parallel.virtual_stages={chunks}",
    )
    make_run(tmp_path / "run", 4, *words, slower={0: 0.5, 3: 0.6})
    run = open_run(tmp_path / "run")
    parts = parts_of_ranks(run)
    plan = plan_of(4, *words)
    walk = measured(plan, parts)
    for one in parts:
        own = [box for box in walk.boxes if box.rank == one.rank]
        spent = {
            kind: sum(box.length_s for box in own if box.kind.startswith(kind)) for kind in ("forward", "backward")
        }
        assert spent == pytest.approx({"forward": one.forward_s, "backward": one.backward_s})
        ends = [box.start_s + box.length_s for box in own]
        assert max(ends) == pytest.approx(max(one.step_s, walk.step_s) if name == "naive" else max(ends))
        later = sorted(own, key=lambda box: box.start_s)
        assert all(a.start_s + a.length_s <= b.start_s + 1e-9 for a, b in zip(later, later[1:])), "no two at a time"
    numbers = {box.number for box in walk.boxes if box.kind == "forward"}
    assert numbers == set(range(plan.work.num_microbatches))
    planned = computed(plan, 0.05)
    assert {box.rank for box in planned.boxes} == {0, 2}
    forward = [box for box in planned.boxes if box.kind == "forward"]
    assert "pp" in forward[0].what
    assert "KiB" in forward[0].what, "it says the bytes of its message"


@pytest.mark.parametrize(
    "words", [(), ("parallel.tp=2",), ("parallel.dp_shard=2",), ("parallel.dp_shard=2", "parallel.zero_stage=1")]
)
def test_without_a_pipeline_the_boxes_of_a_rank_fill_its_step(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_run(tmp_path / "run", 2, *words, slower={0: 1.1})
    parts = parts_of_ranks(open_run(tmp_path / "run"))
    walk = measured(plan_of(2, *words), parts)
    assert walk.step_s == pytest.approx(STEP_S)
    for one in parts:
        own = [box for box in walk.boxes if box.rank == one.rank]
        waits = sum(box.length_s for box in own if box.kind == Doing.COLLECTIVE)
        late = sum(box.length_s for box in own if box.kind == Doing.RANK)
        rest = sum(box.length_s for box in own if box.kind == OTHER)
        assert waits <= one.communication_s + 1e-9
        assert rest == pytest.approx(one.other_s)
        computing = sum(box.length_s for box in own) - waits - late
        assert computing == pytest.approx(sum(getattr(one, name) for name in PARTS) - one.communication_s)


@pytest.mark.parametrize("rows", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_hundred_runs_make_a_page_of_bounded_size(tmp_path: Path, rows: int) -> None:
    """Every second one is a pipeline, each of another plan, so that all are to be drawn."""
    kinds = [
        make_run(tmp_path / "0", 1, steps=rows, every=rows // 10),
        make_run(tmp_path / "1", 4, "parallel.pp=4", steps=rows, every=rows // 10),
    ]
    folder = tmp_path / "runs"
    for number in range(100):
        shutil.copytree(kinds[number % 2].path, folder / f"run{number:02}")
        plan = json.loads((folder / f"run{number:02}" / "plan.json").read_text())
        plan["work"]["prefetch"] = number
        (folder / f"run{number:02}" / "plan.json").write_text(json.dumps(plan))
    runs = open_runs(sorted(folder.iterdir()))
    found = report(runs)
    text = page(found)
    assert len(text.encode()) < LARGEST_BYTES
    shown = Page(text)
    assert shown.text.count("run99") > 3
    assert (
        sum(len(walk.boxes) for one in timelines(summaries(runs)) if hasattr(one, "walks") for walk in one.walks)
        <= MOST_BOXES
    )
    assert "Left out, because the page would become too large" in shown.text
    assert "Coloured: the lowest and the highest of 100 runs" in shown.text
    assert "The first 40 of 100 runs." in shown.text


def test_markdown_is_printed_or_written_with_links_to_figures(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", 2)
    printed = called(tmp_path, "report", "one", "two", "--markdown")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.startswith("<!-- codescent report -->\n\n# one, two\n")
    assert "| **run** |" not in printed.stdout
    assert "| one | done | 1 rank | 1 | 40 |" in printed.stdout
    assert "![" not in printed.stdout
    (tmp_path / "doc").mkdir()
    words = ("report", "one", "two", "--markdown", "--out", "doc/a.md", "--figures", "figures", "--format", "png")
    for _ in range(2):
        done = called(tmp_path, *words)
        assert (done.returncode, done.stderr) == (0, "")
        text = (tmp_path / "doc" / "a.md").read_text()
        links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
        assert len(links) >= 5
        assert all((tmp_path / "doc" / link).read_bytes().startswith(b"\x89PNG") for link in links)
    assert {"step_two.png", "loss_time.png", "memory_of_ranks.png"} <= {
        path.name for path in (tmp_path / "figures").iterdir()
    }


def test_what_cannot_be_reported_is_refused_in_one_sentence_each(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "other.html").write_text("<p>mine</p>")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss_time.svg").write_text("<svg>mine</svg>")
    (tmp_path / "empty").mkdir()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    for words, lines in (
        (("absent", "empty", "run"), ["absent: no such run folder", "empty: not a run folder"]),
        (("run", "--out", "a.pdf"), ["--out a.pdf: the name must end in .html"]),
        (("run", "--out", "a.html", "--markdown"), ["--out a.html: the name must end in .md"]),
        (("run", "--out", "no/a.html"), ["--out no/a.html: there is no folder no"]),
        (
            ("run", "--out", "other.html"),
            ["--out other.html: is there already, and `codescent report` has not written it"],
        ),
        (("run", "--figures", "other.html"), ["--figures other.html: is a file"]),
        (("run", "--figures", "no/x"), ["--figures no/x: there is no folder"]),
        (
            ("run", "--figures", "figures"),
            ["--figures figures/loss_time.svg: is there already, and `codescent report` has not"],
        ),
        ((), ["give run folders, the folder of a study, or --profile RUN"]),
        (("run", "--window", "2"), ["--window: has no effect without --profile"]),
        (("run", "--format", "png"), ["--format: has no effect without --figures"]),
        (("--profile", "run", "--out", "a.html"), ["--profile: prints what one profile says, without --out"]),
        (("absent", "--out", "a.pdf"), ["--out a.pdf: the name", "absent: no such run folder"]),
    ):
        done = called(tmp_path, "report", *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        found = done.stderr.splitlines()
        assert len(found) == len(lines), found
        assert all(line.startswith(f"error: {part}") for line, part in zip(found, lines)), found
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_run_without_a_step_or_of_an_older_version_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "new", steps=0, losses=[], events=())
    make_run(tmp_path / "short", 2, steps=2, every=1)
    (make_run(tmp_path / "older", 2).path / "ranks.csv").unlink()
    done = called(tmp_path, "report", "new", "short", "older")
    assert (done.returncode, done.stdout) == (0, "report.html: 3 runs\n")
    assert done.stderr == "new: has no row of metrics yet\n"
    shown = Page((tmp_path / "report.html").read_text())
    assert "No step was measured: new." in shown.text
    assert "Without ranks.csv, so that parts of the step are unknown: new, older." in shown.text
    done = called(tmp_path, "report", "new")
    assert done.returncode == 0
    Page((tmp_path / "report.html").read_text())


def test_the_folder_of_a_study_is_reported_with_its_runs(tmp_path: Path) -> None:
    specs = [Spec(f"ranks={n}", f"ranks-{n}", {"ranks": n}, {"parallel.ranks": n}, n) for n in (1, 2, 3)]
    definition = Definition(
        name="scaling", kind=Kind.STRONG, config="default", repeats=2, steps=30, warmup=10, baseline={"ranks": 1},
        axes=["ranks"], specs=specs, refused={"ranks=3": "8 samples for 3 ranks"},
    )  # fmt: skip
    folder = StudyFolder.create(tmp_path / "scaling", definition)
    for spec in specs[:2]:
        for number in (1, 2):
            make_run(folder.run_path(spec, number), spec.ranks, keys=f"dp_replicate = {spec.ranks}\n")
    done = called(tmp_path, "report", "scaling", "--figures", "figures")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("report.html: 4 runs of the study scaling\n")
    shown = Page((tmp_path / "report.html").read_text())
    for part in (
        "A study of strong scaling: the global batch stays the same. 3 points: 2 done, 1 refused.",
        "What does the study say?",
        "ranks=3: refused: 8 samples for 3 ranks",
        "ranks-2/1",
        "Crosses, missing: ranks=3: refused (8 samples for 3 ranks).",
    ):
        assert part in shown.text, part
    assert {"time.svg", "speed_up.svg", "overhead.svg"} <= {path.name for path in (tmp_path / "figures").iterdir()}
    done = called(tmp_path, "report", "scaling", "scaling/ranks-1/1")
    assert (done.returncode, done.stderr) == (
        2,
        "error: scaling: is the folder of a study; give a report one study, or runs\n",
    )
    runs = open_runs(folder.run_path(specs[0], number) for number in (1, 2))
    assert [one.warmup for one in summaries(runs, 2, open_study(folder.path).warmup)] == [10, 10]
    assert [one.warmup for one in summaries(runs)] == [5, 5]
    shutil.rmtree(folder.path / "ranks-1")
    shutil.rmtree(folder.path / "ranks-2")
    done = called(tmp_path, "report", "scaling", "--markdown")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 points: 1 refused, 2 to do." in done.stdout, "a study without a run has a report, too"


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", 2)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else found(name, *more)
    )
    done = called(tmp_path, "report", "run")
    assert (done.returncode, done.stdout) == (0, "report.html: 1 run\n")
    assert done.stderr == 'report.html: has no figures: a picture needs matplotlib: pip install "codescent[plots]"\n'
    shown = Page((tmp_path / "report.html").read_text())
    assert 'This page has no figures: a picture needs matplotlib: pip install "codescent[plots]".' in shown.text
    assert "tokens/s" in shown.text
    assert "rank 1" in shown.text, "the timeline needs no matplotlib"
    done = called(tmp_path, "report", "run", "--figures", "figures")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        'error: --figures figures: a picture needs matplotlib: pip install "codescent[plots]", or leave out'
    )
    assert not (tmp_path / "figures").exists()
