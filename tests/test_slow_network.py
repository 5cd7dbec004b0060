"""In: the parts of benchmarks/slow_network.py. Out: that links, keys, kept results, rows and requirements are right.
Does not compare times. Where there is no root or no iproute2, the tests with real hosts are skipped, saying so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hosts  # noqa: E402 - found by the line above: a folder of scripts, no package
import shares  # noqa: E402
import slow_figures  # noqa: E402
import slow_link  # noqa: E402
import slow_losses  # noqa: E402
import slow_methods  # noqa: E402
import slow_rank  # noqa: E402
import slow_state  # noqa: E402
import slow_table  # noqa: E402
from measure import SystemFailed  # noqa: E402
from slow_runs import CHAR, GPT2, Case, Method, Recorded, coding_together, whole_periods  # noqa: E402
from test_benchmarks import script, script_here  # noqa: E402

from codescent.cost.walked import RankMeans, Walk  # noqa: E402
from codescent.launch.environment import read  # noqa: E402

MACHINE = {"cpu": "a", "cores": 2, "torch": "2"}
LINK = {"wanted_mbit": 49.0, "payload_mbit": 49.2, "shaper_mbit": 51.5}
CASE = Case(CHAR, slow_methods.DDP, 2, 1, 2000, 4)
LOCAL = Method("local", ("parallel.dp_replicate={ranks}",), "local_sgd", period=2)

SIMULATED = {
    name: Walk(128 / speed, speed, (RankMeans(128 / speed, 0.064, 0.0, 0.0),))
    for name, speed in (("ddp", 18.0), ("local", 1408.0))
}

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:   11       1    0    0    0     0          0         0       22       1    0    0    0     0       0          0
  eth0: 4300000   44    0    0    0     0          0         0  5400000      55    0    0    0     0       0          0
"""  # noqa: E501


def recorded(step_s: float, losses: list[float], val_loss: float | None = None, steps: int = 6) -> Recorded:
    return Recorded([9.0, 9.0, *[step_s] * (steps - 2)], [0.1] * steps, losses, val_loss, 43e6, 45e6, 60.0)


def learnt(seed: int, val_loss: float, first_losses: tuple[float, ...] = ()) -> slow_losses.Learnt:
    return slow_losses.Learnt("k", "a", 2, seed, 200, "cpu", val_loss, 60.0, list(first_losses), 2, [2.0] * 100)


def sitting(mbit: float = 49.0, hosts_: int = 2, ddp_s: float = 7.0, local_s: float = 0.1) -> slow_table.Sitting:
    times = {"ddp": [recorded(ddp_s, [4.0, 3.0, 2.5])] * 3, "local": [recorded(local_s, [4.0, 3.0, 2.6])] * 3}
    alone = [[replace(recorded(0, [4.0]), seconds=[9.0, *[0.064] * 5])] * hosts_] * 3
    return slow_table.Sitting(hosts_, mbit, LINK, 64 * hosts_, times, alone)


@given(efficiency=st.floats(0.4, 1.2), lost=st.floats(0, 5), wanted=st.sampled_from([49.0, 100.0, 1000.0]))
def test_the_rate_is_found(efficiency: float, lost: float, wanted: float) -> None:
    link = slow_link.find_rate(lambda rate: efficiency * rate - lost, wanted)
    assert abs(link.payload_mbit / wanted - 1) <= slow_link.WITHIN
    assert link.payload_mbit == pytest.approx(efficiency * link.shaper_mbit - lost)


def test_a_rate_that_no_shaper_reaches_is_a_failure() -> None:
    with pytest.raises(SystemFailed, match=r"gives 1000 Mbit/s of payload: nearest 600\.0"):
        slow_link.find_rate(lambda rate: min(rate, 600.0), 1000.0)


def test_shaper_has_a_bucket_of_two_packets_or_of_milliseconds() -> None:
    assert hosts.shaper(51.5)[2:5] == ["51500000bit", "burst", "131072b"]
    assert hosts.shaper(1050)[2:5] == ["1050000000bit", "burst", "262500b"]


def test_counters_of_an_interface() -> None:
    assert hosts.transmitted(NET_DEV, "eth0") == 5_400_000
    with pytest.raises(hosts.HostsFailed, match="has no eth1"):
        hosts.transmitted(NET_DEV, "eth1")


def test_only_our_namespaces_are_ours() -> None:
    listed = "slow12h0 (id: 3)\nslow12sw\nslow12h0x\nslowish\nrh0 (id: 1)\nslow7h11\n"
    assert list(hosts.owners(listed)) == [("slow12h0", 12), ("slow12sw", 12), ("slow7h11", 7)]


def test_each_host_has_one_rank() -> None:
    rank = read(hosts.rank_environment({}, 3, 4, 29_500))
    assert rank is not None
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (3, 4, 0, 1)
    assert rank.master_addr == "10.77.0.1"


def test_times_are_of_whole_periods_after_the_first() -> None:
    assert whole_periods([9, 1, 2, 3], 1) == [1, 2, 3]
    assert whole_periods([9, 9, 1, 3, 5, 7, 100], 2) == [2, 6]
    with pytest.raises(ValueError, match="3 steps are less than two periods of 2"):
        whole_periods([1, 1, 1], 2)


def test_a_key_has_all_that_decides_the_numbers() -> None:
    renamed = replace(CASE, method=replace(CASE.method, name="other", family="wire"))
    assert renamed.key == CASE.key
    others = [
        replace(CASE, work=GPT2), replace(CASE, hosts=4), replace(CASE, seed=2), replace(CASE, schedule_steps=9),
        replace(CASE, steps=5), replace(CASE, mbit=49.0), replace(CASE, round=1), replace(CASE, validates=True),
        replace(CASE, method=replace(CASE.method, overrides=("a=1",))),
        replace(CASE, method=replace(CASE.method, period=2)), replace(CASE, method=replace(CASE.method, servers=1)),
    ]  # fmt: skip
    assert CASE.key == "46682cd3c6eae6f053e8"  # results that were kept before there were servers
    assert len({CASE.key, *(other.key for other in others)}) == len(others) + 1


def test_results_are_kept_between_calls(tmp_path: Path) -> None:
    slow_state.State(tmp_path, MACHINE).put("time", "k", recorded(1.0, [2.0]).to_json(), "words")
    again = slow_state.State(tmp_path, MACHINE)
    kept = again.get("time", "k")
    assert kept is not None
    assert Recorded(**kept) == recorded(1.0, [2.0])
    assert again.get("loss", "k") is None


def test_a_result_that_was_cut_off_is_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow_state.State(tmp_path, MACHINE).put("time", "a", {"x": 1}, "words")
    file = tmp_path / slow_state.FILE
    file.write_bytes(file.read_bytes()[:-9])
    cut = slow_state.State(tmp_path, MACHINE)
    assert "line 1: cut off" in capsys.readouterr().err
    assert cut.get("time", "a") is None
    cut.put("time", "b", {"x": 2}, "words")
    assert slow_state.State(tmp_path, MACHINE).get("time", "b") == {"x": 2}


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [(MACHINE | {"cores": 4}, None, "measured on"), (MACHINE, {"a": 1}, "not a result of this benchmark")],
)
def test_results_of_another_machine_are_refused(
    tmp_path: Path, machine: dict[str, Any], line: Any, expected: str
) -> None:
    slow_state.State(tmp_path, machine).put("time", "a", {"x": 1}, "words")
    if line is not None:
        (tmp_path / slow_state.FILE).write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemFailed, match=expected):
        slow_state.State(tmp_path, MACHINE)


def test_rows_have_speed_and_distance_from_ddp() -> None:
    losses = {
        ("ddp", 2): [learnt(1, 1.98), learnt(2, 2.02)],
        ("local", 2): [learnt(2, 2.03), learnt(1, 1.99)],
    }
    at = sitting()
    ddp, local = slow_table.rows_of([slow_methods.DDP, LOCAL], at, losses, SIMULATED)
    assert ddp["step_s"] == pytest.approx((9 + 4 * 7) / 5)  # period 1: only the first step is warm-up
    assert local["tokens_per_s"] == pytest.approx(1280)
    assert local["x_ddp"] == pytest.approx(1280 / (128 / ddp["step_s"]))
    assert local["over_ddp"] == pytest.approx(0.005)
    assert ddp["ddp_spread"] == pytest.approx(0.02)
    text = slow_table.text_of(at, [ddp, local])
    assert "6.150 MB/s (shaper at 51.50 Mbit/s)" in text
    assert "+0.50 %" in text
    assert local["simulated_off"] == pytest.approx(0.1)
    assert "+10.00 %" in text
    assert "without network" in text


def test_staleness_stands_beside_that_of_the_simulator() -> None:
    at = sitting()
    aged = [replace(run, staleness=age) for run, age in zip(at.times["local"], (1.0, 2.0, 3.0), strict=True)]
    at.times["local"][:] = aged
    found = {"ddp": SIMULATED["ddp"], "local": replace(SIMULATED["local"], staleness=(1, 2, 2, 3))}
    ddp, local = slow_table.rows_of([slow_methods.DDP, LOCAL], at, {}, found)
    assert (local["staleness"], local["simulated_staleness"]) == (2.0, 2.0)
    assert (ddp["staleness"], ddp["simulated_staleness"]) == (None, None)
    assert slow_table.text_of(at, [ddp, local]).count("2.00") == 2


def test_ranks_that_code_are_asked_at_once_for_each_plan() -> None:
    program = "import sys\nfor line in sys.stdin: print([1.0, len(line.strip()), 3.0], flush=True)"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        assert coding_together(started, ["ab", "abcd"]) == {"ab": [1.0, 2.0, 3.0], "abcd": [1.0, 4.0, 3.0]}
        started[1].kill()
        started[1].wait()
        with pytest.raises(SystemFailed, match="has ended"):
            coding_together(started, ["ab"])
    finally:
        for process in started:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # what it was asked last
                process.communicate()


def test_the_bound_is_of_all_ranks_together() -> None:
    at = sitting(hosts_=4)
    assert at.bound() == pytest.approx(4 * 64 / 0.064)


def test_goals_are_of_the_best_method_near_enough() -> None:
    goal = slow_methods.Goal("local_sgd", 50.0, 0.01, bound_share=0.8)
    rows = [{"x_ddp": 80.0, "over_ddp": 0.02}, {"x_ddp": 55.0, "over_ddp": 0.009}, {"x_ddp": 40.0, "over_ddp": None}]
    entry = slow_table.of_goal(goal, rows, 100.0, 2)
    assert (entry["value"], entry["bound"], entry["held"]) == (55.0, 50.0, True)
    assert slow_table.of_goal(goal, rows[:1], 100.0, 2)["held"] is False
    assert slow_table.of_goal(goal, rows[2:], 100.0, 2)["held"] is None
    assert slow_table.of_goal(goal, rows, 59.0, 2)["bound"] == pytest.approx(47.2)
    assert slow_table.of_goal(goal, rows, 60.0, 2)["bound"] == 50.0


def test_goals_hold_on_their_link_for_methods_that_were_measured() -> None:
    rows = slow_table.rows_of([slow_methods.DDP, LOCAL], sitting(), {}, SIMULATED)
    assert [entry["bound"] for entry in slow_table.musts_of(CHAR, sitting(), rows)] == [50.0, 0.15]
    assert list(slow_table.musts_of(CHAR, sitting(mbit=100.0), rows)) == []
    assert [entry["bound"] for entry in slow_table.musts_of(CHAR, sitting(), rows[:1])] == [0.15]


def test_the_simulator_is_judged_by_its_worst_row() -> None:
    rows = slow_table.rows_of([slow_methods.DDP, LOCAL], sitting(), {}, SIMULATED)
    for speed, held in ((1280 * 1.14, True), (1280 * 0.86, True), (1280 * 1.16, False), (1280 * 0.84, False)):
        rows[1]["simulated_off"] = speed / 1280 - 1
        entry = list(slow_table.musts_of(CHAR, sitting(), rows))[-1]
        assert entry["held"] is held
        assert "(local)" in entry["claim"]


@pytest.mark.parametrize(("times", "held"), [(1.71, True), (1.69, False)])
def test_two_servers_carry_more_than_one(times: float, held: bool) -> None:
    rows = slow_table.rows_of([slow_methods.DDP, LOCAL], sitting(), {}, SIMULATED)
    for row, name, speed in zip(rows, slow_methods.SERVERS, (10.0, 10.0 * times), strict=True):
        row |= {"method": name, "tokens_per_s": speed, "family": "servers"}
    (entry, _) = slow_table.musts_of(CHAR, sitting(), rows)
    assert (entry["held"], entry["value"]) == (held, pytest.approx(times))


@pytest.mark.parametrize(("step_s", "held"), [(84.9, True), (77.1, True), (85.3, False), (76.0, False)])
def test_the_lab_is_reproduced_within_a_twentieth(step_s: float, held: bool) -> None:
    at = sitting(ddp_s=step_s)
    at.times["ddp"] = [Recorded([200.0, *[step_s] * 2], [0] * 3, [1.0] * 3, None, 1, 1, 1)]
    (entry,) = slow_table.musts_of(GPT2, at, slow_table.rows_of([slow_methods.DDP], at, {}, SIMULATED))
    assert entry["held"] is held


def test_gpt2_reaches_a_share_of_the_speed_without_network() -> None:
    """With the winner's keys alone."""
    rows = slow_table.rows_of([slow_methods.DDP, LOCAL], sitting(), {}, SIMULATED)
    assert len(list(slow_table.musts_of(GPT2, sitting(), rows))) == 1
    rows[1]["method"] = slow_methods.WINNERS[2]
    _, share = slow_table.musts_of(GPT2, sitting(), rows)
    assert (share["value"], share["bound"]) == (pytest.approx(1280 / 2000), 0.8)


def test_other_first_losses_are_counted() -> None:
    whole = learnt(1, 2.0, (4.0, 3.0, 2.5))
    shaped = [recorded(1, losses) for losses in ([4.0, 3.0, 2.5], [4.0, 3.0, 2.5, 1.0], [4.0, 3.0, 2.5000000001])]
    assert slow_table.unequal(shaped, whole) == 1


def test_losses_are_compared_over_the_same_seeds() -> None:
    ddp = [learnt(seed, loss) for seed, loss in ((1, 2.0), (2, 3.0), (3, 1.0))]
    found = slow_losses.distances([learnt(2, 3.3)], ddp)
    assert found["over_ddp"] == pytest.approx(0.1)
    assert (found["val_losses"], found["ddp_spread"]) == ({"2": 3.3}, 1.0)
    assert slow_losses.distances([], ddp)["over_ddp"] is None
    assert slow_losses.distances([learnt(4, 3.3)], ddp)["over_ddp"] is None


def test_a_method_may_have_the_losses_of_another() -> None:
    same = replace(LOCAL, name="served", learns_as="local")
    at = sitting()
    at.times["served"] = at.times["local"]
    losses = {("ddp", 2): [learnt(1, 2.0)], ("local", 2): [learnt(1, 2.1)]}
    rows = slow_table.rows_of([slow_methods.DDP, LOCAL, same], at, losses, {**SIMULATED, "served": SIMULATED["local"]})
    assert rows[2]["over_ddp"] == pytest.approx(0.05)
    text = slow_table.text_of(at, rows)
    assert "2.1000 (1)" in text
    assert "2.1000 (=)" in text


def test_trainings_are_known_to_later_calls(tmp_path: Path) -> None:
    whole = recorded(1, [4.0, 3.0, 2.0, 1.0] * 50, 1.5, steps=200)
    case = replace(CASE, validates=True)
    one = slow_losses.Learnt.of(case, whole, "cpu")
    assert (one.steps_a_point, one.curve[:2], one.first_losses) == (2, [3.5, 1.5], [4.0, 3.0, 2.0])
    slow_losses.Losses(tmp_path / "l.jsonl").put(one)
    again = slow_losses.Losses(tmp_path / "l.jsonl")
    assert again.get(case) == one
    assert again.get(replace(case, seed=2)) is None
    (tmp_path / "l.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(SystemFailed, match=r"line 1: not a training of this benchmark"):
        slow_losses.Losses(tmp_path / "l.jsonl")


def test_curves_are_means_of_consecutive_steps() -> None:
    assert slow_figures.smoothed([1, 3, 5, 7, 100], 2) == ([2, 4], [2, 6])


def test_figures_are_drawn(tmp_path: Path) -> None:
    rows = [{"method": "ddp", "mbit": mbit, "step_s": 1.0} for mbit in (49.0, 100.0)]
    slow_figures.draw(tmp_path / "a.png", 2, 128, {"ddp": (20, [2.0] * 100)}, rows)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_machine_without_namespaces_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").touch()  # nothing reads it
    done = script_here("slow_network", "--data", str(tmp_path), PATH="")
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: ")


@pytest.fixture
def needs_hosts() -> None:
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_hosts")
def test_two_hosts_reduce_over_a_shaped_link(tmp_path: Path) -> None:
    with hosts.Hosts(2) as made, slow_link.Pair(made, tmp_path) as pair:
        made.shape(100.0)
        before = made.sent_bytes(0)
        assert pair.seconds(1_000_000) > 0
        assert 1_000_000 <= made.sent_bytes(0) - before <= 1_200_000
        names = [made.name(0), made.name(1)]
        assert {name for name, _ in hosts.owners(hosts._do("ip", "netns", "list"))} >= set(names)
    left = {name for name, owner in hosts.owners(hosts._do("ip", "netns", "list")) if owner == os.getpid()}
    assert left == set()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("needs_hosts")
def test_a_table_is_measured_and_then_continued(tmp_path: Path, data_dir: Path) -> None:
    few = ("--hosts", "2", "--rates", "1000", "--seeds", "1", "--steps", "4", "--rounds", "1", "--periods", "2")
    few += ("--methods", "ddp")
    file = tmp_path / "a.json"
    places = ("--data", str(data_dir), "--state", str(tmp_path), "--figures", str(tmp_path), "--json", str(file))
    done = script("slow_network", *few, *places, timeout_s=400)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(file.read_text())["sittings"]
    (row,) = entry["rows"]
    assert row["declared_bytes"] == 42_980_376
    assert row["sent_bytes"] > row["declared_bytes"]
    (must,) = json.loads(file.read_text())["musts"]
    assert must["held"], must
    assert (tmp_path / "slow_network_2_hosts.png").exists()
    again = script("slow_network", *few, *places)
    assert again.returncode == 0, again.stderr
    assert "ddp, 2 hosts" not in again.stderr


def test_tokens_are_those_after_the_first_period_and_before_the_end() -> None:
    assert slow_rank.tokens_per_s(recorded(0.5, [1.0], steps=4), 2, 100) == pytest.approx(200)
    ends = replace(recorded(0.5, [1.0], steps=8), seconds=[9.0, 9.0, 0.5, 0.5, 0.5, 0.5, 7.0, 7.0])
    assert slow_rank.tokens_per_s(ends, 2, 100, end_steps=2) == pytest.approx(200)


@pytest.mark.parametrize("period", [1, 4, 5])
def test_a_period_is_counted_at_least(period: int) -> None:
    setting = slow_rank.Setting("a", (), (1.0,), 8, 12, end_steps=4)
    steps = setting.steps_of(replace(LOCAL, period=period))
    assert steps % period == 0
    assert (steps - 4) // period >= 2


def test_asynchronous_methods_are_compared_with_the_ranks_alone() -> None:
    slow = [{"method": "server, asynchronous", "of_alone": 0.95, "tokens_per_s": 1.0}]
    slow += [{"method": "ddp", "of_alone": 0.3, "tokens_per_s": 1.0}]
    equal = [{"method": name, "tokens_per_s": speed} for name, speed in (("ddp", 103.5), ("mean every 1", 100.0))]
    (shared,), (cost,) = slow_rank.musts_of(slow, 4), slow_rank.musts_of(equal, 0)
    assert (shared["value"], shared["held"]) == (0.95, True)
    assert (cost["value"], cost["held"]) == (pytest.approx(0.035), False)


def test_a_process_gets_no_more_than_its_share() -> None:
    reason = shares.missing()
    if reason:
        pytest.skip(reason)
    spin = "import time\nend = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    with shares.Shares() as groups:
        process = subprocess.Popen(
            [sys.executable, "-c", f"input()\n{spin}"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        groups.limit(process.pid, 0, 0.25)
        out, _ = process.communicate("\n", timeout=30)
        folder = groups.group(0, 0.25)
    assert float(out) < 0.5  # it ran for a second, and had begun before
    assert not folder.exists()
