"""In: the sources of the package. Out: one place reads each fact of a config; nothing is asked by a name of a task.
Does not run anything: import-linter checks the rooms, these tests check names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator

from sources import PACKAGE, sources, texts

from codescent.plan import AXES, Layout
from codescent.plan.objective import BETAS
from codescent.tasks import TASKS

RESOLVED = ("model", "data", "lora")
"""Sections of a config that `build` resolves, beside the keys of [parallel] that make a layout."""
BEFORE = ("build/", "planner/", "config/", "verbs/config.py", "verbs/import_folder.py")
"""Who works on a config before it is resolved: who loads one, and `import`, which makes one."""
LOSSES = ("config/sections.py", "plan/objective.py", "operators/preferences.py")
"""Where the losses of preferences are named; one has the name of a task."""
STARTS = {"ranks", "timeout_s", "restarts", "meet_s", "listen", "stopped_s"}
"""Keys of [parallel] that say how ranks are started, not how they divide the work."""


def is_config(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and (node.id if isinstance(node, ast.Name) else node.attr) in (
        "config",
        "saved_config",
        "_config",
    )


def test_what_build_resolves_nobody_else_reads() -> None:
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources(*(f"config.{name}" for name in RESOLVED))
        if not file.startswith(BEFORE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_config(node.value) and node.attr in RESOLVED
    ]
    assert not found, "\n".join(found)


def test_the_keys_of_a_layout_are_read_from_the_plan() -> None:
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources("parallel.")
        if not file.startswith(BEFORE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "parallel"
        and node.attr not in STARTS
    ]
    assert not found, "\n".join(found)
    assert not STARTS & {*AXES, *Layout.__dataclass_fields__}


def test_no_task_is_asked_by_its_name() -> None:
    """A name may stand in its task's own room, as the name of one of BERT's heads, or as that of a loss (BETAS)."""
    names = {task.name for task in TASKS}
    heads = {task.head for task in TASKS if task.head is not None}
    found = [
        f"{file}:{node.lineno}: {node.value}"
        for file, tree in sources(*names)
        if not file.startswith("tasks/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and node.value in names - heads
        and not (file in LOSSES and node.value in BETAS)
    ]
    assert not found, "\n".join(found)


def test_a_task_is_named_in_its_own_room_alone() -> None:
    for task in TASKS:
        own = type(task).__module__.removeprefix("codescent.").replace(".", "/")
        elsewhere = [
            f"{file}:{node.lineno}"
            for file, tree in sources(task.name)
            if file.startswith("tasks/") and not file.startswith(own.removesuffix("/__init__"))
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            for side in (node.left, *node.comparators)
            if isinstance(side, ast.Constant) and side.value == task.name
        ]
        assert not elsewhere, (task.name, elsewhere)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Of imports at the top of a file; those inside functions and for types alone may go back."""
    modules = {
        f"codescent.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}": text
        for file, text in texts().items()
    }
    imports = {name: set(imported(text, modules)) - {name} for name, text in modules.items()}
    assert len(imports["codescent.train.loop"]) > 20, "the pattern finds them"
    while leaves := [name for name, targets in imports.items() if not targets & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert not imports, {name: sorted(targets & imports.keys()) for name, targets in imports.items()}


def imported(text: str, modules: Collection[str]) -> Iterator[str]:
    for module, plain, in_brackets in re.findall(r"^from (\S+) import (?:([^(\n]+)|\(([^)]+)\))", text, re.MULTILINE):
        for alias in re.findall(r"^\s*(\w+)", (plain or in_brackets).replace(",", "\n"), re.MULTILINE):
            inside = f"{module}.{alias}"
            yield inside if inside in modules else module


def test_the_top_level_has_at_most_six_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_no_module_of_ours_is_loaded_by_its_name_as_a_string() -> None:
    """The contracts of import-linter do not see such an import. Tables of verbs and models make their names."""
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources("import_module")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("codescent")
    ]
    assert not found, "\n".join(found)


def test_what_may_only_fall() -> None:
    """Lower the numbers when you can. A class has one name in the house; a file has one job."""
    names = (name for text in texts().values() for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    classes = Counter(names)
    twice = sorted(name for name, count in classes.items() if count > 1)
    assert len(twice) <= 14, twice
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    long = sorted(path.name for path, count in lines.items() if count > 350)
    assert len(long) <= 22, long


WHICH_COUPLING = re.compile(
    r"(?<!tensor)\.(served(?! import)|apart|hands_out|averages_beside|served_rounds|server_ranks|in_steps)\b"
    r"|\.can_lose_workers\b"
)
"""Questions which coupling runs. Strategies declare one, and couplings are one: these two rooms ask. The axes on which
copies of a tensor differ (`tensor.apart`) are no such question."""


def test_questions_which_coupling_runs_may_only_become_fewer() -> None:
    asking = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ("strategies", "coupling"):
            asking[room] += sum(bool(WHICH_COUPLING.search(line)) for line in path.read_text("utf-8").splitlines())
    assert asking["train"] <= 5, asking
    assert asking["cost"] <= 5, asking
    assert asking.total() <= 53, asking


SPEAKS_OF_SERVERS = re.compile(
    r"layout\.served\b|\bparameter servers?\b|(?<!codescent\.)\bservers\b(?!/)", re.IGNORECASE
)


def test_files_that_speak_of_parameter_servers_may_only_become_fewer() -> None:
    """Three rooms are about them, and so is one lesson. Elsewhere they are a case of something: ranks outside of the
    mesh, work that is given out, updates that come late."""
    speaking = [
        file
        for file in (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
        if file.parts[0] not in ("strategies", "coupling", "servers")
        and file.as_posix() != "explain/topics/server.py"
        and SPEAKS_OF_SERVERS.search((PACKAGE / file).read_text("utf-8"))
    ]
    assert len(speaking) <= 30, sorted(map(str, speaking))


def test_the_spine_names_no_strategy() -> None:
    """ARCHITECTURE.md: train/ names no strategy, and assemble asks `coupling.of`."""
    allowed = {"codescent.strategies", "codescent.strategies.strategy", "codescent.strategies.gradients"}
    for name in ("loop", "execute", "assemble", "open"):
        tree = ast.parse((PACKAGE / "train" / f"{name}.py").read_text("utf-8"))
        named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert {one for one in named if one.startswith("codescent.strategies")} <= allowed
        assert {one for one in named if one.startswith("codescent.coupling")} <= {"codescent.coupling"}
        assert "isinstance(coupling" not in ast.unparse(tree)
    for name, most in (("loop", 300), ("execute", 310), ("assemble", 280)):
        assert (PACKAGE / "train" / f"{name}.py").read_text("utf-8").count("\n") <= most
    tree = ast.parse((PACKAGE / "train/execute.py").read_text("utf-8"))
    walk = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_walk")
    body = walk.body[1:]  # without the docstring
    assert (body[-1].end_lineno or 0) - body[0].lineno + 1 <= 8
