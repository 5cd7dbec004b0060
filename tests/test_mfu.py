"""In: names of devices, plans with recompute, a run. Out: published peaks, recomputed FLOPs, mfu_spec, hfu.
Does not need a device: names are those that torch gives."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from runs import make_project

from codescent.build import build
from codescent.config.sections import Config
from codescent.plan.device_specs import SPECS, spec_of
from codescent.plan.flops import StepFlops
from codescent.record.run_folder import METRICS
from codescent.train.machine import published_peak
from codescent.train.report import Report

EXACT, FAST = {"choice": "exact"}, {"choice": "fast"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40 GB"),
        ("A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        ("Quadro P4000", "Quadro P4000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_a_device_is_found_by_its_whole_name(name: str, found: str | None) -> None:
    spec = spec_of(name)
    assert (spec and spec.name) == found


def test_every_entry_is_whole_and_has_its_own_names() -> None:
    names = [match for spec in SPECS for match in spec.matches]
    assert len(names) == len(set(names))
    for spec in SPECS:
        assert spec.source
        assert 8e9 <= spec.memory_bytes <= 192e9
        assert 2e11 < spec.memory_bytes_per_s <= 8e12
        found = [peak for peak in (spec.fp64, spec.fp32, spec.tf32, spec.bf16) if peak is not None]
        assert found == sorted(found)  # a narrower format is never slower
        assert all(1e12 < peak < 1e16 for peak in found)


def test_the_peak_is_that_of_the_products_of_the_run() -> None:
    h100 = ["NVIDIA H100 80GB HBM3"]
    peaks = {
        (precision, choice["choice"]): (published_peak(h100, precision, choice) or {}).get("peak_flops_per_s")
        for precision in ("fp64", "fp32", "bf16")
        for choice in (EXACT, FAST)
    }
    assert peaks["fp32", "exact"] == 66.9e12
    assert peaks["fp32", "fast"] == 494.7e12
    assert peaks["bf16", "exact"] == peaks["bf16", "fast"] == 989.4e12
    assert peaks["fp64", "exact"] == 66.9e12
    assert published_peak(h100 * 2, "bf16", EXACT) == published_peak(h100, "bf16", EXACT)
    for devices, precision in ((["cpu"], "fp32"), (["Tesla T4"], "bf16"), ([*h100, "NVIDIA H200"], "bf16")):
        assert published_peak(devices, precision, EXACT) is None


def flops(recompute: str, kind: str = "gpt2", **sections: Any) -> StepFlops:
    words: dict[str, Any] = {"model": {"kind": kind, **SIZES[kind]}, "parallel": {"recompute": recompute}}
    for name, section in sections.items():
        words[name] = {**words.get(name, {}), **section}
    ranks = words["parallel"].get("cp", 1)
    return build(Config.model_validate({**words, "train": {"global_batch_size": BATCH}}), V, ranks).flops()


BATCH, D, H, F, T, V = 6, 16, 2, 40, 8, 64
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 3, "num_heads": H, "hidden_dim": D, "ffn_dim": F, "seq_len": T},
    "llama": {"num_layers": 3, "num_heads": H, "num_kv_heads": 1, "hidden_dim": D, "ffn_dim": F, "seq_len": T},
}


@pytest.mark.parametrize("kind", SIZES)
def test_full_recompute_adds_the_forward_pass_of_the_blocks(kind: str) -> None:
    none, full = flops("none", kind), flops("full", kind)
    block = {
        "gpt2": (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D) + 4 * D,
        "llama": 2 * D * D + 2 * D * D // H + 3 * D * F + 2 * D,
    }[kind]
    assert none.recomputed_flops == 0
    assert none.hardware_flops == none.total_flops == full.total_flops
    assert full.recomputed_flops == BATCH * T * 3 * (2 * block + 4 * T * D)
    assert full.hardware_flops == full.total_flops + full.recomputed_flops


def test_the_head_of_a_bert_counts_at_the_positions_that_it_reads() -> None:
    """Counted by hand: 19 of 128 positions have a loss. Nothing of the head reads the others."""
    length, masked, norm = 128, 19, 2 * D
    words = {"num_layers": 3, "num_heads": H, "hidden_dim": D, "ffn_dim": F, "seq_len": length}
    found = build(
        Config.model_validate({"model": {"kind": "bert", **words}, "train": {"global_batch_size": BATCH}}), V, 1
    ).flops()
    block = (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D) + 2 * norm
    everywhere = (length + 2) * D + norm + 3 * block  # positions and segments, their norm
    head = (D * D + D) + norm + V * D + V
    assert found.dense_flops == pytest.approx(6 * BATCH * (length * everywhere + masked * head), rel=1e-12)


@pytest.mark.parametrize("norm_is", ["first", "last"])
def test_the_norms_of_an_encoder_decoder_count_in_their_own_sequence(norm_is: str) -> None:
    source, target, norm = 8, 4, 2 * D
    words = {"num_encoder_layers": 3, "num_decoder_layers": 2, "num_heads": H, "hidden_dim": D, "ffn_dim": F}
    words |= {"source_len": source, "target_len": target, "norm": norm_is}
    found = build(
        Config.model_validate({"model": {"kind": "transformer", **words}, "train": {"global_batch_size": BATCH}}), V, 1
    ).flops()
    square, ffn = D * D + D, (D * F + F) + (F * D + D)
    encoder = 3 * (4 * square + ffn + 2 * norm) + norm
    decoder = 2 * (4 * square + 2 * square + ffn + 3 * norm) + norm + V * D
    cross = 2 * 2 * square  # keys and values of the source
    assert found.dense_flops == pytest.approx(6 * BATCH * (source * (encoder + cross) + target * decoder), rel=1e-12)


@pytest.mark.parametrize("kind", SIZES)
def test_selective_recompute_adds_the_products_of_queries_and_keys(kind: str) -> None:
    assert flops("selective", kind).recomputed_flops == BATCH * 3 * 2 * T * T * D
    assert flops("selective", kind, parallel={"cp": 2}).recomputed_flops == 0
    if kind == "gpt2":
        assert flops("selective", kind, model={"dropout": 0.1}).recomputed_flops == 0


def test_a_bert_recomputes_blocks_whole_but_no_causal_products() -> None:
    sizes = {"num_layers": 2, "num_heads": H, "hidden_dim": D, "ffn_dim": F, "seq_len": T, "vocab_size": 61}
    values = {"model": {"kind": "bert", **sizes}, "train": {"global_batch_size": BATCH}}
    found = {
        recompute: build(Config.model_validate({**values, "parallel": {"recompute": recompute}}), 61, 1).flops()
        for recompute in ("full", "selective")
    }
    block = (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D) + 4 * D
    assert found["full"].recomputed_flops == BATCH * T * 2 * (2 * block + 4 * T * D)
    assert found["selective"].recomputed_flops == 0


@pytest.mark.parametrize("causal", [True, False])
def test_an_encoder_decoder_recomputes_each_stream(causal: bool) -> None:
    """One encoder layer reads S positions; two decoder layers read T, and of the source keys and values."""
    source, target = 12, 6
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "num_heads": H, "hidden_dim": D, "ffn_dim": F}
    lengths = {"source_len": source, "target_len": target, "causal": causal, "bias": False}
    values = {"model": {"kind": "transformer", **sizes, **lengths}, "train": {"global_batch_size": BATCH}}
    found = {
        recompute: build(Config.model_validate({**values, "parallel": {"recompute": recompute}}), V, 1).flops()
        for recompute in ("full", "selective")
    }
    square, ffn = D * D, 2 * D * F
    encoder = source * (4 * square + ffn + 3 * D)  # the third norm is at the encoder's end
    decoder = target * (4 * square + 2 * square + ffn + 3 * D) + source * 2 * square
    pairs = source**2 + 2 * (target**2 + target * source)
    assert found["full"].recomputed_flops == BATCH * (2 * (encoder + 2 * decoder) + 4 * pairs * D)
    assert found["selective"].recomputed_flops == (BATCH * 2 * 2 * target**2 * D if causal else 0)


def test_the_same_shares_as_in_the_papers() -> None:
    """Korthikanti et al. 2022: 96 / 72 for layers of 12 h^2 parameters and short sequences."""
    large = {"num_layers": 4, "num_heads": 8, "hidden_dim": 1024, "ffn_dim": 4096}
    found = flops("full", model=large)
    head = 6.0 * V * 1024 * BATCH * T
    share = found.recomputed_flops / (found.total_flops - head)
    assert share == pytest.approx(1 / 3, rel=1e-3)


def test_mfu_spec_and_hfu_of_a_step() -> None:
    report = Report.__new__(Report)
    report.flops, report.hardware_flops, report.spec_peak = 3e9, 4e9, 5e11
    report.devices = 2
    assert report._of_peaks(0.3, 1e11) == {"mfu_spec": 0.1, "hfu": pytest.approx(0.4)}
    report.spec_peak = None
    assert report._of_peaks(0.3, 1e11)["mfu_spec"] is None


def test_a_run_on_a_cpu_has_hfu_and_no_mfu_spec(tmp_path: Path, forker: Forker) -> None:
    make_project(tmp_path)
    words = ("train.num_steps=2", "train.eval_every=0", "checkpoint.last=false")
    plain = forker.train(tmp_path, "plain", 1, *words)
    full = forker.train(tmp_path, "full", 1, *words, "parallel.recompute=full")
    for row in plain.read_metrics():
        assert row["mfu_spec"] is None
        assert row["hfu"] == row["mfu"]
    model = flops("full", model={"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "ffn_dim": 64, "seq_len": 16})
    assert model.hardware_flops > model.total_flops
    for row in full.read_metrics():
        assert row["hfu"] > row["mfu"]
    assert plain.read_environment()["spec"] is None
    with (plain.path / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == list(METRICS)
    assert rows[1][rows[0].index("mfu_spec")] == ""
    assert rows[1][rows[0].index("hfu")] != ""
