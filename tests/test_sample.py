"""In: small models, real run folders, prompts. Out: the same tokens as without a cache, fair draws, whole characters.
Does not judge the text."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import called, codescent, make_project

from codescent import models
from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.models.generate import Choice, choose, context_start, generate
from codescent.models.gpt2.declare import parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.verbs.sample import TextStream, sample_run

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 61}
PROMPTS = [[5, 3, 8], [1], list(range(30, 52)), [60, 0]]


def build(seq_len: int = 16, dropout: float = 0.0) -> GPT2:
    """A model whose predictions depend on all that it read and are far from uniform, so that a mistake would show."""
    shape = models.shape_of("gpt2", {**SIZES, "seq_len": seq_len}, dropout=dropout)
    module = GPT2(shape, 1024, "cpu").double()
    initialize_(module, 3, parameters(shape))
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.mul_(15.0 if tensor.ndim == 2 else 1.0)
            if name == "norm.weight":  # else a tied head repeats what it reads
                tensor[::2] = -1.0
    return module


@torch.no_grad()
def without_cache(module: GPT2, prompt: Sequence[int], index: int, count: int, choice: Choice) -> list[int]:
    """The definition: read the whole context for every token."""
    tokens = list(prompt)
    for number in range(count):
        context = tokens[context_start(len(tokens), module.shape.seq_len) :]
        tokens += choose(module(torch.tensor([context]))[:, -1], choice, [index], number)
    return tokens[len(prompt) :]


def columns(steps: Iterator[list[int | None]], num_prompts: int) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(num_prompts)]
    for step in steps:
        for text, token in zip(texts, step, strict=True):
            if token is not None:
                text.append(token)
    return texts


@pytest.mark.parametrize("seq_len", [1, 2, 16, 64])
@pytest.mark.parametrize("choice", [Choice(0.0), Choice(1.3, seed=4), Choice(0.9, top_k=7, top_p=0.8, seed=5)])
def test_tokens_are_those_without_a_cache_also_past_the_context(seq_len: int, choice: Choice) -> None:
    module = build(seq_len)
    found = columns(
        generate(module, PROMPTS, 40, choice.temperature, choice.top_k, choice.top_p, choice.seed), len(PROMPTS)
    )
    for index, prompt in enumerate(PROMPTS):
        assert found[index] == without_cache(module, prompt, index, 40, choice), index
    assert len(set(map(tuple, found))) > 2
    # A greedy text that sees one token may come to stand still.
    least = 5 if choice.temperature > 0.0 else 1 if seq_len > 1 else 0
    assert min(len(set(text)) for text in found) > least


def test_a_text_does_not_depend_on_the_others_but_on_seed_and_number() -> None:
    module = build()
    together = columns(generate(module, PROMPTS, 20, seed=9), 4)
    for index in range(4):
        others = [[7]] * index
        assert columns(generate(module, [*others, PROMPTS[index]], 20, seed=9), index + 1)[index] == together[index]
    same = columns(generate(module, [[5], [5]], 20, seed=9), 2)
    assert same[0] != same[1]
    assert columns(generate(module, [[5]], 20, seed=8), 1)[0] != same[0]


def test_a_stop_token_ends_one_text_and_not_the_others() -> None:
    module = build()
    free = columns(generate(module, PROMPTS, 30, seed=2), 4)
    stop = free[1][11]
    stopped = columns(generate(module, PROMPTS, 30, seed=2, stop=stop), 4)
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)
    assert len(stopped[1]) <= 11


def test_ids_that_the_tokenizer_lacks_are_not_drawn() -> None:
    assert max(max(text) for text in columns(generate(build(), PROMPTS, 60, 5.0, vocab_size=9), 4)) < 9


def test_generating_leaves_mode_and_gradients_alone() -> None:
    module = build(dropout=0.5)
    module.train()
    steps = generate(module, [[1]], 3)
    next(steps)
    assert torch.is_grad_enabled()
    steps.close()  # type: ignore[attr-defined]
    assert module.training
    assert columns(generate(module, [], 3), 0) == []


def test_draws_follow_the_probabilities() -> None:
    """Frequencies within five standard deviations, for the plain, the top-k and the top-p distribution."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    count = 20_000
    for choice, keep in (
        (Choice(0.7, seed=3), [0, 1, 2, 3, 4]),
        (Choice(0.7, top_k=2, seed=3), [0, 4]),
        (Choice(1.0, top_p=0.75, seed=3), [0, 4, 1]),  # 0.48 + 0.29 < 0.75 <= ... + 0.18
        (Choice(1.0, top_p=1e-9, seed=3), [0]),
    ):
        weights = torch.zeros(5, dtype=torch.float64)
        weights[keep] = torch.softmax(logits[0].double() / choice.temperature, 0)[keep]
        expected = weights / weights.sum()
        drawn = torch.tensor(choose(logits.expand(count, 5), choice, range(count), 0))
        found = torch.bincount(drawn, minlength=5) / count
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all(), choice


def test_temperature_zero_is_the_likeliest() -> None:
    assert choose(torch.tensor([[0.0, 3.0, 2.0], [1.0, -1.0, 0.0]]), Choice(0.0), [0, 1], 0) == [1, 0]


def test_diverged_logits_are_refused() -> None:
    with pytest.raises(UserError, match="diverged"):
        choose(torch.tensor([[0.0, math.nan]]), Choice(), [0], 0)


def test_the_window_shifts_by_quarters_and_is_never_empty() -> None:
    for seq_len in (1, 2, 3, 7, 16, 64):
        starts = [context_start(length, seq_len) for length in range(1, 5 * seq_len)]
        lengths = [length - start for length, start in enumerate(starts, 1)]
        assert starts[:seq_len] == [0] * seq_len
        assert max(lengths) == seq_len
        assert min(lengths[seq_len:], default=1) > seq_len - max(1, seq_len // 4)
        assert len(set(starts)) - 1 <= 4 * seq_len / max(1, seq_len // 4) + 1


def test_values_that_cannot_be_used_are_refused_at_once() -> None:
    with pytest.raises(UserError) as error:
        generate(build(), [[1], []], 0, -1.0, 0, 1.5, -3)
    for part in ("--temperature -1.0", "--top-k 0", "--top-p 1.5", "--seed -3", "prompt 1: no tokens", "--tokens 0"):
        assert part in str(error.value)


def test_characters_come_whole() -> None:
    text = "a é 中 😀 z"
    stream = TextStream(ByteTokenizer().decode)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    raw = b"\xff\xfeok\xf0\x9f!\xe4\xb8"
    stream = TextStream(ByteTokenizer().decode)
    shown = "".join(stream.push(byte) for byte in raw)
    assert shown == "\ufffd\ufffdok\ufffd!"
    assert shown + stream.finish() == raw.decode(errors="replace")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    """Two trained runs: bytes and characters."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    forker.train(folder, "bytes", 1)
    forker.train(folder, "chars", 1, "data.tokenizer=char")
    return folder


def test_a_run_writes_the_same_text_again(project: Path) -> None:
    done = codescent(project, "sample", "runs/chars", "--prompt", "many ", "--tokens", "30", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("many ")
    assert done.stdout.endswith("\n")
    assert len(done.stdout) == len("many ") + 30 + 1
    assert called(project, "sample", "runs/chars", "--prompt", "many ", "--tokens", "30", "--seed", "3").stdout == (
        done.stdout
    )


def test_the_checkpoint_may_be_chosen(project: Path, forker: Forker) -> None:
    run = forker.train(project, "steps", 1, "checkpoint.every=10")

    def text(*words: str) -> str:
        done = called(project, "sample", "runs/steps", "--prompt", "many ", "--tokens", "40", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    newest, earlier = text(), text("--step", "10")
    assert newest == text("--step", "20") == text("--best") != earlier
    shutil.rmtree(run.checkpoints / "step_00000020")
    assert text() == earlier
    done = called(project, "sample", "runs/steps", "--step", "11")
    assert done.returncode == 2
    assert "no checkpoint of step 11; there are: 10" in done.stderr


def test_several_prompts_and_several_texts_of_each(project: Path) -> None:
    out = io.StringIO()
    texts = sample_run(project / "runs/bytes", ["one", "gradient de"], tokens=12, num=2, device="cpu", out=out)
    assert [text[:3] for text in texts] == ["one", "one", "gra", "gra"]
    assert texts[0] != texts[1]
    assert out.getvalue().count(" of 4 ---\n") == 4
    assert all(text + "\n" in out.getvalue() for text in texts)


def test_control_characters_do_not_reach_a_terminal(project: Path) -> None:
    done = called(project, "sample", "runs/bytes", "--prompt", "one\t\x1b[2J\n", "--tokens", "1")
    assert done.stdout.startswith("one\t\\x1b[2J\n")
    out = io.StringIO()  # a file of the caller's has the text itself
    (text,) = sample_run(project / "runs/bytes", ["one\t\x1b[2J\n"], tokens=1, device="cpu", out=out)
    assert text.startswith("one\t\x1b[2J\n")
    assert out.getvalue() == text + "\n"


def test_without_a_prompt_a_document_begins(project: Path) -> None:
    for run in ("bytes", "chars"):
        assert len(sample_run(project / "runs" / run, tokens=9, device="cpu", out=io.StringIO())[0]) <= 9


def test_bad_input_is_told_all_at_once_with_exit_code_2(project: Path) -> None:
    done = called(project, "sample", "runs/chars", "--prompt", "many Ω", "--top-p", "1.5", "--temperature", "-1")
    assert done.returncode == 2
    for part in ("'Ω' (U+03A9)", "--top-p 1.5: must be in (0, 1]", "--temperature -1.0"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_more_texts_than_memory_are_refused(project: Path) -> None:
    done = called(project, "sample", "runs/chars", "--num", "9" * 18, "--prompt", "many", "--prompt", "many")
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: --num 9{18} for each of 2 prompts: keys and values of [\d,]+ texts at most fit into the memory\n",
        done.stderr,
    )


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        sample_run(tmp_path / "absent")
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=r"not a run folder: it has no plan\.json"):
        sample_run(tmp_path)


def test_a_run_without_checkpoint_or_tokenizer_says_so(project: Path, tmp_path: Path) -> None:
    for name in ("config.toml", "plan.json"):
        (tmp_path / name).write_bytes((project / "runs/chars" / name).read_bytes())
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError) as error:
        sample_run(tmp_path)
    assert "no checkpoint yet" in str(error.value)
    assert "has no tokenizer" in str(error.value)


def test_a_config_that_is_not_the_checkpoints_is_told(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.symlink_to(project / "runs/chars")
    changed = tmp_path / "changed"
    changed.mkdir()
    for entry in folder.iterdir():
        (changed / entry.name).symlink_to(entry.resolve())
    text = (folder / "config.toml").read_text()
    assert "hidden_dim = 16" in text
    (changed / "config.toml").unlink()
    (changed / "config.toml").write_text(text.replace("hidden_dim = 16", "hidden_dim = 32"))
    with pytest.raises(UserError, match=r"tok\.weight has the shape \(\d+, 16\)"):
        sample_run(changed, device="cpu")


def test_an_unknown_device_is_refused(project: Path) -> None:
    with pytest.raises(UserError, match="--device tpu"):
        sample_run(project / "runs/chars", device="tpu")
