"""In: a plan. Out: who writes which part of a checkpoint, how a save beside training overlaps with it, and how often a
run should save (Young 1974; Daly 2006).
Does not save (checkpoint/ does) and does not measure a disk."""

from __future__ import annotations

from codescent.base.amounts import of_bytes, of_seconds, of_share
from codescent.explain.content import (
    Bar,
    Chart,
    ChartLine,
    Grid,
    GridCell,
    Lesson,
    LessonFrame,
    RankLanes,
    TextTable,
    Tone,
)
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.plan import Plan
from codescent.plan.state import state_of_rank
from codescent.planner.checkpoints import best_interval

MOST_RANKS = 8
COPY, WRITE, STEP, STEPS = 0.15, 2.4, 1.0, 5
"""Of the picture of a save: copying, writing, and a step; in steps."""
MTBF_H = (6.0, 24.0, 168.0)
SAVES_S = (1.0, 10.0, 60.0)
CURVE_H = (1, 2, 4, 8, 16, 32, 64, 128)


def lesson(asked: LessonInput) -> Lesson:
    """The parts, two saves as timelines, the interval."""
    say, plan = asked.say, asked.plan
    return Lesson(
        topic="checkpoint",
        title=say("Checkpoints: what is saved, by whom, how often"),
        about=say("A checkpoint has whole tensors, whatever the layout. So another layout can load it."),
        config=asked.config_line,
        frames=(_parts(plan, say), _files(say), _beside(say), _interval(say), _curve(say)),
        see=(
            ("codescent docs checkpoints", say("keys, formats, and what to do when something goes wrong")),
            ("codescent plan CONFIG --cluster NAME --mtbf 24 --save-s 10", say("the interval for your machine")),
        ),
    )


def _parts(plan: Plan, say: Language) -> LessonFrame:
    """A tensor that several ranks hold is written by one of them: the first."""
    mesh = plan.mesh
    kinds, ranks = (Tone.WEIGHTS, Tone.OPTIMIZER), range(min(mesh.world_size, MOST_RANKS))
    sums: dict[Tone, list[int]] = {kind: [0] * len(ranks) for kind in kinds}
    for tensor in plan.tensors:
        seen: set[object] = set()
        for rank in ranks:
            if mesh.coordinates(rank)["pp"] not in plan.stages_of(tensor):
                continue
            box = tensor.optimizer.box(tensor.parameter.shape, mesh, rank)
            if box in seen:
                continue
            seen.add(box)
            share = tensor.optimizer.numel(tensor.parameter.shape, mesh, rank) / max(1, tensor.parameter.numel)
            sums[Tone.WEIGHTS][rank] += round(share * tensor.parameter.numel * 4)
            sums[Tone.OPTIMIZER][rank] += tensor.optimizer_bytes(mesh, rank)
    names = {Tone.WEIGHTS: say("weights"), Tone.OPTIMIZER: say("optimizer state")}
    rows = [
        (
            names[kind],
            [GridCell(of_bytes(sums[kind][rank]), kind if sums[kind][rank] else Tone.NOTHING) for rank in ranks],
        )
        for kind in kinds
    ]
    held = of_bytes(state_of_rank(plan, 0).total_bytes)
    return LessonFrame(
        say("Who writes what"),
        (say("Each part is written once. Of ranks that hold the same part, one writes it."),),
        (Grid([say("rank {number}", number=rank) for rank in ranks], rows),),
        (say("Gradients are not saved: they are of one step. Rank 0 holds {held} with them.", held=held),),
    )


def _files(say: Language) -> LessonFrame:
    rows = (
        ("*.safetensors", say("the tensors, with a hash of each file")),
        ("manifest.json", say("which part of which tensor is in which file; step, seeds, position in the data")),
        (say("the name of the folder"), say("is given last: a folder without it is not complete, and is not loaded")),
    )
    return LessonFrame(say("The files"), (), (TextTable((say("file"), say("what it has")), rows),))


def _beside(say: Language) -> LessonFrame:
    """A save that training waits for, and one beside training."""
    bars: list[Bar] = []
    for lane, waits in ((0, COPY + WRITE), (2, COPY)):
        at = 0.0
        for step in range(STEPS):
            bars.append(Bar(lane, at, at + STEP, Tone.FORWARD, str(step)))
            at += STEP
            if step == 1:
                bars.append(Bar(lane, at, at + waits, Tone.WAITING))
                if lane == 2:
                    bars.append(Bar(3, at + COPY, at + COPY + WRITE, Tone.MESSAGE))
                else:
                    bars.append(Bar(1, at + COPY, at + COPY + WRITE, Tone.MESSAGE))
                at += waits
    lanes = [say("training"), say("  its save"), say("training"), say("  save beside")]
    legend = [
        (Tone.FORWARD, say("steps")),
        (Tone.WAITING, say("training waits")),
        (Tone.MESSAGE, say("the disk writes")),
    ]
    return LessonFrame(
        say("A save beside training"),
        (
            say("With checkpoint.asynchronous the tensors are copied. Then training goes on while the disk writes."),
            say("The copy has the values of that moment, and needs their memory once more."),
        ),
        (RankLanes(lanes, bars, say("steps"), legend=legend),),
    )


def _interval(say: Language) -> LessonFrame:
    rows = []
    for hours in MTBF_H:
        for save_s in SAVES_S:
            best = best_interval(hours * 3600, save_s)
            rows.append((f"{hours:g} h", of_seconds(save_s), of_seconds(best.seconds), of_share(best.effective)))
    heads = (say("between failures"), say("a save stops training for"), say("best interval"), say("time that trains"))
    return LessonFrame(
        say("How often"),
        (say("Too often: saves take the time. Too seldom: a failure loses much. The best is about sqrt(2 d M)."),),
        (TextTable(heads, rows, numbers=range(4)),),
        (say("d: seconds of a save. M: mean seconds between failures of the run; more machines, more failures."),),
    )


def _curve(say: Language) -> LessonFrame:
    lines = []
    for save_s in SAVES_S:
        points = [
            (hours, 100 * best_interval(hours * 3600, save_s).effective) for hours in (1, 2, 4, 8, 16, 32, 64, 128)
        ]
        lines.append(ChartLine(say("save: {seconds}", seconds=of_seconds(save_s)), [(float(x), y) for x, y in points]))
    chart = Chart(lines, say("hours between failures"), say("% that trains"))
    return LessonFrame(say("What is left of the time"), (), (chart,))


def _words(ranks: int) -> tuple[str, ...]:
    """Two replicas of several parts; of an odd number of ranks one."""
    copies = 1 if ranks % 2 else 2
    layout = f"parallel.ranks={ranks}", f"parallel.dp_replicate={copies}", f"parallel.dp_shard={ranks // copies}"
    return example(*layout, batch=multiple(8, ranks))


TOPIC = Topic(
    about="who writes which part of a checkpoint, saves beside training, how often to save",
    example=Example(_words),
    lesson=lesson,
)
