"""In: the name of a kind of device, as torch has it. Out: `DeviceKind`: what such devices offer, in one table.
Does not import torch and finds no device: device.py does. Everybody asks this table, so no other file knows names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CPU, CUDA, XPU, MPS = "cpu", "cuda", "xpu", "mps"
AUTO = "auto"


@dataclass(frozen=True)
class DeviceKind:
    """What the devices of a kind offer. The defaults are those of a kind that is not in the table, such as meta.

    Attributes:
        name: torch's name, such as "cuda".
        label: such a device in a message.
        kernels: CPU or CUDA: which operators the layers choose, and so what is counted, priced and kept for backward.
            All GPUs have those of CUDA.
        backend, library: torch's name of the backend of collectives, and the library behind it. "": there is none, so
            a run has one process.
        aborts: a rank can give up its process groups while others still wait in them.
        own_memory: its memory is not the host's: a size of its own, copies over a bus, and something to offload.
        streams: copies and collectives run beside computations, in an order of their own.
        events: the time of a lap is known without waiting for the device.
        pins: page-locked memory of the host, from which copies are asynchronous.
        graphs: the compiler replays launches as a graph (`train.cuda_graphs`).
        groups: torch multiplies groups of rows, each by a matrix of its own, with one kernel.
        compiles: torch.compile is chosen by default, if a trial on the device works.
        tiles: attention to the keys of several ranks is computed tile by tile: torch has no fused kernel that gives
            the log-sum-exp there, or none that is faster.
        limits: fused kernels of optimizers read on the device by how much to clip, and whether to skip the step.
        deterministic: torch refuses, or replaces, kernels whose result varies (`train.deterministic`).
        copies_modules: torch.nn.DataParallel divides a batch over devices of one process.
        activity: what torch's profiler calls its kernels, a name of ProfilerActivity; "": it does not see them.
        visible: variables that say which devices a process sees. The first that is set counts.
    """

    name: str
    label: str = ""
    kernels: str = CUDA
    backend: str = ""
    library: str = ""
    aborts: bool = False
    own_memory: bool = False
    streams: bool = False
    events: bool = False
    pins: bool = False
    graphs: bool = False
    groups: bool = False
    compiles: bool = True
    tiles: bool = False
    limits: bool = True
    deterministic: bool = True
    copies_modules: bool = False
    activity: str = ""
    visible: tuple[str, ...] = ()

    @property
    def a_device(self) -> str:
        """The label with its article, such as "an XPU device"."""
        return f"{'an' if self.label[:1] in 'MX' else 'a'} {self.label}"


KINDS: Mapping[str, DeviceKind] = {
    CPU: DeviceKind(CPU, "CPU", kernels=CPU, backend="gloo", library="gloo", compiles=False, tiles=True),
    # ROCm has the names of CUDA in torch, and RCCL that of NCCL. What differs is in device.py.
    CUDA: DeviceKind(
        CUDA,
        "CUDA device",
        backend="nccl",
        library="NCCL",
        aborts=True,
        own_memory=True,
        streams=True,
        events=True,
        pins=True,
        graphs=True,
        groups=True,
        copies_modules=True,
        activity="CUDA",
        visible=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    ),
    XPU: DeviceKind(
        XPU,
        "XPU device",
        backend="xccl",
        library="oneCCL",
        own_memory=True,
        streams=True,
        events=True,
        pins=True,
        tiles=True,
        activity="XPU",
        visible=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    ),
    # The memory is the host's. torch has one stream there, a compiler that is a prototype, and neither collectives nor
    # graphs nor a profile of kernels; it does not say which kernels are deterministic.
    MPS: DeviceKind(MPS, "MPS device", events=True, compiles=False, tiles=True, limits=False, deterministic=False),
}
"""By name, in the order in which "auto" looks for them, after the CPU, which is always there."""

GPUS = tuple(name for name in KINDS if name != CPU)
NAMES = (AUTO, *KINDS)
"""Values of `train.device` and --device."""


def kind_of(name: str) -> DeviceKind:
    """The kind of this name; one with the defaults, if the table lacks it."""
    return KINDS.get(name) or DeviceKind(name)


def kernels_of(name: str) -> str:
    """CPU or CUDA: the operators that are chosen on a kind of device."""
    return kind_of(name).kernels


def in_words() -> str:
    """The values of `train.device`, for messages: "auto, cpu, cuda, xpu or mps"."""
    return f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
