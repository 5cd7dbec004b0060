"""In: a BERT under axes of the mesh and their products, with padding and segments. Out: the losses of one process.
Does not look inside the model (test_models_bert does) nor read a corpus: its samples are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bert_ranks
import pytest

Found = dict[str, dict[str, list[float]]]


def run(folder: Path, *, slow: bool) -> dict[str, list[Found]]:
    """By number of ranks, what each of them found."""
    root = Path(__file__).parents[1]
    python_path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, bert_ranks.__file__, str(folder), "slow" if slow else "quick"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Found]] = {}
    for path in sorted(folder.glob("[124]_*")):
        found.setdefault(path.name[0], []).append(json.loads(path.read_text()))
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return run(tmp_path_factory.mktemp("bert"), slow=False)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return run(tmp_path_factory.mktemp("bert_slow"), slow=True)


def check(found: dict[str, list[Found]], name: str, head: str) -> None:
    """Every rank has the numbers of one process."""
    expected = found["1"][0][f"alone {head}"]
    (ranks,) = [answers for answers in found.values() if f"{name} {head}" in answers[0]]
    for answer in ranks:
        for what, numbers in answer[f"{name} {head}"].items():
            assert numbers == pytest.approx(expected[what], rel=1e-9), what


@pytest.mark.parametrize("head", bert_ranks.HEADS)
@pytest.mark.parametrize("name", bert_ranks.QUICK)
def test_every_layout_has_the_losses_of_one_process(quick: dict[str, list[Found]], name: str, head: str) -> None:
    check(quick, name, head)


@pytest.mark.slow
@pytest.mark.parametrize("head", bert_ranks.HEADS)
@pytest.mark.parametrize("name", bert_ranks.SLOW)
def test_hybrids_have_the_losses_of_one_process(slow: dict[str, list[Found]], name: str, head: str) -> None:
    check(slow, name, head)


@pytest.mark.parametrize("head", bert_ranks.HEADS)
def test_there_is_something_to_compare(quick: dict[str, list[Found]], head: str) -> None:
    alone = quick["1"][0][f"alone {head}"]
    assert all(norm > 0.1 for norm in alone["grad_norm"])
    assert len(set(alone["loss"])) == bert_ranks.STEPS
