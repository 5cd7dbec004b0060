"""In: a device. Out: what torch does on it beside operators: its name and memory, streams, events, waiting for it.
Does not say what a kind of device offers (device_kinds.py does). No other file names torch's modules."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from codescent.base.device_kinds import CPU, CUDA, GPUS, MPS, XPU, DeviceKind, kind_of

Stream = Any
"""torch.cuda.Stream, torch.xpu.Stream."""
Event = Any
"""torch.cuda.Event, torch.xpu.Event, torch.mps.Event."""

# torch.accelerator has neither names nor graphs, and in torch 2.11 no memory of MPS. The module of a kind has all. For
# CUDA it is torch.cuda, so nothing there goes another way than by its own calls (decision 32).


def offered(device: torch.device) -> DeviceKind:
    """What the kind of a device offers."""
    return kind_of(device.type)


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)


# -- which devices there are


def count(kind: str) -> int:
    """The number of devices of a kind that this process sees."""
    module = _module(kind)
    return int(module.device_count()) if module.is_available() else 0


def found_kind() -> str:
    """The first kind of GPU that this process sees; "cpu": it sees none."""
    return next((kind for kind in GPUS if count(kind)), CPU)


def take(kind: str, index: int) -> torch.device:
    """Make a device the current one of this process. MPS has only one."""
    if kind != MPS:
        _module(kind).set_device(index)
    return torch.device(kind, index)


def make_current(device: torch.device) -> None:
    """Make a device the current one of this thread, where torch has a current device."""
    if device.type in GPUS and device.type != MPS:
        _module(device.type).set_device(device)


@contextmanager
def kept() -> Iterator[None]:
    """A block after which the random numbers of torch and the current device are as before it.

    A GPU that is not in use before the block is left alone: to ask it would put it to use.
    """
    kind = found_kind()
    module = _module(kind)
    in_use = kind in (CUDA, XPU) and module.is_initialized()
    before = module.current_device() if in_use else None
    devices = range(count(kind)) if in_use else ()
    with torch.random.fork_rng(devices=devices, device_type=kind if in_use else CUDA):
        try:
            yield
        finally:
            if before is not None:
                module.set_device(before)


def is_rocm() -> bool:
    """Whether the torch of this process calls AMD's devices "cuda"."""
    return torch.version.hip is not None


def device_name(device: torch.device) -> str:
    """The name of a device as torch has it, such as "NVIDIA H200"; "cpu" of a CPU."""
    if device.type == MPS:
        return str(torch.backends.mps.get_name())
    return str(_module(device.type).get_device_name(device)) if device.type in GPUS else CPU


def unique_name(device: torch.device) -> str:
    """A name that is unique among the devices of all machines; "cpu" for every CPU."""
    if device.type == CPU:
        return CPU
    own = MPS if device.type == MPS else _module(device.type).get_device_properties(device).uuid
    return f"{socket.gethostname()} {own.hex() if isinstance(own, bytes) else own}"


def num_units(device: torch.device) -> int:
    """How many parts of a product a device computes at a time: streaming multiprocessors, compute units of AMD, Xe
    cores of Intel, cores of Apple. 0: not known."""
    if device.type == MPS:
        return int(torch.backends.mps.get_core_count())
    if device.type not in GPUS:
        return 0
    facts = _module(device.type).get_device_properties(device)
    return int(facts.gpu_subslice_count if device.type == XPU else facts.multi_processor_count)


def has_fp64(device: torch.device) -> bool:
    """Whether a device computes in fp64."""
    if device.type == XPU:
        return bool(_module(XPU).get_device_properties(device).has_fp64)
    return device.type != MPS


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums of losses and of norms on a device: fp64, or fp32 where it has none."""
    return torch.float64 if has_fp64(device) else torch.float32


def has_flash(device: torch.device) -> bool:
    """Whether torch's flash attention runs on a device of CUDA: since Ampere. With ROCm torch chooses by itself."""
    return device.type != CUDA or is_rocm() or torch.cuda.get_device_capability(device) >= (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether torch has products in fp8 on a device: on NVIDIA GPUs since compute capability 8.9."""
    return device.type == CUDA and not is_rocm() and torch.cuda.get_device_capability(device) >= (8, 9)


# -- waiting for a device


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given. Does nothing for a CPU."""
    if device.type == MPS:
        _module(MPS).synchronize()
    elif device.type in GPUS:
        _module(device.type).synchronize(device)


def new_stream(device: torch.device) -> Stream | None:
    """A stream of its own; None: the device has none."""
    return _module(device.type).Stream(device) if offered(device).streams else None


def current_stream(device: torch.device) -> Stream:
    """The stream to which operators go. The device must offer streams."""
    return _module(device.type).current_stream(device)


def on_stream(device: torch.device, stream: Stream) -> AbstractContextManager[Any]:
    """A block whose operators go to a stream of the device."""
    found: AbstractContextManager[Any] = _module(device.type).stream(stream)
    return found


def new_event(device: torch.device, *, timed: bool = False) -> Event:
    """An event, with the time at which it happens if `timed`. The device must offer events."""
    event = _module(device.type).Event
    return event(enable_timing=True) if timed else event()


def is_capturing() -> bool:
    """Whether a graph is recorded: then no number may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def recorded(device: torch.device, act: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record what `act` launches on a device of CUDA as a graph. Returns what repeats it, and its result.

    Each repetition reads the same memory as `act`, and overwrites the result. `act` runs before it is recorded, so that
    libraries prepare their kernels; it must not wait for the device.
    """
    aside, stream = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        for _ in range(2):
            act()
    stream.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = act()
    return graph.replay, result


# -- the memory of a device


def memory_in_use(device: torch.device) -> int:
    """Bytes that torch has allocated on a device now."""
    if device.type == MPS:
        return int(_module(MPS).current_allocated_memory())
    return int(_module(device.type).memory_allocated(device))


_most_seen: dict[torch.device, int] = {}


def peak_memory(device: torch.device) -> int:
    """The most bytes that torch has allocated on a device.

    Metal keeps no peak. On MPS it is the most that a call of this function has seen, such as after each instruction.
    """
    if device.type == MPS:
        _most_seen[device] = max(_most_seen.get(device, 0), memory_in_use(device))
        return _most_seen[device]
    # max_memory_allocated sorts hundreds of other numbers; this is read after each instruction.
    stats = _module(device.type).memory_stats_as_nested_dict(device)
    return int(stats["allocated_bytes"]["all"]["peak"])


def forget_peak(device: torch.device) -> None:
    """Give back what the allocator holds and nobody uses, and begin the peak anew. Does nothing for a CPU."""
    if device.type in GPUS:
        _module(device.type).empty_cache()
        if device.type == MPS:
            _most_seen.pop(device, None)
        else:
            _module(device.type).reset_peak_memory_stats(device)


def allocator_numbers(device: torch.device) -> tuple[int, int]:
    """Bytes that torch's allocator has reserved at most, and how often it had to free and try again. The device has a
    memory of its own."""
    stats: dict[str, Any] = _module(device.type).memory_stats(device)
    return most_reserved(device), int(stats.get("num_alloc_retries", 0))


def most_reserved(device: torch.device) -> int:
    """Bytes that torch's allocator has reserved at most. The device has a memory of its own."""
    return int(_module(device.type).max_memory_reserved(device))


def total_memory(device: torch.device) -> int:
    """Bytes of the memory of a GPU; on MPS those that Metal advises to use of the host's."""
    if device.type == MPS:
        return int(_module(MPS).recommended_max_memory())
    return int(_module(device.type).get_device_properties(device).total_memory)


def free_memory(device: torch.device) -> int:
    """Bytes of the memory of a GPU that nobody uses; on MPS what this process may still take (`total_memory`)."""
    if device.type == MPS:
        return max(0, total_memory(device) - int(_module(MPS).driver_allocated_memory()))
    return int(_module(device.type).mem_get_info(device)[0])


def used_memory(device: torch.device) -> int:
    """Bytes of a memory of its own that anybody uses."""
    free, total = _module(device.type).mem_get_info(device)
    return int(total - free)


# -- libraries


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler records: operators of the host, and kernels where it sees them."""
    name = offered(device).activity
    return [ProfilerActivity.CPU, *([getattr(ProfilerActivity, name)] if name else [])]


def backend_versions(backend: str) -> Mapping[str, str]:
    """The version of the library behind a backend's name, by the library. Empty: torch does not say it."""
    if "nccl" in backend and dist.is_nccl_available():
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return {"RCCL" if is_rocm() else "NCCL": ".".join(map(str, found))}
    return {}


def runtime() -> dict[str, str]:
    """What torch was built for, by name: the versions of CUDA, ROCm or Intel's compiler. Empty: for CPUs."""
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return {name: str(version) for name, version in found.items() if version}
