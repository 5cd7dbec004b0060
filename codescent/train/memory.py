"""In: the tensors of one rank, each instruction of its steps as it ends. Out: its memory by part, where its peak rose.
Does not declare what a plan needs (plan/state.py does), and does not write a file (record/memory.py does)."""

from __future__ import annotations

import re
import resource
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from codescent.base.device import allocator_numbers, memory_in_use, offered, peak_memory
from codescent.base.device_kinds import GPUS
from codescent.base.dtensors import is_dtensor
from codescent.operators import kept
from codescent.plan import Instruction, Plan, Verb
from codescent.record.memory import MOST, PARTS, MemoryRow
from codescent.train.failed_allocation import is_out_of_memory

if TYPE_CHECKING:
    from codescent.train.execute import Executor

BEFORE, BETWEEN = -1, -2
"""Places outside of a step's instruction list, where the peak may rise: before the first step, and after a step."""
WHERE = {BEFORE: "before the first step", BETWEEN: "between steps"}
MOST_COUNTS, RUN = 400, 20
"""See `moments`."""
STATM, STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
HIGH_WATER = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)
NONE = -1.0
"""A number that this device does not have."""

Split = dict[str, int]
"""Bytes by name of PARTS."""


class Storages:
    """Sums the bytes of tensors on a device. A storage counts once, in the first part that names it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: set[int] = set()
        self.host_bytes = 0  # in the host's memory, if the device has its own

    def add(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """The bytes of storages that were not counted yet."""
        return sum(self.add_storage(_local(tensor).untyped_storage()) for tensor in tensors if tensor is not None)

    def add_storage(self, storage: torch.UntypedStorage) -> int:
        """The bytes of a storage, or 0."""
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self.seen:
            return 0
        self.seen.add(place)
        if storage.device.type == self.device.type:
            return size
        self.host_bytes += size
        return 0


class SavedStorages:
    """Inside `noted`: the storages that autograd saves. A storage that was freed since is not among `alive`."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.touched: set[int] = set()  # places of the storages saved in the running instruction

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block whose saved tensors are noted. It changes no value: backward gets the same memory."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), kept.noted(self._pack):
            yield

    def alive(self) -> Iterator[torch.UntypedStorage]:
        """The storages that still have memory."""
        for reference in self._refs.values():
            if (storage := reference()) is not None:
                yield storage

    def forget(self) -> None:
        """Drop all notes."""
        self._refs.clear()
        self.touched.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return tensor
        storage = _local(tensor).untyped_storage()
        place = storage.data_ptr()
        self.touched.add(place)
        noted = self._refs.get(place)
        if noted is None or noted() is None:  # the memory may be that of a storage that was freed
            self._refs[place] = weakref.ref(storage)
        return tensor.detach()  # the tensor itself would be a cycle of references


@dataclass(frozen=True)
class Failed:
    """What a rank held when memory ran out in a step. `activations_bytes`: about those of a whole step; 0: unknown."""

    held_bytes: int
    split: Split
    activations_bytes: float


class MemoryWatch:
    """The memory of one rank.

    In the first step of a command it counts the bytes of each part after every instruction. In all steps it looks at
    the peak after every instruction. The counted moment is the one at which all parts together are largest.

    Attributes:
        split: bytes of each part at the counted moment.
        most: the most bytes of each part after any instruction.
        counted_at: index of the counted instruction in the stage's list.
        host_bytes: bytes in host memory, if the device has its own.
        peak_bytes: of the process or the device, so far.
        peak_at: the step and the instruction in which the peak rose last: an index, or BEFORE or BETWEEN.
        running: the step (from 1) and the index of the instruction that runs now.
        failed: what the rank held when memory ran out in a step; None: it has not.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.device = executor, executor.device
        self.sharded = _gathered_names(executor.plan)
        self.kept_apart = {tensor.parameter.name for tensor in executor.plan.trained if tensor.master_dtype}
        self.moments = frozenset[int]()
        self.saved = SavedStorages()
        self.split: Split = dict.fromkeys(PARTS, 0)
        self.most: Split = dict(self.split)
        self.counted_at, self.host_bytes, self.counted = BEFORE, 0, False
        self.peak_bytes, self.peak_at = 0, (0, BEFORE)
        self.running = (0, BEFORE)
        self.failed: Failed | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A block that computes step `number` (from 0). If memory runs out in it, `failed` has what the rank held."""
        self._look(BETWEEN if self.counted else BEFORE)
        if not self.counted:
            program = self.executor.plan.schedule.program(self.executor.world.stage, number)
            self.moments = moments(len(program))
        self.running = number + 1, 0
        try:
            with nullcontext() if self.counted else self.saved.noted():
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self.failed = self._failed()
            raise
        self.counted = True
        self.saved.forget()
        self.running = number + 1, BETWEEN

    def after(self, index: int) -> None:
        """Called after each instruction, with its index in the list of this stage."""
        self._look(index)
        if not self.counted and index in self.moments:
            self._count(index)
        self.saved.touched.clear()
        self.running = self.running[0], index + 1

    def numbers(self) -> list[float]:
        """What rank 0 needs for a row of record/memory.py, without a collective; see `row`."""
        self._look(BETWEEN)
        step, index = self.peak_at
        reserved, retries = _allocator(self.device)
        parts = [float(split[part]) for split in (self.split, self.most) for part in PARTS]
        return [self.peak_bytes, step, index, *parts, self.counted_at, self.host_bytes, reserved, retries]

    def _failed(self) -> Failed:
        """What the rank holds, in the middle of an instruction. After the counted step its activations are those of
        that step."""
        split, most = self._parts()[0], self.most["activations_bytes"]
        if self.counted:
            split["activations_bytes"] = most
            return Failed(memory_now_bytes(self.device), split, most)
        plan, stage, program = self.executor.plan, self.executor.world.stage, self.executor.program
        index = min(self.running[1], len(program) - 1)
        at_once = plan.schedule.most_in_flight(stage)
        whole = float(split["activations_bytes"])
        if index:
            whole = max(whole, most * at_once / plan.schedule.most_in_flight(stage, index))
        if passes := plan.schedule.in_flight(stage, index) + self._passed(program[index]):
            whole = max(whole, split["activations_bytes"] * at_once / passes)
        return Failed(memory_now_bytes(self.device), split, whole)

    def _passed(self, instruction: Instruction) -> float:
        """Which share of a forward pass has been computed: by the matrices of the blocks that autograd has saved."""
        if instruction.verb is not Verb.FORWARD:
            return 0.0
        blocks = self.executor.chunks[instruction.chunk].part.blocks
        matrices = [_local(p) for p in blocks.parameters() if p.dim() > 1]
        read = sum(p.numel() for p in matrices if p.untyped_storage().data_ptr() in self.saved.touched)
        return read / max(1, sum(p.numel() for p in matrices))

    def _look(self, index: int) -> None:
        peak_bytes = peak_memory_bytes(self.device)
        if peak_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = peak_bytes, (self.running[0], index)

    def _count(self, index: int) -> None:
        split, host_bytes = self._parts()
        self.most = {part: max(self.most[part], split[part]) for part in PARTS}
        self.host_bytes = max(self.host_bytes, host_bytes)
        if sum(split.values()) > sum(self.split.values()):
            self.split, self.counted_at = split, index

    def _parts(self) -> tuple[Split, int]:
        """Bytes of each part, and of host memory. The order decides to which part a storage belongs."""
        executor, count = self.executor, Storages(self.device)
        coupling, held = executor.coupling, executor.gradients.held()
        optimizers, optimizer = coupling.optimizers(), coupling.optimizer
        apart = [weight.master for weight in optimizer.weights if weight.name in self.kept_apart]
        state = (
            value
            for one in optimizers
            for weight, name, value in one.named_state()
            if not name.startswith("model.") and value.shape == weight.master.shape
        )
        kept = [*executor.gradients.state().values(), *coupling.state().values()]
        found = {"optimizer_bytes": count.add([*apart, *state, *kept])}
        read, gathered = self._parameters()
        found["weights_bytes"] = count.add([*(weight.master for one in optimizers for weight in one.weights), *read])
        found["gradients_bytes"] = count.add(held.gradients) + held.unseen_bytes
        tables = [kept for chunk in executor.chunks for table in chunk.part.tables for kept in table.tensors()]
        buffers = [*gathered, *held.buffers, *optimizer.buffers(), *executor.messages.buffers(), *tables]
        buffers += coupling.buffers()
        found["buffers_bytes"] = count.add(buffers)
        flying = (tensor for chunk in executor.chunks for one in chunk.in_flight.values() for tensor in one.tensors())
        found["activations_bytes"] = count.add(flying) + sum(map(count.add_storage, self.saved.alive()))
        return {part: found[part] for part in PARTS}, count.host_bytes

    def _parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters as forward and backward read them now: weights, and units gathered from their shards."""
        read: list[torch.Tensor] = []
        gathered: list[torch.Tensor] = []
        for chunk in self.executor.chunks:
            for name, parameter in chunk.part.named_parameters():
                whole = name in self.sharded and not is_dtensor(parameter)
                (gathered if whole else read).append(parameter)
            read += [scale for layer in chunk.part.modules() for scale in getattr(layer, "packed", None) or ()]
        return read, gathered


def moments(length: int) -> frozenset[int]:
    """The indices of a list of so many instructions after which the parts are counted.

    Of a list of more than about MOST_COUNTS instructions they are every n-th run of RUN instructions, and the last
    one. Lists repeat themselves: every n-th instruction alone might always be the same verb.
    """
    every = -(-length // MOST_COUNTS)
    return frozenset(index for index in range(length) if index // RUN % every == 0 or index >= length - RUN)


def row(plan: Plan, step: int, rank: int, numbers: list[float]) -> MemoryRow:
    """A row of record/memory.py, from `MemoryWatch.numbers` of a rank."""
    stage = plan.role(rank)

    def where(index: float, number: int) -> str:
        if plan.layout.served_rounds:  # a worker takes all steps of a round at once; the last one has all instructions
            number = plan.schedule.period - 1
        return WHERE.get(int(index)) or str(plan.schedule.program(stage, number)[int(index)])

    peak_bytes, peak_step, peak_index, *others = numbers
    parts, most = ([int(number) for number in others[len(PARTS) * at : len(PARTS) * (at + 1)]] for at in (0, 1))
    counted_at, host_bytes, reserved, retries = others[2 * len(PARTS) :]
    return {
        "step": step,
        "rank": rank,
        "peak_bytes": int(peak_bytes),
        "peak_step": int(peak_step),
        "peak_at": where(peak_index, int(peak_step) - 1),
        **dict(zip(PARTS, parts, strict=True)),
        "rest_bytes": int(peak_bytes) - sum(parts),
        "counted_at": where(counted_at, plan.schedule.opening_steps),  # a command begins with a round
        **dict(zip(MOST, most, strict=True)),
        "host_bytes": int(host_bytes),
        "reserved_bytes": None if reserved == NONE else int(reserved),
        "allocator_retries": None if retries == NONE else int(retries),
    }


def _gathered_names(plan: Plan) -> set[str]:
    """Names of the parameters whose weights are gathered from shards for a while, and freed."""
    return {tensor.parameter.name for tensor in plan.tensors if "dp_shard" in tensor.weights.axes(plan.mesh)}


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated by torch on a GPU, resident set size on a CPU."""
    if device.type in GPUS:
        return peak_memory(device)
    most = _most_bytes()
    return most if most > AT_IMPORT else _own_bytes() or most


def _most_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


AT_IMPORT = _most_bytes()
"""getrusage(2) also counts what the process held that has started this one. What is above that is this one's own."""


def _own_bytes() -> int:
    """The most that this process itself has held, by proc_pid_status(5); 0: this system does not say it."""
    found = HIGH_WATER.search(_of_proc(STATUS)) if STATUS.is_file() else None
    return int(found[1]) * 1024 if found else 0


def _of_proc(file: Path) -> bytes:
    """A file that the system makes of this process, which is short and always there."""
    return file.read_bytes()


def memory_now_bytes(device: torch.device) -> int:
    """Memory that is in use now: allocated by torch on a GPU, resident set size on a CPU."""
    if device.type in GPUS:
        return memory_in_use(device)
    if not STATM.is_file():
        return peak_memory_bytes(device)
    return int(_of_proc(STATM).split()[1]) * resource.getpagesize()


def _allocator(device: torch.device) -> tuple[float, float]:
    """Bytes that torch's allocator has reserved at most, and how often it had to free and try again. Of memory that is
    the device's own."""
    if not offered(device).own_memory:
        return NONE, NONE
    reserved, retries = allocator_numbers(device)
    return float(reserved), float(retries)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
