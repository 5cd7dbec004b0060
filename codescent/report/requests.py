"""In: a run, the requests that its model has answered. Out: the report about them: whether prompts drift.
Does not read the log (results/answered.py does) or decide what drift is (results/drift.py does)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from codescent.base.amounts import of_number, of_seconds, of_share
from codescent.base.counted import counted
from codescent.report import ran
from codescent.report.content import Cell, Column, KeyQuestion, Picture, Report, ReportSection, Said, Table, Words
from codescent.report.run_tables import number
from codescent.report.style import BLUE, PICTURE_IN, VERMILION, plain
from codescent.report.summary import summaries
from codescent.results import Run
from codescent.results.answered import AnsweredPrompt
from codescent.results.drift import LEAST, SURE, RequestWindow, windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIKELY = 1.25
"""Prompts are called unlike the validation split if their perplexity surely is more than so many times its own."""
MOST_NATS = 690.0
COLUMNS = (
    Column("window", "prompts that follow each other; each window has equally many"),
    Column("from", "time of its first request (UTC)"),
    Column("prompts"),
    Column("length, 10 %", "tokens: a tenth of the prompts are shorter"),
    Column("median"),
    Column("90 %"),
    Column("D", "distance of the lengths from those of the first window (Kolmogorov-Smirnov), between 0 and 1"),
    Column("perplexity", "of the prompts, by the model that answered them; 95 % interval"),
    Column("/ validation", "perplexity, divided by that of the run's validation split"),
    Column("answer, median", "tokens of an answer"),
    Column("cut", "share of the answers that the largest number of tokens has ended"),
    Column("seconds, median", "of a request, to the end of its answers"),
    Column("95 %"),
)
HOW = (
    f"Windows have equally many prompts, at least {LEAST}. Each is compared with the first one. A difference is called "
    f"drift if chance alone would make it in at most {of_share(SURE)} of such reports, over all windows.",
    "Lengths are compared by the two-sample test of Kolmogorov and Smirnov. Perplexities are e to the power of the "
    "mean loss per token, without the first token of each prompt; errors are those of prompts that are independent.",
    "The validation loss is the last one that the run has measured up to the checkpoint that answered. A run on "
    "conversations measures it on responses alone, which prompts are not: compare its windows with each other.",
    "A short prompt has little context, so its tokens are less likely. If lengths drift, perplexities move, too.",
)


def requests_report(run: Run, prompts: Sequence[AnsweredPrompt], damaged: int) -> Report:
    """The report about the requests that a run's model has answered."""
    parts, validation = windows(prompts), validation_loss(run, prompts)
    known = summaries([run])
    config = ran.of_runs(known)
    pictures = [_lengths(parts, config), _perplexities(parts, validation, config)] if len(parts) > 1 else []
    sections = [
        ReportSection("windows", "Windows of requests", [_table(parts, validation)] if parts else []),
        ReportSection("how", "How this was computed", [Words(HOW, listed=True)]),
    ]
    answers = [
        KeyQuestion("Do the lengths of prompts drift?", list(_said_of_lengths(parts))),
        KeyQuestion(
            "Are prompts like the text that the model was validated on?", list(_said_of_losses(parts, validation))
        ),
    ]
    about = list(_about(run, prompts, damaged))
    return Report(f"Requests to {run.name}", about, answers, [one for one in sections if one.items], pictures)


def validation_loss(run: Run, prompts: Sequence[AnsweredPrompt]) -> float:
    """The last validation loss of the run, up to the step that answered last; NaN: there is none."""
    steps, losses = run.columns["step"], run.columns["val_loss"]
    answered = [one.step for one in prompts if one.step is not None]
    known = np.isfinite(losses) & (steps <= (answered[-1] if answered else math.inf))
    return float(losses[known][-1]) if known.any() else math.nan


def _about(run: Run, prompts: Sequence[AnsweredPrompt], damaged: int) -> Iterator[str]:
    if not prompts:
        yield "The log has no answered request."
    else:
        first, last = (_time(one) for one in (prompts[0], prompts[-1]))
        steps = sorted({one.step for one in prompts if one.step is not None})
        of = f", by the checkpoint{'s' * (len(steps) > 1)} of step {', '.join(map(str, steps[-4:]))}" if steps else ""
        yield f"{counted(len(prompts), 'prompt')} that {run.name} has answered from {first} to {last} (UTC){of}."
    if damaged:
        yield f"{counted(damaged, 'line')} of the log cannot be read, and {'is' if damaged == 1 else 'are'} left out."


def _time(one: AnsweredPrompt) -> str:
    return datetime.fromtimestamp(one.time_s, UTC).strftime("%Y-%m-%d %H:%M")


def _drifts(parts: Sequence[RequestWindow], which: str) -> list[int]:
    """The windows, from 1, that differ from the first one by more than chance."""
    sure = SURE / max(1, len(parts) - 1)
    return [at for at, part in enumerate(parts, 1) if getattr(part, which) < sure]


def _said_of_lengths(parts: Sequence[RequestWindow]) -> Iterator[Said]:
    if len(parts) < 2:
        yield "", f"There are fewer than {2 * LEAST} prompts: too few to compare them with earlier ones."
        return
    far = _drifts(parts, "chance")
    if not far:
        yield "", f"No: in none of {len(parts)} windows are they further from the first than chance allows."
        return
    most = max((parts[at - 1] for at in far), key=lambda part: part.distance)
    medians = [np.median([one.prompt_tokens for one in part.prompts]) for part in (parts[0], most)]
    yield (
        "",
        f"Yes: {_named(far)} {'differs' if len(far) == 1 else 'differ'} from the first. Farthest is D = "
        f"{most.distance:.2f}, where the median is {medians[1]:.0f} tokens in place of {medians[0]:.0f}.",
    )


def _said_of_losses(parts: Sequence[RequestWindow], validation: float) -> Iterator[Said]:
    if not parts:
        return
    last = parts[-1]
    if math.isfinite(validation) and math.isfinite(last.loss):
        ratio = _e_to(last.loss - validation)
        unlike = math.isfinite(last.error) and last.interval[0] - validation > math.log(LIKELY)
        said = "No" if unlike else "Yes, as far as this says"
        yield (
            "",
            f"{said}: the perplexity of the last window is {of_number(_e_to(last.loss))}, {ratio:.2f} times that of "
            f"the validation split, {of_number(_e_to(validation))}.",
        )
    elif not math.isfinite(validation):
        yield "", "The run has measured no validation loss, so prompts can be compared with earlier ones only."
    if far := _drifts(parts, "loss_chance"):
        change = _e_to(parts[far[-1] - 1].loss - parts[0].loss)
        yield "", f"Perplexity drifts: {_named(far)} differ{'s' * (len(far) == 1)} from the first, {change:.2f} times."
    elif len(parts) > 1:
        yield "", "Perplexity does not drift: no window differs from the first by more than chance."


def _e_to(loss: float) -> float:
    """A perplexity, or a ratio of two. Beyond MOST_NATS no float has it."""
    return math.exp(min(loss, MOST_NATS))


def _named(numbers: Sequence[int]) -> str:
    return f"window{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _table(parts: Sequence[RequestWindow], validation: float) -> Table:
    far, unlikely = _drifts(parts, "chance"), _drifts(parts, "loss_chance")
    rows = []
    for at, part in enumerate(parts, 1):
        lengths = [one.prompt_tokens for one in part.prompts]
        seconds = [one.seconds for one in part.prompts]
        low, high = (_e_to(value) for value in part.interval)
        perplexity, ratio = _e_to(part.loss), _e_to(part.loss - validation)
        cut = sum(one.is_cut for one in part.prompts) / len(part.prompts)
        rows.append(
            [
                Cell(str(at), at),
                Cell(_time(part.prompts[0]), part.prompts[0].time_s),
                Cell(f"{len(part.prompts):,}", len(part.prompts)),
                *(number(value, f"{value:.0f}") for value in np.quantile(lengths, [0.1, 0.5, 0.9]).tolist()),
                number(part.distance, f"{part.distance:.2f}", odd=at in far),
                number(perplexity, f"{perplexity:.3g} ({low:.3g} to {high:.3g})", odd=at in unlikely),
                number(ratio, f"{ratio:.2f}"),
                number(value := float(np.median([one.tokens for one in part.prompts])), f"{value:.0f}"),
                number(cut, of_share(cut)),
                *(number(value, of_seconds(value)) for value in np.quantile(seconds, [0.5, 0.95]).tolist()),
            ]
        )
    return Table(COLUMNS, rows)


def _lengths(parts: Sequence[RequestWindow], config: str) -> Picture:
    """Median and deciles of the lengths of prompts, window by window."""

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_in, PICTURE_IN[1]), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        shares = np.array([np.quantile([one.prompt_tokens for one in part.prompts], [0.1, 0.5, 0.9]) for part in parts])
        at = np.arange(1, len(parts) + 1)
        axes.fill_between(at, shares[:, 0], shares[:, 2], color=BLUE, alpha=0.2, lw=0)
        axes.plot(at, shares[:, 1], color=BLUE, marker="o", ms=4)
        axes.set_ylabel("prompt (tokens)", fontsize=9)
        axes.set_xlabel("window of requests", fontsize=9)
        axes.set_ylim(bottom=0)
        plain(axes)
        return figure

    caption = "Line: median. Band: from the 10 % shortest to the 10 % longest prompts."
    return Picture("prompt_lengths", "Lengths of prompts", caption, draw, config)


def _perplexities(parts: Sequence[RequestWindow], validation: float, config: str) -> Picture:
    """Perplexity of prompts, window by window, beside that of the validation split."""

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_in, PICTURE_IN[1]), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        at, losses = np.arange(1, len(parts) + 1), [part.loss for part in parts]
        low, high = ([_e_to(part.interval[end]) for part in parts] for end in (0, 1))
        axes.vlines(at, low, high, color=BLUE, lw=1.5)
        axes.plot(at, [_e_to(loss) for loss in losses], color=BLUE, marker="o", ms=4, label="prompts")
        if math.isfinite(validation):
            axes.axhline(_e_to(validation), color=VERMILION, ls=(0, (5, 2)), label="validation split")
        axes.set_ylabel("perplexity (per token)", fontsize=9)
        axes.set_xlabel("window of requests", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
        plain(axes)
        return figure

    caption = "Dots: prompts, with intervals of 95 %. Dashed: the validation split of the run."
    return Picture("prompt_perplexity", "Perplexity of prompts", caption, draw, config)
