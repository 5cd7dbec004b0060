"""In: an error of a run on one rank. Out: `OutOfMemory`, with what held the memory and what needs less; or FileChanged,
with the command that continues the run.
Does not see a kill by the kernel (launch/memory_kills.py does) and does not count (memory.py does)."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from codescent.base.amounts import of_bytes
from codescent.base.command import resume_command
from codescent.base.device_kinds import kernels_of
from codescent.base.errors import UserError
from codescent.data.file_array import FileChanged
from codescent.planner.less_memory import Shortage, advice, held_in_words
from codescent.record import RunFolder
from codescent.record.memory import PARTS
from codescent.train.failed_allocation import OutOfMemory, asked_bytes, is_out_of_memory
from codescent.train.memory import WHERE, MemoryWatch, memory_now_bytes
from codescent.train.open import OpenRun


class Explained:
    """A block of a run. If memory runs out in it, it raises OutOfMemory, and the run folder gets the event
    "out_of_memory". FileChanged gets a sentence: how to continue the run.

    `watch`: of the run's executor, as soon as there is one.
    """

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self.watch: MemoryWatch | None = None
        self.where, self.has_begun = "", False

    def __enter__(self) -> Explained:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, FileChanged):
            raise FileChanged(f"{error}; then continue the run: {resume_command(self.run.path)}") from error
        if error is None or not is_out_of_memory(error):
            return
        short, asked = self._shortage(), asked_bytes(error)
        # Frames hold tensors, and what follows needs some memory.
        self.watch = None
        _clear(error)
        run, this_rank = self.run, self.run.world.this_rank
        wanted = "" if asked is None else f": {of_bytes(asked)} more were asked for"
        said = f"{run.path}: rank {this_rank.rank} of {this_rank.world_size} ran out of memory {self.where}{wanted}"
        try:
            more, change = advice(run.config, run.plan, run.dataset.vocab_size, short)
            sentences = [said, held_in_words(run.plan, short), more]
        except MemoryError:  # not even for words
            sentences, change = [said], None
        if change is not None and self.has_begun:
            sentences.append(f"to go on with the first of them: {resume_command(run.path, *change.words())}")
        self._record(short, asked, sentences)
        raise OutOfMemory(*sentences) from None

    def _shortage(self) -> Shortage:
        run, rank = self.run, self.run.world.this_rank.rank
        compiled = run.machine["compile"]["choice"]
        held, kind = memory_now_bytes(run.world.device), kernels_of(run.world.device.type)
        self.where, self.has_begun = "before the first step", False
        if self.watch is None:
            return Shortage(rank, held, dict.fromkeys(PARTS, 0), 0, kind, compiled)
        step, index = self.watch.running
        program = run.plan.schedule.program(run.world.stage, max(step, 1) - 1)
        inside = 0 <= index < len(program)
        at = f'in "{program[index]}"' if inside else WHERE.get(index, "at the end of its instructions")
        self.where, self.has_begun = (f"in step {step}, {at}", True) if step else (at, False)
        failed = self.watch.failed
        if failed is None:
            return Shortage(rank, held, self.watch.split, self.watch.most["activations_bytes"], kind, compiled)
        return Shortage(rank, max(failed.held_bytes, held), failed.split, failed.activations_bytes, kind, compiled)

    def _record(self, short: Shortage, asked: int | None, sentences: list[str]) -> None:
        """Write the event. A rank without the folder's lock may do so, too: an event is one appended line."""
        run = self.run
        with suppress(UserError):
            folder = run.folder or RunFolder.open(run.path)
            folder.event(
                "out_of_memory",
                rank=short.rank,
                where=self.where,
                asked_bytes=asked,
                held_bytes=short.held_bytes,
                **short.split,
                problems=sentences,
            )


def _clear(error: BaseException | None) -> None:
    """Free the local variables of the frames through which an error came."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            with suppress(RuntimeError):  # a frame that is still running
                trace.tb_frame.clear()
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
