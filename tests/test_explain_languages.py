"""In: the sentences of `codescent explain` and their message files. Out: each is translated, none is left over.
Does not judge a translation. Needs Babel (extra dev)."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from string import Formatter
from types import ModuleType

import pytest
from lessons import WITHOUT_RANKS, lesson, said

from codescent.explain.language import SOURCE, language, languages
from codescent.explain.topics import TOPICS

mofile = pytest.importorskip("babel.messages.mofile", reason="Babel is not installed: message files are not checked")
pofile = pytest.importorskip("babel.messages.pofile")
ROOT = Path(__file__).resolve().parent.parent
WORD = re.compile(r"[^\W\d_]{2,}")
LONGEST = {"en": 20, "es": 25}
"""Words of a sentence. Spanish needs more articles."""
TERMS = """
forward backward rank ranks logits host local flash Variables universal bytes ms min pp tp bf fp int et sum sqrt
EREW CREW CRCW NH HS LCT NBT MFLOP TFLOP KiB MiB GiB TB USL Amdahl Gustafson Kaplan Hoffmann Chowdhery PaLM nanoGPT
embedding table codescent python train run torchrun torchx slurm srun mpirun mpiexec jsrun flux Open MPI PALS LSF Hydra
MPICH Intel MVAPICH RANK
none all optimizer sign linear naive gpipe interleaved ring pairs exponential complete send reduce step
attn mlp tok norm loss positions activation residual scores values
"""
"""Words that are the same in each language: those of torch, of papers, of the shell; values of keys; operators."""


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """release/messages.py."""
    spec = importlib.util.spec_from_file_location("messages", ROOT / "release" / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _keys(path: Path) -> dict[str | tuple[str, ...], str | tuple[str, ...]]:
    with path.open("rb") as file:
        catalog = pofile.read_po(file) if path.suffix == ".po" else mofile.read_mo(file)
    found = {}
    for message in catalog:
        if message.id:
            key = tuple(message.id) if isinstance(message.id, list | tuple) else message.id
            found[key] = tuple(message.string) if isinstance(message.string, list | tuple) else message.string
    return found


def _names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def test_spanish_is_there(made: ModuleType) -> None:
    """Fault: the message files are not found, so that only English is left."""
    assert languages() == (SOURCE, *(path.parents[1].name for path in made.files()))
    assert "es" in languages()
    assert language("es")("forward and backward") == "forward y backward"


@pytest.mark.parametrize("code", [code for code in languages() if code != SOURCE])
def test_each_message_has_its_translation(made: ModuleType, code: str) -> None:
    """Fault: a sentence has changed and its translation has not; a placeholder is lost; the .mo is an older one."""
    path = made.LANGUAGES / code / "LC_MESSAGES" / "codescent.po"
    translated = _keys(path)
    wanted = {tuple(one.id) if isinstance(one.id, list | tuple) else one.id for one in made.messages() if one.id}
    assert wanted - set(translated) == set(), "python release/messages.py adds them"
    assert set(translated) - wanted == set(), "python release/messages.py drops them"
    for key, string in translated.items():
        keys, strings = (one if isinstance(one, tuple) else (one,) for one in (key, string))
        assert all(strings), f"no translation: {keys[0]}"
        for text in strings:
            assert _names(text) == _names(keys[0]), text
            assert text.endswith(".") == keys[0].endswith("."), text
    assert _keys(path.with_suffix(".mo")) == translated, "python release/messages.py compiles it"


def test_no_message_is_hidden_from_the_extraction(made: ModuleType) -> None:
    """Fault: a sentence is said through a variable or inside of an f-string, so that no translator sees it."""
    wanted = {text for one in made.messages() for text in ([one.id] if isinstance(one.id, str) else one.id)}
    hidden = []
    for path in sorted((ROOT / "codescent" / "explain").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("say", "asked.say", "say.many"):
                for said_there in call.args[: 2 if ast.unparse(call.func) == "say.many" else 1]:
                    if not isinstance(said_there, ast.Constant) or said_there.value not in wanted:
                        hidden.append(f"{path.name}:{call.lineno}: {ast.unparse(said_there)}")
    assert hidden == []
    assert {topic.about for topic in TOPICS.values()} <= wanted


@pytest.mark.parametrize("topic", WITHOUT_RANKS)
def test_nothing_of_a_lesson_stays_english(topic: str) -> None:
    """Fault: a text of a lesson comes from elsewhere, such as a plan, and is English in every language."""
    english, spanish = lesson(topic), lesson(topic, lang="es")
    assert len(english.frames) == len(spanish.frames)
    same = {one for one, other in zip(said(english), said(spanish), strict=True) if one == other}
    words = {word for text in same for word in WORD.findall(re.sub(r"\S*[._=/:-]\S*", "", text))}  # not those of keys
    assert words - set(TERMS.split()) == set()


@pytest.mark.parametrize("code", languages())
def test_sentences_are_short(made: ModuleType, code: str) -> None:
    """Fault: a sentence is longer than a reader with another first language takes in at once."""
    say = language(code)
    long = []
    for one in made.messages():
        if not one.id:
            continue
        for text in [one.id] if isinstance(one.id, str) else one.id:
            for sentence in re.split(r"[.?;] ", say.messages.gettext(text)):
                if len(WORD.findall(sentence)) > LONGEST[code]:
                    long.append(sentence)
    assert long == []
