"""In: site files and overrides. Out: each value with its origin, or every problem in one error; the table of the docs.
Does not write scripts: test_jobs_scripts.py does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from codescent.base.errors import UserError
from codescent.jobs.options import ASKED
from codescent.jobs.site import DEFAULT, KEYS, keys_markdown, load_site, memory_bytes, seconds_of
from codescent.jobs.targets import CHECKED, TARGETS
from codescent.verbs import cli

LAB = 'account = "physics"\ntime = "04:00:00"\nmodules = ["cuda/12.4"]\ncores = 8\n'
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "lab.toml").write_text(LAB)
    (tmp_path / "cluster.toml").write_text(f"[nodes]\nnumber = 4\n\n[site]\n{LAB}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "where"), [("lab", "sites/lab.toml:1"), ("cluster.toml", "cluster.toml:5")])
def test_a_site_is_a_file_or_a_section_of_one(name: str, where: str) -> None:
    loaded = load_site(name, ["site.time=1-00:30:00", "site.devices=ngpus={n}"])
    assert (loaded.site.account, loaded.site.modules, loaded.site.cores) == ("physics", ["cuda/12.4"], 8)
    assert seconds_of(str(loaded.site.time)) == 24 * 3600 + 1800
    assert [memory_bytes(f"3{unit}") for unit in "KMGT"] == [3 * 2**power for power in (10, 20, 30, 40)]  # as SLURM
    assert loaded.origins["site.account"] == where
    assert (loaded.origins["site.time"], loaded.origins["site.qos"]) == ("command line", DEFAULT)
    assert loaded.given() == ["account", "time", "cores", "devices", "modules"]


def test_every_problem_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "sites" / "bad.toml").write_text('time = "4h"\ncores = 0\nacount = "x"\nmodules = "cuda"\n')
    with pytest.raises(UserError) as caught:
        load_site("bad", ["site.devices=4", "site.mpi=lam", "time=1", "site.before"])
    found = {problem.split(": ", 2)[0] + " " + problem.split(": ", 2)[1] for problem in caught.value.problems}
    assert found == {
        "sites/bad.toml:1 site.time", "sites/bad.toml:2 site.cores", "sites/bad.toml:3 site.acount",
        "sites/bad.toml:4 site.modules", "command line site.devices", "command line site.mpi", "command line time",
        "command line site.before",
    }  # fmt: skip


def test_a_site_stands_on_another_one(tmp_path: Path) -> None:
    """Sites are read by the rules of configs: a base, and numbers of 64 bits."""
    (tmp_path / "sites" / "big.toml").write_text('base = "lab"\npartition = "big"\ncores = 16\n')
    loaded = load_site("big")
    assert (loaded.site.account, loaded.site.partition, loaded.site.cores) == ("physics", "big", 16)
    assert loaded.origins["site.account"] == "sites/lab.toml:1"
    assert loaded.origins["site.cores"] == "sites/big.toml:3"
    (tmp_path / "sites" / "big.toml").write_text(f'base = "lap"\ncores = {2**63}\ncoers = 1\n')
    with pytest.raises(UserError) as raised:
        load_site("big")
    assert raised.value.problems == (
        'sites/big.toml:1: base: --site "sites/lap": no such file; did you mean sites/lab.toml?',
        "sites/big.toml:3: site.coers: unknown key of a site; did you mean site.cores?",
        f"sites/big.toml:2: site.cores: given {2**63}; a whole number has at most 64 bits",
    )
    (tmp_path / "sites" / "big.toml").write_text('[site]\nbase = "lab"\n')
    with pytest.raises(UserError, match=r"^sites/big.toml:2: site.base: stands in a section; write it above \[site\]$"):
        load_site("big")


def test_values_above_the_section_of_a_site_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(f'time = "01:00:00"\nhosts = ["a"]\n[nodes]\nnumber = 4\n[site]\n{LAB}')
    with pytest.raises(UserError) as caught:
        load_site("cluster.toml")
    assert caught.value.problems == (
        "cluster.toml:1: time: stands above all sections, where nothing is read; move it into [site]",
        "cluster.toml:2: hosts: stands above all sections, where nothing is read; move it into [site]",
    )


OTHER: dict[str, Any] = {
    "account": "a", "partition": "p", "qos": "q", "time": "01:23:00", "memory": "7G", "cores": 3, "devices": "none",
    "device_type": "T4", "node_devices": 9, "options": ["-l filesystems=a"], "mail": "m@x.org", "modules": ["cuda"],
    "before": ["true"], "environment": "/e", "container": ["apptainer", "exec", "i"], "interface": "ib0",
    "binding": "cores", "scratch": "/s", "mpi": "mpich", "launcher": ["--verbose"], "requeues": 3, "image": "other",
    "volume": "claim:/w",
}  # fmt: skip
"""Another value than the default for each key."""
CASES = [(name, mpi) for name in TARGETS for mpi in (("openmpi", "mpich", "intelmpi") if name == "mpirun" else ("",))]
MACHINES = {"local": ("--devices", "2"), "ssh": ("--hosts", "a:2,b:2"), "torchrun": ("--hosts", "a:2,b:2")}


@pytest.mark.parametrize(("target", "mpi"), CASES)
def test_a_key_changes_the_script_of_a_target_that_reads_it_and_of_no_other(
    target: str, mpi: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    where = MACHINES.get("ssh" if mpi else target, ("--nodes", "2", "--devices", "2"))
    base: dict[str, Any] = {"time": "04:00:00", "environment": "none"}
    base |= {"mpi": mpi, "binding": "cores", "cores": 2} if mpi else {}  # without binding the cores have no effect
    base |= {"image": "i"} if "image" in TARGETS[target].needs else {}
    base |= {"devices": ASKED[target]} if "devices" in TARGETS[target].needs else {}

    def script(**more: Any) -> str:
        (tmp_path / "site.toml").write_text("".join(f"{key} = {json.dumps(text)}\n" for key, text in more.items()))
        (tmp_path / "script").unlink(missing_ok=True)
        words = ["train.py", "--to", target, *where, "--site", "site.toml", "--out", "script"]
        assert cli.run(["launch", *words]) == 0, capsys.readouterr().err
        return re.sub("[0-9a-f]{64}", "SECRET", (tmp_path / "script").read_text())

    own = script(**base)
    assert script(**base) == own
    changed = set()
    for key, other in OTHER.items():
        other = "none" if key == "binding" and mpi else "openmpi" if other == mpi else other
        if script(**{**base, key: other}) != own:
            changed.add(key)
    assert changed == TARGETS[target].keys


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lb", "did you mean lab?"),
        ("zzz", "the sites in sites/ are lab"),
        ("x/y.toml", "no such file: there is no folder x"),
        ("x" * 300, r"^--site \"x+\.\.\.: cannot be read: File name too long$"),
    ],
)
def test_a_site_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_site(name)


def test_config_shows_each_value_and_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "--site", "lab", "site.time=01:00:00"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "site.account" in line] == [
        ["site.account", '"physics"', "sites/lab.toml:1"]
    ]
    assert [line.split() for line in lines if "site.time" in line] == [["site.time", '"01:00:00"', "command", "line"]]
    assert cli.run(["config", "site.time=01:00:00"]) == 2
    assert "give --site NAME" in capsys.readouterr().err


def test_the_pages_have_the_keys_and_the_targets() -> None:
    assert keys_markdown() in (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "launch_scripts.md").read_text(encoding="utf-8")
    for target in TARGETS:
        assert f"| `{target}` |" in page


def test_help_names_all_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["launch", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(list(TARGETS)[:-1])} or {list(TARGETS)[-1]}" in out


def test_targets_read_keys_that_there_are() -> None:
    read = {key for target in TARGETS.values() for key in (*target.needs, *target.reads)}
    assert {f"site.{key}" for key in {*read, *CHECKED}} == set(KEYS)
