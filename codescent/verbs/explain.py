"""In: arguments of `codescent explain`. Out: a lesson on a topic, printed or written to a file; without one the list.
Does not make the lesson (explain/ does) and starts no run."""

from __future__ import annotations

import difflib
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from codescent.base.console import as_text, new_console
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import note, say
from codescent.base.published import in_words
from codescent.config.load import COMMAND_LINE
from codescent.config.sections import Config
from codescent.config.toml_file import read_toml
from codescent.explain import markdown, page, picture
from codescent.explain.advice import words_that_show
from codescent.explain.content import Lesson
from codescent.explain.language import SOURCE, Language, language
from codescent.explain.text import WIDTH, lesson_text
from codescent.explain.topic import LessonInput, Topic, planned, refuse_deep
from codescent.explain.topics import TOPICS
from codescent.plan import AXES, Plan
from codescent.record import CONFIG
from codescent.study.folder import DEFINITION
from codescent.study.opened import open_study
from codescent.verbs.arguments import OVERRIDE
from codescent.verbs.config import resolved_of
from codescent.verbs.picture import no_file, no_replacement

DEFAULT = "default"
_T = TypeVar("_T")
FORMS = {".html": page.MARK, ".svg": page.MARK, ".md": markdown.MARK}
"""The suffix of each form of a lesson, and what stands in each file of this command."""


def main(arguments: Namespace) -> int:
    """Print or write a lesson. Raises UserError: everything that is wrong with the command line."""
    problems: list[str] = []
    words = collected(problems, partial(language, arguments.lang)) or language(SOURCE)
    problems += _refusals(arguments.out)
    topic = _topic(arguments, problems)
    make = None if topic is None else collected(problems, partial(_maker, arguments, topic, words))
    if problems:
        raise UserError(*problems)
    if make is None:
        _list(words)
        return 0
    lesson = make()
    if arguments.out is not None:
        _write(arguments.out, lesson, words)
        return 0
    text = [*lesson_text(lesson, words)]  # all of it, before a line of it is printed
    _warn_of_escapes(as_text(text, WIDTH))
    console = new_console(width=WIDTH)
    for one in text:
        console.print(one)
    return 0


def _warn_of_escapes(text: str) -> None:
    """The program escapes what its output cannot write; a whole lesson of escapes has a reason that can be mended."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        note(f"the output is {encoding}, which lacks letters of this language; set PYTHONUTF8=1, or give --out")


def collected(problems: list[str], found: Callable[[], _T]) -> _T | None:
    """What a function returns; None: it refused, and its problems are added."""
    try:
        return found()
    except UserError as error:
        problems += error.problems
        return None


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


def _maker(arguments: Namespace, topic: Topic, words: Language) -> Callable[[], Lesson]:
    """What makes the lesson of a config, or of a study's folder. Raises UserError: see `asked_of`, `open_study`."""
    if problem := _not_a_config(arguments, topic):
        raise UserError(problem)
    if topic.of_study is None or not _is_study(arguments.config):
        asked = asked_of(arguments, topic, words)
        return partial(topic.lesson, asked)
    problems = []
    if given := [*(["--ranks"] if arguments.ranks is not None else []), *arguments.overrides]:
        leave = f"a study is measured; leave out {' and '.join(given)}"
        problems.append(f"explain {arguments.topic} {arguments.config}: {leave}")
    study = collected(problems, partial(open_study, arguments.config))
    if problems or study is None:
        raise UserError(*problems)
    return partial(topic.of_study, study, words)


def _is_study(config: str | None) -> bool:
    return config is not None and (Path(config) / DEFINITION).is_file()


def _not_a_config(arguments: Namespace, topic: Topic) -> str:
    """Why a word is of a study, and not what the topic takes; "": it may be a config."""
    config, taker = arguments.config, next(name for name, other in TOPICS.items() if other.of_study is not None)
    where = f"explain {arguments.topic} {config}"
    if topic.of_study is None and _is_study(config):
        return f"{where}: is the folder of a study, which only `codescent explain {taker}` takes; give a config"
    if config is None or not Path(config).exists():
        return ""
    if topic.of_study is not None and Path(config).is_dir():
        is_run = (Path(config) / CONFIG).is_file()
        return "" if is_run or _is_study(config) else f"{where}: is no folder of a study: {DEFINITION} is missing there"
    if not (Path(config).is_file() and _is_study_file(Path(config))):  # a pipe is read once
        return ""
    then = f"run `codescent study {config}`, and give codescent explain {taker} the folder that it makes"
    return f"{where}: is the file of a study, and no config. To explain it, {then}"


def _is_study_file(path: Path) -> bool:
    """Whether a TOML file has the section [study]. What cannot be read is reported where configs are read."""
    try:
        table, _ = read_toml(path)
    except (UserError, OSError):
        return False
    return isinstance(table.get("study"), dict)


def asked_of(arguments: Namespace, topic: Topic, words: Language) -> LessonInput:
    """What is explained. Raises UserError: the config is refused, or has nothing to show of the topic."""
    if arguments.config is not None and OVERRIDE.match(arguments.config) and not Path(arguments.config).is_file():
        arguments.config, arguments.overrides = None, [arguments.config, *arguments.overrides]
    if arguments.config is None:
        config, plan = _of_example(arguments, topic)
    else:
        config, plan = _planned(arguments)
    if why := topic.lacks(plan):
        given = words_that_show(topic, config)
        why = f"{why}; {f'give {given}' if given else 'without a CONFIG the topic shows its example'}"
    why = why or topic.refuses(plan)
    if why:
        fitting = [name for name, other in TOPICS.items() if other is not topic and other.shows(plan)]
        other = f". This config has something to show of: {', '.join(fitting)}" if fitting else ""
        raise UserError(f"explain {arguments.topic}: {why}{other}")
    return LessonInput(config, plan, words)


def _of_example(arguments: Namespace, topic: Topic) -> tuple[Config, Plan]:
    """The topic's example with the words of the user. It has the number of ranks that is asked for, if it can."""
    example, own = topic.example, list(arguments.overrides)
    asked = example.ranks if arguments.ranks is None else arguments.ranks
    has_layout = any(word.partition("=")[0].strip().removeprefix("parallel.") in AXES for word in own)
    if not (example.takes(asked) or has_layout):
        raise UserError(
            f"explain {arguments.topic} --ranks {asked}: without a CONFIG it shows its example, which takes "
            f"{example.numbers}"
        )
    given = example.words(asked if example.takes(asked) else example.ranks)
    arguments.config, arguments.overrides = DEFAULT, [*given, *own]
    try:
        return _planned(arguments)
    except UserError as error:
        if all(problem.startswith(COMMAND_LINE) for problem in error.problems):
            raise
        its = " ".join(word for word in given if word.startswith(("parallel.", "train.global")))
        why = f"explain {arguments.topic}: without a CONFIG it shows its example, which has {its}"
        raise UserError(*error.problems, why) from error


def _planned(arguments: Namespace) -> tuple[Config, Plan]:
    config = resolved_of(arguments).config
    refuse_deep(config)
    return planned(config)


def _list(words: Language) -> None:
    _warn_of_escapes("".join(words(topic.about) for topic in TOPICS.values()))
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
