"""In: schedules, names of files. Out: pictures and traces that hold every instruction, or one refusal and no file.
Does not judge beauty: people have looked at the pictures."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from pathlib import Path

import matplotlib.image
import pytest
from disks import small_disk
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.load import load
from codescent.cost.lengths import Lengths, lengths
from codescent.cost.simulate import Costs, Simulation, simulate
from codescent.plan import Plan, Verb
from codescent.plan.pipeline import SCHEDULES, pipeline
from codescent.report.step_picture import NOT_NUMBERED, NUMBERED, UNIT_IN, sheet
from codescent.report.style import COLOURS
from codescent.verbs import picture, timeline
from codescent.verbs.timeline import draw_plan, write_timeline


def sizes(name: str) -> tuple[int, int, int]:
    return (4, 8, 2 if name == "interleaved" else 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_picture_has_a_row_for_each_stage_in_the_colours_of_its_verbs(name: str, tmp_path: Path) -> None:
    schedule = pipeline(name, *sizes(name))
    write_timeline(schedule, name, tmp_path / "a.PNG")
    pixels = (matplotlib.image.imread(tmp_path / "a.PNG", format="png")[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert 200 < height < width < 4000
    seen = {tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, 3).tolist()}
    spans = [span for span in simulate(schedule).timeline if span.end_s > span.start_s]
    for verb in {span.instruction.verb for span in spans}:
        assert tuple(int(COLOURS[verb][i : i + 2], 16) for i in (1, 3, 5)) in seen
    assert [path.name for path in tmp_path.iterdir()] == ["a.PNG"]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (8, 32), (4, 400)])
def test_a_picture_stays_of_a_size_that_can_be_opened(p: int, m: int, tmp_path: Path) -> None:
    write_timeline(pipeline("1f1b", p, m), "sizes", tmp_path / "a.png")
    height, width = matplotlib.image.imread(tmp_path / "a.png").shape[:2]
    assert 800 < width < 6000
    assert 200 < height < 1000


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_a_track_for_each_stage_and_every_instruction(name: str, tmp_path: Path) -> None:
    schedule = pipeline(name, *sizes(name))
    costs = Costs(latency_s=0.25, reduce_s=1.5)
    write_timeline(schedule, name, tmp_path / "a.json", Lengths(costs))
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = ["", " waits", " messages"]
    assert named == {4 * n + stage: f"stage {stage}{name}" for n, name in enumerate(tracks) for stage in range(4)}
    for stage, program in enumerate(schedule.programs):
        track = [event for event in events if event["ph"] in "Xi" and event["tid"] == stage]
        assert [event["name"] for event in track] == [str(at) for at in program]
        assert [event["cat"] for event in track] == [at.verb for at in program]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 for event in slices)
    end_us = max(event["ts"] + event["dur"] for event in slices)
    assert end_us == pytest.approx(1000 * simulate(schedule, costs).makespan_s)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.pdf", "must end in .png or .svg (a picture) or .json"),
        ("a", "must end in .png or .svg (a picture) or .json"),
        ("absent/a.png", "there is no folder"),
        ("folder.json", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_planned(tmp_path: Path, name: str, words: str) -> None:
    make_project(tmp_path)
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = called(tmp_path, "plan", "run.toml", "data.tokenizer=char", "--timeline", name)
    assert done.returncode == 2
    assert not done.stdout
    assert [words in line for line in done.stderr.splitlines()] == [True]
    assert done.stderr.startswith(f"error: --timeline {name}: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_no_file_for_a_picture_is_refused_beside_the_problems_of_the_config(tmp_path: Path) -> None:
    make_project(tmp_path)
    done = called(tmp_path, "plan", "run.toml", "train.num_step=3", "--timeline", "a.pdf")
    assert done.returncode == 2
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" --timeline a.pdf", " command line"]


def unread(path: Path) -> list[int]:
    """What lstat says of a path, without the time of the last read."""
    found = path.lstat()
    return [found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def test_only_a_timeline_is_replaced_by_a_timeline(tmp_path: Path) -> None:
    (make_project(tmp_path)).rename(tmp_path / "run.json")  # a config may have any name
    (tmp_path / "plan.json").write_text('{"format": 2}')
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')  # of another program
    (tmp_path / "drawing.svg").write_text("<svg/>")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe.svg")
    drawn = ["empty.json", "empty.svg", "empty.png"]
    for name in drawn:
        (tmp_path / name).touch()
    before = {path: unread(path) for path in tmp_path.iterdir() if path.name not in drawn}
    foreign = "is there already, and `codescent plan --timeline` has not written it; give another name"
    for name, said in (
        *((name, foreign) for name in ("run.json", "plan.json", "trace.json", "drawing.svg", "photo.png")),
        ("full.svg", "is a device or a pipe, not a file"),
        ("pipe.svg", "is a device or a pipe, not a file"),
    ):
        done = called(tmp_path, "plan", "run.json", "--timeline", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: --timeline {name}: {said}")
    for name in (*drawn, *drawn):
        assert called(tmp_path, "plan", "run.json", "--timeline", name).returncode == 0
    assert {path: unread(path) for path in before} == before


def test_without_matplotlib_a_picture_is_refused_and_a_trace_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [problem.split(": ", 2)[1] for problem in timeline.refusals(tmp_path / "a.png")] == [
        "a picture needs matplotlib"
    ]
    assert not list(timeline.refusals(tmp_path / "a.json"))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8192) as disk:
        path = disk / "a.json"
        path.write_text(before := '{"otherData": {"written_by": "codescent plan"}}')
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            write_timeline(pipeline("1f1b", 8, 32), "full", path)
        assert {file.name: file.read_text() for file in disk.iterdir()} == {"a.json": before}


FILES = {
    "plan --timeline": ("default", "--timeline", "a.svg"),
    "plot": ("--schedule", "default", "--out", "a.svg"),
    "explain": ("zero", "--out", "a.svg"),
    "report": ("absent", "--out", "a.html"),
}
"""Commands that write a file, with its name at the end."""


@pytest.mark.parametrize("command", FILES)
def test_a_link_is_not_replaced_and_not_followed(command: str, tmp_path: Path) -> None:
    """Fault: a link becomes a file in silence, also one to a file of the command or to none."""
    name = FILES[command][-1]
    (tmp_path / "kept").write_text(f"codescent {command.split()[0]}")
    for to in ("kept", "absent"):
        (tmp_path / name).symlink_to(to)
        done = called(tmp_path, *command.split()[:1], *FILES[command])
        assert done.returncode == 2
        option = FILES[command][-2]
        said = f"error: {option} {name}: is a link, which a file would replace; give another name"
        assert said in done.stderr.splitlines()
        assert (tmp_path / name).readlink() == Path(to)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("command", FILES)
def test_a_file_that_cannot_be_read_is_not_replaced(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a file of somebody else, whom the folder belongs to as well, is taken for absent."""

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(picture, "open_regular", refused)  # root may read all
    name = FILES[command][-1]
    (tmp_path / name).write_text("mine")
    done = called(tmp_path, *command.split()[:1], *FILES[command])
    assert done.returncode == 2
    said = "is there already, and cannot be read (Permission denied); give another name"
    assert f"error: {FILES[command][-2]} {name}: {said}" in done.stderr.splitlines()
    assert (tmp_path / name).read_text() == "mine"


def test_plan_draws_its_schedule_beside_what_it_prints(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ("plan", "run.toml", "train.microbatch_size=2")
    done = called(tmp_path, *words, "--json", "--timeline", "a.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    drawn = [event["name"] for event in events if event["ph"] in "Xi"]
    assert drawn == [str(at) for at in plan.schedule.programs[0]]
    assert "backward 3" in drawn
    done = called(tmp_path, *words, "--timeline", "a.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout == called(tmp_path, *words).stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.startswith("a.png: one step of gpt2, one stage, no pipeline, 4 micro-batches: 12 units")
    done = called(tmp_path, *words, "--flops-per-byte", "20")
    assert (done.returncode, done.stderr.split(":")[1]) == (2, " --flops-per-byte")
    done = called(tmp_path, *words, "--timeline", "a.png", "--flops-per-byte", "0")
    assert done.returncode == 0, "0 is taken for an option that was not given, or for no number"
    done = called(tmp_path, *words, "--timeline", "a.json", "--flops-per-byte", "0.5")
    assert (done.returncode, "as long as 0.5 FLOPs" in (tmp_path / "a.json").read_text()) == (0, True)


def test_links_so_slow_that_no_computing_is_seen_are_refused(tmp_path: Path) -> None:
    """Fault: a picture of one colour, 1e298 units long; or a largest value that is refused itself."""
    for words in (("parallel.pp=2",), ("parallel.dp_replicate=2",), ("parallel.dp_shard=2", "parallel.zero_stage=3")):
        given = plan(2, *words)
        with pytest.raises(UserError, match=r"^--flops-per-byte 1e\+300: .* give at most \d+$") as refused:
            draw_plan(given, tmp_path / "a.json", 1e300)
        most = float(str(refused.value).rpartition(" ")[2])
        assert most > 1000
        assert "units" in draw_plan(given, tmp_path / "a.json", most)
        with pytest.raises(UserError, match="give at most"):
            draw_plan(given, tmp_path / "a.json", 3 * most)
    assert "3 units" in draw_plan(plan(1, "train.global_batch_size=1"), tmp_path / "a.json", 1e300), "nothing is sent"


def test_a_picture_says_that_numbers_have_no_room() -> None:
    """Fault: the boxes of many micro-batches have no numbers, and nobody says why."""
    few, many = (
        sheet(simulate(pipeline("1f1b", 4, count)), "t", Lengths()).texts[-1].get_text().replace("\n", " ")
        for count in (8, 400)
    )
    assert few.startswith(f"{NUMBERED}; right: ")
    assert many.startswith(f"{NOT_NUMBERED}; right: ")


def plan(ranks: int, *words: str) -> Plan:
    sizes = ("model.num_layers=8", "train.global_batch_size=8", "train.microbatch_size=1")
    return build(load("default", [*sizes, *words]).config, 2048, ranks)


def events(plan: Plan, path: Path, flops_per_byte: float) -> list[dict]:
    draw_plan(plan, path / "a.json", flops_per_byte)
    return json.loads((path / "a.json").read_text())["traceEvents"]


def step(plan: Plan) -> Simulation:
    found = lengths(plan, 0.001)
    return simulate(plan.schedule, found.costs, waits=found.waits)


FOUR = {
    name: ("parallel.pp=4", f"parallel.schedule={name}", f"parallel.virtual_stages={2 if name == 'interleaved' else 1}")
    for name in SCHEDULES
}


def test_pictures_of_all_schedules_have_one_unit(tmp_path: Path) -> None:
    steps = {name: step(plan(4, *words)) for name, words in FOUR.items()}
    whole = sum(stage.busy_s for stage in steps["1f1b"].stages)
    assert whole == pytest.approx(3 * 4 * 8)  # a forward pass of one unit and a backward pass of two, for each stage
    for name, words in FOUR.items():
        assert sum(stage.busy_s for stage in steps[name].stages) == pytest.approx(whole)
        if name == "naive":  # its picture is too wide for the unit
            continue
        draw_plan(plan(4, *words), tmp_path / "a.png", 0.001)
        width_px = matplotlib.image.imread(tmp_path / "a.png").shape[1]
        assert width_px == pytest.approx(110 * (1.6 + UNIT_IN * steps[name].makespan_s), abs=3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_names_its_schedule_and_says_what_was_written(name: str, tmp_path: Path) -> None:
    said = draw_plan(plan(8, *FOUR[name], "parallel.tp=2"), tmp_path / "a.svg")
    chunks = " with 2 chunks per stage" if name == "interleaved" else ""
    title = f"llama, {name}{chunks}, 4 stages, 8 micro-batches, tp 2"
    assert said.startswith(f"{tmp_path}/a.svg: one step of {title}: ")
    assert "% of them bubble" in said
    assert f">{title}<" in (tmp_path / "a.svg").read_text()


def test_unequal_stages_are_unequal(tmp_path: Path) -> None:
    uneven = plan(4, "parallel.pp=4", "model.num_layers=5")  # one stage has two layers
    forward = {event["tid"]: event["dur"] for event in events(uneven, tmp_path, 0.001) if event["name"] == "forward 3"}
    flops = uneven.model.forward_flops
    shares = [sum(flops[depth] for part in uneven.schedule.parts(stage) for depth in part) for stage in range(4)]
    assert len(set(shares)) > 1
    for stage, share in enumerate(shares):
        assert forward[stage] == pytest.approx(1000 * 4 * share / sum(flops), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "lane", "begins_with"),
    [
        (("parallel.dp_replicate=4", "parallel.bucket_bytes=1000000"), "collectives", {"backward"}),
        (("parallel.dp_shard=4", "parallel.zero_stage=1"), "collectives", {"forward", "backward"}),
        (("parallel.dp_shard=4", "parallel.zero_stage=3"), "collectives", {"forward", "backward"}),
        (("parallel.cp=4",), "collectives", {"forward", "backward"}),
        (("parallel.pp=4",), "messages", {"forward", "backward"}),
        (("parallel.tp=4",), None, {"forward", "backward"}),
    ],
)
def test_communication_is_drawn_for_every_axis(
    words: tuple[str, ...], lane: str | None, begins_with: set[str], tmp_path: Path
) -> None:
    found = events(plan(4, *words), tmp_path, 20)
    slices = [event for event in found if event["ph"] == "X"]
    computing = [event for event in slices if event["name"].split()[0] in ("forward", "backward")]
    if lane is None:  # every forward and backward pass waits for its sums
        assert all(event["args"]["waits_us"] > 0 for event in computing)
        return
    tracks = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    sent = [event for event in slices if tracks[event["tid"]].split()[-1] == lane]
    assert {event["dur"] > 0 for event in sent} == {True}
    assert {event["cat"] for event in sent} <= {"in a collective", "gathered unit", "message"}
    if lane == "collectives":
        begins = {round(event["ts"], 6) for event in sent}
        computing = [event for event in computing if tracks[event["tid"]].endswith(" 0")]
        assert {event["name"].split()[0] for event in computing if round(event["ts"], 6) in begins} == begins_with


def test_slow_links_make_a_step_longer_and_fast_ones_do_not() -> None:
    replicas = plan(4, "parallel.dp_replicate=4", "parallel.bucket_bytes=1000000")
    makespans = []
    for flops_per_byte in (0.001, 1.0, 10_000.0, 20_000.0):
        found = lengths(replicas, flops_per_byte)
        makespans.append(simulate(replicas.schedule, found.costs, waits=found.waits).makespan_s)
    sent = sum(record.wire_bytes(4) for record in replicas.traffic if record.verb in (Verb.REDUCE, Verb.STEP))
    last = sent - sum(record.wire_bytes(4) for record in replicas.traffic if record.during is Verb.BACKWARD)
    unit_flops = sum(replicas.model.forward_flops) * replicas.work.seq_len
    # The last backward pass hides all buckets of gradients but the last one.
    assert makespans[1] - makespans[0] == pytest.approx(last * 0.999 / unit_flops)
    assert 0 < last < sent
    assert makespans[3] - makespans[2] == pytest.approx(sent * 10_000 / unit_flops, rel=1e-3)


def test_frozen_weights_have_no_weight_gradients() -> None:
    words = ("parallel.pp=2", "parallel.schedule=zero-bubble")
    whole, adapted = (lengths(plan(2, *words, *more)).costs for more in ((), ("lora.rank=4",)))
    assert whole.backward_weight_s == pytest.approx(whole.forward_s)
    assert max(adapted.backward_weight_s) < 0.5 * min(whole.backward_weight_s)


def test_sums_of_gradients_do_not_hold_up_the_stages_before() -> None:
    """Each stage waits for its own sums, after it has sent its last gradients. So their times do not add up."""
    alone, replicas = plan(4, "parallel.pp=4"), plan(8, "parallel.pp=4", "train.global_batch_size=16")
    assert alone.schedule == replicas.schedule
    found = [lengths(one, 500.0) for one in (alone, replicas)]
    steps = [simulate(alone.schedule, one.costs, waits=one.waits).makespan_s for one in found]
    sums = [exchange.waits_s for (_, at), exchange in found[1].exchanges.items() if at.verb is Verb.REDUCE]
    assert len(sums) == 4
    assert min(sums) > 1.0
    scalars = max(exchange.waits_s for (_, at), exchange in found[1].exchanges.items() if at.verb is Verb.STEP)
    assert scalars < 0.01
    assert steps[0] < steps[1] <= steps[0] + max(sums) + scalars


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_full_recompute_computes_the_blocks_again(schedule: str) -> None:
    words = ("parallel.pp=2", f"parallel.schedule={schedule}")
    plain, again = (lengths(plan(2, *words, f"parallel.recompute={kind}"), 0.001) for kind in ("none", "full"))
    assert again.costs.forward_s == plain.costs.forward_s
    flops = plan(2, *words).model.forward_flops
    blocks = 2 * sum(flops[1:9]) / sum(flops)
    for verb in ("backward_s", "backward_input_s"):
        more = [
            after - before for after, before in zip(getattr(again.costs, verb), getattr(plain.costs, verb), strict=True)
        ]
        assert sum(more) == pytest.approx(blocks)
