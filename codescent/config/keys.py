"""In: the default and the description of a config key. Out: its pydantic field; the types of values; when it counts.
Does not list the keys (sections.py does)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo

from codescent.base.home import expanded, unknown_home
from codescent.base.hub_name import PREFIX, is_hub_name, parse_dataset, parse_model
from codescent.base.own_names import FORM, PATTERN, check_form, is_own_name
from codescent.base.visible import is_one_line
from codescent.base.wire_form import FORMS, read_form, text_of

AUTO = "auto"  # None in a config file: codescent chooses the value. It also overrides a value of the base file

MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200  # file systems allow 255; temporary files add a prefix and a suffix
MAX_PART_BYTES, MAX_PATH_BYTES = 255, 3500  # file systems allow 4096 for a path; files and folders are added to it
MAX_SAMPLES = 2**31 - 1
MAX_EPOCHS = 1_000_000
MAX_DIGITS = 9  # of a number of layers; Python reads no number of thousands of them


def _expand_home(value: object) -> object:
    if not (isinstance(value, str) and value.startswith("~")):
        return value
    if problem := unknown_home(value):
        raise ValueError(problem)
    return str(expanded(value))


def _check_text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if not is_one_line(value):
        raise ValueError("must be printable Unicode text")
    return value


def _check_path(value: str) -> str:
    if max(len(part.encode()) for part in _check_text(value).split("/")) > MAX_PART_BYTES:
        raise ValueError(f"no name in a path is longer than {MAX_PART_BYTES} bytes")
    if len(value.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"must be at most {MAX_PATH_BYTES} bytes long")
    return value


def _to_path(value: object) -> object:
    """Convert a string to a path: strict pydantic classes refuse to. "" stays a string, because Path("") means "."."""
    return Path(str(_expand_home(value))) if isinstance(value, str) and value.strip() else value


def _check_folder_name(value: str) -> str:
    if _check_text(value) in (".", "..") or "/" in value or "\\" in value or value != value.strip():
        raise ValueError("must be usable as the name of one folder; for a folder elsewhere set run.folder")
    if len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"must be at most {MAX_NAME_BYTES} bytes long: it is the name of a folder")
    return value


def _to_weights(value: object) -> object:
    """A name of a hub stays a string; a path becomes absolute, so that a resumed run finds it from any folder."""
    if is_hub_name(value):
        return value
    path = _to_path(value)
    return Path(_check_path(str(path))).absolute() if isinstance(path, Path) else path


def _check_weights(value: Path | str) -> Path | str:
    if isinstance(value, str) and not value.startswith(PREFIX):  # an empty one
        raise ValueError("must not be empty")
    return str(parse_model(value)) if isinstance(value, str) else value


def _check_corpus(value: str) -> str:
    return str(parse_dataset(value)) if is_hub_name(value) else value


def _check_tokenizer(value: str) -> str:
    if is_hub_name(value):
        return str(parse_model(value))
    kind, colon, vocab_size = value.partition(":")
    if kind == "bpe" and not (colon and vocab_size.isascii() and vocab_size.isdigit()):
        raise ValueError('a BPE trained on the corpus is written with its vocabulary size, such as "bpe:4096"')
    return value


def _check_config(value: str) -> str:
    if is_hub_name(value):
        return str(parse_model(value))
    return _check_text(value) if value.startswith("{") else _check_path(value)


def _check_functions(value: str) -> str:
    names = [name.strip() for name in _check_text(value).split(",")]
    for name in names:
        module, colon, function = name.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError('must be "module:function", or several of them with commas between')
        if module.endswith(".py"):
            raise ValueError(f'must be "module:function": write "{module[:-3]}:{function}", without .py')
    return ", ".join(names)


def _check_period(value: int | str) -> int | str:
    if isinstance(value, int):
        if value < 0:
            raise ValueError("must be at least 0")
        return value
    number, _, unit = value.partition(" ")
    try:
        epochs = float(number)
    except ValueError:
        epochs = 0.0
    if unit not in ("epoch", "epochs") or not 0 < epochs <= MAX_EPOCHS:
        raise ValueError(
            f'must be a number of steps, or a number of epochs such as "2 epochs", of at most {MAX_EPOCHS:,}'
        )
    return value


def _check_cut(value: str) -> str:
    if value in ("cost", "encoder-decoder"):
        return value
    numbers = [number.strip() for number in value.split(",")]
    digits = all(number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS for number in numbers)
    if not digits or not all(map(int, numbers[:-1])):  # the last stage may have the head alone
        raise ValueError('must be "cost", "encoder-decoder", or the layers of each part with commas, such as "5,6,6,5"')
    return ",".join(str(int(number)) for number in numbers)


def _check_wire(value: str) -> str:
    try:
        return text_of(*read_form(value))
    except ValueError:
        raise ValueError(f"must be {FORMS}") from None


def _check_reward(value: str) -> str:
    if value == "exact":
        return value
    try:
        return check_form(value)
    except ValueError as error:
        raise ValueError(f'{str(error) or f"must be {FORM}"}, or "exact"') from None


OWN_SCHEMA = WithJsonSchema({"type": "string", "pattern": PATTERN})
"""Marks a type of names of users' code: what documentation calls "module:NAME"."""
OwnName = Annotated[str, AfterValidator(check_form), OWN_SCHEMA]
"""The name of a class of the user, such as mymodule:MySchedule (docs/own_names.md)."""
RewardName = Annotated[str, AfterValidator(_check_reward)]
"""What gives answers a reward: "exact", or the name of a function of the user."""
Cut = Annotated[str, AfterValidator(_check_cut)]
Period = Annotated[int | str, AfterValidator(_check_period)]
Servers = Annotated[int, Field(ge=0, le=1024)]
WireText = Annotated[str, AfterValidator(_check_wire)]
Text = Annotated[str, AfterValidator(_check_text)]
TextOrPath = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_path)]
FolderName = Annotated[str, AfterValidator(_check_folder_name)]
Functions = Annotated[str, AfterValidator(_check_functions)]
Tokenizer = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_path), AfterValidator(_check_tokenizer)]
Folder = Annotated[Path, BeforeValidator(_to_path), AfterValidator(lambda path: Path(_check_path(str(path))))]
PathFromAnywhere = Annotated[Folder, AfterValidator(Path.absolute)]
"""An absolute path, so that a resumed run finds it from any working directory."""
Weights = Annotated[Path | str, BeforeValidator(_to_weights), AfterValidator(_check_weights)]
"""The path of a folder, or a name of a hub, such as hf://Qwen/Qwen3-0.6B."""
ModelConfig = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_config)]
"""The path of a config.json, a name of a hub, or the content of the file."""
Corpus = Annotated[str, BeforeValidator(_expand_home), AfterValidator(_check_path), AfterValidator(_check_corpus)]
"""A name, a path, or a data set of a hub, such as hf://datasets/roneneldan/TinyStories."""


class Only(NamedTuple):
    """A condition under which a key has an effect: the value of another key passes a test."""

    key: str
    test: Callable[[Any], bool]
    words: str  # such as "parallel.pp >= 2"


def at_least(key: str, number: int) -> Only:
    """Another key is a number of at least `number`."""
    return Only(key, lambda value: value >= number, f"{key} >= {number}")


def one_of(key: str, *values: str) -> Only:
    """Another key has one of the values."""
    return Only(key, lambda value: value in values, f"{key} = {' or '.join(values)}")


def one_or_own(key: str, *values: str) -> Only:
    """Another key has one of the values, or names a class of the user, which may read the key."""
    words = f"{key} = {' or '.join(values)} or a name of yours"
    return Only(key, lambda value: value in values or is_own_name(value), words)


def other_than(key: str, excluded: Any) -> Only:
    """Another key has another value than `excluded`."""
    return Only(key, lambda value: value != excluded, f"{key} other than {excluded}")


def not_given(key: str) -> Only:
    """Another key has no value."""
    return Only(key, lambda value: value is None, f"{key} = {AUTO}")


def given(key: str) -> Only:
    """Another key has a value."""
    return Only(key, lambda value: value is not None, f"{key} other than {AUTO}")


def key(default: Any, meaning: str, *, only: Only | None = None, **bounds: Any) -> Any:
    """A key with its default and description.

    Args:
        only: the condition under which a value other than the default has an effect; None: it always has, or the task
            or build says when.
        bounds: of numbers: ge, gt, le, lt.
    """
    extra: Any = {"only": only} if only else None
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def only_of(field: FieldInfo) -> Only | None:
    """The condition of a key, see `key`."""
    extra: Any = field.json_schema_extra
    return extra["only"] if extra else None


def auto(meaning: str, *, only: Only | None = None, **bounds: Any) -> Any:
    """A key with the default None, written "auto" in files."""
    return key(None, meaning, only=only, **bounds)


class Section(BaseModel):
    """One `[section]` of a config: frozen and strictly typed. Unknown keys and infinite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {name: None if name in optional and value == AUTO else value for name, value in values.items()}
