"""In: the progress of a run. Out: a live line on a terminal, plain lines on other outputs; on rank 0 only.
Does not compute or record anything."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from codescent.base.visible import visible


class Display:
    """Prints the progress of a run. On every rank except the first all methods do nothing."""

    def __init__(self, *, shown: bool, num_steps: int, first_step: int) -> None:
        self.shown = shown
        self.num_steps = num_steps
        self.first_step = first_step
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.live: Progress | None = None
        self.task: Any = None
        self.begin = 0.0

    def __enter__(self) -> Display:
        if self.shown and self.console.is_terminal:
            self.live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[news]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
                refresh_per_second=4,
            )
            self.task = self.live.add_task("step", total=self.num_steps, completed=self.first_step, news="")
            self.live.start()
        self.begin = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self.shown:
            self.console.print(visible(text), markup=False)

    def step(self, step: int, loss: float, tokens_per_s: float, *, due: bool) -> None:
        """Show that a step is done: update the live line, or without a terminal print a line if `due`."""
        news = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if self.live is not None:
            self.live.update(self.task, completed=step, news=news)
        elif due:
            done = step - self.first_step
            left_s = (time.monotonic() - self.begin) / max(1, done) * (self.num_steps - step)
            self.say(f"step {step}/{self.num_steps}  {news}  ETA {_clock(left_s)}")

    def validation(self, step: int, loss: float) -> None:
        """Print a validation loss."""
        self.say(f"step {step}/{self.num_steps}  validation loss {loss:.4f}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
