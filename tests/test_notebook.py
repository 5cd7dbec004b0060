"""In: examples/first_run.ipynb. Out: that its cells run in one process, beside an event loop, and what they show.
Does not need Jupyter: a program runs the cells as a kernel does, and asks each result for its picture or HTML."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

import codescent
from codescent.config.sections import SECTIONS

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "first_run.ipynb"
KERNEL = """
import ast, asyncio, json, sys

def shown(value):
    for name in ("_repr_png_", "_repr_html_"):
        if hasattr(value, name):
            return f"{name} {len(getattr(value, name)())}"
    return repr(value)

async def main():
    names = {"__name__": "__main__"}
    for source in json.load(open(sys.argv[1])):
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print("shown:", type(value).__name__, shown(value))

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_cells_of_the_example_run_and_show_their_results(tmp_path: Path) -> None:
    """Catches an example that a change of the API has left behind."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    command = [sys.executable, "-c", KERNEL, "cells.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("shown:")]
    html = "_repr_html_"
    assert kinds[:5] == [
        ["Planned", html], ["Planned", html], ["Run", html], ["Figure", "_repr_png_"], ["Run", html],
    ]  # fmt: skip
    assert kinds[-1] == ["ReportPage", html]
    assert "keywords: train.num_step: unknown key in [train]; did you mean train.num_steps?\n" in done.stdout
    assert "Return " in done.stdout


def test_the_example_is_stored_without_results() -> None:
    """They would differ after each run, and hold paths of a machine."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")


def test_the_cells_of_the_example_name_what_the_package_has() -> None:
    """The quick part: catches a function, an attribute or a section with another name."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"))
    named: dict[str, set[str]] = {"codescent": set(), "run": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named.setdefault(ast.unparse(node.value), set()).add(node.attr)
    assert {"plan", "train"} <= named["codescent"] <= set(codescent.__all__)
    assert {"metrics", "plot", "sample"} <= named["run"] <= set(dir(codescent.Run))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).partition(".")[0] == "codescent"]
    assert {keyword.arg for call in ours for keyword in call.keywords} <= {*SECTIONS, "cluster"}
