"""In: the name of a device, as torch gives it. Out: the peaks that its maker publishes, with their
source; None: the table lacks the device. The metric mfu_spec is relative to them.
Does not measure (train/machine.py does) and does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

GFLOPS, GB = 1e9, 10**9


@dataclass(frozen=True)
class DeviceSpec:
    """A device as its maker publishes it: dense matrix products, no sparsity, one device as torch counts devices.

    A peak is that of the fastest unit that torch's products can use: tensor or matrix cores where the device has them
    for the precision, summing in fp32 or wider. None: not published for this device, or sources differ.

    Attributes:
        name: of the device and its form.
        matches: what torch calls it, without the words NVIDIA and Tesla before it.
        memory_bytes, memory_bytes_per_s: capacity and bandwidth of its memory.
        fp64, fp32, tf32, bf16: FLOP/s. fp32 is without TF32.
        source: document, and the table or section in it.
    """

    name: str
    matches: tuple[str, ...]
    memory_bytes: int
    memory_bytes_per_s: float
    fp64: float | None
    fp32: float | None
    tf32: float | None
    bf16: float | None
    source: str

    def peak_flops_per_s(self, precision: str) -> float | None:
        """The peak of matrix products in a precision: "fp64", "fp32", "tf32" or "bf16". None: not published."""
        peaks: dict[str, float | None] = {"fp64": self.fp64, "fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16}
        return peaks[precision]


def spec_of(name: str) -> DeviceSpec | None:
    """The entry of a device. The whole name must match: a share of a device (MIG), and a variant that is not in the
    table, have other peaks."""
    words = name.split()
    while words and words[0].lower() in ("nvidia", "tesla"):
        words = words[1:]
    return _BY_NAME.get(" ".join(words).lower())


def specs_like(name: str) -> tuple[DeviceSpec, ...]:
    """The entries that a short name such as "A100-80GB" may mean: they have all of its words. None: no entry has."""
    words = _words(name)
    return tuple(spec for spec in SPECS if words and words <= _words(" ".join((spec.name, *spec.matches))))


def _words(name: str) -> set[str]:
    """The words of a name in lower case; "80 GB" and "80GB" are the same word."""
    joined = re.sub(r"(\d) (?=gb\b)", r"\1", re.sub(r"[^a-z0-9.]+", " ", name.lower()))
    return set(joined.split()) - {"nvidia", "tesla"}


def _spec(
    name: str,
    matches: tuple[str, ...],
    memory: tuple[float, float],
    peaks: tuple[float | None, float | None, float | None, float | None],
    source: str,
) -> DeviceSpec:
    """`memory`: GB, GB/s. `peaks`: TFLOP/s of fp64, fp32, tf32 and bf16."""
    fp64, fp32, tf32, bf16 = (None if peak is None else round(peak * 1000) * GFLOPS for peak in peaks)
    return DeviceSpec(name, matches, round(memory[0] * GB), memory[1] * GB, fp64, fp32, tf32, bf16, source)


_P100 = "NVIDIA Tesla P100 data sheet (2016), table of specifications"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet (2020), table of specifications"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (2021), table of specifications"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper (2021), appendix, table of specifications"
_ADA = "NVIDIA Ada GPU Architecture white paper (2022), appendix A, table of specifications"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture white paper (2022), table of H100 GPU specifications"
_SPARSE = "; half of the number with sparsity"
_H100_NVL = f"NVIDIA H100 Tensor Core GPU data sheet (2024), table of specifications{_SPARSE}"
_H200 = f"NVIDIA H200 Tensor Core GPU data sheet (2024), table of specifications{_SPARSE}"
_GH200 = f"NVIDIA GH200 Grace Hopper Superchip data sheet (2024), table of specifications{_SPARSE}"
_B200 = "NVIDIA Blackwell Architecture Technical Brief (2024), table of HGX B200, per GPU, dense"
_MI250X = (
    "AMD CDNA 2 Architecture white paper (2021), table of MI250X; half of it, as torch counts each die as a device"
)
_MI300X = "AMD Instinct MI300X Accelerator data sheet (2023), peak performance"
_MAX_1550 = (
    "Intel, Ponte Vecchio, Hot Chips 34 (2022), peak throughput, and Intel Data Center GPU Max 1550, product "
    "specifications; half of it, as torch counts each stack as a device"
)

SPECS: tuple[DeviceSpec, ...] = (
    _spec("P100 PCIe 12 GB", ("P100-PCIE-12GB",), (12, 549), (4.7, 9.3, None, None), _P100),
    _spec("P100 PCIe 16 GB", ("P100-PCIE-16GB",), (16, 732), (4.7, 9.3, None, None), _P100),
    _spec("P100 SXM2", ("P100-SXM2-16GB",), (16, 732), (5.3, 10.6, None, None), _P100),
    _spec("V100 PCIe", ("V100-PCIE-16GB",), (16, 900), (7.0, 14.0, None, None), _V100),
    _spec("V100 PCIe 32 GB", ("V100-PCIE-32GB",), (32, 900), (7.0, 14.0, None, None), _V100),
    _spec("V100 SXM2", ("V100-SXM2-16GB",), (16, 900), (7.8, 15.7, None, None), _V100),
    _spec("V100 SXM2 32 GB", ("V100-SXM2-32GB",), (32, 900), (7.8, 15.7, None, None), _V100),
    _spec("T4", ("T4",), (16, 320), (None, 8.1, None, None), "NVIDIA T4 data sheet (2019), table of specifications"),
    _spec(
        "Quadro P4000",
        ("Quadro P4000",),
        (8, 243),
        (None, 5.3, None, None),
        "NVIDIA Quadro P4000 data sheet (2017), specifications",
    ),
    _spec("A100 SXM4 40 GB", ("A100-SXM4-40GB",), (40, 1555), (19.5, 19.5, 156, 312), _A100),
    _spec("A100 SXM4 80 GB", ("A100-SXM4-80GB",), (80, 2039), (19.5, 19.5, 156, 312), _A100),
    _spec("A100 PCIe 40 GB", ("A100-PCIE-40GB",), (40, 1555), (19.5, 19.5, 156, 312), _A100),
    _spec("A100 PCIe 80 GB", ("A100 80GB PCIe", "A100-PCIE-80GB"), (80, 1935), (19.5, 19.5, 156, 312), _A100),
    _spec("A30", ("A30",), (24, 933), (10.3, 10.3, 82, 165), "NVIDIA A30 data sheet (2021), table of specifications"),
    _spec("A10", ("A10",), (24, 600), (None, 31.2, 62.5, 125), "NVIDIA A10 data sheet (2021), table of specifications"),
    _spec(
        "A40", ("A40",), (48, 696), (None, 37.4, 74.8, 149.7), "NVIDIA A40 data sheet (2021), table of specifications"
    ),
    _spec("RTX A6000", ("RTX A6000",), (48, 768), (None, 38.7, 77.4, 154.8), _GA102),
    _spec("GeForce RTX 3090", ("GeForce RTX 3090",), (24, 936), (None, 35.6, 35.6, 71), _GA102),
    _spec("GeForce RTX 4090", ("GeForce RTX 4090",), (24, 1008), (None, 82.6, 82.6, 165.2), _ADA),
    _spec(
        "L4",
        ("L4",),
        (24, 300),
        (None, 30.3, 60, 121),
        f"NVIDIA L4 Tensor Core GPU data sheet (2023), table of specifications{_SPARSE}",
    ),
    _spec(
        "L40S",
        ("L40S",),
        (48, 864),
        (None, 91.6, 183, 362.05),
        "NVIDIA L40S data sheet (2023), table of specifications",
    ),
    _spec("H100 PCIe", ("H100 PCIe",), (80, 2000), (51.2, 51.2, 378, 756), _H100),
    _spec("H100 SXM5", ("H100 80GB HBM3",), (80, 3350), (66.9, 66.9, 494.7, 989.4), _H100),
    _spec("H100 NVL", ("H100 NVL",), (94, 3900), (60, 60, 417.5, 835.5), _H100_NVL),
    _spec("H200 SXM", ("H200",), (141, 4800), (67, 67, 494.5, 989.5), _H200),
    _spec("H200 NVL", ("H200 NVL",), (141, 4800), (60, 60, 417.5, 835.5), _H200),
    _spec("GH200 96 GB", ("GH200 480GB",), (96, 4000), (67, 67, 494.5, 989.5), _GH200),
    _spec("GH200 144 GB", ("GH200 144G HBM3e",), (144, 4900), (67, 67, 494.5, 989.5), _GH200),
    _spec("B200 SXM", ("B200",), (192, 8000), (None, None, 1100, 2250), _B200),
    _spec("MI250X, one of two dies", ("AMD Instinct MI250X",), (64, 1638), (47.85, 47.85, None, 191.5), _MI250X),
    _spec(
        "MI300X",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        (192, 5300),
        (163.4, 163.4, 653.7, 1307.4),
        _MI300X,
    ),
    _spec(
        "Max 1550, one of two stacks",
        ("Intel(R) Data Center GPU Max 1550",),
        (64, 1638.4),
        (26, 26, 209.5, 419.5),
        _MAX_1550,
    ),
)
"""Each device in one entry. P100, V100, T4 and P4000 have no bf16 products in hardware. Data sheets of devices for
graphics give no fp64 peak. A CPU has none: makers publish no number, and it depends on clock rates under vector load
and on the cores that a job may use. So CPUs are measured only."""

_BY_NAME = {match.lower(): spec for spec in SPECS for match in spec.matches}
