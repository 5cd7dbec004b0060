"""In: the numbers of runs. Out: sentences about runs that compute much slower than another one on the same processor.
Does not look at the ranks of a run (slow.py does): all of them may be slow alike, as on a machine that is busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.amounts import of_rate
from codescent.report.content import Said
from codescent.report.summary import Summary

TIMES = 3.0
"""A run is named if another one is so many times as fast, for each core or device that it uses."""
PRODUCTS = 1.5
"""It is said if products of matrices differed so much, too, when the two runs began."""


def outpaced(summaries: Sequence[Summary]) -> Iterator[Said]:
    """The runs that compute much slower than the fastest one of the same model on the same processor, and why."""
    groups: dict[str, list[tuple[float, Summary]]] = {}
    for one in summaries:
        if (speed := _speed(one)) is not None:
            groups.setdefault(_alike(one), []).append((speed, one))
    for group in groups.values():
        speed, fastest = max(group, key=lambda found: found[0])
        for slower, one in group:
            if speed >= TIMES * slower:
                unit = "core" if _is_on_cpu(one) else "device"
                yield (
                    one.name,
                    f"computes {speed / slower:.0f} times slower than {fastest.name}, the same model on the same "
                    f"processor: {of_rate(slower, 'FLOP/s')} a {unit}, not {of_rate(speed, 'FLOP/s')}."
                    f"{_why(one, fastest)}",
                )


def _speed(one: Summary) -> float | None:
    """Model FLOP/s of each core or device that a run uses, in its forward and backward passes: waiting for others and
    for data says nothing of the processor. None: unknown."""
    plan, facts = one.run.plan, one.run.environment
    if plan is None or not facts.get("processor") or not one.ranks:
        return None
    used = len(one.ranks) * plan.devices
    if _is_on_cpu(one):
        threads, cores = facts.get("num_threads"), facts.get("cores")
        if not isinstance(threads, int) or not isinstance(cores, int) or min(threads, cores) < 1:
            return None
        used = min(len(one.ranks) * threads, cores * len(set(one.run.hosts)))
    compute_s = sum(rank.compute_s for rank in one.ranks) / len(one.ranks)
    return plan.flops().total_flops / compute_s / used if compute_s > 0 else None


def _is_on_cpu(one: Summary) -> bool:
    return one.run.environment.get("device") == "cpu"


def _alike(one: Summary) -> str:
    """What runs have in common that are compared: processor, device, model."""
    assert one.run.plan is not None
    facts, model = one.run.environment, one.run.plan.model
    return repr(
        [*(facts.get(name) for name in ("processor", "cores", "device")), model.kind, sorted(model.sizes.items())]
    )


def _why(one: Summary, fastest: Summary) -> str:
    """What the runs have recorded that explains it; "": nothing."""
    assert one.run.plan is not None
    assert fastest.run.plan is not None
    reasons = []
    precisions = [run.plan.work.precision for run in (one.run, fastest.run) if run.plan is not None]
    if precisions[0] != precisions[1]:
        reasons.append(f"it computes in {precisions[0]}, not in {precisions[1]}")
    peaks = [run.environment.get("peak_flops_per_s") for run in (one.run, fastest.run)]
    known = [peak for peak in peaks if isinstance(peak, int | float) and peak > 0]
    if len(known) == 2 and known[1] >= PRODUCTS * known[0]:
        busy = one.run.busy_at_peak
        load = f", while other programs used {busy[0]:.1f} of {busy[1]} cores" if busy is not None else ""
        reasons.append(f"products of matrices were {known[1] / known[0]:.1f} times slower when it began{load}")
    return f" Why: {'; '.join(reasons)}." if reasons else " Other programs may have used the cores."
