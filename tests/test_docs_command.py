"""In: command lines of `codescent docs`. Out: pages, parts of them, and the nearest name for a wrong one.
Does not judge what the pages say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import called

import codescent
from codescent.base import pages
from codescent.verbs.docs import anchor_of

ROOT = Path(__file__).resolve().parent.parent


def test_the_list_has_every_page_with_its_heading(tmp_path: Path) -> None:
    """Fault: a page cannot be found without a checkout."""
    done = called(tmp_path, "docs")
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split(maxsplit=1) for line in done.stdout.partition("\n\n")[0].splitlines()]
    heads = dict(listed)
    assert len(heads) == len(listed) == sum(len(list(ROOT.glob(pattern))) for pattern in pages.PATTERNS)
    assert heads["which"] == (ROOT / "docs/which.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    in_folders = ["/" in name for name in heads]
    assert in_folders == sorted(in_folders), "the pages of decisions and benchmarks come last"


@pytest.mark.parametrize(
    ("said", "file"),
    [
        ("which", "docs/which.md"),
        ("docs/which.md", "docs/which.md"),
        ("../CHANGELOG.md", "CHANGELOG.md"),
        ("changelog", "CHANGELOG.md"),
        ("Readme", "README.md"),
        ("decisions/readme", "docs/decisions/README.md"),
        ("0031-one-cost-room", "docs/decisions/0031-one-cost-room.md"),
    ],
)
def test_a_page_is_named_by_its_name_or_by_a_link_to_it(tmp_path: Path, said: str, file: str) -> None:
    done = called(tmp_path, "docs", said)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / file).read_text(encoding="utf-8")


def test_a_part_of_a_page_ends_where_the_next_part_begins(tmp_path: Path) -> None:
    """Fault: a message names a part, and the reader gets a page of 500 lines, or a part that stops at code."""
    done = called(tmp_path, "docs", "first_job#write-a-config")
    assert (done.returncode, done.stderr) == (0, "")
    text = (ROOT / "docs/first_job.md").read_text(encoding="utf-8")
    assert done.stdout in text
    assert done.stdout.startswith("## Write a config\n")
    assert "[train]" in done.stdout
    assert done.stdout.count("\n## ") == 0
    assert text.partition(done.stdout)[2].startswith("## ")


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("wich", "there is no page wich; did you mean which? `codescent docs` lists all pages"),
        (
            "docs/locl_sgd.md",
            "there is no page docs/locl_sgd.md; did you mean local_sgd? `codescent docs` lists all pages",
        ),
        ("qqqqqq", "there is no page qqqqqq; `codescent docs` lists all pages"),
        ("data#cuting", "page data has no section cuting; did you mean cutting?"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(tmp_path: Path, said: str, refused: str) -> None:
    done = called(tmp_path, "docs", said)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {refused}\n")


def test_an_installed_package_reads_its_own_pages(tmp_path: Path) -> None:
    """Fault: a wheel has pages, and the command looks for a checkout beside the package."""
    package = tmp_path / "site/codescent"
    shutil.copytree(Path(codescent.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    program = [sys.executable, "-m", "codescent", "docs", "which"]
    env = {"PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    none = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr == "error: this installation has no pages of the documentation: install codescent again\n"
    (package / pages.FOLDER / "docs").mkdir(parents=True)
    (package / pages.FOLDER / "docs/which.md").write_text("# Mine\n")
    found = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "# Mine\n")


def test_an_anchor_is_that_of_a_code_host() -> None:
    assert anchor_of("Nodes on slow Ethernet") == "nodes-on-slow-ethernet"
    assert anchor_of("`train.ema`, and why (2)") == "trainema-and-why-2"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("#zero", "codescent docs #zero: names no page: write PAGE#zero; `codescent docs` lists all"),
        ("#", "codescent docs #: names no page: write PAGE#SECTION; `codescent docs` lists all"),
        ("zero#", "codescent docs zero#: names no section after #; leave # out to print the page"),
    ],
)
def test_half_a_name_says_which_half_is_missing(tmp_path: Path, word: str, said: str) -> None:
    """Fault: "there is no page", without the name of one."""
    done = called(tmp_path, "docs", word)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")
