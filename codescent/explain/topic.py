"""In: what the command line asks for. Out: `Topic`, a row of the table of topics; `LessonInput`, what a topic is given.
Knows no topic (topics/ has a file for each) and reads no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.config.load import with_values
from codescent.config.sections import Config
from codescent.explain.content import Lesson
from codescent.explain.language import Language
from codescent.plan import Plan, Scalar
from codescent.plan.line import line_of
from codescent.preflight import absent, laid_out, plan_of
from codescent.study.result import Study


@dataclass(frozen=True)
class LessonInput:
    """What a topic explains.

    Attributes:
        config, plan: of the user, or of the topic's own example. The config has its layout.
        say: says a sentence in the language that is asked for.
    """

    config: Config
    plan: Plan
    say: Language

    def other(self, values: Mapping[str, Scalar]) -> Plan:
        """The plan of the config with other values of keys. Raises UserError: it is refused."""
        try:
            config = with_values(self.config, values)
        except ValidationError as error:
            said = [one["msg"].removeprefix("Value error, ") for one in error.errors()]
            raise UserError(*said) from error
        return planned(config)[1]

    @property
    def config_line(self) -> str:
        """Model, batch and layout, in one line."""
        return line_of(self.plan)


@dataclass(frozen=True)
class Topic:
    """A row of the table of topics.

    Attributes:
        about: one sentence, a name in the message files.
        words: of the command line, for the example that is shown without a CONFIG.
        lesson: makes the lesson.
        refuses: why a plan has nothing to show of this topic, and what would; "": it has.
        of_study: makes the lesson of a study that was measured, in place of a config; None: there is none.
    """

    about: str
    words: tuple[str, ...]
    lesson: Callable[[LessonInput], Lesson]
    refuses: Callable[[Plan], str] = lambda plan: ""
    of_study: Callable[[Study, Language], Lesson] | None = None


def example(
    *words: str, layers: int = 4, heads: int = 4, width: int = 128, length: int = 64, batch: int = 8
) -> tuple[str, ...]:
    """Words of the command line for a small GPT-2. `words`: further ones, such as those of its layout."""
    sizes = {
        "model.preset": "auto",
        "model.kind": "gpt2",
        "model.num_layers": layers,
        "model.num_heads": heads,
        "model.hidden_dim": width,
        "model.seq_len": length,
        "data.seq_len": length,
        "train.global_batch_size": batch,
    }
    return (*(f"{key}={value}" for key, value in sizes.items()), *words)


def planned(config: Config) -> tuple[Config, Plan]:
    """The config with its layout, and its plan. Data that is not there yet counts as its defaults.

    Raises UserError: all problems of the config.
    """
    without_data = bool(absent(config))
    config, _ = laid_out(config, config.parallel.ranks, without_data=without_data)
    return config, plan_of(config, config.parallel.ranks, without_data=without_data)
