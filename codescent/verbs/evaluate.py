"""In: a run folder, a text or questions. Out: how good its model is by its task, in lines; answers in a file.
Does not train, and does not say how answers are read off or scored (questions.py and squad_metrics.py do)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from codescent import models
from codescent.base.errors import UserError
from codescent.data.loader import Batch
from codescent.data.samples import Samples, Source
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.datasets import task_of
from codescent.models.transformer.module import Transformer
from codescent.plan import Plan, Work
from codescent.tasks.answers.evaluate import LogitsOf, evaluate_questions
from codescent.tasks.answers.predictions import lines, write_predictions
from codescent.tasks.answers.source import QuestionDataset, QuestionSource
from codescent.tasks.answers.squad import Questions, read_questions
from codescent.tasks.answers.windows import WindowSizes, make_windows
from codescent.tasks.language_model.evaluate import text_lines
from codescent.tasks.pairs.evaluate import score_lines
from codescent.tasks.pairs.source import LineSource
from codescent.verbs.trained import Trained, dataset_of, device_of, find, module_of

PREDICTIONS = "predictions.json"
TOKENS_AT_ONCE = 8192  # of a forward pass without gradients


def evaluate_run(
    run: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    best: bool = False,
    step: int | None = None,
    device: str = "auto",
) -> list[str]:
    """Score the model of a run by what it was trained for.

    Args:
        run: the run folder.
        data: a text (lm), or a file of SQuAD's form (qa); None: the run's validation split.
        out: where predictions are written (qa); None: predictions.json in the run folder.
        best: the checkpoint with the lowest validation loss, not the newest.
        step: the checkpoint of this step.
        device: "auto", "cpu" or "cuda".

    Returns:
        What was found, in lines.

    Raises:
        UserError: not a run, no such checkpoint, data that cannot be used, a device that is not there.
    """
    where = device_of(device)
    if isinstance(where, str):
        raise UserError(where)
    trained = find(run, best=best, step=step)
    task = task_of(trained.config)
    if out is not None and task != "qa":
        raise UserError(f'--out {out}: answers to questions are written; the run\'s data.task is "{task}"')
    reads_text = task == "lm" and trained.kind in models.GENERATING
    if data is not None and not reads_text and task != "qa":
        raise UserError(
            f'--data {data}: of model.kind = "{trained.kind}" with data.task = "{task}" the run\'s own validation '
            "split alone is scored"
        )
    if task == "qa" and not os.access((out or run / PREDICTIONS).parent, os.W_OK):
        raise UserError(f"{out or run / PREDICTIONS}: its folder is not there, or nothing can be written in it")
    head = f"{run}, step {trained.saved.step}"
    if task == "qa":
        return [head, *_answers(trained, where, data, out or run / PREDICTIONS)]
    if reads_text:
        return [head, *text_lines(trained, module_of(trained, where).eval(), where, data)]
    dataset, work, module = dataset_of(trained), _work(trained), module_of(trained, where).eval()
    source = dataset.source("validation", work.seq_len, work.positions(-1))
    if source.num_samples < 1:
        raise UserError(f"{dataset.path}: the validation split has not one sample; raise data.validation_fraction")
    if isinstance(source, LineSource):
        return [head, *score_lines(cast(Transformer, module), source, where).words()]
    loss, count = mean_loss(module, source, work.seq_len, where)
    what = {"mlm": "masked tokens", "tensors": "vectors", "sft": "tokens of responses"}.get(task, "tokens")
    return [head, f"{dataset.path}, validation split: loss {loss:.4f} of {count:,} {what}"]


def _work(trained: Trained) -> Work:
    return Plan.from_json(trained.folder.plan).work


def mean_loss(module: nn.Module, source: Source, seq_len: int, device: torch.device) -> tuple[float, int]:
    """The mean loss of all samples of a split, and how many losses they have."""
    total, count = 0.0, 0
    at_once = max(1, TOKENS_AT_ONCE // seq_len)
    for first in range(0, source.num_samples, at_once):
        numbers = np.arange(first, min(first + at_once, source.num_samples))
        batch = Batch.of(source.read(numbers)).to(device, next(module.parameters()).dtype)
        with torch.no_grad():
            total += module(batch.inputs, batch.targets, **batch.extras).double().item()
        count += int(source.losses(numbers).sum())
    return total / max(1, count), count


def _answers(trained: Trained, device: torch.device, data: Path | None, out: Path) -> list[str]:
    """Answers to questions, written and scored."""
    source, questions = _questions(trained, data)
    logits_of = _logits(module_of(trained, device).eval(), device)
    at_once = max(1, TOKENS_AT_ONCE // _work(trained).seq_len)
    found = evaluate_questions(logits_of, source, questions, batch_size=at_once)
    write_predictions(out, found.predictions)
    return [*lines(found.score, questions.path), f"predictions: {out}"]


def _questions(trained: Trained, data: Path | None) -> tuple[QuestionSource, Questions]:
    """What is asked: the run's own validation questions, or all of a file, cut as the run cuts."""
    if data is None:
        dataset = dataset_of(trained)
        assert isinstance(dataset, QuestionDataset)
        return dataset.validation, dataset.questions()
    questions, tokenizer, keys = read_questions(data), trained.tokenizer, trained.config.data
    if not isinstance(tokenizer, WordPiece):
        raise UserError(f"{trained.folder.tokenizer}: not BERT's tokenizer")
    sizes = WindowSizes(_work(trained).seq_len, keys.stride, keys.question_len)
    rows = [cut.rows for cut in make_windows(questions.questions, tokenizer, sizes, training=False)]
    return QuestionSource("validation", np.concatenate(rows)), questions


def _logits(module: nn.Module, device: torch.device) -> LogitsOf:
    """The model as `evaluate_questions` asks it."""

    def logits_of(samples: Samples) -> tuple[Any, Any]:
        batch = Batch.of(samples).to(device, next(module.parameters()).dtype)
        with torch.no_grad():
            logits_BT2: Tensor = module(batch.inputs, **batch.extras)
        starts, ends = logits_BT2.double().cpu().unbind(-1)
        return starts.numpy(), ends.numpy()

    return logits_of
