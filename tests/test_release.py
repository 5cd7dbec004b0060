"""In: pyproject.toml, README.md, the files for citing and for code hosts. Out: they say one thing, and build a wheel.
Does not upload anything. The slow test builds the wheel and uses it as `make release` does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml
from sources import sources

import codescent
from codescent.base.pages import name_of, pages, pages_in

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLIC = run_path(str(ROOT / "release/public.py"))
REPOSITORY: str = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
SHOWN = ("codescent/__init__.py", "codescent/own/", "codescent/config/sections.py")
"""Files whose docstrings people see without the sources: by help(), and as explanations of sections."""
TARGET = re.compile(r"\]\(([^)\s]+)\)")


def test_every_link_of_the_readme_on_an_index_is_absolute_and_leads_to_a_file_of_the_tag() -> None:
    """Fault: an index shows README.md without the repository, and its links and pictures are broken."""
    address = "https://code.test/owner/codescent"
    shown = PUBLIC["readme"](README, address, "1.2.3", name_of)
    targets = TARGET.findall(shown)
    assert len(targets) == len(TARGET.findall(README)) > 20
    for target in targets:
        found = re.fullmatch(rf"{address}/(blob|raw)/v1\.2\.3/([^#]+)(#.*)?", target)
        assert found is not None, target
        assert (ROOT / found[2]).is_file(), target
        assert (found[1] == "raw") == (found[2].endswith(".svg")), target


def test_without_an_address_the_readme_names_commands_that_print_the_pages() -> None:
    """Fault: a wheel that was built before the project has an address has links that lead nowhere."""
    shown = PUBLIC["readme"](README, "", "1.2.3", name_of)
    assert [target for target in TARGET.findall(shown) if "://" not in target] == []
    named = re.findall(r"`codescent docs ([^`#]+)", shown)
    assert len(named) > 20
    assert set(named) <= set(pages_in(ROOT))
    assert shown.count("*Picture: ") == 2
    assert PUBLIC["links"]("", "1.2.3") == {}


def test_the_version_and_the_address_stand_in_one_place() -> None:
    """Fault: a version or an address is raised in one file, and another one keeps the old."""
    assert "version" not in PROJECT["project"]
    assert {"version", "readme", "urls"} == set(PROJECT["project"]["dynamic"])
    newest = re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == codescent.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert not re.search(r"^version:", citation, re.MULTILINE)
    assert re.findall(r"^repository-code: (.*)$", citation, re.MULTILINE) == ([REPOSITORY] if REPOSITORY else [])
    assert not REPOSITORY.endswith("/")


def test_each_extra_that_a_message_names_exists() -> None:
    """Fault: a message says `pip install "codescent[NAME]"`, and there is no such extra."""
    named = {
        argument.value
        for _, tree in sources("library(", "install(")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("library", "install")
        for argument in node.args[-1:]
        if isinstance(argument, ast.Constant)
    }
    assert {"plots", "tensorboard", "hub", "hdf5", "parquet", "zstd"} <= named
    assert named <= set(PROJECT["project"]["optional-dependencies"])


def test_what_make_train_installs_is_what_the_readme_and_the_containers_install() -> None:
    """Fault: the README shows a command whose package one of the ways to install leaves out."""
    extras = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) == {"plots", "tensorboard", "hub"}
    places = (
        "README.md",
        "docs/first_job.md",
        "containers/Dockerfile",
        "containers/codescent.def",
        "release/try_wheel.py",
    )
    for place in places:
        assert extras[1] in (ROOT / place).read_text(encoding="utf-8"), place


def test_every_page_that_a_message_names_is_one_that_users_have() -> None:
    """Fault: a message sends people to docs/which.md, and they have a wheel."""
    known, problems = pages(), []
    for file, tree in sources("codescent docs ", ".md"):
        private = set[int]() if f"codescent/{file}".startswith(SHOWN) else docstrings(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            place = f"codescent/{file}:{node.lineno}"
            for name in re.findall(r"codescent docs ([a-z][\w/-]*)", node.value):
                if name not in known:
                    problems.append(f"{place}: there is no page {name}")
            if id(node) not in private and re.search(r"\b(docs|benchmarks)/[\w/]+\.md|[A-Z]{4,}\.md", node.value):
                problems.append(f"{place}: names a file that only a checkout has: write `codescent docs NAME`")
    assert problems == []


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of strings that only people read who have the sources: docstrings, and those under a constant."""
    return {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }


def test_the_workflow_runs_targets_of_the_makefile_on_each_python_of_the_classifiers() -> None:
    """Fault: the workflow calls a target that was renamed, or a Python is promised and not tested."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(runs) == 4
    for run in runs:
        assert run.startswith("make ")
        assert set(run.split()[1:]) <= targets, run
    promised = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    assert jobs["tests"]["strategy"]["matrix"]["python"] == promised
    assert PROJECT["project"]["requires-python"] == f">={promised[0]}"


def test_forms_for_issues_can_be_shown() -> None:
    """Fault: a code host leaves out a form whose keys it does not know."""
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(form) == {"name", "description", "labels", "body"}, path
        ids = [part["id"] for part in form["body"] if part["type"] == "textarea"]
        assert len(ids) == len(set(ids)) > 0
        for part in form["body"]:
            assert set(part["attributes"]) <= {"label", "description", "value", "render"}, path


def test_a_citation_has_what_its_format_asks_for() -> None:
    """Fault: `cffconvert` or a code host cannot read CITATION.cff."""
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(said)
    assert said["license"] == PROJECT["project"]["license"]
    assert [author["name"] for author in said["authors"]] == [
        author["name"] for author in PROJECT["project"]["authors"]
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_in_an_empty_environment_and_folder_plans_trains_and_plots(tmp_path: Path) -> None:
    """Fault: the wheel lacks a file, a page or a dependency that the checkout has."""
    pytest.importorskip("build", reason="make test installs it")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--quiet", "--outdir", tmp_path, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    words = [sys.executable, ROOT / "release/try_wheel.py", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("do not upload them yet" in done.stdout) == (not REPOSITORY)
