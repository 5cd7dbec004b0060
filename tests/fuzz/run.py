"""In: --subjects, --cases, --seed. Out: every case that ends in a traceback, a hang, too much memory, or another result
in silence; exit code 1 if there is one.
Does not minimise a case: `--seed S --only NUMBER` repeats it, and keeps its folder."""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fuzz.damage import damage
from fuzz.strangers import make_outside, plant, spared
from fuzz.subjects import SUBJECTS, Subject

from codescent.verbs import cli

LIMIT_S, LIMIT_BYTES = 60, 12 << 30
"""Of a command: seconds, and bytes of addresses, of which torch alone takes some."""

TYPED = "typed.txt"
"""A file of the project that is the standard input of its commands. Without it that is empty."""
RESULTS = {"train": "runs/*/metrics.csv", "export": "out/*"}
"""Files with what a command gives. What the others give is printed."""


@dataclass(frozen=True)
class End:
    """How a command ended: its exit code (None: killed after LIMIT_S), what it printed, its result."""

    code: int | None
    said: str
    result: str

    @property
    def fault(self) -> str:
        """What no command may do, whatever it is given; "" if it did not."""
        if self.code is None:
            return f"no end within {LIMIT_S} s"
        if "Traceback" in self.said or "panicked" in self.said or "MemoryError" in self.said:
            return "traceback"
        return "" if self.code in (0, 1, 2) else f"exit code {self.code}"


def call(folder: Path, words: Sequence[str], runs: Callable[[list[str]], int] | None = None) -> End:
    """The words as a command in the folder, in a forked process. `runs`: runs them, as the program `codescent` does."""
    log = folder / "said.txt"
    child = os.fork()
    if child == 0:
        _child(folder, words, log, runs or cli.run)
    deadline, status = time.monotonic() + LIMIT_S, None
    while status is None and time.monotonic() < deadline:
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        time.sleep(0.01)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = log.read_text(errors="replace")
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return End(code, said, _result(folder, words[0], said) if code == 0 else "")


def _child(folder: Path, words: Sequence[str], log: Path, runs: Callable[[list[str]], int]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(stream, number)
        os.dup2(os.open(TYPED if Path(TYPED).is_file() else os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # a test's own may be elsewhere
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES,) * 2)
        os.environ["TERM"] = "dumb"
        code = runs(list(words))
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _result(folder: Path, verb: str, said: str) -> str:
    """A hash of what the command gave: its files of results, and what it printed where it has none."""
    found = hashlib.sha256()
    paths = sorted(path for path in folder.glob(RESULTS.get(verb, "-")) if path.is_file())
    for path in paths:
        if path.suffix == ".csv":
            with path.open() as rows:
                numbers = [(row["step"], row["train_loss"], row["val_loss"]) for row in csv.DictReader(rows)]
            found.update(repr(numbers).encode())
        else:
            found.update(path.name.encode() + path.read_bytes())
    lines = [line for line in said.splitlines() if not line.startswith(("note:", "warning:"))]
    found.update("".join(lines).encode() if not paths else b"")
    return found.hexdigest()


def make(subject: Subject, folder: Path) -> None:
    """Write the project of a subject. Raises RuntimeError: one of its commands fails."""
    folder.mkdir(parents=True)
    subject.make(folder)
    for words in subject.before:
        end = call(folder, words)
        if end.code != 0:
            raise RuntimeError(f"{words}: {end.said}")
    subject.finish(folder)


def case(name: str, base: Path, folder: Path, seed: str, expected: dict[int, End]) -> tuple[str, str]:
    """Damage a copy of the project, and run a command on it. Returns (what came of it, the story if it is a fault)."""
    subject, rng = SUBJECTS[name], random.Random(seed)
    number = rng.randrange(len(subject.commands))
    words = subject.commands[number]
    if number not in expected:
        shutil.copytree(base, folder, symlinks=True)
        expected[number] = call(folder, words, subject.runs)
        shutil.rmtree(folder)
        if expected[number].code != 0:
            raise RuntimeError(f"{name}: {words} fails without a damage: {expected[number].said}")
    shutil.copytree(base, folder, symlinks=True)
    if subject.planted:
        make_outside(folder)
        before, how = spared(folder), plant(folder, subject.files, rng)
    else:
        file = rng.choice(sorted(path for pattern in subject.files for path in folder.glob(pattern) if path.is_file()))
        before, how = [], damage(file, rng)
    end = call(folder, words, subject.runs)
    fault = end.fault or ("another file was changed" if subject.planted and spared(folder) != before else "")
    if not fault and end.code == 0 and subject.checked and end.result != expected[number].result:
        fault = "another result in silence"
    story = f"{fault}\n  {how}\n  codescent {' '.join(words)}\n" + "".join(
        f"  | {line}\n" for line in end.said.splitlines()[-12:]
    )
    harmless = "refused" if end.code else "the same" if subject.checked else "taken"
    return ("fault", story) if fault else (harmless, "")


def fuzz(names: Sequence[str], cases: int, seed: int, only: int | None, keep: Path) -> int:
    """Run all cases. Returns the number of faults."""
    faults = 0
    for name in names:
        begin, found, expected = time.monotonic(), Counter[str](), {}
        with tempfile.TemporaryDirectory() as made:
            base, folder = Path(made) / "base", Path(made) / "case"
            make(SUBJECTS[name], folder)
            folder.rename(base)  # data are prepared for a corpus at its path: copies are made at the same one
            for number in range(cases) if only is None else [only]:
                what, story = case(name, base, folder, f"{seed} {name} {number}", expected)
                found[what] += 1
                if story:
                    faults += 1
                    print(f"--subjects '{name}' --seed {seed} --only {number}: {story}", flush=True)
                if only is not None:
                    shutil.rmtree(keep, ignore_errors=True)
                    shutil.copytree(folder, keep, symlinks=True)
                shutil.rmtree(folder)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        print(f"{name}: {counts}; {time.monotonic() - begin:.0f} s", flush=True)
    return faults


def main() -> int:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--cases", type=int, default=100, help="damages of each subject")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same damages")
    parser.add_argument("--only", type=int, help="run the case of this number alone, and keep its folder")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where --only leaves its folder")
    options = parser.parse_args()
    names = [name.strip() for name in options.subjects.split(",")]
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"no subject {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    torch.set_num_threads(1)
    return 1 if fuzz(names, options.cases, options.seed, options.only, options.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
