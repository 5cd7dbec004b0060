"""In: a plan. Out: two frames of a lesson: a model that lies on two devices of each process, under data parallelism
(torch's tutorial "combine DDP with model parallelism"): who holds what, and when each device computes.
Does not plan such a run: it is a module of the user's own (docs/two_devices.md)."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.amounts import of_bytes
from codescent.explain.at_work import SENDS_IN
from codescent.explain.content import Bar, Grid, GridCell, LessonFrame, RankLanes, Tone
from codescent.explain.language import Language
from codescent.plan import DTYPE_BYTES, Plan

COPIES, PARTS = 2, 2
"""Processes, and devices of each."""
MOST_LAYERS = 12
"""More layers are drawn as two rows, one for each half."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a step's arithmetic. A backward pass computes twice as much as a forward pass."""


def two_devices(plan: Plan, say: Language) -> Iterator[LessonFrame]:
    """The frames."""
    sent = plan.work.microbatch_size * plan.work.positions(-1) * plan.model.hidden_dim
    size = of_bytes(sent * DTYPE_BYTES[plan.work.precision])
    yield LessonFrame(
        say("A model on two devices of each process"),
        (
            say("A module of your own may put its first layers on one device, and the others on a second one."),
            say("DDP then has one process for each copy. Equal devices of the processes sum their gradients."),
        ),
        (_held(plan, say),),
        (say("In a process {size} of activations go to the second device for each micro-batch, and back.", size=size),),
    )
    lanes = _lanes(say)
    computes = sum(
        bar.end - bar.start for bar in lanes.bars if bar.lane == 0 and bar.tone in (Tone.FORWARD, Tone.BACKWARD)
    )
    yield LessonFrame(
        say("One device computes, the other waits"),
        (say("The second half needs the output of the first, and the first half the gradient of the second."),),
        (lanes,),
        (
            say("A device computes for {computes} of {step} steps of arithmetic.", computes=f"{computes:.2f}",
                step=f"{lanes.end:.2f}"),
            say("A pipeline cuts the batch, so that both compute at the same time: codescent explain pipeline."),
        ),
    )  # fmt: skip


def _held(plan: Plan, say: Language) -> Grid:
    layers = plan.model.num_layers
    half = layers - layers // 2
    names = [say("layer {number}", number=number + 1) for number in range(layers)]
    halves = [number >= half for number in range(layers)]
    if layers > MOST_LAYERS:
        names = [
            say("layers {first} to {last}", first=1, last=half),
            say("layers {first} to {last}", first=half + 1, last=layers),
        ]
        halves = [False, True]
    rows = [
        (
            name,
            [
                GridCell(say("copy {number}", number=copy + 1), Tone.WEIGHTS) if part == second else GridCell()
                for copy in range(COPIES)
                for part in range(PARTS)
            ],
        )
        for name, second in zip(names, halves, strict=True)
    ]
    heads = [say("device {number}", number=number) for number in range(COPIES * PARTS)]
    return Grid(heads, rows, "", [(Tone.WEIGHTS, say("the weights are here"))])


def _lanes(say: Language) -> RankLanes:
    """A step. The arithmetic of a whole step is 1; each half of the layers has half of it, and of the gradients."""
    forward, backward, sum_ = FORWARD / PARTS, BACKWARD / PARTS, SENDS_IN / PARTS
    turn, ends = 2 * forward, 2 * forward + 2 * backward
    bars = []
    for copy in range(COPIES):
        first, second = PARTS * copy, PARTS * copy + 1
        bars += [
            Bar(first, 0.0, forward, Tone.FORWARD),
            Bar(first, forward, turn + backward, Tone.WAITING),
            Bar(first, turn + backward, ends, Tone.BACKWARD),
            Bar(first, ends, ends + sum_, Tone.MESSAGE),
            Bar(second, 0.0, forward, Tone.WAITING),
            Bar(second, forward, turn, Tone.FORWARD),
            Bar(second, turn, turn + backward, Tone.BACKWARD),
            Bar(second, turn + backward, turn + backward + sum_, Tone.MESSAGE),
            Bar(second, turn + backward + sum_, ends + sum_, Tone.WAITING),
        ]
    names = [
        say("process {process}, device {device}", process=copy, device=PARTS * copy + part)
        for copy in range(COPIES)
        for part in range(PARTS)
    ]
    legend = [
        (Tone.FORWARD, say("forward")),
        (Tone.BACKWARD, say("backward")),
        (Tone.MESSAGE, say("gradients are summed")),
        (Tone.WAITING, say("waits")),
    ]
    return RankLanes(names, bars, say("steps of arithmetic"), legend=legend)
