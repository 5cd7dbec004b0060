"""In: the path of a run folder. Out: its config, metrics, figure, texts and report, as notebooks show them.
Does not train (api/train.py does) and writes nothing into the folder. Each access reads the folder as it is now."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from codescent.api.html_table import html_table
from codescent.api.process import as_before
from codescent.api.public import public
from codescent.api.words import named_as_keywords
from codescent.base.errors import UserError
from codescent.base.own_names import in_a_sentence
from codescent.config.toml_file import loads
from codescent.results import open_run
from codescent.results.statistics import Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from codescent.api.report_page import ReportPage


class Run:
    """A run in its folder, which may still be training in another process.

    Args:
        path: the run folder.

    Raises:
        UserError: it is no run folder, or a file of it is damaged; so does every attribute.
    """

    @public
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = open_run(os.fspath(path)).folder.path

    @property
    def config(self) -> dict[str, Any]:
        """The run's config: a dict of its sections, which `codescent.train` takes as a config."""
        return loads(open_run(self.path).folder.config_text)

    @property
    def metrics(self) -> dict[str, Values]:
        """The columns of metrics.csv, one value per row: "step", "train_loss", "val_loss" and so on. NaN: no value."""
        return dict(open_run(self.path).columns)

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The events of the run in order, each with its "kind" and "wall_time"."""
        return open_run(self.path).events

    @property
    def environment(self) -> Mapping[str, Any]:
        """Machine and software of the run: environment.json."""
        return open_run(self.path).environment

    @property
    def state(self) -> str:
        """How the run ended: "done", "stopped" (it has saved), "failed", or "not ended"."""
        return str(open_run(self.path).state)

    @property
    def why(self) -> str:
        """Why the run failed; "": it did not, or it was killed."""
        return open_run(self.path).why

    @property
    def steps(self) -> int:
        """The number of steps done."""
        return open_run(self.path).steps

    @public
    def plot(self, x: str | None = None) -> Figure:
        """Draw losses, learning rate, gradient norm and speed, as `codescent plot` does. A notebook shows the figure.

        Args:
            x: "steps", "tokens" or "time"; None: the loss over each of them.

        Raises:
            UserError: there is no row of metrics yet, matplotlib is not installed, or x has another value.
        """
        from codescent.report.metrics import X_AXES, of_run
        from codescent.report.style import no_matplotlib, picture_bytes

        problems = [f"x: given {x!r}; must be one of {', '.join(X_AXES)}"] if x not in (None, *X_AXES) else []
        problems += [f"{self.path}: {missing}"] if (missing := no_matplotlib()) else []
        run = open_run(self.path)
        problems += [] if run.steps else [f"{self.path}: no row of metrics to draw: a run has one after its first step"]
        if problems:
            raise UserError(*problems)

        from codescent.report.curves import draw

        figure = draw([of_run(run, run.name)], x)
        # IPython calls this. It draws figures of pyplot alone by itself, and this one is none.
        vars(figure)["_repr_png_"] = partial(picture_bytes, figure, ".png", {})
        return figure

    @public
    def sample(
        self,
        prompt: str | None = None,
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: str | None = None,
        seed: int = 0,
        best: bool = False,
        step: int | None = None,
        ema: bool = False,
        device: str = "auto",
    ) -> str:
        """The prompt and its continuation by the trained model, as `codescent sample` writes it.

        Args:
            prompt: a text to continue, or a user's message if the run has a chat template; None: a text that begins a
                document, or the answer to "Hello".
            tokens: the largest number of new tokens.
            temperature: 0: always the likeliest token; 1: as the model says; higher: more variety.
            top_k: one of so many likeliest tokens; None: of all.
            top_p: one of the fewest tokens that have this probability together.
            min_p: one of the tokens that are at least so many times as likely as the likeliest.
            stop: a text that ends the continuation, and is no part of it; None: nothing does.
            seed: of the random numbers; the same one gives the same text.
            best: use the checkpoint with the lowest validation loss.
            step: use the checkpoint of this step. The default is the newest one.
            ema: use the moving average of its weights (train.ema), not the weights.
            device: "auto", "cpu", "cuda", "xpu" or "mps".

        Raises:
            UserError: the run has no checkpoint or no tokenizer, its model writes no text, or an argument is wrong.
        """
        if best and step is not None:
            raise UserError(f"step: given {step!r} together with best; give one of them")
        options = ("tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed", "best", "step", "ema", "device")
        with as_before(computes=True), named_as_keywords(options), in_a_sentence():
            from codescent.verbs.sample import sample_run

            prompts = None if prompt is None else [prompt]
            texts = sample_run(
                self.path, prompts, tokens, temperature, top_k, top_p, seed, 1, device, StringIO(),
                min_p=min_p, stop=() if stop is None else (stop,), best=best, step=step, ema=ema, option="prompt",
            )  # fmt: skip
        return texts[0]

    @public
    def resume(self, **overrides: Mapping[str, Any]) -> Run:
        """Continue the run from its last checkpoint, as `codescent train --resume` does.

        Args:
            overrides: a dict for each section, such as `train={"num_steps": 2000}`.

        Raises: see `codescent.train`. Also UserError: a change would not continue this run.
        """
        from codescent.api.train import resumed

        return resumed(self.path, overrides)

    @public
    def report(self) -> ReportPage:
        """The page of `codescent report`: speed, limits, slow ranks, figures. A notebook shows it."""
        from codescent.api.report_page import ReportPage

        return ReportPage([open_run(self.path)])

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a table of the facts."""
        rows = {"run": str(self.path), **self._facts()}
        return html_table((name, [value]) for name, value in rows.items())

    def _facts(self) -> dict[str, str]:
        """State, steps and the last losses, in words; the problems of a folder that is damaged or gone by now."""
        try:
            run = open_run(self.path)
            facts = {"state": str(run.state), "steps": f"{run.steps:,}"}
            for name, column in (("train loss", "train_loss"), ("validation loss", "val_loss")):
                known = [value for value in run.columns[column] if not math.isnan(value)]
                facts |= {name: f"{known[-1]:.4f}"} if known else {}
        except UserError as error:  # a debugger asks for the text of each object, too
            return {"problem": "; ".join(error.problems)}
        return facts
