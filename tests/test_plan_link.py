"""In: command lines of `codescent plan` with a link. Out: rows and pictures of the ranks, or one refusal.
Does not test the numbers: test_simulate_ranks does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import called

from codescent.clusters.by_links import cluster_of_text
from codescent.clusters.link import Link
from codescent.planner.links import slow_of

PLAN = ("plan", "gpt2_124m", "train.precision=fp32", "train.global_batch_size=4", "train.microbatch_size=1")
LINK = ("--ranks", "4", "--link", "49mbit,0.2ms", "--compute-s", "0.3")
BY_MEMORY = "an element, not measured: by {} GB/s of memory"
NO_CODING = ("--coding", "999999999GB/s")
LOCAL = (
    "parallel.average_every=100",
    "parallel.fragments=4",
    "parallel.overlap_steps=5",
    "parallel.wire=int4",
    "parallel.wire_from=200",
    "parallel.synchronous_steps=100",
    "parallel.outer_optimizer=nesterov",
)


def asked(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = called(Path(), *words)
    return done.returncode, done.stdout, done.stderr


def rows(text: str) -> dict[str, list[str]]:
    """The lines of each row of a plan."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        name = line[:18].strip() or name
        found.setdefault(name, []).append(line[18:])
    return found


def test_a_link_adds_what_the_ranks_do() -> None:
    code, out, err = asked(*PLAN, *LINK)
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["simulated"] == ["6.12 MB/s and 200 µs between 4 hosts of 1 rank; no link is measured"]
    assert found["arithmetic"] == ["300 ms a step and rank"]
    assert found["step"] == ["2.03 min: 33.6 tokens/s"]
    assert found["waiting"] == ["2.03 min of a step; the busiest rank computes 0.2 % of it"]
    assert found["period"] == ["average_every = 1,632 or more keeps 80 % of the speed without a network"]


FIGURES = json.loads((Path(__file__).parent / "link_figures.json").read_text())
"""Command lines, and rows that they printed when hosts had only links, and no cluster (commit 41a44222)."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: " ".join(case["words"][4:]))
def test_every_figure_of_a_link_is_what_it_was(case: dict) -> None:
    """A cluster that is read from --link alone changes no figure by more than 1 %, and no word."""
    code, out, err = asked("plan", *case["words"])
    assert (code, err) == (0, "")
    found = rows(out)
    for name, lines in case["rows"].items():
        for said, before in zip(found[name], lines, strict=True):
            assert NUMBER.sub("", said) == NUMBER.sub("", before)
            numbers = ([float(one.replace(",", "")) for one in NUMBER.findall(line)] for line in (said, before))
            assert next(numbers) == pytest.approx(next(numbers), rel=0.01)


SMALL = ("plan", "gpt2_124m", "train.global_batch_size=32", "train.microbatch_size=1")
SERVED = (*SMALL, "--ranks", "17", "parallel.dp_replicate=16", "parallel.servers=1")


def test_ranks_with_portions_are_walked_on_the_links_of_a_cluster() -> None:
    """Until now --cluster refused them, and --link knew neither devices nor links inside of hosts."""
    code, out, err = asked(*SERVED, "--cluster", "h100-sxm")
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["simulated"] == [
        "37.5 GB/s and 9 µs between 3 hosts of 8 ranks, 8 cards each; arithmetic and links inside of h100-sxm",
        "inside a host: 338 GB/s and 6 µs",
    ]
    assert {"step", "waiting", "load"} <= set(found)
    assert "not in the time" not in found
    slower = rows(asked(*SERVED, "--cluster", "h100-sxm", "--with", "links.between=1GB/s,5us")[1])
    assert step_s(slower) > 2 * step_s(found)
    pairs = (*SMALL, "--ranks", "16", "parallel.gossip=pairs", "parallel.gossip_mode=asynchronous")
    code, out, err = asked(*pairs, "--cluster", "h100-sxm")
    assert (code, err) == (0, "")
    assert "staleness" in rows(out)
    code, out, err = asked(*SERVED, "--cluster", "h100-sxm", "--most", "data.seq_len", "--json")
    assert (code, out) == (2, "")
    why = "ranks that are given portions of work have no common step, so they are simulated and have no price"
    assert err.splitlines() == [f"error: --most: {why}; leave it out", f"error: --json: {why}; leave it out"]


def step_s(found: dict[str, list[str]]) -> float:
    number, unit = re.split(r"[:,]", found["step"][0])[0].split()
    return float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]


def test_a_link_replaces_the_cards_of_a_cluster() -> None:
    """Its devices say how long the arithmetic takes, and what stays in a host takes its link inside."""
    words = (*SMALL, "--ranks", "16", "--cluster", "h100-sxm", "--link", "1gbit,0.1ms; 1: 100mbit")
    code, out, err = asked(*words)
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["simulated"] == [
        "125 MB/s and 100 µs between 2 hosts of 8 ranks; arithmetic and links inside of h100-sxm",
        "inside a host: 338 GB/s and 6 µs",
        "host 1: 12.5 MB/s and 100 µs",
    ]
    ring_s = 2 * 15 / 16 * 2 * 124_439_808 / 12.5e6  # gradients in bf16
    assert step_s(found) == pytest.approx(ring_s, rel=0.02)
    given = rows(asked(*words, "--compute-s", "2")[1])
    assert given["arithmetic"] == ["2.00 s a step and rank"]
    inside = rows(asked(*words, "parallel.tp=4")[1])
    slower = rows(asked(*words, "parallel.tp=4", "--with", "links.inside=100MB/s,1us")[1])
    assert step_s(slower) > 1.3 * step_s(inside)
    code, out, err = asked(*words, "--per-host", "4", "--inside", "1GB/s", "--memory", "8GB", "--mtbf", "3")
    assert (code, out) == (2, "")
    assert [re.split(r"[:;]", line.removeprefix("error:"))[0].strip() for line in err.splitlines()] == [
        "--mtbf and --save-s",
        "--per-host",
        "--inside",
        "--memory",
        "--mtbf",
    ]
    assert "change it by --with node.devices=N" in err
    code, out, err = asked(
        *SMALL, "--ranks", "16", "--cluster", "p4000-lab", "--with", "node.nodes=4", "--link", "1gbit"
    )
    assert (code, out) == (2, "")
    assert err == "error: --cluster: p4000-lab has 4 nodes of 1 device, 4 in all; the plan has 16\n"


ROUNDS = ("parallel.servers=1", "parallel.dp_replicate=4", "parallel.average_every=25", "--ranks", "5")
PERIODS = {
    "ring": ("gossip_every", ("parallel.gossip=ring", "parallel.gossip_every=8", "--ranks", "4")),
    "pairs": ("gossip_every", ("parallel.gossip=pairs", "parallel.gossip_mode=asynchronous", "--ranks", "4")),
    "synchronous servers": ("average_every", ROUNDS),
    "asynchronous servers": ("average_every", (*ROUNDS, "parallel.updates=asynchronous")),
}


@pytest.mark.parametrize("method", PERIODS)
def test_the_least_period_of_each_method_keeps_the_computing(method: str) -> None:
    """Whatever the config has for what is due at multiples of its period."""
    key, words = PERIODS[method]
    link = (*PLAN, "--link", "4gbit,0.02ms", "--compute-s", "0.3", "--coding", "1000GB/s")
    code, out, err = asked(*link, *words, "checkpoint.every=1000", "train.eval_every=1000")
    assert (code, err) == (0, "")
    (said,) = rows(out)["period"]
    least = int(said.removeprefix(f"{key} = ").removesuffix(" or more keeps 80 % of the speed without a network"))
    assert least > 4
    due = ("checkpoint.every=0", "train.eval_every=0", "train.eval_samples=auto")

    def share(period: int) -> float:
        """Of their time in which ranks that train compute, walked in whole."""
        steps = f"train.num_steps={100 * period}"
        code, out, _ = asked(*link, *words, *due, f"parallel.{key}={period}", steps)
        assert code == 0
        (step,) = rows(out)["step"]
        number, unit = re.split(r"[:,]", step)[0].split()
        return 0.3 / (float(number) * {"ms": 1e-3, "s": 1.0}[unit])

    assert 0.79 < share(least) < 0.85
    assert share(least // 2) < 0.78


def test_single_hosts_have_links_of_their_own() -> None:
    code, out, err = asked(*PLAN, *LINK[:3], "49mbit,0.2ms; 3: 10mbit,5ms; 0:1gbit", *LINK[4:])
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["simulated"] == [
        "6.12 MB/s and 200 µs between 4 hosts of 1 rank; no link is measured",
        "host 0: 125 MB/s and 200 µs",
        "host 3: 1.25 MB/s and 5.00 ms",
    ]
    assert found["step"] == ["9.96 min: 6.85 tokens/s"]
    assert found["period"] == ["average_every = 7,971 or more keeps 80 % of the speed without a network"]


def test_every_problem_of_a_link_is_said_at_once() -> None:
    words = "49mbit,0.2ms; 3: 10mbit; 3: 1gbit; x: 3mbit; 2: fast; 10mbit,5"
    code, out, err = asked(*PLAN, *LINK[:3], words, *LINK[4:], "--slow", "4x")
    assert (code, out) == (2, "")
    problems = [line.removeprefix("error: ").strip() for line in err.splitlines()]
    such = "such as 49mbit,0.2ms; 3: 10mbit,5ms"
    assert problems[0] == (
        f"--link: '49mbit,0.2ms' and '10mbit,5' are without a host: one link is that of all other hosts, {such}"
    )
    assert problems[1].startswith("--link: '10mbit,5' is no link: it is a rate above 0")
    assert problems[2:4] == ["--link: host 3 is named twice", f"--link: 'x: 3mbit' is not a host and its link, {such}"]
    assert problems[4].startswith("--link: host 2: 'fast' is no link: it is a rate above 0")
    assert problems[5].startswith("--slow: '4x' is not a rank")
    assert len(problems) == 6
    code, out, err = asked(*PLAN, *LINK[:3], "49mbit; 4: 10mbit; 9: 1mbit", *LINK[4:], "--slow", "7: 2x")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: --link: host 4: the plan has hosts 0 to 3 of 1 rank",
        "error: --link: host 9: the plan has hosts 0 to 3 of 1 rank",
        "error: --slow: rank 7: the plan has ranks 0 to 3",
    ]


def test_a_round_has_rows_of_its_own() -> None:
    code, out, err = asked(*PLAN, *LOCAL, *LINK, "--slow", "3: 4x")
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["program"] == [
        "load 0, forward 0, backward 0, reduce, step",
        "a round: 100 steps, 4 fragments of the weights",
        "average after steps 23, 47, 71, 95 of the round",
        "merge after steps 28, 52, 76, 100 of the round",
        "the first 100 steps: no rounds, gradients summed over dp_replicate",
    ]
    (kept,) = found["of it"]
    assert kept.startswith("anchor 474.70 MiB, momentum 474.70 MiB, ")
    assert kept.endswith("residual 474.70 MiB, owner residual 118.68 MiB")
    assert found["traffic per step"][-3:] == [
        "each rank sends 939.92 KiB on average, 44.73 MiB in the worst step",
        "in the first 100 steps each rank sends 712.05 MiB",
        "in steps 101 to 200 each rank sends 7.12 MiB on average, 347.03 MiB in the worst step",
    ]
    assert (
        "4 all_gather over dp_replicate (4 ranks), once in 100 steps: 45.89 MiB, overlapped"
        in found["traffic per step"]
    )
    assert found["arithmetic"] == ["300 ms a step and rank; rank 3: 4 times as long"]
    assert found["step"] == ["1.26 s, mean of 100 steps: 3,258 tokens/s"]
    said = 'average_every = 19 or more with wire = "int4" keeps 80 % of the speed without a network'
    assert found["period"] == [said]


def test_coding_is_bounded_by_memory_or_measured() -> None:
    wired = (*PLAN, *LINK, "parallel.wire=int8")
    default, given, measured = (asked(*wired, *more) for more in ((), ("--coding", "5GB/s"), ("--coding", "here")))
    seconds = []
    for code, out, err in (default, given, measured):
        assert (code, err) == (0, "")
        amount, each, how = rows(out)["coding"]
        assert amount.endswith(" a step and rank to encode, decode and add")
        assert "ns encoded, " in each
        seconds.append((amount, how))
    assert seconds[0] == ("1.81 s a step and rank to encode, decode and add", BY_MEMORY.format("10.0"))
    assert seconds[1] == ("3.62 s a step and rank to encode, decode and add", BY_MEMORY.format("5.00"))
    assert seconds[2][1] == "an element, measured here"
    assert "coding" not in rows(asked(*PLAN, *LINK)[1])


def test_replicas_that_cannot_train_apart_have_no_period() -> None:
    code, out, _ = asked(*PLAN, *LINK, "parallel.offload=optimizer")
    assert code == 0
    (line,) = rows(out)["period"]
    assert line.startswith("averaging is refused here: parallel.average_every = 1: parallel.offload")
    code, out, _ = asked(*PLAN, *LINK, "parallel.dp_shard=4")
    assert (code, "period" in rows(out)) == (0, False)


def test_the_speed_of_ranks_may_be_given_in_flops() -> None:
    code, out, _ = asked(*PLAN, "--ranks", "4", "--link", "1gbit", "--flops-per-s", "1e12", "--per-host", "4")
    found = rows(out)
    assert code == 0
    assert found["simulated"] == ["125 MB/s and 0 s between 1 host of 4 ranks; no link is measured"]
    assert out.startswith("not in the time   what ranks of one host send each other: give its rate by --inside")
    assert found["arithmetic"] == ["881 ms a step and rank"]
    assert found["step"][0].startswith("881 ms: ")


TP = ("plan", "gpt2_124m", "parallel.tp=4", "train.precision=fp32", "--ranks", "8", "--compute-s", "0.3")
HOSTS = ("--link", "1gbit", "--per-host", "4")


def test_what_stays_in_a_host_takes_time_with_a_link_inside() -> None:
    """All-reduces of tp are a ring of 4 ranks in a host: each sends its bytes by a card of its own."""
    took, texts = [], []
    for inside in ((), ("--inside", "1GB/s"), ("--inside", "2GB/s")):
        code, out, err = asked(*TP, *HOSTS, *inside)
        assert (code, err) == (0, "")
        (step,) = rows(out)["step"]
        number, unit = re.split(r"[:,]", step)[0].split()
        took.append(float(number) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[unit])
        texts.append(out)
    free, slow, fast = took
    assert slow - free == pytest.approx(2 * (fast - free), rel=0.1)
    assert slow > free
    assert texts[0].startswith("not in the time")
    assert "not in the time" not in texts[1]
    assert rows(texts[1])["simulated"][1] == "inside a host: 1.00 GB/s and 0 s"


def test_a_reduce_scatter_is_a_ring_on_cuda_alone() -> None:
    """zero1 on 2 hosts of 2 ranks: of S bytes of gradients S leave a host over gloo, 3/4 S in a ring. Of the weights
    3/4 S leave it either way."""
    words = (*PLAN, "parallel.dp_shard=4", "parallel.zero_stage=1", *LINK[:2], "--per-host", "2", "--link", "1mbit")
    took = {}
    for device in ("auto", "cpu", "cuda"):
        code, out, err = asked(*words, "--compute-s", "0.001", f"train.device={device}")
        assert (code, err) == (0, "")
        (step,) = rows(out)["step"]
        assert " h: " in step
        took[device] = float(step.split()[0])
    assert took["auto"] == took["cpu"] == pytest.approx(1.75 / 1.5 * took["cuda"], rel=0.01)


def test_what_does_not_fit_has_no_time() -> None:
    code, out, err = asked(*PLAN, *LINK, "--memory", "1GB")
    assert (code, out) == (2, "")
    assert err.startswith("error: --memory 1GB (953.67 MiB): ")
    assert "without activations" in err
    code, _, err = asked(*PLAN, *LINK, "--memory", "8GB")
    assert (code, err) == (0, "")
    code, out, err = asked(*PLAN, *LINK, "--memory", "8")
    assert (code, out) == (2, "")
    assert "--memory: '8' is 8 bytes, less than any device has; with a unit, such as 8GB" in err


def test_copies_of_offload_take_time() -> None:
    words = (*PLAN, "--ranks", "1", "parallel.offload=optimizer", "train.device=cuda", *LINK[2:])
    code, out, err = asked(*words)
    assert (code, err) == (0, "")
    assert out.startswith("not in the time   copies between device and host: give its rate by --inside")
    code, slower, err = asked(*words, "--inside", "1GB/s")
    assert (code, err) == (0, "")
    assert rows(out)["step"] != rows(slower)["step"]


def test_a_timeline_with_a_link_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    code, _, err = asked(*PLAN, *LOCAL, *LINK, *NO_CODING, "--slow", "3: 4x", "--timeline", str(file))
    assert code == 0
    assert "100 steps of 1.22 s each; 3,367 tokens/s" in err
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[rank] for rank in range(4)] == [f"rank {rank}" for rank in range(4)]
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(4):
        mine = [event for event in slices if event["tid"] == rank]
        assert sum(event["name"] == "forward 0" for event in mine) == 100
        computed = sum(event["dur"] for event in mine if event["cat"] in ("forward", "backward"))
        assert computed == pytest.approx(100 * 0.3e6 * (4 if rank == 3 else 1))
    sent = {names[event["tid"]] for event in slices if names[event["tid"]].endswith(("collectives", "messages"))}
    assert sent == {f"rank {rank} collectives" for rank in range(4)}
    code, _, _ = asked(*PLAN, *LINK, "--timeline", str(tmp_path / "a.svg"))
    assert code == 0
    assert "rank 3" in (tmp_path / "a.svg").read_text()


def test_a_picture_of_ranks_has_the_first_steps_and_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    code, _, err = asked(
        "plan", "default", *LINK, "parallel.servers=1", "parallel.updates=asynchronous", "--timeline", str(file)
    )
    assert code == 0
    assert "servers 1, asynchronous: the first 8 of " in err
    text = file.read_text()
    assert "waits for a server" in text
    width = re.search(r'width="([0-9.]+)pt"', text)
    assert width is not None
    assert 12 * 72 < float(width[1]) < 15 * 72


def test_a_timeline_without_a_link_draws_the_last_step_of_a_round(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    code, _, err = asked(*PLAN, "--ranks", "4", "parallel.average_every=100", "--timeline", str(file))
    assert code == 0
    assert "the last of 100 steps of gpt2" in err
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] != "M"]
    assert names.count("forward 0") == names.count("average fragment 0") == names.count("merge fragment 0") == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--slow", "3: 4x"), "--slow: needs --link, such as --link 49mbit,0.2ms"),
        (("--compute-s", "1"), "--compute-s: needs --link"),
        (("--per-host", "2"), "--per-host: needs --link"),
        (("--inside", "1GB/s"), "--inside: needs --link"),
        (("--memory", "8GB"), "--memory: needs --link"),
        ((*LINK, "--inside", "fast"), "--inside: 'fast' is no link"),
        (("--coding", "here"), "--coding: needs --link"),
        ((*LINK, "--coding", "soon"), "such as 10GB/s; or here, which measures"),
        (("--link", "49mbit"), "--flops-per-s (speed of a rank): it needs one of them"),
        ((*LINK, "--flops-per-s", "1e9"), "give only one of them"),
        (("--link", "fast", "--compute-s", "1"), "--link: 'fast' is no link: it is a rate above 0 in kbit"),
        (("--link", "3: 9mbit", "--compute-s", "1"), "--link: the link of the other hosts is missing: one without"),
        (("--ranks", "4", "--link", "9mbit; 2: 1mbit", "--compute-s=1", "--per-host=2"), "hosts 0 to 1 of 2 ranks"),
        ((*LINK, "--slow", "4x"), "--slow: '4x' is not a rank and how many times longer it takes"),
        ((*LINK, "--slow", "3: 0x"), "--slow: '3: 0x' is not a rank"),
        ((*LINK, "--slow", ","), "--slow: ',' is not a rank"),
        ((*LINK, "--slow", "1: 2x, 1: 3x"), "it takes, each rank once, such as 3: 4x"),
        ((*LINK, "--slow", "4: 2x"), "--slow: rank 4: the plan has ranks 0 to 3"),
        ((*LINK, "--flops-per-byte", "20"), "--flops-per-byte: --link says the speed of links; give one of them"),
        ((*LINK, "--json"), "--json: prints the plan alone, without the rows of --link; give one of them"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(words: tuple[str, ...], problem: str) -> None:
    code, out, err = asked(*PLAN, *words)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.startswith("error: ")


@pytest.mark.parametrize("word", ["0", "-1", "inf", "nan", "fast"])
def test_seconds_are_above_zero(word: str) -> None:
    code, _, err = asked(*PLAN, "--link", "49mbit", f"--compute-s={word}")
    assert code == 2
    assert f"argument --compute-s: '{word}' is not a number above 0" in err


@given(
    st.dictionaries(
        st.integers(0, 10**6), st.floats(0.25, 1000).map(lambda number: round(number, 3)), min_size=1, max_size=5
    )
)
def test_slow_ranks_are_read(slow: dict[int, float]) -> None:
    assert slow_of(", ".join(f"{rank}: {factor}x" for rank, factor in slow.items())) == slow


SIZES = st.tuples(st.integers(1, 10**6), st.one_of(st.none(), st.integers(0, 10**6)))


@given(SIZES, st.dictionaries(st.integers(0, 10**6), SIZES, max_size=5), st.integers(0, 5))
def test_links_of_hosts_are_read(
    common: tuple[int, int | None], own: dict[int, tuple[int, int | None]], place: int
) -> None:
    """Wherever the common link is, a host's link without a latency has the common one."""

    def written(size: tuple[int, int | None]) -> str:
        return f"{size[0]}kB" if size[1] is None else f"{size[0]}kB, {size[1]}us"

    parts = [f"{host}: {written(size)}" for host, size in own.items()]
    parts.insert(place, written(common))
    found = cluster_of_text("; ".join(parts))
    latency = common[1] or 0
    assert found.between == Link(common[0] * 1e3, latency / 1e6)
    assert found.hosts == {
        host: Link(rate * 1e3, (latency if own_latency is None else own_latency) / 1e6)
        for host, (rate, own_latency) in own.items()
    }
    assert found.card_of(10**7) == found.between


def test_servers_have_a_load_and_a_staleness(tmp_path: Path) -> None:
    words = ("parallel.servers=1", "parallel.dp_replicate=4", "parallel.updates=asynchronous", "--ranks", "5")
    code, out, _ = asked(*PLAN, *words, *LINK[2:], "--timeline", str(tmp_path / "a.svg"))
    assert code == 0
    found = rows(out)
    assert found["program"][:2] == ["worker: load 0, forward 0, backward 0, reduce, push, pull", "server: serve"]
    assert found["program"][2].startswith("all ranks validate, save and stop together after each ")
    assert found["a server"] == ["1.39 GiB: weights and optimizer state of its part"]
    assert found["load"][0].startswith("busiest link of a server: ")
    assert "versions on average, at most " in found["staleness"][0]
    assert "period" not in found
    assert "server 0" in (tmp_path / "a.svg").read_text()
    code, out, _ = asked(*PLAN, *words, *LINK[2:], "--per-host", "5")
    assert code == 0
    assert "load" not in rows(out), "its messages have no link"


def test_steps_that_are_fewer_than_a_round_have_no_line_of_their_own() -> None:
    words = ("parallel.average_every=25", "parallel.wire=int8", "parallel.wire_from={}")
    for start, lines in ((10, 1), (50, 2)):
        code, out, err = asked(*PLAN, "--ranks", "4", *(word.format(start) for word in words))
        assert (code, err) == (0, "")
        assert out.count("each rank sends") == lines


def test_a_period_is_said_of_replicas_that_use_the_link_themselves() -> None:
    code, out, err = asked(*PLAN, "parallel.dp_shard=2", *LINK)
    assert (code, err) == (0, "")
    assert rows(out)["period"][0].endswith("or more keeps 80 % of the speed without a network")
