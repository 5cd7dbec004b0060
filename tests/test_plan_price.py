"""In: command lines of `codescent plan --cluster`. Out: the screen, its JSON and pictures, and what is refused.
Does not check a price: test_price.py does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import called

from codescent.planner.most import KEYS
from codescent.verbs.arguments_run import MOST_KEYS

NUMBER = r"[\d,.]+"
BAND = f"{NUMBER} to {NUMBER}"
GPT2 = ("default", "data.corpus=synthetic", "model.vocab_size=2048", "train.global_batch_size=64")


def asked(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = called(Path(), "plan", *GPT2, *words)
    return done.returncode, done.stdout, done.stderr


def rows(text: str) -> dict[str, str]:
    """The first line of each row, by its name."""
    found = (line.split("  ", 1) for line in text.splitlines() if line and not line.startswith(" "))
    return {name: rest.strip() for name, rest in (one for one in found if len(one) == 2)}


def test_the_screen_says_memory_time_speed_and_what_the_run_costs() -> None:
    """A row that is missing, or a sum that its parts do not have."""
    code, text, _ = asked("--cluster", "h100-sxm", "--ranks", "8", "train.num_steps=3600")
    assert code == 0
    found = rows(text)
    assert found["cluster"].startswith("h100-sxm: nodes of 8 NVIDIA H100")
    assert "8 devices on 1 node: constants of data sheets, not fitted here" in text
    assert found["memory"].startswith("fits: ")
    assert "a rank" in text
    assert "[#" in text
    assert re.search(r"\n +highest +(forward|backward) pass of micro-batch \d", text)
    assert re.fullmatch(rf"{NUMBER} ms \({BAND} ms\); in brackets 8 of 10 such predictions", found["step"])
    assert re.fullmatch(rf"{NUMBER} tokens/s \({BAND}\); MFU {NUMBER} % \({BAND} %\)", found["speed"])
    assert re.search(rf"a rank +\[#\.+\] {NUMBER} GiB \({BAND} GiB\)", text)
    assert "3,600 steps" in found["run"]
    assert re.search(rf"{NUMBER} \({BAND}\) device-hours\n", text)
    assert re.search(rf"{NUMBER} \({BAND}\) kWh\n", text)
    assert "; less with " in found["largest term"]
    assert len(text.splitlines()) <= 40


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    code, text, _ = asked(
        "--cluster", "a100-80gb-sxm", "--ranks", "4", "parallel.pp=2", "train.microbatch_size=4", "--json"
    )
    found = json.loads(text)
    assert code == 0
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"])
    assert found["tokens_per_s"] * found["step_s"] == pytest.approx(64 * 128)
    assert [sum(one.values()) - one["total"] for one in found["memory_bytes"]] == pytest.approx(
        [one["total"] for one in found["memory_bytes"]]
    )
    assert found["fits"] is True
    fullest = max((0, 1), key=lambda stage: found["memory_bytes"][stage]["total"])
    assert found["peak"] == {"stage": fullest, "at": "forward 2", "said": "forward pass of micro-batch 2"}
    for name in ("s", "tokens_per_s", "mfu", "hfu"):
        low, high = found[f"band_{name}"]
        assert low < found["step_s" if name == "s" else name] < high
    assert [low < one["total"] < high for one, (low, high) in zip(found["memory_bytes"], found["band_bytes"])] == [
        True,
        True,
    ]


def test_a_fitted_file_has_a_band_of_its_own() -> None:
    """The band of published runs around a prediction that was fitted on a machine; speeds that grow with the time."""
    bands = ("--with", "software.codescent.band=[0.5, 3]", "--with", "software.codescent.memory_band=[0.9, 1.1]")
    code, text, said = asked("--cluster", "h100-sxm", "--json", *bands)
    assert code == 0, said
    found = json.loads(text)
    assert found["band_s"] == pytest.approx([0.5 * found["step_s"], 3 * found["step_s"]])
    assert found["band_tokens_per_s"] == pytest.approx([found["tokens_per_s"] / 3, found["tokens_per_s"] / 0.5])
    total = found["memory_bytes"][0]["total"]
    assert found["band_bytes"] == [pytest.approx([0.9 * total, 1.1 * total])]


def test_what_ifs_change_the_price() -> None:
    """An option that is read and forgotten."""

    def step_s(*words: str) -> float:
        code, text, said = asked("--cluster", "p4000-lab", "--ranks", "2", "--json", *words)
        assert code == 0, said
        return float(json.loads(text)["step_s"])

    usual = step_s()
    assert step_s("--with", "links.between=100gbit,5us") < usual / 10
    assert step_s("--with", "links.between=100gbit,5us", "--slow", "1: 3x") > step_s(
        "--with", "links.between=100gbit,5us"
    )
    assert step_s("--with", "software.codescent.step_s=7") == pytest.approx(usual + 7, abs=0.1)


def test_the_best_interval_of_checkpoints_is_said() -> None:
    _, text, _ = asked("--cluster", "h100-sxm", "--mtbf", "10", "--save-s", "60")
    assert "best every 34.0 min" in rows(text)["checkpoints"]
    assert "94 % of the time trains" in rows(text)["checkpoints"]


@pytest.mark.parametrize("key", MOST_KEYS)
def test_the_largest_value_fits_and_the_next_one_does_not(key: str) -> None:
    """A limit that is one too many, or half of what fits."""
    assert MOST_KEYS == KEYS
    words = ("--cluster", "h100-sxm", "--with", "device.memory=8GB", "train.microbatch_size=1")
    _, text, said = asked(*words, "--most", key)
    found = re.match(rf"{key} = ([\d,]+) is the largest that fits(?:; ([\d,]+) would need)?", rows(text)["most"])
    assert found is not None, text + said
    for number, fits in zip(found.groups(), (True, False)):
        if number is not None:
            value = number.replace(",", "")
            longer = (f"model.seq_len={value}",) if key == "data.seq_len" else ()
            code, text, said = asked(*words, f"{key}={value}", *longer, "--json")
            assert code == 0, said
            assert json.loads(text)["fits"] is fits


def test_pictures_and_operators_have_seconds(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    code, text, said = asked("--cluster", "h100-sxm", "--ranks", "2", "parallel.pp=2", "train.microbatch_size=8",
                             "--timeline", str(file), "--operators")  # fmt: skip
    assert code == 0
    assert f"{file}: llama, 1f1b, 2 stages, 8 micro-batches, on h100-sxm: a step of" in said
    slices = [
        one for one in json.loads(file.read_text())["traceEvents"] if one["ph"] == "X" and one["name"] == "forward 0"
    ]
    assert len(slices) == 2
    assert "time" in text
    assert " µs" in text.split("Operators of stage 0")[1]


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("--cluster", "h100"), ["h100"]),
        (("--software", "x", "--mtbf", "3", "--save-s", "3", "--with", "a=b"), ["--software: needs --cluster",
         "--with: needs --cluster", "--mtbf: needs --cluster", "--save-s: needs --cluster"]),
        (("--cluster", "h100-sxm", "--link", "1", "--per-host", "1", "--mtbf", "3"), ["--link: '1' is no link",
         "--per-host: node.devices", "--mtbf and --save-s"]),
        (("--cluster", "h100-sxm", "--slow", "x", "--software", "none", "--with", "links.inside=3"), ["--slow: 'x'",
         "none", "links.inside"]),
        (("--cluster", "h100-sxm", "--ranks", "12", "train.global_batch_size=24"),
         ["12 devices do not fill nodes of 8"]),
        (("--cluster", "h100-sxm", "train.device=cpu"), ['the devices of h100-sxm are "cuda"']),
        (("--cluster", "h100-sxm", "--slow", "7: 2x"), ["--slow: rank 7: the plan has ranks 0 to 0"]),
        (("--cluster", "h100-sxm", "--ranks", "16", "--with", "node.nodes=1"), ["has 1 node of 8 devices, 8 in all"]),
        (("--cluster", "h100-sxm", "--ranks", "3", "parallel.servers=1", "--most", "data.seq_len"),
         ["--most: ranks that"]),
    ],
)  # fmt: skip
def test_what_cannot_be_priced_is_said_at_once(words: tuple[str, ...], problems: list[str]) -> None:
    """A wrong option that is found after the next start, or is a traceback."""
    code, text, said = asked(*words)
    assert code == 2
    assert text == ""
    for problem in problems:
        assert problem in said
