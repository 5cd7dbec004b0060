"""In: a plan, a device, a precision. Out: the choice of kernels for fp32 products on a CPU, the measured peak FLOP/s;
a UserError if the plan needs more memory than the device has.
Does not choose the device (devices.py does) and does not count that memory (cost/stage_memory.py does)."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import codescent
from codescent.base import device as devices
from codescent.base.cores import memory_bytes
from codescent.base.counted import counted
from codescent.base.device_kinds import GPUS, KINDS, kernels_of
from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.clusters.by_links import of_device
from codescent.cost.stage_memory import memory
from codescent.operators import products
from codescent.plan import AXES, Plan
from codescent.plan.device_specs import spec_of

if TYPE_CHECKING:
    from codescent.config.sections import Optimizer as OptimizerConfig
    from codescent.config.sections import Train as TrainConfig

Matmul = Literal["exact", "fast"]
Products = Literal["bf16", "fp32"]
TORCH_SETTING: dict[Matmul, str] = {"exact": "highest", "fast": "medium"}

TRIAL = 768
"""Rows and columns of the trial's matrices: GPT-2's width. A product takes about 5 ms on one core."""

WORTH_IT = 1.15
"""Smallest speedup with which fast kernels are chosen. A smaller one may be noise."""

ERROR_ALLOWED = 4.0
"""Largest error of fast kernels, as a multiple of the exact kernels' error. It allows fp32 sums in another order."""

BF16_TRIAL = 256
"""Rows and columns of the matrices of `try_bf16`: small, as a slow processor takes 50 ms for such a bf16 product."""

BF16_SLOW = 2.0
"""bf16 products are computed in fp32 if the processor's own take this many times as long. With bf16 instructions they
take less than fp32's time, without them at least 5 times as long, so noise does not change the choice."""

OF_SOME_MODELS = ("transformers",)
"""Libraries that only the models of some runs need."""
CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "sve", "bf16", "svebf16")
"""Flags of /proc/cpuinfo (x86, Arm) on which the speed of matrix products depends."""

PEAK_SIDE: dict[str, int] = {"cpu": 1024, "cuda": 8192}
PEAK_TRIES, PEAK_FASTER, PEAK_S = 8, 0.98, 0.5
"""Measurements of the peak in a row that are less than 2 % faster than the best; the most seconds of all of them."""
PEAK_LEAST_S = 0.2
"""The least seconds: the kernel counts the work of other programs in hundredths of a second."""


def try_matmul(wanted: str, device: torch.device) -> dict[str, Any]:
    """Choose the fp32 matrix kernels of the CPU and switch torch to them.

    By default torch uses MKL, which uses AVX-512 on Intel processors only. "medium" precision uses oneDNN, which uses
    AVX-512 on all processors that have it, but computes in bf16 on processors with AMX. So with "auto" a trial
    measures speed and error of both. On CUDA "auto" means exact, because TF32 is a lower precision.

    Returns:
        "choice" ("exact" or "fast") and "trial", the measurements.
    """
    found: dict[Matmul, dict[str, float]] = {}
    choice: Matmul = "fast" if wanted == "fast" else "exact"
    if wanted == "auto" and device.type == "cpu":
        found = _trial()
        exact, fast = found["exact"], found["fast"]
        quicker = fast["seconds"] * WORTH_IT < exact["seconds"]
        choice = "fast" if quicker and fast["error"] <= ERROR_ALLOWED * exact["error"] else "exact"
    use_matmul(choice)
    return {"choice": choice, "trial": found}


def try_bf16(device: torch.device, precision: str) -> dict[str, Any] | None:
    """Choose how bf16 products are computed on a CPU, by the time of the three products of a linear layer.

    On a processor without bf16 instructions they take 5 to 85 times as long as fp32 products (torch 2.13). There
    operands are widened to fp32 and results are rounded (`operators/products.py`).

    Returns:
        "choice": "bf16" (the processor's own products) or "fp32"; "trial": seconds of both. None: no bf16 on a CPU.
    """
    if precision != "bf16" or device.type != "cpu":
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight, d_y = (torch.randn(BF16_TRIAL, BF16_TRIAL, generator=generator).bfloat16() for _ in range(3))
    pairs = ((x, weight.t()), (d_y, weight), (d_y.t(), x))
    best = {"bf16": [float("inf")] * 3, "fp32": [float("inf")] * 3}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that no thread waits for another that has no core
    for _ in range(5):  # in turns, so that other load on the machine slows both
        for kind, shortest in best.items():
            products.widen_bf16(kind == "fp32")
            for number, pair in enumerate(pairs):
                shortest[number] = min(shortest[number], _best_seconds(partial(products.mm, *pair), device, 1))
    torch.set_num_threads(threads)
    products.widen_bf16(False)
    seconds = {kind: sum(shortest) for kind, shortest in best.items()}
    return {"choice": faster_products(seconds), "trial": seconds}


def faster_products(seconds: Mapping[str, float]) -> Products:
    """The products to choose, by the seconds of both. The processor's own, unless they are much slower."""
    return "fp32" if seconds["bf16"] > BF16_SLOW * seconds["fp32"] else "bf16"


def use_matmul(choice: Matmul) -> None:
    """Switch torch's fp32 matrix products to the chosen kernels."""
    torch.set_float32_matmul_precision(TORCH_SETTING[choice])


def _trial() -> dict[Matmul, dict[str, float]]:
    """Measure exact and fast kernels: the shortest of nine products in seconds, and the largest error against fp64.

    The error is relative to the largest element of the result. Exact and fast products alternate, so that other load
    on the machine slows both.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(TRIAL, TRIAL, generator=generator) for _ in range(2))
    reference = a.double() @ b.double()
    found: dict[Matmul, dict[str, float]] = {}
    for kind in TORCH_SETTING:
        use_matmul(kind)
        error = float(((a @ b).double() - reference).abs().max() / reference.abs().max())
        found[kind] = {"seconds": float("inf"), "error": error}
    for _ in range(9):
        for kind, measured in found.items():
            use_matmul(kind)
            measured["seconds"] = min(measured["seconds"], _best_seconds(lambda: a @ b, torch.device("cpu"), 1))
    return found


def _best_seconds(work: Any, device: torch.device, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        devices.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def peak_flops_per_s(device: torch.device, precision: str) -> float:
    """FLOP/s of a square matrix product on this rank, the best of several measurements. MFU is relative to it.

    They end after PEAK_TRIES that are no faster than the best before, or after PEAK_S: other programs come and go. They
    take PEAK_LEAST_S at least. The memory of the product is no part of the peak that a run on a GPU reports.
    """
    side = PEAK_SIDE[kernels_of(device.type)]
    seconds = _seconds_of_product(side, device, precision)
    devices.forget_peak(device)  # its matrices are free by now, but the allocator holds their memory, and counts it
    return 2.0 * side**3 / seconds


def _seconds_of_product(side: int, device: torch.device, precision: str) -> float:
    a, b = (torch.randn(side, side, device=device).to(TORCH_DTYPE[precision]) for _ in range(2))
    torch.mm(a, b)
    best, tries, begin = float("inf"), 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begin) < PEAK_LEAST_S or (tries < PEAK_TRIES and spent_s < PEAK_S):
        seconds = _best_seconds(lambda: torch.mm(a, b), device, 1)
        tries = 0 if seconds < PEAK_FASTER * best else tries + 1
        best = min(best, seconds)
    return best


def published_peak(devices: Sequence[str], precision: str, matmul: Mapping[str, Any]) -> dict[str, Any] | None:
    """The peak of a device that its maker publishes, for environment.json: name, precision, peak_flops_per_s, source.

    None: the ranks have different devices, or no peak is published for the device and the precision.

    Args:
        devices: name of the device of each kind of machine, as `describe` gives it.
        precision: of the run.
        matmul: the choice of fp32 kernels; on CUDA the fast ones are TF32.
    """
    spec = spec_of(devices[0]) if len(set(devices)) == 1 else None
    of_products = "tf32" if precision == "fp32" and matmul["choice"] == "fast" else precision
    peak = None if spec is None else spec.peak_flops_per_s(of_products)
    if spec is None or peak is None:
        return None
    return {"name": spec.name, "precision": of_products, "peak_flops_per_s": peak, "source": spec.source}


def refuse_device(plan: Plan, device: torch.device, *, deterministic: bool = False, profiles: bool = False) -> None:
    """Refuse a plan that needs what the device does not offer: memory to offload from, fp64, several devices,
    deterministic kernels (`train.deterministic`), a profile of kernels (section [profile]).

    Raises:
        UserError: with what is missing, and a setting that works without it.
    """
    problems, kind = [], devices.offered(device)
    here = f"this run computes on {kind.a_device}"
    shares = device.type in KINDS and not kind.own_memory
    if shares and any(tensor.host_bytes(plan.mesh) for tensor in plan.tensors):
        problems.append(
            f"parallel.offload: {here}, which uses host memory already: there is nothing to "
            'offload; set parallel.offload = "none"'
        )
    if plan.work.precision == "fp64" and not devices.has_fp64(device):
        problems.append(
            f'train.precision = "fp64": {here} ({devices.device_name(device)}), which has no fp64; set '
            'train.precision = "fp32", or train.device = "cpu"'
        )
    if plan.work.fp8 and not plan.work.fp8_emulated and not devices.has_fp8(device):
        problems.append(
            f'train.fp8 = "{plan.work.fp8}": {here} ({devices.device_name(device)}), which has no products in fp8; '
            "NVIDIA GPUs since compute capability 8.9 have them (Ada, Hopper, Blackwell); set train.fp8 = "
            '"none", or train.fp8_emulated = true to see losses'
        )
    if deterministic and not kind.deterministic:
        problems.append(
            f"train.deterministic = true: {here}, and torch does not say which of its kernels are deterministic; "
            'set it to false, or train.device = "cpu"'
        )
    if profiles and device.type in GPUS and not kind.activity:
        problems.append(
            f"profile.active: {here}, whose kernels torch's profiler does not see; set it to 0, or "
            'train.device = "cpu"'
        )
    if plan.devices > 1:
        count = devices.count(kind.name) if kind.copies_modules else 0
        if count < plan.devices:
            have = f"this machine has {counted(count, kind.label)}" if count else here
            problems.append(
                f"parallel.data_parallel = {plan.devices}: torch.nn.DataParallel divides a batch over CUDA devices of "
                f"one process, but {have}; remove the key and start ranks (--ranks N): dp_replicate works on any device"
            )
    if problems:
        raise UserError(*problems)


def refuse_too_large(plan: Plan, device: torch.device, local_world_size: int, *, compiled: str = "none") -> None:
    """Refuse a plan that needs more memory than there is.

    A device must have the least that a step needs. The memory of a machine, which its `local_world_size` ranks share,
    must have their state. `compiled`: what torch.compile compiles (`memory`).

    Raises:
        UserError: the bytes needed and available.
    """
    mesh, machines = plan.mesh, of_device(device.type)
    firsts = (mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(mesh.pp))
    held = [memory(plan, rank, machines, compiled=compiled) for rank in firsts]
    found: list[tuple[str, int, float, float, int]] = []  # memory, ranks, state, bytes needed, bytes available
    has_own = devices.offered(device).own_memory
    if has_own:
        fullest = max(held, key=lambda one: one.least)
        needed = fullest.least if plan.devices == 1 else fullest.state  # several devices divide what they compute
        size = devices.total_memory(device)
        found.append(("the device", 1, fullest.state, needed, size))
    each = [one.host + (0.0 if has_own else one.state) for one in held]
    in_all = sum(each) * local_world_size / mesh.pp
    found.append(("this machine", local_world_size, in_all, in_all, memory_bytes()))
    problems = [
        f"the model has {plan.num_parameters:,} parameters: weights, gradients and optimizer state"
        f"{' and activations' * (needed > state)} of {counted(ranks, 'rank')} take {needed / 2**30:,.1f} GiB, but "
        f"{where} has {available / 2**30:,.1f} GiB; take a smaller model, more machines, or divide it "
        "(parallel.dp_shard, tp, pp)"
        for where, ranks, state, needed, available in found
        if needed > available
    ]
    if problems:
        raise UserError(*problems)


def set_deterministic(wanted: bool) -> None:
    """Make torch refuse operations whose result varies between identical runs (train.deterministic)."""
    if wanted != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wanted)  # imports the compiler, which takes half a second
    if wanted:
        # cuBLAS needs a fixed workspace: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def levers(train: TrainConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Settings that change the speed of a run, for environment.json. `compiling.levers` adds what it has chosen."""
    return {
        "precision": train.precision,
        "fused_optimizer": optimizer.fused,
        "deterministic": train.deterministic,
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES"),
        **{name: os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def describe(device: torch.device, num_threads: int, world_size: int) -> dict[str, Any]:
    """Machine and software versions, for environment.json."""
    return {
        "codescent": codescent.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: sys.modules[name].__version__ for name in OF_SOME_MODELS if sys.modules.get(name) is not None},
        "system": platform.platform(),
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "load": os.getloadavg()[0],
        "device": devices.device_name(device),
        "runtime": devices.runtime(),
        "world_size": world_size,
        "num_threads": num_threads,
    }


def _processor() -> str:
    return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def _instructions() -> str:
    """The vector instructions that torch uses, and those of INSTRUCTIONS that the processor has.

    A virtual machine may have fewer than the processor of this name.
    """
    flags = {*_of_cpuinfo("flags").split(), *_of_cpuinfo("Features").split()}
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name in INSTRUCTIONS if name in flags)])


def _of_cpuinfo(field: str) -> str:
    """The value of a field of /proc/cpuinfo for the first core; "": there is none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return next(
        (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == field), ""
    )
