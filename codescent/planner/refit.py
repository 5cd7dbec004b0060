"""In: runs with what they measured, a software. Out: its constants of time and of memory, refitted; how far they err.
Does not fit (fitted.py does) and does not read run folders (measure/runs.py does)."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from codescent.clusters.cluster import Software
from codescent.cost.price import memory_of
from codescent.cost.stage_memory import StageMemory
from codescent.planner.bands import band_of
from codescent.planner.beside import OUTSIDE
from codescent.planner.fitted import CONSTANTS, NOISE, Constant, Fitted, MeasuredRun, fit, most_telling
from codescent.planner.measured import MeasuredStep

MOST, MOST_OF_FEW, MANY = 8, 3, 8
"""The most constants; the most of fewer than MANY runs."""
MEMORY_NOISE = 0.03
"""Standard deviation of the logarithm of a measured peak, relative to a perfect prediction."""
TO_QUANTILE = statistics.NormalDist().inv_cdf(0.9)
"""Standard deviations between the middle and the 90 % quantile."""
HELD, FRAGMENTS = "held_bytes", "fragments"
"""The constant of memory on a CPU, and on CUDA."""


@dataclass(frozen=True)
class FittingRun:
    """A run to fit with: its step, and the memory of its fullest rank."""

    name: str
    timed: MeasuredRun
    measured: MeasuredStep

    @property
    def peak_bytes(self) -> float:
        """Measured; 0: unknown."""
        return float((self.measured.memory or {}).get("peak_bytes") or 0.0)

    @property
    def reserved_bytes(self) -> float:
        """What torch's allocator has reserved on CUDA; 0: on a CPU."""
        return float((self.measured.memory or {}).get("reserved_bytes") or 0.0)

    def held(self, software: Software) -> StageMemory:
        """Predicted, of the stage whose memory was measured."""
        software = replace(software, compiles=self.timed.software.compiles)
        return memory_of(self.timed.plan, self.timed.cluster, software)[self.measured.stage]

    def predicted_bytes(self, software: Software) -> float:
        """What is compared with the peak: on CUDA without what torch does not count."""
        held = self.held(software)
        return held.total - sum(float(getattr(held, name)) for name in OUTSIDE if self.reserved_bytes)


@dataclass(frozen=True)
class Refit:
    """Constants that runs have changed.

    Attributes:
        runs: in order.
        start: the software before.
        fitted: the constants of time.
        memory: the constant of memory, and its value; None: no run has measured its memory.
    """

    runs: Sequence[FittingRun]
    start: Software
    fitted: Fitted
    memory: tuple[str, float] | None

    @cached_property
    def software(self) -> Software:
        """With the new constants, and the bands of the runs: each beside the constants that the others give."""
        found = self.fitted.software(self.start)
        if self.memory is not None:
            found = replace(found, **{self.memory[0]: self.memory[1]})  # type: ignore[arg-type]
        time = band_of(list(self.left_out), TO_QUANTILE * NOISE)
        memory = band_of(self.memory_left_out, TO_QUANTILE * MEMORY_NOISE)
        return replace(found, band=time or found.band, memory_band=memory or found.memory_band)

    @property
    def changed(self) -> Iterator[str]:
        """The names of the constants that were fitted."""
        yield from (one.name for one in self.fitted.constants)
        yield from (self.memory[0],) if self.memory else ()

    @property
    def before(self) -> Sequence[float]:
        """[runs]: logarithms of measured time over predicted, with the constants of the start."""
        zero, none = np.zeros(0), ()
        return [math.log(run.timed.step_s / run.timed.priced(zero, none).step_s) for run in self.runs]

    @cached_property
    def left_out(self) -> Sequence[float]:
        """[runs]: the same, each with the constants that the other runs give."""
        return [float(one) for one in self.fitted.left_out_residuals([run.timed for run in self.runs])]

    @cached_property
    def memory_left_out(self) -> Sequence[float]:
        """[runs that measured it]: logarithms of measured memory over predicted, with the constant of the others."""
        known = [run for run in self.runs if run.peak_bytes]
        found = []
        for one in known if len(known) > 1 else []:
            other = _memory([run for run in known if run is not one], self.start)
            assert other is not None
            software = replace(self.start, **{other[0]: other[1]})  # type: ignore[arg-type]
            found.append(math.log(one.peak_bytes / one.predicted_bytes(software)))
        return found


def refit(runs: Sequence[FittingRun], start: Software, constants: Sequence[Constant]) -> Refit:
    """The constants that runs give, on top of those of `start`: what few runs do not tell stays where it was."""
    return Refit(runs, start, fit([run.timed for run in runs], constants), _memory(runs, start))


def _memory(runs: Sequence[FittingRun], start: Software) -> tuple[str, float] | None:
    """The constant of memory: what a rank holds besides (CPU), or what its allocator does (CUDA). Medians."""
    known = [run for run in runs if run.peak_bytes]
    if not known:
        return None
    if known[0].reserved_bytes:
        return FRAGMENTS, max(0.0, statistics.median(run.reserved_bytes / run.peak_bytes - 1.0 for run in known))
    besides = (run.peak_bytes - run.held(replace(start, held_bytes=0.0)).total for run in known)
    return HELD, max(0.0, statistics.median(besides))


def constants_of(runs: Sequence[MeasuredRun], names: Sequence[str] | None) -> tuple[Constant, ...]:
    """The constants to fit: those that are named, else those that change the predictions of these runs most."""
    if names is None:
        return most_telling(runs, most_of(len(runs)))
    return tuple(one for one in CONSTANTS if one.name in names)


def most_of(runs: int) -> int:
    """How many constants so many runs can give."""
    return min(runs, MOST if runs >= MANY else MOST_OF_FEW)


def refusals(names: Sequence[str], runs: int) -> Iterator[str]:
    """Why constants of these names cannot be fitted to so many runs."""
    known = [one.name for one in CONSTANTS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            yield f"{name!r} cannot be fitted; " + (f"did you mean {near[0]}?" if near else f"{', '.join(known)} can")
    wanted, most = len(set(names)), most_of(runs)
    if runs > 0 and wanted > most:
        few = f", and at most {MOST_OF_FEW} to fewer than {MANY} runs" if most == MOST_OF_FEW else ""
        yield (
            f"{wanted} constants cannot be fitted to {runs} run{'s' * (runs != 1)}: each needs a run{few}; "
            f"name at most {most}, or give more runs"
        )
