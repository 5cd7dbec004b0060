"""In: [profile] of a config, the steps of a run. Out: traces and tables of operators of every rank, on one clock.
Does not name the ranges (base/ranges.py) or read a trace (trace/, report/profile.py)."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from codescent.base import writing
from codescent.base.agreement import together
from codescent.base.device import activities, offered
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.range_names import step_name
from codescent.base.ranges import Recording, named
from codescent.meeting.clocks import Offset, clock_of, measure
from codescent.trace import operators, ranks
from codescent.train.open import OpenRun
from codescent.train.report import Report

RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_KINETO_LOG = "KINETO_LOG_LEVEL"


class Profiler:
    """Records the windows of a run, on one of its ranks. A window is the same steps of the run on every rank.

    A run that is resumed after a window does not record it again. Leaving the `with` block ends a window early: the
    recorded steps are written. After an error each rank writes its own file alone, because others may have ended.

    Attributes:
        torch: torch's profiler; None: no window has steps left.
    """

    def __init__(self, run: OpenRun, report: Report) -> None:
        self.run, self.report, self.keys = run, report, run.config.profile
        self.cycle = self.keys.wait + self.keys.warmup + self.keys.active
        self.done = run.first_step  # the last step of the run that is finished
        self.first = 0  # the first recorded step of the window
        self.is_alone = False  # after an error
        self.offset, self.begin_ns = Offset(), 0
        self.torch: Any = None
        if self.keys.active and self.done < self.cycle * self.keys.repeat:
            self._start()

    def _start(self) -> None:
        os.environ.setdefault(_KINETO_LOG, "6")  # torch 2.13 prints its own start and stop, at level 5
        keys = self.keys
        clocks = together(UserError, clock_of)
        self.shares_clock = not clocks[0] or clocks[self.run.world.this_rank.rank] == clocks[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of warmup = 0; docs/profile.md says it
            self.schedule = torch.profiler.schedule(
                wait=keys.wait, warmup=keys.warmup, active=keys.active, repeat=keys.repeat
            )
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # each window has its own files
        first_step = self.done
        self.torch = torch.profiler.profile(
            activities=activities(self.run.world.device),
            schedule=lambda number: self.schedule(first_step + number),
            on_trace_ready=self._write,
            record_shapes=keys.shapes,
            with_stack=keys.stacks,
            profile_memory=keys.memory,
        )
        self.torch.start()
        self._look()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.torch is None:
            return
        self.is_alone = error is not None
        if not self.first:
            self.report.profiled(f"no profile: the run ended at step {self.done}, before the window", step=self.done)
        with suppress(*([Exception] if self.is_alone else [])):
            self._stop()

    def step(self, number: int) -> AbstractContextManager[Any]:
        """The range of a step, numbered from 1."""
        return named(step_name(number))

    def stepped(self, number: int) -> bool:
        """A step is done. Collective at the end of a window: its files are written. Returns whether one has ended."""
        self.done, recorded = number, self.first
        self.torch.step()
        if number >= self.cycle * self.keys.repeat:
            self._stop()
        else:
            self._look()
        return bool(recorded) and self.first != recorded

    def _look(self) -> None:
        """Record the next step, if it is one of a window."""
        if self.schedule(self.done) in RECORDS and not self.first:
            self.offset, self.begin_ns, self.first = self._measured(), time.time_ns(), self.done + 1
            Recording.flights = []  # of the window before, those that ended after it
            Recording.sees_flights = not offered(self.run.world.device).activity
            Recording.on = True

    def _stop(self) -> None:
        torch_profiler, self.torch = self.torch, None
        torch_profiler.stop()

    def _measured(self) -> Offset:
        """This rank's clock against that of rank 0. Ranks of one machine share a clock."""
        return Offset() if self.shares_clock else measure(self.run.world.store)

    def _write(self, recorded: Any) -> None:
        """Write the files of a window, which has ended."""
        Recording.on = False
        flights, Recording.flights = Recording.flights, []
        first, self.first = self.first, 0
        if not first:  # torch also ends a window that has recorded nothing
            return
        window, steps = (first - 1) // self.cycle + 1, (first, max(first, self.done))
        complete = self.done == window * self.cycle
        if self.is_alone:
            folder = ranks.folder_of(self.run.path, window)
            self._write_rank(recorded, folder, self._head(window, steps, complete), flights, self.begin_ns)
            said = f"the run failed in step {self.done + 1}: each rank has written its own trace, without a merged one"
            self.report.profiled(f"profile of {_words(steps)} in {folder}: {said}", step=self.done)
            return
        world = self.run.world
        place: list[Any] = world.from_first(lambda: [str(self.run.follow()), self.begin_ns])
        folder = ranks.folder_of(Path(place[0]), window)
        head = self._head(window, steps, complete)
        try:
            together(UserError, lambda: self._write_rank(recorded, folder, head, flights, place[1]))
            world.from_first(lambda: _merge(folder, world.this_rank.world_size))
        except UserError as error:  # the run goes on without
            problems = list(error.problems)
            self.report.profiled(
                f"no profile of {_words(steps)}: {'; '.join(problems)}", step=self.done, problems=problems
            )
            return
        early = "" if complete else f"; the run ended in the window, whose last step is {window * self.cycle}"
        self.report.profiled(
            f"profile of {_words(steps)} in {folder}{early}; read it: codescent report --profile {place[0]}",
            **{"step": self.done, "steps": list(steps), "path": str(folder), "complete": complete},
        )

    def _head(self, window: int, steps: tuple[int, int], complete: bool) -> ranks.RankHead:
        this_rank, offset = self.run.world.this_rank, self.offset
        if not self.is_alone:
            offset = offset.mean(self._measured())
        return ranks.RankHead(
            rank=this_rank.rank,
            world_size=this_rank.world_size,
            window=window,
            steps=steps,
            offset_s=offset.offset_ns / 1e9,
            error_s=offset.error_ns / 1e9,
            device=self.run.world.device.type,
            torch=torch.__version__,
            axes=dict(Recording.axes),
            complete=complete,
        )

    def _write_rank(
        self,
        recorded: Any,
        folder: Path,
        head: ranks.RankHead,
        flights: Sequence[tuple[str, int, int]],
        origin_ns: int,
    ) -> None:
        """Write this rank's trace and table of operators. Raises UserError: a file cannot be written."""
        try:
            above = [folder] if head.window == 1 else [folder.parent, folder]
            for made in above:
                writing.make_folder(made, above[0].parent)
            path, counted = ranks.file_of(folder, head.rank), operators.Operators()
            with writing.hidden_folder(folder) as hidden:
                raw = hidden / "raw.json"
                recorded.export_chrome_trace(str(raw))
                ranks.write_rank(path, raw, head, flights, origin_ns, counted.add)
            replace_file(operators.file_of(folder, head.rank), operators.to_csv(counted.rows()))
        except OSError as error:
            raise UserError(f"{folder}: rank {head.rank}: {in_words(error)}") from error
        except RuntimeError as error:  # of torch, which does not say more
            raise UserError(f"{folder}: rank {head.rank}: torch cannot write its trace: {error}") from error


def _merge(folder: Path, world_size: int) -> None:
    """Write the traces of all ranks as one. Raises UserError: one is not there, or the disk is full."""
    try:
        ranks.merge([ranks.file_of(folder, rank) for rank in range(world_size)], folder / ranks.MERGED)
    except OSError as error:
        raise UserError(f"{folder / ranks.MERGED}: {in_words(error)}") from error


def _words(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"steps {first} to {last}"
