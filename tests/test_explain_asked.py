"""In: command lines of `codescent explain`. Out: the example has the ranks that are asked for, advice can be followed,
and what is too large is refused at once. Does not check what a lesson says (test_explain.py does)."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from lessons import WITHOUT_RANKS, asked, lanes, table, text
from runs import called

from codescent.base.errors import UserError
from codescent.explain.at_work import MOST_LANES
from codescent.explain.content import Grid
from codescent.explain.topics import TOPICS
from codescent.verbs.cli import run

STUDY = '[study]\nname = "tiny"\nconfig = "default"\nkind = "strong"\n[axes]\nranks = [1, 2]\n'
LARGE = {
    "layers": ("zero", "model.num_layers=10000 --ranks 2 parallel.dp_shard=2", "give at most model.num_layers=1000"),
    "layers of offload": ("offload", "model.num_layers=1001", "give at most model.num_layers=1000"),
    "ranks": (
        "data-parallel",
        "--ranks 100000 parallel.dp_replicate=100000 train.global_batch_size=100000",
        "100,000 ranks cannot be drawn; give at most 256",
    ),
    "averages": (
        "average",
        "--ranks 257 parallel.dp_replicate=257 train.global_batch_size=257",
        "257 ranks cannot be drawn; give at most 256",
    ),
    "servers": (
        "server",
        "--ranks 300 parallel.servers=100 parallel.dp_replicate=200 train.global_batch_size=200",
        "300 ranks with 100 servers cannot be drawn; give at most 16 ranks, of which at most parallel.servers=4 serve",
    ),
    "micro-batches": (
        "compression",
        "--ranks 2 parallel.dp_replicate=2 train.global_batch_size=2000 train.microbatch_size=1",
        "1,000 micro-batches cannot be drawn; give at most train.global_batch_size=512",
    ),
    "batch": (
        "scaling",
        "train.global_batch_size=1000 train.microbatch_size=1",
        "1,000 micro-batches cannot be drawn; give at most train.global_batch_size=256",
    ),
    "stages": (
        "pipeline",
        "--ranks 65 parallel.pp=65 model.num_layers=65 train.microbatch_size=1",
        "65 stages cannot be drawn; give at most parallel.pp=64",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("topic", TOPICS)
def test_the_example_has_the_ranks_that_are_asked_for(topic: str, ranks: int) -> None:
    """Fault: --ranks is refused with keys that the user never gave, or the example of so many ranks has no plan."""
    example = TOPICS[topic].example
    if example.takes(ranks):
        assert asked(topic, "--ranks", str(ranks)).plan.world_size == ranks
        return
    with pytest.raises(UserError) as refused:
        asked(topic, "--ranks", str(ranks))
    why = f"explain {topic} --ranks {ranks}: without a CONFIG it shows its example, which takes {example.numbers}"
    assert [*refused.value.problems] == [why]


@pytest.mark.parametrize(
    "topic", [name for name in WITHOUT_RANKS if name not in ("offload", "memory", "flops", "pram")]
)
def test_the_example_of_three_ranks_makes_a_lesson(topic: str) -> None:
    """Fault: the example has a plan, but its lesson cannot be made of an odd number of ranks."""
    given = asked(topic, "--ranks", "3")
    assert text(TOPICS[topic].lesson(given))


@pytest.mark.parametrize("topic", [name for name, topic in TOPICS.items() if topic.gives])
@pytest.mark.parametrize("config", ["default", "llama3_8b"])
def test_advice_can_be_followed(topic: str, config: str) -> None:
    """Fault: a refusal advises words that are refused themselves."""
    base = [config, *(["--ranks", "8"] if config == "llama3_8b" else [])]
    try:
        asked(topic, *base)
    except UserError as error:
        (why,) = error.problems
        if (topic, config) == ("context", "llama3_8b"):  # its recompute excludes cp
            assert "divides no sequence; without a CONFIG the topic shows its example. This" in why
            return
        found = re.search(r"; give (--ranks .+?)\. This", why)
        assert found is not None, why
        words = shlex.split(found[1])
        assert TOPICS[topic].shows(asked(topic, config, *words).plan)


@pytest.mark.parametrize("case", LARGE)
def test_what_is_too_large_is_refused_at_once(case: str) -> None:
    """Fault: a lesson of many ranks, layers or micro-batches stands still for minutes, or its refusal has no number."""
    topic, words, why = LARGE[case]
    with pytest.raises(UserError, match=re.escape(why)):
        asked(topic, "default", *words.split())


def test_the_largest_numbers_that_are_named_are_taken() -> None:
    """Fault: the number that a refusal names is refused, too."""
    for topic, words in (
        ("data-parallel", "--ranks 256 parallel.dp_replicate=256 train.global_batch_size=256"),
        ("scaling", "train.global_batch_size=256 train.microbatch_size=1"),
        ("server", "--ranks 16 parallel.servers=4 parallel.dp_replicate=12 train.global_batch_size=12"),
        ("pipeline", "--ranks 64 parallel.pp=64 model.num_layers=64 train.microbatch_size=1"),
    ):
        assert TOPICS[topic].shows(asked(topic, "default", *words.split()).plan)


def test_of_many_ranks_some_are_drawn() -> None:
    """Fault: a timeline has a lane for each of hundreds of ranks, or nobody learns that some are left out."""
    step = TOPICS["data-parallel"].lesson(asked("data-parallel", "--ranks", "40")).frames[1]
    assert len(lanes(step).lanes) == MOST_LANES
    assert step.after[0] == f"{40 - MOST_LANES} more ranks are like these."


def test_a_checkpoint_of_many_ranks_computes_those_that_are_shown() -> None:
    """Fault: all parts of 100,000 ranks are computed, of which eight are drawn."""
    words = ("default", "--ranks", "100000", "parallel.dp_replicate=100000", "train.global_batch_size=100000")
    first = TOPICS["checkpoint"].lesson(asked("checkpoint", *words)).frames[0]
    (figure,) = first.figures
    assert isinstance(figure, Grid)
    assert len(figure.columns) == 8


def test_a_word_that_is_no_file_is_an_override(tmp_path: Path) -> None:
    """Fault: `section.key=value` in the place of CONFIG is looked for as a file."""
    done = called(tmp_path, "explain", "tensor", "parallel.tp=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tp=2" in done.stdout


REFUSED: dict[str, tuple[str, list[str]]] = {
    "language, file and config": (
        "zero parallel.zero_stage=9 model.nope=3 --lang fr --out x.pdf",
        ["--lang fr: ", "--out x.pdf: ", "command line: model.nope: ", "command line: parallel.zero_stage: given 9"],
    ),
    "two words for a study": (
        "scaling begun --ranks 2 train.num_steps=3",
        ["explain scaling begun: a study is measured; leave out --ranks and train.num_steps=3", "begun/study.json: "],
    ),
    "no study": ("scaling empty", ["explain scaling empty: is no folder of a study: study.json is missing there"]),
    "folder of a study": (
        "zero begun",
        ["explain zero begun: is the folder of a study, which only `codescent explain scaling` takes; give a config"],
    ),
    "file of a study": (
        "scaling st.toml",
        [
            "explain scaling st.toml: is the file of a study, and no config. To explain it, run `codescent study "
            "st.toml`, and give codescent explain scaling the folder that it makes"
        ],
    ),
    "a layout that the example cannot have": (
        "hybrid --ranks 8 parallel.pp=4",
        [
            "parallel: pp 4 x ",
            "explain hybrid: without a CONFIG it shows its example, which has train.global_batch_size=8 "
            "parallel.ranks=8 parallel.pp=2 parallel.dp_replicate=2 parallel.tp=2",
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_problems_are_named(tmp_path: Path, case: str) -> None:
    """Fault: a problem is named after another one is mended, or a study is taken for a config."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "study.json").write_text("{}")
    (tmp_path / "st.toml").write_text(STUDY)
    words, problems = REFUSED[case]
    done = called(tmp_path, "explain", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"error: {problem}")


def test_a_stream_without_spanish_letters_says_what_to_set(tmp_path: Path) -> None:
    """Fault: a Spanish lesson is full of escapes, and nobody learns why."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert run(["explain", "context", "--lang", "es"]) == 0
    assert err.getvalue().startswith("the output is ascii, which lacks letters of this language; set PYTHONUTF8=1")


def test_one_worker_has_nobody_to_wait_for() -> None:
    """Fault: of one worker and one server the lesson says that rank 1, the server, computes slowly."""
    *ways, last = TOPICS["server"].lesson(asked("server", "default", "--ranks", "2", "parallel.servers=1")).frames
    assert not [sentence for frame in ways for sentence in frame.says if sentence.startswith("Rank 1 ")]
    assert table(last).rows
