"""In: the progress of a run. Out: a line every log.every steps, on a terminal above a live bar; on rank 0 only.
Does not compute or record anything."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from codescent.base.amounts import NOTHING, rounded
from codescent.base.console import new_console
from codescent.base.messages import INFO, WARNING, message, shows_progress
from codescent.base.visible import visible

if TYPE_CHECKING:
    from codescent.train.validate import Validated

LIVE = 52
"""Largest width of the text beside the bar."""
BAR, SMALLEST_BAR = 24, 8
LEAST = 6
"""Parts of a line that stay in the narrowest terminal."""


@dataclass(frozen=True)
class StepShown:
    """What is shown of a step: its loss in nats per token, the norm of the gradient before clipping, tokens/s of all
    ranks, MFU (None: unknown), the peak of the first rank's memory so far, the rank that slows the others, and in words
    a measure that says more than the loss."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    mfu: float | None
    peak_memory_bytes: int
    slowest: str = ""
    measure: str = ""


class Display:
    """Prints the progress of a run. On every rank except the first all methods do nothing."""

    def __init__(self, *, shown: bool, num_steps: int, first_step: int) -> None:
        self.shown = shown
        self.num_steps = num_steps
        self.first_step = first_step
        self.console = new_console(soft_wrap=True)
        self.live: Progress | None = None
        self.task: Any = None
        self.begin = 0.0
        self.unsaid = ""  # the line of the last step, if it is not printed

    def __enter__(self) -> Display:
        if self.shown and self.console.is_terminal and shows_progress():
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = min(BAR, self.console.width - LIVE - 1)  # a narrower terminal has room for the text only
            columns = (text, BarColumn(bar_width=bar)) if bar >= SMALLEST_BAR else (text,)
            self.live = Progress(*columns, console=self.console, refresh_per_second=4, transient=True)
            self.task = self.live.add_task("first step", total=self.num_steps, completed=self.first_step)
            self.live.start()
        self.begin = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def last(self) -> None:
        """No step follows: print the line of the last one, if it has none yet. What is said next comes after it."""
        if self.unsaid:
            self.say(self.unsaid)
            self.unsaid = ""
        if self.live is not None:
            self.live.stop()

    def say(self, text: str, level: int = INFO) -> None:
        """Log a line, which is printed above the bar."""
        if self.shown:
            message(visible(text), level, self._print)

    def warn(self, text: str) -> None:
        """Log a line that --quiet shows, too."""
        self.say(text, WARNING)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)

    def step(self, done: StepShown, *, due: bool) -> None:
        """Show that a step is done: print a line if `due`, and on a terminal move the bar."""
        if not self.shown:
            return
        step, loss = done.step, done.loss
        left_s = (time.monotonic() - self.begin) / max(1, step - self.first_step) * (self.num_steps - step)
        line = self._line(done, clock(left_s))
        self.unsaid = "" if due else line
        if due:
            self.say(line)
        if self.live is not None:
            beside = f"step {step}/{self.num_steps}  loss {_loss(loss)}  ETA {clock(left_s)}"
            self.live.update(self.task, completed=step, description=beside)

    def _line(self, done: StepShown, eta: str) -> str:
        """All of a step; on a terminal without the peak of the memory, and then without MFU, if there is no room."""
        parts = [
            f"step {done.step}/{self.num_steps}",
            done.measure or f"loss {_loss(done.loss)}",
            f"lr {rounded(done.learning_rate)}",
            f"norm {_norm(done.grad_norm)}",
            _rate(done.tokens_per_s),
            f"MFU {_percent(done.mfu)}",
            f"peak {_memory(done.peak_memory_bytes)}",
            *([done.slowest] if done.slowest else []),
            f"ETA {eta}",
        ]
        grows = len(str(self.num_steps)) - len(str(done.step))  # later steps have more digits, and the same words
        while self.console.is_terminal and len(parts) > LEAST and len("  ".join(parts)) + grows > self.console.width:
            del parts[-2]
        return "  ".join(parts)

    def validation(self, step: int, found: Validated, means: Mapping[str, float | None]) -> None:
        """Print a validation loss, and those of the moving average of the weights and of each corpus, if there are.

        `means`: what the loss means beside, by name (`Objective.of_validation`).
        """
        average = "" if found.of_ema is None else f", of the averaged weights {found.of_ema:.4f}"
        corpora = ", ".join(f"{name} {loss:.4f}" for name, loss in found.by_corpus.items())
        beside = corpora or ", ".join(f"{name} {value:.4f}" for name, value in means.items() if value is not None)
        each = f" ({beside})" if beside else ""
        self.say(f"step {step}/{self.num_steps}  validation loss {found.known:.4f}{average}{each}")


def _loss(loss: float) -> str:
    return f"{loss:.{4 if loss < 10 else 3}f}"


def _norm(norm: float) -> str:
    """Two digits: 0.52, 12, 1.2e3, 5.0e-6."""
    return f"{norm:.2g}" if 1e-3 <= norm < 99.5 or norm == 0 or not math.isfinite(norm) else rounded(norm)


def _rate(tokens_per_s: float) -> str:
    """Three digits, or four: 1,553 tok/s, 15.5k tok/s, 1.55M tok/s."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens_per_s >= max(0.9995 * size, 9950):
            number = tokens_per_s / size
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}{unit} tok/s"
    return f"{tokens_per_s:,.0f} tok/s"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"


def _memory(number: int) -> str:
    gib = number / 2**30
    return f"{gib:.{1 if gib < 99.95 else 0}f} GiB" if gib >= 0.9995 else f"{number / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """A duration: 1:05 (minutes and seconds), 2h05 or 3d04h."""
    if seconds < 3600 - 0.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02}" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"
