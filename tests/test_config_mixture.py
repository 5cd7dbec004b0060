"""In: configs with a mixture of corpora. Out: its entries, overrides of one, one message for all that is wrong.
Does not look at corpora: no file of these names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.config.effects import value_of
from codescent.config.hub_keys import names_in, with_names, words_of
from codescent.config.load import flat, load, to_toml
from codescent.config.mixture import default_name
from codescent.study.file import read_study
from codescent.study.points import specs_of

TEXT = """
[data]
tokenizer = "byte"
[[data.mixture]]
corpus = "texts/wiki.txt"
weight = 3
[[data.mixture]]
corpus = "hf://datasets/owner/code-set@main/data"
name = "code"
weight = 0.5
validation = "held.txt"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def problems(file: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        load(file, words)
    return "\n".join(caught.value.problems)


def test_a_mixture_is_read_and_written_again(file: Path, tmp_path: Path) -> None:
    """config.toml of a run is read by its resume: a lost weight would be another mixture."""
    config = load(file).config
    assert [entry.name for entry in config.data.mixture] == ["wiki", "code"]
    assert [entry.weight for entry in config.data.mixture] == [3.0, 0.5]
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert 'corpus = "python-stdlib"' not in to_toml(config)
    assert load(tmp_path / "again.toml").config.data.mixture == config.data.mixture
    assert flat(config)["data.mixture.code.weight"] == 0.5
    assert flat(config)["data.mixture"] == "wiki, code"


def test_one_value_of_one_corpus_is_overridden(file: Path) -> None:
    """A study varies one weight; the name of a corpus stays when its path is another one."""
    words = ("data.mixture.code.weight=2", "data.mixture.wiki.corpus=elsewhere/w.txt")
    wiki, code = load(file, words).config.data.mixture
    assert (code.weight, wiki.corpus, wiki.name) == (2.0, "elsewhere/w.txt", "wiki")
    assert value_of(load(file, words).config, "data.mixture.wiki.corpus") == "elsewhere/w.txt"


def test_a_corpus_replaces_the_mixture_of_a_base_file_and_the_other_way_round(file: Path, tmp_path: Path) -> None:
    """Both at once would leave open which of them is trained on."""
    assert load(file, ["data.corpus=one.txt"]).config.data.mixture is None
    other = tmp_path / "other.toml"
    other.write_text('base = "run.toml"\n[data]\nmixture = [{corpus = "a"}, {corpus = "b"}]\n')
    assert [entry.name for entry in load(other).config.data.mixture] == ["a", "b"]
    file.write_text(TEXT.replace("[data]", '[data]\ncorpus = "one.txt"'))
    assert "data.mixture: given, and data.corpus too" in problems(file)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('"wiki.txt"', "must be tables such as"),
        ("[]", "needs two corpora or more"),
        ('[{corpus="a"}]', "needs two corpora or more"),
        ('[{corpus="a", weight=0}, {corpus="b", weight=-1}]', "corpus 2: weight = -1: must be a number above 0"),
        ('[{corpus="a", weight=nan}, {corpus="b", weight=inf}]', "corpus 2: weight = inf: must be a number above 0"),
        ('[{corpus="a", weight=true}, {corpus="b", weight="3"}]', "corpus 1: weight = True"),
        ('[{corpus="a"}, {corpus="./a"}]', "a is there twice: give it once"),
        ('[{corpus="x/a.txt"}, {corpus="y/a.txt"}]', "2 corpora have the name a: give each another name"),
        ('[{corpus="a", name="a b"}, {corpus="b"}]', "name = 'a b' is part of the names of columns"),
        ('[{corpus="a", weight=1}, {corpus="b"}]', "b has no weight, and others have"),
        ('[{corpus="a", wieght=1}, {corpus="b"}]', "unknown key wieght; did you mean weight?"),
        ('[{weight=1}, {corpus="b", weight=1}]', "corpus 1: has no corpus"),
        ('[{corpus=3}, {corpus="b"}]', "corpus 1: corpus must be a string"),
        ('[{corpus="hf://owner/x"}, {corpus="b"}]', "names a model, and a corpus is a data set"),
    ],
)
def test_what_is_wrong_in_a_mixture_is_one_message(file: Path, value: str, said: str) -> None:
    found = problems(file, f"data.mixture={value}")
    assert said in found
    assert len(found.splitlines()) == 1


def test_everything_that_is_wrong_is_said_at_once(file: Path) -> None:
    value = '[{corpus="a", weight=-1}, {corpus="a", weight=2, nmae="x"}, {weight=1}]'
    found = problems(file, f"data.mixture={value}", "data.mixture_temperature=0.5", "data.seq_len=0")
    assert all(part in found for part in ("corpus 1: weight = -1", "nmae", "twice"))
    assert all(part in found for part in ("corpus 3: has no corpus", "data.mixture_temperature", "data.seq_len"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.mixture_temperature=2"], "but the corpora have weights"),
        (["data.mixture_temperature=0.9"], "must be a number >= 1 and <= 1000"),
        (["data.validation=v.txt"], "give the entries of data.mixture their own validation"),
        (["data.mixture.kode.weight=1"], "no corpus has this name; there are wiki, code"),
        (["data.mixture.code.wait=1"], "unknown key of a corpus; did you mean weight?"),
        (["data.mixture.code.weight=0"], "given 0; must be a number above 0"),
        (["data.corpus=x", "data.mixture.code.weight=1"], "there is no data.mixture that it could change"),
    ],
)
def test_keys_that_do_not_fit_a_mixture(file: Path, words: list[str], said: str) -> None:
    assert said in problems(file, *words)


STUDY = """
[study]
name = "mixing"
config = "run.toml"
kind = "grid"
steps = 4
warmup = 1
baseline = { "data.mixture.code.weight" = 1 }
[axes]
"data.mixture.code.weight" = [1, 2.5]
"""


def test_a_study_varies_the_weight_of_a_corpus(file: Path, tmp_path: Path) -> None:
    """A law of mixing is such a study. A wrong weight is said before any run begins."""
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    light, heavy = specs_of(read_study(study))
    assert [load(file, spec.words).config.data.mixture[1].weight for spec in (light, heavy)] == [1.0, 2.5]
    study.write_text(STUDY.replace("2.5]", "0]"))
    with pytest.raises(UserError, match="given 0; must be a number above 0"):
        read_study(study)


def test_names_of_a_hub_are_found_and_replaced(file: Path) -> None:
    """A name that is not found is not pinned: another commit would be trained on after a resume."""
    config = load(file).config
    (key, name), *rest = names_in(config).items()
    assert (key, not rest) == ("data.mixture.code.corpus", True)
    pinned = with_names(config, {key: name.at("f" * 40)})
    (word,) = words_of(pinned)
    assert word == f"data.mixture.code.corpus=hf://datasets/owner/code-set@{'f' * 40}/data"
    assert load(file, [word]).config.data.mixture == pinned.data.mixture


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("a/b/wiki.jsonl.gz", "wiki"),
        ("hf://datasets/roneneldan/TinyStories", "TinyStories"),
        ("books/**/*.txt", "books"),
        ("/data/C4 (en)/", "C4-en"),
        ("python-stdlib", "python-stdlib"),
    ],
)
def test_a_corpus_without_a_name_has_that_of_its_path(corpus: str, name: str) -> None:
    assert default_name(corpus) == name
