"""In: `codescent collectives`, real ranks, calls that fail in known ways. Out: what is offered, how it ends, the steps.
Does not compare times: benchmarks/all_reduce.py does."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from forker import TESTS, Forker
from rank_server import IN_ORDER
from runs import codescent, started_by

from codescent.base.amounts import of_bytes
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.sizes import size_bytes
from codescent.collectives.calls import CALLS
from codescent.collectives.holdings import explain, in_words, moments
from codescent.collectives.survey import BackendSupport, CallOutcome, Survey
from codescent.collectives.table import cell, column_json, column_of, notes, table, timing, timing_json
from codescent.collectives.task import CRASHES, HANGS, NO, WRONG, YES
from codescent.collectives.timing import timed_bytes
from codescent.verbs.cli import run

EPS = {"torch.float64": 2.0**-52, "torch.float32": 2.0**-23, "torch.bfloat16": 2.0**-7, "torch.int64": 0.0}
FAILING = (sys.executable, str(TESTS / "probed_ranks.py"))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_our_all_reduce_sums_and_all_ranks_get_the_same_bits(forker: Forker, tmp_path: Path, ranks: int) -> None:
    for rank in forker.call("collective_ranks:sums", tmp_path, ranks):
        assert len(rank) == 24
        assert all(one["same"] for one in rank)
        assert all(one["error"] <= ranks * EPS[one["dtype"]] for one in rank)


@pytest.mark.skipif(not IN_ORDER, reason="this torch sorts the ranks of a group")
def test_our_all_reduce_goes_around_a_group_in_its_order(forker: Forker, tmp_path: Path) -> None:
    found = forker.call("collective_ranks:in_a_group", tmp_path, 4)
    assert found[2] is None
    for values, _, refused in (found[3], found[1], found[0]):
        assert values == [3.0 * number + 1000 + 10 + 1 for number in range(7)]
        assert refused == "values are not contiguous"
    assert [list(one.values()) for one in found[1][1]] == [  # rank 1 is the middle one: it sends to 2, hears 0
        ["reduce-scatter", 1, 1, 2, 0, 0],
        ["reduce-scatter", 2, 0, 2, 2, 0],
        ["all-gather", 1, 2, 2, 1, 0],
        ["all-gather", 2, 1, 2, 0, 0],
    ]


STEPS = """
2 ranks: a, b. Each has an array of 2 chunks.
a0 is chunk 0 of rank a.
A > is before what a rank has just received, and added or stored.

at first
        chunk 0 chunk 1
rank a  a0      a1
rank b  b0      b1

reduce-scatter, step 1 of 1
sent: a0 to b, b1 to a
        chunk 0 chunk 1
rank a  a0     >a1+b1
rank b >a0+b0   b1

all-gather, step 1 of 1
sent: a1 to b, b0 to a
        chunk 0 chunk 1
rank a >a0+b0   a1+b1
rank b  a0+b0  >a1+b1

Every rank holds every sum. Each has sent 2 chunks: 1 times its array.
""".strip().splitlines()


def test_the_steps_of_two_ranks(forker: Forker, tmp_path: Path) -> None:
    ranks = forker.call("collective_ranks:steps", tmp_path, 2)
    assert list(explain(ranks)) == STEPS
    first, middle, last = json.loads(json_text(moments(ranks)))
    assert first == {"phase": None, "step": None, "messages": [], "holds": [["a0", "a1"], ["b0", "b1"]]}
    assert middle["messages"][0] == {"sent": 0, "to": 1, "received": 1, "came_from": 1}
    assert (last["phase"], last["holds"]) == ("all-gather", [["a0+b0", "a1+b1"]] * 2)


def test_json_of_collectives_has_what_the_table_has() -> None:
    """It would catch a call that the table shows as possible and JSON does not."""
    column = BackendSupport(
        "gloo", "cpu", "", {"send fp32": CallOutcome(YES), "all_reduce (mean) bf16": CallOutcome(NO, "x")}
    )
    found = column_json(column)
    assert found["calls"]["send"] == {"fp32": {"state": YES, "why": ""}}
    assert found["calls"]["all_reduce (mean)"] == {"bf16": {"state": NO, "why": "x"}}
    rank = {
        "seconds": {"ours": [2.0, 4.0, 3.0], "backend": [1.0, 2.0, 1.5]},
        "same_bits": {"ours": True},
        "difference": 0.0,
    }
    assert timing_json([rank, {**rank, "same_bits": {"ours": False}, "difference": 1e-7}]) == {
        "ours_s": [2.0, 4.0, 3.0], "backend_s": [1.0, 2.0, 1.5], "times_as_long": 2.0,
        "same_bits": False, "difference": 1e-7,
    }  # fmt: skip


def test_the_steps_of_three_and_eight_ranks_end_with_all_sums(forker: Forker, tmp_path: Path) -> None:
    for ranks in (3, 8):
        said = list(explain(forker.call("collective_ranks:steps", tmp_path, ranks)))
        assert max(map(len, said)) <= 80
        assert said[-1].startswith("Every rank holds every sum.")
        assert sum(line.startswith(("reduce-scatter, ", "all-gather, ")) for line in said) == 2 * (ranks - 1)
        last = said[-2 - ranks : -2]
        whole = ["+".join(f"{name}{chunk}" for name in "abc") for chunk in range(3)] if ranks == 3 else ["abcdefgh"] * 8
        assert [line.replace(">", " ").split()[2:] for line in last] == [whole] * ranks


def test_what_is_held_is_read_from_the_numbers() -> None:
    """Also what a broken all-reduce would leave: a share twice, a share of another chunk, a sum that is missing."""
    assert in_words([1 + 16, 0], 0, short=False) == "a0+b0"
    assert in_words([1 + 16, 0], 0, short=True) == "ab"
    assert in_words([1 + 2 * 16, 0], 0, short=False) == "a0+b0+b0"
    assert in_words([1, 16], 0, short=True) == "a0+b1"
    state = {"holds": [[17, 0], [0, 16]]}
    assert list(explain([[state], [state]]))[-1] == "WRONG: not every rank holds every sum."


NOT_IN_GLOO = ("all_to_all",) if torch.__version__ < (2, 12) else ()
"""Calls that gloo refuses: torch 2.11's takes no list of tensors for all ranks."""


def test_every_call_is_right_on_gloo(forker: Forker, tmp_path: Path) -> None:
    for rank in forker.call("collective_ranks:called", tmp_path, 3):
        assert len(rank) == 2 * len(CALLS)
        assert {name.split()[0] for name, why in rank.items() if why} == set(NOT_IN_GLOO)


def test_a_collective_that_does_nothing_is_found(forker: Forker, tmp_path: Path) -> None:
    found = forker.call("collective_ranks:broken", tmp_path, 2)
    assert found[0]["broadcast"].startswith("broadcast gave [1.0, 1.0")
    assert found[1]["broadcast"] == ""  # the root
    assert all(rank["all_reduce"].startswith("all_reduce gave [") for rank in found)
    assert found[0]["barrier"] == "barrier gave False; right is True"


def states(column: BackendSupport) -> dict[str, str]:
    return {name: outcome.state for name, outcome in column.outcomes.items()}


def test_a_call_that_hangs_is_ended_and_the_next_one_tried(capfd: pytest.CaptureFixture[str]) -> None:
    column = BackendSupport("gloo", "cpu")
    Survey(2, 6.0, FAILING).probe(column, ["raises", "raises_in_bf16", "waits", "all_reduce"])
    assert states(column) == {
        "raises fp32": NO,
        "raises_in_bf16 fp32": YES,
        "raises_in_bf16 bf16": NO,
        "waits fp32": HANGS,
        "all_reduce fp32": YES,
        "all_reduce bf16": YES,
    }
    assert column.outcomes["raises fp32"].why == "this backend cannot do that at all"
    assert column.outcomes["waits fp32"].why == "ended after 6 s"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_what_fails_on_one_rank_alone_spoils_no_other_call(capfd: pytest.CaptureFixture[str]) -> None:
    column = BackendSupport("gloo", "cpu")
    calls = ["wrong", "one_raises", "crashes", "holds_the_interpreter", "all_reduce", "barrier"]
    Survey(2, 6.0, FAILING).probe(column, calls)
    assert states(column) == {
        "wrong fp32": WRONG,
        "one_raises fp32": NO,
        "crashes fp32": CRASHES,
        "holds_the_interpreter fp32": CRASHES,
        **{f"{call} {dtype}": YES for call in ("all_reduce", "barrier") for dtype in ("fp32", "bf16")},
    }
    assert column.outcomes["wrong fp32"].why == "wrong gave [1.0, 2.0]; right is [1.0, 3.0]"
    assert column.outcomes["one_raises fp32"].why == "only here"
    assert column.outcomes["crashes fp32"].why == "a rank was ended by SIGKILL"
    assert column.outcomes["holds_the_interpreter fp32"].why == "a rank was ended by SIGALRM"
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_a_group_that_cannot_be_made_says_why_for_every_call() -> None:
    """gloo's group by a transport that does not exist."""
    column = BackendSupport("gloo", "cpu")
    command = ("env", "GLOO_DEVICE_TRANSPORT=nowhere0", sys.executable, "-m", "codescent.collectives")
    Survey(2, 20.0, command).probe(column, ["send", "all_reduce"])
    assert states(column) == {"send fp32": NO, "all_reduce fp32": NO}
    assert column.outcomes["send fp32"].why == "makeDeviceForInterface(): unsupported gloo device"


def test_the_table_names_what_is_missing_and_why() -> None:
    yes, no = CallOutcome(YES), CallOutcome(NO, "ProcessGroupGloo::send: unsupported device type cuda")
    shown = [
        BackendSupport("gloo", "cpu", "", {"send fp32": yes, "send bf16": yes, "reduce fp32": yes, "reduce bf16": no}),
        BackendSupport("gloo", "cuda", "", {"send fp32": no, "reduce fp32": CallOutcome(HANGS, "ended after 30 s")}),
        BackendSupport("mpi", "cpu", "not in this torch"),
        BackendSupport("mpi", "cuda", "not in this torch"),
        BackendSupport("nccl", "cpu", "", {"send fp32": no, "reduce fp32": no}),
        BackendSupport("nccl", "cuda", "no CUDA device"),
    ]
    assert list(table(shown, ["send", "reduce"])) == [
        "        gloo              mpi       nccl",
        "        CPU        GPU    CPU  GPU  CPU   GPU",
        "send    yes        no     -    -    no    -",
        "reduce  fp32 only  hangs  -    -    no    -",
    ]
    assert list(notes(shown, 2, 1)) == [
        "yes: called by all ranks in fp32 and bf16, and every result is right",
        "-    mpi: not in this torch",
        "-    nccl on GPU: no CUDA device",
        "GPU: 2 ranks share 1 GPU, which some backends refuse",
        "gloo on CPU: reduce in bf16; gloo on GPU: send; nccl on CPU: send, reduce: no:",
        "     ProcessGroupGloo::send: unsupported device type cuda",
        "gloo on GPU: reduce: hangs: ended after 30 s",
    ]


def test_the_timing_says_how_the_sums_agree() -> None:
    def rank(same: bool, difference: float) -> dict[str, Any]:
        seconds = {"ours": [0.03, 0.02, 0.5], "backend": [0.01, 0.02, 0.03]}
        return {"seconds": seconds, "same_bits": {"ours": same, "backend": True}, "difference": difference}

    said = list(timing("gloo on CPU", "16.00 MiB", [rank(True, 0.0), rank(True, 1e-7)]))
    assert said[1:] == [
        "  ours 30 ms, the backend's 20 ms: 1.50 times as long",
        "  ours gives the same bits on every rank; its sums are the backend's to 1.0e-07 of the largest sum",
    ]
    assert "bit for bit" in list(timing("", "", [rank(True, 0.0)]))[-1]
    assert "DIFFERENT BITS" in list(timing("", "", [rank(True, 0.0), rank(False, 0.0)]))[-1]


REFUSED = {
    "no ranks": (["--ranks", "0"], "argument --ranks: '0' is not a whole number of at least 1"),
    "one rank": (["--ranks", "1"], "--ranks 1: one rank sends nothing; give at least 2"),
    "too many": (["--ranks", "1000"], "--ranks 1000: at most 64 ranks can be tried on one machine"),
    "too many to show": (["--explain", "--ranks", "9"], "--ranks 9: at most 8 ranks can be shown in 80 columns"),
    "no size": (["--size", "nonsense"], "argument --size: 'nonsense' is not a size, such as 16MiB"),
    "a size below a byte": (["--size", "0.5"], "argument --size: '0.5' is not a size"),
    "a size without end": (["--size", "9" * 15 + "GiB"], "more than half of this machine's memory; give at most "),
    "both": (["--explain", "--size", "1MiB"], "--size: is of the timed all-reduces; --explain shows a small array"),
    "too much time": (["--timeout", "99999999999"], "--timeout 99999999999: at most 86400 seconds, which is a day"),
    "no time": (["--timeout", "0"], "argument --timeout: '0' is not a whole number of at least 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_input_is_one_message(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[what]
    code: object = None
    try:
        code = run(["collectives", *words])
    except SystemExit as end:  # of argparse
        code = end.code
    assert code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error: ") == 1
    assert expected in said.err


def test_a_launcher_around_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert run(["collectives"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: collectives: this process is rank 1 of 2, numbered by the variables of torchrun")
    assert "run it without a launcher" in said


def test_the_size_that_is_timed_is_the_size_that_is_said() -> None:
    assert [timed_bytes(size) for size in (1, 4, 7, 8, 2**24)] == [4, 4, 4, 8, 2**24]


def test_a_full_folder_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot write what they found end with an error, whose log cannot be written either."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="no space left on the disk; set TMPDIR to a folder with free space"):
        Survey(2, 6.0, (sys.executable, "-c", "raise SystemExit(1)")).explain()


def test_sizes() -> None:
    found = [size_bytes(word) for word in ("16MiB", "64 KiB", "1.5kB", "4096", "7B", "2GiB")]
    assert found == [2**24, 2**16, 1500, 4096, 7, 2**31]
    assert [of_bytes(size) for size in found] == [
        "16.00 MiB", "64.00 KiB", "1.46 KiB", "4.00 KiB", "7 bytes", "2.00 GiB",
    ]  # fmt: skip


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    done = codescent(tmp_path, "collectives", "--ranks", "2", "--size", "64KiB")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on this machine, torch ")
    assert lines[2].split()[:3] == ["gloo", "mpi", "nccl"]
    rows = {" ".join(words[:-6]): words[-6:] for words in map(str.split, lines[4 : 4 + len(CALLS)])}
    assert list(rows) == list(CALLS)
    assert [name for name, cells in rows.items() if cells[0] != "yes"] == list(NOT_IN_GLOO)
    assert max(map(len, lines[:-3])) <= 80
    assert "ours gives the same bits on every rank; its sums are the backend's bit for bit" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_the_page_has_the_table_of_the_result_that_was_kept() -> None:
    """Fault: the table of the page is not the one that was made, or a call that fails is shown as one that works."""
    root = TESTS.parent
    kept = root / "benchmarks" / "results" / "collectives_cpu_2cores.json"
    words = [sys.executable, str(root / "benchmarks" / "collectives.py"), "--table", str(kept)]
    made = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100).stdout
    assert made in (root / "docs" / "collectives.md").read_text(encoding="utf-8")
    column = BackendSupport("gloo", "cpu", "", {"send fp32": CallOutcome(YES), "send bf16": CallOutcome(NO, "refused")})
    assert column_of(json.loads(json_text(column_json(column)))) == column
    assert cell(column, "send") == "fp32 only"


@pytest.mark.slow
def test_the_command_shows_steps_of_four_ranks(tmp_path: Path) -> None:
    done = codescent(tmp_path, "collectives", "--explain")
    assert "rank d >a0+b0+c0+d0 b1+c1+d1    c2+d2       d3" in done.stdout.splitlines()
    assert done.stderr == ""


def has_begun(rank: psutil.Process) -> bool:
    """Whether a rank has left the begin of the interpreter, which makes a failure (exit code 1) of a SIGINT."""
    return bool(rank.memory_info().rss > 40 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "codescent", "collectives", "--ranks", "2", "--size", "256MiB"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ranks: list[psutil.Process] = []
        deadline = time.monotonic() + 100
        while not (len(ranks) == 2 and all(map(has_begun, ranks))) and time.monotonic() < deadline:
            time.sleep(0.05)
            with suppress(psutil.NoSuchProcess):
                ranks = started_by(process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not [rank for rank in ranks if rank.is_running()]
