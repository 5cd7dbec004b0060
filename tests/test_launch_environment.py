"""In: environment variables as launchers set them, whole and in part. Out: which rank, or every problem.
Does not start ranks: test_launch_local.py does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.launch.environment import read

WHOLE = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def problems(env: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read(env)
    return caught.value.problems


def test_a_process_that_no_launcher_started() -> None:
    assert read({}) is None
    assert read({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) is None  # left in a shell


def test_a_whole_set() -> None:
    assert read(WHOLE) == Rank(5, 1, 8, 4, "node0", 29500, launcher="the variables of torchrun")


def test_restarts_the_agents_store_and_our_own_socket() -> None:
    more = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "CODESCENT_STORE_FD": "7"}
    found = read(WHOLE | more)
    assert found is not None
    assert (found.attempt, found.agent_store, found.store_fd) == (0, True, 7)  # torchrun's agents count apart


@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_part_is_named(name: str, empty: bool) -> None:
    env = {key: value for key, value in WHOLE.items() if key != name} | ({name: " "} if empty else {})
    (problem,) = problems(env)
    assert problem.startswith(f"environment: {name} (")
    assert "is not set" in problem


def test_all_missing_parts_come_at_once() -> None:
    found = problems({"RANK": "0", "WORLD_SIZE": "2"})
    assert [line.split()[1] for line in found] == ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert all("but RANK is" in line for line in found)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"RANK": "8"}, "environment: RANK is 8; must be below WORLD_SIZE (8)"),
        ({"LOCAL_RANK": "4"}, "environment: LOCAL_RANK is 4; must be below LOCAL_WORLD_SIZE (4)"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE is 7; must be at most WORLD_SIZE (6)"),
        ({"RANK": "2", "LOCAL_RANK": "3"}, "LOCAL_RANK is 3; must be at most RANK (2)"),
        ({"WORLD_SIZE": "-1"}, 'environment: WORLD_SIZE: given "-1"; must be a whole number >= 0'),
        ({"RANK": "one"}, 'environment: RANK: given "one"; must be a whole number >= 0'),
        ({"WORLD_SIZE": "9" * 5000}, f'WORLD_SIZE: given "{"9" * 40}..."; must be a whole number >= 0, of at most 9'),
        ({"RANK": "²"}, 'environment: RANK: given "²"; must be a whole number >= 0'),
        ({"MASTER_PORT": "70000"}, "environment: MASTER_PORT is 70000; must be from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "environment: MASTER_PORT is 0; must be from 1 to 65535"),
    ],
)
def test_what_contradicts_is_refused(change: dict[str, str], expected: str) -> None:
    (problem,) = problems(WHOLE | change)
    assert expected in problem


def test_torchruns_own_environment_is_read(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import dataclasses, json, os, pathlib, sys\n"
        "from codescent.launch.environment import read\n"
        "found = read(os.environ)\n"
        "pathlib.Path(sys.argv[1], f'{found.rank}.json').write_text(json.dumps(dataclasses.asdict(found)))\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), str(tmp_path)]
    subprocess.run(
        [sys.executable, *command],
        check=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["rank"], found["local_rank"], found["world_size"], found["local_world_size"]) == (
            rank,
            rank,
            2,
            2,
        )
        assert (found["attempt"], found["agent_store"], found["store_fd"]) == (0, True, None)
