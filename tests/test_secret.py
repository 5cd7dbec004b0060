"""In: configs with a token in a value, and tokens in the environment. Out: a warning that hides it, no copy of it.
Does not test sites and scripts (test_jobs_refused.py does)."""

from __future__ import annotations

from pathlib import Path

import pytest
from marked import files_with
from runs import called, make_project

from codescent.base.secret import secret_in
from codescent.record import RunFolder

TOKEN = f"hf_{'geheim' * 5}"


def test_a_run_names_a_secret_of_its_config_and_records_none_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a warning with the token in it, and an environment.json with variables of the user."""
    make_project(tmp_path)
    (tmp_path / TOKEN).write_bytes((tmp_path / "corpus.txt").read_bytes())
    exported = "ghp_verschwiegenverschwiegen"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, exported)
    done = called(tmp_path, "train", "run.toml", "train.num_steps=1", f"data.corpus={TOKEN}", "run.name=a")
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "secret" in line]
    assert line.startswith("warning: command line: data.corpus: a token of Hugging Face looks like a secret, and run ")
    run = RunFolder.open(tmp_path / "runs" / "a")
    assert TOKEN not in line
    assert [event["text"] for event in run.read_events() if event["kind"] == "note"] == [line]
    assert files_with(run.path, exported) == []


@pytest.mark.parametrize(
    "text", ["TOKEN" * 20_000, "a_-" * 50_000, "--a" * 50_000 + "=", "wandb login " * 9000, "x://:" * 20_000]
)
def test_a_long_text_is_read_once(text: str) -> None:
    """Catches a pattern whose time is the square of the length: it runs into the time limit of a test."""
    assert secret_in(text * 4) == ""


@pytest.mark.parametrize(
    "text",
    [
        "docker://pytorch:24.05@sha256:0123456789abcdef",
        "docker://nvcr.io/nvidia/pytorch:24.05-py3",
        "sk-large-batch-learning-rate-3e-4",
        "--eos-token endoftext",
        "eos_token=endoftext",
        "--pad_token=[PAD]",
        "--max-token=100000",
        "tokens_per_step: 524288",
        "HF_TOKEN={{ hf_token }}",
        "HF_TOKEN=%HF_TOKEN%",
        "HF_TOKEN=\\$HF_TOKEN",
        "HF_TOKEN=xxxxxxxx",
        "HF_TOKEN=********",
        "HF_TOKEN=<your token>",
        "export HF_TOKEN=$(cat ~/.cache/token)",
        "export HF_TOKEN=~/.cache/huggingface/token",
        "--secret id=hf,src=/run/hf",
        "--token auto",
        "--token-file /home/u/token",
        "--export=HF_TOKEN,WANDB_API_KEY",
        "https://$USER:$PASS@proxy:3128",
        "git clone git@github.com:a/b.git",
        "TOKENIZERS_PARALLELISM=false",
    ],
)
def test_what_only_looks_like_a_secret_is_none(text: str) -> None:
    """Catches a warning that a user learns to overlook."""
    assert secret_in(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        "BACKEND_TOKEN=geheim-geheim",
        "PASSWORD=!geheim",
        "PASSWORD=@geheim",
        "sk-ant-api03-geheimgeheimgeheim",
        f"sk-{'geheim12' * 4}",
        f"nvapi-{'geheim12' * 6}",
        f"dckr_pat_{'geheim12' * 3}",
        "https://u:geheim@registry.lab/image@sha256:0123",
    ],
)
def test_a_secret_is_found(text: str) -> None:
    """Catches an exception to the forms and names that is too wide."""
    assert secret_in(text)
