"""In: arguments of `codescent explain`. Out: a lesson on a topic, printed or written to a file; without one the list.
Does not make the lesson (explain/ does) and starts no run."""

from __future__ import annotations

import difflib
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from codescent.base.console import new_console
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.published import in_words
from codescent.explain import markdown, page, picture
from codescent.explain.content import Lesson
from codescent.explain.language import Language, language
from codescent.explain.text import WIDTH, lesson_text
from codescent.explain.topic import LessonInput, Topic, planned
from codescent.explain.topics import TOPICS
from codescent.study.folder import DEFINITION
from codescent.study.opened import open_study
from codescent.verbs.config import resolved_of
from codescent.verbs.picture import no_file, no_replacement

DEFAULT = "default"
FORMS = {".html": page.MARK, ".svg": page.MARK, ".md": markdown.MARK}
"""The suffix of each form of a lesson, and what stands in each file of this command."""


def main(arguments: Namespace) -> int:
    """Print or write a lesson. Raises UserError: everything that is wrong with the command line."""
    problems: list[str] = []
    try:
        words = language(arguments.lang)
    except UserError as error:
        problems += error.problems
    problems += _refusals(arguments.out)
    topic = _topic(arguments, problems)
    if problems:
        raise UserError(*problems)
    if topic is None:
        _list(words)
        return 0
    lesson = _lesson(arguments, topic, words)
    if arguments.out is None:
        console = new_console(width=WIDTH)
        for one in lesson_text(lesson, words):
            console.print(one)
        return 0
    _write(arguments.out, lesson, words)
    return 0


def _topic(arguments: Namespace, problems: list[str]) -> Topic | None:
    """The topic; None: none is named. Adds to the problems."""
    name = arguments.topic
    if name is None:
        given = {"--out": arguments.out, "--ranks": arguments.ranks}
        problems += [f"{option}: has no effect without a TOPIC" for option, value in given.items() if value is not None]
        return None
    if name not in TOPICS:
        near = difflib.get_close_matches(name, TOPICS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(TOPICS)}"
        problems.append(f"explain {name}: no such topic; {meant}")
        return None
    return TOPICS[name]


def _lesson(arguments: Namespace, topic: Topic, words: Language) -> Lesson:
    """The lesson of a config, or of the folder of a study. Raises UserError: see `asked_of` and `open_study`."""
    if topic.of_study is None or arguments.config is None or not (Path(arguments.config) / DEFINITION).is_file():
        return topic.lesson(asked_of(arguments, topic, words))
    given = [*arguments.overrides, *([] if arguments.ranks is None else ["--ranks"])]
    if given:
        raise UserError(f"explain {arguments.topic} {arguments.config}: a study is measured; leave out {given[0]}")
    return topic.of_study(open_study(arguments.config), words)


def asked_of(arguments: Namespace, topic: Topic, words: Language) -> LessonInput:
    """What is explained. Raises UserError: the config is refused, or has nothing to show of the topic."""
    if arguments.config is None:
        arguments.config = DEFAULT
        arguments.overrides = [*topic.words, *arguments.overrides]
    config, plan = planned(resolved_of(arguments).config)
    if why := topic.refuses(plan):
        fitting = [name for name, other in TOPICS.items() if other is not topic and not other.refuses(plan)]
        other = f". This config has something to show of: {', '.join(fitting)}" if fitting else ""
        raise UserError(f"explain {arguments.topic}: {why}{other}")
    return LessonInput(config, plan, words)


def _list(words: Language) -> None:
    width = max(map(len, TOPICS)) + 2
    for name, topic in TOPICS.items():
        first, *rest = textwrap.wrap(words(topic.about), WIDTH - width)
        say([f"{name:{width}}{first}", *(f"{'':{width}}{line}" for line in rest)])


def _refusals(out: Path | None) -> Iterator[str]:
    """Why the lesson cannot be written."""
    if out is None:
        return
    if out.suffix.lower() not in FORMS:
        yield f"--out {out}: the name must end in {', '.join([*FORMS][:-1])} or {[*FORMS][-1]}"
    elif problem := no_file("--out", out):
        yield problem
    elif problem := no_replacement(out, FORMS[out.suffix.lower()], "explain"):
        yield f"--out {out}: {problem}"


def _write(out: Path, lesson: Lesson, words: Language) -> None:
    suffix = out.suffix.lower()
    if suffix == ".html":
        text = page.page(lesson, words)
    elif suffix == ".svg":
        text = picture.picture(lesson)
    else:
        text = markdown.markdown(lesson, words)
    try:
        replace_file(out, text)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {in_words(error)}") from error
    say([f"{out}: {lesson.title}"])
