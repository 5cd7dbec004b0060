"""In: a config and layouts. Out: the table of `codescent prove`, its verdicts and its exit code.
Does not try every layout: the tests of each strategy do."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from forker import Forker
from rich.console import Console
from runs import called, codescent, environment

from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.config.sections import Config
from codescent.plan import AXES
from codescent.results import start
from codescent.verbs import prove, prove_table
from codescent.verbs.arguments import parse
from codescent.verbs.finding import LayoutResult, finding_of
from codescent.verbs.prove import LayoutCase, layouts_of, parse_layouts
from codescent.verbs.replay import distance


def test_layouts_are_all_divisions() -> None:
    assert {str(layout) for layout in layouts_of([1])} == {
        "recompute=selective",
        "recompute=products",
        "recompute=full",
    }
    found = [str(layout) for layout in layouts_of([4])]
    alone = {
        "tp=4",
        "tp=4 sequence_parallel=false",
        "cp=4 context=ring",
        "cp=4 context=all-gather",
        "dp_replicate=4",
        "ep=4",
    }
    alone |= {f"dp_shard=4 zero_stage={stage}" for stage in (1, 2, 3)}
    alone |= {f"pp=4 schedule={name}" for name in ("naive", "gpipe", "1f1b", "zero-bubble")}
    alone |= {"pp=4 schedule=interleaved virtual_stages=2"}
    pairs = {f"{a}=2 {b}=2" for a, b in itertools.combinations(AXES, 2)}
    assert sorted(found) == sorted(alone | pairs)
    assert all(layout.ranks == 4 for layout in layouts_of([4]))
    assert not [layout for layout in layouts_of([4], ["ep"]) if "ep=" in str(layout)]
    assert "pp=2 dp_replicate=2 tp=2" in {str(layout) for layout in layouts_of([8])}


@pytest.mark.parametrize(
    ("keys", "samples", "given", "expected"),
    [
        ({"pp": "2"}, 12, None, 6),  # one micro-batch fills no pipeline
        ({"pp": "2"}, 12, 3, None),
        ({"pp": "2"}, 12, 4, 6),  # three are no multiple of two stages
        ({"pp": "4", "dp_shard": "2"}, 24, 6, 3),
        ({"pp": "4"}, 6, None, None),  # there is no such number: the strategy will say so where it needs one
        ({"tp": "2"}, 12, None, None),
        ({"pp": "2", "dp_replicate": "5"}, 12, None, None),
    ],
)
def test_micro_batches_fill_the_pipeline(
    keys: dict[str, str], samples: int, given: int | None, expected: int | None
) -> None:
    config = Config.model_validate({"train": {"global_batch_size": samples, "microbatch_size": given}})
    assert LayoutCase(tuple(keys.items()), 2).filled(config).microbatch_size == expected


def test_options_of_the_configs_own_layout_are_not_those_of_others(project: Path, tmp_path: Path) -> None:
    """A config that is made for an interleaved pipeline is proved in the other schedules, too."""
    words = ("parallel.dp_shard=1",)
    config = tmp_path / "interleaved.toml"
    config.write_text(f'base = "{project / "run.toml"}"\n[parallel]\nschedule = "interleaved"\nvirtual_stages = 2\n')
    prover = prove.Prover(str(config), words, 4, "fp64", tmp_path)
    layouts = [prover.filled(layout) for layout in layouts_of([2], ["ep"])]
    assert [prover._refused(layout) == "" for layout in layouts].count(False) == 1
    (refused,) = [layout for layout in layouts if prover._refused(layout)]
    assert "virtual_stages=2" in str(refused)  # two layers are no four virtual stages


def test_layouts_as_words() -> None:
    assert parse_layouts("dp_shard=2, zero_stage=1; dp_replicate=3,dp_shard=2;") == [
        LayoutCase((("dp_shard", "2"), ("zero_stage", "1")), 2),
        LayoutCase((("dp_replicate", "3"), ("dp_shard", "2")), 6),
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
    finding = finding_of("x", 2, found, [row(2.0), row(1.0, val=3.0)])
    assert finding.verdict(1e-9) == verdict
    assert LayoutResult("x", 2, {}, refused="because").verdict(1e-9) == "refused"


@pytest.mark.parametrize("more", [(), pytest.param(("--resume",), marks=pytest.mark.slow)])
def test_the_table_and_what_does_not_fit(project: Path, more: tuple[str, ...]) -> None:
    words = ("parallel.dp_replicate=2", "--layouts", "dp_shard = 2; dp_shard=3", "--steps", "2", *more)
    done = codescent(project, "prove", "run.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[1:]]
    assert any(line[:2] == ["dp_shard=2", "2"] and line[-1] == "same" for line in lines)
    assert done.stdout.count("same") == (7 if more else 3)  # the legend; the layout, to it and from it, each twice
    first = ["1 of 2: dp_shard=2: same", "2 of 2: dp_shard=3: refused"]
    assert done.stdout.splitlines()[:2] == first  # no terminal
    told = " ".join(done.stdout.split())
    assert "dp_shard=3: train.global_batch_size = 8 does not divide into 3 data-parallel ranks" in told
    assert not (project / "runs").exists()


@pytest.mark.slow
def test_another_loss_or_no_layout_at_all_is_no_proof(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)

    def proved(layouts: str) -> bool:
        return prove.main(parse(["prove", "run.toml", "--layouts", layouts, "--steps", "2"])) == 0

    assert not proved("dp_shard=3")
    monkeypatch.setattr(prove, "TOLERANCE", {"fp64": -1.0})
    assert not proved("dp_shard=2")
    assert "DIFFERS" in capsys.readouterr().out


def test_a_file_has_the_verdict_on_a_layout_before_the_next_one_runs(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        finding = LayoutResult(
            ", ".join(f"parallel.key_{number}=[red]" for number in range(20)), 2, {}, failed="killed"
        )
        prove_table.show_progress(Console(file=file, highlight=False), "1 of 3: ", finding, 1.0)
        assert (tmp_path / "out").read_text() == f"1 of 3: {finding.layout}: FAILED\n"


def test_a_run_that_is_killed_is_told(project: Path) -> None:
    assert start._cause(-9, "") == "killed by SIGKILL"
    said = "codescent: rank 1 of 2 (pid 3) was killed by SIGKILL (9)\ncodescent: what each rank printed is kept"
    assert start._cause(137, said) == "rank 1 of 2 (pid 3) was killed by SIGKILL (9)"
    assert start._cause(2, "error: no room\n") == "no room"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_leaves_nothing_behind(project: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "codescent", "prove", "run.toml", "--steps", "20000", "--layouts", "dp_shard=2"]
    env = environment(TMPDIR=str(tmp_path))
    process = subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("codescent-prove-*/run1/metrics.csv")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not list(tmp_path.glob("codescent-*"))
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        assert str(tmp_path).encode() not in words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "1"], "at least 2"),
        (["--ranks", "1,x"], "'x' is not a whole number"),
        (["--ranks", "999999999989"], "at most 64"),
        (["--layouts", "tp"], "'tp' is not key=value"),
        (["--layouts", "dp_shrad=2"], "'dp_shrad' is not a key of a layout"),
        (["--layouts", "ranks=2"], "'ranks' is not a key of a layout"),
        (["--layouts", "dp_shard=2,dp_shard=4"], "gives a key twice"),
        (["--layouts", "dp_shard=2,zero_stage=7"], "parallel.zero_stage: given 7"),
        (["--layouts", "dp_shard=100"], "from 1 to 64"),
        pytest.param(["model.num_heads=3"], "3 heads do not divide", marks=pytest.mark.slow),  # by the run it starts
        (["--precision", "bf16"], "bf16"),
    ],
)
def test_what_it_refuses(project: Path, words: list[str], expected: str) -> None:
    done = called(project, "prove", "run.toml", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


EXCHANGES = (
    "dp_replicate=2,average_every=1",
    "dp_replicate=2,average_every=1,wire=powersgd:16",
    "dp_replicate=2,gossip=complete",
    "dp_replicate=2,average_every=4,outer_optimizer=nesterov,fragments=2,overlap_steps=1",
    "dp_replicate=2,wire=int4",
    "dp_replicate=2,wire=powersgd:1",
    "dp_replicate=2,wire=powersgd:16",
    "dp_replicate=2,wire=topk:1",
    "dp_replicate=2",
)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimizer.kind=sgd", "optimizer.max_grad_norm=0"), [*["same"] * 3, *["drift"] * 3, *["same"] * 3]),
        (("optimizer.kind=adamw",), [*["drift"] * 6, *["same"] * 3]),
    ],
)
def test_another_method_drifts_and_is_never_the_same(
    project: Path, words: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    layouts = "; ".join(EXCHANGES)
    done = codescent(project, "prove", "run.toml", *words, "--steps", "20", "--layouts", layouts)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rpartition(": ")[2] for line in done.stdout.splitlines() if f" of {len(EXCHANGES)}: " in line]
    assert lines == expected
    assert "drift: another method" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(" dp_replicate=2 wire=int4")]
    loss, _, _, step, _ = row.split()[-5:]
    assert float(loss) > 1e-9
    assert 1 <= int(step) <= 20


SERVED_AND_GOSSIP = {
    "dp_replicate=2,servers=1": "same",
    "dp_replicate=2,servers=3,updates=asynchronous,staleness=0": "same",
    "servers=1,updates=asynchronous": "same",
    "dp_replicate=2,servers=1,updates=asynchronous": "drift",
    "dp_replicate=4,gossip=ring": "drift",
    "dp_replicate=2,gossip=push-sum": "drift",
    "dp_replicate=2,gossip=pairs,gossip_mode=asynchronous": "drift",
}
"""With AdamW and clipping. Without a staleness two asynchronous workers are another method, one is not."""


def verdicts(folder: Path, layouts: Iterable[str], steps: int) -> dict[str, str]:
    """Of `codescent prove`, which must find that all is as it should be, by layout."""
    words = ("run.toml", "--steps", str(steps), "--layouts", "; ".join(layouts))
    done = called(folder, "prove", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"^\d+ of \d+: (.*): (\w+)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("verdict", ["same", "drift"])
def test_servers_and_gossip_are_the_same_or_drift(
    project: Path, forker: Forker, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps, on ranks that are forked."""

    def forked(config: str, words: Sequence[str]) -> start.Ended:
        ranks = next(int(word.partition("=")[2]) for word in words if word.startswith("parallel.ranks="))
        done = forker.run(project, ranks, words)
        return start.Ended(max(code or 0 for code in done.codes), "" if done.codes == [0] * ranks else done.said)

    monkeypatch.setattr(prove, "train_run", forked)
    layouts = [layout for layout, expected in SERVED_AND_GOSSIP.items() if expected == verdict]
    assert verdicts(project, layouts, 4) == {layout.replace(",", " "): verdict for layout in layouts}


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_servers_and_gossip_are_the_same_or_drift_in_20_steps(project: Path) -> None:
    expected = {layout.replace(",", " "): verdict for layout, verdict in SERVED_AND_GOSSIP.items()}
    assert verdicts(project, SERVED_AND_GOSSIP, 20) == expected


def test_graphs_are_compared_where_all_ranks_agree(project: Path) -> None:
    """Before, a row has the loss of one replica: after step 2 all agree, and one process has the same loss."""
    words = ("optimizer.kind=sgd", "optimizer.max_grad_norm=0", "--steps", "4")
    done = codescent(project, "prove", "run.toml", *words, "--layouts", "dp_replicate=2,gossip=complete")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1 of 1: dp_replicate=2 gossip=complete: same\n")


def test_a_layout_that_decides_losses_is_not_resumed_in_one_process(project: Path, tmp_path: Path) -> None:
    prover = prove.Prover(str(project / "run.toml"), (), 8, "fp64", tmp_path, 4)
    apart = LayoutCase((("dp_replicate", "2"), ("average_every", "4")), 2)
    assert apart.period == 4
    assert not prover.continues(apart)
    assert prover.continues(LayoutCase((("dp_replicate", "2"),), 2))
    assert "train.eval_every=4" in prover.words


@pytest.mark.parametrize(
    ("keys", "period"),
    [
        ({"gossip": "ring", "gossip_every": "2", "agree_every": "4"}, 4),
        ({"gossip": "ring", "gossip_every": "2", "agree_every": "auto"}, 2),
        ({"average_every": "0"}, 1),
        ({"average_every": "2 epochs"}, 1),
    ],
)
def test_validations_come_where_all_ranks_meet(keys: dict[str, str], period: int) -> None:
    assert LayoutCase(tuple(keys.items()), 2).period == period


def test_a_replay_with_what_is_not_finite_differs() -> None:
    ones = torch.ones(3)
    assert distance(ones, ones) == distance(0 * ones, 0 * ones) == 0
    assert distance(ones, 2 * ones) == pytest.approx(1)
    assert distance(ones, ones * torch.nan) == distance(ones * torch.nan, ones) == distance(0 * ones, ones) == math.inf


def test_replay_takes_no_other_words(project: Path) -> None:
    """It reads all it needs from the run: a second run would be believed to be replayed, too."""
    done = called(project, "prove", "--replay", "runs/one", "runs/two", "parallel.tp=2", "--steps", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "prove --replay runs/one: CONFIG, overrides, steps would have no effect" in done.stderr


def test_json_has_the_rows_of_the_table() -> None:
    """It would catch a verdict that differs between the two, or infinity, which JSON does not have."""
    findings = [
        LayoutResult("tp=2", 2, {"train_loss": 1e-12, "grad_norm": math.inf, "val_loss": 0.0}, worst_step=3),
        LayoutResult("dp_shard=3", 3, {}, refused="12 samples do not divide"),
        LayoutResult("pp=2", 2, {}, failed="its ranks ended"),
    ]
    found = json.loads(json_text(prove_table.proved_json(findings, 20, "fp64", 1e-9)))
    assert (found["steps"], found["precision"], found["tolerance"]) == (20, "fp64", 1e-9)
    assert [one["verdict"] for one in found["layouts"]] == ["DIFFERS", "refused", "FAILED"]
    assert found["layouts"][0]["differences"] == {"train_loss": 1e-12, "grad_norm": None, "val_loss": 0.0}
    assert [one["reason"] for one in found["layouts"]] == ["", "12 samples do not divide", "its ranks ended"]
    assert [one["worst_step"] for one in found["layouts"]] == [3, None, None]
