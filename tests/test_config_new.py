"""In: `codescent config --new`, `--list`, `--toml`, `--json`, `--schema`. Out: files that load, and facts that agree.
Does not test what a config means: test_config_file.py does."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from runs import called, codescent

from codescent.base import writing
from codescent.base.own_names import FORM
from codescent.config import load as loading
from codescent.config.load import load, to_toml
from codescent.config.new_file import OFTEN, new_file
from codescent.config.schema import DIALECT, config_schema
from codescent.config.sections import SECTIONS
from codescent.config.words import KEYS
from codescent.verbs.new_config import SCHEMA


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_config_is_the_run_of_the_shipped_default(folder: Path) -> None:
    """It would catch a value that the new file lost, or a comment that stands for the wrong key."""
    done = called(folder, "config", "--new", "mine.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("mine.toml: a config to start from; `codescent plan mine.toml` says")
    expected = load("default", ["run.name=mine", "log.expected_minutes=auto"]).config
    assert to_toml(load("mine.toml").config) == to_toml(expected)


def test_a_new_config_names_every_key_once_and_its_comments_are_valid_values(folder: Path) -> None:
    text = new_file("mine", "./x.json")
    lines = text.splitlines()
    assert lines[0] == "#:schema ./x.json", "Taplo reads the first line alone"
    assert max(map(len, lines)) <= 120
    values: list[str] = []
    named: dict[str, list[str]] = {}
    section, others = "", ""
    for line in lines:
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section, others = found[1], ""
            values.append(line)
        elif found := re.fullmatch(r"(?:# )?((\w+) = .*)", line):
            named.setdefault(section, []).append(found[2])
            values.append(found[1])
        elif line.startswith("# Others, which `codescent docs config#"):
            others = line.partition(": ")[2]
            named[section] += re.findall(r"\w+", others)
        elif others and line.startswith("# "):
            named[section] += re.findall(r"\w+", line)
        else:
            others = ""
    assert {name: sorted(keys) for name, keys in named.items()} == {
        name: sorted(model.model_fields) for name, model in SECTIONS.items()
    }
    Path("all.toml").write_text("\n".join(values))
    assert load("all.toml").config == load("default", ["run.name=mine", "log.expected_minutes=auto"]).config


def test_keys_that_a_new_config_explains_exist() -> None:
    assert list(OFTEN) == sorted(OFTEN, key=list(SECTIONS).index) or set(OFTEN) == set(SECTIONS)
    assert all(f"{section}.{key}" in KEYS for section, keys in OFTEN.items() for key in keys)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("old.toml", "--new old.toml: it exists, and is kept; give another name"),
        ("dangling.toml", "--new dangling.toml: it exists, and is kept; give another name"),
        ("none/x.toml", "--new none/x.toml: there is no folder none"),
        (".toml", "--new .toml: its run would be called '': run.name: given \"\"; must not be empty"),
    ],
)
def test_nothing_is_written_where_a_new_config_is_refused(folder: Path, name: str, expected: str) -> None:
    Path("old.toml").write_text("[run]\n")
    Path("dangling.toml").symlink_to("elsewhere.toml")
    before = sorted(folder.iterdir())
    done = called(folder, "config", "--new", name)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {expected}\n")
    assert sorted(folder.iterdir()) == before
    assert Path("old.toml").read_text() == "[run]\n"


def test_a_schema_of_the_user_is_kept_and_a_failure_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(SCHEMA).write_text("{}")
    done = called(folder, "config", "--new", "one.toml")
    assert (done.returncode, Path(SCHEMA).read_text()) == (0, "{}")
    assert "exists, and is kept; `codescent config --schema` prints the one of this version" in done.stdout
    Path(SCHEMA).unlink()
    write_all, calls = writing.write_all, []

    def full(file: Any, data: Any) -> None:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write_all(file, data)

    monkeypatch.setattr(writing, "write_all", full)
    done = called(folder, "config", "--new", "two.toml")
    assert (done.returncode, done.stderr) == (2, f"error: --new {SCHEMA}: cannot be written: No space left on device\n")
    assert not Path("two.toml").exists()
    assert not Path(SCHEMA).exists()


def test_every_key_has_a_schema_with_its_meaning_bounds_and_choices() -> None:
    schema = config_schema()
    assert schema["$schema"] == DIALECT
    for name, key in KEYS.items():
        section, _, own = name.partition(".")
        found = schema["properties"][section]["properties"][own]
        assert found["description"] == key.description
        assert found["default"] == tomllib.loads(f"x = {key.default}")["x"]
        kinds = found.get("anyOf", [found])
        assert ({"const": "auto"} in kinds) == (key.wanted.endswith('or "auto"') and key.default == '"auto"')
        for sign, word in ((">=", "minimum"), (">", "exclusiveMinimum"), ("<=", "maximum"), ("<", "exclusiveMaximum")):
            bounds = {float(number) for number in re.findall(rf" {sign} ([\d.]+)", key.wanted)}
            assert {float(kind[word]) for kind in kinds if word in kind} == bounds, name
        if key.wanted.startswith('"'):
            words = {word for kind in kinds for word in (*kind.get("enum", ()), kind.get("const")) if word}
            names = {FORM.strip('"')} if any("pattern" in kind for kind in kinds) else set()  # of users' code
            assert words == set(re.findall(r'"([^"]+)"', key.wanted)) - names


def test_shipped_and_new_configs_are_valid_by_the_schema_and_wrong_ones_are_not(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: the schema is not tried")
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    for path in loading.shipped().values():
        assert valid(tomllib.loads(path.read_text(encoding="utf-8"))), path
        assert valid(tomllib.loads(to_toml(load(path).config))), path
    assert valid(tomllib.loads(new_file("mine", "./x.json")))
    assert valid({"base": "default", "model": {"num_layers": "auto"}})
    for wrong in (
        {"run": {"nmae": "x"}},
        {"rnu": {}},
        {"train": {"num_steps": 0}},
        {"train": {"num_steps": "100"}},
        {"train": {"precision": "fp61"}},
        {"train": {"num_steps": "auto"}},
        {"optimizer": {"beta1": 1}},
        {"parallel": {"servers": "worker"}},
    ):
        assert not valid(wrong), wrong


def test_the_schema_that_is_printed_is_the_one_that_is_written(folder: Path) -> None:
    called(folder, "config", "--new", "mine.toml")
    assert called(folder, "config", "--schema").stdout == Path(SCHEMA).read_text()


def test_the_list_has_every_shipped_config_with_a_sentence(folder: Path) -> None:
    said = called(folder, "config", "--list").stdout.splitlines()
    assert [line.split()[0] for line in said] == list(loading.shipped())
    found = json.loads(called(folder, "config", "--list", "--json").stdout)
    assert [f"{one['name']} {one['about']}" for one in found] == [" ".join(line.split()) for line in said]
    assert all(len(one["about"]) > 20 and Path(one["file"]).is_file() for one in found)


def test_toml_and_json_say_what_the_table_says(folder: Path) -> None:
    words = ("config", "gpt2_124m", "train.num_steps=7")
    Path("again.toml").write_text(called(folder, *words, "--toml").stdout)
    assert load("again.toml").config == load("gpt2_124m", ["train.num_steps=7"]).config
    facts = json.loads(called(folder, *words, "--json").stdout)
    assert facts["train.num_steps"] == {"value": 7, "from": "command line"}
    table = called(folder, *words).stdout
    for name, fact in facts.items():
        (row,) = (line.split() for line in table.splitlines() if line.split()[:1] == [name])
        assert row[-1] == fact["from"].split()[-1]
        assert name in KEYS
    assert len(facts) == len(KEYS)
    keys = json.loads(called(folder, "config", "--keys", "--json").stdout)
    assert [one["key"] for one in keys] == list(KEYS)
    sites = json.loads(called(folder, "config", "--site-keys", "--json").stdout)
    assert sites[0]["key"].startswith("site.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["default", "--list"], "--list and CONFIG: give one of them"),
        (["--new", "x.toml", "--schema"], "--new and --schema: give one of them"),
        (["--new", "x.toml", "--json"], "--new and --json: give one of them"),
        (["--schema", "--json"], "--schema and --json: give one of them"),
        (["--toml"], "--toml: prints one config: give a CONFIG"),
        (["default", "--toml", "--json"], "--toml: prints one config"),
        (["default", "--json", "--keys"], "--json: CONFIG and --keys would be several lists: give one of them"),
    ],
)
def test_options_of_which_one_would_do_nothing_are_refused(folder: Path, words: list[str], expected: str) -> None:
    done = called(folder, "config", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_new_config_trains_as_it_is(folder: Path) -> None:
    codescent(folder, "config", "--new", "mine.toml")
    done = codescent(folder, "train", "mine.toml", "train.num_steps=2", "log.sample_tokens=0")
    assert done.returncode == 0
    assert (folder / "runs" / "mine" / "metrics.csv").is_file()
