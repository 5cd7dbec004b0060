"""In: a prediction as JSON, what a run has measured. Out: both side by side, by part; which part errs most, in words.
Does not predict (prediction.py does) and does not read a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from codescent.base.amounts import of_bytes, of_change, of_seconds, of_share
from codescent.planner.bands import Band, grows
from codescent.planner.measured import MeasuredStep

STEP, MEMORY = "step", "memory"
COMPUTING, MESSAGES, BUBBLE, OPTIMIZER, DATA, REST = "computing", "messages", "bubble", "optimizer", "data", "the rest"
Alike = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""By the name of a part: what a prediction calls it, and what a run does."""

TIME_PARTS: Alike = {
    COMPUTING: (("products_s", "attention_s", "moved_s", "host_s", "microbatch_s"), ("forward_s", "backward_s")),
    MESSAGES: (("inside_s", "between_s", "bus_s", "imbalance_s"), ("communication_s",)),
    BUBBLE: (("bubble_s",), ("bubble_s",)),
    OPTIMIZER: (("update_s",), ("optimizer_s",)),
    DATA: (("data_s",), ("data_s",)),
    REST: (("step_s",), ("other_s",)),
}
"""Of the seconds of a step: names of cost/time_parts.py, and of step_parts.py."""
OUTSIDE = ("device", "fragments")
"""What a device holds that torch's allocator does not count as allocated."""
MEMORY_PARTS: Alike = {
    "weights": (("weights",), ("most_weights_bytes",)),
    "gradients": (("gradients",), ("most_gradients_bytes",)),
    "optimizer": (("optimizer",), ("most_optimizer_bytes",)),
    "activations": (("activations",), ("most_activations_bytes",)),
    "buckets and gathered units": (("gathered",), ("most_buffers_bytes",)),
    "the rest": (("logits", *OUTSIDE), ("rest_bytes",)),
}
"""Of the memory of a rank: names of cost/stage_memory.py, and columns of memory.csv. Of each part the most is compared:
a price sums what is largest, and a run counts all parts at one moment. After forward there are no gradients, say."""

MEANS: Mapping[str, tuple[str, str]] = {
    COMPUTING: (
        "The device computes more slowly than its cluster file says: codescent measure says what it reaches here",
        "The device computes faster than its cluster file says: codescent measure says what it reaches here",
    ),
    MESSAGES: (
        "The ranks wait longer for messages than the links of the cluster file say, or for a slow rank",
        "The links are faster than the cluster file says, or more is sent beside computation",
    ),
    BUBBLE: (
        "The stages are less alike than the price says, so they wait longer for one another",
        "The stages wait less for one another than the price says",
    ),
    OPTIMIZER: (
        "The update takes longer than its bytes: its operators are small, or the memory is slower than the file says",
        "The update reaches more of the memory's bandwidth than the cluster file says",
    ),
    DATA: (
        "Steps wait longer for samples than load_bytes_per_s of the software says: a slow disk, or costly preparation",
        "Steps wait less for samples than load_bytes_per_s of the software says",
    ),
    REST: (
        "Logging and what else is done once a step take longer than step_s of the software",
        "What is done once a step takes less than step_s of the software",
    ),
}
"""What it means if a part takes longer than predicted, and if it takes less."""


class ComparedPart(NamedTuple):
    """A part, predicted and measured. `measured`: None: the run does not say it."""

    name: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one. None: nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured else None

    @property
    def missing(self) -> float:
        """Measured less predicted."""
        return (self.measured or 0.0) - self.predicted


def times(prediction: Mapping[str, Any], step_s: float | None, parts_s: Mapping[str, float]) -> list[ComparedPart]:
    """The step, then its parts; they sum to it. A part that takes no time on both sides is left out.

    Args:
        prediction: of the run (prediction.py).
        step_s: measured; None: unknown.
        parts_s: measured, by names of step_parts.py; empty: unknown.
    """
    parts = list(_parts(TIME_PARTS, prediction["parts"], parts_s))
    return [
        ComparedPart(STEP, float(prediction["step_s"]), step_s),
        *(one for one in parts if one.predicted or one.measured),
    ]


def memory(prediction: Mapping[str, Any], stage: int, row: Mapping[str, Any] | None) -> list[ComparedPart]:
    """The memory of a rank, then its parts. On CUDA both are without what torch does not count.

    Args:
        prediction: of the run (prediction.py).
        stage: of the rank.
        row: of memory.csv; None: unknown.
    """
    held = dict(prediction["memory_bytes"][stage])
    if row is not None and row["reserved_bytes"]:
        held |= dict.fromkeys(OUTSIDE, 0.0)
    parts = list(_parts(MEMORY_PARTS, held, row or {}))
    peak = None if row is None else float(row["peak_bytes"] or 0.0) or None
    shown = [one for one in parts if one.predicted or one.measured]
    return [ComparedPart(MEMORY, sum(one.predicted for one in parts), peak), *shown]


def _parts(alike: Alike, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[ComparedPart]:
    for name, (of_prediction, of_run) in alike.items():
        known = [float(measured[one]) for one in of_run if measured.get(one) is not None]
        yield ComparedPart(
            name, sum(float(predicted.get(one, 0.0)) for one in of_prediction), sum(known) if known else None
        )


def highest(prediction: Mapping[str, Any], found: MeasuredStep) -> str:
    """Where the memory is highest: predicted, and measured. Empty: one of both is not known."""
    peak, row = prediction.get("peak"), found.memory
    if not peak or row is None or not row["peak_at"]:
        return ""
    return (
        f"  highest: predicted in stage {peak['stage']}, {peak['at']}; measured in stage {found.stage}, "
        f"{row['peak_at']} (step {row['peak_step']})"
    )


def held_bytes(prediction: Mapping[str, Any]) -> float:
    """What the fullest rank is predicted to hold, of what its run will measure: on CUDA without what is OUTSIDE."""
    outside = OUTSIDE if prediction.get("device_kind") == "cuda" else ()
    return max(float(held["total"]) - sum(float(held[name]) for name in outside) for held in prediction["memory_bytes"])


def memory_band(prediction: Mapping[str, Any], stage: int, whole: ComparedPart) -> Band:
    """The band of what `memory` compares, which is less than the prediction on CUDA."""
    low, high = prediction["band_bytes"][stage]
    total = float(prediction["memory_bytes"][stage]["total"]) or 1.0
    return grows(whole.predicted, (low / total, high / total))


def errs_most(compared: Sequence[ComparedPart]) -> ComparedPart | None:
    """The part whose prediction is furthest off, in seconds or bytes. None: no part was measured."""
    known = [one for one in compared[1:] if one.measured is not None]
    return max(known, key=lambda one: abs(one.missing), default=None)


def said_of(compared: Sequence[ComparedPart], band: Sequence[float]) -> str:
    """How far the prediction of a step is off, which part errs most, and what that means. Empty: nothing was measured.

    `band`: between which seconds 8 of 10 such steps lie.
    """
    step, part = compared[0], errs_most(compared)
    if step.error is None or step.measured is None:
        return ""
    inside = "inside of" if band[0] <= step.measured <= band[1] else "outside of"
    length = "long" if step.error > 0 else "short"
    said = f"The step is predicted {of_share(abs(step.error))} too {length}, {inside} its band."
    if part is None or part.measured is None:
        return f"{said} Its parts were not measured."
    more, less = MEANS[part.name]
    said += (
        f" The part that errs most is {part.name}: predicted {of_seconds(part.predicted)}, measured "
        f"{of_seconds(part.measured)}, which is {of_share(abs(part.missing) / step.measured)} of a step. "
    )
    return f"{said}{more if part.missing > 0 else less}."


def lines(compared: Sequence[ComparedPart]) -> Iterator[str]:
    """A line for each that was measured: the whole, then its parts."""
    for number, one in enumerate(compared):
        if one.measured is None:
            continue
        words = of_bytes if compared[0].name == MEMORY else of_seconds
        error = "" if one.error is None else f": {of_change(one.error)}"
        numbers = f"predicted {words(one.predicted)}, measured {words(one.measured)}{error}"
        yield f"{'  ' * bool(number)}{one.name}: {numbers}"


def beside(prediction: Mapping[str, Any], found: MeasuredStep) -> Iterator[str]:
    """What a run says at its end: predicted, measured, and the error, of time and memory by part."""
    compared = times(prediction, found.step_s, found.parts_s)
    yield from lines(compared)
    yield from lines(memory(prediction, found.stage, found.memory))
    if said := highest(prediction, found):
        yield said
    if said := said_of(compared, prediction["band_s"]):
        yield said
