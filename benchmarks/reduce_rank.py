"""In: torchrun's variables; numbers of bytes on standard input. Out: the seconds of an all-reduce of each, on rank 0.
Does not shape a link and uses nothing of codescent: it measures what gloo carries."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from systems import MARK


def main() -> None:
    """Reduce as often as asked. Every rank reads the same numbers; a barrier precedes each reduction."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    print(MARK, "ready", flush=True)
    for line in sys.stdin:
        tensor = torch.ones(int(line) // 4)
        dist.barrier()
        begin_s = time.monotonic()
        dist.all_reduce(tensor)
        print(MARK, time.monotonic() - begin_s, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
