"""In: command lines. Out: verbs that answer, quickly where torch is not needed, and plain words where they cannot.
Does not train: test_trajectories and test_train_* do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from runs import called, codescent, environment, make_project

from codescent.plan import Plan
from codescent.verbs.arguments import make_parser, parse


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["train", "--help"], 0),
        (["plan", "gpt2_124m", "--ranks", "8"], 0),
        (["config", "default"], 0),
        (["config", "--keys"], 0),
        (["sample", "runs/absent"], 2),
        (["evaluate", "runs/absent"], 2),
        (["export", "runs/absent", "out"], 2),
        (["plot", "runs/absent", "--out", "a.png"], 2),
        (["report", "runs/absent"], 2),
        (["report", "--help"], 0),
        (["train", "run.toml", "run.name=absent", "--resume"], 2),
        (["train", "--resume", "runs/absent"], 2),
        (["import", "absent", "runs/new"], 2),
    ],
)
def test_what_needs_no_torch_does_not_load_it(project: Path, words: list[str], code: int) -> None:
    program = (
        "import sys; from codescent.verbs import cli\n"
        "try: code = cli.run(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print({'torch', 'yaml'} & {*sys.modules} or 'none of them', code, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, check=False)
    *said, last = done.stderr.splitlines()
    assert last == f"none of them {code}"
    absent = "absent: no such folder: weights are read from a Hugging Face folder"
    said = [line.partition(";")[0] for line in said]
    assert said == ([f"error: {absent if 'import' in words else 'runs/absent: no such run folder'}"] if code else [])
    assert bool(done.stdout) == (not code)


INTERRUPTED = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "codescent.verbs.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from codescent.__main__ import main
main()
"""


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_plan_prints_what_a_run_will_cost(project: Path) -> None:
    out = codescent(project, "plan", "gpt2_124m", "--ranks", "8").stdout
    for part in (
        "124,439,808",
        "dp_replicate 8",
        "480 samples = 8 data-parallel x 5 micro-batches of 12",
        "6 N + attention",
        "all_reduce over dp_replicate (8 ranks)",
    ):
        assert part in " ".join(out.split())


def test_plan_shows_who_has_what_and_who_sends_to_whom(project: Path) -> None:
    layers = ("parallel.pp=4", "parallel.tp=2", "parallel.dp_shard=2", "parallel.cp=2", "parallel.zero_stage=1")
    out = called(project, "plan", "gpt2_124m", "train.microbatch_size=4", "--ranks", "64", *layers).stdout
    for part in (
        "stage 0 67,735,296 parameters, 24% of FLOPs: embedding, layers 0 to 3",
        "stage 3 38,598,912 parameters, 27% of FLOPs: head",
        "stage 3: receive_activation 0 from stage 2, load 0, forward 0",
        "memory per rank temporary tensors not counted; ranks of the fullest stage",
        "activations 462.95 MiB on cpu, 4 passes in flight, blocks not compiled",
        "send between stages: at most",
        "360 send over cp (2 ranks) (keys and values; gradients of keys and values): 1.41 GiB",
        "all_reduce over dp_replicate x cp (4 ranks)",
        "1 all_reduce between stages 0 and 3 (partial gradients of 1 replicated tensor)",
        "all_reduce over all 64 ranks (loss, stop request and gradient norm)",
        "the busiest rank sends",
    ):
        assert part in " ".join(out.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["config", "default"], ["data", "corpus.txt"]])
def test_output_to_a_full_disk_is_told_in_one_line(project: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "codescent", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=project, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: the output: no space left on the disk\n")


def test_plan_as_json_loads_back(project: Path) -> None:
    done = called(project, "plan", "run.toml", "--json")
    plan = Plan.from_json(json.loads(done.stdout))
    assert plan.to_json() == json.loads(done.stdout)
    assert plan.work.global_batch_size == 8


def test_overrides_may_stand_anywhere(project: Path) -> None:
    words = ("plan", "run.toml", "train.global_batch_size=6", "--ranks", "2", "train.microbatch_size=3", "--json")
    plan = Plan.from_json(json.loads(called(project, *words).stdout))
    assert (plan.work.global_batch_size, plan.work.microbatch_size, plan.mesh.dp_replicate) == (6, 3, 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["plan", "run.toml", "--rank", "2", "nonsense"],
            "arguments: --rank 2 nonsense; did you mean --ranks?; an override",
        ),
        (["plan"], "required: CONFIG\n"),
        (["plan", "train.num_steps=3"], "no CONFIG: train.num_steps=3 is an override; give a config first"),
        (["plan", "absent.toml"], "absent.toml"),
        (["config"], "--keys"),
        (["trian", "run.toml"], "there is no command trian; did you mean train? The commands: train, plan,"),
        (["frobnicate"], "there is no command frobnicate; The commands: train, plan,"),
        (["plan", "run.toml", "--oper"], "unrecognized arguments: --oper; did you mean --operators?"),
        (["train", "run.toml", "--find"], "unrecognized arguments: --find; did you mean --find-learning-rate?"),
        (["plan", "run.toml", "--ranks", "0"], "'0' is not a whole number of at least 1"),
        (["plan", "run.toml", "--ranks", "two"], "'two' is not a whole number of at least 1"),
        (["plan", ""], "CONFIG: is empty"),
        (["data", " "], "corpus: is empty"),
        (["data", "x" * 5000], "xxx...: File name too long"),
        (["data", "corpus.txt", "--tokenizer", ""], "--tokenizer: is empty"),
        (["data", "corpus.txt", "--text-key", ""], "--text-key: is empty"),
        (["data", "corpus.txt", "--text-key", "body"], "--text-key: for JSON lines and tables, and there are none in"),
        (["data", "corpus.txt", "--seed", "0"], "--seed: for --synthetic only; leave it out"),
        (
            ["data", "--synthetic", "9", "--text-key", "body"],
            "--text-key: for text only, not for tensors; leave it out",
        ),
        (["data", "corpus.txt", "--tokenizer", "bpe:" + "9" * 5000], "a BPE's vocabulary size must be at least 257"),
        (["data", "corpus.txt", "--workers", "9" * 12], "workers: 999999999999: the memory of this machine has room"),
        (["data", "--synthetic", "9" * 15], "no space left on the disk (47,308,7"),
        (["sample", "run.toml"], "run.toml: is a file, not a run folder"),
        (["train", "run.toml", "run.folder=run.toml/inside"], "run.toml is a file, not a folder"),
        (["plan", "run.toml", "parallel.timeout_s=inf"], "must be finite"),
        (["plan", "train.num_steps=2", "run.toml", "--json", "other.toml"], "unrecognized arguments: other.toml"),
        (
            ["plan", "run.toml", "--json", "nonsense"],
            "nonsense; an override is section.key=value, such as train.num_steps=100\n",
        ),
        (
            ["plan", "run.toml", "--ranks", "9" * 5000],
            "999... is not a whole number of at least 1 of at most 18 digits",
        ),
        (["plan", "run.toml", "--rnaks", "2"], "unrecognized arguments: --rnaks 2; did you mean --ranks?\n"),
        (["train", "run.toml", "--resume=always"], "unrecognized arguments: always; did you mean --resume=auto?"),
        (["launch", "run.toml", "--resume=always"], "leave --resume=always out: the script has --resume=auto"),
        (
            ["launch", "run.toml", "--to", "local", "baz"],
            "section.key=value, such as train.num_steps=100; words of a script stand behind",
        ),
        (["launch", "run.toml", "--nodes", "3:2"], "must not be above the second one; write 2:3"),
        (["launch", "run.toml", "--nodes", "a:2"], "write N, or the least and the most, such as 2:4"),
        (["launch", "run.toml", "--times", "-1"], "'-1' is not a whole number of at least 1, such as 4"),
        (["launch", "run.toml", "--out", "x", "--submit"], "not allowed with argument --out; give one of them"),
        (["plan", "run.toml", "--json", "a\nerror: b\x1b"], "unrecognized arguments: a\\nerror: b\\x1b;"),
        (["plan", "a\nerror: b\x1b"], "error: a\\nerror: b\\x1b: no such file"),
    ],
)
def test_wrong_words_end_with_code_2(project: Path, words: list[str], expected: str) -> None:
    done = called(project, *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["data", "HIDDEN"],
        ["import", "HIDDEN", "HIDDEN"],
        ["export", "HIDDEN", "out"],
        ["sample", "HIDDEN"],
        ["evaluate", "HIDDEN"],
        ["evaluate", "--predictions", "HIDDEN", "--data", "HIDDEN"],
        ["plan", "HIDDEN"],
        ["train", "--resume", "HIDDEN"],
    ],
    ids=" ".join,
)
def test_what_may_not_be_read_is_said(project: Path, tmp_path: Path, words: list[str]) -> None:
    (hidden := tmp_path / "hidden").mkdir()
    words = [str(hidden / "inside") if word == "HIDDEN" else word for word in words]
    import_module("codescent.verbs.export_run")  # another user may not be allowed to read the program
    called(project, *words)
    hidden.chmod(0)
    with as_nobody():
        done = called(Path("/"), *words)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "Permission denied" in done.stderr


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_an_option_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tried = 0
    for verb, parser in make_parser()[1].items():
        for action in parser._actions:
            if action.option_strings and action.dest not in ("help", "prompts", "changes"):
                usual = "8GB" if action.dest == "memory" else "1"
                value = [] if action.nargs == 0 else [next(iter(action.choices or [usual]))]
                with pytest.raises(SystemExit) as ended:
                    parse([verb, *[action.option_strings[0], *value] * 2, "a", "b"])
                assert ended.value.code == 2
                assert f"error: {'/'.join(action.option_strings)}: given twice; give it once" in capsys.readouterr().err
                tried += 1
    assert tried > 40
    assert parse(["sample", "a", "--prompt", "b", "--prompt", "c"]).prompts == ["b", "c"]


def test_config_shows_where_values_come_from(project: Path) -> None:
    (project / "child.toml").write_text('base = "run.toml"\n[train]\nnum_steps = 7\n')
    out = codescent(project, "config", "child.toml", "run.seed=3").stdout
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["train.num_steps"][1:] == ["7", "child.toml:3"]
    assert lines["run.seed"][1:] == ["3", "command", "line"]
    assert lines["model.num_heads"][1] == "2"
    assert lines["model.num_heads"][2].startswith("run.toml:")
    assert lines["model.bias"][2] == "default"


def test_data_prints_the_folder_and_finds_it_again(project: Path) -> None:
    first = codescent(project, "data", "corpus.txt", "--tokenizer", "char")
    assert first.returncode == 0, first.stderr
    folder = project / first.stdout.strip().splitlines()[-1]
    assert (folder / "description.json").is_file()
    assert called(project, "data", "corpus.txt").stdout == first.stdout


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("llama3_8b_lora", ["data.corpus: conversations.jsonl", "data.tokenizer: Meta", "data.chat_template: "]),
        ("llama3_70b", ["data.tokenizer: Meta-Llama-3-8B/tokenizer.json is not there yet; the plan does not need it"]),
    ],
)
def test_a_plan_does_not_need_data_that_is_not_there_yet(tmp_path: Path, name: str, absent: list[str]) -> None:
    done = called(tmp_path, "plan", name, "train.global_batch_size=128", "--ranks", "64")
    assert done.returncode == 0, done.stderr
    assert [words for words in absent if words not in done.stderr] == []
    assert "= 64 ranks" in " ".join(done.stdout.split())
    done = called(
        tmp_path, "plan", name, "model.preset=auto", "model.weights=auto", "--ranks", "64"
    )  # here the vocabulary is the tokenizer's
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr


def test_a_plan_knows_a_glob_from_a_file_that_is_not_there_yet(project: Path) -> None:
    words = ("plan", "run.toml", "model.vocab_size=300", "train.num_epochs=2", "data.task=sft")
    assert "is not there yet" not in called(project, *words[:3], "data.corpus=corp*.txt").stderr
    done = called(project, *words, "data.corpus=later.jsonl")
    assert (done.returncode, done.stderr) == (
        0,
        "data.corpus: later.jsonl is not there yet; the plan does not need it\n",
    )
    assert "2 epochs, unknown until the data is prepared" in done.stdout


def test_a_plan_of_epochs_prepares_nothing(project: Path) -> None:
    (project / "later.txt").write_text("one gradient\n" * 40)
    made = codescent(project, "data", "corpus.txt", "--tokenizer", "byte", "--validation-fraction", "0")
    assert made.returncode == 0, made.stderr
    before = sorted((project / "datasets").iterdir())
    for validation in ("later.txt", "absent.txt"):
        done = called(project, "plan", "run.toml", "train.num_epochs=2", f"data.validation={validation}")
        assert done.returncode == 0, done.stderr
        assert "2 epochs, unknown until the data is prepared" in done.stdout
    assert sorted((project / "datasets").iterdir()) == before


def test_no_program_takes_abbreviated_options() -> None:
    """A later option could make an abbreviation of today ambiguous, in scripts that nobody looks at."""
    root = Path(__file__).resolve().parent.parent
    files = [path for folder in ("codescent", "benchmarks", "examples") for path in (root / folder).rglob("*.py")]
    made = [call for path in files for call in re.findall(r"ArgumentParser\([^()]*", path.read_text(encoding="utf-8"))]
    calls = [call for call in made if call != "ArgumentParser("]  # the class Parser has none
    assert len(calls) >= 8
    assert all("allow_abbrev=False" in call for call in calls)
