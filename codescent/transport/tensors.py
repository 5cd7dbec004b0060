"""In: a tensor in the host's memory. Out: its bytes, for frames, without a copy.
Does not move tensors from a device: the caller chooses when, and where to."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of any dtype. Writing into it changes the tensor.

    Raises:
        ValueError: the tensor is not contiguous, or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"bytes of a {tensor.device.type} tensor with strides {tensor.stride()}: no contiguous memory")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
