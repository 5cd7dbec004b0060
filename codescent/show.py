"""In: a plan, a resolved config. Out: tables for a person to read, with units that people use (GiB, millions).
Does not compute what it shows (cost does) and writes no file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from codescent.configfile import Resolved, describe
from codescent.cost.compute import step_flops
from codescent.cost.memory import state_bytes, wire_bytes
from codescent.plan import AXES, Plan, Traffic


def show_plan(plan: Plan) -> None:
    """The plan: mesh, batch arithmetic, parameters, bytes per rank, traffic and FLOPs of a step."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _plan_rows(plan):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _plan_rows(plan: Plan) -> list[tuple[str, str]]:
    work, mesh, state, flops = plan.work, plan.mesh, state_bytes(plan), step_flops(plan)
    return [
        (
            "model",
            f"{work.kind}: {work.num_layers} layers, {work.num_heads} heads, {work.hidden_dim} channels, vocabulary "
            f"{work.vocab_size:,}",
        ),
        ("parameters", f"{plan.num_parameters:,}"),
        ("mesh", " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES) + f" = {mesh.world_size} rank(s)"),
        (
            "batch",
            f"{work.global_batch_size} samples = {mesh.dp} data-parallel x {work.microbatch_size} per micro-batch x "
            f"{work.num_microbatches} micro-batch(es)",
        ),
        ("tokens per step", f"{work.tokens:,} = {work.global_batch_size} samples x {work.seq_len}"),
        ("program", _program(plan)),
        ("precision", _precision(plan)),
        ("weights, per rank", _bytes(state.weights_bytes)),
        ("gradients, per rank", _bytes(state.gradients_bytes)),
        ("optimizer, per rank", _bytes(state.optimizer_bytes)),
        ("together, per rank", f"{_bytes(state.total_bytes)}, activations not counted"),
        ("traffic per step", "\n".join(_traffic(plan)) or "none: one rank"),
        ("FLOPs per step, 6 N", f"{flops.dense_flops:.4g} (6 x parameters in products x tokens)"),
        (
            "FLOPs per step, 6 N + attention",
            f"{flops.total_flops:.4g} (and 12 x layers x channels x sequence x tokens; metrics and MFU use this one)",
        ),
    ]


def _traffic(plan: Plan) -> Iterator[str]:
    """A line for each kind of collective on each axis, and the sum of what they put on the wire."""
    kinds: dict[tuple[str, str], list[Traffic]] = {}
    for record in plan.traffic:
        kinds.setdefault((record.collective, record.axis), []).append(record)
    for (collective, axis), records in kinds.items():
        times = sum(record.times for record in records)
        hidden = sum(record.times for record in records if record.during is not None)
        behind = f", {hidden} of them beside forward or backward" if hidden else ""
        yield f"{times} {collective} over {axis} ({plan.mesh.degree(axis)} ranks){behind}"
    if kinds:
        yield f"each rank sends {_bytes(wire_bytes(plan))}"


def _program(plan: Plan) -> str:
    words = [str(instruction) for instruction in plan.schedule.programs[0]]
    shown = words if len(words) <= 11 else [*words[:6], "...", *words[-3:]]
    return ", ".join(shown)


def _precision(plan: Plan) -> str:
    tensor = plan.tensors[0]
    arithmetic = "" if tensor.weight_dtype == plan.work.precision else f"{plan.work.precision} arithmetic, "
    master = f", {tensor.master_dtype} master weights" if tensor.master_dtype else ""
    return (
        f"{arithmetic}{tensor.weight_dtype} weights, {tensor.gradient_dtype} gradients{master}, "
        f"{tensor.optimizer_tensors} optimizer tensors in {tensor.optimizer_dtype}"
    )


def _bytes(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"


def show_config(resolved: Resolved) -> None:
    """Every key, its value, and where the value comes from."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for section, key, value, origin in describe(resolved):
        table.add_row(f"{section}.{key}", value, _shortened(origin), style="dim" if origin == "default" else "")
    Console(highlight=False).print(table, markup=False)


def _shortened(origin: str) -> str:
    """The file of FILE:LINE as seen from here, where it lies below the working folder."""
    path = Path(origin)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else origin
