"""In: a machine with CUDA; checkouts of peers (optional). Out: a JSON file per part in a folder: tests, benchmarks.
Does not install anything and does not need the network. Exit code 1: a part failed; 2: nothing was run, and why."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
"""What collecting the tests needs beside the package's own dependencies."""

LIMIT_S, GRACE_S = {"tests": 300.0, "gpu_step": 150.0, "gpu_generate": 90.0}, 20.0
"""A part that has not ended by then is interrupted, and killed some seconds later: within 10 minutes in all.
The tests of several devices may take longer: as often as there are devices, and at most 4 times."""


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(description="Run what needs a CUDA device: tests marked cuda, and benchmarks.")
    parser.add_argument(
        "--out", type=Path, default=Path("build/cuda"), help="folder for the JSON files; made if absent"
    )
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="checkout of nanoGPT, for gpu_step")
    parser.add_argument("--llmc", type=Path, metavar="DIR", help="checkout of llm.c, for gpu_step; needs nvcc")
    parser.add_argument("--jobs", type=int, default=3, help="tests at a time, where pytest-xdist is installed")
    return parser.parse_args()


def missing(distributions: Sequence[str]) -> list[str]:
    """Those that this Python does not have."""
    absent = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return absent


def dependencies() -> list[str]:
    """Names of the distributions that the package needs."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [text.partition(">=")[0] for text in declared]


def refusal(out: Path) -> str:
    """Why nothing can be run here, in one sentence; "" if all is there."""
    if absent := missing([*dependencies(), *TEST_TOOLS]):
        return f"{sys.executable} lacks {', '.join(absent)}; nothing was run"
    import torch  # noqa: PLC0415 - only where it is installed

    if not torch.cuda.is_available():
        return "no CUDA device here (torch.cuda.is_available() is False); nothing was run"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{out}: cannot be made: {error.strerror}; nothing was run"
    return "" if os.access(out, os.W_OK) else f"{out}: cannot be written; nothing was run"


def files_with_tests() -> list[str]:
    """The files that have a test marked cuda: others need not be imported."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(file) for file in files if "pytest.mark.cuda" in file.read_text(encoding="utf-8")]


def run(name: str, command: Sequence[str], limit_s: float) -> int | None:
    """Run a part, for `limit_s` at most. Returns its exit code; None: all that it started was ended then."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if name != "tests":
        variables.pop("OMP_NUM_THREADS")
    print(f"--- {name}: at most {limit_s:.0f} s", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)
    code = None
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # pytest then writes its report, and a benchmark ends its systems
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code


def outcomes(report: Path) -> Iterator[dict[str, Any]]:
    """The tests of a junit report: name, outcome, seconds, and the reason of a skip or the first line of a failure."""
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((part for part in case if part.tag in ("skipped", "failure", "error")), None)
        outcome, why = ("passed", "") if found is None else (found.tag, found.get("message", ""))
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        yield {"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), "why": why.partition("\n")[0]}


def run_tests(out: Path, jobs: int) -> tuple[bool, list[str]]:
    """All tests marked cuda, into tests.json. Returns whether they passed, and a line for each that was skipped."""
    import torch  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="codescent-cuda-") as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-o", "xfail_strict=true", f"--junitxml={report}"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(jobs), "--dist", "worksteal"]
        begun = time.monotonic()
        limit_s = LIMIT_S["tests"] * min(max(1, torch.cuda.device_count()), 4)
        code = run("tests", [*command, *files_with_tests()], limit_s)
        tests = list(outcomes(report)) if report.is_file() else []
        seconds = time.monotonic() - begun
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    machine = {"devices": devices, "torch": torch.__version__, "cuda": torch.version.cuda}
    result = {"machine": machine, "exit_code": code, "seconds": seconds, "limit_s": limit_s, "tests": tests}
    (out / "tests.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return code == 0, [f"{one['test']}: {one['why']}" for one in tests if one["outcome"] == "skipped"]


def benchmarks(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str], list[str]]]:
    """Of each benchmark the name, the words, and what it leaves out."""
    words, without = ["--compile", "blocks,none", "--rounds", "3", "--steps", "20"], []
    for peer in ("nanogpt", "llmc"):
        if folder := getattr(arguments, peer):
            words += [f"--{peer}", str(folder.resolve())]
        else:
            without.append(f"gpu_step beside {peer}: no checkout is given (--{peer} DIR)")
    yield "gpu_step", words, without
    absent = missing(["transformers"])
    yield "gpu_generate", ["--rounds", "3"], [f"gpu_generate beside {name}: it is not installed" for name in absent]


def main() -> int:
    """Run everything, one part after the other, and say what was skipped."""
    arguments = arguments_of()
    out = arguments.out.resolve()
    if why := refusal(out):
        print(f"error: {why}", file=sys.stderr)
        return 2
    parts = list(benchmarks(arguments))
    passed, skipped = run_tests(out, arguments.jobs)
    failed = [] if passed else ["tests"]
    for name, words, without in parts:
        skipped += without
        script = str(ROOT / "benchmarks" / f"{name}.py")
        code = run(name, [sys.executable, script, *words, "--json", str(out / f"{name}.json")], LIMIT_S[name])
        if code is None:
            print(f"{name}: ended after {LIMIT_S[name]:.0f} s, before it was done", file=sys.stderr)
        failed += [name] if code != 0 else []
    print("---", *(f"skipped: {line}" for line in skipped), sep="\n")
    print(f"failed: {', '.join(failed)}" if failed else "all that was run passed", f"results: {out}", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
