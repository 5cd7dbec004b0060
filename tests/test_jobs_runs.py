"""In: scripts of `codescent launch`, hosts that are network namespaces. Out: each rank has the place that was meant; a
run has the losses of one process; signals save. Instead of ssh a shell enters the namespace; skips without root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import environment, losses, make_project, train
from scripts import script_of

from codescent.record import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

SSH = """#!/bin/bash
# ssh -o NAME=VALUE ... HOST WORDS: the words run by a shell on a host, as ssh does it
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
number=$(( ${host##*.} - 1 ))
exec nsenter --net=/run/netns/PREFIXh$number unshare --uts bash -c "hostname host$number; $*"
"""
PLACE = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CODESCENT_TOKEN", "CODESCENT_MARK")
found = {name: os.environ.get(name) for name in names} | {"host": os.uname().nodename, "words": sys.argv[1:]}
open("place" + os.environ["RANK"], "w").write(json.dumps(found))
"""
RUN = ("run.toml", "train.global_batch_size=6", "train.num_steps=6", "train.eval_every=0", "run.name=hosts")


@pytest.fixture(scope="module")
def made() -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(3) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: hosts.Hosts) -> Path:
    make_project(tmp_path)
    (tmp_path / "place.py").write_text(PLACE)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(SSH.replace("PREFIXh", made.name(0).removesuffix("0")))
    (programs / "ssh").chmod(0o755)
    bin_folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}:{bin_folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(text: str, folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (folder / "script").write_text(text)
    return subprocess.Popen(
        [*before, "bash", "script", *words], cwd=folder, env=environment(), text=True, stdout=-1, stderr=-1
    )


def places(folder: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"place{rank}").read_text()) for rank in range(ranks)]


def test_ssh_gives_each_rank_its_place(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place.py", "--to", "ssh", "--hosts", "10.77.0.1:2,10.77.0.3:1", "--", "a b", "$c"]
    process = started(script_of(words, capsys), project)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "", "")
    found = places(project, 3)
    assert [(one["host"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in found] == [
        ("host0", "0", "2"), ("host0", "1", "2"), ("host2", "0", "1"),
    ]  # fmt: skip
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in found} == {("3", "10.77.0.1")}
    assert len({one["CODESCENT_TOKEN"] for one in found}) == 1
    assert {one["CODESCENT_MARK"] for one in found} == {str(project / "runs" / "place")}
    assert [one["words"] for one in found] == [["a b", "$c"]] * 3


def test_ssh_trains_as_one_process_does_and_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = train(project, "alone", *RUN[1:-1])
    text = script_of([*RUN, "checkpoint.every=3", "--to", "ssh", "--hosts", "10.77.0.1:2,10.77.0.3:1"], capsys)
    process = started(text, project)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    run = RunFolder.open(project / "runs" / "hosts")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    process = started(text.replace("train.num_steps=6", "train.num_steps=8"), project)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "at step 6" in out
    assert len(losses(run)) == 8


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_signals_reach_the_ranks_of_all_hosts(
    project: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    words = [*RUN[:2], "train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0", RUN[-1]]
    text = script_of([*words, "log.metrics_every=1", "--to", "ssh", "--hosts", "10.77.0.1:1,10.77.0.2:1"], capsys)
    text = text.replace("train.global_batch_size=6", "train.global_batch_size=4")
    process = started(text, project)
    csv, end = project / "runs" / "hosts" / "metrics.csv", time.monotonic() + 100
    while not (csv.exists() and csv.read_text().count("\n") > 3):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert f"by {number.name}" in out
    assert "saved in" in out


def test_a_host_that_fails_ends_the_others(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "place.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(90)"
    )
    words = ["place.py", "--to", "ssh", "--hosts", "10.77.0.1:1,10.77.0.2:1"]
    process = started(script_of(words, capsys), project)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err


@pytest.mark.parametrize("elastic", [False, True])
def test_torchrun_finds_hosts_whose_own_name_is_unknown(
    project: Path, capsys: pytest.CaptureFixture[str], made: hosts.Hosts, elastic: bool
) -> None:
    """With torchrun's own ways of finding addresses these hosts hang, or fail with a bare socket.gaierror."""
    where = ["--hosts", "10.77.0.1:1,10.77.0.2:1"]
    if elastic:
        where = ["--hosts", "10.77.0.1", "--nodes", "1:2", "--devices", "1", "--max-restarts", "1"]
    text = script_of(["place.py", "--to", "torchrun", *where], capsys)
    if elastic:  # all are there at once: none has to wait for the last call
        text = text.replace("--nnodes=1:2", "--nnodes=2:2")
    both = [started(text, project, str(host), before=tuple(made.command(host, []))) for host in range(2)]
    for process in both:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    found = places(project, 2)
    assert {one["host"] for one in found} == {"host0", "host1"}
    assert {one["WORLD_SIZE"] for one in found} == {"2"}
