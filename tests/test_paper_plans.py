"""In: docs/paper_plans.md, the script that writes it. Out: they are equal, and hand arithmetic gives the figures.
Does not test how a price is made: test_price.py does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import paper_plans  # noqa: E402 - found by the line above: a folder of scripts, no package

PAGE = (ROOT / "docs" / "paper_plans.md").read_text(encoding="utf-8")
TRILLION, LLAMA, FOUNDING = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
GIB, KIB = 2**30, 1024


def row(screen: str, name: str) -> str:
    """What a row of a screen says first."""
    found = re.search(rf"^ *{name}  +(.+)$", screen, re.MULTILINE)
    assert found is not None, f"{name}: {screen}"
    return found[1]


def parameters(screen: str) -> int:
    return int(row(screen, "parameters").replace(",", ""))


def held(screen: str) -> dict[str, float]:
    """Bytes of the fullest stage of a price, by part."""
    line = next(line for line in screen.splitlines() if "device and libraries" in line)
    return {name: float(size) * GIB for name, size in re.findall(r"([a-z][a-z ]+) ([\d.]+) GiB", line)}


def table(header: str) -> list[list[str]]:
    """The cells of a table of the page, by its first cells."""
    lines = PAGE[PAGE.index(f"| {header}") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def mfu(screen: str, layers: int, hidden: int, sequence: int, embedding: int, peak: float) -> float:
    """Of a screen's seconds, tokens and ranks, in percent: 6 N + 12 L h s FLOPs a token."""
    ranks = int(re.findall(r"= ([\d,]+) ranks", screen)[0].replace(",", ""))
    tokens = int(row(screen, "tokens per step").split()[0].replace(",", ""))
    flops = (6 * (parameters(screen) - embedding) + 12 * layers * hidden * sequence) * tokens
    return 100 * flops / (float(row(screen, "step").split()[0]) * ranks * peak)


def test_the_page_is_what_the_tool_writes_now() -> None:
    """A formula, a screen or a file of a machine that has changed, beside a page that still shows the old figures.

    `python benchmarks/paper_plans.py` writes the page anew.
    """
    assert paper_plans.page() == PAGE


def test_a_trillion_parameters_take_20_bytes_each() -> None:
    """Parameters, bytes and seconds by hand."""
    layers, hidden, vocabulary, sequence, tp = 128, 25_600, 51_200, 2048, 8
    block = 12 * hidden**2 + 13 * hidden
    assert parameters(TRILLION) == layers * block + (vocabulary + sequence) * hidden + 2 * hidden
    parts = held(TRILLION)  # of the first stage: two blocks and both embeddings, whose positions tp does not divide
    first = (2 * block + vocabulary * hidden) / tp + sequence * hidden
    sizes = [parts[name] for name in ("weights", "gradients", "optimizer")]
    assert sizes == pytest.approx([2 * first, 6 * first, 12 * first], rel=3e-3)
    assert sum(sizes) == pytest.approx(20 * first, rel=3e-3)
    assert mfu(TRILLION, layers, hidden, sequence, 0, 312e12) == pytest.approx(
        float(re.findall(r"MFU (\d+) %", TRILLION)[0]), abs=0.6
    )


def test_the_published_seconds_are_those_of_equation_3() -> None:
    """Another convention of FLOPs than that of the published TFLOP/s."""
    flops = 96 * 3072 * 2048 * 128 * 25_600**2 * (1 + 2048 / (6 * 25_600) + 51_200 / (16 * 128 * 25_600))
    assert flops == pytest.approx(5.139e19, rel=1e-4)
    for name, seconds, tflops, beside, _ in table("| seconds of a step"):
        assert float(tflops) == pytest.approx(flops / 3072 / float(seconds) / 1e12, abs=0.6)
        if name != "published":
            assert float(beside.rstrip(" %")) == pytest.approx(100 * (float(seconds) / 102.6 - 1), abs=0.6)


def test_llama_has_its_published_parameters_and_16_bytes_for_each_on_a_rank() -> None:
    """Parameters, bytes and MFU by hand."""
    layers, hidden, vocabulary, kv, ffn = 126, 16_384, 128_256, 8 * 128, 53_248
    block = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    assert parameters(LLAMA) == layers * block + 2 * vocabulary * hidden + hidden == 405_853_388_800
    parts, stage = held(LLAMA), 8 * block / 8  # eight blocks, divided by tp = 8; dp_shard divides the optimizer's state
    assert parts["weights"] == pytest.approx(2 * stage, rel=3e-3)
    assert parts["gradients"] == pytest.approx(4 * stage, rel=3e-3)
    percent = mfu(LLAMA, layers, hidden, 8192, vocabulary * hidden, 989e12)
    assert percent == pytest.approx(float(re.findall(r"MFU (\d+) %", LLAMA)[0]), abs=0.6)
    rows = table("devices")
    assert [cells[3] for cells in rows] == ["43 %", "41 %", "38 %"]
    assert rows[1][4] == re.findall(r"MFU (\d+ %)", LLAMA)[0]
    assert rows[1][5] == f"{row(LLAMA, 'memory').partition(':')[0]}: {float(row(LLAMA, 'memory').split()[1]):.0f} GiB"


def test_the_founding_sum_is_wrong_and_ours_is_right() -> None:
    """A sum that its parts do not have; activations of another size."""
    rows = {cells[0]: cells[1:] for cells in table("TB")}
    written = [float(rows[name][0]) for name in ("weights", "gradients", "optimizer", "activations")]
    assert written == [2.0, 2.0, 4.0, 0.8]
    assert rows["sum"][0] == f"{sum(written):g}, printed as 10.8"
    activations = 128 * 120 * 2048 * 12_288 * 2  # as the document counts them
    assert activations == pytest.approx(0.8e12, rel=0.04)
    for column, hidden in ((1, 12_288), (2, 26_368)):
        ours = 120 * (12 * hidden**2 + 13 * hidden) + (50_257 + 2048) * hidden + 2 * hidden
        inputs = 128 * 2048 * hidden * 2  # of one block; those of the last norm and of the head have the same size
        # The block that is computed again: outputs of two norms, queries, keys and values, what attention returns, the
        # sum behind it, and the feed-forward before and behind its GELU.
        again = (2 + 3 + 1 + 1 + 4 + 4) * inputs
        kept = 122 * inputs + 50_257 * hidden * 2 + again  # and the head's matrix
        sizes = [2 * ours, 2 * ours, 12 * ours, kept]
        shown = [
            float(rows[name][column]) * 1e12 for name in ("weights", "gradients", "optimizer", "activations", "sum")
        ]
        assert shown == pytest.approx([*sizes, sum(sizes)], abs=6e9)
    assert parameters(FOUNDING) == ours
