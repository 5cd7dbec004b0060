"""In: logs of requests, some of which drift. Out: the report says what drifts, and nothing where nothing does.
Does not serve (test_serve_command.py does)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import make_run
from runs import called

from codescent.results.answered import read_log
from codescent.results.drift import chance, two_samples, windows

RNG = np.random.default_rng
LOSS = 2.0


def write_log(path: Path, count: int, length: Callable[[int], int], loss: Callable[[int], float]) -> Path:
    """A log of requests, one a minute, whose prompts have these lengths and losses."""
    lines: list[dict[str, Any]] = [
        {
            "version": 1, "time_s": 1.7e9 + 60 * n, "which": "step 20", "path": "/v1/completions", "request": {},
            "texts": ["x"], "finish": ["length" if n % 4 else "stop"], "prompt_tokens": [length(n)], "tokens": [8],
            "seconds": 0.5, "prompt_losses": [loss(n)],
        }
        for n in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_report_says_what_drifts_and_only_that(tmp_path: Path) -> None:
    """Fault: chance is called drift, a drift is missed, or prompts are compared with another loss than the run's."""
    make_run(tmp_path / "run", steps=20)
    random = RNG(0)
    lengths, losses = random.integers(5, 200, 600), random.normal(LOSS, 0.3, 600)
    same = write_log(tmp_path / "same.jsonl", 600, lambda n: int(lengths[n]), lambda n: float(losses[n]))
    done = called(tmp_path, "report", "run", "--requests", str(same), "--markdown")
    assert done.returncode == 0, done.stderr
    assert "No: in none of 12 windows" in done.stdout
    assert "Perplexity does not drift" in done.stdout
    moved = write_log(
        tmp_path / "moved.jsonl", 600, lambda n: int(lengths[n]) * (1 + (n > 400)),
        lambda n: float(losses[n]) + (n > 500) * 1.0,
    )  # fmt: skip
    done = called(tmp_path, "report", "run", "--requests", str(moved), "--markdown")
    assert "Yes: windows 9, 10, 11, 12 differ from the first. Farthest is D = 0." in done.stdout
    assert "Perplexity drifts: windows 11, 12 differ from the first" in done.stdout
    assert "600 prompts that run has answered from 2023-11-14 22:13" in done.stdout


def test_the_page_has_figures_and_no_text_of_a_user(tmp_path: Path) -> None:
    """Fault: a figure is missing; texts of users are in a page that others read; a damaged line ends the report."""
    make_run(tmp_path / "run", steps=20)
    log = write_log(tmp_path / "log.jsonl", 90, lambda n: 5 + n % 7, lambda n: 2.0 + n % 3 / 10)
    text = log.read_text().replace('"texts": ["x"]', '"texts": ["<b>secret words</b>"]')
    log.write_text(text + '{"version": 1}\nnonsense\n{"version": 9}\n' + "[" * 100_000 + "\n")
    done = called(tmp_path, "report", "run", "--requests", str(log), "--out", "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("<figure") >= 2
    assert "secret words" not in page
    assert "4 lines of the log cannot be read, and are left out" in page
    assert "Requests to run" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "other", "--requests", "log"), "--requests: is about the model of one run"),
        (("run", "--requests", "absent"), "--requests absent: "),
        (("run", "--requests", "."), "--requests ."),
        (
            ("run", "--requests", "run/metrics.jsonl"),
            "--requests run/metrics.jsonl: is no log of `codescent serve --log`",
        ),
        (("--requests", "log"), "give run folders"),
    ],
)
def test_a_log_that_cannot_be_reported_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """Fault: a traceback, or a report about another run."""
    make_run(tmp_path / "run", steps=20)
    make_run(tmp_path / "other", steps=20)
    (tmp_path / "log").write_text("")
    done = called(tmp_path, "report", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_lines_with_absurd_numbers_are_left_out(tmp_path: Path) -> None:
    """Fault: one line of a log ends the report in a traceback: a division by 0, a date without a year, exp(1000)."""
    make_run(tmp_path / "run", steps=20)
    log = write_log(tmp_path / "log.jsonl", 70, lambda n: 1 + n % 3, lambda _: 1000.5)
    good = json.loads(log.read_text().splitlines()[0])
    changes: list[dict[str, Any]] = [
        {"prompt_tokens": [], "prompt_losses": [], "tokens": []},
        {"time_s": 1e300}, {"time_s": math.nan}, {"time_s": "1"}, {"seconds": math.inf}, {"seconds": -1.0},
        {"prompt_tokens": [10**400]}, {"prompt_tokens": [math.inf], "prompt_losses": [1]}, {"tokens": [-3]},
        {"prompt_tokens": [5], "prompt_losses": [10**400]}, {"which": 7}, {"finish": []},
    ]  # fmt: skip
    with log.open("a") as file:
        for change in changes:
            file.write(json.dumps({**good, **change}) + "\n")
        file.write(json.dumps({**good, "which": f"step {'9' * 5000}"}) + "\n")
    prompts, damaged = read_log(log)
    assert (len(prompts), damaged) == (71, len(changes))
    done = called(tmp_path, "report", "run", "--requests", str(log), "--markdown")
    assert done.returncode == 0, done.stderr
    assert f"{len(changes)} lines of the log cannot be read, and are left out" in done.stdout


def test_few_or_no_requests_are_said_to_be_few(tmp_path: Path) -> None:
    """Fault: a division by zero, or a claim of five requests."""
    make_run(tmp_path / "run", steps=20)
    for count, said in ((0, "The log has no answered request"), (40, "There are fewer than 60 prompts")):
        log = write_log(tmp_path / f"{count}.jsonl", count, lambda n: n + 1, lambda n: 2.0)
        done = called(tmp_path, "report", "run", "--requests", str(log), "--markdown")
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_distances_and_chances_are_those_of_the_formulas() -> None:
    """Fault: D counts ties wrongly, or the series has another sign or factor."""
    assert two_samples([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert two_samples([1, 1, 2], [3, 3]) == 1
    assert two_samples([1, 2, 3, 4], [3, 4, 5, 6]) == pytest.approx(0.5)
    far = (math.sqrt(50) + 0.12 + 0.11 / math.sqrt(50)) * 0.2
    assert chance(0.2, 100, 100) == pytest.approx(2 * math.exp(-2 * far**2) - 2 * math.exp(-8 * far**2), rel=1e-6)
    assert chance(0.0, 100, 100) == 1
    random, surprises = RNG(3), 0
    for _ in range(400):
        a, b = random.normal(size=(2, 60))
        surprises += chance(two_samples(list(a), list(b)), 60, 60) < 0.05
    assert 5 <= surprises <= 32, "about 5 % of 400"


def test_windows_without_spread_differ_by_any_difference(tmp_path: Path) -> None:
    """Fault: prompts that are all alike, and then all alike otherwise, are said not to drift."""
    log = write_log(tmp_path / "log.jsonl", 60, lambda _: 9, lambda n: 2.0 + (n >= 30))
    first, second = windows(read_log(log)[0])
    assert (first.loss_chance, second.loss_chance) == (1.0, 0.0)


def test_windows_weigh_prompts_by_their_tokens(tmp_path: Path) -> None:
    """Fault: the mean of prompts' means is called the mean of tokens; a prompt of one token has a loss."""
    log = write_log(
        tmp_path / "log", 30, lambda n: 1 + 2 * (n % 2) * (n + 1), lambda n: math.nan if n % 2 == 0 else n / 10
    )
    log.write_text(log.read_text().replace("NaN", "null"))
    prompts, damaged = read_log(log)
    assert (len(prompts), damaged) == (30, 0)
    (window,) = windows(prompts)
    weights = [one.prompt_tokens - 1 for one in prompts if one.prompt_tokens > 1]
    expected = sum(w * n / 10 for w, n in zip(weights, range(1, 30, 2))) / sum(weights)
    assert window.loss == pytest.approx(expected)
    assert window.error > 0
