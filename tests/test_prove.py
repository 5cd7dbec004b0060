"""In: a config and layouts. Out: the table of `codescent prove`, its verdicts and its exit code.
Does not try every layout: the tests of each strategy do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import codescent, make_project

from codescent import prove
from codescent.errors import UserError
from codescent.prove import Finding, Layout, layouts_of, parse_layouts


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    make_project(folder)
    return folder


def test_layouts_of_four_ranks_are_all_divisions() -> None:
    found = {(str(layout), layout.ranks) for layout in layouts_of([1, 4])}
    shards = {f"dp_shard=4 zero_stage={stage}" for stage in (1, 2, 3)}
    both = {f"dp_replicate=2 dp_shard=2 zero_stage={stage}" for stage in (1, 2, 3)}
    assert found == {(name, 4) for name in {"dp_replicate=4", *shards, *both}}


def test_layouts_as_words() -> None:
    assert parse_layouts("dp_shard=2, zero_stage=1; dp_replicate=3,dp_shard=2;") == [
        Layout((("dp_shard", "2"), ("zero_stage", "1")), 2),
        Layout((("dp_replicate", "3"), ("dp_shard", "2")), 6),
    ]
    with pytest.raises(UserError, match="'dp_shard' is not key=value"):
        parse_layouts("dp_shard")
    with pytest.raises(UserError, match="is empty"):
        parse_layouts(" ; ")


def row(loss: float, norm: float = 1.0, val: float | None = None) -> dict[str, float]:
    return {"train_loss": loss, "grad_norm": norm, "val_loss": val}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([row(2.0), row(1.0, val=3.0)], "same"),
        ([row(2.0), row(1.0 + 1e-8, val=3.0)], "DIFFERS"),
        ([row(2.0), row(1.0, norm=1.1, val=3.0)], "DIFFERS"),
        ([row(2.0), row(1.0)], "DIFFERS"),
        ([row(math.nan), row(1.0, val=3.0)], "DIFFERS"),
        ([row(2.0)], "FAILED"),
        ("out of memory", "FAILED"),
    ],
)
def test_verdicts(found: list[dict[str, float]] | str, verdict: str) -> None:
    finding = prove._finding("x", 2, found, [row(2.0), row(1.0, val=3.0)])
    assert finding.verdict(1e-9) == verdict
    assert Finding("x", 2, {}, refused="because").verdict(1e-9) == "refused"


def test_the_table_and_what_does_not_fit(project: Path) -> None:
    layouts = "dp_shard=2; dp_shard=3"
    done = codescent(project, "prove", "run.toml", "--layouts", layouts, "--steps", "4", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {" ".join(line.split()[:-5]): line.split() for line in done.stdout.splitlines() if line.split()[1:]}
    assert lines["dp_shard=2 2"][-1] == "same"
    assert done.stdout.count("same") == 4  # the legend, the layout, to it and from it
    assert "dp_shard=3: train.global_batch_size = 8 does not divide into 3 data-parallel ranks" in " ".join(
        done.stdout.split()
    )
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "1"], "at least 2"),
        (["--ranks", "1"], "nothing to be compared with"),
        (["--ranks", "1,x"], "'x' is not a whole number"),
        (["--layouts", "tp"], "'tp' is not key=value"),
        (["model.num_heads=3"], "3 heads do not divide"),
        (["--precision", "bf16"], "bf16"),
    ],
)
def test_what_it_refuses(project: Path, words: list[str], expected: str) -> None:
    done = codescent(project, "prove", "run.toml", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
