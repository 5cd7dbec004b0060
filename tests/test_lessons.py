"""In: docs/lessons.md and docs/lessons.es.md. Out: each command of them runs, in their order; both have the same ones.
Does not judge what is taught."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from runs import called, codescent

from codescent.explain.topics import TOPICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
LANG = " --lang es"
WITH_RANKS = ("codescent train", "codescent compare", "codescent explain ring")


def commands(page: str) -> list[str]:
    """The commands of a page."""
    return re.findall(r"^    (codescent .*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)


ENGLISH, SPANISH = commands("lessons.md"), commands("lessons.es.md")


def test_both_languages_have_the_same_commands() -> None:
    """Fault: a command was changed in one page alone, or a class does not hear of a topic."""
    assert [one.removesuffix(LANG) for one in SPANISH] == ENGLISH
    assert [one for one in SPANISH if one.startswith("codescent explain")] == [
        f"{one}{LANG}" for one in ENGLISH if one.startswith("codescent explain")
    ]
    assert set(TOPICS) <= {words[2] for one in ENGLISH if len(words := one.split()) > 2 and words[1] == "explain"}
    assert set(TOPICS) <= set(re.findall(r"^\| `([\w-]+)` \|", (DOCS / "explain.md").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("command", [one for one in [*ENGLISH, *SPANISH] if not one.startswith(WITH_RANKS)])
def test_a_command_of_the_class_runs(tmp_path: Path, command: str) -> None:
    """Fault: a student types a command of the page, and it is refused."""
    done = called(tmp_path, *shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == "" or " launch " in command, "what `launch` could not look at before"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_that_start_ranks_run_in_their_order(tmp_path: Path) -> None:
    """Fault: the runs that the class compares are not there, or real ranks do not answer."""
    for command in [one for one in [*ENGLISH, *SPANISH[:6]] if one.startswith(WITH_RANKS)]:
        done = codescent(tmp_path, *shlex.split(command)[1:])
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert (tmp_path / "runs" / "two-ranks").is_dir()
