"""In: a network namespace whose loopback is down, as in sandboxes. Out: ranks of one machine are refused at once.
Needs root, or user namespaces. Ranks on several machines need no loopback (test_dead_hosts.py and others)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment, make_project

ALONE = ("unshare", "--map-root-user", "--net")
IS_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
CODESCENT = ("-m", "codescent")


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ((*CODESCENT, "train", "run.toml", "--ranks", "2"), {}),
        ((*CODESCENT, "train", "run.toml"), {}),
        ((*CODESCENT, "train", "run.toml"), {**IS_RANK, **MASTER}),
        ((*CODESCENT, "doctor", "run.toml"), {}),
        ((*CODESCENT, "doctor", "run.toml"), {**IS_RANK, **MASTER}),
        (("-c", "import codescent; codescent.init('cpu')"), {}),
        (("-c", "import codescent; codescent.init('cpu')"), {**IS_RANK, **MASTER}),
    ],
)
def test_a_machine_without_loopback_is_named_at_once(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str]
) -> None:
    """The wait for the other ranks, 300 s, does not begin: the command is ended after 170 s."""
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    make_project(tmp_path)
    done = subprocess.run(
        [*ALONE, sys.executable, *words], cwd=tmp_path, env=environment(CODESCENT_TOKEN="a secret", **env), text=True,
        capture_output=True, timeout=170, check=False,
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert said.count("this machine has no loopback interface that is up (127.0.0.1: Network is unreachable)") == 1
    assert "`ip link set lo up`" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()
    assert env or "train" not in words or not done.stdout, "a command that starts all ranks says it before all else"
