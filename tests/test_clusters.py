"""In: cluster files, shipped ones and one of a user, what-ifs. Out: clusters; files of clusters that are read back.
Does not say what is refused (test_clusters_refused.py does)."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_cluster import WHOLE, problems

from codescent.base.amounts import of_bytes, of_rate
from codescent.base.errors import UserError
from codescent.clusters.cluster import OVERLAPS, PRECISIONS, Cluster, ClusterDevice, Software
from codescent.clusters.described import to_toml, values_of
from codescent.clusters.files import load_cluster, shipped_clusters, software_of
from codescent.clusters.link import CurvePoint, Link
from codescent.clusters.sections import SOFTWARE_KEYS, keys_markdown
from codescent.plan.device_specs import SPECS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "clusters.md"
SHIPPED = [
    "a100-40gb-pcie", "a100-40gb-sxm", "a100-80gb-pcie", "a100-80gb-sxm", "aurora", "b200-sxm", "h100-sxm", "h200-sxm",
    "laptop", "max-1550", "mi300x", "p4000-lab", "polaris", "rtx-3090", "sophia", "t4", "v100",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)


# Shipped files


def test_the_clusters_of_the_issue_are_shipped_inside_the_package() -> None:
    """A file outside of the package is in no wheel."""
    assert list(shipped_clusters()) == SHIPPED
    assert all((ROOT / "codescent") in path.parents for path in shipped_clusters().values())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_value_of_a_shipped_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.what
    keys = {key for key in values_of(cluster) if key != "what"}
    own = tomllib.loads(shipped_clusters()[name].read_text(encoding="utf-8"))
    keys |= {f"software.{of}.{key}" for of, values in own.get("software", {}).items() for key in values}
    assert [key for key in keys if not cluster.sources.get(key, "").strip()] == []
    assert [source for source in cluster.sources.values() if source.startswith(name)] == []  # no line of a file


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_says_nothing_that_the_table_of_devices_says(name: str) -> None:
    """One description for each fact: two may differ one day."""
    own = tomllib.loads(shipped_clusters()[name].read_text(encoding="utf-8"))
    spec = next((spec for spec in SPECS if spec.name == own["device"].get("spec")), None)
    assert not {"name", "bandwidth", "kind"} & set(own["device"]) or spec is None
    assert not {key for key in own.get("peaks", ()) if spec and getattr(spec, key, None)}


def test_what_shipped_clusters_say() -> None:
    """A slip in a unit or a direction: numbers that each reader of their data sheets knows."""
    polaris, aurora, lab = (load_cluster(name) for name in ("polaris", "aurora", "p4000-lab"))
    assert (polaris.devices, polaris.cards, polaris.nodes) == (4, 2, 560)
    assert (polaris.device.peak("bf16"), polaris.inside.bytes_per_s, polaris.between.bytes_per_s) == (
        312e12,
        3e11,
        25e9,
    )
    assert polaris.devices * (polaris.nodes or 0) == 2240
    assert aurora.devices // 2 * (aurora.nodes or 0) == 63744
    assert load_cluster("sophia").devices * 24 == 192
    assert lab.between == Link.parse("49mbit,0.2ms")
    assert Link.parse("3.35TB/s").bytes_per_s == Link.parse("26.8tbit").bytes_per_s == 3.35e12
    assert software_of(lab).between_efficiency == 1.0
    assert lab.device.peak("bf16") == lab.device.peak("fp32") == 5.3e12
    assert load_cluster("v100").device.peak("fp16") == 125e12
    for name in SHIPPED:
        cluster = load_cluster(name)
        assert "fp32" in cluster.device.peaks, name  # else products in fp32 have the peak of a narrower format
        assert cluster.between.bytes_per_s <= cluster.inside.bytes_per_s <= cluster.device.memory_bytes_per_s, name


# One file


def test_a_file_gives_a_whole_cluster() -> None:
    found = load_cluster("lab.toml")
    spec = next(spec for spec in SPECS if spec.name == "A100 SXM4 80 GB")
    peaks = {"fp64": spec.fp64, "fp32": spec.fp32, "tf32": spec.tf32, "bf16": spec.bf16}
    device = ClusterDevice(spec.name, "cuda", spec.memory_bytes, spec.memory_bytes_per_s, peaks, 1.0, 108)
    inside, between, bus = Link(3e11, 3e-6), Link(25e9, 5e-6), Link(31.5e9)
    software = {"megatron": Software(host_s=2e-5)}
    from_spec = (
        "device.name",
        "device.kind",
        "device.memory",
        "device.bandwidth",
        *(f"peaks.{name}" for name in peaks),
    )
    sources = {**dict.fromkeys(from_spec, spec.source), "device.units": "white paper"}
    assert found == Cluster("lab", "two nodes", device, 8, 4, inside, between, bus, software=software, sources=sources)


def test_values_beside_a_published_device_win_over_it() -> None:
    Path("own.toml").write_text(WHOLE.replace("units = 108", 'units = 108\nmemory = "64GiB"\n[peaks]\nfp8 = 1e15'))
    device = load_cluster("own.toml").device
    assert (device.memory_bytes, device.peaks["fp8"], device.peaks["bf16"]) == (2**36, 1e15, 312e12)


def test_a_device_that_nobody_publishes() -> None:
    own = 'name = "mine"\nkind = "cpu"\nmemory = "16GB"\nbandwidth = "50GB/s"\n[peaks]\nfp32 = 1e12'
    Path("own.toml").write_text(WHOLE.replace('spec = "A100 SXM4 80 GB"', own).replace("units = 108\n", ""))
    assert load_cluster("own.toml").device == ClusterDevice("mine", "cpu", 16 * 10**9, 5e10, {"fp32": 1e12})


def test_the_software_of_a_cluster() -> None:
    found = load_cluster("lab.toml", ["software.codescent.step_s=0.5"])
    assert software_of(found) == software_of(found, "codescent") == Software(step_s=0.5)
    assert software_of(found, "megatron").host_s == 2e-5
    assert software_of(load_cluster("lab.toml"), "codescent") == software_of(load_cluster("lab.toml")) == Software()
    with pytest.raises(UserError) as caught:
        software_of(found, "megatrn")
    assert (
        str(caught.value) == 'cluster lab: software "megatrn": the file has none of this name; did you mean megatron?'
    )
    Path("bare.toml").write_text(WHOLE.replace("host_s = 2e-5\n", ""))
    assert load_cluster("bare.toml").software == {"megatron": Software()}


def test_the_keys_of_software_are_its_fields() -> None:
    """A field that no file can set, or a default that a file changes without saying so."""
    fields = {field.name: field.default for field in dataclasses.fields(Software)}
    assert list(SOFTWARE_KEYS) == list(fields)
    Path("bare.toml").write_text(WHOLE.replace("host_s = 2e-5\n", ""))
    assert load_cluster("bare.toml").software["megatron"] == Software()


# Bases and what-ifs


def test_a_file_on_top_of_another_one() -> None:
    Path("mine.toml").write_text('base = "polaris"\n[node]\ncards = 4\n[sources]\nlinks.inside = "mine"\n')
    Path("more.toml").write_text('base = "mine.toml"\n[node]\nnodes = 7\n')
    below, found = load_cluster("polaris"), load_cluster("more.toml")
    assert (found.name, found.devices, found.cards, found.nodes) == ("more", 4, 4, 7)
    assert found.device == below.device
    assert (found.sources["node.cards"], found.sources["node.nodes"]) == ("mine.toml:3", "more.toml:3")
    assert (found.sources["links.inside"], found.sources["links.bus"]) == ("mine", below.sources["links.bus"])


def test_another_published_device_replaces_what_was_said_of_the_one_below() -> None:
    Path("mine.toml").write_text('base = "a100-40gb-sxm"\n[device]\nspec = "H100 SXM5"\n')
    found = load_cluster("mine.toml")
    assert (found.device.name, found.device.memory_bytes) == ("H100 SXM5", 80 * 10**9)
    assert found.sources["device.memory"].startswith("NVIDIA H100")
    assert found.device.units == 108


def test_another_link_replaces_the_curve_of_the_one_below() -> None:
    """A what-if without an effect: the curve of the measured link stays, and decides what messages take."""
    given = 'base = "polaris"\n[links]\nbetween_curve = [["1KiB", "90MB/s"], ["1MiB", "20GB/s"]]\n'
    Path("mine.toml").write_text(given)
    assert load_cluster("mine.toml").between.curve == (CurvePoint(1024, 9e7), CurvePoint(2**20, 2e10))
    assert load_cluster("mine.toml", ["node.cards=4"]).between.curve != ()
    assert load_cluster("mine.toml", ["links.between=50GB/s,5us"]).between == Link(5e10, 5e-6)
    both = ["links.between=50GB/s", 'links.between_curve=[["1MiB", "9GB/s"], ["2MiB", "30GB/s"]]']
    assert load_cluster("mine.toml", both).between.curve == (CurvePoint(2**20, 9e9), CurvePoint(2**21, 3e10))


def test_bases_that_cannot_be() -> None:
    Path("a.toml").write_text('base = "b.toml"\n')
    Path("b.toml").write_text('base = "a.toml"\n')
    assert problems("a.toml") == ("b.toml:1: base: a.toml is its own base: a.toml -> b.toml -> a.toml",)
    Path("a.toml").write_text("base = 3\n")
    assert problems("a.toml") == ("a.toml:1: base: given 3; must be the path of a file, in quotes",)
    Path("a.toml").write_text('base = "polari"\n')
    assert problems("a.toml") == ('a.toml:1: base: cluster "polari": no such file; did you mean polaris (shipped)?',)
    Path("loop.toml").symlink_to("loop.toml")
    assert "did you mean loop.toml" not in problems("loop.toml")[0]


def test_what_ifs_replace_values_and_say_so() -> None:
    changes = ["links.between=50GB/s,5us", "node.cards=8", "node.cards=4", "device.memory=40GB", "peaks.fp8=1e15"]
    changes += ["software.megatron.host_s=1e-5", 'software.codescent.overlaps=["layers"]', "device.spec=H100 SXM5"]
    found = load_cluster("lab.toml", changes)
    assert (found.between, found.cards) == (Link(5e10, 5e-6), 4)
    assert (found.device.name, found.device.memory_bytes, found.device.peaks["fp8"]) == ("H100 SXM5", 40 * 10**9, 1e15)
    assert found.software["megatron"] == Software(host_s=1e-5)
    assert software_of(found) == Software(overlaps=("layers",))
    assert {found.sources[name] for name in ("links.between", "node.cards", "device.memory")} == {"command line"}
    assert load_cluster("lab.toml").cards == 4  # the file is as it was


def test_what_ifs_that_are_wrong_come_with_the_problems_of_the_file() -> None:
    Path("broken.toml").write_text(WHOLE.replace("devices = 8", "devices = 0"))
    wrong = ["links.betwen=1GB/s", "software.megatrn.host_s=1", "x", "sustained=2", "node.cards=two"]
    assert set(problems("broken.toml", *wrong)) == {
        "broken.toml:6: node.devices: given 0; must be a whole number >= 1 and <= 4096",
        "command line: links.betwen: unknown key of a cluster; did you mean links.between?",
        'command line: software.megatrn.host_s: the file has no software "megatrn"; did you mean megatron?',
        "command line: x: not an override; write section.key=value, such as links.between=50GB/s,5us",
        "command line: sustained: unknown key of a cluster; did you mean device.sustained?",
        'command line: node.cards: given "two"; must be a whole number >= 1 and <= 4096',
    }


# Written and read


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_cluster_is_written_and_read_as_the_same(name: str) -> None:
    cluster = load_cluster(name)
    Path(f"{name}-copy.toml").write_text(to_toml(cluster))
    assert load_cluster(f"{name}-copy.toml") == dataclasses.replace(cluster, name=f"{name}-copy")


def links(least: float, most: float) -> st.SearchStrategy[Link]:
    return st.builds(Link, st.floats(least, most), st.just(0.0) | st.floats(1e-9, 10)) | st.builds(
        curved, st.floats(least, most), st.lists(st.integers(1, 10**14), min_size=2, max_size=4, unique=True)
    )


def curved(bytes_per_s: float, sizes: list[int]) -> Link:
    return Link(bytes_per_s, curve=tuple(CurvePoint(size, bytes_per_s) for size in sorted(sizes)))


SHARES = st.floats(0.001, 1)
CLUSTERS = st.builds(
    Cluster,
    st.just("written"),
    st.sampled_from(["", "machines"]),
    st.builds(
        ClusterDevice,
        st.sampled_from(["a", 'Ω "b" \\']),
        st.sampled_from(["cuda", "cpu"]),
        st.integers(10**6, 10**14),
        st.floats(1e8, 1e14),
        st.dictionaries(st.sampled_from(PRECISIONS), st.floats(1e8, 1e17), min_size=1),
        SHARES,
        st.integers(0, 1000),
    ),
    st.integers(1, 4096),
    st.integers(1, 4096),
    links(1e7, 2e13),
    links(1e4, 2e12),
    links(1e7, 2e13),
    st.booleans(),
    st.none() | st.integers(1, 10**6),
    st.none() | st.floats(0, 1e3),
    st.none() | st.floats(0, 1e4),
    st.dictionaries(
        st.sampled_from(["codescent", "a-b_1"]),
        st.builds(
            Software,
            product_efficiency=SHARES,
            hop_s=st.floats(0, 1),
            logit_bytes=st.integers(0, 8),
            precision=st.sampled_from(["", "bf16"]),
            overlaps=st.lists(st.sampled_from(OVERLAPS), unique=True).map(tuple),
            units=st.sampled_from(["", "again", "kept"]),
            band=st.tuples(st.floats(0.1, 1), st.floats(1, 3)),
            fitted_on=st.sampled_from(["", "runs of this machine"]),
        ),
    ),
    st.dictionaries(st.sampled_from(["node.cards", "device.memory", "software.codescent"]), st.just("measured")),
    host_bytes_per_s=st.none() | st.floats(1e8, 1e14),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CLUSTERS)
def test_any_cluster_is_written_and_read_as_the_same(cluster: Cluster) -> None:
    """A number that loses its last digit in a text such as "300GB/s,3us"; a field that is not written."""
    Path("written.toml").write_text(to_toml(cluster), encoding="utf-8")
    assert load_cluster("written.toml") == cluster


def test_what_no_file_can_say_is_not_written() -> None:
    cluster = dataclasses.replace(load_cluster("lab.toml"), inside=Link(1e9, 0.0, queue_s=1.0))
    with pytest.raises(ValueError, match="a link with queue_s has no text"):
        to_toml(cluster)
    with pytest.raises(ValueError, match="cards of single nodes"):
        to_toml(dataclasses.replace(load_cluster("lab.toml"), hosts={1: Link(1e9)}))


# The page


def row(cluster: Cluster) -> str:
    """A cluster in the table of the page."""
    device, peak = cluster.device, of_rate(cluster.device.peak("bf16") * cluster.device.sustained, "FLOP/s")
    node = f"{cluster.devices} of {device.name}, {of_bytes(device.memory_bytes)}, {peak}"
    inside, between = (of_rate(link.bytes_per_s, "B/s") for link in (cluster.inside, cluster.between))
    return f"| `{cluster.name}` | {node} | {inside} | {cluster.cards} of {between} |"


def test_the_page_has_the_keys_and_the_clusters() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert keys_markdown() in page
    rows = [row(load_cluster(name)) for name in SHIPPED]
    assert [one for one in rows if one not in page] == []


def test_the_examples_of_the_page_load(tmp_path: Path) -> None:
    blocks = [block.partition("```")[0] for block in PAGE.read_text(encoding="utf-8").split("```toml\n")[1:]]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        (tmp_path / f"example{number}.toml").write_text(block)
        assert load_cluster(f"example{number}.toml").what
