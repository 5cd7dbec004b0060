"""In: a run on a CPU. Out: it imports neither torch's compiler nor what comes with it, and computes the same.
Does not measure seconds: benchmarks do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import environment, make_project

from codescent.base.unfilled import Unfilled
from codescent.train import plain_steps

HEAVY = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "sympy")
OTHERS = ("codescent.models.bert.module", "codescent.strategies.vocabulary", "codescent.strategies.ring")
TRAP = f"""
import sys

class Trap:
    def find_spec(self, name, path, target=None):
        if name in {HEAVY!r}:
            raise AssertionError(f"{{name}} is imported")

sys.meta_path.insert(0, Trap())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["a run", "other modules"])
def test_no_compiler_is_imported(tmp_path: Path, what: str) -> None:
    """Fault: each rank imports torch's compiler at each start, and needs a second and 80 MB more."""
    make_project(tmp_path)
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "sitecustomize.py").write_text(TRAP)
    inherited = environment()
    env = environment(PYTHONPATH=f"{tmp_path / 'trap'}:{inherited.get('PYTHONPATH', '')}")
    words = [
        "run.toml",
        "run.name=a",
        "train.num_steps=2",
        "train.eval_every=2",
        "checkpoint.every=2",
    ]
    command = ["-m", "codescent", "train", *words] if what == "a run" else ["-c", f"import {', '.join(OTHERS)}"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "RMSprop"])
def test_a_plain_step_is_torchs_step(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fault: without its wrapper a step records a graph, or does another thing than torch's."""
    monkeypatch.setattr(plain_steps, "COMPILER", "is not loaded")
    torch.manual_seed(0)
    weights, gradients = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(3)]
    found = []
    for plain in (True, False):
        weight = torch.nn.Parameter(weights.clone())
        before = torch.optim.Optimizer.add_param_group
        if plain:
            with plain_steps.making():
                optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
        else:
            optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
        assert torch.optim.Optimizer.add_param_group is before
        for gradient in gradients:
            weight.grad = gradient.clone()
            (plain_steps.step_of(optimizer) if plain else optimizer.step)()
        assert weight.is_leaf
        assert torch.is_grad_enabled()
        found.append([weight.detach(), *(v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor))])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_hook_of_a_step_is_called_whenever_it_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: hooks are asked for once, and those that come later are dead; profiles lack the range of the step."""
    monkeypatch.setattr(plain_steps, "COMPILER", "is not loaded")
    weight, called = torch.nn.Parameter(torch.ones(1)), list[str]()
    weight.grad = torch.ones(1)
    with plain_steps.making():
        optimizer = torch.optim.SGD([weight], lr=0.1)
    step = plain_steps.step_of(optimizer)
    with torch.profiler.profile() as profile:
        step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    handle = optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step()
    handle.remove()
    step()
    assert (called, weight.item()) == (["after"], pytest.approx(0.7))


def test_modules_are_built_without_values() -> None:
    """Fault: memory of another shape, dtype or device; or a function of torch.nn.init that is called later is dead."""
    with torch.device("meta"), Unfilled():
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Embedding(4, 2), torch.nn.LayerNorm(2)).bfloat16()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    with Unfilled():
        module.to_empty(device="cpu")
    assert [tuple(parameter.shape) for parameter in module.parameters()] == [(2, 3), (2,), (4, 2), (2,), (2,)]
    assert {(parameter.device.type, parameter.dtype) for parameter in module.parameters()} == {("cpu", torch.bfloat16)}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    weight = torch.zeros(2)
    torch.nn.init.ones_(weight)
    assert weight.sum() == 2
