"""In: a plan, a kind of device. Out: the table of `codescent plan --operators`: what a rank computes in a step.
Does not count FLOPs or bytes (cost/operators.py does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich import box
from rich.table import Table

from codescent.base.amounts import of_seconds, of_share, three_digits
from codescent.base.counted import counted
from codescent.cost.activations import has_kernel
from codescent.cost.device_time import spent
from codescent.cost.letters import samples_of, size_of
from codescent.cost.operators import Computed, operators_of_depth
from codescent.cost.price import Price
from codescent.plan import AXES, Mesh, Plan

PREFIXES = ("", "k", "M", "G", "T", "P", "E")
SMALL = 0.01
"""Below it no more than three digits behind the point are shown."""


Seconds = Callable[[Computed], float]
"""Of an operator, forward and backward, of one micro-batch."""


def seconds_on(found: Price) -> Seconds:
    """Seconds of the operators of a plan that was priced."""
    precision, layers = found.plan.work.precision, found.plan.model.num_layers

    def seconds(one: Computed) -> float:
        return sum(part.device_s for part in spent([one], found.cluster.device, found.software, precision, layers))

    return seconds


def tables(plan: Plan, device: str, seconds: Seconds | None = None) -> Iterator[Table | str]:
    """A table for each pipeline stage, and what the letters mean. `seconds`: of operators; None: not known."""
    for stage in range(plan.mesh.pp):
        yield _of_stage(plan, stage, device, seconds)
    model, work = plan.model, plan.work
    letters = {
        "B": ("sample", f" of a micro-batch{' on a device' * (plan.devices > 1)}", samples_of(plan)),
        "T": ("position", "", work.positions(-1)),
        **({"S": ("position", " of the source", work.streams[0])} if work.streams else {}),
        "C": ("channel", "", model.hidden_dim),
        "NH": ("head", "", model.num_heads),
        "HS": ("channel", " of a head", model.head_dim),
        "V": ("token", " of the vocabulary", model.vocab_size),
    }
    yield ", ".join(f"{letter} {counted(size, what)}{of}" for letter, (what, of, size) in letters.items() if size)
    if not has_kernel(plan, device):
        yield f"No kernel of {device} computes attention as a whole here: it computes and moves more than is shown."
    yield (
        "Sizes are undivided; FLOPs and bytes are those of a rank. What operators move is what they read and write. "
        f"The optimizer and messages are not counted.{_of_time(seconds)}"
    )


def _of_time(seconds: Seconds | None) -> str:
    return " Time is that of the device, without what its host and messages add." if seconds else ""


def _of_stage(plan: Plan, stage: int, device: str, seconds: Seconds | None) -> Table:
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    depths = [depth for part in plan.schedule.parts(stage) for depth in part]
    found = {depth: operators_of_depth(plan, depth, device, rank) for depth in depths}
    every = [one for of_depth in found.values() for one in of_depth]
    whole = sum(one.forward_flops + one.backward_flops for one in every)
    groups = [
        list(alike) for _, alike in groupby(depths, key=lambda depth: [replace(one, depth=0) for one in found[depth]])
    ]
    sizes = [len(same) * (one.forward_bytes + one.backward_bytes) for same in groups for one in found[same[0]]]
    most = max(sizes, default=0.0)
    times = plan.work.num_microbatches
    power, binary = _power(whole * times / 10, 1000), _power(most * times, 1024)
    of = f" of stage {stage}" if plan.mesh.pp > 1 else ""
    size = f"{PREFIXES[binary].upper()}iB" if binary else "bytes"
    title = f"Operators{of} on {device}: {counted(times, 'micro-batch')}, in {PREFIXES[power]}FLOP and {size}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("operator", no_wrap=True)
    table.add_column("size", no_wrap=True)
    whole_s = sum(seconds(one) for one in every) if seconds else 0.0
    for heading in ("FLOP", "moves", "time", "of it") if seconds else ("forward", "backward", "share", "moves"):
        table.add_column(heading, justify="right", no_wrap=True)
    for same in groups:
        if found[same[0]]:
            table.add_row(_name(plan, same), style="bold")
        whole_sizes = operators_of_depth(replace(plan, mesh=Mesh()), same[0], device)
        for one, undivided in zip(found[same[0]], whole_sizes, strict=True):
            flops = [len(same) * part for part in (one.forward_flops, one.backward_flops)]
            moved = _amount(times * len(same) * (one.forward_bytes + one.backward_bytes) / 1024.0**binary)
            amounts = [_amount(times * part / 1000.0**power) for part in flops]
            if seconds:
                each_s = seconds(one)
                share = of_share(len(same) * each_s / whole_s if whole_s else 0.0)
                cells = [
                    _amount(times * sum(flops) / 1000.0**power),
                    moved,
                    of_seconds(times * len(same) * each_s),
                    share,
                ]
            else:
                cells = [*amounts, of_share(sum(flops) / whole if whole else 0.0), moved]
            table.add_row(f"  {one.name}", size_of(plan, undivided), *cells)
    return table


def _power(largest: float, base: int) -> int:
    """Which prefix the largest number gets."""
    return min(len(PREFIXES) - 1, int(math.log(largest, base))) if largest >= base else 0


def _amount(number: float) -> str:
    return three_digits(number) if number >= SMALL else f"{number:.3f}"


def _name(plan: Plan, depths: Sequence[int]) -> str:
    """Depths that are alike, in words."""
    first, last, model = depths[0], depths[-1], plan.model
    if first == 0:
        return "embedding"
    if first > model.num_layers:
        return "head and loss"
    runs = [list(run) for _, run in groupby(enumerate(depths), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0][1] - 1} to {run[-1][1] - 1}" if len(run) > 1 else f"{run[0][1] - 1}" for run in runs]
    return f"layer{'s' * (first != last)} {', '.join(words)}"
