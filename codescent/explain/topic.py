"""In: what the command line asks for. Out: `Topic`, a row of the table of topics; `LessonInput`, what a topic is given;
`Example`, what it shows without a CONFIG.
Knows no topic (topics/ has a file for each) and reads no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from codescent.base.errors import UserError
from codescent.config.effects import value_of
from codescent.config.load import with_values
from codescent.config.sections import Config
from codescent.explain.content import Lesson
from codescent.explain.language import Language
from codescent.plan import Plan, Scalar
from codescent.plan.line import line_of
from codescent.preflight import absent, laid_out, plan_of
from codescent.study.result import Study

MOST_LAYERS = 1000
TWO_REPLICAS: tuple[Mapping[str, Scalar], ...] = ({"parallel.ranks": 2, "parallel.dp_replicate": 2},)
"""See `Topic.gives`."""


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
        """Model, batch and layout, in one line. Names of keys and numbers are the same in every language."""
        number = f"{self.plan.num_parameters:,}"
        parameters = self.say("{number} parameters", number=number)
        return line_of(self.plan).replace(f"{number} parameters", parameters)


@dataclass(frozen=True)
class Example:
    """The config that a topic shows without a CONFIG.

    Attributes:
        words: of the command line, for a number of ranks.
        ranks: their number, if none is asked for.
        least, most: numbers of ranks of which there is something to show; most None: all larger ones.
    """

    words: Callable[[int], tuple[str, ...]]
    ranks: int = 4
    least: int = 1
    most: int | None = None

    def takes(self, ranks: int) -> bool:
        """Whether it can be shown with so many ranks."""
        return self.least <= ranks and (self.most is None or ranks <= self.most)

    @property
    def numbers(self) -> str:
        """The numbers of ranks that it takes, in words."""
        return f"{self.least} ranks or more" if self.most is None else f"{self.least} to {self.most} ranks"


@dataclass(frozen=True)
class Topic:
    """A row of the table of topics.

    Attributes:
        about: one sentence, a name in the message files.
        example: what it shows without a CONFIG.
        lesson: makes the lesson.
        lacks: why a plan has nothing to show of this topic; "": it has something.
        gives: values of keys with which a config has something to show; what is tried first comes first.
        refuses: why a plan that lacks nothing has too much, or another thing that cannot be shown; "": it is shown.
        of_study: makes the lesson of a study that was measured, in place of a config; None: there is none.
    """

    about: str
    example: Example
    lesson: Callable[[LessonInput], Lesson]
    lacks: Callable[[Plan], str] = lambda plan: ""
    gives: tuple[Mapping[str, Scalar], ...] = ()
    refuses: Callable[[Plan], str] = lambda plan: ""
    of_study: Callable[[Study, Language], Lesson] | None = None

    def shows(self, plan: Plan) -> bool:
        """Whether a plan has something to show of this topic."""
        return not (self.lacks(plan) or self.refuses(plan))


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


def gpt2(*words: str, batch: int) -> tuple[str, ...]:
    """Words of the command line for GPT-2 as it was published. `words`: see `example`."""
    sizes = "model.preset=gpt2", "data.tokenizer=gpt2", "data.seq_len=1024", f"train.global_batch_size={batch}"
    return (*sizes, *words)


def multiple(least: int, of: int) -> int:
    """The first multiple of a number that is not less: samples of a step that ranks share in equal parts."""
    return -(-least // of) * of


def refuse_deep(config: Config) -> None:
    """Raise UserError: the model has so many layers that to plan it several times takes minutes."""
    layers = value_of(config, "model.num_layers")
    if layers is not None and layers > MOST_LAYERS:
        raise UserError(
            f"model.num_layers = {layers:,}: a lesson plans the model several times; give at most "
            f"model.num_layers={MOST_LAYERS}"
        )


def replicas(
    *words: str,
    ranks: int = 4,
    least: int = 2,
    most: int | None = None,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
) -> Example:
    """An example of replicas alone. `words`: see `example`."""

    def of_ranks(number: int) -> tuple[str, ...]:
        layout = f"parallel.ranks={number}", f"parallel.dp_replicate={number}"
        return example(*layout, *words, layers=layers, heads=heads, width=width, batch=multiple(8, number))

    return Example(of_ranks, ranks, least, most)


def planned(config: Config) -> tuple[Config, Plan]:
    """The config with its layout, and its plan. Data that is not there yet counts as its defaults.

    Raises UserError: all problems of the config.
    """
    without_data = bool(absent(config))
    config, _ = laid_out(config, config.parallel.ranks, without_data=without_data)
    return config, plan_of(config, config.parallel.ranks, without_data=without_data)
