"""In: cluster files with something wrong. Out: every problem with its line and what would be right, in one UserError.
Does not test what is right (test_clusters.py does)."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_cluster import WHOLE, broken, problems

from codescent.base.errors import UserError
from codescent.clusters.files import load_cluster
from codescent.clusters.sections import KEYS, SOFTWARE_KEYS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("polari", "did you mean polaris (shipped)?"),
        ("A100_80GB_SXM", "did you mean a100-80gb-sxm (shipped)?"),
        ("labb.toml", "did you mean lab.toml?"),
        ("zzz", "the shipped clusters are a100-40gb-pcie, "),
        ("", 'cluster "": is empty; the shipped clusters are'),
        (".", "is a folder; give a TOML file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("no/such/file.toml", "no such file: there is no folder no/such; the shipped clusters"),
    ],
)
def test_a_cluster_that_is_not_there(name: str, said: str) -> None:
    (problem,) = problems(name)
    assert said in problem


REFUSED = {
    "unknown key": ("units", "unit", "4: device.unit: unknown key of a cluster; did you mean device.units?"),
    "key of another section": ("units", "cards", "4: device.cards: unknown key of a cluster; did you mean node.cards?"),
    "key above all sections": ("what =", "inside =", "1: inside: unknown key of a cluster; did you mean links.inside?"),
    "unknown section": ("[node]", "[nodes]", "6: nodes.devices: unknown key of a cluster; did you mean node.devices?"),
    "unknown device": (
        "A100 SXM4 80 GB",
        "A100 SXM5 80 GB",
        '3: device.spec: given "A100 SXM5 80 GB"; is no device of the table of published ones; '
        "did you mean A100 SXM4 80 GB?",
    ),
    "a short name": (
        "A100 SXM4 80 GB",
        "A100-80GB",
        '3: device.spec: given "A100-80GB"; is no device of the table of published ones; '
        "did you mean A100 SXM4 80 GB or A100 PCIe 80 GB?",
    ),
    "no bandwidth": (
        "300GB/s,3us",
        "3us",
        '9: links.inside: given "3us"; has no bandwidth; must be a bandwidth and a latency, such as "300GB/s,3us" or '
        '"200gbit,5us"',
    ),
    "no link": (
        '"300GB/s,3us"',
        "300",
        "9: links.inside: given 300; must be a string",
    ),
    "bits for bytes": (
        "300GB/s,3us",
        "49mbit,3us",
        '9: links.inside: given "49mbit,3us"; that is 6.12 MB/s, or 49.0 MB/s if bytes are meant; '
        "must be 10.0 MB/s to 20.0 TB/s",
    ),
    "bytes for bits": (
        "200gbit,5us",
        "3200GB/s,5us",
        '10: links.between: given "3200GB/s,5us"; that is 3.20 TB/s, or 400 GB/s if bits are meant; '
        "must be 10.0 kB/s to 2.00 TB/s",
    ),
    "seconds for microseconds": (
        "300GB/s,3us",
        "300GB/s,30s",
        '9: links.inside: given "300GB/s,30s"; the latency is 30.0 s; must be at most 10.0 s',
    ),
    "TFLOP/s": (
        "[node]",
        "[peaks]\nfp8 = 624\n[node]",
        "6: peaks.fp8: given 624; must be FLOP/s, 100 MFLOP/s to 100 PFLOP/s; 312 TFLOP/s are 312e12",
    ),
    "no devices": ("devices = 8", "devices = 0", "6: node.devices: given 0; must be a whole number >= 1 and <= 4096"),
    "no cards": ("cards = 4", "cards = -1", "7: node.cards: given -1; must be a whole number >= 1 and <= 4096"),
    "half a device": (
        "devices = 8",
        "devices = 8.0",
        "6: node.devices: given 8.0; must be a whole number >= 1 and <= 4096; write 8",
    ),
    "a share above 1": ("units = 108", "sustained = 1.1", "device.sustained: given 1.1; must be a number > 0 and <= 1"),
    "a share of 0": ("units = 108", "sustained = 0", "4: device.sustained: given 0; must be a number > 0 and <= 1"),
    "a negative number": ("units = 108", "watts = -1", '4: device.watts: given -1; must be a number >= 0 or "auto"'),
    "not finite": (
        "units = 108",
        "watts = inf",
        '4: device.watts: given inf; must be a number >= 0 or "auto"; must be finite',
    ),
    "memory without a unit": (
        "units = 108",
        'memory = "80"',
        "4: device.memory: given \"80\"; '80' is 80 bytes, less than any device has; with a unit, such as 80GB",
    ),
    "bandwidth with a latency": (
        "units = 108",
        'bandwidth = "2039GB/s,1us"',
        '4: device.bandwidth: given "2039GB/s,1us"; must be a bandwidth, such as "2039GB/s"',
    ),
    "an unknown kind": ("units = 108", 'kind = "gpu"', '4: device.kind: given "gpu"; must be "cuda", "cpu" or "auto"'),
    "an unknown trait": (
        "host_s = 2e-5",
        'overlaps = ["gathers", "layer"]',
        '13: software.megatron.overlaps: given a list; "layer" is no trait of this kind; did you mean "layers"?',
    ),
    "an unknown key of software": (
        "host_s",
        "hosts_s",
        "13: software.megatron.hosts_s: unknown key of a software; did you mean software.megatron.host_s?",
    ),
    "a band upside down": (
        "host_s = 2e-5",
        "band = [1.5, 0.8]",
        "13: software.megatron.band: given a list; must be two numbers above 0, the smaller one first",
    ),
    "a name of software with a space": (
        "[software.megatron]",
        '[software."my own"]',
        '13: software.my own.host_s: "my own" is no name of a software: it has letters, digits, - and _',
    ),
    "a source of nothing": (
        'device.units = "white',
        'device.unit = "white',
        "15: sources.device.unit: unknown key of a cluster; did you mean device.units?",
    ),
    "an empty source": (
        '"white paper"',
        '" "',
        '15: sources.device.units: given " "; must be text in quotes: where the value of device.units is from',
    ),
    "a source of the table": (
        "device.units =",
        "device.spec =",
        "15: sources.device.spec: the table of published devices has the source; leave it out",
    ),
    "a missing section": ('bus = "31.5GB/s"', "", "links.bus: is missing: of a device to the memory of its host"),
    "a section that is a number": ("[links]", "software = 3\n[links]", "8: node.software: unknown key of a cluster"),
    "not TOML": ("units = 108", "units = lots", "4:9: not TOML: Invalid value: units = lots; a string needs quotes"),
    "twice": ("units = 108", "units = 108\nunits = 109", "not TOML: Cannot overwrite a value"),
    "a whole number of many digits": ("units = 108", f"units = {'9' * 30}", "a whole number has at most 64 bits"),
    "a curve of one point": (
        "[links]",
        '[links]\nbetween_curve = [["1MiB", "2GB/s"]]',
        "9: links.between_curve: given a list; must be two or more points, each a message and its bandwidth, such as",
    ),
    "a curve of numbers": (
        "[links]",
        "[links]\nbetween_curve = [[1, 2], [3, 4]]",
        "9: links.between_curve: given a list; must be a list of pairs of strings",
    ),
    "a curve of triples": (
        "[links]",
        '[links]\nbus_curve = [["1MiB", "2GB/s", "1us"], ["2MiB"]]',
        "must be two or more",
    ),
    "a curve that turns back": (
        "[links]",
        '[links]\nbetween_curve = [["64KiB", "1GB/s"], ["64KiB", "2GB/s"]]',
        "point 2: 64.00 KiB after 64.00 KiB; must be longer messages from point to point",
    ),
    "a curve in no unit": (
        "[links]",
        '[links]\ninside_curve = [["1MiB", "1GB/s"], ["4Mb", "2GB/s"]]',
        "point 2: '4Mb' is",
    ),
    "a curve with latencies": (
        "[links]",
        '[links]\ninside_curve = [["1MiB", "1GB/s,3us"], ["4MiB", "2GB/s"]]',
        'point 1: "1GB/s,3us" must be a bandwidth',
    ),
    "a curve out of range": (
        "[links]",
        '[links]\ninside_curve = [["1KiB", "49kB/s"], ["1MiB", "49mbit"]]',
        'point 2: "49mbit": that is 6.12 MB/s, or 49.0 MB/s if bytes are meant; must be 10.0 MB/s to 20.0 TB/s',
    ),
    "a curve of bits": (
        "[links]",
        '[links]\nbetween_curve = [["1MiB", "90GB/s"], ["64MiB", "190GB/s"]]',
        "links.between_curve: 190 GB/s is more than 4 times 25.0 GB/s of links.between; are bits meant in one of them?",
    ),
    "a curve below the latency": (
        "[links]",
        '[links]\nbetween_curve = [["1KiB", "20GB/s"], ["64MiB", "20GB/s"]]',
        "links.between_curve: 1.00 KiB take 0 s, less than the latency of links.between; lower its 5 µs",
    ),
    "an empty section of another name": ("[node]", "[nod]\n[node]", "5: nod: unknown key of a cluster"),
    "a list of tables": ("[node]", "[[node]]", "5: node: given a list, but it is a section: write [node] and its keys"),
    "a table for a value": ('inside = "300GB/s,3us"', 'inside.rate = "300GB/s"', "9: links.inside.rate: unknown key"),
    "a name in quotes": ("units = 108", '"peaks.bf16" = 1', "4: device.peaks.bf16: is a name in quotes"),
    "a date": ("units = 108", "units = 2024-01-01", "4: device.units: given 2024-01-01; must be a whole number >= 0"),
    "a line break in text": ('"two nodes"', '"two\\nnodes"', "1: what: given "),
    "no text": ('"two nodes"', '""', '1: what: given ""; must not be empty'),
}
"""Text of the whole file, what stands there instead, and what is said: its end, or a part of it."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say(case: str) -> None:
    old, new, said = REFUSED[case]
    found = broken(old, new)
    assert any(f"broken.toml:{said}" in problem or said in problem for problem in found), found


def test_a_device_without_a_name_in_the_table_needs_all_values() -> None:
    assert broken('spec = "A100 SXM4 80 GB"\n', "") == (
        'broken.toml: device.name: is missing: such as "A100"; or name a published device with device.spec',
        'broken.toml: device.kind: is missing: "cuda" or "cpu"; or name a published device with device.spec',
        'broken.toml: device.memory: is missing: such as "80GB"; or name a published device with device.spec',
        'broken.toml: device.bandwidth: is missing: such as "2039GB/s"; or name a published device with device.spec',
        "broken.toml: peaks: no number format has FLOP/s; give one, such as fp32 = 19.5e12, or device.spec",
    )


def test_all_problems_come_at_once() -> None:
    Path("broken.toml").write_text(
        '[device]\nspec = "A101"\nunits = -1\n[node]\ndevices = 0\n[links]\ninside = "3us"\nbuss = "1GB/s"\n'
    )
    keys = [problem.split(": ")[1] for problem in problems("broken.toml")]
    assert sorted(keys) == [
        "device.spec", "device.units", "links.between", "links.bus", "links.buss", "links.inside", "node.cards",
        "node.devices",
    ]  # fmt: skip


def test_files_that_cannot_be_read() -> None:
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert problems("binary.toml")[0].startswith("binary.toml:1:1: not UTF-8 text")
    Path("deep.toml").write_text("a = " + "[" * 100_000)
    assert "deep.toml" in problems("deep.toml")[0]
    Path("large.toml").write_bytes(b"#" * (2 << 20))
    assert "has more than" in problems("large.toml")[0]
    Path("empty.toml").write_text("")
    assert "empty.toml: links.inside: is missing" in "\n".join(problems("empty.toml"))


ODD: list[Any] = ["", "3us", "1e400GB/s", "٣GB/s", "nan", "auto", -1, 0, 10**40, 1e308, True, [], ["x"], {}, {"a": 1}]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from([*KEYS, *(f"software.megatron.{key}" for key in SOFTWARE_KEYS), "base", "sources", "software"]),
    value=st.sampled_from(ODD) | st.text(max_size=12) | st.integers() | st.floats(),
)
def test_no_value_of_any_key_raises_another_error(key: str, value: Any) -> None:
    """A broken file gives a cluster or UserError: no traceback, whatever stands at any key."""
    whole = tomllib.loads(WHOLE)
    table = whole
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[last] = value
    Path("odd.toml").write_text(tomli_w.dumps(whole), encoding="utf-8", errors="replace")
    with contextlib.suppress(UserError):
        load_cluster("odd.toml")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, len(WHOLE)), length=st.integers(0, 40), text=st.text(max_size=8))
def test_no_damage_of_a_file_raises_another_error(start: int, length: int, text: str) -> None:
    Path("odd.toml").write_text(WHOLE[:start] + text + WHOLE[start + length :], encoding="utf-8", errors="replace")
    with contextlib.suppress(UserError):
        load_cluster("odd.toml")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.text(max_size=30) | st.builds("{}={}".format, st.sampled_from(list(KEYS)), st.text(max_size=12)))
def test_no_what_if_raises_another_error(change: str) -> None:
    with contextlib.suppress(UserError):
        load_cluster("lab.toml", [change])
