"""In: texts of wires, shapes. Out: what WireSums of each rank deliver, keep and issue.
Does not assert anything (test_wire does). Ranks are processes on gloo; one process plays many on torch's fake group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from declared_ranks import Watch
from rank_server import Place
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from codescent.base.ranges import Recording
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import Verb
from codescent.plan.wire import Wire
from codescent.strategies import pieces
from codescent.strategies.wire import Channel, WireSum

CPU = torch.device("cpu")
Shapes = Sequence[Sequence[int]]


def given(shapes: Shapes, rank: int, step: int, dtype: str) -> list[Tensor]:
    """What a rank gives into a sum. Elements differ in size by rank, step, tensor and row."""
    seeded = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(tuple(shape), generator=seeded, dtype=torch.float64) for shape in shapes]
    return [(number + 1) * (rank + 1) * one.to(TORCH_DTYPE[dtype]) for number, one in enumerate(made)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(flat(tensors).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def of_state(wire: WireSum) -> dict[str, str]:
    return {name: digest([tensor]) for name, tensor in wire.state().items()}


def sums(place: Place, wires: Sequence[str], shapes: Shapes, dtype: str, steps: int) -> dict[str, Any]:
    """By wire: sums step by step, one with NaN between them; then from the middle, with the state that was there."""
    group = place.join()
    found: dict[str, Any] = {}
    for text in wires:
        one = WireSum(Wire.parse(text), shapes, group, CPU, dtype)
        begins = of_state(one)
        bits, delivered, saved = [], torch.zeros(sum(map(torch.Size.numel, map(torch.Size, shapes)))).double(), {}
        with Watch(fake=False) as watch:
            for step in range(steps):
                if step == steps // 2:
                    saved = {name: tensor.clone() for name, tensor in one.state().items()}
                watch.verb = Verb.REDUCE if step == 0 else None
                tensors = given(shapes, place.rank, step, dtype)
                one.sum_(tensors)
                bits.append(digest(tensors))
                delivered += flat(tensors).double()
        kept = {name: tensor.tolist() for name, tensor in one.state().items()}
        before = of_state(one)
        poisoned = given(shapes, place.rank, 0, dtype)
        if place.rank == place.ranks - 1:
            poisoned[0].view(-1)[1] = torch.nan
            last = next(tensor for tensor in reversed(poisoned) if tensor.numel())
            last.view(-1)[-1] = torch.inf
        one.sum_(poisoned)
        again = WireSum(Wire.parse(text), shapes, group, CPU, dtype)
        for name, tensor in again.state().items():
            tensor.copy_(saved[name])
        resumed = []
        for step in range(steps // 2, steps):
            tensors = again.summands()  # in place: nothing is copied into the sum and out of it
            for memory, value in zip(tensors, given(shapes, place.rank, step, dtype)):
                memory.copy_(value)
            again.sum_(tensors)
            resumed.append(digest(tensors))
        found[text] = {
            "bits": bits,
            "resumed": resumed,
            "delivered": delivered.tolist(),
            "kept": kept,
            "shapes": {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in one.state().items()},
            "begins": begins,
            "held": sum(tensor.nbytes for tensor in one.buffers()),
            "issued": watch.issued,
            "poisoned": [not bool(poisoned[index].isfinite().all()) for index in (0, -1)],
            "state is as before": of_state(one) == before,
        }
        one.close()
        again.close()
    found["plain"] = plain(group, shapes, dtype, steps)
    return found


def plain(group: dist.ProcessGroup, shapes: Shapes, dtype: str, steps: int) -> list[str]:
    """By step, the bits of one all-reduce of all elements."""
    bits = []
    for step in range(steps):
        whole = flat(given(shapes, group.rank(), step, dtype))
        dist.all_reduce(whole, group=group)
        bits.append(digest([whole]))
    return bits


def constant(place: Place, wires: Sequence[str], numel: int, steps: int) -> dict[str, float]:
    """By wire, of the same vectors again and again: largest |sum delivered - sum given| over largest |given|."""
    group = place.join()
    found = {}
    of_all = [given([[numel]], rank, 0, "fp32")[0] for rank in range(place.ranks)]
    wanted = torch.stack(of_all).double().sum(0)
    for text in wires:
        one = WireSum(Wire.parse(text), [[numel]], group, CPU, "fp32")
        delivered = torch.zeros(numel, dtype=torch.float64)
        for _ in range(steps):
            tensor = of_all[place.rank].clone()
            one.sum_([tensor])
            delivered += tensor
        found[text] = float((delivered - steps * wanted).abs().max() / torch.stack(of_all).abs().max())
        one.close()
    return found


def low_rank(place: Place, text: str, rows: int, columns: int, true_rank: int) -> list[float]:
    """Matrices whose sum has a low rank: |delivered - sum| / |sum| of three sums, and this rank's largest residuals."""
    group = place.join()
    one, found = WireSum(Wire.parse(text), [[rows, columns]], group, CPU, "fp64"), []
    for step in range(3):
        factors = given([[rows, true_rank]], 0, step, "fp64")[0]
        of_all = [factors @ given([[true_rank, columns]], rank, step + 10, "fp64")[0] for rank in range(place.ranks)]
        tensor = of_all[place.rank].clone()
        one.sum_([tensor])
        wanted = torch.stack(of_all).sum(0)
        found += [float((tensor - wanted).norm() / wanted.norm()), float(one.state()["residual"].abs().max())]
    one.close()
    return found


def warm_start(place: Place, text: str, rows: int, columns: int) -> list[float]:
    """How far the right factors with which PowerSGD goes on are from (sum of M)^T P / |...| (Vogels et al. 2019), after
    each of three sums; M has what the rank gives and its residual."""
    group = place.join()
    one, found = WireSum(Wire.parse(text), [[rows, columns]], group, CPU, "fp64"), []
    for step in range(3):
        (tensor,) = given([[rows, columns]], place.rank, step, "fp64")
        whole = tensor + one.state()["residual"].view(rows, columns)
        dist.all_reduce(whole, group=group)
        before = one.state()["projector"].view(columns, -1)
        right = whole.t() @ torch.linalg.qr(whole @ before).Q
        one.sum_([tensor])
        found.append(float((one.state()["projector"].view(columns, -1) - right / right.norm()).abs().max()))
    one.close()
    return found


def beside(place: Place, wires: Sequence[str], shapes: Shapes, steps: int) -> dict[str, Any]:
    """By wire, the bits of sums of two WireSums: blocking, and started on one channel while this thread computes."""
    whole = place.join()
    group, found = dist.new_group(list(range(place.ranks)), backend="gloo"), {}
    for text in wires:
        wire, channel = Wire.parse(text), Channel(CPU)
        pair = [WireSum(wire, shapes, group, CPU, "fp32", channel) for _ in range(2)]
        twin = [WireSum(wire, shapes, whole, CPU, "fp32") for _ in range(2)]
        started, blocking = [], []
        for step in range(steps):
            for number in range(2):
                tensors = given(shapes, place.rank, 2 * step + number, "fp32")
                started.append((tensors, pair[number].start(tensors)))
        for step in range(steps):  # computation and collectives of another group, while the channel works
            for number in range(2):
                tensors = given(shapes, place.rank, 2 * step + number, "fp32")
                twin[number].sum_(tensors)
                blocking.append(digest(tensors))
        states = [of_state(one) for one in pair] == [of_state(one) for one in twin]
        for _, pending in reversed(started):
            pending.wait()
            pending.wait()
        found[text] = [[digest(tensors) for tensors, _ in started], blocking, states]
        for one in (*pair, *twin):
            one.close()
        channel.close()
    return found


def profiled(place: Place, text: str, shapes: Shapes) -> list[str]:
    """The collectives that a profile knows of a sum beside the computation."""
    group = place.join()
    Recording.on = Recording.sees_flights = True
    Recording.axes = {group.group_name: "dp_replicate"}
    one = WireSum(Wire.parse(text), shapes, group, CPU, "fp32")
    one.start(given(shapes, place.rank, 0, "fp32")).wait()
    one.close()
    Recording.on = Recording.sees_flights = False
    return [name for name, begin, end in Recording.flights if begin < end]


def waits_for_no_device(place: Place, wires: Sequence[str], shapes: Shapes, world_size: int) -> list[str]:
    """Wires that sum tensors without values, on the device "meta". Whoever asks for a value of one gets an error."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    done, meta = [], torch.device("meta")
    for text in wires:
        one = WireSum(Wire.parse(text), shapes, group, meta, "fp32")
        with Watch(fake=True):
            one.sum_([torch.empty(tuple(shape), device=meta) for shape in shapes])
        done.append(text)
        one.close()
    dist.destroy_process_group()
    return done


def fails(place: Place) -> list[str]:
    """Rank 1 leaves. What rank 0's thread says of two sums, and what a wrong shape and a wrong dtype are told."""
    group, said = place.join(), []
    one = WireSum(Wire.parse("int8"), [[1000]], group, CPU, "fp32")
    one.sum_([torch.ones(1000)])
    if place.rank == 1:
        one.close()
        dist.destroy_process_group()
        return []
    first, second = one.start([torch.ones(1000)]), one.start([torch.ones(1000)])
    errors = []
    for pending in (second, first):
        try:
            pending.wait()
        except RuntimeError as error:
            errors.append(error)
    said += ["one error" if errors[0] is errors[1] else "two errors", str(errors[0])]
    for wrong in ([torch.ones(999)], [torch.ones(1000, dtype=torch.float64)], []):
        try:
            one.start(wrong)
        except ValueError as error:
            said.append(str(error))
    one.close()
    return said


def alone(place: Place, wires: Sequence[str]) -> list[bool]:
    """With one rank, or without elements, nothing is sent, kept or changed."""
    group = place.join()
    same = []
    for text in wires:
        one = WireSum(Wire.parse(text), [[300, 200], []], group, CPU, "fp32")
        tensors = [torch.randn(300, 200), torch.tensor(2.0)]
        before = digest(tensors)
        with Watch(fake=False) as watch:
            watch.verb = Verb.REDUCE
            one.sum_(tensors)
        same.append(digest(tensors) == before and not watch.issued and not one.state())
        one.start(tensors).wait()
        one.close()
    return same


def on_fake_ranks(place: Place, wires: Sequence[str], shapes: Shapes, dtype: str, world_size: int) -> dict[str, Any]:
    """By wire, what the first and the last rank issue in a sum."""
    found: dict[str, Any] = {text: [] for text in wires}
    for rank in (0, world_size - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        group = dist.group.WORLD
        assert group is not None
        for text in wires:
            one = WireSum(Wire.parse(text), shapes, group, CPU, dtype)
            with Watch(fake=True) as watch:
                watch.verb = Verb.REDUCE
                one.sum_(given(shapes, rank, 0, dtype))
            found[text].append(watch.issued)
            one.close()
        dist.destroy_process_group()
    return found


def in_pieces(place: Place, wires: Sequence[str], shapes: Shapes, piece_bytes: int) -> dict[str, Any]:
    """By wire: the bits of a sum whole and in pieces, beside a computation and not; the bytes of each collective."""
    group = place.join()
    found: dict[str, Any] = {}
    for text in wires:
        bits, sizes = [], []
        for size in (1 << 40, piece_bytes):
            pieces.PIECE_BYTES = size
            for aside in (False, True):
                one = WireSum(Wire.parse(text), shapes, group, CPU, "fp32")
                with Watch(fake=False) as watch:
                    watch.verb = Verb.REDUCE
                    tensors = given(shapes, place.rank, 0, "fp32")
                    one.start(tensors).wait() if aside else one.sum_(tensors)
                bits.append(digest([*tensors, *one.state().values()]))
                sizes += [] if aside else [[entry[2] for entry in watch.issued]]
                one.close()
        found[text] = {"bits": bits, "sizes": sizes}
    return found
