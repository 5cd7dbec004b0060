"""In: stand-ins for torch's modules of devices. Out: what is called on CUDA, XPU and MPS, what is chosen, what refused.
Does not run on a device: none of Intel, AMD and Apple was at hand (docs/devices.md)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from declared_cases import case
from forker import Forker
from sources import sources
from torch.profiler import ProfilerActivity

import codescent
from codescent.base import device
from codescent.base.device_kinds import CPU, CUDA, GPUS, KINDS, MPS, NAMES, XPU, kernels_of, kind_of
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.base.stopwatch import Stopwatch
from codescent.build import build
from codescent.clusters.by_links import of_device
from codescent.config.contradictions import contradictions
from codescent.config.decided import compiles, head_chunk_tokens, with_device
from codescent.config.sections import Config, Optimizer
from codescent.cost.stage_memory import memory
from codescent.inference.trained import device_of, module_of
from codescent.operators.fused_attention import EFFICIENT, FLASH, fused_attention_for
from codescent.train import compiling, machine, optimize
from codescent.train.devices import backends, choose_devices, versions
from codescent.train.optimize import Weight

PACKAGE = Path(codescent.__file__).parent
GPT2 = {"model": {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "seq_len": 8}}
ALONE, OF_FOUR = Rank(), Rank(2, 2, 4, 4)
TORCH_OF_DEVICES = ("cuda", "xpu", "mps", "accelerator", "version", "get_device_module")


def plan_of(**sections: Any) -> Any:
    return build(Config.model_validate(GPT2 | sections), 50, 1)


def see(monkeypatch: pytest.MonkeyPatch, **found: int) -> list[Any]:
    """Pretend so many devices of each kind; returns where the chosen ones are noted."""
    chosen: list[Any] = []
    for kind in GPUS:
        module, number = torch.get_device_module(kind), found.get(kind, 0)
        monkeypatch.setattr(module, "is_available", lambda number=number: number > 0)
        monkeypatch.setattr(module, "device_count", lambda number=number: number)
        monkeypatch.setattr(module, "set_device", chosen.append, raising=False)
    return chosen


class Maker:
    """Stand-in for torch's module of a kind: notes each call, and answers with itself, or with what is given."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[Any] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.items()))
            return self.answers.get(name, self)

        return call


def made(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Maker:
    maker = Maker(**answers)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: maker)
    return maker


def of_kind(kind: str, dtype: torch.dtype = torch.float32, head_dim: int = 64) -> Any:
    """What a tensor says of itself, as no tensor of this kind can be made here."""
    return SimpleNamespace(device=torch.device(kind, 0), dtype=dtype, shape=(1, 2, 8, head_dim))


# --- one place ---


def test_one_file_calls_the_modules_of_devices() -> None:
    """Elsewhere such a call is right on one kind of device, and an AttributeError or a wrong number on others."""
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources(*(f"torch.{name}" for name in TORCH_OF_DEVICES))
        if file != "base/device.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in TORCH_OF_DEVICES
    ]
    assert not found, "\n".join(found)


def test_nothing_is_chosen_by_the_name_of_a_kind_of_gpu() -> None:
    """A branch on "cuda" forgets the other kinds: what a device offers is asked instead. The number may only fall."""
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources(*GPUS)
        if not file.startswith(("base/device", "plan/", "cost/", "planner/"))  # they have two kinds of kernels
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in GPUS
    ]
    assert not found, "\n".join(found)


def test_the_names_are_those_of_the_config_and_of_torch() -> None:
    literal = Config.model_fields["train"].annotation.model_fields["device"].annotation  # type: ignore[union-attr]
    assert literal.__args__ == NAMES  # type: ignore[union-attr]
    assert all(torch.device(name).type == name == kind.name for name, kind in KINDS.items())
    assert {kind.activity for kind in KINDS.values()} - {""} <= set(dir(ProfilerActivity))
    for name in (CUDA, XPU):
        assert torch.distributed.get_default_backend_for_device(name) == KINDS[name].backend


# --- which device ---


@pytest.mark.parametrize(
    ("found", "rank", "wanted", "expected"),
    [
        ({}, ALONE, "auto", "cpu"),
        ({"cuda": 4, "xpu": 4}, OF_FOUR, "auto", "cuda:2"),
        ({"xpu": 4}, OF_FOUR, "auto", "xpu:2"),
        ({"xpu": 1}, OF_FOUR, "auto", "xpu:0"),  # a launcher shows each rank its own
        ({"cuda": 4, "xpu": 4}, OF_FOUR, "xpu", "xpu:2"),
        ({"mps": 1}, ALONE, "auto", "mps:0"),
        ({"mps": 1}, OF_FOUR, "auto", "cpu"),  # it has no collectives
        ({"xpu": 4}, OF_FOUR, "cpu", "cpu"),
    ],
)
def test_the_first_kind_that_can_serve_is_chosen(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, int], rank: Rank, wanted: str, expected: str
) -> None:
    chosen = see(monkeypatch, **found)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(has_fp64=True))
    (one,) = choose_devices(wanted, rank)
    assert one == torch.device(expected)
    assert chosen == ([] if one.type in (CPU, MPS) else [one.index])


@pytest.mark.parametrize(
    ("found", "rank", "wanted", "problem"),
    [
        ({"mps": 1}, OF_FOUR, "mps", r"MPS devices have no collectives in torch, so the 4 ranks .* start one rank"),
        ({"xpu": 2}, OF_FOUR, "auto", "this machine has 2 XPU devices for 4 local ranks; start at most 2 here"),
        ({"xpu": 2}, ALONE, "cuda", "this machine has 0 CUDA devices for 1 local rank"),
        ({"xpu": 4}, OF_FOUR, "xpu", r"this XPU device \(Arc\) has no fp64; start one rank"),
    ],
)
def test_what_cannot_serve_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, int], rank: Rank, wanted: str, problem: str
) -> None:
    see(monkeypatch, **found)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(has_fp64=False))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda _: "Arc")
    with pytest.raises(UserError, match=problem):
        choose_devices(wanted, rank)


def test_each_kind_has_the_backend_of_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.device("xpu", 1)
    assert backends(one, 4, shards_alone=False) == ("cpu:gloo,xpu:xccl", one)
    assert backends(one, 1, shards_alone=True) == ("cpu:gloo,xpu:xccl", None)
    assert backends(torch.device("mps", 0), 1, shards_alone=True) == ("gloo", None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert versions("cpu:gloo,cuda:nccl") == {"torch": torch.__version__, "RCCL": "2.22.3"}
    assert versions("cpu:gloo,xpu:xccl") == {"torch": torch.__version__}
    assert device.runtime()["ROCm"] == "6.4"


def test_device_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, xpu=1)
    assert (device_of("auto"), device_of("cpu")) == (torch.device("xpu"), torch.device("cpu"))
    assert device_of("mps") == "--device mps: torch finds no MPS device here"
    assert device_of("gpu") == "--device gpu: must be auto, cpu, cuda, xpu or mps"


def test_devices_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uuid of an XPU is bytes. Two devices of one name would be refused as one."""
    for uuid, said in ((b"\x01\xff", "01ff"), ("GPU-1", "GPU-1")):
        made(monkeypatch, get_device_properties=SimpleNamespace(uuid=uuid))
        assert device.unique_name(torch.device("xpu", 0)).endswith(f" {said}")
    assert device.unique_name(torch.device("cpu")) == "cpu"
    assert device.unique_name(torch.device("mps", 0)).endswith(" mps")


# --- what is called ---


@pytest.mark.parametrize("kind", [CUDA, XPU])
def test_a_gpu_is_asked_by_the_calls_that_cuda_always_had(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Steps on CUDA were measured with exactly these calls: another one may wait, or sort numbers after each
    instruction."""
    one, stats = torch.device(kind, 1), {"allocated_bytes": {"all": {"peak": 7}}}
    maker = made(monkeypatch, memory_stats_as_nested_dict=stats, memory_allocated=3, mem_get_info=(2, 9))
    assert (device.peak_memory(one), device.memory_in_use(one), device.free_memory(one)) == (7, 3, 2)
    for act in (device.synchronize, device.forget_peak, device.current_stream, device.new_stream, device.new_event):
        act(one)
    device.new_event(one, timed=True)
    device.on_stream(one, "stream")
    assert maker.calls == [
        ("memory_stats_as_nested_dict", one),
        ("memory_allocated", one),
        ("mem_get_info", one),
        ("synchronize", one),
        ("empty_cache",),
        ("reset_peak_memory_stats", one),
        ("current_stream", one),
        ("Stream", one),
        ("Event",),
        ("Event", ("enable_timing", True)),
        ("stream", "stream"),
    ]


def test_for_cuda_the_module_is_torch_cuda() -> None:
    assert device._module(CUDA) is torch.cuda
    assert (device._module(XPU), device._module(MPS)) == (torch.xpu, torch.mps)


def test_a_cpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, cpu = made(monkeypatch), torch.device("cpu")
    device.synchronize(cpu)
    device.forget_peak(cpu)
    device.make_current(cpu)
    assert (device.new_stream(cpu), device.device_name(cpu), device.num_units(cpu)) == (None, "cpu", 0)
    assert maker.calls == []


def test_mps_has_the_peak_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal keeps no peak: the last number alone would be that of the end of a step."""
    one, numbers = torch.device("mps", 0), iter((5, 9, 4, 2))
    maker = made(monkeypatch, recommended_max_memory=100, driver_allocated_memory=30)
    monkeypatch.setattr(device, "memory_in_use", lambda _: next(numbers))
    assert [device.peak_memory(one) for _ in range(3)] == [5, 9, 9]
    device.forget_peak(one)
    assert device.peak_memory(one) == 2
    assert (device.total_memory(one), device.free_memory(one)) == (100, 70)
    device.synchronize(one)
    assert ("synchronize",) in maker.calls  # it takes no device
    assert device.new_stream(one) is None


@pytest.mark.parametrize(("kind", "events"), [(CPU, 0), (CUDA, 3), (XPU, 3), (MPS, 3)])
def test_a_stopwatch_records_events_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, kind: str, events: int
) -> None:
    maker = made(monkeypatch)
    watch = Stopwatch(torch.device(kind), "wait")
    watch.start("forward")
    watch.lap("forward")
    watch.lap("backward")
    watch.stop()
    assert maker.calls.count(("Event", ("enable_timing", True))) == events
    assert maker.calls.count(("record",)) == events


def test_units_and_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, get_device_properties=SimpleNamespace(multi_processor_count=132, gpu_subslice_count=64))
    assert [device.num_units(torch.device(kind, 0)) for kind in (CUDA, XPU)] == [132, 64]
    assert device.activities(torch.device("xpu")) == [ProfilerActivity.CPU, ProfilerActivity.XPU]
    assert device.activities(torch.device("mps")) == [ProfilerActivity.CPU]


# --- what is computed, and how ---


def test_other_gpus_count_and_choose_as_cuda() -> None:
    config, plan = Config.model_validate(GPT2), plan_of()
    assert [kernels_of(kind) for kind in KINDS] == [CPU, CUDA, CUDA, CUDA]
    assert [head_chunk_tokens(with_device(config, kind)) for kind in NAMES] == [1024, 1024, 8192, 8192, 8192]
    assert [compiles(config, kind) for kind in KINDS] == ["none", "blocks", "blocks", "none"]
    assert memory(plan, 0, of_device(XPU)).activations == memory(plan, 0, of_device(CUDA)).activations


@pytest.mark.parametrize(("kind", "dtype", "found"), [
    (XPU, torch.bfloat16, None), (MPS, torch.float32, None), (CUDA, torch.float32, EFFICIENT),
])  # fmt: skip
def test_a_kernel_that_torch_lacks_is_not_chosen(kind: str, dtype: torch.dtype, found: object) -> None:
    assert fused_attention_for(of_kind(kind, dtype)) is found


def test_flash_attention_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a GPU of AMD is no compute capability of NVIDIA's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert fused_attention_for(of_kind(CUDA, torch.bfloat16)) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert fused_attention_for(of_kind(CUDA, torch.bfloat16)) is FLASH


def test_mps_clips_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused kernel that does not read the limits would neither clip nor skip, and say nothing."""
    tensor = torch.zeros(4, device="meta")
    weights = [Weight("w", tensor, tensor, decay=True)]
    for kind, expected in ((CUDA, True), (XPU, True), (MPS, False)):
        monkeypatch.setattr(optimize, "offered", lambda _, kind=kind: kind_of(kind))
        monkeypatch.setattr(optimize.Optimizer, "_allocate_state", lambda _: None)
        monkeypatch.setattr(optimize, "_torch_optimizer", lambda *_: torch.optim.SGD([tensor]))
        assert optimize.Optimizer(weights, Optimizer()).decides_on_device is expected


def test_a_device_without_fp64_sums_in_fp32(forker: Forker, tmp_path: Path) -> None:
    """MPS raises an error for each tensor in fp64."""
    cases = {f"{kind}": case("bf16", 2, model=model) | {"ranks": [0]} for kind, model in MODELS.items()}
    for fault, failed in (("without_fp64", False), ("fp64_refused", True)):
        (found,) = forker.call("meta_ranks:on_meta_ranks", tmp_path, cases=cases, fault=fault)
        for name in cases:
            said = found[name]["0"].get("failed", "")
            assert ("fp64: " in said) is failed, said
            assert bool(said) is failed, said


MODELS: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": {"kind": "llama"}}


# --- what is refused ---


@pytest.mark.parametrize(
    ("train", "parallel", "kind", "asked", "problem"),
    [
        ({"precision": "fp64"}, {}, MPS, {}, r"this run computes on an MPS device \(M2\), which has no fp64"),
        ({}, {"offload": "optimizer"}, MPS, {}, "an MPS device, which uses host memory already"),
        ({}, {}, MPS, {"deterministic": True}, "torch does not say which of its kernels are deterministic"),
        ({}, {}, MPS, {"profiles": True}, "whose kernels torch's profiler does not see"),
        ({"global_batch_size": 4}, {"data_parallel": 2}, XPU, {}, "this run computes on an XPU device; remove the key"),
    ],
)
def test_a_plan_that_needs_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    parallel: dict[str, Any],
    kind: str,
    asked: dict[str, bool],
    problem: str,
) -> None:
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "M2")
    plan = plan_of(train=train, parallel=parallel)
    with pytest.raises(UserError, match=problem):
        machine.refuse_device(plan, torch.device(kind, 0), **asked)
    machine.refuse_device(plan_of(), torch.device(kind, 0))


@pytest.mark.parametrize(
    ("train", "parallel", "keys"),
    [
        ({"device": "mps"}, {"offload": "optimizer"}, ("parallel.offload", "train.device")),
        ({"device": "xpu"}, {"data_parallel": 2}, ("parallel.data_parallel", "train.device")),
        ({"device": "mps", "deterministic": True}, {}, ("train.deterministic", "train.device")),
        ({"device": "mps"}, {"ranks": 2}, ("parallel.ranks", "train.device")),
        ({"device": "xpu", "cuda_graphs": True}, {}, ("train.cuda_graphs", "train.device")),
    ],
)
def test_keys_that_a_kind_cannot_serve_contradict_each_other(
    train: dict[str, Any], parallel: dict[str, Any], keys: tuple[str, ...]
) -> None:
    config = Config.model_construct(**dict(Config.model_validate(GPT2)))
    changed = {"train": config.train.model_copy(update=train), "parallel": config.parallel.model_copy(update=parallel)}
    found = [names for names, _ in contradictions(config.model_copy(update=changed))]
    assert found == [keys]


def test_graphs_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(kind: str, **train: Any) -> dict[str, Any]:
        config = Config.model_validate(GPT2 | {"train": train})
        world = SimpleNamespace(device=torch.device(kind), all_agree=lambda mine: mine)
        return compiling.chosen(config.train, build(config, 50, 1), cast(Any, world))

    monkeypatch.setattr(compiling, "broken", lambda _: "")
    assert [chosen(kind)["choice"] for kind in (CUDA, XPU, MPS)] == ["blocks", "blocks", "none"]
    assert "a prototype" in chosen(MPS)["why"]
    with pytest.raises(UserError, match="needs CUDA, but the device is an XPU device"):
        chosen(XPU, cuda_graphs=True)


def test_a_model_of_fp64_is_refused_where_there_is_none() -> None:
    """`sample` and `evaluate` would end in a traceback of torch. Nothing is read before."""
    trained = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(precision="fp64")), folder=SimpleNamespace(path="runs/a")
    )
    with pytest.raises(UserError, match="runs/a: trained in fp64, and the MPS device has no fp64; give --device cpu"):
        module_of(cast(Any, trained), torch.device(MPS))
