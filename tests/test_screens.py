"""In: plans, steps of a run, times of steps. Out: what a user reads fits 80 columns, and says what happens and why.
Does not test what the numbers are: test_build, test_cost_* and test_train_* do."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from runs import called, environment, make_project

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.preflight import plan_of
from codescent.train import pace
from codescent.train.display import Display, StepShown, clock
from codescent.train.display import _norm as display_norm
from codescent.train.pace import Estimate, waited_s
from codescent.verbs.cli import run
from codescent.verbs.columns import columns
from codescent.verbs.plan_rows import plan_rows

MESHES = (
    (),
    ("parallel.pp=4", "parallel.tp=2", "parallel.dp_shard=2", "parallel.cp=2", "parallel.zero_stage=1"),
    ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.tp=2"),
    ("parallel.dp_shard=4",),
    ("parallel.offload=all", "parallel.dp_shard=2"),
    ("parallel.offload=optimizer", "optimizer.kind=sgd", "optimizer.momentum=0.5", "model.num_layers=1"),
    ("parallel.data_parallel=2",),
)


NAMES = ("default", "gpt2_124m", "gpt2_1558m_openwebtext", "synthetic_transformer")


@given(st.sampled_from(NAMES), st.sampled_from(MESHES), st.sampled_from((1, 8, 64, 4096)), st.integers(60, 200))
def test_a_plan_fits_its_terminal_and_loses_no_word(name: str, words: tuple[str, ...], ranks: int, width: int) -> None:
    try:
        config = load(name, words).config
        plan = plan_of(config, ranks)
    except UserError:  # no such plan
        return
    rows = plan_rows(plan, "1,000", config)
    text, piped = columns(rows, width), columns(rows, 10_000)
    assert max(map(len, text.splitlines())) <= width
    assert text.split() == piped.split()
    assert len(piped.splitlines()) == sum(len(lines) for _, lines in rows)  # one line for each fact
    assert "(s)" not in text
    assert ": 0 bytes" not in text  # traffic
    assert not re.search(r"\b1 (layer|head|rank|sample|micro-batche|epoch|optimizer tensor)s\b", text)
    assert "\x1b" not in text


def test_copies_between_memories_have_their_bytes() -> None:
    plan = plan_of(load("default", ["parallel.offload=optimizer"]).config, 1)
    numel = sum(tensor.parameter.numel for tensor in plan.tensors)
    (row,) = [lines for name, lines in plan_rows(plan, "1") if name == "traffic per step"]
    what = "gradients, to the host; weights, to the device"
    assert row[0] == f"2 copy between device and host ({what}): {2 * 4 * numel / 2**20:,.2f} MiB"


@given(st.integers(2, 10**6), st.sampled_from(("rank", "micro-batch", "epoch")))
def test_one_is_singular(number: int, noun: str) -> None:
    assert (counted(1, noun), counted(1.0, noun)) == (f"1 {noun}",) * 2
    for many in (0, number, 0.5):
        assert counted(many, noun).endswith(" micro-batches" if noun == "micro-batch" else f" {noun}s")
    assert float(counted(number, noun).split()[0].replace(",", "")) == number


def test_a_table_is_not_broken_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a" * 150
    assert run(["config", "default", f"run.name={name}"]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_one_rank_needs_no_broken_line(name: str) -> None:
    config = load(name, []).config
    plan = plan_of(config, 1)
    rows = plan_rows(plan, "1,000", config)
    found = columns(
        [row for row in rows if row[0] != "task"], 10_000
    )  # the task names the corpus, a path of any length
    assert max(map(len, found.splitlines())) <= 80


def shown(width: int | None, step: int, num_steps: int, rate: float, mfu: float, peak: int, loss: float) -> str:
    """What a step prints; width: of a terminal, None: a pipe."""
    display, out = Display(shown=True, num_steps=num_steps, first_step=0), io.StringIO()
    display.console = Console(
        file=out, force_terminal=width is not None, width=width, highlight=False, soft_wrap=True, legacy_windows=False
    )
    with display:
        display.step(StepShown(step, loss, 5.93e-4, 0.5234, rate, mfu, peak), due=True)
    return out.getvalue()


def test_the_losses_stay_above_the_bar_and_the_last_step_comes_before_the_end() -> None:
    """On a terminal of 80 columns, as a person sees it: what is printed stays, the bar is gone."""
    display, out = Display(shown=True, num_steps=9, first_step=0), io.StringIO()
    display.console = Console(file=out, force_terminal=True, width=80, highlight=False, soft_wrap=True)
    with display:
        for step in range(1, 8):
            display.step(StepShown(step, 8.0 - step, 1e-3, 1.0, 1e4, 0.5, 2**30), due=step % 3 == 0)
        display.last()
        display.say("stopped at step 7")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "━" in text, "a bar at 80 columns"
    kept = [line for line in re.split(r"[\r\n]+", text) if "tok/s" in line or "stopped" in line]
    assert [line.split("  loss")[0].strip() for line in kept] == [
        "step 3/9",
        "step 6/9",
        "step 7/9",
        "stopped at step 7",
    ]


@given(
    st.sampled_from((None, 80, 90, 120)),
    st.integers(1, 600_000),
    st.floats(1, 9.9e8),
    st.floats(0, 0.99),
    st.integers(2**20, 999 * 2**30),
)
def test_a_step_is_one_line_that_fits(width: int | None, step: int, rate: float, mfu: float, peak: int) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(width, step, 600_000, rate, mfu, peak, 12.345678))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    line = next(line for line in lines if "tok/s" in line)
    number = r"[\d.,]+"
    rest = [f"  MFU {number}%", f"  peak {number} [GM]iB"][: {80: 0, 90: 1}.get(width or 0, 2)]
    parts = (f"loss {number}", "lr 5.9e-4", "norm 0.52", f"{number}[kM]? tok/s")
    assert re.fullmatch(f"step {step}/600000  {'  '.join(parts)}{''.join(rest)}  ETA [\\d:dh]+", line)
    assert width is None or max(map(len, lines)) <= width


def test_a_step_of_a_short_run_has_mfu_in_80_columns() -> None:
    """The peak alone gives way, in all steps alike: a column that comes and goes is hard to read."""
    texts = [shown(80, step, 999, 9614, 0.49, 2**30, 3.6136) for step in (1, 999)]
    assert all("norm 0.52  9,614 tok/s  MFU 49%  ETA" in text for text in texts)
    assert "peak 1.0 GiB" in shown(None, 1, 999, 9614, 0.49, 2**30, 3.6136)


@pytest.mark.parametrize(
    ("norm", "text"),
    [(0.5234, "0.52"), (12.34, "12"), (123.4, "1.2e2"), (4e-6, "4.0e-6"), (0.0, "0"), (math.nan, "nan")],
)
def test_a_norm_has_two_digits(norm: float, text: str) -> None:
    assert display_norm(norm) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(65, "1:05"), (3599.6, "1h00"), (7265, "2h01"), (3 * 86400 + 4 * 3600, "3d04h")]
)
def test_a_clock(seconds: int, text: str) -> None:
    assert clock(seconds) == text


def estimated(step_s: float, *, peak: float, waits: float, expected: float | None, first_step: int = 0) -> list[str]:
    """What an estimate says in 1000 steps of 1e9 FLOPs with two threads, each of which waits a share of the time."""
    ticks, waited = count(0, step_s), count(0)
    told = Estimate(1000, first_step, 1e9, peak, 2, expected, now=lambda: next(ticks))
    steps = 1 + max(pace.MEASURED_STEPS, -(-pace.MEASURED_S // step_s))
    with pytest.MonkeyPatch.context() as patch:  # the scheduler of a machine with other programs
        patch.setattr(pace, "waited_s", lambda: next(waited) * waits * 2 * (steps - 1) * step_s)
        return [said for step in range(first_step + 1, first_step + 1001) if (said := told.after(step)) is not None]


def test_the_time_of_a_run_is_said_once_and_why_it_is_longer_than_expected() -> None:
    assert estimated(0.1, peak=1e11, waits=0.0, expected=None) == ["about 1:40 for 1,000 steps of 100 ms"]
    assert estimated(0.1, peak=1e11, waits=0, expected=None, first_step=500) == ["about 1:40 for 1,000 steps of 100 ms"]
    assert estimated(0.1, peak=1e11, waits=0.4, expected=2.0) == ["about 1:40 for 1,000 steps of 100 ms"]
    (busy,) = estimated(0.3, peak=1e11, waits=0.4, expected=2.0)
    assert busy.startswith("about 5:00 for 1,000 steps of 300 ms; more than the 2 minutes of log.expected_minutes: ")
    assert "other programs kept its 2 threads waiting for a core 40% of the time" in busy
    (slow,) = estimated(0.3, peak=5e9, waits=0.01, expected=2.0)
    assert "this processor's matrix products reach 5 GFLOP/s, which is too slow" in slow
    assert "(products 5 GFLOP/s, the run 3 GFLOP/s, needed 8 GFLOP/s)" in slow
    (other,) = estimated(0.3, peak=1e11, waits=0.01, expected=2.0)
    assert "a step does more than matrix products, or its products are small (products 100 GFLOP/s" in other
    assert "too slow" not in other
    assert estimated(0.001, peak=1e11, waits=0.4, expected=0.001) == []  # it ends in seconds


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count the wait for a core")
def test_waiting_for_a_core_is_counted() -> None:
    cores, rival = os.sched_getaffinity(0), None

    def compute() -> None:
        for _ in range(200):
            sum(range(20_000))

    before_s = waited_s()
    try:
        os.sched_setaffinity(0, {min(cores)})
        rival = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(200):  # until the rival has started, and had its turns
            compute()
            if waited_s() > before_s + 0.02:
                break
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        os.sched_setaffinity(0, cores)
        if rival is not None:
            rival.kill()
            rival.wait()
    assert waited_s() > before_s + 0.02


def test_a_run_says_what_it_does_before_it_does_it(tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ("log.sample_tokens=8", "log.sample_prompt=many ", "log.sample_temperature=0", "train.num_steps=2")
    done = called(tmp_path, "train", "run.toml", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["run", "data"]
    assert lines[0] == "run     runs/default"
    labels = {line.split()[0]: line for line in lines[2:6]}
    assert labels["task"].startswith("task    lm: predict each next token; corpus corpus.txt")
    assert "2 layers, 16 channels, vocabulary 257; 10,960 parameters" in labels["model"]
    assert labels["batch"].endswith("128 tokens per step, 2 steps (0.02 epochs)")
    assert re.search(r"cpu \(.+\), 1 thread, fp32, products [\d,]+ GFLOP/s", labels["device"])
    assert lines.index(labels["device"]) < next(n for n, line in enumerate(lines) if line.startswith("step "))
    text = lines.index("A text generated by the trained model:") + 2
    assert lines[text].startswith("many ")
    again = called(tmp_path, "sample", "runs/default", "--tokens", "8", "--prompt", "many ", "--temperature", "0")
    assert again.stdout.strip() == "\n".join(lines[text:]).split("\n\nThe run is in")[0].strip()


def test_the_first_lines_are_there_before_torch_is(tmp_path: Path) -> None:
    make_project(tmp_path)
    program = (
        "import json, sys; from codescent.verbs import cli, train\n"
        "train._train = lambda *words, **more: print(json.dumps('torch' in sys.modules)) or 0\n"
        "sys.exit(cli.run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    *said, torch = done.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["run", "data"]
    assert json.loads(torch) is False
