"""In: plans of servers, gossip, ZeRO and pipelines. Out: boxes of their pictures, beside what was simulated.
Does not start ranks and does not judge beauty: people have looked at the pictures."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from codescent.build import build
from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.config.load import load
from codescent.cost.arithmetic import arithmetic
from codescent.cost.doing import SERVES, Activity, Doing
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Collective, Plan, Verb
from codescent.report.run_figures import kind_colour, kind_name
from codescent.report.step_boxes import (
    GATHER,
    PictureBand,
    PictureBox,
    PictureLook,
    boxes_of,
    gathers_weights,
    unit_of,
    verb_look,
    wait_look,
)
from codescent.verbs.timeline import LONG, MANY, NO_ROW, TOY, _first_rows, draw_plan, draw_ranks, of_walk

pytestmark = pytest.mark.timeout(60)

RATE, COMPUTE_S = 1e8, 0.5
SERVER = ("parallel.servers=1", "parallel.dp_replicate=3")
ASYNCHRONOUS = (*SERVER, "parallel.updates=asynchronous")
PLANS = {
    "pipeline": ("parallel.pp=4",),
    "zero-bubble": ("parallel.pp=4", "parallel.schedule=zero-bubble"),
    "interleaved": ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=2"),
    "synchronous": SERVER,
    "asynchronous": ASYNCHRONOUS,
    "stale": (*ASYNCHRONOUS, "parallel.staleness=1"),
    "workers serve": ("parallel.servers=workers", "parallel.dp_replicate=4"),
    "gossip": ("parallel.dp_replicate=4", "parallel.gossip=ring"),
    "pairs": ("parallel.dp_replicate=4", "parallel.gossip=pairs", "parallel.gossip_mode=asynchronous"),
    "averages": ("parallel.dp_replicate=4", "parallel.average_every=2"),
    "zero": ("parallel.dp_shard=4", "parallel.zero_stage=3"),
    "replicas": ("parallel.dp_replicate=4",),
}
SENDS = {"#d55e00", "#56b4e9", "#f0e442", "#8db600"}
"""Colours of a collective, a message, a server and a gathered unit."""
SVG = "{http://www.w3.org/2000/svg}"


def plan(*words: str, layers: int = 8) -> Plan:
    sizes = (f"model.num_layers={layers}", "train.global_batch_size=12", "train.microbatch_size=1", "data.seq_len=64")
    return build(load("default", [*sizes, *words]).config, 512, 4)


def walked(given: Plan, slow: dict[int, float] | None = None, warm_up: int = 1) -> Walk:
    return walk(given, arithmetic(given, COMPUTE_S, slow), of_links(Link(RATE)), warm_up=warm_up)


def shapes(group: ElementTree.Element) -> Iterator[tuple[str, float, float]]:
    """Colour, left and right of the boxes of a group. Boxes of one form may use one path."""
    forms = {f"#{path.get('id')}": path.get("d", "") for path in group.iter(f"{SVG}path") if path.get("id")}
    for shape in group.iter():
        if fill := re.search(r"fill: (#\w+)", shape.get("style", "")):
            form = shape.get("d") or forms[shape.get("{http://www.w3.org/1999/xlink}href", "")]
            at = [float(x) + float(shape.get("x", 0)) for x in re.findall(r"[ML] (\S+) ", form)]
            yield fill[1], min(at), max(at)


def drawn(path: Path) -> tuple[list[tuple[float, float, str]], set[str], tuple[float, float]]:
    """Of a picture: left, right and colour of each box; the colours of the legend; the edges of the rows."""
    root = ElementTree.parse(path).getroot()
    boxes, edges, legend = [], [], set()
    for group in root.iter(f"{SVG}g"):
        name = group.get("id", "")
        if re.fullmatch(r"row \d+", name):
            edges += [x for _, left, right in shapes(group) for x in (left, right)]
        elif re.search(r" of \d+(, edged)?$", name):
            boxes += [(left, right, fill) for fill, left, right in shapes(group)]
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("legend"):
            found = (re.search(r"fill: (#\w+)", shape.get("style", "")) for shape in group.iter(f"{SVG}path"))
            legend = {colour[1] for colour in found if colour is not None}
    return boxes, legend, (min(edges), max(edges))


@pytest.mark.parametrize("name", PLANS)
def test_boxes_lie_in_the_window_and_the_legend_has_the_colours_that_are_drawn(name: str, tmp_path: Path) -> None:
    """Fault: a box reaches over the edge, a colour is not explained, or one that nobody sees is."""
    given = plan(*PLANS[name])
    draw_plan(given, tmp_path / "plan.svg", 50.0)
    draw_ranks(given, tmp_path / "ranks.svg", walked(given, {1: 2.0}))
    for picture in ("plan.svg", "ranks.svg"):
        boxes, legend, (left, right) = drawn(tmp_path / picture)
        assert len(boxes) >= 6
        assert all(left - 0.01 <= begin <= end <= right + 0.01 for begin, end, _ in boxes)
        assert {colour for _, _, colour in boxes} == legend - {"#eeeeee"}
        assert legend & SENDS, "nothing is sent"


def all_boxes(given: Plan, found: Walk) -> list[PictureBox]:
    end = max(span.end_s for span in found.timeline)
    return boxes_of(of_walk(given, found, end, 1), {})


@pytest.mark.parametrize("name", ["synchronous", "asynchronous", "stale", "gossip", "pairs"])
def test_the_first_boxes_of_a_rank_are_cut_at_the_window(name: str) -> None:
    """Fault: what began before the measured rounds is left out, and a rank seems idle at first."""
    given = plan(*PLANS[name])
    boxes = all_boxes(given, walked(given, {1: 2.0}))
    for rank in given.mesh.group("dp_replicate", 0):
        own = sorted((box.start, box.end) for box in boxes if box.row == rank and box.band is PictureBand.ROW)
        assert own[0][0] == 0.0
        assert own[0][1] > 0.0
        assert all(after[0] <= before[1] + 1e-9 for before, after in zip(own, own[1:])), "a gap"


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_waits_as_long_as_the_walk_says(name: str) -> None:
    """Fault: a wait is forgotten, counted twice, or the arithmetic beside it is drawn as waiting."""
    given = plan(*PLANS[name])
    found = walked(given, {1: 2.0}, warm_up=0)
    for span in found.timeline:
        if span.start_s == 0.0:  # perhaps cut
            continue
        waits = (at for at in found.activities if at.stage == span.stage and at.doing not in SERVES)
        within = (min(at.end_s, span.end_s) - max(at.start_s, span.start_s) for at in waits)
        assert sum(max(0.0, seconds) for seconds in within) == pytest.approx(span.waits_s, rel=1e-3, abs=1e-6)


def kinds(found: Walk, rank: int) -> dict[Doing, float]:
    """Seconds of each wait of a rank."""
    seconds: Counter[Doing] = Counter()
    for at in found.activities:
        seconds[at.doing] += (at.end_s - at.start_s) * (at.stage == rank)
    return seconds


def test_what_is_awaited_has_its_name() -> None:
    """Fault: a slow rank, the collective behind it, a server and a message are one wait, and nobody sees the cause."""
    late_s = COMPUTE_S  # rank 1 takes twice as long
    replicas = walked(plan(*PLANS["replicas"]), {1: 2.0}, warm_up=0)
    assert kinds(replicas, 0)[Doing.RANK] == pytest.approx(late_s, rel=0.01)
    assert kinds(replicas, 1)[Doing.RANK] == pytest.approx(0.0, abs=1e-9)
    assert kinds(replicas, 0)[Doing.COLLECTIVE] == pytest.approx(kinds(replicas, 1)[Doing.COLLECTIVE], rel=1e-6)
    given = plan(*SERVER)
    served = walked(given, {1: 2.0}, warm_up=0)
    steps = max(span.end_s for span in served.timeline) / served.step_s
    assert 0.8 * late_s < kinds(served, 0)[Doing.RANK] / steps < late_s
    assert kinds(served, 1)[Doing.RANK] < 0.1 * kinds(served, 0)[Doing.RANK]
    assert kinds(served, 1)[Doing.SERVER] > 0.0
    gossip = walked(plan(*PLANS["gossip"]), {1: 2.0}, warm_up=0)
    assert kinds(gossip, 0)[Doing.MESSAGE] > 0.0 < kinds(gossip, 0)[Doing.RANK]


def test_the_row_of_a_server_has_what_it_receives_applies_and_answers() -> None:
    """Fault: the row is empty, or its boxes are not those of the pushes and pulls. One worker: closed form."""
    given = build(load("default", ["parallel.servers=1", "train.global_batch_size=4"]).config, 512, 2)
    found = walked(given, warm_up=0)
    by_kind: dict[Doing, list[Activity]] = {what: [] for what in SERVES}
    for at in found.activities:
        if at.stage == 1:
            by_kind[at.doing].append(at)
    (push,) = (record.payload_bytes for record in given.traffic if record.collective is Collective.PUSH)
    (pull,) = (record.payload_bytes for record in given.traffic if record.collective is Collective.PULL)
    received, applied, answered = (by_kind[what] for what in SERVES)
    verbs = Counter(span.instruction.verb for span in found.timeline)
    assert len(received) == len(applied) == verbs[Verb.PUSH] > 10
    assert len(answered) == verbs[Verb.PULL]
    assert [at.end_s - at.start_s for at in received] == pytest.approx([push / RATE] * len(received))
    assert [at.end_s - at.start_s for at in answered] == pytest.approx([pull / RATE] * len(answered))
    for push_of, apply, answer in zip(received, applied, answered, strict=True):
        assert push_of.end_s == pytest.approx(apply.start_s)
        assert apply.start_s <= answer.start_s
    drawn_looks = {box.look for box in all_boxes(given, found) if box.row == 1 and box.band is PictureBand.ROW}
    assert drawn_looks == {wait_look(what, "") for what in SERVES}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_a_row_for_each_rank_with_the_units_that_the_plan_gathers(stage: int) -> None:
    """Fault: a unit is missing, or gathered as often or as long as the plan does not say."""
    given = plan("parallel.dp_shard=4", f"parallel.zero_stage={stage}", layers=3)
    found = walked(given, warm_up=0)
    expected: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for record in given.traffic:
        if gathers_weights(record):
            expected[unit_of(record)] += record.times
            seconds[unit_of(record)] = record.wire_bytes(4) / RATE
    assert set(expected) == {"root", "0", "1", "2"}
    for rank in range(4):
        own = [box for box in all_boxes(given, found) if box.row == rank and box.look == GATHER]
        assert Counter(box.text for box in own) == expected
        assert {box.text: pytest.approx(box.end - box.start) for box in own} == seconds


def test_what_takes_no_time_at_the_end_of_a_step_is_there(tmp_path: Path) -> None:
    """Fault: the last update of each rank is cut off with the window."""
    given = plan("parallel.dp_replicate=4")
    draw_ranks(given, tmp_path / "t.json", walked(given))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = Counter(event["tid"] for event in events if event.get("cat") == "step")
    forwards = Counter(event["tid"] for event in events if event.get("cat") == "forward")
    assert {number % 3 for number in forwards.values()} == {0}
    assert steps == {rank: number // 3 for rank, number in forwards.items()}


def test_many_short_boxes_are_drawn_and_are_no_idle_time(tmp_path: Path) -> None:
    """Fault: boxes that are each narrower than a pixel vanish, and a rank that always computes seems idle."""
    rounds = ("parallel.average_every=1000", "train.num_steps=1000", "train.eval_every=0", "checkpoint.every=0")
    given = plan("parallel.dp_replicate=4", *rounds, layers=2)
    draw_ranks(given, tmp_path / "long.svg", walked(given, warm_up=0))
    boxes, legend, (left, right) = drawn(tmp_path / "long.svg")
    assert {"#0072b2", "#009e73"} <= legend, "forward and backward"
    assert sum(end - begin for begin, end, _ in boxes) > 0.5 * 4 * (right - left)
    assert "#eeeeee" not in legend


def test_a_request_on_its_way_is_no_wait_for_another_rank() -> None:
    """Fault: with one worker each pull begins with a wait for a rank that is not there."""
    words = ("parallel.servers=1", "parallel.dp_replicate=1", "parallel.updates=asynchronous")
    given = build(load("default", ["train.global_batch_size=4", "train.microbatch_size=1", *words]).config, 512, 2)
    found = walk(given, arithmetic(given, COMPUTE_S), of_links(Link(RATE, 0.05)))
    assert {at.doing for at in found.activities if at.stage == 0} == {Doing.SERVER}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["synchronous", "zero", "gossip"])
def test_slices_of_a_track_do_not_overlap(name: str, devices: int, tmp_path: Path) -> None:
    """Fault: a server receives from three workers at once, and a viewer drops two of the slices.

    Where a host has two devices, a rank has a card inside and one between hosts: both are busy at once.
    """
    given = plan(*PLANS[name])
    found = walk(given, arithmetic(given, COMPUTE_S), of_links(Link(RATE), inside=Link(4 * RATE), devices=devices))
    draw_ranks(given, tmp_path / "t.json", found)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    sending = {track for track, name in named.items() if "collectives" in name or "messages" in name}
    sent = sum(event["ph"] == "X" and event["tid"] in sending for event in events)
    assert sent == sum(one.end_s > one.start_s for one in found.flights)
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        slices.sort()
        assert all(one[1] <= after[0] + 1e-3 for one, after in zip(slices, slices[1:], strict=False))


@pytest.mark.parametrize(
    ("ranks", "servers", "words", "why"),
    [
        (96, 0, ("parallel.dp_shard=96", "parallel.zero_stage=3"), MANY),
        (62, 4, ("parallel.dp_replicate=62", "parallel.servers=4"), MANY),
        (96, 0, ("parallel.dp_replicate=96",), ""),
        (2, 0, ("parallel.dp_replicate=2", "parallel.gossip=ring", "parallel.gossip_every=20"), LONG),
        (2, 0, ("parallel.dp_replicate=2", "parallel.average_every=20"), ""),
    ],
)
def test_a_picture_says_why_ranks_have_no_rows(
    ranks: int, servers: int, words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    """Fault: a picture of ZeRO on hundreds of ranks takes minutes; or equal ranks are called too many for rows."""
    sizes = (f"train.global_batch_size={ranks}", "train.microbatch_size=1", "model.num_layers=1", "train.eval_every=20")
    said = draw_plan(
        build(load("default", [*sizes, *words]).config, 512, ranks + servers), tmp_path / "many.json", 50.0
    )
    assert re.search("; (the ranks are|a round is) .*$|$", said)[0] == why


def test_a_picture_says_which_of_many_rows_it_has(tmp_path: Path) -> None:
    """Fault: servers are left out in silence, have other numbers than in messages, or messages go to a wrong row."""
    sizes = ("train.global_batch_size=18", "train.microbatch_size=1", "model.num_layers=2")
    servers = ("parallel.dp_replicate=18", "parallel.servers=6")
    given = build(load("default", [*sizes, *servers]).config, 512, 24)
    found = walked(given, warm_up=0)
    said = draw_ranks(given, tmp_path / "rows.svg", found)
    assert said.endswith("; the first 16 of 18 ranks; the first 4 of 6 servers")
    names = [text.text for text in ElementTree.parse(tmp_path / "rows.svg").iter(f"{SVG}text")]
    rows = [name for name in names if re.fullmatch(r"(rank|server) \d+", name or "")]
    assert rows == [*(f"rank {rank}" for rank in range(16)), *(f"server {number}" for number in range(4))]
    every = of_walk(given, found, 1.0, 1)
    some = _first_rows(every, given)
    new = {number: row for row, number in enumerate([*range(16), *range(18, 22)])}
    assert [every.name(number) for number in new] == list(some.names) == rows
    assert [(at.stage, at.peer) for at in some.messages] == [
        (new[at.stage], new.get(at.peer, NO_ROW)) for at in every.messages if at.stage in new
    ]


def test_waits_behind_the_last_instruction_are_in_the_picture(tmp_path: Path) -> None:
    """Fault: a picture of all steps cuts the waits for the last averages at its edge."""
    given = plan(*PLANS["pairs"])
    found = walk(given, arithmetic(given, COMPUTE_S), of_links(Link(RATE / 100)), warm_up=0)
    last_s = max(wait.end_s for wait in found.activities)
    assert last_s > max(span.end_s for span in found.timeline)
    found = dataclasses.replace(found, step_s=max(span.end_s for span in found.timeline))  # the picture has all
    draw_ranks(given, tmp_path / "all.json", found)
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(last_s * 1e6)
    draw_ranks(given, tmp_path / "all.svg", found)
    boxes, _, (left, right) = drawn(tmp_path / "all.svg")
    assert all(left - 0.01 <= begin <= end <= right + 0.01 for begin, end, _ in boxes)


def test_all_looks_of_a_step_have_colours_of_their_own() -> None:
    """Fault: two entries of a legend have one colour."""
    looks = {verb_look(verb, is_odd=False) for verb in (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_WEIGHT, Verb.STEP)}
    looks |= {GATHER, *(wait_look(why, "rank") for why in Doing)}
    assert len({look.colour for look in looks}) == len(looks)


def test_a_toy_is_drawn_without_communication(tmp_path: Path) -> None:
    """Fault: a model for class is a row of one colour, because each byte takes as long as all that it computes."""
    toy = [
        "model.num_layers=3", "model.hidden_dim=16", "model.num_heads=2", "model.num_kv_heads=2", "data.seq_len=4",
        "train.global_batch_size=3", "train.microbatch_size=1",
    ]  # fmt: skip
    for words in (["parallel.dp_shard=3"], ["parallel.dp_replicate=3"]):
        given = build(load("default", [*toy, *words]).config, 512, 3)
        assert draw_plan(given, tmp_path / "toy.svg").endswith(TOY)
        boxes, legend, (left, right) = drawn(tmp_path / "toy.svg")
        assert {"#0072b2", "#009e73"} <= legend <= {"#0072b2", "#009e73", "#eeeeee"}
        assert max(end - begin for begin, end, _ in boxes) > 0.1 * (right - left)
        assert TOY not in draw_plan(given, tmp_path / "toy.svg", 1000.0)
        assert "#d55e00" in drawn(tmp_path / "toy.svg")[1]


def test_measured_timelines_have_the_words_and_colours_of_planned_ones() -> None:
    """Fault: the same wait has another name or colour in a report."""
    for why in (Doing.COLLECTIVE, Doing.MESSAGE, Doing.SERVER, Doing.RANK):
        assert PictureLook(kind_name(why), kind_colour(why)) == wait_look(why, "rank")
