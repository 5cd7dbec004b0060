"""In: examples/own_module.py and the scripts of docs/own_module.md. Out: that they train alike, alone and on two ranks.
Does not look into the strategies (test_own does): these are programs, started as a user starts them."""

from __future__ import annotations

import difflib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from codescent.launch.local import run_ranks

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "own_module.py"
WORDS = ("--samples", "128", "--features", "16", "--epochs", "3", "--dropout", "0")


def start(folder: Path, *command: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *torchrun, *command],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]


def scripts() -> list[str]:
    """The page's three: for one device, with torch's DDP, and ours."""
    text = (ROOT / "docs" / "own_module.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(import.*?)```", text, re.DOTALL)


def added(before: str, after: str) -> list[str]:
    """Lines of `after` that are not in `before`, without comments and empty ones."""
    lines = [
        [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        for text in (before, after)
    ]
    return [line[2:] for line in difflib.ndiff(*lines) if line.startswith("+ ")]


def test_the_page_adds_six_lines_at_most_where_torch_needs_more() -> None:
    one, ddp, ours = scripts()
    assert len(added(one, ours)) <= 6
    assert len(added(one, ddp)) >= 15


def test_the_page_and_the_example_have_the_same_loop() -> None:
    loop = scripts()[2].partition("    for source")[2]
    assert loop in EXAMPLE.read_text(encoding="utf-8")


def test_the_page_and_the_example_have_other_dropout_masks_on_each_rank() -> None:
    """Both drop: seeded after `distribute`, as the page says."""
    for script in (scripts()[2], EXAMPLE.read_text(encoding="utf-8")):
        _, _, after = script.partition("codescent.distribute(")
        assert "torch.manual_seed(ranks.rank)" in after.partition("for epoch")[0]


def test_the_example_on_one_rank_and_on_two(tmp_path: Path) -> None:
    alone = losses(start(tmp_path, str(EXAMPLE), *WORDS))
    assert len(alone) == 3
    assert alone[2] < alone[0]
    both = start(tmp_path, str(EXAMPLE), *WORDS, ranks=2)
    assert losses(both) == pytest.approx(alone, rel=1e-5)  # fp32
    assert "destroy_process_group" not in both.stderr
    assert "Warning" not in both.stderr.replace("UserWarning: enable_nested_tensor", "")


@pytest.mark.slow
def test_our_own_launcher(tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = f"import sys; sys.stdout = open({str(said)!r}, 'w'); sys.argv = [''] + {list(WORDS)!r}\n"
    program += EXAMPLE.read_text(encoding="utf-8") + "sys.stdout.flush()\n"
    program = program.replace("open(", "open('/dev/null' if __import__('os').environ['RANK'] != '0' else ", 1)
    assert run_ranks([sys.executable, "-c", program], 2, environment(PYTHONPATH=str(ROOT))) == 0
    assert len(said.read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_script_that_forgets_init_ends_with_one_line_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "forgets.py").write_text("import codescent\n\ncodescent.Metrics('run')\n")
    done = start(tmp_path, "forgets.py", ranks=2)
    assert done.returncode == 1  # torchrun's, whatever that of the ranks is
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: \S*forgets\.py:3: codescent\.Metrics: .*: call codescent\.init\(\) first$", line)
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


FAILS = """
import os, sys, time
import codescent, torch
ranks = codescent.init(timeout_s=600)
if ranks.rank == int(sys.argv[1]):
    raise ValueError("no such sample")
torch.distributed.all_reduce(torch.zeros(1))
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_others_end_and_say_whose_error_it_was(tmp_path: Path, rank: int) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "fails.py", str(rank)],
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(ROOT), RANK=str(number), LOCAL_RANK=str(number), **place),
            text=True,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]  # long before the timeout of collectives
    assert all(process.returncode for process in processes)
    assert f"codescent: rank {rank} failed: ValueError: no such sample" in said[rank]
    if rank == 1:
        assert "codescent: rank 0 ends because rank 1 failed: ValueError: no such sample" in said[0]
    else:
        assert "codescent: rank 1 " in said[1]
