"""In: pyproject.toml. Out: codescent works with the oldest version of each package that it names.
Does not run all tests with them: `make test-oldest` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from oldest.pins import OLDEST, ROOT, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TESTS = (
    "tests/test_models_shape.py tests/test_models_llama.py tests/test_models_bert.py tests/test_checkpoint.py "
    "tests/test_data_tables.py tests/test_data_tensors.py tests/test_data_tokenizers.py tests/test_hub.py "
    "tests/test_config_file.py tests/test_loggers.py tests/test_plot.py tests/test_report.py tests/test_completion.py "
    "tests/test_own.py tests/test_zero.py tests/test_train_optimize.py tests/test_huggingface.py tests/test_running.py "
    "tests/test_jobs_manifests.py"
)
"""At least one file for each package that has an oldest version."""
MOST_S = 2400


def test_every_package_has_an_oldest_version() -> None:
    """Fault: a requirement without one is never tested with an old version."""
    found = list(pins(PROJECT))
    assert {"torch==2.11", "numpy==2.0", "matplotlib==3.10", "pyarrow==17.0", "transformers==5.0"} <= set(found)
    assert not any(name.startswith(("ruff", "mypy", "codescent")) for name in found)
    with pytest.raises(ValueError, match="numpy<3: write NAME>=VERSION"):
        list(pins({"dependencies": ["numpy<3"], "optional-dependencies": {}}))


def test_the_newest_versions_that_are_tested_are_not_older_than_the_oldest() -> None:
    """Fault: constraints.txt and pyproject.toml cannot be installed together."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (one.partition("==") for one in lines)}
    trackers = {"wandb", "mlflow-skinny", "trackio"}
    for name, _, oldest in (one.partition("==") for one in pins(PROJECT)):
        newest = pinned.get(name.lower().replace("_", "-"))
        assert newest is not None or name in trackers, f"constraints.txt lacks {name}"
        assert newest is None or numbers(newest) >= numbers(oldest), name
    assert OLDEST.fullmatch("torch>=2.11")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.slow
@pytest.mark.timeout(MOST_S)
def test_codescent_works_with_the_oldest_versions(tmp_path: Path) -> None:
    """Fault: code needs something newer than pyproject.toml says, or two oldest versions do not fit together."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PROJECT["requires-python"].removeprefix(">="):
        pytest.skip("the oldest versions are tested with the oldest Python")
    folder = tmp_path / "oldest"
    words = ["make", "test-oldest", f"PYTHON={sys.executable}", f"OLDEST={folder}", "JOBS=1", f"ARGS={TESTS}"]
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets of multiprocessing have at most 107 characters
            env = os.environ | {"TMPDIR": short}
            done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # several gigabytes
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
