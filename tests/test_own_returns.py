"""In: code of a user whose functions return something else than they must. Out: one message that names the function.
Does not test names that stand for nothing (test_own_names.py does)."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from runs import called, make_project

from codescent.base.errors import UserError
from codescent.base.returned import _parsed, _takes, check_methods, checked
from codescent.data.samples import Numbers, Samples, Source

PAGE = Path(__file__).parents[1] / "docs" / "own_names.md"
TASKS = """
import numpy as np
from copies import Copy, CopyDataset, CopySource, Samples

def dataset(base=CopyDataset, **methods):
    made = type("Made", (base,), methods)
    return lambda self, request, path: made(self.text(request, path))

def source(**methods):
    made = type("MadeSource", (CopySource,), methods)
    return dataset(source=lambda self, split, seq_len, targets: made(split, self.text.train, seq_len))

def read(change):
    def changed(self, numbers):
        found = CopySource.read(self, numbers)
        return change(found.inputs, found.targets, found.extras)
    return source(read=changed)

class NoPath(Copy):
    def prepare(self, request, *, progress):
        return None
class NoDataset(Copy):
    def open(self, request, path):
        return None
class Folder(Copy):
    def open(self, request, path):
        return {"path": path}
class Short(Copy):
    def open(self, request):
        return None
class Refuses(Copy):
    def refuse(self, request):
        return "no"
class Facts(Copy):
    def facts(self, request, shape):
        return {}
class NoSource(Copy):
    open = dataset(source=lambda self, split, seq_len, targets: None)
class Vocabulary(Copy):
    open = dataset(vocab_size=property(lambda self: "many"))
class Count(Copy):
    open = source(num_samples=property(lambda self: 3.5, lambda self, value: None))
class NoSamples(Copy):
    open = source(read=lambda self, numbers: None)
class Positions(Copy):
    open = read(lambda x, y, extras: Samples(x[:, 1:], y, extras))
class Floats(Copy):
    open = read(lambda x, y, extras: Samples(x * 1.0, y, extras))
class Beyond(Copy):
    open = read(lambda x, y, extras: Samples(x + 300, y, extras))
class Flat(Copy):
    open = read(lambda x, y, extras: Samples(x[:, 0], y, extras))
class Negative(Copy):
    open = read(lambda x, y, extras: Samples(x - 300, y, extras))
class NoDict(Copy):
    open = read(lambda x, y, extras: Samples(x, y, None))
class NoTargets(Copy):
    extras = False
    open = read(lambda x, y, extras: Samples(x, y[:, :0]))
class Rows(Copy):
    open = read(lambda x, y, extras: Samples(x, y, {"lengths_B": x[0, :1]}))
class NoExtras(Copy):
    open = read(lambda x, y, extras: Samples(x, y))
class Losses(Copy):
    open = source(losses=lambda self, numbers: 4)
class Fine(Copy):
    pass
class Proxy:
    def __init__(self, inner):
        self._inner = inner
    def __getattr__(self, name):
        return getattr(self.__dict__["_inner"], name)
class Wrapped(Copy):
    open = dataset(source=lambda self, *given: Proxy(CopyDataset.source(self, *given)))
class Twice(Wrapped):
    def open(self, request, path):
        return Proxy(super().open(request, path))
"""
KINDS = """
from dataclasses import replace
from bloomed import KIND
from codescent.models.gpt2.declare import parameters
Nothing = replace(KIND, parameters=lambda shape: None)
Number = replace(KIND, parameters=lambda shape: iter([3]))
Saved = replace(KIND, saved=lambda shape, forward: iter(["x"]))
Flops = replace(KIND, forward_flops=lambda shape, positions: 3.0)
Few = replace(KIND, forward_flops=lambda shape, positions: (3.0,))
NoFunction = replace(KIND, operators=3)
Arguments = replace(KIND, operators=lambda shape: iter(()))
Deep = replace(KIND, parameters=lambda shape: (replace(one, depths=(99,)) for one in parameters(shape)))
Twice = replace(KIND, parameters=lambda shape: (replace(one, name="x") for one in parameters(shape)))
Silent = replace(KIND, module="kind_modules:Silent")
"""
MODULES = """
from bloomed_module import Bloomed
class Silent(Bloomed):
    def forward(self, *inputs, **options):
        return None
"""
DUE = {
    "task NoPath": "prepare returns None; must be a Path",
    "task NoDataset": "open returns None; must be an AnyDataset",
    "task Folder": "which lacks description, earlier, fingerprint, path, source, tokenizer_text, vocab_size",
    "task Short": "open has other arguments than codescent calls it with; must be open(self, request, path)",
    "task Refuses": "refuse returns 'no'; must be an iterator of str",
    "task Facts": "facts returns {}; must be a TaskFacts",
    "task NoSource": "open: source returns None; must be a Source",
    "task Vocabulary": "open: vocab_size is 'many'; must be an int or None",
    "task Count": "open: source: num_samples is 3.5; must be an int",
    "task NoSamples": "open: source: read returns None; must be a Samples",
    "task Positions": "train split: inputs are int64 [2, 15]; must have 16 positions",
    "task Floats": "train split: inputs are float64 [2, 16]; must have the dtype int64",
    "task Beyond": "must be below 257, the vocabulary of the model",
    "task Flat": "train split: inputs are int64 [2]; must have 16 positions",
    "task Negative": "; a token is 0 or more",
    "task NoDict": "train split: extras are of the type NoneType; must be a dict of arrays",
    "task NoTargets": "train split: targets are int64 [2, 0]; must have 16 positions",
    "task Rows": "train split: lengths_B of 2 samples are int64 [1]; must be an array of 2 rows",
    "task NoExtras": "train split: samples have no extras, but the model reads some, such as lengths_B",
    "task Losses": "train split: losses of 2 samples are of the type int; must be an array of 2 whole numbers",
    "kind Nothing": "parameters returns None; must be an iterator of Parameter",
    "kind Number": "parameters gives 3; must give a Parameter",
    "kind Saved": "saved gives 'x'; must give a SavedTensor",
    "kind Flops": "forward_flops returns 3.0; must be a tuple of float",
    "kind Few": "forward_flops returns 1 number; must be 4: of the embedding, of 2 blocks, and of the head",
    "kind NoFunction": "operators must be a function of 2 arguments",
    "kind Arguments": "operators must be a function of 2 arguments",
    "kind Deep": "must be from 0 (embedding) to 3 (head)",
    "kind Twice": "parameters: x: is declared twice",
    "kind Silent": "kind_modules:Silent: forward returns None; must be a Tensor",
}
"""What is trained, and the message."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the examples of the page, and what spoils them."""
    folder = tmp_path_factory.mktemp("own_returns")
    make_project(folder)
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    for name, text in (("spoilt_tasks", TASKS), ("spoilt_kinds", KINDS), ("kind_modules", MODULES)):
        (folder / f"{name}.py").write_text(text)
    before = {*sys.modules}
    yield folder
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.parametrize("case", DUE)
def test_a_wrong_return_value_is_one_message(project: Path, case: str) -> None:
    """Catches: a traceback of ours where the user's function returns nothing, or another type."""
    noun, _, name = case.partition(" ")
    word = f"data.task=spoilt_tasks:{name}" if noun == "task" else f"model.kind=spoilt_kinds:{name}"
    done = called(project, "train", "run.toml", word, f"run.name={noun}{name}", "train.num_steps=1")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(said) == 1, done.stderr
    assert DUE[case] in said[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["Fine", "Wrapped", "Twice"])
def test_what_is_due_trains(project: Path, name: str) -> None:
    """Catches: a check that refuses what the base class allows, or an object that passes all on to another one."""
    done = called(
        project, "train", "run.toml", f"data.task=spoilt_tasks:{name}", f"run.name={name}", "train.num_steps=1"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        ("str | None", None, ""),
        ("str | None", 3, "f returns 3; must be a str or None"),
        ("dict[str, int]", {"a": 1}, ""),
        ("dict[str, int]", {"a": "b"}, "f returns {'a': 'b'}; must be a dict[str, int]"),
        ("tuple[str, ...]", ("a", "b"), ""),
        ("tuple[str, ...]", ["a"], "f returns ['a']; must be a tuple of str"),
        ("tuple[int, str]", (1,), "f returns (1,); must be a tuple[int, str]"),
        ("list[tuple[str, int]]", [("a", 1)], ""),
        ("list[tuple[str, int]]", [("a", "b")], "f returns [('a', 'b')]; must be a list of tuple[str, int]"),
        ("float", 3, ""),
        ("float", "3", "f returns '3'; must be a number"),
        ("float", Fraction(1, 2), ""),
        ("int", np.int64(3), ""),
        ("tuple[float, ...]", (np.float32(0.5), np.int64(2), 1), ""),
        ("int", np.float32(0.5), "f returns 0.5; must be an int"),
        ("Any", object(), ""),
        ("torch.optim.Optimizer", 3, ""),  # a name that planning does not have
    ],
)
def test_annotations_are_read_as_they_are_meant(hint: str, value: object, said: str) -> None:
    """Catches: an annotation that is read as another one."""
    function: Callable[..., object] = checked(lambda: value, "f", _parsed(hint), {})
    if not said:
        assert function() == value
        json.dumps(function(), default=id if hint in ("Any", "torch.optim.Optimizer") else None)
        return
    with pytest.raises(UserError) as told:
        function()
    assert str(told.value) == f"{said}: see codescent docs own_names"


class Constant:
    """A source whose samples have one token."""

    name, num_samples, losses_per_sample = "train", 10, 4

    def __init__(self, token: int) -> None:
        self.token = token

    def read(self, numbers: Numbers) -> Samples:
        found = np.full((len(numbers), 4), self.token)
        return Samples(found, found)

    @staticmethod
    def losses(numbers: Numbers) -> object:
        return np.full(len(numbers), 4) if len(numbers) else None


def test_a_copy_of_a_checked_object_reads_its_own_attributes() -> None:
    """Catches: methods that stay bound to the object that was copied, so that another split has the same samples."""
    made = Constant(1)
    for _ in range(2):
        check_methods(made, Source, "x")
    restored = pickle.loads(pickle.dumps(made))  # noqa: S301 - the test has made it
    for copied in (copy.copy(made), copy.deepcopy(made), restored):
        copied.token = 2
        assert copied.read(np.arange(1)).inputs[0, 0] == 2
        assert made.read(np.arange(1)).inputs[0, 0] == 1


class Named:
    """A base class."""

    def name_of(self) -> str:
        """A name."""
        return ""


class Nameless(Named):
    """One whose method is wrong."""

    def name_of(self) -> str:
        """No name."""
        return cast(str, None)


class Inherits(Nameless):
    """One that inherits the wrong method."""


def test_a_message_names_the_class_that_is_used() -> None:
    """Catches: the name of a base class whose methods were checked before."""
    for cls, what in ((Nameless, "first"), (Inherits, "second")):
        check_methods(cls(), Named, what)
        with pytest.raises(UserError, match=f"^{what}: name_of returns None; must be a str"):
            cls().name_of()


@pytest.mark.parametrize(
    ("function", "fits"), [(dict, True), (functools.partial(pow, 2), True), (3, False), (lambda: 1, False)]
)
def test_a_function_that_tells_no_arguments_is_not_refused(function: object, fits: bool) -> None:
    """Catches: a refusal of a function of C, such as derived = dict."""
    assert _takes(function, [""], []) is fits
