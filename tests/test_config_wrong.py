"""In: wrong files and overrides. Out: every problem at once, each with its place and what would be right.
Does not build a plan: what depends on presets, corpora and ranks is refused, and tested, with build."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codescent.base.errors import UserError
from codescent.config.load import load, shipped, to_toml
from codescent.config.sections import SECTIONS, Config, Optimizer, Train
from codescent.config.words import KEYS


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def problems(path: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return caught.value.problems


def problem(path: str, *overrides: str) -> str:
    (only,) = problems(path, *overrides)
    return only


def load_or_none(path: str, *overrides: str) -> Config | None:
    try:
        return load(path, overrides).config
    except UserError:
        return None


# What is wrong: keys


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nnum_step = 3", "run.toml:2: train.num_step: unknown key in [train]; did you mean train.num_steps?"),
        ("[train]\nseq_len = 3", "did you mean model.seq_len or data.seq_len?"),
        (
            "[model]\nlearning_rat = 3",
            "model.learning_rat: unknown key in [model]; did you mean optimizer.learning_rate?",
        ),
        ("[model]\nn_layer = 3", "did you mean model.num_layers?"),
        ("[train]\nbatch_size = 3", "did you mean train.global_batch_size?"),
        ("[model]\nNum-Layers = 3", "did you mean model.num_layers?"),
        ("[log]\ncolour = 3", "log.colour: unknown key in [log]; its keys are every, "),
        ("[optimiser]\nkind = 3", "run.toml:1: optimiser: unknown section; did you mean [optimizer]?"),
        ("[foo]\n", "foo: unknown section; sections are run, model, lora, data"),
        ("num_steps = 3", "run.toml:1: num_steps: is outside a section; did you mean train.num_steps?"),
        ("colour = 3", "at the top of a file only base is valid"),
        ("\nmodel = 3", "run.toml:2: model: given 3, but it is a section: write [model]"),
        ("[[model]]\nbias = false", "run.toml:1: model: given a list, but it is a section"),
    ],
)
def test_unknown_keys_say_what_was_probably_meant(text: str, expected: str) -> None:
    assert expected in problem(write("run.toml", text))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("num_steps=3", "command line: num_steps: is outside a section; did you mean train.num_steps?"),
        ("train.num_steps", "command line: train.num_steps: not an override; write section.key=value"),
        ("--train.num_steps=3", "command line: --train.num_steps: unknown section; did you mean train.num_steps?"),
        ("trian.foo=3", "did you mean [train]?"),
        ("train.foo=3", "its keys are num_steps, num_epochs, global_batch_size"),
        ("train.num_steps.x=3", "unknown key in [train]; did you mean train.num_steps?"),
        ("=", "command line: unknown key"),
        ("train.num_steps=", 'command line: train.num_steps: given ""; must be a whole number >= 1'),
        ("train.num_steps=1\nfoo=2", "must be a whole number >= 1"),
        ("run.name=", 'run.name: given ""; must not be empty'),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    assert expected in problem(write("run.toml", ""), override)


# What is wrong: values


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.num_steps", '"4"', 'given "4"; must be a whole number >= 1; leave out the quotes'),
        ("train.num_steps", "2e3", "given 2000.0; must be a whole number >= 1; write 2000"),
        ("train.num_steps", "0", "given 0; must be a whole number >= 1"),
        (
            "parallel.cut",
            '"0,2"',
            'given "0,2"; must be "cost", "encoder-decoder", or the layers of each part with commas',
        ),
        ("parallel.cut", f'"{"1" * 5000},2"', "or the layers of each part with commas"),  # Python reads no such number
        ("parallel.wire", '"int3"', 'given "int3"; must be none, bf16, int8, int4, sign, powersgd:r with a whole'),
        ("train.num_steps", "true", "given true; must be a whole number >= 1"),
        ("train.num_steps", "[1]", "given a list; must be a whole number >= 1"),
        ("train.num_steps", "{a = 1}", "given a table; must be a whole number >= 1"),
        ("train.num_steps", "1979-05-27", "given 1979-05-27; must be a whole number >= 1"),
        ("train.num_steps", "9223372036854775808", "a whole number has at most 64 bits"),
        ("run.seed", "-1", "given -1; must be a whole number >= 0"),
        ("model.dropout", "1", "given 1; must be a number >= 0 and < 1"),
        ("model.dropout", "nan", "given nan; must be a number >= 0 and < 1"),
        ("optimizer.learning_rate", "inf", "given inf; must be a number > 0"),
        ("optimizer.learning_rate", "1e400", "given inf; must be a number > 0"),
        ("model.bias", '"True"', 'given "True"; must be true or false or "auto"; write true, without quotes'),
        ("model.bias", "1", "given 1; must be true or false"),
        ("train.precision", '"FP32"', 'must be "fp64", "fp32" or "bf16"; did you mean "fp32"?'),
        ("train.precision", "32", 'given 32; must be "fp64", "fp32" or "bf16"'),
        ("train.compile", "false", 'given false; must be "none", "blocks", "model" or "auto"'),
        ("run.name", "3", "given 3; must be a string"),
        ("run.name", '"a/b"', 'given "a/b"; must be usable as the name of one folder'),
        ("run.name", '".."', "must be usable as the name of one folder"),
        ("run.name", '"a\\u0000"', "must be printable"),
        ("run.folder", '""', 'given ""; must be a path or "auto"'),
        ("data.folder", "3", "given 3; must be a path"),
        ("data.tokenizer", '"bpe"', 'such as "bpe:4096"'),
        ("data.tokenizer", '"bpe:many"', 'given "bpe:many"; a BPE trained on the corpus is written'),
        ("data.corpus", '" "', "must not be empty"),
    ],
)
def test_wrong_values(key: str, value: str, expected: str) -> None:
    section, _, name = key.partition(".")
    found = problem(write("run.toml", f"[{section}]\n\n{name} = {value}\n"))
    assert found.startswith(f"run.toml:3: {key}: given ")
    assert expected in found


def test_a_long_value_is_cut_short() -> None:
    assert len(problem(write("run.toml", f'[train]\nprecision = "{"x" * 10_000}"\n'))) < 200


def test_values_that_contradict_one_another() -> None:
    text = (
        "[optimizer]\nlearning_rate = 1e-3\nmin_learning_rate = 2e-3\nwarmup_steps = 50\ndecay_steps = 50\n"
        "[train]\nglobal_batch_size = 12\nmicrobatch_size = 5\n"
    )
    found = problems(write("run.toml", text))
    assert [line.split(": ")[0:2] for line in found] == [
        ["run.toml:3", "optimizer.min_learning_rate"],
        ["run.toml:4", "optimizer.warmup_steps"],
        ["run.toml:8", "train.microbatch_size"],
    ]
    assert found[1].endswith("must be a whole number from 0 to 49")
    assert found[2].endswith("the nearest smaller value that does is 4")


def test_contradictions_of_defaults_with_what_is_given_name_what_was_given() -> None:
    found = problem(write("run.toml", ""), "optimizer.learning_rate=1e-5", "optimizer.min_learning_rate=1e-4")
    assert found.startswith("command line: optimizer.min_learning_rate: given 0.0001, which is above")
    write("base.toml", "[optimizer]\nwarmup_steps = 100\n")
    found = problem(write("run.toml", 'base = "base.toml"\n'), "optimizer.decay_steps=20")
    assert found.startswith("base.toml:2: optimizer.warmup_steps: given 100")


def test_a_wrong_value_is_not_reported_a_second_time_as_a_contradiction() -> None:
    text = '[optimizer]\nlearning_rate = "high"\nmin_learning_rate = 2.0\n'
    assert "learning_rate: given" in problem(write("run.toml", text))


def test_configs_made_in_python_are_checked_too() -> None:
    with pytest.raises(ValueError, match="microbatch_size"):
        Config(train=Train(global_batch_size=12, microbatch_size=5))
    with pytest.raises(ValueError, match=r"min_learning_rate.*warmup_steps"):
        Config(optimizer=Optimizer(learning_rate=1e-4, min_learning_rate=1e-3, warmup_steps=50, decay_steps=50))
    with pytest.raises(ValueError, match="foo"):
        Config.model_validate({"foo": {}})
    with pytest.raises(ValueError, match="frozen"):
        Config().train.num_steps = 3  # type: ignore[misc]


def test_all_problems_of_all_files_and_overrides_come_at_once() -> None:
    write("base.toml", '[model]\nnum_headz = 4\nbias = "yes"\n[nope]\n')
    write("run.toml", 'base = "base.toml"\n[train]\nnum_steps = 0\nfoo = 1\n[optimizer]\nmin_learning_rate = 1.0\n')
    found = problems("run.toml", "log.evry=1", "train.precision=fp23", "junk")
    assert {line.rpartition(" ")[0] and ": ".join(line.split(": ")[:2]) for line in found} == {
        "base.toml:2: model.num_headz",
        "base.toml:3: model.bias",
        "base.toml:4: nope",
        "run.toml:3: train.num_steps",
        "run.toml:4: train.foo",
        "run.toml:6: optimizer.min_learning_rate",
        "command line: log.evry",
        "command line: train.precision",
        "command line: junk",
    }


# What is wrong: files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nname = four\n", 'run.toml:2:8: not TOML: Invalid value: name = four; a string needs quotes: "four"'),
        (
            "[log]\ntensorboard = True # yes\n",
            "run.toml:2:15: not TOML: Invalid value: tensorboard = True # yes; write true",
        ),
        ("[model]\npreset = None\n", 'leave the key out, or write "auto"'),
        ("hf_token = hunter\n", 'run.toml:1:12: not TOML: Invalid value: hf_token = ...; a string needs quotes: "..."'),
        (
            "a.'api-key' = 2hunter\n",
            "run.toml:1:16: not TOML: Expected newline or end of document after a statement: a.'api-key' = ...",
        ),
        ('before = ["export A_TOKEN=hunter"\n"x" y', "run.toml:2:1: not TOML: Unclosed array: ..."),
        ("HF_TOKEN: hunter\n", "not TOML: Expected '=' after a key in a key/value pair: ..."),
        ("x = {token = hunter}\n", "not TOML: Invalid value: x = ...; a string needs quotes"),
        ('x = ["--token", hunter]\n', "not TOML: Invalid value: x = ...; a string needs quotes"),
        ('x = 1\npassword = """\nhunter', "not TOML: Unterminated string: ..."),
        ('[run]\nname = "x', 'run.toml:2:10: not TOML: Unterminated string: name = "x'),
        ("[run]\n\n[log", "run.toml:3:5: not TOML: Expected ']'"),
        ('[run]\nname = "a"\nname = "b"\n', "run.toml:3:11: not TOML: Cannot overwrite a value"),
        ("x = " + "[" * 3000, "run.toml: not readable as TOML: "),
        ("x = " + "9" * 5000, "run.toml: not readable as TOML: "),
        (b'[run]\n\n  name = "\xff"', "run.toml:3:11: not UTF-8 text, at byte 0xff; save it as UTF-8"),
        (b'\xef\xbb\xbf[run]\nname = "\xff"', "run.toml:2:9: not UTF-8 text, at byte 0xff"),
        ("[run]\n".encode("utf-16"), "run.toml:1:1: not UTF-8 text, at byte 0xff (it looks like UTF-16)"),
    ],
)
def test_files_that_are_not_toml(text: str | bytes, expected: str) -> None:
    assert problem(write("run.toml", text)).startswith(expected) or expected in problem("run.toml")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80) | st.text(alphabet="[]{}=\"'\n.,#abtrainmodel_ 019-:\\\r\t", max_size=80).map(str.encode))
def test_whatever_a_file_holds_the_answer_is_a_config_or_a_user_error(data: bytes) -> None:
    config = load_or_none(write("junk.toml", data))
    assert config is None or load(write("again.toml", to_toml(config))).config == config


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(KEYS)), st.text(max_size=30))
def test_whatever_an_override_holds_the_answer_is_a_config_or_a_user_error(name: str, value: str) -> None:
    config = load_or_none(write("run.toml", ""), f"{name}={value}")
    assert config is None or load(write("again.toml", to_toml(config))).config == config


def test_files_that_are_not_there() -> None:
    write("confs/shakespeare.toml", "")
    assert problem("confs/shakespere.toml").endswith(
        "no such file; did you mean confs/shakespeare.toml or shakespeare_char (shipped) or shakespeare_char_gpu "
        "(shipped)?"
    )
    assert problem("defualt") == "defualt: no such file; did you mean default (shipped)?"
    assert problem("configs/default.toml").startswith(
        "configs/default.toml: no such file: there is no folder configs; "
    )
    assert problem("qqqq") == f"qqqq: no such file; shipped configs are {', '.join(shipped())}"
    assert "File name too long" in problem("a" * 300)
    assert "no such file" in problem("a\0b")


def test_what_can_be_read_only_once_is_refused() -> None:
    os.mkfifo("pipe")
    assert problem("pipe").startswith("pipe: is a pipe or a device, but it is read more than once")
    assert problem("/dev/null").startswith("/dev/null: is a pipe or a device")


def test_folders_in_place_of_files() -> None:
    write("runs/a/config.toml", "")
    assert problem("runs/a") == "runs/a: is a folder; did you mean runs/a/config.toml?"
    assert problem("runs") == "runs: is a folder; give a TOML file"
    assert problem("").startswith('config "": is empty; shipped configs are ')


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read() -> None:
    Path(write("run.toml", "")).chmod(0)
    assert problem("run.toml") == "run.toml: cannot be read: Permission denied"


def test_a_file_that_cannot_be_read() -> None:
    Path("loop.toml").symlink_to("loop.toml")
    assert problem("loop.toml").startswith("loop.toml: ")
    if Path("/proc/self/mem").exists():
        assert problem("/proc/self/mem") == "/proc/self/mem: cannot be read: Input/output error"


def test_bases_that_are_wrong_are_reported_at_their_line_beside_other_problems() -> None:
    write("run.toml", '\nbase = "nope/x.toml"\n[train]\nfoo = 1\n[optimizer]\nmin_learning_rate = 1.0\n')
    unknown, missing = problems("run.toml")  # and not min_learning_rate: the base may have had a learning rate above it
    assert unknown.startswith("run.toml:4: train.foo")
    assert missing.startswith("run.toml:2: base: nope/x.toml: no such file: there is no folder nope")
    assert problem(write("run.toml", "base = 3")) == "run.toml:1: base: given 3; must be the path of a file, in quotes"
    assert "must be the path" in problem(write("run.toml", 'base = ""'))
    write("base.toml", "[run\n")
    assert problem(write("run.toml", 'base = "base.toml"')).startswith("run.toml:1: base: base.toml:1:5: not TOML")


def test_a_file_cannot_be_based_on_itself() -> None:
    assert "is its own base: a.toml -> a.toml" in problem(write("a.toml", 'base = "a.toml"'))
    write("sub/b.toml", 'base = "../c.toml"')
    write("c.toml", 'base = "sub/b.toml"')
    assert problem("c.toml").endswith("c.toml -> sub/b.toml -> sub/../c.toml")


def test_every_section_is_in_the_schema() -> None:
    assert list(SECTIONS) == [
        "run",
        "model",
        "lora",
        "data",
        "train",
        "optimizer",
        "parallel",
        "checkpoint",
        "survive",
        "log",
        "profile",
    ]


def test_a_name_too_long_for_a_folder() -> None:
    with pytest.raises(UserError, match=r"run\.name: .*at most 200 bytes"):
        load("default", [f"run.name={'n' * 201}"])


@pytest.mark.parametrize("key", ["data.corpus", "data.tokenizer", "run.folder", "model.weights", "data.folder"])
def test_paths_too_long_for_a_file_system(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}: .*no name in a path is longer than 255 bytes"):
        load("default", [f"{key}=a/{'n' * 256}"])
    with pytest.raises(UserError, match=rf"{key}: .*must be at most 3500 bytes"):
        load("default", [f"{key}={'n/' * 2000}"])
