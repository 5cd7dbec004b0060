"""In: a trained model, pairs of answers. Out: how often the model finds the chosen answer more probable.
Does not load the model, and needs no reference: rewards are in the metrics of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from codescent.base.device import offered
from codescent.data.loader import InOrder
from codescent.models.part import Part
from codescent.plan.objective import BETAS, CHOSEN, REJECTED, Objective
from codescent.tasks.score import fitting
from codescent.tasks.scores import Scores

if TYPE_CHECKING:
    from codescent.tasks.preferences import Preferences
    from codescent.tasks.task import ScoreRequest


def scores_of(task: Preferences, request: ScoreRequest) -> Scores:
    """The scores of the run's validation split.

    Of pairs: the share whose chosen answer is more probable, by the sum and by the mean of its tokens' logarithms, and
    the mean difference of these means. Of answers that are judged one by one: the mean of each kind of answers.
    """
    name, source = request.validation(task)
    preference = task.preference(request.task)
    module, seq_len = request.make_module(), request.work.seq_len
    # Without the sums of a reference a part returns its own sums, of any loss that would compare with one.
    cast(Part, module).objective = Objective(preference=replace(preference, kind="dpo", beta=BETAS["dpo"]))
    dtype, pins = next(module.parameters()).dtype, offered(request.device).pins
    sums, counts, wanted = [], [], []
    numbers = np.arange(source.num_samples)
    with InOrder(source, numbers, fitting(module, seq_len, request.device), pin_memory=pins) as loader, torch.no_grad():
        for _ in range(loader.passes):
            batch = loader.next().batches[0].to(request.device, dtype)
            sums.append(module(batch.inputs, batch.targets, **batch.extras).double().cpu())
            spans_BT = batch.extras["spans_BT"]
            spans = [(spans_BT == span).sum(1) for span in range(preference.sums)]
            counts.append(torch.stack(spans, 1).clamp(min=1).cpu())
            if preference.answers:
                wanted.append(batch.extras["wanted_BA"].cpu() == 1)
    sums_NK = torch.cat(sums)
    means_NK = sums_NK / torch.cat(counts)
    if preference.answers:
        return _of_answers(name, means_NK[:, : preference.answers], torch.cat(wanted))
    gaps_N, count = means_NK[:, CHOSEN] - means_NK[:, REJECTED], len(sums_NK)
    by_sum = (sums_NK[:, CHOSEN] > sums_NK[:, REJECTED]).double().mean().item()
    by_mean, gap = (gaps_N > 0).double().mean().item(), gaps_N.mean().item()
    lines = [
        f"{name}: of {count:,} pairs the chosen answer is more probable in {by_sum:.1%}, by the mean of its tokens in "
        f"{by_mean:.1%}",
        f"log-probability of a token of chosen answers minus that of rejected ones: {gap:+.4f}",
    ]
    facts = {"data": name, "accuracy": by_sum, "accuracy_of_means": by_mean, "gap": gap, "count": count}
    return Scores(lines, {**facts, "unit": "pairs"})


def _of_answers(name: str, means_NA: torch.Tensor, wanted_NA: torch.Tensor) -> Scores:
    means = [means_NA[which].mean().item() if which.any() else None for which in (wanted_NA, ~wanted_NA)]
    shown = ["none" if one is None else f"{one:.4f}" for one in means]
    line = f"{name}: log-probability of a token of {wanted_NA.numel():,} answers: wanted {shown[0]}, others {shown[1]}"
    facts = {"data": name, "wanted": means[0], "unwanted": means[1], "count": wanted_NA.numel(), "unit": "answers"}
    return Scores([line], facts)
