"""In: keys with values beyond any machine, to each verb that reads a config. Out: answers, soon, in little memory.
Does not check the words: test_refusals and test_train_refusals do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment, make_project

from codescent.plan.pipeline import cut, pipeline

HUGE = 10**18
KEYS = (
    *(f"parallel.{key}" for key in ("ranks", "tp", "pp", "cp", "dp_shard", "dp_replicate")),
    *(f"model.{key}" for key in ("num_layers", "num_heads", "hidden_dim", "ffn_dim", "vocab_size", "seq_len")),
    *("data.seq_len", "train.global_batch_size", "train.microbatch_size"),
)
ONE = "train.microbatch_size=1"
TOGETHER = (
    ["parallel.tp={0}", "parallel.ranks={0}"],
    ["parallel.pp={0}", "parallel.ranks={0}", "model.num_layers=10000"],
    ["parallel.cp={0}", "parallel.ranks={0}", "data.seq_len={0}", "model.seq_len={0}"],
    ["parallel.ranks={0}", "train.global_batch_size=2000000000", ONE],
    ["parallel.pp=64", "parallel.ranks=64", "model.num_layers=64", "train.global_batch_size=100000", ONE],
    ["parallel.pp=2", "parallel.ranks=2", "parallel.schedule=interleaved", "parallel.virtual_stages={0}", ONE],
)
PROGRAM = """
import json, resource, sys, time
from codescent.verbs.cli import run
resource.setrlimit(resource.RLIMIT_AS, (10 << 30,) * 2)  # of addresses: torch's libraries alone have some
for words in json.loads(sys.argv[1]):
    begin = time.monotonic()
    code = run(words)
    (peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss has the parent's
    peak_mib = int(peak.split()[1]) >> 10
    print("answer", json.dumps([words, code, time.monotonic() - begin, peak_mib]), file=sys.stderr, flush=True)
"""
DEADLINE_S = 100
PEAK_MIB = {"config": 200, "plan": 200, "prove": 200, "train": 700}
"""Of the verb, with the torch of train; one answer that runs away takes gigabytes."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux tells it")
@pytest.mark.parametrize(
    "verb", ["config", "train", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("plan", "prove"))]
)
def test_a_refusal_takes_neither_long_nor_much_memory(tmp_path: Path, verb: str) -> None:
    make_project(tmp_path)
    words = [[f"{key}={HUGE}"] for key in KEYS]
    words += [[word.format(number) for word in case] for case in TOGETHER for number in (100_000, HUGE)]
    if verb == "prove":  # which has a layout's keys of --layouts
        words = [[*case, "--steps", "2", f"--layouts=pp=2;tp={HUGE}"] for case in words]
        words += [
            ["train.global_batch_size=2147483647", "data.seq_len=17", "--layouts=pp=2"],
            ["--ranks", str(HUGE // 10)],
        ]
    elif verb == "train":
        words = [[*case, "run.name=never"] for case in words]
    asked = [[verb, "run.toml", *case] for case in words]
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    answers = [json.loads(line[7:]) for line in done.stderr.splitlines() if line.startswith("answer ")]
    assert [answer[0] for answer in answers] == asked, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for case, code, _, peak_mib in answers:
        assert code == 2 or (code == 0 and verb in ("config", "plan")), case
        assert peak_mib < PEAK_MIB[verb], case
    assert not (tmp_path / "runs").exists()


def test_a_deep_model_is_cut_without_trying_every_cut() -> None:
    costs = (1.0, *[100.0] * 10_000, 700.0)
    parts = cut(costs, 100)
    assert max(sum(costs[first:stop]) for first, stop in parts) == 10_100.0
    assert [first for first, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    assert len(pipeline("1f1b", 4, 10_000).programs[0]) > 40_000
