"""In: a plan, a kind of device. Out: the table of `codescent plan --operators`: what a rank computes in a step.
Does not count FLOPs or bytes (cost/operators.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich import box
from rich.table import Table

from codescent.base.amounts import of_bytes, of_share, three_digits
from codescent.base.counted import counted
from codescent.cost.operators import ATTENTION, PRODUCT, Computed, operators_of_depth
from codescent.plan import AXES, Mesh, Plan

PREFIXES = ("", "k", "M", "G", "T", "P", "E")
SMALL = 0.01
"""Below it no more than three digits behind the point are shown."""
MOST_MULTIPLE = 8
"""Up to this multiple of the channels a size is written as one, such as 4C."""


def tables(plan: Plan, device: str) -> Iterator[Table | str]:
    """A table for each pipeline stage, and what the letters mean."""
    for stage in range(plan.mesh.pp):
        yield _of_stage(plan, stage, device)
    model, work = plan.model, plan.work
    letters = {
        "B": ("samples of a micro-batch", work.microbatch_size),
        "T": ("positions", work.positions(-1)),
        **({"S": ("positions of the source", work.streams[0])} if work.streams else {}),
        "C": ("channels", model.hidden_dim),
        "NH": ("heads", model.num_heads),
        "HS": ("channels of a head", model.head_dim),
        "V": ("vocabulary", model.vocab_size),
    }
    yield ", ".join(f"{letter} {size:,} {what}" for letter, (what, size) in letters.items() if size)
    yield (
        "Sizes are undivided; FLOPs and bytes are those of a rank. What operators move is what they read and write. "
        "The optimizer and messages are not counted."
    )


def _of_stage(plan: Plan, stage: int, device: str) -> Table:
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    depths = [depth for part in plan.schedule.parts(stage) for depth in part]
    found = {depth: operators_of_depth(plan, depth, device, rank) for depth in depths}
    every = [one for of_depth in found.values() for one in of_depth]
    whole = sum(one.forward_flops + one.backward_flops for one in every)
    power = min(len(PREFIXES) - 1, max(0, int(math.log10(whole * plan.work.num_microbatches)) // 3))
    of = f" of stage {stage}" if plan.mesh.pp > 1 else ""
    passes = counted(plan.work.num_microbatches, "micro-batch")
    title = f"Operators{of} on {device}: {passes} of a step, in {PREFIXES[power]}FLOP"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("operator", no_wrap=True)
    table.add_column("size", no_wrap=True)
    for heading in ("forward", "backward", "share", "moves"):
        table.add_column(heading, justify="right", no_wrap=True)
    for _, alike in groupby(depths, key=lambda depth: [replace(one, depth=0) for one in found[depth]]):
        same = list(alike)
        if found[same[0]]:
            table.add_row(_name(plan, same), style="bold")
        sizes = operators_of_depth(replace(plan, mesh=Mesh()), same[0], device)
        for one, undivided in zip(found[same[0]], sizes, strict=True):
            flops = [len(same) * part for part in (one.forward_flops, one.backward_flops)]
            times, unit = plan.work.num_microbatches, 1000.0**power
            moved = of_bytes(times * len(same) * (one.forward_bytes + one.backward_bytes))
            amounts = [_amount(times * part / unit) for part in flops]
            share = of_share(sum(flops) / whole if whole else 0.0)
            table.add_row(f"  {one.name}", size_of(plan, undivided), *amounts, share, moved)
    return table


def _amount(number: float) -> str:
    return three_digits(number) if number >= SMALL else f"{number:.3f}"


def _name(plan: Plan, depths: Sequence[int]) -> str:
    """Depths that are alike, in words."""
    first, last, model = depths[0], depths[-1], plan.model
    if first == 0:
        return "embedding"
    if first > model.num_layers:
        return "head and loss"
    return f"layer {first - 1}" if first == last else f"layers {first - 1} to {last - 1}"


def size_of(plan: Plan, one: Computed) -> str:
    """The sizes of an operator in letters, such as "B*T*C*3C" of a product."""
    if one.kind == PRODUCT:
        rows, inputs, outputs = one.sizes
        return "*".join([_rows(plan, rows), _width(plan, inputs), _width(plan, outputs)])
    if one.kind == ATTENTION:
        _, _, queries, keys, _ = one.sizes
        return "*".join(["B", "NH", _positions(plan, queries), _positions(plan, keys), "HS"])
    samples, *positions, width = one.sizes
    if not positions:
        return f"{_rows(plan, samples)}*{_width(plan, width)}"
    if len(positions) > 1:  # the pairs of a query and a key, of each head
        return "*".join(["B", "NH", _positions(plan, positions[-1]), _positions(plan, width)])
    return f"{_rows(plan, samples * positions[0])}*{_width(plan, width)}"


def _rows(plan: Plan, rows: int) -> str:
    samples, rest = divmod(rows, plan.work.microbatch_size)
    return f"{rows:,}" if rest else f"B*{_positions(plan, samples)}"


def _positions(plan: Plan, positions: int) -> str:
    streams = plan.work.streams
    letters = {plan.work.positions(-1): "T", **({streams[0]: "S", sum(streams): "(S+T)"} if streams else {})}
    return letters.get(positions, f"{positions:,}")


def _width(plan: Plan, width: int) -> str:
    model = plan.model
    if width == model.vocab_size:
        return "V"
    multiple, rest = divmod(width, model.hidden_dim)
    if rest or multiple > MOST_MULTIPLE:
        return f"{width:,}"
    return f"{'' if multiple == 1 else multiple}C"
