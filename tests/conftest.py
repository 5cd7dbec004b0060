"""In: the environment. Out: fixtures that several rooms' tests share.
Does not make data: real corpora come from CODESCENT_DATA_DIR; a test that needs an absent one is skipped, saying so."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from forker import Forker
from hypothesis import settings
from runs import make_project

from codescent.base import cause

# Tests never assert wall-clock times. `make slow` takes the deep profile (--hypothesis-profile).
settings.register_profile("quick", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile("quick")

os.environ.setdefault("CODESCENT_TOKEN", "of the tests")  # no test makes a file in the user's home

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """What collecting has imported stays: Python need not look for garbage in it again and again (8 % of the time)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what slow/listed.txt names."""
    listed = set((REPOSITORY / "tests/slow/listed.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if not listed.isdisjoint((item.nodeid.partition("[")[0], item.nodeid)):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped: each reason once, with the number of tests."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ").partition("\n")[0] for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")


_hidden = pytest.MonkeyPatch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests without the mark `cuda`, and processes that they start, find no CUDA device, whatever the machine has.

    The variable alone is not enough: CUDA reads it once in a process. This runs before all fixtures of the test.
    """
    _hidden.undo()
    _hidden.setattr(cause, "process", cause._Process())  # what an earlier test has made of this process: it is no rank
    if item.get_closest_marker("cuda") is None:
        _hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        if "torch" in sys.modules:
            cuda = sys.modules["torch"].cuda
            _hidden.setattr(cuda, "is_available", lambda: False)
            _hidden.setattr(cuda, "device_count", lambda: 0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real corpora (CODESCENT_DATA_DIR; by default ../shared/data beside the checkout)."""
    folder = Path(os.environ.get("CODESCENT_DATA_DIR", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set CODESCENT_DATA_DIR")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests' own folders for caches and for temporary files, such as the output of ranks that failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus and run.toml, for the tests of one module. A module that needs more has its own."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    return folder


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """One process that has imported torch, and forks ranks."""
    forker = Forker()
    yield forker
    forker.close()
