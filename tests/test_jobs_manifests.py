"""In: words of `codescent launch`. Out: the manifest of Kubernetes as YAML, the component of torchx as Python, with the
fields that were meant, and the same words at the ranks. Does not ask Kubernetes or torchx."""

from __future__ import annotations

import importlib.util
import os
import re
import string
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as draw
from scripts import COMMAND, CONFIG, programs_in, script_of, started_in, starts

from codescent.jobs.kubernetes import dumped, literal
from codescent.verbs import cli

POD = ("--to", "kubernetes", "--nodes", "2", "--devices", "4", "site.image=lab:1", "site.devices=nvidia.com/gpu: {n}")
POD_NAME = "gpt2-124m-7edc23ff"
"""Of the run gpt2_124m: the name had to be changed, so it has a hash of the real one."""
FULL = (
    "site.time=01:00:00", "site.volume=data:/work space", "site.memory=64G", "site.cores=8", "site.requeues=3",
    'site.before=["export A=$(echo $$)"]',
)  # fmt: skip
TORCHX = ("--to", "torchx", "--nodes", "2", "--devices", "4", "site.image=lab:1", "site.devices=gpu={n}")
TORCHX = (*TORCHX, "site.time=01:00:00", "site.memory=64G")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("a text " * 1000)
    monkeypatch.chdir(tmp_path)


def manifest(text: str) -> dict[str, Any]:
    """The documents of a manifest, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def replaced(text: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $(NAME) is a variable, $$ one dollar sign."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def test_a_manifest_has_what_the_site_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = manifest(script_of([*CONFIG, *POD, *FULL], capsys))
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 6)
    assert "activeDeadlineSeconds" not in job  # it would count the time in which the pods wait
    assert (pod["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (3600, 60)
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert found["Service"]["spec"]["selector"] == {"job-name": POD_NAME}
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert {one["metadata"]["name"] for one in found.values()} == {pod["subdomain"]} == {POD_NAME}
    assert (container["image"], container["workingDir"]) == ("lab:1", "/work space")
    assert container["resources"] == {"limits": {"cpu": 32, "memory": "64Gi", "nvidia.com/gpu": 4}}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "data"}
    (token,) = container["env"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": POD_NAME, "key": "token"}
    assert re.fullmatch("[0-9a-f]{64}", found["Secret"]["stringData"]["token"])
    assert container["args"] == COMMAND
    assert str(tmp_path) not in str(found)  # nothing of this machine


def test_runs_with_other_names_have_other_names_of_pods(capsys: pytest.CaptureFixture[str]) -> None:
    """They would replace each other's Job and Secret."""
    names = ["a-b", "a_b", "a.b", "A-B", "a b", "a_b" * 30, "a.b" * 30, "你", "好", "run"]
    texts = [script_of([*CONFIG, f"run.name={name}", *POD], capsys) for name in names]
    found = [manifest(text)["Job"]["metadata"]["name"] for text in texts]
    assert found[0] == "a-b"
    assert all(re.fullmatch("[a-z][a-z0-9-]{0,60}[a-z0-9]", name) for name in found)
    assert len(set(found)) == len(names)


def test_logs_are_those_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    text = script_of([*CONFIG, *POD], capsys)
    assert f"kubectl logs -f -l job-name={POD_NAME},batch.kubernetes.io/job-completion-index=0 shows" in text


def test_a_manifest_without_a_volume_has_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, "--to", "kubernetes", "--devices", "1", "site.image=lab:1", "site.devices=none", "run.name=yes"]
    found = manifest(script_of(words, capsys))
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert not {"workingDir", "resources"} & container.keys()
    assert found["Job"]["metadata"]["name"] == "yes"


def test_names_of_pods_are_labels(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, "--to", "kubernetes", "--nodes", "12", "--devices", "2", "site.image=x", "site.devices=none"]
    name = manifest(script_of([*words, f"run.name={'A_b.' * 20}"], capsys))["Job"]["metadata"]["name"]
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(f"{name}-11") <= 63


@pytest.mark.parametrize("word", ["a b", "$(HOSTNAME)", "$$", "a\nb", "\x85\u2028\x07", '"\\', "- x: {y}", "€"])
def test_a_pod_starts_its_agent_with_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    (tmp_path / "train.py").write_text("")
    found = manifest(script_of(["train.py", *POD, *FULL, "--", word, "last"], capsys))
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    env = {"HOSTNAME": "replaced", "echo $": "replaced"}
    command = [replaced(one, env) for one in (*container["command"], *container["args"])]
    programs = programs_in(tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    agent = starts(started_in(tmp_path), "python3")
    assert agent.words == [
        "-P", "-m", "codescent.launch.agent", "--first", "4", "--ranks", "4", "--world", "8",
        "--master", "10.0.0.1:29400", "--", "python", "train.py", word, "last",
    ]  # fmt: skip
    assert int(agent.env["CODESCENT_STOP_AT"]) > 1_000_000


TEXTS = draw.text(draw.characters(exclude_categories=("Cs",))) | draw.text("$()A \n\t\r\x85\u2028:#-'\"\\")


@settings(deadline=None, max_examples=300)
@given(text=TEXTS)
@pytest.mark.hypothesis
def test_any_text_is_read_back(text: str) -> None:
    """Fault: a block of lines loses a line end, a blank or a character that YAML reads otherwise."""
    found = yaml.safe_load(dumped({"a": {"b": ["x", literal(text), "y"]}}))["a"]["b"]
    assert replaced(found[1], {"A": "replaced"}) == text
    assert (found[0], found[2]) == ("x", "y")


def test_what_kubernetes_reads_as_a_number_is_quoted() -> None:
    """Fault: PyYAML writes 1e-3 and y without quotes; Kubernetes then refuses the argument, which must be a text."""
    words = ["1e-3", "1e5", "y", "N", "0o17", "1_000", "12:30", "on", "~", "0x1F", ".5e3", "+.inf", "null"]
    lines = dumped({"args": words}).splitlines()[1:]
    assert [line[2:].strip("'\"") for line in lines] == words
    assert all(line[2] == line[-1] and line[2] in "'\"" for line in lines)


def test_a_script_in_a_manifest_is_a_block_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a person cannot read the script: it is one line in quotes."""
    lines = script_of([*CONFIG, *POD, *FULL], capsys).splitlines()
    assert "set -eo pipefail" in [line.strip() for line in lines]


def test_the_secret_is_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first moment on: the file has this mode when it is opened."""
    before, modes = os.open, []

    def spy(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        descriptor = before(path, flags, mode, **more)
        if flags & os.O_CREAT and str(path).endswith(".partial"):
            modes.append(os.fstat(descriptor).st_mode & 0o777)
        return descriptor

    monkeypatch.setattr(os, "open", spy)
    assert cli.run(["launch", *CONFIG, *POD, "--out", "job.yaml"]) == 0
    assert modes == [0o600]
    assert (tmp_path / "job.yaml").stat().st_mode & 0o777 == 0o600


class _Values:
    """Stands in for classes of torchx.specs."""

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


def component(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The role of a component, by torchx.specs, or by classes that keep what they are given."""
    if importlib.util.find_spec("torchx") is None:
        macros = types.SimpleNamespace(rank0_env="${rank0_env}")
        specs = types.SimpleNamespace(AppDef=_Values, Role=_Values, Resource=_Values, macros=macros)
        monkeypatch.setitem(sys.modules, "torchx", types.SimpleNamespace(specs=specs))
    names: dict[str, Any] = {}
    exec(compile(text, "component.py", "exec"), names)
    (role,) = names["train"]().roles
    return role


def test_a_component_of_torchx_starts_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["a$b", "$HOME", "it's", "a\nb"]
    role = component(script_of(["train.py", *TORCHX, "--", *words], capsys), monkeypatch)
    assert (role.image, role.num_replicas, role.max_retries) == ("lab:1", 2, 20)
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (4, 4, 64 * 1024)
    assert re.fullmatch("[0-9a-f]{64}", role.env["CODESCENT_TOKEN"])
    replaced = [string.Template(one).safe_substitute(rank0_env="TORCHX_RANK0_HOST") for one in role.args]
    programs = programs_in(tmp_path)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TORCHX_RANK0_HOST": "n1", "STOPS_torchrun": "75"}
    done = subprocess.run(
        [role.entrypoint, *replaced], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (75, "")
    torchrun = starts(started_in(tmp_path), "torchrun")
    assert re.fullmatch(r"--rdzv-endpoint=n1:2\d{4}", torchrun.words[4])
    assert torchrun.words[-5:] == ["train.py", *words]
    assert int(torchrun.env["CODESCENT_STOP_AT"]) > 1_000_000


def test_the_words_of_a_component_may_be_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that wrote it is in its docstring."""
    (tmp_path / "train.py").write_text("")
    words = ['"""', "\\", "\\N{", "\r", "\x07", "a\nb"]
    role = component(script_of(["train.py", *TORCHX, "--", *words], capsys), monkeypatch)
    assert "train.py" in role.args[1]
