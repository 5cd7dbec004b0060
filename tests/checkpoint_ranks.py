"""In: a scenario and a folder. Out: what real processes did that save and load there.
Does not assert anything: the tests do. A scenario forks its own ranks, because it kills them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from rank_server import Place
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from codescent.base.agreement import RanksFailed, from_first
from codescent.base.errors import UserError
from codescent.checkpoint import parts as checkpoint_parts
from codescent.checkpoint.checkpoints import Checkpoints, Saved, read_tensors
from codescent.checkpoint.save_beside import SaveBeside, Staging, Unsound

WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
SURVIVED, RAISED = 0, 3


def run(place: Place, scenario: str, where: str, words: list[str]) -> Any:
    """Run a scenario of this file on a folder of checkpoints; what it returns."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    checkpoint_parts.PART_BYTES = 256 << 10  # several files of each rank
    Path(where).mkdir(parents=True, exist_ok=True)
    return globals()[scenario](Path(where), *words)


def make_tensors(step: int, variant: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind, each element a function of the step and the variant: a mixture equals none of them."""
    generator = torch.Generator().manual_seed(1000 * step + variant)
    return {
        "model.large.weight": torch.randn(300, 200, generator=generator),
        "model.tall.weight": torch.randn(500, 100, generator=generator),
        "model.half.weight": torch.randn(64, 64, generator=generator).bfloat16(),
        "model.bias": torch.randn(7, generator=generator),
        "optimizer.moment.large.weight": torch.randn(300, 200, generator=generator, dtype=torch.float64),
        "optimizer.moment.tall.weight": torch.randn(500, 100, generator=generator),
        "optimizer.step": torch.tensor(step * 10 + variant),
        "optimizer.scale": torch.tensor(step + 0.5),
        "optimizer.empty": torch.empty(0, 4),
    }


def look(folder: Path, variants: int = 1) -> dict[str, Any]:
    """What a resuming run finds: the step, whose variant's tensors it loads to the bit (-1: a mixture), leftovers."""
    checkpoints = Checkpoints(folder, keep_last=2, keep_best=False)
    leftovers = [path.name for path in checkpoints.incomplete()]
    saved = checkpoints.latest()
    if saved is None:
        return {"step": None, "variant": None, "leftovers": leftovers}
    found = {name: torch.full_like(tensor, 9) for name, tensor in make_tensors(saved.step).items()}
    state = checkpoints.load(saved, found)
    variant = -1
    for candidate in range(variants):
        expected = make_tensors(saved.step, candidate)
        if state == {"step": saved.step, "variant": candidate} and all(
            torch.equal(found[name], expected[name]) for name in expected
        ):
            variant = candidate
    return {"step": saved.step, "variant": variant, "leftovers": leftovers}


def save(folder: Path, step: int, variant: int = 0, keep_last: int = 2) -> None:
    """One save of the step's tensors."""
    checkpoints = Checkpoints(folder, keep_last, keep_best=False)
    checkpoints.save(step, make_tensors(step, variant), {"step": step, "variant": variant}, 1.0)


def begin_beside(folder: Path, step: int, staging: Staging, tensors: dict[str, torch.Tensor], go: Event) -> SaveBeside:
    """Begin a save that writes nothing before `go` is set."""

    def is_sound(values: Collection[torch.Tensor]) -> bool:
        return go.wait(60) and bool(values)

    checkpoints = Checkpoints(folder, 2, keep_best=False)
    return SaveBeside(checkpoints, step, tensors, {"step": step, "variant": 0}, 1.0, staging, is_sound)


def save_beside(folder: Path, step: int) -> None:
    """One save of the step's tensors beside the caller, which changes them when they are copied."""
    tensors, go = make_tensors(step), Event()
    under_way = begin_beside(folder, step, Staging(), tensors, go)
    under_way.wait_for_copy()
    for tensor in tensors.values():
        tensor.fill_(9)
    go.set()
    while under_way.go_on() is None:
        pass


def mutated(folder: Path, world_size: str) -> list[dict[str, Any]]:
    """Two saves beside the caller, who changes the tensors before a byte is written. The second one reuses memory."""

    def work() -> dict[str, Any]:
        save(folder, 1)
        staging = Staging()
        found: dict[str, list[Any]] = {"before": [], "variants": [], "steps": []}
        for step in (2, 3):
            tensors, go = make_tensors(step), Event()
            under_way = begin_beside(folder, step, staging, tensors, go)
            under_way.wait_for_copy()
            for tensor in tensors.values():
                tensor.fill_(9)
            if step == 2:
                found["before"].append(look(folder)["step"])
            dist.barrier()
            go.set()
            assert under_way.go_on() is None  # all files are there, and no name shows it
            under_way.go_on()
            seen = look(folder)
            found["variants"].append(seen["variant"])
            found["steps"].append(seen["step"])
            dist.barrier()
        return found

    return ranks(folder, [work] * int(world_size))


def divided_again(folder: Path) -> list[dict[str, Any]]:
    """Saves beside training by two ranks: of the same tensors, of one more on the last rank, and of different steps.
    How the ranks divided them (how often anew), whether all is there, and why the last save is refused."""

    def work() -> dict[str, Any]:
        checkpoints, staging, last = Checkpoints(folder, 2, keep_best=False), Staging(), dist.get_rank()
        found: dict[str, Any] = {"anew": [], "same": []}
        for step, more in ((1, 0), (2, 0), (3, last)):
            tensors = make_tensors(step) | ({"more": torch.arange(9.0) + step} if more else {})
            before = staging.division
            under_way = SaveBeside(checkpoints, step, tensors, {}, None, staging, bool)
            while (path := under_way.go_on()) is None:
                pass
            written = read_tensors(path)
            found["anew"].append(staging.division is not before)
            found["same"].append(all(written[name].equal(tensor) for name, tensor in tensors.items()))
            dist.barrier()
        try:
            SaveBeside(checkpoints, 7 + last, tensors, {}, None, staging, bool)
        except RanksFailed as error:
            dist.barrier()
            return found | {"why": str(error), "left": sorted(path.name for path in folder.iterdir())}
        raise AssertionError("it was saved")

    return ranks(folder, [work, work])


def unsound(folder: Path) -> list[dict[str, Any]]:
    """Of two ranks the second refuses the values."""

    def work() -> list[Any]:
        save(folder, 1)
        checkpoints, mine = Checkpoints(folder, 2, keep_best=False), dist.get_rank() == 0
        under_way = SaveBeside(checkpoints, 2, make_tensors(2), {}, None, Staging(), lambda _: mine)
        try:
            under_way.go_on()
        except Unsound:
            dist.barrier()
            return sorted(path.name for path in folder.iterdir())
        raise AssertionError("it was saved")

    return ranks(folder, [work, work])


def told(folder: Path, *sizes: str) -> list[dict[str, Any]]:
    """The lengths and the ends of what rank 0 tells another rank: texts of these sizes, as JSON."""

    def work() -> list[list[Any]]:
        texts = [from_first(UserError, partial("!".rjust, int(size))) for size in sizes]
        return [[len(text), text[-1]] for text in texts]

    return ranks(folder, [work, work])


def at_write(count: int, act: Callable[[], None]) -> None:
    """Act just before the count-th time that this process creates, renames or deletes a file or folder."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_CREAT | os.O_WRONLY)
        if creates or event in WRITES:
            seen += 1
            if seen == count:
                act()

    sys.addaudithook(hook)


def die() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def fork(work: Callable[[], None]) -> int:
    """Start work in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(SURVIVED)  # without the interpreter's end, where gloo's threads may abort (torch 2.13)
        except BaseException:
            traceback.print_exc()
            os._exit(RAISED)
    return pid


def join(pid: int, timeout_s: float = 60) -> int | None:
    """The exit code of a process (negative: the signal), or None where it had to be killed because it hung."""
    descriptor = os.pidfd_open(pid)
    ended = bool(select.select([descriptor], [], [], timeout_s)[0])
    os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def ranks(folder: Path, works: Sequence[Callable[[], Any]]) -> list[dict[str, Any]]:
    """Run one function per rank in a gloo group; the result of each, or how it was refused, and its exit code."""
    stores = folder.parent / f"store_{random.randrange(1 << 60)}"

    def run(rank: int, result: Path) -> None:
        dist.init_process_group("gloo", init_method=f"file://{stores}", rank=rank, world_size=len(works))
        try:
            answer = {"result": works[rank]()}
        except UserError as error:
            answer = {"kind": type(error).__name__, "problems": list(error.problems)}
        result.write_text(json.dumps(answer))
        dist.barrier()

    results = [folder.parent / f"{stores.name}_{rank}.json" for rank in range(len(works))]
    pids = [fork(partial(run, rank, result)) for rank, result in enumerate(results)]
    codes = [join(pid) for pid in pids]
    return [
        {"code": code, **(json.loads(result.read_text()) if result.is_file() else {})}
        for code, result in zip(codes, results)
    ]


def kill_points(folder: Path, world_size: str, victim: str, mode: str) -> list[dict[str, Any]]:
    """Kill the victim at each of the points where a save touches the disk, until it gets through."""

    def work(here: Path, count: int, rank: int) -> None:
        if rank == int(victim):
            at_write(count, die)
        if mode == "beside":
            save_beside(here, 3)
        else:
            save(here, *((2, 1, 2) if mode == "replace" else (3, 0, 1)))

    rows = []
    for count in range(1, 1000):
        here = folder / f"kill_{count}"
        for step in (1, 2):
            save(here, step)
        works = [partial(work, here, count, rank) for rank in range(int(world_size))]
        codes = [join(fork(works[0]))] if len(works) == 1 else [answer["code"] for answer in ranks(here, works)]
        row: dict[str, Any] = {"codes": codes, **look(here, variants=2)}
        Checkpoints(here, 2, False).clean()
        save(here, 4)
        row["afterwards"] = sorted(path.name for path in here.iterdir())
        rows.append(row)
        if codes[int(victim)] == SURVIVED:
            return rows
    raise AssertionError("the save never ended")


def random_kills(folder: Path, world_size: str, trials: str, seed: str) -> list[dict[str, Any]]:
    """Save step after step, kill one rank at a random moment, look, clean, go on from there."""

    def work(trial: int, first: int, descriptor: int, rank: int) -> None:
        if int(world_size) > 1:
            store = f"file://{folder.parent}/store_{trial}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(world_size))
        for step in range(first, first + 10_000):
            save(folder, step)
            if rank == 0:
                os.pwrite(descriptor, f"{step:08d}".encode(), 0)

    rng = random.Random(int(seed))
    rows = []
    for trial in range(int(trials)):
        done = folder.parent / f"done_{trial}"
        done.write_text("0")
        first = (look(folder)["step"] or 0) + 1
        descriptor = os.open(done, os.O_RDWR)
        pids = [fork(partial(work, trial, first, descriptor, rank)) for rank in range(int(world_size))]
        os.close(descriptor)
        while int(done.read_text()) < first:  # in the middle of the saves, not of the start
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.12))
        victim = rng.randrange(len(pids))
        os.kill(pids[victim], signal.SIGKILL)
        codes = [join(pid, 30) for pid in pids]
        rows.append({"reported": int(done.read_text()), "codes": codes, "victim": victim, **look(folder)})
        Checkpoints(folder, 2, False).clean()
    return rows


def layouts(folder: Path) -> list[dict[str, Any]]:
    """Save DTensors on two ranks; load them in other layouts on two ranks, and whole on one."""
    full = {"matrix": torch.arange(35.0).reshape(7, 5), "other": torch.arange(24.0).reshape(4, 6).double()}
    full |= {"narrow": torch.tensor([[3.0, 4.0]]), "plain": torch.arange(5)}

    def spread(mesh: Any, tensors: dict[str, torch.Tensor], dims: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: distribute_tensor(tensor, mesh, [dims[name]]) if name in dims else tensor
            for name, tensor in tensors.items()
        }

    def work() -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        checkpoints = Checkpoints(folder, 3, keep_best=False)
        written = spread(mesh, full, {"matrix": Shard(0), "other": Shard(1), "narrow": Shard(0)})
        checkpoints.save(1, written, {}, None)
        saved = checkpoints.latest()
        assert saved is not None
        same = []
        for dims in (
            {"matrix": Shard(1), "other": Shard(0), "narrow": Shard(1)},
            {"matrix": Shard(0), "other": Replicate(), "plain": Shard(0)},
            {},
        ):
            loaded = spread(mesh, {name: torch.zeros_like(tensor) for name, tensor in full.items()}, dims)
            checkpoints.load(saved, loaded)
            whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in loaded.items()}
            same.append(all(torch.equal(whole[name], full[name]) for name in full))
        first = DeviceMesh("cpu", [0])  # the other rank has no part of it
        loaded = spread(first, {name: torch.zeros_like(tensor) for name, tensor in full.items()}, {"matrix": Shard(0)})
        last = DeviceMesh("cpu", [1])
        scalars = {
            f"scalar{rank}": distribute_tensor(torch.tensor(5.0), on, [Replicate()])
            for rank, on in enumerate((first, last))
        }
        again = Checkpoints(folder / "other", 3, keep_best=False).save(2, {**loaded, **scalars}, {}, None)
        checkpoints.load(saved, loaded)
        is_outside = first.get_coordinate() is None
        same.append(is_outside or torch.equal(loaded["matrix"].to_local(), full["matrix"]))  # type: ignore[attr-defined]
        written_again = read_tensors(again)
        same.append(written_again["matrix"].shape == full["matrix"].shape)
        same.append(all(torch.equal(written_again[name], torch.tensor(5.0)) for name in scalars))
        return same

    answers = ranks(folder, [work, work])
    alone = read_tensors(folder / "step_00000001")
    plain = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    checkpoints = Checkpoints(folder, 3, keep_best=False)
    checkpoints.load(checkpoints.latest() or Saved(0, folder, None, {}), plain)
    answers.append({"result": [all(torch.equal(found[name], full[name]) for name in full) for found in (alone, plain)]})
    return answers


def division(folder: Path, world_size: str) -> dict[str, Any]:
    """Save replicated tensors of uneven sizes on several ranks, load them back on every rank."""
    sizes = [400_000, 400_000, 400_000, 250_000, 100_000, 100_000, 50_000, 30_000, 3, 1, 0]
    expected = {f"t{index}": torch.arange(float(size)) for index, size in enumerate(sizes)}

    def work() -> bool:
        checkpoints = Checkpoints(folder, 3, keep_best=False)
        checkpoints.save(1, expected, {"of": dist.get_rank()}, None)
        found = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
        saved = checkpoints.latest()
        assert saved is not None
        return checkpoints.load(saved, found) == {"of": 0} and all(torch.equal(found[n], expected[n]) for n in found)

    answers = ranks(folder, [work] * int(world_size))
    files = {path.name: path.stat().st_size for path in (folder / "step_00000001").glob("rank_*")}
    return {"answers": answers, "files": files, "data_bytes": sum(sizes) * 4}


def disagreement(folder: Path) -> dict[str, Any]:
    """Ranks that want other tensors, other checkpoints or other steps, and a damaged file: all are refused alike."""
    for step in (1, 2):
        save(folder, step)
    checkpoints = Checkpoints(folder, 2, keep_best=False)
    newest, older = checkpoints.latest(), checkpoints.latest(before=2)
    assert newest is not None
    assert older is not None

    def load(saved: Saved, *without: str, **extra: torch.Tensor) -> None:
        wanted = {name: tensor for name, tensor in make_tensors(saved.step).items() if name not in without}
        checkpoints.load(saved, wanted | extra)

    answers = {
        "halves": ranks(folder, [lambda: load(newest, "model.bias"), lambda: load(newest, "optimizer.step")]),
        "missing": ranks(folder, [lambda: load(newest), lambda: load(newest, more=torch.zeros(2))]),
        "shape": ranks(folder, [lambda: load(newest), lambda: load(newest, **{"model.bias": torch.zeros(8)})]),
        "checkpoint": ranks(folder, [lambda: load(newest), lambda: load(older)]),
        "step": ranks(folder, [lambda: save(folder, 7), lambda: save(folder, 8)]),
    }
    file = newest.path / "rank_00000_part_001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    answers["damage"] = ranks(folder, [lambda: load(newest), lambda: load(newest)])
    return answers


def fill_disk(filler: Path) -> None:
    """Write until no byte more goes in."""
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def full_disk_points(folder: Path) -> list[dict[str, Any]]:
    """One process; the disk fills up just before each point where a save touches it."""
    filler = folder.parent / "filler"
    answer = folder.parent.parent / "answer"
    save(folder, 1)

    def work(count: int) -> None:
        at_write(count, partial(fill_disk, filler))
        try:
            save(folder, 2)
        except UserError as error:
            answer.write_text(json.dumps({"kind": type(error).__name__, "problems": list(error.problems)}))

    rows = []
    for count in range(1, 100):
        answer.write_text("{}")
        join(fork(partial(work, count)))
        row = {**json.loads(answer.read_text()), "names": sorted(path.name for path in folder.iterdir())}
        rows.append({**row, **look(folder)})
        if not filler.exists():
            return rows
        filler.unlink()
    raise AssertionError("the save never ended")


def full_disk(folder: Path, capacity_bytes: str) -> dict[str, Any]:
    """Two ranks save onto a disk that rank 1 fills while it writes; then onto one that is too small from the start."""
    filler = folder.parent / "filler"

    def second() -> None:
        at_write(1, partial(fill_disk, filler))
        save(folder, 2)

    save(folder, 1)
    during: dict[str, Any] = {"answers": ranks(folder.parent.parent / "of_ranks", [lambda: save(folder, 2), second])}
    during |= {"names": sorted(path.name for path in folder.iterdir()), **look(folder)}
    filler.unlink()
    half = {"half": torch.zeros(int(capacity_bytes) // 8)}

    def large() -> None:
        Checkpoints(folder, 2, False).save(2, half | {"more": torch.zeros(int(capacity_bytes) // 6)}, {}, None)

    before: dict[str, Any] = {"answers": ranks(folder.parent.parent / "of_ranks", [large, large])}
    before |= {"names": sorted(path.name for path in folder.iterdir()), **look(folder)}
    return {"during": during, "before": before}
