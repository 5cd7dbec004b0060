"""In: small models, real run folders, prompts. Out: the same tokens as without a cache, fair draws, whole characters.
Does not judge the text."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forker import Forker
from generating import continued, engine_for
from runs import called, codescent, make_project

from codescent import models
from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import ByteTokenizer
from codescent.inference.open import open_engine
from codescent.inference.request import Sampling
from codescent.inference.rows import context_start
from codescent.inference.sampling import DIVERGED, Draw, choose, uniform
from codescent.inference.text import TextStream
from codescent.models.gpt2.declare import parameters
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.operators.dropout import sample_keys
from codescent.verbs.sample import sample_run

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
def without_cache(module: GPT2, prompt: Sequence[int], index: int, count: int, sampling: Sampling) -> list[int]:
    """The definition: read the whole context for every token."""
    tokens, sampling = list(prompt), replace(sampling, number=index)
    for place in range(count):
        context = tokens[context_start(len(tokens), module.shape.seq_len) :]
        token = choose(module(torch.tensor([context]))[:, -1], [Draw(sampling, place)])[0].token
        assert token is not None
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seq_len", [1, 2, 16, 64])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(1.3, seed=4), Sampling(0.9, top_k=7, top_p=0.8, min_p=0.01, seed=5)]
)
def test_tokens_are_those_without_a_cache_also_past_the_context(seq_len: int, sampling: Sampling) -> None:
    """Fault: a wrong key, position or mask of the cache, or a window that shifts otherwise."""
    module = build(seq_len)
    more = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    found = continued(module, PROMPTS, 40, **more)
    for index, prompt in enumerate(PROMPTS):
        assert found[index] == without_cache(module, prompt, index, 40, sampling), index
    assert len(set(map(tuple, found))) > 2
    # A greedy text that sees one token may come to stand still.
    least = 5 if sampling.temperature > 0.0 else 1 if seq_len > 1 else 0
    assert min(len(set(text)) for text in found) > least


def test_a_text_does_not_depend_on_the_others_but_on_seed_and_number() -> None:
    module = build()
    together = continued(module, PROMPTS, 20, seed=9)
    for index in range(4):
        others = [[7]] * index
        assert continued(module, [*others, PROMPTS[index]], 20, seed=9)[index] == together[index]
    same = continued(module, [[5], [5]], 20, seed=9)
    assert same[0] != same[1]
    assert continued(module, [[5]], 20, seed=8)[0] != same[0]


def test_a_stop_token_ends_one_text_and_not_the_others() -> None:
    module = build()
    free = continued(module, PROMPTS, 30, seed=2)
    stop = free[1][11]
    stopped = continued(module, PROMPTS, 30, stop, seed=2)
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)
    assert len(stopped[1]) <= 11


def test_ids_that_the_tokenizer_lacks_are_not_drawn() -> None:
    assert max(max(text) for text in continued(build(), PROMPTS, 60, temperature=5.0, vocab_size=9)) < 9


def test_generating_leaves_mode_and_gradients_alone() -> None:
    module = build(dropout=0.5)
    module.train()
    engine = engine_for(module)
    engine.add([1], Sampling())
    assert [output.finished for output in engine.step()] == [None]
    assert torch.is_grad_enabled()
    assert module.training
    assert continued(module, [], 3) == []


def test_draws_follow_the_probabilities() -> None:
    """Frequencies within five standard deviations, for the plain, the top-k and the top-p distribution."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    count = 5_000
    for sampling, keep in (
        (Sampling(0.7, seed=3), [0, 1, 2, 3, 4]),
        (Sampling(0.7, top_k=2, seed=3), [0, 4]),
        (Sampling(1.0, top_p=0.75, seed=3), [0, 4, 1]),  # 0.48 + 0.29 < 0.75 <= ... + 0.18
        (Sampling(1.0, top_p=1e-9, seed=3), [0]),
        (Sampling(1.0, min_p=0.3, seed=3), [0, 4, 1]),  # exp(-0.5) and exp(-1) are above it, exp(-2) is not
        (Sampling(1.0, top_k=3, top_p=0.9, min_p=0.5, seed=3), [0, 4]),
    ):
        weights = torch.zeros(5, dtype=torch.float64)
        weights[keep] = torch.softmax(logits[0].double() / sampling.temperature, 0)[keep]
        expected = weights / weights.sum()
        draws = [Draw(replace(sampling, number=number), 0) for number in range(count)]
        drawn = torch.tensor([chosen.token for chosen in choose(logits.expand(count, 5), draws)])
        found = torch.bincount(drawn, minlength=5) / count
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all(), sampling


def test_random_numbers_are_those_of_the_hash_on_tensors() -> None:
    """Fault: a shift or a wrap of SplitMix64 that differs between Python's numbers and torch's."""
    for seed, place in ((0, 0), (3, 7), ((1 << 63) - 1, 1 << 40)):
        keys = sample_keys(seed, place, torch.tensor([0, 5, (1 << 63) - 1]))
        expected = ((keys >> 11) & (2**53 - 1)).double() * 2.0**-53
        assert [uniform(seed, place, number) for number in (0, 5, (1 << 63) - 1)] == expected.tolist()


def test_temperature_zero_is_the_likeliest() -> None:
    draws = [Draw(Sampling(0.0), 0)] * 2
    assert [one.token for one in choose(torch.tensor([[0.0, 3.0, 2.0], [1.0, -1.0, 0.0]]), draws)] == [1, 0]


def test_diverged_logits_are_refused() -> None:
    """Fault: one row with NaN ends the others, or is sampled from."""
    draws = [Draw(Sampling(), 0), Draw(Sampling(0.0), 0), Draw(Sampling(0.0), 0)]
    found = choose(torch.tensor([[0.0, math.nan], [0.0, 1.0], [math.inf, 0.0]]), draws)
    assert [(one.token, one.error) for one in found] == [(None, DIVERGED), (1, ""), (None, DIVERGED)]


def test_the_window_shifts_by_quarters_and_is_never_empty() -> None:
    for seq_len in (1, 2, 3, 7, 16, 64):
        starts = [context_start(length, seq_len) for length in range(1, 5 * seq_len)]
        lengths = [length - start for length, start in enumerate(starts, 1)]
        assert starts[:seq_len] == [0] * seq_len
        assert max(lengths) == seq_len
        assert min(lengths[seq_len:], default=1) > seq_len - max(1, seq_len // 4)
        assert len(set(starts)) - 1 <= 4 * seq_len / max(1, seq_len // 4) + 1


def test_values_that_cannot_be_used_are_refused_at_once() -> None:
    sampling = Sampling(-1.0, 0, 1.5, 2.0, -3, -1, 0, ("",), {3: math.nan, 61: 0.0}, None, 101)
    with pytest.raises(UserError) as error:
        engine_for(build()).add([], sampling)
    parts = ["temperature -1.0", "top_k 0", "top_p 1.5", "min_p 2.0", "seed -3", "number -1", "max_new_tokens 0"]
    parts += [
        "stop: an empty",
        "logit_bias nan of token 3",
        "logit_bias: token 61",
        "logprobs 101",
        "prompt: no tokens",
    ]
    for part in parts:
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


def test_every_choice_of_tokens_is_an_option(project: Path) -> None:
    """Fault: an option that has no effect, or another one's."""
    greedy = ("sample", "runs/bytes", "--prompt", "one", "--tokens", "30", "--temperature", "0")
    words = (*greedy[:-1], "1.5")
    free = called(project, *words).stdout.removeprefix("one")
    assert called(project, *words, "--stop", free[9:11]).stdout == "one" + free[: free.index(free[9:11])] + "\n"
    assert called(project, *words, "--min-p", "1").stdout == called(project, *greedy).stdout
    only = [word for byte in b"xy" for word in ("--logit-bias", f"{byte}=9999")]
    assert re.fullmatch("one[xy]{30}\n", called(project, *words, *only).stdout)
    never = [word for byte in range(256) if byte != 65 for word in ("--logit-bias", f"{byte}=-inf")]
    assert re.fullmatch("oneA*\n", called(project, *words, *never).stdout)


def test_a_grammar_is_an_option(project: Path) -> None:
    """Fault: a text that is none of the grammar's, or a file that is read as the grammar itself."""
    pytest.importorskip("llguidance")
    (project / "schema.json").write_text('{"enum": ["yes", "no"]}')
    words = ("sample", "runs/bytes", "--prompt", "one", "--grammar")
    assert re.fullmatch("one[ab]{3}c\n", called(project, *words, "regex=[ab]{3}c").stdout)
    assert called(project, *words, "json_schema=schema.json").stdout in ('one"yes"\n', 'one"no"\n')


def test_wrong_choices_of_tokens_are_told_by_their_options(project: Path) -> None:
    """Fault: a traceback, only the first problem, or a name that the command line does not have."""
    (project / "lark.bin").write_bytes(b"\xff")
    given = (
        (("--min-p", "2", "--temperature", "nan", "--logit-bias", "7=nan"), [
            "--min-p 2.0: must be in [0, 1]", "--temperature nan: must be", "--logit-bias nan of token 7: must be",
        ]),
        (("--logit-bias", "7=1", "--logit-bias", "7=2", "--stop", "a\udcff", "--grammar", "lark=lark.bin"), [
            "--logit-bias: token 7 is given twice", "--stop 'a\\udcff': holds half", "lark.bin: not UTF-8 text",
        ]),
        (("--logit-bias", "999=1"), ["--logit-bias: token 999 is outside the vocabulary of 257"]),
        (("--logit-bias", "a=1"), ["'a=1' is no ID=BIAS"]),
        (("--grammar", "yaml"), ["'yaml' is none of json, json_schema=FILE"]),
        (("--grammar", "json_schema=config.json"), ["config.json: No such file"]),
        (("--grammar", "json_schema=."), [".: Is a directory"]),
        (("--grammar", "regex=(a"), ["--grammar: "]),
        (("--stop", ""), ["argument --stop: is empty"]),
        (("--seed", "-1", "--tokens", "0"), ["'0' is not a whole number of at least 1"]),
        (("--seed", str(1 << 63)), [f"--seed {1 << 63}: must be in [0, 2^63)"]),
    )  # fmt: skip
    for words, said in given:
        done = called(project, "sample", "runs/bytes", *words)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        assert not done.stdout
        for part in said:
            assert part in done.stderr


def test_more_texts_than_a_list_can_hold_are_refused(project: Path) -> None:
    done = called(project, "sample", "runs/chars", "--num", "9" * 18, "--prompt", "many", "--prompt", "many")
    assert done.returncode == 2
    assert re.fullmatch(r"error: --num 9{18} for each of 2 prompts: [\d,]+ texts; at most 100,000\n", done.stderr)


def test_texts_beyond_the_rows_wait(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the texts that had to wait get other random numbers, or are lost."""
    monkeypatch.setattr("codescent.verbs.sample.ROWS", 2)
    few = sample_run(project / "runs/bytes", ["one"], tokens=6, num=7, device="cpu", out=io.StringIO())
    monkeypatch.undo()
    assert few == sample_run(project / "runs/bytes", ["one"], tokens=6, num=7, device="cpu", out=io.StringIO())


def test_an_engine_opens_a_run_or_one_of_its_checkpoints(project: Path) -> None:
    """Fault: another checkpoint than the one that is named, or tokens that a run's end token should have ended."""
    run = project / "runs/bytes"
    saved = max((run / "checkpoints").glob("step_*"))
    texts = []
    for path in (run, saved):
        opened = open_engine(path, device="cpu")
        assert opened.which == f"step {int(saved.name[5:])}"
        assert opened.name == "bytes"
        assert opened.engine.stops == {256}
        opened.engine.add(opened.prompts.encode("one")[1], Sampling(0.8, max_new_tokens=12, slides=True))
        outputs = []
        while opened.engine.busy:
            outputs += opened.engine.step()
        texts.append("one" + "".join(output.text for output in outputs))
    assert texts == sample_run(run, ["one"], tokens=12, device="cpu", out=io.StringIO()) * 2
    with pytest.raises(UserError, match="names a checkpoint already"):
        open_engine(saved, best=True, device="cpu")
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        open_engine(saved.parent / "step_00000007", device="cpu")


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
