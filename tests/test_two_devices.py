"""In: modules that lie on two devices. Out: each rank has two devices of its own, and gradients are averaged on each.
Does not run on GPUs: of two devices that cannot exchange values, one is `meta`, or both are the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import environment
from torch import nn

from codescent.base import device as devices
from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.own.average import AveragedGradients
from codescent.own.distribute import _by_kind, _refuse, misplaced
from codescent.own.rounds import Options
from codescent.own.saved import _replicated_tensors
from codescent.plan.wire import Wire
from codescent.train.devices import backends, choose_devices

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "two_devices.py"
CPU, META = torch.device("cpu"), torch.device("meta")


def losses(folder: Path, ranks: int) -> list[float]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLE), "--device", "cpu", "--epochs", "3"],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT)), text=True, capture_output=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(one) for one in re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.MULTILINE)]


def test_the_example_alone_and_on_two_ranks(tmp_path: Path) -> None:
    """Fault: a rank with two devices is refused, or replicas whose halves are on two devices are not averaged."""
    alone = losses(tmp_path, 1)
    assert len(alone) == 3
    assert alone[2] < alone[0]
    assert losses(tmp_path, 2) == pytest.approx(alone, rel=1e-5)  # fp32


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets how many CUDA devices there are."""
    monkeypatch.setattr(devices, "take", lambda kind, index: torch.device(kind, index))
    monkeypatch.setattr(devices, "has_fp64", lambda _: True)
    return lambda number: monkeypatch.setattr(devices, "count", lambda kind: number if kind == "cuda" else 0)


def test_each_rank_has_devices_of_its_own(gpus: Any) -> None:
    """Fault: two ranks share a device, a rank that sees only its own looks for others, or too few are not noticed."""
    rank = Rank(rank=3, local_rank=1, world_size=4, local_world_size=2)
    gpus(4)
    assert choose_devices("auto", rank, each=2) == (torch.device("cuda", 2), torch.device("cuda", 3))
    gpus(2)  # as with srun --gpus-per-task=2
    assert choose_devices("cuda", rank, each=2) == (torch.device("cuda", 0), torch.device("cuda", 1))
    gpus(3)
    with pytest.raises(UserError, match="has 3 CUDA devices for 2 local ranks with 2 devices each; start at most 1"):
        choose_devices("cuda", rank, each=2)
    assert choose_devices("cpu", rank, each=2) == (CPU, CPU)


def test_nccl_does_not_start_on_one_of_several_devices() -> None:
    """Fault: NCCL that was started on a rank's first device refuses the gradients of the second."""
    assert backends(torch.device("cuda", 2), 2, shards_alone=True)[1] == torch.device("cuda", 2)
    assert backends(torch.device("cuda", 2), 2, shards_alone=True, each=2) == ("cpu:gloo,cuda:nccl", None)


@pytest.mark.usefixtures("own_group")
def test_gradients_of_each_device_have_buckets_and_a_group_of_their_own() -> None:
    """Fault: a bucket, a norm or a hash joins tensors of two devices, or two devices share one process group."""
    module = nn.ModuleDict({"here": nn.Linear(3, 2), "there": nn.Linear(3, 2, device="meta")})
    averaged = AveragedGradients(module, list(module.parameters()), [], 1 << 20, Wire())
    try:
        kinds = [{parameter.device for parameter in part.parameters} for part in averaged.parts]
        assert kinds == [{CPU}, {META}]
        assert len({id(part.gradients.group) for part in averaged.parts}) == 2
        assert [part.ones.device for part in averaged.parts] == [CPU, META]
    finally:
        averaged.close()
    copies = _replicated_tensors(module, {f"model.{name}": one.detach() for name, one in module.named_parameters()})
    assert [list(one) for one in copies.values()] == [
        ["model.here.weight", "model.here.bias"],
        ["model.there.weight", "model.there.bias"],
    ]
    tensors = [torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(1, dtype=torch.float64)]
    assert [len(one) for one in _by_kind(tensors).values()] == [1, 1, 1]


@pytest.fixture
def own_group(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_what_needs_one_device_is_refused_and_a_tensor_elsewhere_is_named() -> None:
    """Fault: fully_shard or a codec is given two devices and fails later; or nobody says how to ask for two."""
    module = nn.ModuleDict({"here": nn.Linear(3, 2), "there": nn.Linear(3, 2, device="meta")})
    optimizer, ranks = (
        torch.optim.SGD(module.parameters()),
        SimpleNamespace(world_size=1, device=CPU, devices=(CPU, META)),
    )

    def refused(strategy: str, options: Options) -> str:
        with pytest.raises(UserError) as caught:
            _refuse(module, optimizer, strategy, 1, ranks, options)  # type: ignore[arg-type]
        return str(caught.value)

    _refuse(module, optimizer, "ddp", 1, ranks, Options())  # type: ignore[arg-type]
    for words, strategy, options in (
        ('strategy "zero3"', "zero3", Options()),
        ("average_every", "ddp", Options(average_every=2)),
        ("wire", "ddp", Options(wire="int8")),
    ):
        assert f"{words}: needs a module on cpu, the first device of its rank" in refused(strategy, options)
    cuda = SimpleNamespace(device=torch.device("cuda", 1), is_meta=False)
    one, two = (torch.device("cuda", 0),), (torch.device("cuda", 2), torch.device("cuda", 3))
    (said,) = misplaced([("w", cuda)], one)  # type: ignore[list-item]
    assert said.endswith("which is cuda:0; for a module on two devices call codescent.init(devices_per_rank=2)")
    (said,) = misplaced([("w", cuda)], two)  # type: ignore[list-item]
    assert said == "w is on cuda:1: must be on one of ranks.devices, which are cuda:2, cuda:3"


def test_the_page_has_the_lines_of_the_example() -> None:
    """Fault: the page shows a program that is not the one that is tested."""
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "two_devices.md").read_text("utf-8"), re.DOTALL)
    text = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert not [line for line in shown.splitlines() if line not in text]
