"""In: the table faults.toml, names of faults. Out: for each fault, the first quick test that catches it, if any.
Does not change the checkout: each fault is planted in a temporary copy of the checkout."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = "tests/mutants/faults.toml"

WANTED = 0.95
"""Share of the faults that the quick suite must catch."""

LIKELY_S, SUITE_S = 900, 5400
"""Time limits of the likely tests and of the whole quick suite. A fault that exceeds a limit is caught."""

FAILED, CAUGHT, MISSED, UNSOUND = "a test fails", "caught", "not caught", "unsound"
"""Verdicts on a fault. FAILED: not final, until the test has run without the fault. CAUGHT: the test passes without the
fault. UNSOUND: the test fails without the fault too, or no test ran."""

_RUNNING: dict[int, subprocess.Popen[bytes]] = {}
"""The running pytest processes, by the thread that started them."""

_STOP = threading.Event()
"""Set by a signal: no thread starts further tests."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::\S.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A row of the table; see the comment at its top."""

    name: str
    file: str
    old: str
    new: str
    does: str
    tests: tuple[str, ...]
    reason: str = ""

    def planted(self, source: str) -> str:
        """The source with the fault.

        Raises:
            ValueError: `old` does not occur once, or the new source does not compile or is the same code.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in codescent/{self.file}; it must occur once")
        changed = source.replace(self.old, self.new)
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        except SyntaxError as error:
            raise ValueError(f"{self.name}: codescent/{self.file} does not compile with it: {error}") from error
        if same:
            raise ValueError(f"{self.name}: it changes nothing in codescent/{self.file}")
        return changed


@dataclass(frozen=True)
class Outcome:
    """The result for one fault.

    Attributes:
        test: the first test that failed, or an error message; "" if all tests passed.
        whole_suite: whether the whole quick suite ran, not only the tests of the row.
        of: the file, old and new text of the fault when it was tried.
    """

    name: str
    verdict: str
    test: str
    seconds: float
    whole_suite: bool
    of: dict[str, str]


def faults(root: Path = ROOT) -> list[Fault]:
    """The rows of the table of a checkout."""
    rows = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def problems(found: Sequence[Fault], root: Path) -> list[str]:
    """A message for each mistake in the table: duplicate names, texts and tests that do not exist."""
    names = [fault.name for fault in found]
    said = [f"{name}: this name occurs more than once" for name in sorted(set(names)) if names.count(name) > 1]
    for fault in found:
        try:
            fault.planted((root / "codescent" / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            said.append(str(error))
        for test in fault.tests:
            file, _, case = test.partition("::")
            path, function = root / "tests" / file, case.partition("[")[0]
            if not path.is_file() or (function and f"def {function}(" not in path.read_text(encoding="utf-8")):
                said.append(f"{fault.name}: tests/{test} does not exist")
    return said


def copy_of(root: Path, folder: Path) -> Path:
    """Copy all files that git does not ignore to `folder`. Returns `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def data_dir() -> Path:
    """The folder of the real corpora that some tests read."""
    return Path(os.environ.get("CODESCENT_DATA_DIR", ROOT.parent / "shared" / "data"))


def environment(copy: Path) -> dict[str, str]:
    """Environment of the tests in a copy. PYTHONPATH makes them and their child processes import the copy."""
    words = {"PYTHONPATH": str(copy), "CODESCENT_DATA_DIR": str(data_dir()), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **words, "TMPDIR": str(copy / ".tmp"), "XDG_CACHE_HOME": str(copy / ".cache")}


def refuse_other_package(copy: Path) -> None:
    """Raise RuntimeError if a process with another working folder does not import the copy."""
    program = "import codescent; print(codescent.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", env=environment(copy), capture_output=True, text=True, check=True
    )
    if not Path(done.stdout.strip()).is_relative_to(copy):
        raise RuntimeError(f"the tests would import {done.stdout.strip()} and not the copy in {copy}")


def run_pytest(copy: Path, words: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest. Returns its exit code (None: it did not end in time) and its output."""
    (copy / ".tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--timeout=170"]
    said = copy / ".tmp" / "pytest.txt"  # not a pipe: ranks that outlive pytest would hold it open
    with said.open("w") as out:
        process = _RUNNING[threading.get_ident()] = subprocess.Popen(
            [*command, *words], cwd=copy, env=environment(copy), stdout=out, stderr=out, start_new_session=True
        )
    try:
        process.wait(0 if _STOP.is_set() else limit_s)
    except subprocess.TimeoutExpired:
        return None, said.read_text(errors="replace")
    finally:
        end(process)
        del _RUNNING[threading.get_ident()]  # the number may be another process's from now on
    return process.returncode, said.read_text(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill pytest and all processes that its tests have started: they share a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(copy: Path, tests: Sequence[str], limit_s: float) -> str:
    """The first test that fails, or a message after the time limit; "": all pass. Raises RuntimeError: no test ran."""
    code, said = run_pytest(copy, ["-x", *tests], limit_s)
    if code is None:
        return f"{', '.join(tests) or 'the suite'}: no end after {limit_s:.0f} s"
    if code == 0:
        return ""
    if failed := _FAILED.search(said):
        return failed[1]
    raise RuntimeError(f"pytest {' '.join(tests)} ended with {code}:\n{said[-2000:]}")


def failing(copy: Path, tests: Sequence[str]) -> set[str]:
    """Run tests in a copy without a fault; return those that fail. Entries that are not names of tests are ignored."""
    known = sorted({test for test in tests if test.startswith("tests/") and ": no end" not in test})
    if not known:
        return set()
    code, said = run_pytest(copy, known, SUITE_S)
    has_cases = code != 4
    if not has_cases:  # a name was cut: the name of a case may contain " - ", which ends a name in pytest's summary
        code, said = run_pytest(copy, sorted({test.partition("[")[0] for test in known}), SUITE_S)
    if code not in (0, 1):  # a negative one is a signal's: the other tests have not run
        raise RuntimeError(f"tests without a fault: pytest ended with {code}:\n{said[-2000:]}")
    found = set(_FAILED.findall(said))
    if has_cases:
        return found & set(known)
    functions = {test.partition("[")[0] for test in found}
    return {test for test in known if test.partition("[")[0] in functions}


def try_fault(fault: Fault, base: Path, *, likely_only: bool) -> Outcome:
    """Plant a fault in a copy of `base`, and run the tests."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"mutant-{fault.name}-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve() / "checkout"
        shutil.copytree(base, copy)
        path = copy / "codescent" / fault.file
        path.write_text(fault.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
        # Otherwise Python may use the old bytecode, if the new source has the same size and the same second.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        try:
            test, whole = run_tests(copy, [f"tests/{test}" for test in fault.tests], LIKELY_S), False
            if not test and not likely_only:
                test, whole = run_tests(copy, [], SUITE_S), True
            verdict = FAILED if test else MISSED
        except RuntimeError as error:
            verdict, test, whole = UNSOUND, str(error), False
    seconds = round(time.monotonic() - begin, 1)
    return Outcome(fault.name, verdict, test, seconds, whole, _as_it_is(fault))


def _as_it_is(fault: Fault) -> dict[str, str]:
    return {"file": fault.file, "old": fault.old, "new": fault.new}


def run_all(
    root: Path,
    left: Sequence[Fault],
    unproven: list[Outcome],
    jobs: int,
    tell: Callable[[Outcome], None],
    *,
    likely_only: bool,
) -> None:
    """Try faults, `jobs` of them at a time. Then run all tests that failed once more without a fault.

    Args:
        root: the checkout.
        left: the faults to try.
        unproven: outcomes of an earlier run with the verdict FAILED; new ones are added.
        jobs: faults that are tried at the same time.
        tell: called with each outcome, and again with its final verdict.
        likely_only: do not run the whole suite if the tests of the row pass.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        base = copy_of(root, Path(folder).resolve() / "checkout")
        refuse_other_package(base)
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(base / "codescent")], check=True)
        try_one = partial(try_fault, base=base, likely_only=likely_only)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for outcome in pool.map(try_one, left):
                    tell(outcome)
                    if outcome.verdict == FAILED:
                        unproven.append(outcome)
            except BaseException:  # also a signal: the tests do not receive it, because they run in other sessions
                _STOP.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(_RUNNING.values()):
                    end(process)
                raise
        unsound = failing(base, [one.test for one in unproven])
        for one in unproven:
            tell(replace(one, verdict=UNSOUND if one.test in unsound else CAUGHT))


def is_known(fault: Fault, outcome: Outcome | None) -> bool:
    """Whether `outcome`, of an earlier run, is valid for the fault as it is now."""
    if outcome is None or outcome.of != _as_it_is(fault) or outcome.verdict == UNSOUND:
        return False
    return outcome.verdict != MISSED or outcome.whole_suite


def read_outcomes(path: Path | None) -> dict[str, Outcome]:
    """The outcomes of earlier runs by name; {} if the file does not exist. Raises ValueError: it has something else."""
    if path is None or not path.exists() or path.is_dir():
        return {}
    try:
        return {row["name"]: Outcome(**row) for row in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        how = "give the file of an earlier run, or the name of a new file"
        raise ValueError(f"--results {path}: not the outcomes of faults ({error}): {how}") from error


def wrong_words(names: Sequence[str], known: Sequence[Fault], files: dict[str, Path | None]) -> list[str]:
    """What is wrong with the arguments, before hours are spent: names of no fault, files that cannot be written."""
    said = [f"no fault has {name} in its name" for name in names if not any(name in one.name for one in known)]
    for flag, path in files.items():
        if path is not None and path.is_dir():
            said.append(f"{flag} {path}: is a folder; give the name of a file")
        elif path is not None and not path.parent.is_dir():
            said.append(f"{flag} {path}: there is no folder {path.parent}")
    return said


def write_outcomes(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Replace the file at once: a run that ends meanwhile leaves it as it was."""
    making = path.with_name(f".{path.name}.partial")
    making.write_text(json.dumps([asdict(one) for one in outcomes.values()], indent=1) + "\n", encoding="utf-8")
    making.replace(path)


def positive(word: str) -> int:
    """Argument type: a whole number of at least 1. argparse turns the error into exit code 2."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def share_caught(chosen: Sequence[Fault], outcomes: dict[str, Outcome]) -> float:
    """Share of the faults that are caught."""
    caught = [fault for fault in chosen if (one := outcomes.get(fault.name)) and one.verdict == CAUGHT]
    return len(caught) / len(chosen)


def as_markdown(chosen: Sequence[Fault], outcomes: dict[str, Outcome]) -> str:
    """The table: a row for each fault, in the order of faults.toml."""
    tried = [(fault, outcomes[fault.name]) for fault in chosen if fault.name in outcomes]
    count = sum(one.verdict == CAUGHT for _, one in tried)
    rows = ["# Faults and the tests that catch them", "", "The last run of `make mutants` ([how](mutants.md)).", ""]
    rows += [f"{count} of {len(tried)} faults are caught.", "", "| fault | what it would do | caught by | s |"]
    rows.append("|---|---|---|---|")
    for fault, one in tried:
        by = f"`{one.test.removeprefix('tests/')}`" if one.verdict == CAUGHT else f"**{one.verdict}** {fault.reason}"
        rows.append(f"| {fault.name} (`{fault.file}`) | {fault.does} | {by.replace('|', '/')} | {one.seconds:.0f} |")
    return "\n".join(rows) + "\n"


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Plant faults in copies of a checkout.

    Returns 0: enough are caught; 1: not enough; 2: the words or the table are wrong, or tests fail without a fault.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="faults to plant, or parts of their names; default: all")
    parser.add_argument("--jobs", type=positive, default=1, help="faults that are tried at the same time")
    parser.add_argument("--likely-only", action="store_true", help="never run the whole suite")
    parser.add_argument("--results", type=Path, help="JSON file of outcomes; these faults are not tried again")
    parser.add_argument("--markdown", type=Path, help="file for the table of outcomes")
    asked = parser.parse_args(words)
    known = faults(root)
    wrong = problems(known, root)
    wrong += wrong_words(asked.names, known, {"--results": asked.results, "--markdown": asked.markdown})
    try:
        outcomes = read_outcomes(asked.results)
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    chosen = [one for one in known if not asked.names or any(name in one.name for name in asked.names)]
    if not data_dir().is_dir():
        print(f"no real data at {data_dir()}: tests that read it are skipped, and catch nothing", file=sys.stderr)

    def tell(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        print(f"{outcome.name:45} {outcome.verdict:12} {outcome.seconds:7.1f} s  {outcome.test}", flush=True)
        if asked.results is not None:
            write_outcomes(asked.results, outcomes)

    left = [fault for fault in chosen if not is_known(fault, outcomes.get(fault.name))]
    names = {fault.name for fault in chosen} - {fault.name for fault in left}
    unproven = [one for one in outcomes.values() if one.name in names and one.verdict == FAILED]
    if left or unproven:
        run_all(root, left, unproven, asked.jobs, tell, likely_only=asked.likely_only)
    if asked.markdown is not None:
        asked.markdown.write_text(as_markdown(chosen, outcomes), encoding="utf-8")
    share = share_caught(chosen, outcomes)
    print(f"{share:.1%} of {len(chosen)} faults are caught; {WANTED:.0%} must be")
    if unsound := sorted({outcomes[one.name].test for one in chosen if outcomes[one.name].verdict == UNSOUND}):
        print("these tests fail without a fault, or do not run; repair these:", *unsound, sep="\n", file=sys.stderr)
        return 2
    return 0 if share >= WANTED else 1


def stop(number: int, _: object) -> None:
    """End as after Ctrl-C when the terminal is closed or the process is asked to end: the tests must not go on."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(each, stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt as interrupt:
        print("interrupted: the checkout is as it was; --results has the outcomes until now", file=sys.stderr)
        sys.exit(128 + interrupt.args[0])
