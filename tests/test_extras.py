"""In: an installation without the libraries of extras. Out: what needs none of them works; the rest names the extra.
Does not install anything: the libraries cannot be imported in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LACKING = """
import sys

for name in {names!r}:
    sys.modules[name] = None
from codescent.verbs.cli import run

sys.exit(run(sys.argv[1:]))
"""
ALL = (
    *("matplotlib", "tensorboard", "huggingface_hub", "h5py", "pyarrow", "zstandard", "wandb", "mlflow", "trackio"),
    *(
        "argcomplete",
        "transformers",
        "bitsandbytes",
        "llguidance",
        "prometheus_client",
        "starlette",
        "uvicorn",
        "lm_eval",
    ),
)
MODULES = {"mlflow-skinny": "mlflow", "lm-eval": "lm_eval"}
"""The module of a package with another name."""
ANY_MODEL = (
    "model.kind=transformers",
    *(f"model.{size}=auto" for size in ("num_layers", "num_heads", "hidden_dim", "seq_len")),
    'model.config={"model_type": "opt"}',
)


def without(folder: Path, *words: str, names: tuple[str, ...] = ALL) -> subprocess.CompletedProcess[str]:
    """Run the command line where these libraries cannot be imported."""
    program = [sys.executable, "-c", LACKING.format(names=names), *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)


def test_every_extra_is_among_them() -> None:
    """Fault: an extra is added, and its library is needed where only some have it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    packages = {one.partition(">=")[0] for extra in extras.keys() - {"docs", "test", "dev"} for one in extras[extra]}
    assert {MODULES.get(package, package) for package in packages} == set(ALL)


def test_a_run_needs_no_extra(project: Path) -> None:
    """Fault: a module that every rank imports needs a library that only some commands need."""
    done = without(project, "train", "run.toml", "run.name=bare", "train.num_steps=2", "train.eval_every=0")
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / "runs/bare/metrics.csv").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("plan", "default", "--timeline", "a.svg"),
            "--timeline a.svg: a picture needs matplotlib: pip install {plots}, or write a .json trace",
        ),
        (
            ("plot", "--schedule", "default", "--out", "a.png"),
            "--out a.png: a picture needs matplotlib: pip install {plots}",
        ),
        (
            ("fetch", "hf://Qwen/Qwen3-0.6B"),
            "hf://OWNER/NAME, a name of the hub, needs huggingface_hub, which is not installed: pip install {hub}",
        ),
        (
            ("train", "run.toml", "data.corpus=hf://datasets/a/b/c.txt"),
            "command line: data.corpus = hf://OWNER/NAME, a name of the hub, needs huggingface_hub, which is not "
            "installed: pip install {hub}",
        ),
        (
            ("plan", "run.toml", *ANY_MODEL),
            'model.config: model.kind = "transformers" needs transformers, which is not installed: pip install '
            "{transformers}",
        ),
        (
            ("data", "--synthetic", "2", "--format", "hdf5"),
            "HDF5 needs h5py, which is not installed: pip install {hdf5}",
        ),
        (
            ("train", "run.toml", "log.tensorboard=true", "log.mlflow=p"),
            'log.mlflow = "p": the package mlflow is not installed: pip install {mlflow}, or leave log.mlflow out\n'
            "error: log.tensorboard = true: the package tensorboard is not installed: pip install {tensorboard}, or "
            "leave log.tensorboard out",
        ),
    ],
)
def test_a_command_that_lacks_a_library_names_its_extra(project: Path, words: tuple[str, ...], said: str) -> None:
    """Fault: a traceback, or `pip install` of a package that the next version replaces by another one."""
    extras = ("plots", "hub", "hdf5", "mlflow", "tensorboard", "transformers")
    before = sorted(project.iterdir())
    done = without(project, *words)
    expected = said.format_map({extra: f'"codescent[{extra}]"' for extra in extras})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {expected}\n")
    assert sorted(project.iterdir()) == before
