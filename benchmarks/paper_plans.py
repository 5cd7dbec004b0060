"""In: nothing. Out: docs/paper_plans.md: three plans that few can run, with what was published of such runs.
Does not measure. What a table says is read from a screen of the page, or from the JSON of a command that it names."""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w
from measure import ROOT, finish, new_file, parser, say, write_json
from paper_texts import FOUNDING, FOUNDING_FILE, HEAD, LLAMA, TRILLION, TRILLION_FILE
from published_programs import software_of

from codescent.clusters.cluster import Software
from codescent.verbs.cli import run

PAGE = ROOT / "docs" / "paper_plans.md"
TERA, TFLOP, SIZES = 1e12, 1e12, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}

TRILLION_RUN = "trillion.toml --ranks 3072 --cluster a100-80gb-sxm"
MEGATRON_RUN = (
    "trillion.toml --ranks 3072 --cluster selene.toml --software megatron "
    "parallel.sequence_parallel=false model.dropout=0.1"
)
MEGATRON = {"id": "1T", "group": "megatron_sc21_table1", "layout": {"precision": "fp16", "zero": 0, "pp": 64, "tp": 8}}
"""What `software_of` reads of a row: the program with which Narayanan et al. 2021 measured their table 1."""
DEVICES, PUBLISHED_TFLOPS = 3072, 163
"""Narayanan et al. 2021, table 1, last row."""

INTERLEAVED = "parallel.schedule=interleaved parallel.virtual_stages=4"
LLAMA_RUN = f"llama3_405b --ranks 16384 --cluster h100-sxm {INTERLEAVED}"

FOUNDING_RUN = "founding.toml --ranks 1 train.device=cuda"
LARGE = "model.hidden_dim=26368 model.num_heads=206"
"""A trillion parameters in the document's 120 blocks."""
FITTING_RUN = (
    f"founding.toml --ranks 256 --cluster b200-sxm {LARGE} parallel.tp=2 parallel.dp_shard=128 train.microbatch_size=1"
)


@dataclass(frozen=True)
class Published:
    """A row of table 4 of Llama Team 2024.

    Attributes:
        devices, sequence: of the run; a step has 16 Mi tokens.
        mesh: in words.
        mfu: in percent.
        words: what differs from `LLAMA_RUN`.
    """

    devices: int
    sequence: int
    mesh: str
    mfu: int
    words: str


LLAMA_ROWS = (
    Published(8_192, 8_192, "tp 8, pp 16, dp 64", 43, "parallel.dp_shard=64"),
    Published(16_384, 8_192, "tp 8, pp 16, dp 128", 41, ""),
    Published(
        16_384, 131_072, "tp 8, cp 16, pp 16, dp 8", 38,
        "parallel.dp_shard=8 parallel.cp=16 data.seq_len=131072 train.global_batch_size=128 train.compile=none",
    ),
)  # fmt: skip


class Desk:
    """A folder with the files of the page, in which its commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trillion.toml").write_text(TRILLION_FILE, encoding="utf-8")
        (folder / "founding.toml").write_text(FOUNDING_FILE, encoding="utf-8")
        (folder / "selene.toml").write_text(selene(), encoding="utf-8")

    def screen(self, words: str) -> str:
        """What `codescent plan WORDS` prints. Raises RuntimeError: the command fails."""
        out, err = io.StringIO(), io.StringIO()
        with chdir(self.folder), patch.dict("os.environ", TERM="dumb"), redirect_stdout(out), redirect_stderr(err):
            code = run(["plan", *words.split()])
        if code:
            raise RuntimeError(f"codescent plan {words}: exit code {code}: {err.getvalue()}")
        return out.getvalue().rstrip()

    def numbers(self, words: str) -> dict[str, Any]:
        """The JSON of a price."""
        found: dict[str, Any] = json.loads(self.screen(f"{words} --json"))
        return found


def selene() -> str:
    """The cluster file of the machine with the program of the paper: the traits in which it differs from ours."""
    found, own = software_of(MEGATRON), Software()
    traits = {one.name: getattr(found, one.name) for one in fields(Software)}
    changed = {name: value for name, value in traits.items() if value != getattr(own, name)}
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    return tomli_w.dumps({"base": "a100-80gb-sxm", "software": {"megatron": lists}}, indent=2)


def paper_flops(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """FLOPs of a step with all blocks computed again: Narayanan et al. 2021, equation 3."""
    blocks = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * blocks


TRILLION_FLOPS = paper_flops(3072, 2048, 128, 25_600, 51_200)


def read(pattern: str, screen: str) -> tuple[str, ...]:
    """What a pattern finds in a screen. Raises RuntimeError: nothing."""
    found = re.search(pattern, screen, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in this screen:\n{screen}")
    return found.groups()


def bytes_of(screen: str, row: str) -> float:
    """The first size of a row of a screen."""
    number, unit = read(rf"^ *{row} +([\d.,]+) (GiB|MiB|KiB)", screen)
    return float(number.replace(",", "")) * SIZES[unit]


def fullest(price: dict[str, Any]) -> str:
    """The verdict on the fullest stage, and its memory, of the JSON of a price."""
    most = max(held["total"] for held in price["memory_bytes"])
    return f"{price['verdict']}: {most / 2**30:.0f} GiB"


def trillion(desk: Desk) -> Iterator[str]:
    """The section on a trillion parameters."""
    screen, megatron = desk.screen(TRILLION_RUN), desk.numbers(MEGATRON_RUN)
    (own_s,), (verdict, size) = read(r"^step +([\d.]+) s\b", screen), read(r"^memory +(.+): ([\d.]+) GiB", screen)
    published_s = TRILLION_FLOPS / (DEVICES * PUBLISHED_TFLOPS * TFLOP)
    rows = [
        ["published", f"{published_s:.1f}", f"{PUBLISHED_TFLOPS}", "", ""],
        ["predicted, their program", *_step(megatron["step_s"], published_s), fullest(megatron)],
        ["predicted, codescent", *_step(float(own_s), published_s), f"{verdict}: {float(size):.0f} GiB"],
    ]
    header = ["", "seconds of a step", "TFLOP/s of a device", "beside published", "fullest stage"]
    yield TRILLION.format(
        file=TRILLION_FILE.rstrip(), command=TRILLION_RUN, screen=screen, traits=selene().rstrip(),
        megatron=MEGATRON_RUN, table="\n".join(markdown(header, rows)),
    )  # fmt: skip


def _step(step_s: float, published_s: float) -> list[str]:
    """Seconds, TFLOP/s of a device by the paper's equation, and how far they are from those published."""
    tflops = TRILLION_FLOPS / (DEVICES * step_s * TFLOP)
    return [f"{step_s:.1f}", f"{tflops:.0f}", f"{100 * (step_s / published_s - 1):+.0f} %"]


def llama(desk: Desk) -> Iterator[str]:
    """The section on Llama 3 405B."""
    rows = []
    for one in LLAMA_ROWS:
        words = f"llama3_405b --ranks {one.devices} --cluster h100-sxm {INTERLEAVED} {one.words}".rstrip()
        kept = desk.numbers(f"{words} parallel.recompute=none")
        again = desk.numbers(words)
        both = [cell for price in (again, kept) for cell in (f"{100 * price['mfu']:.0f} %", fullest(price))]
        rows.append([f"{one.devices:,}", f"{one.sequence:,}", one.mesh, f"{one.mfu} %", *both])
    header = ["devices", "tokens of a sample", "mesh", "MFU, published", "MFU, predicted", "fullest stage",
              "MFU, nothing computed again", "fullest stage"]  # fmt: skip
    yield LLAMA.format(
        command=LLAMA_RUN, screen=desk.screen(LLAMA_RUN), table="\n".join(markdown(header, rows)),
        first=f"--ranks {LLAMA_ROWS[0].devices} {LLAMA_ROWS[0].words}", long=LLAMA_ROWS[-1].words,
    )  # fmt: skip


def founding(desk: Desk) -> Iterator[str]:
    """The section on the founding document."""
    small, large = desk.screen(FOUNDING_RUN), desk.screen(f"{FOUNDING_RUN} {LARGE}")
    kept = desk.screen(f"{FOUNDING_RUN} {LARGE} parallel.recompute=none")
    (fits,) = read(r"^(memory .+)$", desk.screen(FITTING_RUN))
    parts = {"weights": 2.0, "gradients": 2.0, "optimizer": 4.0, "activations": 0.8}
    found = {name: [bytes_of(one, name) for one in (small, large)] for name in parts}
    rows = [[name, f"{size:g}", *map(terabytes, found[name])] for name, size in parts.items()]
    sums = [sum(sizes) for sizes in zip(*found.values(), strict=True)]
    rows.append(["sum", f"{sum(parts.values()):g}, printed as 10.8", *map(terabytes, sums)])
    header = ["TB", "the document", "120 blocks of 12,288 channels", "120 blocks of 26,368 channels"]
    yield FOUNDING.format(
        file=FOUNDING_FILE.rstrip(), command=f"{FOUNDING_RUN} {LARGE}", screen=large,
        table="\n".join(markdown(header, rows)), kept=terabytes(bytes_of(kept, "activations")), fitting=FITTING_RUN,
        fits=fits,
    )  # fmt: skip


def terabytes(size: float) -> str:
    """Such as "2.01", in units of 10^12 bytes."""
    return f"{size / TERA:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines]


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory(prefix="codescent-papers-") as name:
        desk = Desk(Path(name))
        return HEAD + "\n".join([*trillion(desk), *llama(desk), *founding(desk)])


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Write docs/paper_plans.md: three plans that few can run, beside what was published.")
    parsed.add_argument("--out", type=new_file, default=PAGE, metavar="FILE", help="the page")
    return parsed.parse_args()


def main() -> int:
    """Write the page."""
    arguments = arguments_of()
    text = page()
    arguments.out.write_text(text, encoding="utf-8")
    say(f"{arguments.out}: {len(text.splitlines())} lines")
    write_json(arguments.json, {"benchmark": "paper_plans", "page": text})
    return 0


if __name__ == "__main__":
    finish(main)
