"""In: the outputs of a distributed module, and the gradients that reach them. Out: a line, if the ranks' losses are
means over unequal numbers of labels.
Makes no collective and changes no gradient. It knows the cross-entropy of logits; of other losses it says nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from codescent.base.output import warn
from codescent.own.average import DTYPE_NAMES
from codescent.own.compared import Compared
from codescent.strategies.fully_shard import DEEPEST, differentiable

IGNORED = -100
"""torch's `ignore_index`: a label with this value does not count."""
UNEQUAL = 0.01
"""Numbers of labels that differ by less are taken as equal."""
ROUNDING = 0.03
"""How much gradients in bf16 may differ from those of the formula."""
MOST_WATCHED = 4
"""Of the outputs of a call that may be logits, so many are looked at."""
PART = 2**24
"""Logits that are looked at together. In fp32 they need 64 MiB."""
MOST_NAMED = 8
"""A message names the numbers of so many ranks."""


class LabelCounts:
    """Compares, for some calls of a module, over how many labels the ranks average their losses.

    If the module returns logits, the gradient says it. Its row is zero where a label does not count. Elsewhere it is
    (softmax(logits) - one_hot(label)) / divisor. If the ranks have unequal counts, their divisors must be equal.
    If the module returns only a loss, its labels are a tensor in which a rank has -100.
    """

    def __init__(self, compared: Compared) -> None:
        self._compared, self._has_said = compared, False

    def watch(self, call: int, batch: Sequence[object], output: object) -> None:
        """Look at the gradients that will reach this output. `batch`: the tensors and numbers that the module got."""
        found = {id(tensor): tensor for tensor in differentiable(output, DEEPEST)}.values()
        watched = [one for one in found if one.dtype in DTYPE_NAMES and type(one) is Tensor]
        logits = [one for one in watched if _classes(one) > 1]
        for number, tensor in enumerate(logits[:MOST_WATCHED]):
            name, seen = f"logits {number} {call}", _Logits(tensor)
            tensor.register_hook(partial(self._on_logits, name, seen))  # type: ignore[no-untyped-call]
        losses = [one for one in watched if one.numel() == 1]
        # A module that gets a number may divide by it, so its loss may be no mean.
        if losses and not logits and not any(map(_is_number, batch)):
            counts = [[int((one != IGNORED).sum()), one.numel()] for one in batch if _may_be_labels(one)]
            losses[0].register_hook(partial(self._on_loss, f"loss {call}", counts))  # type: ignore[no-untyped-call]

    def _on_logits(self, name: str, seen: _Logits, gradient: Tensor) -> None:
        self._compared.put(name, json.dumps(seen.count(gradient)), self._judge_logits)

    def _on_loss(self, name: str, counts: list[list[int]], gradient: Tensor) -> None:
        self._compared.put(name, json.dumps([float(gradient.sum()), counts]), self._judge_losses)

    def _judge_logits(self, texts: list[str]) -> None:
        found = [json.loads(text) for text in texts]
        if None in found:
            return
        counts = [count for count, _ in found]
        with_labels = [(count, divisor) for count, divisor in found if count]
        if _differ(counts) and with_labels:
            shares = [divisor / count for count, divisor in with_labels]
            least = max(UNEQUAL, 3 * _spread(shares))
            if not _differ(shares, ROUNDING) and _differ([divisor for _, divisor in with_labels], least):
                self._say(counts, "")

    def _judge_losses(self, texts: list[str]) -> None:
        found = [json.loads(text) for text in texts]
        scales = [scale for scale, _ in found]
        for of_ranks in zip(*(counts for _, counts in found), strict=False):
            counts = [count for count, _ in of_ranks]
            have_ignored = any(count < size for count, size in of_ranks)
            # A smaller scale belongs to a sum that the script divides by the number of labels.
            is_mean = not _differ(scales) and len(scales) / max(1, sum(counts)) < scales[0] * (1 - UNEQUAL) <= 1
            if have_ignored and is_mean and _differ(counts):
                self._say(counts, "if the module returns a mean over its labels, ")

    def _say(self, counts: list[int], condition: str) -> None:
        if self._has_said:
            return
        self._has_said = True
        named = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts[:MOST_NAMED]))
        more = f", ... (from {min(counts)} to {max(counts)})" if len(counts) > MOST_NAMED else ""
        warn(
            f"codescent: the ranks have unequal numbers of labels: {named}{more}: {condition}the mean of their losses "
            "is not the mean over all labels. Divide the sum of the losses by ranks.mean(labels), where labels is the "
            "number of labels of this rank: codescent docs own_module#unequal-numbers-of-labels"
        )


class _Logits:
    """What is kept of logits until their gradient is there: for each row the largest one, and its log-probability."""

    @torch.no_grad()
    def __init__(self, logits: Tensor) -> None:
        self.kept = [self._largest(part) for part in _parts(logits.detach())]

    def _largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest, index = wide.max(1, keepdim=True)
        return index, largest - wide.logsumexp(1, keepdim=True)

    @torch.no_grad()
    def count(self, gradient: Tensor) -> tuple[int, float] | None:
        """The number of labels, and by what the loss divides the sum over them; None: it is no cross-entropy."""
        rows = [self._of_rows(part, *kept) for part, kept in zip(_parts(gradient), self.kept, strict=True)]
        least, size, found, wanted = (torch.cat(columns) for columns in zip(*rows, strict=True))
        counts = least < 0
        divisor = wanted[counts].abs().sum() / found[counts].abs().sum()
        differs = (found * divisor - wanted)[counts].abs().sum() / wanted[counts].abs().sum()
        odd = (size + 2 * least).abs().sum() / size.sum()  # a row has one negative element, and its sum is 0
        number, *numbers = torch.stack([counts.sum().to(divisor.dtype), divisor, differs, odd]).tolist()
        if not number:
            return 0, 0.0
        is_known = all(map(math.isfinite, numbers)) and max(numbers[1:]) <= ROUNDING
        return (int(number), numbers[0]) if is_known else None

    def _of_rows(self, gradient: Tensor, index: Tensor, log_probability: Tensor) -> list[Tensor]:
        """Of each row: its least element, its size, its element where the logit is largest, and what that should be."""
        wide = gradient.to(log_probability.dtype)
        least, label = wide.min(1, keepdim=True)
        wanted = torch.where(index == label, log_probability.expm1(), log_probability.exp())
        size = torch.linalg.vector_norm(wide, 1, 1, keepdim=True)
        return [one.flatten() for one in (least, size, wide.gather(1, index), wanted)]


def _is_number(value: object) -> bool:
    has_no_dim = isinstance(value, Tensor) and value.dim() == 0
    return has_no_dim or (isinstance(value, int | float) and not isinstance(value, bool))


def _may_be_labels(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.int64


def _classes(logits: Tensor) -> int:
    """How many there are: in the last dim; of images, in the second one."""
    return logits.shape[1 if logits.dim() > 3 else -1] if logits.dim() else 1


def _parts(logits: Tensor) -> Sequence[Tensor]:
    """Some rows at a time, with the classes in the second dim. What is computed of all at once needs much memory."""
    rows = logits if logits.dim() > 3 else logits.reshape(-1, logits.shape[-1])
    return torch.split(rows, max(1, PART * len(rows) // max(1, rows.numel())))


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(values) if max(values) > 0 else 0.0


def _differ(values: Sequence[float], tolerance: float = UNEQUAL) -> bool:
    return _spread(values) > tolerance
