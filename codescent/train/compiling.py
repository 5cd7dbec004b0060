"""In: train.compile, a plan, this rank's device. Out: what torch.compile compiles in this run, and why; functions such
as the head's softmax are set to it (operators/compiled.py).
Does not compile blocks: assemble.py does. On a CPU it chooses nothing that the config does not name."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from codescent.base.device_kinds import CPU, KINDS, kernels_of, kind_of
from codescent.base.errors import UserError
from codescent.operators import compiled, products
from codescent.plan import Plan
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.config.sections import Train

SUMS = {
    "fused": "added in fp32 inside of the product",
    "wide": "added in fp32 after the product",
    "apart": "rounded to bf16, then added in fp32",
}
"""How the head adds the weight gradients of its chunks (`products.sums`)."""


def chosen(train: Train, plan: Plan, world: World) -> dict[str, Any]:
    """What torch.compile compiles, the same on every rank, and set in this process. Collective.

    Returns:
        "choice": as train.compile names it. "auto": whether it was chosen here. "why": why nothing is compiled, or "".
        "functions_why": why functions such as the head's softmax and dropout are not compiled alone; "": they are.

    Raises:
        UserError: on every rank: train.cuda_graphs without compiled blocks on CUDA.
    """
    # fp32 means fp32 here (train.precision): torch's advice to round products to TF32 stays off the terminal.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    compiler = _why_not(train, plan, world)
    choice, why = train.compile, ""
    if choice is None:
        why = compiler or plan.uncompiled
        choice = "none" if why else "blocks"
    graphs = train.cuda_graphs and train.compile != "none"  # else the key has no effect, as the command has said
    kind = kind_of(world.device.type)
    if graphs and kind.name in KINDS and not kind.graphs:
        raise UserError(
            f"train.cuda_graphs: needs CUDA, but the device is {kind.a_device}; set train.cuda_graphs = false"
        )
    if graphs and choice != "blocks":
        raise UserError(
            "train.cuda_graphs: CUDA graphs replay compiled blocks, but nothing is compiled here, because "
            f"{why or compiler}; set train.cuda_graphs = false"
        )
    compiled.use(not compiler)
    return {"choice": choice, "auto": train.compile is None, "why": why, "functions_why": compiler}


def _why_not(train: Train, plan: Plan, world: World) -> str:
    """Why nothing is compiled that the config does not name; "": the compiler works. Ranks decide together."""
    kind = kind_of(world.device.type)
    if kind.name == CPU:
        return f"the device is {kind.a_device}"
    if not kind.compiles:
        return f"the device is {kind.a_device}, for which torch's compiler is a prototype"
    if train.compile == "none":
        return 'train.compile = "none"'
    if train.deterministic:
        return "train.deterministic: compiled kernels are chosen by their times"
    if plan.devices > 1:
        return "parallel.data_parallel: its threads would compile at once, and compiled modules cannot be copied"
    mine = broken(world.device.type)
    return "" if world.all_agree(not mine) else mine or "the compiler of another rank does not work"


@cache
def broken(device_type: str, backend: str = "inductor") -> str:
    """Why torch's compiler does not work on a device, by a trial; "": it works. It needs Triton and a C compiler."""
    try:
        torch.compile(_trial, backend=backend)(torch.zeros(8, device=device_type))
    except Exception as error:  # the compiler raises exceptions of many classes, also those of Triton
        cause = getattr(error, "inner_exception", error)  # of the backend, without the compiler's frame
        said = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        return f"torch's compiler does not work here: {said}"
    return ""


def _trial(x: torch.Tensor) -> torch.Tensor:
    return (x + 1.0).sum()


def levers(choice: dict[str, Any], plan: Plan, device: torch.device) -> dict[str, Any]:
    """What was chosen, for the levers of environment.json."""
    precision = plan.work.precision
    sums = "apart" if kernels_of(device.type) == CPU else products.sums(device)
    return {
        "compile": choice["choice"],
        "head_chunk_tokens": plan.model.head_chunk_tokens,
        "functions": f"not compiled: {choice['functions_why']}" if choice["functions_why"] else "compiled",
        "head_weight_gradient": SUMS[sums] if precision == "bf16" else f"added in {precision}",
    }


def said(choice: dict[str, Any], plan: Plan) -> list[str]:
    """Lines for people: what was compiled by default, or why nothing was. The last line: a key without effect on
    compiled blocks."""
    lines = []
    if choice["auto"] and choice["why"] != "the device is a CPU":
        why = f"none, because {choice['why']}" if choice["choice"] == "none" else "blocks; the first steps take longer"
        lines.append(f"train.compile: {why}")
    if choice["choice"] != "none" and plan.layout.recompute == "selective":
        lines.append(
            "parallel.recompute: selective does nothing in compiled blocks, where the compiler chooses; "
            "products and full save memory there"
        )
    return lines
