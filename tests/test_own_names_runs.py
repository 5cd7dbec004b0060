"""In: the examples of docs/own_names.md. Out: runs of them, on several layouts, have the losses of one process.
Does not test wrong names (test_own_names.py does)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from forker import Forker
from runs import assert_same, called, codescent, losses, make_project

from codescent.record import RunFolder

PAGE = Path(__file__).parents[1] / "docs" / "own_names.md"
SHORT = (
    "train.precision=fp64",
    "train.num_steps=6",
    "train.eval_every=6",
    "train.eval_samples=16",
    "optimizer.decay_steps=6",
    "log.sample_tokens=0",
)
NOUNS = {
    "schedule": ("optimizer.schedule=stairs:Stairs",),
    "rule": ("optimizer.kind=lion:Lion", "optimizer.learning_rate=1e-3", "optimizer.beta2=0.99"),
    "corpus": ("data.corpus=fables:Fables",),
    "task": ("data.task=copies:Copy",),
    "model": ("model.kind=bloomed:KIND",),
}
"""The words of each example of the page."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the files of the page."""
    folder = tmp_path_factory.mktemp("own_names")
    make_project(folder)
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == [
        "stairs.py",
        "lion.py",
        "fables.py",
        "copies.py",
        "bloomed.py",
        "bloomed_module.py",
    ]
    for name, text in blocks:
        (folder / name).write_text(text)
    lines = (folder / "corpus.txt").read_text().splitlines()
    fables = [{"title": f"Fable {number}", "body": line} for number, line in enumerate(lines)]
    (folder / "fables.json").write_text(json.dumps(fables))
    return folder


def own(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a run; a schedule of one's own does not read decay_steps."""
    kept = tuple(word for word in SHORT if "decay_steps" not in word or "optimizer.schedule=stairs:Stairs" not in words)
    return (*kept, *words)


@pytest.mark.parametrize(
    ("noun", "layout"),
    [
        ("rule", ("parallel.dp_shard=2",)),
        ("model", ("parallel.tp=2",)),
        ("task", ("parallel.pp=2",)),
        pytest.param("schedule", ("parallel.dp_replicate=2",), marks=pytest.mark.slow),
        pytest.param("corpus", ("parallel.dp_shard=2", "parallel.zero_stage=1"), marks=pytest.mark.slow),
        pytest.param("rule", ("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param("rule", ("parallel.servers=1",), marks=pytest.mark.slow),
        pytest.param("model", ("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param("model", ("parallel.cp=2",), marks=pytest.mark.slow),
        pytest.param("model", ("parallel.dp_shard=2",), marks=pytest.mark.slow),
        pytest.param("task", ("parallel.tp=2",), marks=pytest.mark.slow),
    ],
)
def test_the_examples_walk_one_trajectory(project: Path, forker: Forker, noun: str, layout: tuple[str, ...]) -> None:
    """The page says that every layout which a class allows has the losses of one process."""
    words, name = own(NOUNS[noun]), f"{noun}-{re.sub(r'[^a-z0-9]', '', ''.join(layout))}"
    alone = project / "runs" / f"{noun}-alone"
    one = RunFolder.open(alone) if alone.is_dir() else forker.train(project, alone.name, 1, *words)
    assert losses(one)[-1] < losses(one)[0]
    assert_same(forker.train(project, name, 2, *words, *layout), one, 1e-8)


def test_a_resumed_run_has_its_trajectory_and_says_that_the_code_is_new(project: Path, forker: Forker) -> None:
    """State of a rule that is not saved, or code that changes in silence, would be seen by nobody."""
    words = own((*NOUNS["rule"], *NOUNS["schedule"]))
    one = forker.train(project, "whole", 1, *words)
    forker.train(project, "halves", 1, *words, "train.num_steps=3", "train.eval_every=0")
    shutil.copy(project / "lion.py", project / "lion.txt")
    (project / "lion.py").write_text((project / "lion.txt").read_text() + "# a comment\n")
    try:
        halves = forker.train(project, "halves", 1, *words, resume=True)
    finally:
        shutil.copy(project / "lion.txt", project / "lion.py")
    assert losses(halves) == losses(one)
    notes = [event["text"] for event in halves.read_events() if event["kind"] == "note"]
    assert [note.partition(" has ")[0] for note in notes] == ["the code of optimizer.kind = lion:Lion"]
    code = halves.read_environment()["own_code"]
    assert sorted(code) == ["optimizer.kind", "optimizer.schedule"]
    assert code["optimizer.kind"]["files"] == [str(project / "lion.py")]
    gone = called(project.parent, "train", "--resume", str(halves.path))
    assert gone.returncode == 2
    assert "there is no module lion in the working directory, in the folder of the config" in gone.stderr
    assert f"; the run had {project / 'lion.py'}\n" in gone.stderr
    done = called(project, "train", "run.toml", "run.name=halves", "--resume", *words, "optimizer.schedule=cosine")
    assert (done.returncode, "optimizer.schedule: the run in" in done.stderr) == (2, True), done.stderr


RAISES = """
from lion import Lion, LionOptimizer
class Late(Lion):
    def make(self, groups, optimizer):
        return LateOptimizer(groups, optimizer.learning_rate, (0.9, 0.99))
class LateOptimizer(LionOptimizer):
    steps = 0
    def step(self, closure=None):
        self.steps += 1
        if self.steps > 4:
            raise ValueError("no more steps")
        super().step(closure)
"""


@pytest.mark.slow
def test_an_exception_of_a_later_step_has_the_line_of_the_users_file(project: Path) -> None:
    """A traceback of ours would hide whose error it is."""
    (project / "late.py").write_text(RAISES)
    done = codescent(project, "train", "run.toml", *own(()), "run.name=late", "optimizer.kind=late:Late")
    assert done.returncode == 2, done.stderr
    line = f"error: optimizer.kind = late:Late: raised ValueError: no more steps ({project / 'late.py'}, line 11)"
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_whose_parameters_are_not_declared_is_refused(project: Path, forker: Forker) -> None:
    """The plan would count, divide and save other tensors than the module has."""
    text = (project / "bloomed.py").read_text()
    (project / "undeclared.py").write_text(text.replace("yield from norm(", "[*norm(").replace("depth=0)", "depth=0)]"))
    done = forker.run(project, 1, [*own(()), "run.name=undeclared", "model.kind=undeclared:KIND"])
    assert done.codes == [2], done.said
    assert "model.kind = undeclared:KIND: the kind declares no norm_0.weight, norm_0.bias" in done.said


def test_trained_runs_are_evaluated_and_not_exported(project: Path, forker: Forker) -> None:
    words = own((*NOUNS["model"], *NOUNS["corpus"]))
    run = forker.train(project, "trained", 1, *words)
    done = called(project, "evaluate", str(run.path))
    assert done.returncode == 0, done.stderr
    refused = called(project, "export", str(run.path), str(project / "out"))
    assert refused.returncode == 2, refused.stdout
    assert 'model.kind = "bloomed:KIND": only these kinds can be exported' in refused.stderr
    assert not (project / "out").exists()
    sampled = called(project, "sample", str(run.path))
    assert (sampled.returncode, 'model.kind = "bloomed:KIND": only' in sampled.stderr) == (2, True)


@pytest.mark.slow
def test_an_own_model_is_proved(project: Path) -> None:
    words = [*NOUNS["model"], *NOUNS["rule"], *NOUNS["schedule"], "--layouts", "dp_shard=2; tp=2", "--steps", "3"]
    done = called(project, "prove", "run.toml", *words)
    assert (done.returncode, done.stdout.count(": same\n")) == (0, 2), done.stdout + done.stderr
