"""In: TOML files and overrides as people write them. Out: the config that `load` makes of them, and files again.
Does not test what is wrong: test_config_wrong.py does."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codescent.config.load import describe, load, shipped, to_toml
from codescent.config.sections import Config
from codescent.config.toml_file import read_toml
from codescent.config.words import KEYS


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


# What is right


@pytest.mark.parametrize("name", shipped())
def test_shipped_configs_load_from_anywhere_with_and_without_suffix(name: str) -> None:
    resolved = load(name)
    assert load(f"{name}.toml") == resolved
    assert resolved.config.run.name == name
    assert resolved.origins["run.name"].startswith(f"{name}.toml:")


def test_a_file_of_ones_own_goes_before_a_shipped_config_of_the_same_name() -> None:
    write("default", "[run]\nname = 'own'")
    assert load("default").config.run.name == "own"


def test_a_folder_does_not_hide_a_shipped_config() -> None:
    Path("default").mkdir()
    assert load("default").config.run.name == "default"


def test_an_empty_file_is_all_defaults() -> None:
    resolved = load(write("run.toml", ""))
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}
    assert set(resolved.origins) == set(KEYS)


def test_base_chain_file_and_command_line_in_order_of_precedence() -> None:
    write("far/a.toml", "[train]\nnum_steps = 1\nglobal_batch_size = 1\neval_every = 1\n[log]\nevery = 1\n")
    write("far/b.toml", 'base = "a.toml"\n[train]\nnum_steps = 2\nglobal_batch_size = 2\neval_every = 2\n')
    write("c.toml", '# c\nbase = "far/b.toml"\n[train]\nnum_steps = 3\neval_every = 3\n')
    resolved = load("c.toml", ["train.num_steps=4", "train.num_steps=5"])
    train = resolved.config.train
    assert (train.num_steps, train.eval_every, train.global_batch_size, resolved.config.log.every) == (5, 3, 2, 1)
    assert {key: resolved.origins[key] for key in ("train.num_steps", "train.eval_every", "log.every", "run.seed")} == {
        "train.num_steps": "command line",
        "train.eval_every": "c.toml:5",
        "log.every": "far/a.toml:6",
        "run.seed": "default",
    }
    assert resolved.origins["train.global_batch_size"] == "far/b.toml:4"


def test_base_may_be_a_shipped_config_but_a_file_beside_goes_first() -> None:
    write("run.toml", 'base = "gpt2_124m"')
    assert load("run.toml").config.model.preset == "gpt2"
    write("gpt2_124m", "[model]\npreset = 'gpt2-xl'")
    assert load("run.toml").config.model.preset == "gpt2-xl"


def test_auto_takes_back_what_a_base_set_in_files_and_overrides() -> None:
    write("run.toml", 'base = "gpt2_124m"\n[model]\npreset = "auto"\n')
    resolved = load("run.toml", ["train.microbatch_size=auto"])
    assert resolved.config.model.preset is None
    assert resolved.config.train.microbatch_size is None
    assert resolved.config.train.matmul == "auto"


def test_expected_minutes_are_for_the_steps_of_their_file() -> None:
    write("mine.toml", 'base = "default"\n[train]\nnum_steps = 11_000\n')
    write("both.toml", 'base = "default"\n[train]\nnum_epochs = 2\n[log]\nexpected_minutes = 30\n')
    for words, minutes in (
        (("default",), 3),
        (("default", "train.num_steps=11_000"), None),
        (("default", "train.num_epochs=2"), None),
        (("default", "train.num_steps=11_000", "log.expected_minutes=30"), 30),
        (("default", "train.num_epochs=auto", "log.every=1"), 3),
        (("mine.toml",), None),
        (("both.toml",), 30),
    ):
        assert load(words[0], words[1:]).config.log.expected_minutes == minutes, words


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.num_steps=1_000", 1000),
        (" train.num_steps = 5 # trial ", 5),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("model.bias=false", False),
        ("train.compile=none", "none"),
        ('train.compile="blocks"', "blocks"),
        ("run.name=2024", "2024"),
        ("run.name=true", "true"),
        ("run.name='with space'", "with space"),
        ("run.name=a=b", "a=b"),
        ("run.folder=123", Path("123")),
        ("data.corpus=texts/*.txt", "texts/*.txt"),
        ("data.tokenizer=bpe:4096", "bpe:4096"),
        ("run.folder=~/runs", Path.home() / "runs"),
    ],
)
def test_override_values(override: str, value: object) -> None:
    resolved = load(write("run.toml", ""), [override])
    name = override.partition("=")[0].strip()
    section, key = name.split(".")
    assert getattr(getattr(resolved.config, section), key) == value
    assert resolved.origins[name] == "command line"


def test_toml_in_all_its_spellings_and_the_line_of_each() -> None:
    text = (
        "model.num_layers = 4  # dotted\r\n"
        'run = {name = "inline", seed = 7}\r\n'
        "[ data ]\r\n"
        'corpus = """\\\r\n'
        "   a\\\r\n"
        '   b"""\r\n'
        "# [train]\r\n"
        "\"tokenizer\" = 'byte'\r\n"
    )
    resolved = load(write("run.toml", b"\xef\xbb\xbf" + text.encode()))
    assert (resolved.config.model.num_layers, resolved.config.run.name, resolved.config.run.seed) == (4, "inline", 7)
    assert resolved.config.data.corpus == "ab"
    lines = {key: origin.rpartition(":")[2] for key, origin in resolved.origins.items() if origin != "default"}
    assert lines == {
        "model.num_layers": "1",
        "run.name": "2",
        "run.seed": "2",
        "data.corpus": "4",
        "data.tokenizer": "8",
    }


def test_lines_of_what_looks_like_keys_inside_strings_and_lists_are_not_taken() -> None:
    _, lines = read_toml(
        Path(write("x.toml", 'a = """\nb = 1\n[c]\n"""\nb = [\n 1,\n 2\n]\n[c.d]\ne = 1\n[[f]]\ng = 1\n'))
    )
    assert lines == {("a",): 1, ("b",): 5, ("c", "d"): 9, ("c", "d", "e"): 10, ("f",): 11, ("f", "g"): 12}


def test_a_short_trial_of_a_config_may_end_in_its_warm_up() -> None:
    assert load("shakespeare_char", ["train.num_steps=20"]).config.optimizer.warmup_steps == 100


# Out again


@pytest.mark.parametrize("name", shipped())
def test_shipped_configs_round_trip(name: str) -> None:
    config = load(name, ["run.folder=/some/where", "train.eval_samples=auto"]).config
    assert load(write("again.toml", to_toml(config))).config == config


sane_text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60).map(str.strip).filter(bool)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**63 - 1),
    learning_rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    fraction=st.floats(0, 0.5, exclude_min=True),
    corpus=sane_text.filter(lambda text: not text.startswith("~")),
    folder=sane_text.filter(lambda text: not text.startswith("~") and text != "auto"),
    num_layers=st.none() | st.integers(1, 10_000),
)
def test_any_config_round_trips_through_toml(
    seed: int, learning_rate: float, fraction: float, corpus: str, folder: str, num_layers: int | None
) -> None:
    config = Config.model_validate(
        {
            "run": {"seed": seed, "folder": folder},
            "model": {"num_layers": num_layers},
            "data": {"corpus": corpus, "validation_fraction": fraction},
            "optimizer": {"learning_rate": learning_rate},
        }
    )
    assert load(write("any.toml", to_toml(config))).config == config


def test_to_toml_leaves_out_what_is_not_set_and_nothing_else() -> None:
    table = tomllib.loads(to_toml(Config()))
    written = {f"{section}.{key}" for section, values in table.items() for key in values}
    assert set(KEYS) - written == {
        name for name, key in KEYS.items() if key.default == '"auto"' and "or" in key.wanted
    } - {
        "train.device",
        "train.matmul",
        "train.allocator",
        "optimizer.muon_precision",
        "parallel.reduce_dtype",
    }


def test_describe_lists_every_key_as_a_file_would_write_it() -> None:
    lines = describe(load(write("run.toml", "[model]\nbias = false\n"), ["run.name=x"]))
    assert [f"{line.section}.{line.key}" for line in lines] == list(KEYS)
    assert ("model", "bias", "false", "run.toml:2") in lines
    assert ("run", "name", '"x"', "command line") in lines
    assert ("model", "preset", '"auto"', "default") in lines
