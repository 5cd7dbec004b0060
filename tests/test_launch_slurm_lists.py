"""In: lists as SLURM abbreviates them. Out: what `scontrol show hostnames` prints, or why it is no such list.
Does not need SLURM: the expected lines were printed by SLURM 22.05."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.launch.slurm_lists import counts, hosts

SCONTROL = {
    "gpu[01-03,07],login2": "gpu01 gpu02 gpu03 gpu07 login2",
    "a[1-2]b[01-02]": "a1b01 a1b02 a2b01 a2b02",
    "n[9-11]": "n9 n10 n11",
    "n[09-11]": "n09 n10 n11",
    "n[008-011]": "n008 n009 n010 n011",
    "n[099-100]": "n099 n100",
    "n[1-03]": "n1 n2 n3",
    "n[01-003]": "n01 n02 n03",
    "n[1,1]": "n1 n1",
    "n[1-2,2-3]": "n1 n2 n2 n3",
    "[1-3]": "1 2 3",
    "n[1-3],n[5]": "n1 n2 n3 n5",
    "n[1-2][1-2]": "n11 n12 n21 n22",
    "10.0.0.[1-3]": "10.0.0.1 10.0.0.2 10.0.0.3",
    "n-1": "n-1",
    "rack[0-1]n[00-01],x": "rack0n00 rack0n01 rack1n00 rack1n01 x",
    "n[1-2]a[1-2]b[1-2]": "n1a1b1 n1a1b2 n2a1b1 n2a1b2 n1a2b1 n1a2b2 n2a2b1 n2a2b2",
    " nid001234 ": "nid001234",
}


@pytest.mark.parametrize("text", list(SCONTROL))
def test_hosts_are_those_of_scontrol(text: str) -> None:
    assert hosts(text) == SCONTROL[text].split()


def test_newer_versions_write_text_after_the_last_bracket() -> None:
    assert hosts("gpu[1-2]-ib,c[1-2]d[3]e") == ["gpu1-ib", "gpu2-ib", "c1d3e", "c2d3e"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a host name"),
        ("n1,,n2", "is not a host name"),
        ("n1,", "is not a host name"),
        ("n1 n2", "is not a host name"),
        ("n[1", "is not a host name"),
        ("n1]", "is not a host name"),
        ("n[1[2]]", "is not a host name"),
        ("n[]", "is not a number or a range"),
        ("n[3-1]", "is not a number or a range"),
        ("n[1-]", "is not a number or a range"),
        ("n[a-b]", "is not a number or a range"),
        ("n[1--2]", "is not a number or a range"),
        ("n[²]", "is not a number or a range"),
        ("n[0-70000]", "more than 65536 hosts"),
        ("n[0-999]m[0-999]", "more than 65536 hosts"),
        ("n[0-65535],m", "more than 65536 hosts"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hosts(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("5,4(x2)", [5, 4, 4]), ("1(x1)", [1])]
)
def test_counts(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "(x3)", "2,,1", "a", "-1", "2(x99999)"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number of tasks|more than"):
        counts(text)


def _written(name: str, numbers: list[int], width: int) -> str:
    """A host for each number, as SLURM's hostlist writes them: runs of numbers that follow one another as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs]
    return f"{name}[{','.join(words)}]"


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z-]", fullmatch=True)
GROUPS = st.tuples(NAMES, st.lists(st.integers(0, 1200), min_size=1, max_size=20), st.integers(1, 6))


@given(st.lists(GROUPS, min_size=1, max_size=4))
def test_hosts_come_back_as_they_were_written(groups: list[tuple[str, list[int], int]]) -> None:
    text = ",".join(_written(*group) for group in groups)
    assert hosts(text) == [f"{name}{number:0{width}d}" for name, numbers, width in groups for number in numbers]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 50)), min_size=1, max_size=10))
def test_counts_come_back_as_they_were_written(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert counts(text) == [count for count, times in runs for _ in range(times)]


@given(st.text(alphabet="n1[]-,(x) ²", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (hosts, counts):
        with contextlib.suppress(ValueError):  # any other error is a fault
            assert read(text)


@pytest.mark.parametrize("text", list(SCONTROL))
def test_the_scontrol_of_this_machine_agrees(text: str) -> None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        pytest.skip("no scontrol on this machine")
    done = subprocess.run(
        [scontrol, "show", "hostnames", text.strip()], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode:
        pytest.skip(f"scontrol has no configuration here: {done.stderr.strip()}")
    assert done.stdout.split() == hosts(text)
