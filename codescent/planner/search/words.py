"""In: layouts that a search has found. Out: each in words, and why it is slower than the first one.
Does not search (best.py does) and does not put rows on a screen (verbs/plan_search.py does)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from codescent.base.amounts import of_bytes, of_seconds, of_share
from codescent.base.counted import counted
from codescent.cost.time_parts import NAMES
from codescent.plan import AXES, Plan
from codescent.planner.search.found import Found
from codescent.planner.search.space import SEARCHED

FREE = "--free all searches them, too"
"""How keys that are given are searched, too."""
ALIKE = 0.0005
"""Steps that differ by less than this share are equally fast."""
PARTS = {
    "products_s": "products with matrices",
    "attention_s": "attention",
    "moved_s": "element-wise operators",
    "host_s": "launching operators",
    "inside_s": "messages inside nodes",
    "between_s": "messages between nodes",
    "bus_s": "copies to the host",
    "update_s": "optimizer",
    "microbatch_s": "fixed time of micro-batches",
    "data_s": "data",
    "step_s": "fixed time of steps",
    "bubble_s": "bubble",
    "imbalance_s": "waiting for the slowest rank",
}


def kept_words(given: Collection[str], release: str) -> str:
    """Which searched keys have kept the value of the config; empty: none. `release`: how they are searched, too."""
    return f" with {', '.join(key for key in SEARCHED if key in given)} as given ({release})" if given else ""


def layout_words(plan: Plan) -> str:
    """The degrees above one, and the options that have an effect."""
    mesh, layout, work = plan.mesh, plan.layout, plan.work
    words = [f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1] or ["one rank"]
    if mesh.dp_shard > 1:
        words.append(f"zero_stage {layout.zero_stage}")
    if mesh.pp > 1:
        virtual = f" with {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.schedule}{virtual}")
    if mesh.cp > 1:
        words.append(f"context {layout.context}")
    if mesh.tp > 1 and not layout.sequence_parallel:
        words.append("no sequence_parallel")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.offload != "none":
        words.append(f"offload {layout.offload}")
    words.append(f"{counted(work.num_microbatches, 'micro-batch')} of {work.microbatch_size}")
    return ", ".join(words)


def reason(one: Found, first: Found) -> str:
    """What a layout loses: of the first one most of its time, of the others what they lose more than it."""
    parts, step_s = one.price.parts, one.price.step_s
    if one is first:
        lost = [name for name in NAMES if name not in ("products_s", "attention_s")]
        name = max(lost, key=lambda part: float(getattr(parts, part)))
        return f"its largest loss: {_loses(one, name)}"
    later = step_s / first.price.step_s - 1.0
    if later < ALIKE:
        return f"as fast; {_more_memory(one, first)}"
    name = max(NAMES, key=lambda part: float(getattr(parts, part)) - float(getattr(first.price.parts, part)))
    share = float(getattr(first.price.parts, name)) / first.price.step_s
    return f"{100 * later:.1f} % slower: {_loses(one, name)}; {of_share(share)} of the first one's"


def _loses(one: Found, name: str) -> str:
    share = of_share(float(getattr(one.price.parts, name)) / one.price.step_s)
    plan = one.price.plan
    if name == "bubble_s" and plan.mesh.pp > 1:
        return f"{plan.layout.schedule} on {plan.mesh.pp} stages loses {share} to the bubble"
    return f"{PARTS[name]}, {share} of the step"


def _more_memory(one: Found, first: Found) -> str:
    more = one.memory.total - first.memory.total
    return f"holds {of_bytes(abs(more))} {'more' if more > 0 else 'less'}" if round(more) else "holds as much"


def size_words(one: Found) -> str:
    """Seconds, memory and whether it fits."""
    return f"{of_seconds(one.price.step_s)}, {of_bytes(one.memory.total)} ({one.fitting})"


def others(least: Found, unfit: Found | None) -> Iterator[tuple[str, list[str]]]:
    """Rows: the layout with the least memory, and a fast one that does not fit."""
    yield "least memory", [f"{size_words(least)}: {layout_words(least.price.plan)}"]
    if unfit is not None:
        over = f"{of_seconds(unfit.price.step_s)}, but {of_bytes(unfit.over_bytes)} too much"
        yield "does not fit", [f"{over}: {layout_words(unfit.price.plan)}"]
