"""In: lessons of `codescent explain`. Out: they fit in a terminal, and their numbers are those of plans and of papers.
Does not draw: test_explain_page.py does. Languages: test_explain_languages.py."""

from __future__ import annotations

import re
from fractions import Fraction
from math import cos, pi
from pathlib import Path

import pytest
from lessons import OF_REAL_RANKS, WITHOUT_RANKS, asked, grid, lanes, lesson, table, text
from runs import called, make_project

from codescent.base import pages
from codescent.base.amounts import of_bytes, of_share
from codescent.cost.flop_formulas import executed_flops, formulas, sizes_of
from codescent.explain.content import Arrow, Bar, Chart, Lesson, LessonFrame, NodeNetwork, RankLanes, Tone
from codescent.explain.language import language
from codescent.explain.of_study import lesson_of_study
from codescent.explain.text import WIDTH
from codescent.explain.topics import TOPICS
from codescent.explain.topics.gossip import distances
from codescent.explain.topics.memory import EXAMPLE, RULE
from codescent.plan.state import state_of_rank
from codescent.strategies.gossip_graphs import Graph
from codescent.study.evaluate import Taken, evaluated
from codescent.study.marks import MarkKind, mark
from codescent.study.repeat import Repeat
from codescent.study.result import Kind, PointState
from codescent.study.table import read_table
from codescent.verbs.arguments import parse

PUBLISHED = Path(__file__).resolve().parent.parent / "studies" / "bert_squad_published.csv"
OWN = {
    "zero": ("gpt2_124m", "--ranks", "8", "parallel.dp_shard=8"),
    "tensor": ("llama3_8b", "--ranks", "8", "parallel.dp_shard=1", "parallel.tp=8"),
    "memory": ("bert_squad",),
    "pram": ("synthetic_transformer",),
    "data-parallel": ("reverse_lines", "--ranks", "2"),
    "pipeline": ("llama3_8b", "--ranks", "8", "parallel.dp_shard=1", "parallel.pp=8", "train.microbatch_size=1"),
    "hybrid": ("gpt2_124m", "--ranks", "32", "parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=8"),
}
"""Configs of the package for which a lesson is tried too: another model, another task, more ranks."""


@pytest.mark.parametrize("lang", ["en", "es"])
@pytest.mark.parametrize("topic", WITHOUT_RANKS)
def test_a_lesson_fits_in_a_terminal(topic: str, lang: str) -> None:
    """Fault: a lesson cannot be made of its own example, a line is wider than 80 columns, or a figure is empty."""
    one = lesson(topic, lang=lang)
    lines = text(one, lang)
    assert [line for line in lines if len(line) > WIDTH] == []
    assert one.topic == topic
    assert one.frames
    assert len({frame.title for frame in one.frames}) == len(one.frames)
    for frame in one.frames:
        for figure in frame.figures:
            if isinstance(figure, RankLanes):
                drawn = {bar.tone for bar in figure.bars}
                assert drawn, "a timeline in which nothing happens"
                assert {tone for tone, _ in figure.legend} <= drawn, "the legend has what is not drawn"


@pytest.mark.parametrize("topic", OWN)
def test_a_lesson_is_about_the_config_that_is_given(topic: str) -> None:
    """Fault: a lesson fits its own example alone: many ranks, grouped heads, an encoder, a source and a target."""
    one = lesson(topic, *OWN[topic])
    assert [line for line in text(one) if len(line) > WIDTH] == []
    plan = asked(topic, *OWN[topic]).plan
    assert one.config.startswith(f"{plan.model.kind}: num_layers={plan.model.num_layers}, ")
    assert f"{plan.num_parameters:,} parameters" in one.config


@pytest.mark.parametrize("topic", WITHOUT_RANKS)
def test_commands_that_show_more_are_there(topic: str) -> None:
    """Fault: a lesson ends with a command, a page or a topic that does not exist."""
    for command, _ in lesson(topic).see:
        program, *words = command.split()
        assert program == "codescent"
        arguments = parse(words)
        if words[0] == "docs":
            assert words[1] in pages.pages_in(Path(__file__).resolve().parent.parent)
        if words[0] == "explain":
            assert arguments.topic in TOPICS


def test_zero_shows_what_the_plan_of_each_stage_holds() -> None:
    """Fault: a share of the grid, or a sum below it, is not that of the plan; ranks hold too much or too little."""
    one, given = lesson("zero"), asked("zero")
    whole = 4 * given.plan.num_parameters  # fp32
    for stage in range(4):
        layout = {"parallel.dp_shard": 3, "parallel.zero_stage": stage} if stage else {"parallel.dp_replicate": 3}
        plan = given.other({"parallel.dp_replicate": 1, "parallel.dp_shard": 1, **layout})
        divided = {"W": stage == 3, "G": stage > 0, "O": stage > 0}
        for _, cells in grid(one.frames[stage]).rows:
            letters = {cell.text.split()[0] for cell in cells}
            (letter,) = letters
            assert divided[letter] or {cell.text for cell in cells} == {f"{letter} 1"}
            assert sum(Fraction(cell.text.split()[1]) for cell in cells) == (1 if divided[letter] else 3)
        state = state_of_rank(plan, 0)
        assert of_bytes(state.total_bytes) in one.frames[stage].after[0]
    rows = table(one.frames[4]).rows
    assert rows[0][1:] == [*map(of_bytes, (whole, whole, 2 * whole, 4 * whole, 2 * (2 / 3) * whole))]
    assert [row[5] for row in rows[:3]] == [rows[0][5]] * 3


def test_a_step_of_zero_gathers_and_drops() -> None:
    """Fault: the step of stage 3 leaves whole weights or gradients on a rank, or loses its part."""
    held = []
    for frame in lesson("zero").frames[5:]:
        rows = grid(frame).rows
        held.append("".join("-" if not cells[0].text else "w" if cells[0].text.endswith(" 1") else "p"
                            for _, cells in rows))  # fmt: skip
    assert held == ["w-p", "p-p", "w-p", "wwp", "ppp", "p-p"]


def test_formulas_of_flops_have_the_sizes_of_gpt2() -> None:
    """Fault: N, L, C or T is another one than in the papers, or a formula has another factor."""
    plan = asked("flops").plan
    sizes = sizes_of(plan)
    block = 12 * 768**2 + 13 * 768
    assert sizes.n == 50257 * 768 + 1024 * 768 + 12 * block + 2 * 768 == 124_439_808
    pairs = 12 * 768 * 1024
    found = {one.name: one.flops for one in formulas(sizes)}
    assert found == {
        "2N": 248_879_616,
        "2N + 2LCT": 248_879_616 + 2 * pairs,
        "6N": 746_638_848,
        "6N + 6LCT": 746_638_848 + 6 * pairs,
        "6N + 12LCT": 746_638_848 + 12 * pairs,
    }
    rows = {row[0]: row for row in table(lesson("flops").frames[1]).rows}
    assert rows["6N"][2:4] == ("747 MFLOP", "3.06 TFLOP")
    assert plan.flops().total_flops == pytest.approx(found["6N + 12LCT"] * 4 * 1024)


def test_executed_flops_do_not_depend_on_the_layout() -> None:
    """Fault: operators of several ranks are counted twice, or those of one are left out."""
    given = asked("flops")
    once = executed_flops(given.plan)
    assert executed_flops(given.other({"train.global_batch_size": 8})) == pytest.approx(2 * once)
    split = given.other({"parallel.ranks": 2, "parallel.pp": 2, "train.microbatch_size": 1})
    assert executed_flops(split) == pytest.approx(once, rel=1e-3)
    assert given.plan.flops().dense_flops < once < given.plan.flops().total_flops


def test_memory_has_the_twenty_bytes_and_the_example() -> None:
    """Fault: the rule or the example of 10^12 parameters has another sum; the parts do not make the whole."""
    assert sum(size for _, size, _ in RULE) == 20
    assert f"{sum(size for _, size in EXAMPLE) / 1e12:.1f} TB" == "8.8 TB"
    parts, rule, example = lesson("memory").frames
    assert table(example).rows[-1] == ("together", "8.8 TB")
    assert table(rule).rows[-1][2:] == ("20", of_bytes(20 * 124_439_808))
    assert "186.26 GiB" in rule.after[1]
    shares = [float(row[2].split()[0]) for row in table(parts).rows]
    assert sum(shares[:-1]) == pytest.approx(100, abs=1.5)
    assert table(parts).rows[0][1] == of_bytes(4 * 124_439_808)


def test_each_schedule_computes_all_micro_batches() -> None:
    """Fault: a bar is missing or lies on another one; the bubble of the naive schedule or of the formula is wrong."""
    one = lesson("pipeline")
    for frame in one.frames[:-1]:
        bars = lanes(frame).bars
        chunks = 2 if frame.title == "interleaved" else 1
        for stage in range(4):
            of_stage = sorted((bar for bar in bars if bar.lane == stage), key=lambda bar: bar.start)
            assert all(first.end <= then.start + 1e-9 for first, then in zip(of_stage, of_stage[1:]))
            for tone in (Tone.FORWARD, Tone.BACKWARD):
                numbers = sorted(bar.text for bar in of_stage if bar.tone is tone)
                assert numbers == sorted([*map(str, range(8))] * chunks)
    rows = {row[0]: row for row in table(one.frames[-1]).rows}
    assert rows["naive"][2] == "75 %", "one of four stages computes at a time"
    assert [rows[name][3] for name in ("naive", "gpipe", "1f1b")] == ["1", "8", "4"]
    assert of_share(3 / 11) in one.frames[-1].after[0]


def test_distances_of_gossip_fall_as_the_graphs_say() -> None:
    """Fault: the consensus distance does not follow from the mixing matrix: its second eigenvalue, or its power."""
    assert distances(Graph("complete", 8, 0), 1)[1] == pytest.approx(0, abs=1e-12)
    assert distances(Graph("exponential", 8, 0), 3)[3] == pytest.approx(0, abs=1e-12)
    ring = distances(Graph("ring", 8, 0), 40)
    assert ring[40] / ring[39] == pytest.approx((1 + 2 * cos(2 * pi / 8)) / 3, rel=1e-6)
    matrix = grid(lesson("gossip").frames[1])
    for column in range(8):
        assert sum(float(cells[column].text or 0) for _, cells in matrix.rows) == pytest.approx(1, abs=2e-3)


def test_parts_of_a_sequence_are_equal_work() -> None:
    """Fault: ranks of cp compute more or less than others, a part belongs to two, or keys of a rank are not seen."""
    parts, work, *hops, _ = lesson("context").frames
    whose = [[cell.text for cell in cells if cell.text] for _, cells in grid(parts).rows]
    assert sorted(part for own in whose for part in own) == [*map(str, range(8))]
    totals = [float(cells[-1].text) for _, cells in grid(work).rows]
    assert totals == [8 * 8 / 2 / 4] * 4, "half of all pairs, on four ranks"
    for rank in range(4):
        seen = [column for hop in hops for column, cell in enumerate(grid(hop).rows[rank][1]) if cell.text]
        assert sorted(seen) == [0, 1, 2, 3]


def test_a_server_gives_ages_and_versions() -> None:
    """Fault: synchronous updates have an age, bounded ones a larger one than the bound, or versions go back."""
    *ways, last = lesson("server").frames
    largest = [int(row[3]) for row in table(last).rows]
    assert len(ways) == 3
    assert largest[0] == 0
    assert largest[1] <= 1 < largest[2]
    for frame in ways:
        shown = lanes(frame)
        server = len(shown.lanes) - 1
        marks = sorted((bar for bar in shown.bars if bar.lane == server and bar.text), key=lambda bar: bar.start)
        assert [bar.text for bar in marks] == [f"v{number}" for number in range(1, len(marks) + 1)]
        assert {arrow.sender == server or arrow.receiver == server for arrow in shown.arrows} == {True}
        for worker in range(server):
            _versions_rise([arrow for arrow in shown.arrows if worker in (arrow.sender, arrow.receiver)])
    drawn = next(line for line in text(lesson("server")) if line.startswith("server 0 (rank 3)"))
    assert drawn.split()[4:] == ["v1", "v2", "v3"], "a terminal has the names of versions, too"


def test_each_of_several_servers_has_its_versions() -> None:
    """Fault: an empty lane ends in a traceback; versions of all servers are counted as one row, on the last lane."""
    words = ("default", "--ranks", "4", "parallel.servers=2", "train.global_batch_size=2", "train.microbatch_size=1")
    one = lesson("server", *words)
    assert [line for line in text(one) if len(line) > WIDTH] == []
    for frame in one.frames[:-1]:
        shown = lanes(frame)
        assert shown.lanes[-2:] == ["server 0 (rank 2)", "server 1 (rank 3)"]
        for server in (2, 3):
            marks = sorted((bar for bar in shown.bars if bar.lane == server and bar.text), key=lambda bar: bar.start)
            assert [bar.text for bar in marks] == [f"v{number}" for number in range(1, len(marks) + 1)]
            for worker in range(2):
                _versions_rise([at for at in shown.arrows if {worker, server} == {at.sender, at.receiver}])


def test_a_lane_in_which_nothing_happens_is_a_row() -> None:
    """Fault: a timeline with a lane without bars ends in a traceback."""
    frame = LessonFrame("", (), (RankLanes(["a", "b"], [Bar(0, 0.0, 1.0, Tone.FORWARD)], "ms"),))
    empty = Lesson("t", "t", "", "", (frame,))
    assert [line.strip() for line in text(empty) if line.startswith("b")] == ["b"]


def _versions_rise(arrows: list[Arrow]) -> None:
    numbers = [int(arrow.text[1:]) for arrow in sorted(arrows, key=lambda arrow: arrow.sent)]
    assert numbers == sorted(numbers)


def test_a_schedule_that_is_left_out_has_a_reason() -> None:
    """Fault: a schedule that the config does not admit is missing, and nobody learns why."""
    one = lesson(
        "pipeline", "default", "--ranks", "2", "parallel.pp=2", "model.num_layers=2", "train.microbatch_size=1"
    )
    titles = [frame.title for frame in one.frames]
    assert "interleaved" not in titles
    assert [line for line in one.frames[-1].after if line.startswith("interleaved is not drawn: ")]


def test_groups_of_an_axis_differ_on_it_alone() -> None:
    """Fault: the picture of a mesh joins ranks of different groups, or leaves one out."""
    plan = asked("hybrid").plan
    groups = lesson("hybrid").frames[1:4]
    for axis, frame in zip(("pp", "dp_replicate", "tp"), groups, strict=True):
        (network,) = frame.figures
        assert isinstance(network, NodeNetwork)
        assert {end for link in network.links for end in (link.first, link.second)} == set(range(8))
        for link in network.links:
            first, second = plan.mesh.coordinates(link.first), plan.mesh.coordinates(link.second)
            assert [name for name in first if first[name] != second[name]] == [axis]


def test_nothing_of_a_gradient_is_lost_with_feedback() -> None:
    """Fault: what is sent and what is left do not make the gradient; or a form's bytes are not those of its plan."""
    forms, first, second, *_ = lesson("compression").frames
    carried = [0.0] * 8
    for frame in (first, second):
        gradient, before, together, sent, left = (
            [float(cell.text or 0) for cell in cells] for _, cells in grid(frame).rows
        )
        assert before == carried
        assert together == pytest.approx([a + b for a, b in zip(gradient, before)])
        assert together == pytest.approx([a + b for a, b in zip(sent, left)])
        assert sum(1 for value in sent if value) == 2
        carried = left
    rows = {row[0]: row for row in table(forms).rows}
    assert rows["none"][3] == "100 %"
    assert rows["bf16"][3] == "50 %"
    assert len(rows) == 7


def test_averages_send_their_share() -> None:
    """Fault: the bytes of a step are those of a round, or the period is that of another frame."""
    rows = table(lesson("average").frames[-1]).rows
    whole = 4 * 1_063_680 * 2 * 3 / 4 / 2**20
    units = {"MiB": 1.0, "KiB": 1 / 1024}
    for row, period in zip(rows, (0, 2, 5, 10), strict=True):
        number, unit = row[1].split()
        assert row[0] == str(period or "-")
        assert float(number) * units[unit] == pytest.approx(whole / max(1, period), rel=5e-3)


def test_a_checkpoint_has_each_part_once() -> None:
    """Fault: two ranks write the same part, or nobody does."""
    (weights, optimizer) = grid(lesson("checkpoint").frames[0]).rows
    half = 4 * 1_063_680 / 2
    assert [cell.text for cell in weights[1]] == [of_bytes(half), of_bytes(half), "0 bytes", "0 bytes"]
    assert [cell.text for cell in optimizer[1]] == [of_bytes(2 * half), of_bytes(2 * half), "0 bytes", "0 bytes"]


def test_parts_of_a_matrix_cover_it() -> None:
    """Fault: a range of a matrix is on two ranks, or on none."""
    for name, cells in grid(lesson("tensor").frames[0]).rows:
        if cells[0].text == "all":
            continue
        ends = [tuple(map(int, cell.text.split(":"))) for cell in cells]
        assert ends[0][0] == 0
        assert all(first[1] == then[0] for first, then in zip(ends, ends[1:]))
        assert str(ends[-1][1]) in name.split()[1].split("x")


def test_samples_and_buckets_are_those_of_the_plan() -> None:
    """Fault: a sample belongs to two ranks or to none; buckets do not make all gradients."""
    samples, _, buckets, _ = lesson("data-parallel").frames
    owners = [[rank for rank, (_, cells) in enumerate(grid(samples).rows) if cells[number].text] for number in range(8)]
    assert owners == [[number // 2] for number in range(8)]
    sent = [float(row[3].split()[0]) for row in table(buckets).rows]
    assert all(row[3].endswith(" MiB") for row in table(buckets).rows)
    assert sum(sent) == pytest.approx(4 * 1_063_680 * 2 * 3 / 4 / 2**20, abs=0.03)


@pytest.mark.parametrize("words", [(), ("llama3_8b", "--ranks", "8"), ("bert_squad",)], ids=["gpt2", "llama", "bert"])
def test_each_operator_has_its_class_and_its_cost_in_letters(words: tuple[str, ...]) -> None:
    """Fault: an operator of a model has no class, a product a wrong one, or a cost in numbers where a letter is."""
    frames: dict[str, LessonFrame] = {frame.title: frame for frame in lesson("pram", *words).frames}
    rows = table(frames["A block"]).rows
    assert len(rows) > 6
    for name, cost, forward, over, backward, *_ in rows:
        assert re.fullmatch(r"B\*(NH\*)?T(\*[\dA-Z,]+)+", cost), (name, cost)
        assert {forward, backward} <= {"EREW", "CREW", "CRCW sum"}
        if cost.count("*") == 3 and "NH" not in cost:
            assert (forward, backward) == ("CREW", "CRCW sum"), f"{name}: a product"
            assert over


def test_speed_ups_are_at_most_ideal() -> None:
    """Fault: one rank is not the unit of the speed-up; the laws are fitted to other points than those shown."""
    first, _, laws = lesson("scaling").frames
    rows = table(first).rows
    assert rows[0] == ("1", "1.00", "100 %", "1.00", "100 %")
    for ranks, strong, _, weak, _ in rows:
        assert float(strong) <= float(ranks) + 0.01
        assert float(weak) <= float(ranks) + 0.01
    limit = re.search(r"at most ([\d.]+) times", table(laws).rows[0][2])
    assert limit is not None
    assert float(limit[1]) > 1


def test_a_device_of_a_divided_module_does_one_thing_at_a_time() -> None:
    """Fault: a half computes before its input is there, or works at two places at once; halves take unequal times."""
    drawn = lanes(lesson("hybrid").frames[-1])
    for lane in range(4):
        bars = sorted((bar for bar in drawn.bars if bar.lane == lane), key=lambda bar: bar.start)
        assert [bar.end for bar in bars[:-1]] == pytest.approx([bar.start for bar in bars[1:]])
        computes = [bar for bar in bars if bar.tone in (Tone.FORWARD, Tone.BACKWARD)]
        assert sum(bar.end - bar.start for bar in computes) == pytest.approx(1 / 2)
    first, second = ([bar for bar in drawn.bars if bar.lane == lane] for lane in (0, 1))
    ends = {(bar.lane, bar.tone): (bar.start, bar.end) for bar in (*first, *second)}
    assert ends[0, Tone.FORWARD][1] == pytest.approx(ends[1, Tone.FORWARD][0])
    assert ends[1, Tone.FORWARD][1] == pytest.approx(ends[1, Tone.BACKWARD][0])
    assert ends[1, Tone.BACKWARD][1] == pytest.approx(ends[0, Tone.BACKWARD][0])


@pytest.mark.parametrize("lang", ["en", "es"])
def test_a_study_is_explained_with_its_own_points(lang: str) -> None:
    """Fault: simulated ranks are shown in place of what was measured; a law is of other points than the table's."""
    taken = read_table(PUBLISHED, Kind.STRONG, ["strategy", "nodes", "ranks"])
    study = evaluated("bert_squad", Kind.STRONG, {"strategy": "ddp", "ranks": 1}, taken)
    one = lesson_of_study(study, language(lang))
    assert [line for line in text(one, lang) if len(line) > WIDTH] == []
    frames = {frame.title: frame for frame in one.frames}
    assert len(frames) == 1 + 3 + 3, "the baseline of another program has one point"
    for group in study.groups[1:]:
        first, curves, last = [frame for title, frame in frames.items() if title.startswith(f"{group.label}: ")]
        speeds = [f"{point.speed_up.total.value:.2f}" for point in group.points if point.speed_up.total is not None]
        assert [row[2].split()[0] for row in table(first).rows] == speeds
        (amdahl, says), (universal, few) = table(last).rows
        assert (amdahl, universal) == ("Amdahl", "universal (USL)")
        assert ("%" in says) == (len(speeds) > 2), "Amdahl needs three points"
        assert few == language(lang)("There are too few points."), "of four"
        (chart,) = curves.figures
        assert isinstance(chart, Chart)
        assert [y for x, y in chart.lines[1].points] == pytest.approx([x for x, _ in chart.lines[1].points])


@pytest.mark.parametrize("lang", ["en", "es"])
def test_threads_are_workers_and_points_without_cores_count_for_nothing(lang: str) -> None:
    """Fault: threads are called ranks; a point that was not fitted is the farthest one; above 100 % has no word."""
    seconds = {1: 8.0, 2: 4.2, 4: 2.5, 8: 9.0, 16: 1.8, 32: 1.7}
    taken = [
        Taken({"threads": threads}, threads, PointState.DONE, repeats=[
            Repeat(step_s, tokens=64.0, notes=(mark(MarkKind.OVERSUBSCRIBED, threads=8, cores=4),) * (threads == 8))
        ])
        for threads, step_s in seconds.items()
    ]  # fmt: skip
    study = evaluated("cores", Kind.THREADS, {"threads": 1}, taken)
    one = lesson_of_study(study, language(lang))
    first, _, laws = one.frames
    said = [one.about, *laws.says, *(row[1] for row in table(laws).rows)]
    assert not [sentence for sentence in said if re.search(r"\branks?\b", sentence.lower())]
    slower = {"en": "A serial share above 100 % means: slower", "es": "Una parte secuencial de más del 100 %"}[lang]
    assert any(sentence.startswith(slower) for sentence in first.after)
    (amdahl, says), *_ = table(laws).rows
    worst = study.groups[0].fits[0].worst
    assert amdahl == "Amdahl"
    assert worst is not None
    assert worst < 0.2, "the point of 8 threads is not of the fit"
    assert says.endswith(of_share(worst))


def test_what_a_study_says_of_its_points_is_in_the_language_of_the_reader() -> None:
    """Fault: notes about repeats, and why points are absent, stay English in every language."""
    crowd = mark(MarkKind.OVERSUBSCRIBED, threads=8, cores=4)
    taken = [
        Taken({"ranks": 1}, 1, PointState.DONE, repeats=[Repeat(8.0, tokens=64.0, threads=1)]),
        Taken({"ranks": 2}, 2, PointState.DONE, failed=["E1"], wanted=3, repeats=[
            Repeat(step_s, tokens=64.0, compute_s=1.0, others=0.5, threads=4, notes=(crowd,)) for step_s in (2.0, 3.0)
        ]),
        *(Taken({"ranks": 3 + number}, 3 + number, state, "E2") for number, state in enumerate(PointState) if number),
    ]  # fmt: skip
    study = evaluated("s", Kind.STRONG, {"ranks": 1}, taken)
    english, spanish = (lesson_of_study(study, language(lang)).frames[0].after for lang in ("en", "es"))
    assert len(english) == len(spanish) == 1 + (len(PointState) - 1) + len(study.groups[0].points[1].marks)
    assert not set(english) & set(spanish)
    assert f"ranks=2: {crowd}" in english


def test_spanish_has_one_word_for_speed_up() -> None:
    """Fault: a table and the sentence below it have two words for one thing; a line of the config stays English."""
    say = language("es")
    assert say("speed-up") in say("Efficiency is the speed-up divided by the growth of the workers since the baseline.")
    assert "1,063,680 parámetros" in lesson("checkpoint", lang="es").config


WRONG = {
    "unknown topic": (["zerro"], "explain zerro: no such topic; did you mean zero?"),
    "nothing like it": (["qqqq"], f"explain qqqq: no such topic; there are {', '.join(TOPICS)}"),
    "unknown language": (["zero", "--lang", "fr"], "--lang fr: no such language; there are en, es"),
    "suffix": (["zero", "--out", "a.pdf"], "--out a.pdf: the name must end in .html, .svg or .md"),
    "foreign file": (
        ["zero", "--out", "mine.md"],
        "--out mine.md: is there already, and `codescent explain` has not written it; give another name",
    ),
    "out alone": (["--out", "a.md"], "--out: has no effect without a TOPIC"),
    "no sense": (
        ["pipeline", "default"],
        "explain pipeline: this config has one stage; give --ranks 2 parallel.pp=2. This config has something to "
        "show of: ",
    ),
    "too many": (
        ["context", "--ranks", "16", "parallel.cp=16"],
        "explain context: cp=16 cannot be drawn; give at most parallel.cp=8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_word_is_refused(tmp_path: Path, case: str) -> None:
    """Fault: a wrong topic, language, file or config ends in a traceback, or in a lesson about something else."""
    (tmp_path / "mine.md").write_text("notes of my own\n")
    words, refusal = WRONG[case]
    done = called(tmp_path, "explain", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {refusal}")
    assert (tmp_path / "mine.md").read_text() == "notes of my own\n"


@pytest.mark.parametrize(
    ("kind", "axes", "words", "refusal"),
    [
        (
            "strong",
            "ranks = [1, 2]",
            [],
            "tiny: no point is measured beside its baseline yet; run codescent study with its file",
        ),
        ("grid", '"optimizer.beta1" = [0.8, 0.9]', [], "tiny: in a study of kind grid no number of workers grows"),
        ("strong", "ranks = [1, 2]", ["--ranks", "2"], "explain scaling runs: a study is measured; leave out --ranks"),
        (
            "strong",
            "ranks = [1, 2]",
            ["train.seed=1"],
            "explain scaling runs: a study is measured; leave out train.seed",
        ),
    ],
)
def test_a_study_with_nothing_to_explain(tmp_path: Path, kind: str, axes: str, words: list[str], refusal: str) -> None:
    """Fault: the folder of a study is taken for a config, or keys are ignored that its runs did not have."""
    make_project(tmp_path)
    head = f'[study]\nname = "tiny"\nconfig = "run.toml"\nkind = "{kind}"\nsteps = 3\nwarmup = 1\n'
    first = axes.replace("[1, 2]", "1").replace("[0.8, 0.9]", "0.9")
    (tmp_path / "study.toml").write_text(f"{head}baseline = {{ {first} }}\n[axes]\n{axes}\n")
    listed = called(tmp_path, "study", "study.toml", "--list", "--folder", "runs")
    assert listed.returncode == 0, listed.stderr
    done = called(tmp_path, "explain", "scaling", "runs", *words)
    assert done.returncode == 2
    assert refusal in done.stderr


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Fault: a user mends one word, and is then told of the next."""
    done = called(tmp_path, "explain", "zerro", "--lang", "fr", "--out", "a.pdf")
    assert done.returncode == 2
    assert [word in done.stderr for word in ("--lang fr", "--out a.pdf", "zerro")] == [True] * 3


def test_the_list_has_each_topic_in_80_columns(tmp_path: Path) -> None:
    """Fault: a topic cannot be found, or the list does not speak the language that is asked for."""
    for lang, first in (("en", "the formulas for"), ("es", "las fórmulas para")):
        done = called(tmp_path, "explain", "--lang", lang)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(TOPICS)
        assert max(map(len, lines)) <= WIDTH
        assert first in lines[0]


def test_a_lesson_is_written_as_markdown_and_replaced(tmp_path: Path) -> None:
    """Fault: a file of this command cannot be written twice, or its Markdown has no figure."""
    for _ in range(2):
        done = called(tmp_path, "explain", "context", "--out", "lesson.md", "--lang", "es")
        assert (done.returncode, done.stderr) == (0, "")
    written = (tmp_path / "lesson.md").read_text(encoding="utf-8")
    assert "# Paralelismo de contexto" in written
    assert "```text" in written
    assert "|---" in written


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_ranks_of_a_ring_end_with_all_sums() -> None:
    """Fault: what is shown of a ring is not what its ranks sent: a chunk has a share twice, or a message is missing."""
    one = lesson(OF_REAL_RANKS)
    assert len(one.frames) == 1 + 2 * 3 + 1
    assert [line for line in text(one) if len(line) > WIDTH] == []
    for _, cells in grid(one.frames[-2]).rows:
        assert [cell.text for cell in cells] == ["+".join(f"{rank}{chunk}" for rank in "abcd") for chunk in range(4)]
    for frame in one.frames[1:-1]:
        assert all(sum(cell.is_new for cell in cells) == 1 for _, cells in grid(frame).rows), "each receives one chunk"
