"""In: the weights of GPT-2 124M on the meta device, a kind of optimizer. Out: what a step of it launches and waits for.
Does not compute a number: it holds for every device that is not the CPU. Offloaded weights: test_offload_replay."""

from __future__ import annotations

import pytest
import torch
from device_spy import META, DeviceSpy, fused_optimizers

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.build import build
from codescent.config.sections import Config
from codescent.plan import WIDE
from codescent.train.optimize import Optimizer, Weight

MODEL = {"kind": "gpt2", "num_layers": 12, "num_heads": 12, "hidden_dim": 768, "seq_len": 1024}
VOCAB = 50257
MOST = {
    "adamw": (21, 0, 3.74),
    "adam": (21, 0, 3.74),
    "sgd": (17, 0, 3.24),
    "adagrad": (18, 1, 8.72),
    "adadelta": (30, 1, 13.7),
    "rmsprop": (22, 1, 10.3),
}
"""By kind, the most launches, waits and GB of a step in bf16. They may only fall. An operator on a list of tensors
counts once."""


def spied_step(kind: str, precision: str) -> DeviceSpy:
    """A step that clips, and is not the first one."""
    sections = {
        "model": MODEL,
        "optimizer": {"kind": kind, "max_grad_norm": 0.5},
        "train": {"precision": precision, "global_batch_size": 1},
    }
    config = Config.model_validate(sections)
    narrow, wide, weights = TORCH_DTYPE[precision], TORCH_DTYPE[WIDE[precision]], list[Weight]()
    for parameter in (tensor.parameter for tensor in build(config, VOCAB, 1).trained):
        tensor = torch.empty(parameter.shape, dtype=narrow, device=META)
        master = tensor if narrow == wide else torch.empty(parameter.shape, dtype=wide, device=META)
        weights.append(Weight(parameter.name, tensor, master, parameter.decay))
    spy = DeviceSpy()
    with fused_optimizers(), spy:
        optimizer = Optimizer(weights, config.optimizer)
        for _ in range(2):
            gradients = [torch.empty_like(weight.tensor) for weight in weights]
            spy.launches, spy.bytes = 0, 0
            spy.waits.clear()
            optimizer.step(gradients, 1e-3)
    return spy


@pytest.mark.parametrize("kind", MOST)
def test_a_step_launches_moves_and_waits_no_more_than_written_down(kind: str) -> None:
    spy = spied_step(kind, "bf16")
    launches, waits, size = MOST[kind]
    assert spy.launches <= launches, spy.launches
    assert spy.waits.total() <= waits, spy.waits
    assert spy.bytes <= size * 1e9, spy.bytes
