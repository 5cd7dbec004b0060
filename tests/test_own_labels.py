"""In: loops whose ranks have unequal numbers of labels, or equal batches. Out: each is told once, and no other loop.
Does not test that the recipe gives the right gradient (test_own does)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker

from codescent.own.labels import _Logits

Run = Callable[..., list[Any]]
UNEQUAL = "codescent: the ranks have unequal numbers of labels: rank 0 has 4, rank 1 has 24: "


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Run:
    """`run(ranks, job, **options)`: what each rank returned; all must end well."""

    def ask(ranks: int, job: str, **options: Any) -> list[Any]:
        return forker.call("label_ranks:act", tmp_path, ranks, job=job, options=options)

    return ask


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_means_over_unequal_numbers_of_labels_are_told_once(run: Run, strategy: str) -> None:
    hows = ["mean", "later", "parts", "images", "bf16", "inside", "beside"]
    first, second = run(2, "said_of", hows=hows, strategy=strategy)
    assert second == [[]] * len(hows)
    for how, words in zip(hows, first, strict=True):
        assert len(words) == 1, (how, words)
        counts = UNEQUAL.replace("4", "8").replace("28", "48") if how == "images" else UNEQUAL
        condition = "if the module returns a mean over its labels, " if how == "inside" else ""
        assert words[0].startswith(f"{counts}{condition}the mean of their losses is not the mean over all labels.")
        assert "ranks.mean(labels)" in words[0]


def test_counts_that_are_equal_or_weighted_are_not_told(run: Run) -> None:
    hows = ["equal", "recipe", "scaled", "inside, scaled", "inside, sum", "beside, sum"]
    assert run(2, "said_of", hows=[*hows, "regression", "apart"], strategy="ddp") == [[[]] * 8] * 2
    assert run(2, "said_of", hows=hows, strategy="zero3") == [[[]] * 6] * 2


def test_three_ranks_are_named(run: Run) -> None:
    ((words,), _, _) = run(3, "said_of", hows=["mean"], strategy="ddp")
    assert words[0].startswith("codescent: the ranks have unequal numbers of labels: rank 0 has 4, rank 1 has 24, rank")


@pytest.mark.parametrize("part", [2**24, 37])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5,), "float32"), ((8, 5), "float64"), ((9, 6, 5), "bfloat16"), ((3, 5, 4, 4), "float32"), ((0, 5), "float32")],
)
def test_the_gradient_of_logits_tells_the_labels(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str, part: int
) -> None:
    monkeypatch.setattr("codescent.own.labels.PART", part)
    draw = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(shape, generator=draw).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 3 else shape[:-1], generator=draw)
    if labels.dim():
        labels[::2] = -100
    seen = _Logits(logits)
    rows, targets = (logits, labels) if len(shape) in (1, 4) else (logits.flatten(0, -2), labels.flatten())
    loss = torch.nn.functional.cross_entropy(rows.double(), targets, reduction="sum") / 7
    (gradient,) = torch.autograd.grad(loss, logits)
    count, divisor = seen.count(gradient) or (-1, -1.0)
    assert count == int((labels != -100).sum())
    assert divisor == pytest.approx(7 if count else 0, rel=1e-2 if dtype == "bfloat16" else 1e-5)
    assert seen.count(torch.randn(shape, generator=draw).to(gradient)) is None or not logits.numel()


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        (["a"], [1]),
        (["a", "b"], [1]),
        (["A", "b"], [7]),
        (["A", "b", "B", "c"], [7, 20]),
        (["ABc"], [3]),
        (["AB", "A"], []),
    ],
)
def test_every_loader_without_the_sampler_is_told(run: Run, kinds: list[str], calls: list[int]) -> None:
    """Capitals have the sampler. A loader has 6 batches."""
    first, second = run(2, "loaders", kinds=kinds)
    said = "codescent: training batch {} is the same on ranks 0, 1: the ranks would do the same work twice. "
    assert [words.split("Give")[0] for words in first] == [said.format(call) for call in calls]
    assert second == []
