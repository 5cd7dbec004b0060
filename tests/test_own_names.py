"""In: configs that name classes of a user, good and bad. Out: one message each; no code runs before it is needed.
Does not train: test_own_names_runs.py does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.own_keys import changed_code, code_facts, own_code
from codescent.config.update_rules import own_rule
from codescent.data.text import prepare
from codescent.data.text.dataset import locate, open_dataset
from codescent.meeting.compared import differences
from codescent.train import rule_trial

SCHEDULE = """
from codescent import RateSchedule
class Half(RateSchedule):
    def rate(self, at):
        return at.peak / 2
class Below(RateSchedule):
    def rate(self, at):
        return -1.0
class Raises(RateSchedule):
    def rate(self, at):
        return {}[at.step]
class Refuses(Half):
    def refuse(self, optimizer, num_steps):
        yield ("optimizer.warmup_steps",), "must be 7"
class Bare(RateSchedule):
    pass
class Argument(Half):
    def __init__(self, a):
        pass
class Word(Half):
    reads = "min_learning_rate"
class Number(RateSchedule):
    rate = 0.1
class ReturnsNothing(Half):
    def refuse(self, optimizer, num_steps):
        return None
class RefusesWord(Half):
    def refuse(self, optimizer, num_steps):
        yield "must be 7"
class Other:
    pass
def halved(at):
    return 1.0
"""
RULE = """
import torch
from codescent import UpdateRule
class Plain(torch.optim.Optimizer):
    norm = number = group = moves = early = joint = False
    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "count": 0})
    @torch.no_grad()
    def step(self, closure=None):
        total = sum(float(p.grad.sum()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        for group in self.param_groups:
            group["count"] += self.group
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("mean", torch.ones_like(p) if self.early else torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if self.number:
                    state["count"] = state.get("count", 0) + 1
                by = state["mean"] / (state["mean"].norm() + 1e-9) if self.norm else state["mean"]
                p.sub_(by * (total if self.joint else 1.0), alpha=0.1 if self.moves else group["lr"])
                if self.moves:
                    p.sub_(0.1)
class Good(UpdateRule):
    state = ("mean",)
    elementwise = True
    kind = {}
    def make(self, groups, optimizer):
        made = Plain(groups)
        vars(made).update(self.kind)
        return made
class Names(Good):
    state = ("mean", "square")
class Norm(Good):
    kind = {"norm": True}
class Whole(Norm):
    elementwise = False
class Number(Good):
    kind = {"number": True}
class Group(Good):
    kind = {"group": True}
class Moves(Good):
    kind = {"moves": True}
class Early(Good):
    kind = {"early": True}
class Joint(Good):
    kind = {"joint": True}
class Nothing(Good):
    def make(self, groups, optimizer):
        return 3
"""
CORPUS = """
from codescent import Documents
class Two(Documents):
    def read(self):
        yield "one document of some words"
        yield ""
        yield "another one" * 30
class Counts(Documents):
    count = 0
    def read(self):
        Counts.count += 1
        yield f"text number {Counts.count} " * 30
class Numbers(Documents):
    def read(self):
        yield 3
class Files(Two):
    files = ("absent.txt",)
class Away(Two):
    def version(self):
        raise OSError("the database is away")
class Ends(Documents):
    def read(self):
        yield "text"
        raise SystemExit(3)
class File(Two):
    files = "absent.txt"
class Text(Documents):
    def read(self):
        return "text"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the modules of this file. What a test imports, and the folders, are forgotten."""
    make_project(tmp_path)
    for name, text in (("mine", SCHEDULE), ("rules", RULE), ("texts", CORPUS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mine", "rules", "texts", "marks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.schedule=absent:A", "absent:A: there is no module absent in the working directory"),
        ("optimizer.schedule=mine:Hall", "mine.py has no class Hall; did you mean mine:Half?"),
        ("optimizer.schedule=mine:halved", "mine.py: must be a subclass of codescent.RateSchedule, and is a function"),
        ("optimizer.schedule=mine:Other", "must be a subclass of codescent.RateSchedule, and is a class without it ("),
        ("optimizer.schedule=mine:Bare", "mine.py: must define rate: see codescent docs own_names"),
        ("optimizer.schedule=mine:Argument", "making it without arguments raised TypeError: "),
        ("optimizer.schedule=mine:Below", "mine:Below: rate of step 2 is -1.0; must be a number >= 0"),
        ("optimizer.schedule=mine:Refuses", "optimizer.warmup_steps: must be 7"),
        ("optimizer.schedule=mine:Raises", "optimizer.schedule = mine:Raises: raised KeyError: 2 ("),
        ("optimizer.schedule=mine:Word", "mine:Word: reads = 'min_learning_rate': must be a tuple of texts"),
        ("optimizer.schedule=mine:Number", "mine:Number: rate is a float: must be a method"),
        (
            "optimizer.schedule=mine:ReturnsNothing",
            "refuse returns None; must be an iterator of tuple[",
        ),
        ("optimizer.schedule=mine:RefusesWord", "refuse gives 'must be 7'; must give a tuple[tuple[str, ...], str]"),
        ("optimizer.schedule=mine.py:Half", 'must be "module:NAME": write "mine:Half", without .py'),
        ("optimizer.schedule=mine:a:b", 'given "mine:a:b"; must be "module:NAME"'),
        ("optimizer.schedule=cosin", '"constant-cooldown" or "module:NAME"; did you mean "cosine"?'),
        ("optimizer.kind=mine:Half", "must be a subclass of codescent.UpdateRule, and is a class without it"),
        ("data.task=mine:Half", "must be a subclass of codescent.Task, and is a class without it"),
        ("model.kind=mine:Half", "must be an object of the class codescent.ModelKind, and is a type"),
    ],
)
def test_a_wrong_name_is_one_message(project: Path, word: str, said: str) -> None:
    """A name that stands for nothing usable would otherwise end in a traceback of ours."""
    done = called(project, "plan", "run.toml", word)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_at_import_has_the_line_of_the_users_file(project: Path) -> None:
    (project / "mine.py").write_text("import math\n\nmath.sqrt(-1)\n")
    done = called(project, "plan", "run.toml", "optimizer.schedule=mine:Half")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "importing mine raised ValueError: " in done.stderr
    assert done.stderr.endswith(f"({project / 'mine.py'}, line 3)\n")


def test_all_wrong_names_are_said_at_once(project: Path) -> None:
    done = called(project, "plan", "run.toml", "optimizer.schedule=mine:Hall", "optimizer.kind=rules:Goad")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 2), done.stderr


def test_every_key_is_looked_at_before_the_data_is_prepared(project: Path) -> None:
    """Fault: the names are found one by one, the update rule after hours of tokenising, a logger at the next try."""
    wrong = (
        "model.kind=mine:Half",
        "data.task=mine:halved",
        "optimizer.kind=mine:Half",
        "optimizer.schedule=mine:Bare",
    )
    corpora = ("data.corpus=mine:Half", "data.validation=absent:A")
    done = called(project, "train", "run.toml", *wrong, *corpora, "log.to=nowhere:log")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, [line.split()[1] for line in errors]) == (
        2,
        ["log.to", "model.kind", "data.corpus", "data.validation", "data.task", "optimizer.kind", "optimizer.schedule"],
    ), done.stderr
    assert not (project / "datasets").exists()


def test_nothing_is_imported_before_it_is_needed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of somebody else must be readable without running its code."""
    (project / "marks.py").write_text(f"import pathlib\npathlib.Path('ran').touch()\n{SCHEDULE}")
    for words in (["config", "run.toml"], ["config", "--keys"]):
        names = ["optimizer.schedule=marks:Half", "optimizer.kind=marks:A", "data.task=marks:B", "model.kind=marks:C"]
        done = called(project, *words, *(names if "run.toml" in words else ()))
        assert done.returncode == 0, done.stderr
        assert not (project / "ran").exists()
    assert called(project, "plan", "run.toml", "optimizer.schedule=marks:Half").returncode == 0
    assert (project / "ran").exists()


def test_a_run_folder_brings_no_code_along(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "runs" / "theirs"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "theirs.py").write_text(SCHEDULE)
    (folder / "config.toml").write_text((project / "run.toml").read_text() + '\n[run]\nname = "a"\n')
    done = called(project, "plan", "runs/theirs/config.toml", "optimizer.schedule=theirs:Half")
    assert (done.returncode, "there is no module theirs" in done.stderr) == (2, True), done.stderr


def test_a_module_is_found_beside_the_config_and_beside_its_base(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "top.toml").write_text('base = "../base.toml"\n')
    text = (project / "run.toml").read_text().replace("[optimizer]", '[optimizer]\nschedule = "mine:Half"')
    (project / "base.toml").write_text(text)
    config = load("top.toml").config
    assert own_code(config)["optimizer.schedule"]["files"] == [str(project / "mine.py")]


MIXED = """
[[data.mixture]]
corpus = "texts:Two"
weight = 1
[[data.mixture]]
corpus = "corpus.txt"
validation = "texts:Counts"
weight = 1
"""


def test_corpora_of_a_mixture_are_code_of_the_run_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: other code on some ranks, or at a resume, of which nothing is said; a folder that is not searched."""
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    base = (project / "run.toml").read_text().replace('corpus = "corpus.txt"\n', "") + MIXED
    (project / "base.toml").write_text(base)
    (elsewhere / "top.toml").write_text('base = "../base.toml"\n')
    config = load("top.toml", ["data.mixture.corpus.weight=2"]).config
    assert {key: code["name"] for key, code in own_code(config).items()} == {
        "data.mixture.texts-Two.corpus": "texts:Two",
        "data.mixture.corpus.validation": "texts:Counts",
    }
    assert "the code of data.mixture.texts-Two.corpus = texts:Two" in code_facts(config)


def test_the_hash_changes_with_the_file_and_with_that_of_a_base_class(project: Path) -> None:
    """Ranks with other code would train another model; a resumed run would not say that its code is new."""
    (project / "marks.py").write_text("from mine import Half\nclass Mine(Half):\n    pass\n")
    config = load(project / "run.toml", ["optimizer.schedule=marks:Mine"]).config
    before, facts = own_code(config), code_facts(config)
    assert before["optimizer.schedule"]["files"] == [str(project / "marks.py"), str(project / "mine.py")]
    (project / "mine.py").write_text(SCHEDULE.replace("/ 2", "/ 3"))
    after = own_code(config)
    (line,) = changed_code(before, after)
    assert "the code of optimizer.schedule = marks:Mine has changed since the last command (" in line
    assert changed_code(after, after) == changed_code({}, after) == []
    ranks = [{"host": "a", "facts": facts}, {"host": "b", "facts": code_facts(config)}]
    (said,) = differences(ranks)
    assert said.startswith("the ranks have different runs: the code of optimizer.schedule = marks:Mine is ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Names", "state = ('mean', 'square'), but the optimizer keeps mean in the shape of a parameter"),
        ("Norm", "elementwise = True, but the update of an element depends on others of its tensor"),
        ("Number", "its state has count, which is no tensor, so no checkpoint has it"),
        ("Group", "it changes values of its groups, which no checkpoint has"),
        ("Moves", "weights change at a learning rate of 0"),
        ("Early", "its state does not begin at zero"),
        ("Joint", "the update of a tensor depends on other tensors"),
        ("Nothing", "make returns an int; must be a torch.optim.Optimizer"),
    ],
)
def test_what_a_rule_says_of_itself_is_tried(project: Path, name: str, said: str) -> None:
    """A false word would give other losses on other layouts, or after a resume, without a message."""
    config = load(project / "run.toml", [f"optimizer.kind=rules:{name}"]).config.optimizer
    rule = own_rule(config)
    assert rule is not None
    with pytest.raises(UserError, match=r"optimizer\.kind = rules:") as told:
        rule_trial.make(rule, [], config)
    assert said in str(told.value)


@pytest.mark.parametrize("name", ["Good", "Whole"])
def test_a_rule_that_is_what_it_says_is_made(project: Path, name: str) -> None:
    config = load(project / "run.toml", [f"optimizer.kind=rules:{name}"]).config.optimizer
    rule = own_rule(config)
    assert rule is not None
    assert rule_trial.make(rule, rule_trial._groups(rule_trial._values()), config).param_groups


@pytest.mark.parametrize("words", [("parallel.tp=2",), ("parallel.dp_shard=2",), ("parallel.servers=1",)])
def test_a_rule_of_whole_tensors_refuses_what_cuts_them(project: Path, words: tuple[str, ...]) -> None:
    done = called(project, "plan", "run.toml", "--ranks", "2", "optimizer.kind=rules:Whole", *words)
    assert done.returncode == 2, done.stdout
    assert "optimizer.kind = rules:Whole updates whole tensors" in done.stderr
    assert called(project, "plan", "run.toml", "--ranks", "2", "optimizer.kind=rules:Good", *words).returncode == 0
    whole = called(project, "plan", "run.toml", "--ranks", "2", "optimizer.kind=rules:Whole", "parallel.pp=2")
    assert whole.returncode == 0, whole.stderr


def test_the_plan_counts_the_state_that_a_rule_names(project: Path) -> None:
    sizes = []
    for kind in ("rules:Good", "adagrad", "adamw"):
        (project / "plan.txt").write_text("")
        done = called(project, "plan", "run.toml", f"optimizer.kind={kind}")
        assert done.returncode == 0, done.stderr
        sizes.append(next(line for line in done.stdout.splitlines() if "optimizer" in line))
    assert sizes[0] == sizes[1] != sizes[2]


def test_documents_become_tokens_and_are_prepared_again_if_the_code_changes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    folder = prepare.prepare("texts:Two", "byte", project / "datasets")
    description = open_dataset(folder).description
    assert description["corpus"]["documents"] == 2
    assert description["corpus"]["characters"] == len("one document of some words" + "another one" * 30)
    assert locate("texts:Two", "byte", project / "datasets") == folder
    (project / "texts.py").write_text(CORPUS.replace("another", "some other"))
    assert locate("texts:Two", "byte", project / "datasets") is None
    (project / "texts.py").write_text(CORPUS + "# the same texts\n")
    assert prepare.prepare("texts:Two", "byte", project / "datasets") == folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Counts", "read gives other documents than at the first time"),
        ("Numbers", "read gives 3; must give a str"),
        ("Files", "files names absent.txt: No such file or directory"),
        ("Text", "read returns 'text'; must be an iterator of str"),
        ("File", "files = 'absent.txt': must be a tuple of texts"),
        ("Away", "raised OSError: the database is away ("),
        ("Ends", "raised SystemExit: 3 ("),
    ],
)
def test_documents_that_are_none_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(UserError) as told:
        prepare.prepare(f"texts:{name}", "byte", project / "datasets")
    assert f"data.corpus = texts:{name}: {said}" in str(told.value)
