"""In: the fuzzer's own code, and a few cases of each subject. Out: whether it finds faults, and whether there are any.
Does not replace `make fuzz`, which tries many more cases."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz import run as fuzzer
from fuzz.damage import damage
from fuzz.subjects import SUBJECTS, Subject


def test_the_same_seed_gives_the_same_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    stories = []
    for _ in range(2):
        for seed in range(40):
            path.write_text('{"a": [1, 2, {"b": "c"}], "d": null}')
            stories.append((damage(path, random.Random(seed)), path.read_bytes()))
    assert stories[:40] == stories[40:]
    assert len(set(stories)) > 20


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("raise KeyError('x')", "traceback"),
        ("while True: pass", "no end within 1 s"),
        ("x = bytearray(10**12)", "traceback"),
        ("import faulthandler, os; faulthandler.disable(); os.abort()", "exit code -6"),
        ("print('other')", "another result in silence"),
        ("raise SystemExit(2)", ""),
        ("print('result')", ""),
    ],
)
def test_each_kind_of_fault_is_found(program: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is a program: the file that is damaged."""
    monkeypatch.setattr(fuzzer, "LIMIT_S", 1)
    monkeypatch.setattr(fuzzer.cli, "run", lambda words: exec((Path(words[0])).read_text()) or 0)
    monkeypatch.setattr(fuzzer, "damage", lambda path, _: path.write_text(program) and "damaged")
    subject = Subject(
        lambda folder: (folder / "p.py").write_text("print('result')"), ["p.py"], [["p.py"]], checked=True
    )
    monkeypatch.setitem(SUBJECTS, "programs", subject)
    fuzzer.make(subject, tmp_path / "base")
    what, story = fuzzer.case("programs", tmp_path / "base", tmp_path / "case", "0", {})
    assert (what, story.splitlines()[:1]) == (("fault", [fault]) if fault else (what, []))


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_case_is_a_fault(subject: str, tmp_path: Path) -> None:
    assert fuzzer.fuzz([subject], 12, 1, None, tmp_path) == 0
