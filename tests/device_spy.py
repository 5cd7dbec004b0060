"""In: a block that computes on the meta device. Out: what would make the host wait for a device; launches and bytes.
Does not compute and needs no device: meta is not the CPU, so each branch for other devices is taken."""

from __future__ import annotations

import importlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import codescent
from codescent.base import stopwatch
from codescent.base.device_kinds import GPUS
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.operators import compiled
from codescent.plan import Plan

PACKAGE = f"{Path(codescent.__file__).parent}/"
META = torch.device("meta")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")
"""Operators whose result, or its size, is known only when the device has computed it."""
FREE = ("empty", "detach", "alias", "lift_fresh", "_unsafe_view", "new_empty", "empty_like", "empty_strided")
"""Operators that launch nothing, beside views."""


def bytes_of(tensor: Tensor) -> int:
    """Bytes in memory that a tensor covers. Expanded dims count once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        numel *= size if stride or not size else 1
    return numel * tensor.itemsize


class DeviceSpy(TorchDispatchMode):
    """Watches a block on the meta device.

    A function that CUDA compiles alone (`operators/compiled.py`) counts as one launch, which reads its arguments and
    writes its results. If its name ends in "_", it reads its first argument twice and writes it.

    It does not see `torch.tensor(numbers, device=...)`, which copies before torch's dispatcher: a test looks for that
    in the sources. Collectives of a fake process group go through it; they are no launches. What it has to read from
    the device is made up: 1 for a number and for each element of a copy to the host.

    `selected`: how many elements `nonzero` finds. `has_fp64`: if not, a tensor in fp64 on the device is an error.

    Attributes:
        waits: (what, file and line of the package) of everything that waits for the device, with its count.
        launches: operators that a device would launch.
        bytes: read and written by them.
    """

    has_fp64 = True

    def __init__(self, selected: int = 5) -> None:
        super().__init__()
        self.selected = selected
        self.waits: Counter[tuple[str, str]] = Counter()
        self.launches = self.bytes = 0

    def __enter__(self) -> DeviceSpy:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(compiled, "fuses", lambda device: device.type in ("meta", "cuda"))
        self._patch.setattr(compiled, "alone", self._one_launch)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patch.undo()
        super().__exit__(*raised)

    def _one_launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            launches, size = self.launches, self.bytes
            out = function(*args, **kwargs)
            self.launches = launches + 1
            in_place = [args[0]] * 2 if function.__name__.endswith("_") else []
            moved = [leaf for leaf in tree_leaves((args, kwargs, out, in_place)) if torch.is_tensor(leaf)]
            self.bytes = size + sum(map(bytes_of, moved))
            return out

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if why := _wait(name, given, args, kwargs):
            self.note(why)
        on_device = any(tensor.is_meta for tensor in given)
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        out = self._made_up(name, given, kwargs) if on_device else NotImplemented
        if out is NotImplemented:
            out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not self.has_fp64:
            assert not any(one.is_meta and one.dtype == torch.float64 for one in made), f"fp64: {name} in {_place()}"
        in_place = on_device and func._schema.is_mutable  # kernels of torch.optim return nothing
        if (in_place or any(tensor.is_meta for tensor in made)) and not func.is_view and name not in FREE:
            self.launches += 1
            # What is written in place is among the given tensors, and was read, too; memory for results was not.
            outs = {id(kwargs.get(one.name)) for one in func._schema.arguments if one.is_out}
            self.bytes += sum(bytes_of(one) for one in given if id(one) not in outs) + sum(map(bytes_of, made))
        return out

    def note(self, why: str) -> None:
        """The line that is running waits for the device."""
        self.waits[why, _place()] += 1

    @contextmanager
    def clock(self) -> Iterator[None]:
        """A block in which the device has events that take no time. The host does not wait for the device unseen."""

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                """A new event has not happened."""

            def record(self, stream: object = None) -> None:
                """It happens at once."""

            def elapsed_time(self, other: object) -> float:
                """Milliseconds."""
                return 0.0

            def synchronize(event) -> None:
                """Counts."""
                self.note("synchronize an event")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stopwatch, "new_event", lambda device, *, timed: Event(enable_timing=timed))
            for kind in GPUS:
                patch.setattr(torch.get_device_module(kind), "synchronize", lambda *_: self.note("synchronize"))
            yield

    def _made_up(self, name: str, given: list[Tensor], kwargs: dict[str, Any]) -> Any:
        """The result of what meta tensors cannot do; NotImplemented: they can."""
        to_host = torch.device(kwargs.get("device") or META).type == "cpu"
        if name == "nonzero":
            return torch.empty(self.selected, given[0].ndim, dtype=torch.int64, device=META)
        if name == "_local_scalar_dense":
            return 1.0
        if name == "_to_copy" and to_host:
            return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        if name == "copy_" and not given[0].is_meta:
            return given[0].fill_(1)
        if name.startswith("_fused_"):  # of torch.optim: not all of them have a kernel for meta tensors
            return None
        return NotImplemented


def _wait(name: str, given: list[Tensor], args: Any, kwargs: dict[str, Any]) -> str:
    """Why an operator waits for the device, or could not run there; "": it does not wait."""
    on_meta = [tensor.is_meta for tensor in given]
    if name == "_to_copy" and (to := kwargs.get("device")) is not None and torch.device(to) != given[0].device:
        return "" if kwargs.get("non_blocking") else f"copy {given[0].device} to {to}"
    if name == "copy_" and on_meta[0] != on_meta[1]:
        return "" if args[2:] == (True,) else f"copy {given[1].device} to {given[0].device}"
    if not any(on_meta):
        return ""
    if name in READS:
        return name
    if name.startswith("index") and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:]):
        return f"{name} by a mask"
    if any(not tensor.is_meta and tensor.ndim for tensor in given):
        return f"{name} of tensors on two devices"
    return ""


def _place() -> str:
    """The innermost line of the package that is running."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    return f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].lineno}" if ours else "autograd"


def make_tables(part: Any, plan: Plan) -> None:
    """What a part makes at its first forward pass: tables, and the number of its rows that are the source's."""
    for table in part.tables:
        table.on(META, torch.float64)
        table.on(META, TORCH_DTYPE[plan.work.precision])
        table.on(META, torch.promote_types(TORCH_DTYPE[plan.work.precision], torch.float32))
    if plan.work.streams and part.rows_T is not None:
        part._counted, part._source_rows = part.rows_T, plan.work.streams[0] // plan.mesh.tp


@contextmanager
def fused_optimizers() -> Iterator[None]:
    """torch.optim takes the kernels that it takes on a GPU, for all parameters at once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            for kind in ("fused", "foreach"):
                name = f"_get_{kind}_kernels_supported_devices"
                patch.setattr(importlib.import_module(module), name, lambda: ["cpu", "cuda", "meta"])
        yield


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Attention by the kernels that torch takes on a GPU, where it takes a formula for meta tensors. RMSNorm, too, is
    one kernel there; a LayerNorm without bias launches and moves as much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        patch.setattr(F, "rms_norm", lambda x, shape, weight, eps: F.layer_norm(x, shape, weight, None, eps))
        yield


def _attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert dropout_p == 0.0
    assert scale is None
    aten = torch.ops.aten
    if enable_gqa:
        times = q_BHTK.shape[1] // k_BGSK.shape[1]
        k_BGSK, v_BGSK = (one.repeat_interleave(times, 1) for one in (k_BGSK, v_BGSK))
    if q_BHTK.dtype == torch.float64:
        y: Tensor = aten._scaled_dot_product_attention_math(q_BHTK, k_BGSK, v_BGSK, attn_mask, 0.0, is_causal)[0]
    elif q_BHTK.dtype == torch.bfloat16 and attn_mask is None:
        y = aten._scaled_dot_product_flash_attention(q_BHTK, k_BGSK, v_BGSK, 0.0, is_causal)[0]
    else:
        if attn_mask is not None:
            bias = torch.zeros_like(attn_mask, dtype=q_BHTK.dtype).masked_fill_(~attn_mask, -torch.inf)
            attn_mask = bias.expand(*q_BHTK.shape[:-1], k_BGSK.shape[2])
        y = aten._scaled_dot_product_efficient_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask, True, 0.0, is_causal)[0]
    return y
