"""In: an operator of a plan. Out: its sizes in letters, such as "B*T*C*3C" of a product.
Does not count FLOPs (operators.py does)."""

from __future__ import annotations

from codescent.cost.operators import ATTENTION, PRODUCT, Computed
from codescent.plan import Plan

MOST_MULTIPLE = 8
"""Up to this multiple of the channels a size is written as one, such as 4C."""


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
    samples, rest = divmod(rows, samples_of(plan))
    return f"{rows:,}" if rest else f"B*{_positions(plan, samples)}"


def samples_of(plan: Plan) -> int:
    """Samples of a micro-batch on a device: B."""
    return -(-plan.work.microbatch_size // plan.devices)


def _positions(plan: Plan, positions: int) -> str:
    streams = plan.work.streams
    letters = {**({streams[0]: "S", sum(streams): "(S+T)"} if streams else {}), plan.work.positions(-1): "T"}
    return letters.get(positions, f"{positions:,}")


def _width(plan: Plan, width: int) -> str:
    model = plan.model
    if width == model.vocab_size:
        return "V"
    multiple, rest = divmod(width, model.hidden_dim)
    if rest or multiple > MOST_MULTIPLE:
        return f"{width:,}"
    return f"{'' if multiple == 1 else multiple}C"
