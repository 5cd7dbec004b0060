"""In: a small model, a small trained run. Out: the same tokens with and without a cache; choices; a stream of whole characters.
Does not judge the text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import codescent, make_project, train

from codescent import models
from codescent.data.tokenizers import ByteTokenizer
from codescent.errors import UserError
from codescent.models.initialize import initialize_
from codescent.sample import Choice, _Printer, generate, window_start

PROMPTS = [[3], [5, 6, 7, 8, 9, 10, 11], list(range(40, 60)), [1, 2]]


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "seq_len": 16, "vocab_size": 97}
    shape = models.shape_of("gpt2", sizes)
    built = models.construct("gpt2", shape, device="cpu").double()
    initialize_(built, 3, models.parameters_of("gpt2", shape))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(4.0)  # logits that differ: equality of uniform draws would prove little
    return built.eval()


def texts(module: torch.nn.Module, prompts: list[list[int]], choice: Choice, **options: object) -> list[list[int]]:
    steps = generate(module, prompts, 30, choice, 7, **options)  # type: ignore[arg-type]
    return [list(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize("choice", [Choice(0.0), Choice(1.0), Choice(0.9, top_k=9), Choice(1.1, top_p=0.7)])
def test_a_cache_changes_nothing(module: torch.nn.Module, choice: Choice) -> None:
    plain = texts(module, PROMPTS, choice, cached=False)  # 30 tokens and more: far past the context of 16
    assert texts(module, PROMPTS, choice) == plain
    assert len({tuple(text) for text in plain}) == len(PROMPTS)
    assert len(set(plain[0])) > 3


def test_a_prompt_does_not_feel_its_neighbours(module: torch.nn.Module) -> None:
    together = texts(module, PROMPTS, Choice(1.0))
    assert texts(module, PROMPTS[:1], Choice(1.0))[0] == together[0]
    assert texts(module, PROMPTS[:2], Choice(1.0))[1] == together[1]


def test_seeds_and_copies_differ(module: torch.nn.Module) -> None:
    first, second = texts(module, [[3], [3]], Choice(1.0))
    assert first != second
    other = next(iter(zip(*generate(module, [[3]], 30, Choice(1.0), 8), strict=True)))
    assert list(other) != first


@given(st.integers(1, 200), st.integers(1, 64))
def test_the_view_never_exceeds_the_context_and_moves_in_jumps(length: int, seq_len: int) -> None:
    start = window_start(length, seq_len)
    assert 0 < length - start <= seq_len
    assert start == 0 or length - start > (seq_len - 1) // 2
    assert window_start(length + 1, seq_len) - start in (0, max(1, seq_len // 2))


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log()
    drawn = Counter(Choice(1.0).draw(logits, (number + 0.5) / 1000) for number in range(1000))
    assert [drawn[token] for token in range(3)] == [100, 200, 700]


@settings(max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.floats(0, 0.999), st.integers(1, 5))
def test_top_k_and_top_p_keep_the_likeliest(values: list[float], uniform: float, top_k: int) -> None:
    logits = torch.tensor(values)
    kept = set(logits.argsort(descending=True, stable=True)[:top_k].tolist())
    assert Choice(1.0, top_k=top_k).draw(logits, uniform) in kept
    assert Choice(1.0, top_p=1e-9).draw(logits, uniform) == int(logits.argsort(descending=True, stable=True)[0])
    assert Choice(0.0).draw(logits, uniform) == int(logits.argmax())


def test_values_that_make_no_sense_are_refused_together() -> None:
    with pytest.raises(UserError) as caught:
        Choice(-1.0, 0, 1.5)
    assert len(caught.value.problems) == 3


def test_characters_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _Printer(ByteTokenizer(), ">")
    seen = []
    for byte in "né €🙂.".encode():
        printer.token(byte)
        seen.append(capsys.readouterr().out)
    printer.end()
    assert "".join(seen) + capsys.readouterr().out == ">né €🙂.\n"
    assert not any("�" in part for part in seen)


def test_sampling_a_run(tmp_path: Path) -> None:
    make_project(tmp_path)
    train(tmp_path, "run")
    words = ("sample", "runs/run", "--tokens", "20", "--seed", "5")
    first = codescent(tmp_path, *words, "--prompt", "many workers")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("many workers")
    assert len(first.stdout) > len("many workers") + 5
    assert codescent(tmp_path, *words, "--prompt", "many workers").stdout == first.stdout
    several = codescent(tmp_path, *words, "--prompt", "many workers", "--prompt", "loss", "--num", "2").stdout
    assert several.count("---") == 8
    assert first.stdout.strip("\n") in several
    moved = tmp_path / "elsewhere"
    (tmp_path / "runs" / "run").rename(moved)
    assert codescent(tmp_path, "sample", str(moved), "--tokens", "20", "--seed", "5").returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["absent"], "no such run folder"),
        (["."], "not a run folder"),
        (["runs/run", "--top-p", "0"], "--top-p 0.0"),
        (["runs/run", "--temperature", "-1", "--top-p", "2"], "--top-p 2.0"),
        (["runs/run", "--prompt", "schön"], "'ö' (U+00F6)"),
    ],
)
def test_what_cannot_be_sampled(tmp_path: Path, words: list[str], expected: str) -> None:
    make_project(tmp_path)
    train(tmp_path, "run", "data.tokenizer=char", "train.num_steps=2", "optimizer.warmup_steps=0")
    done = codescent(tmp_path, "sample", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
