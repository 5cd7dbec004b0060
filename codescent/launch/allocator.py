"""In: environment variables. Out: a copy in which GLIBC_TUNABLES makes malloc reuse large freed blocks, and in which
CUDA's allocator grows its segments.
Does not restart the process. glibc reads the variable only at process start, so verbs/train.py restarts it once."""

from __future__ import annotations

import os
from collections.abc import Mapping

MARKER = "CODESCENT_ALLOCATOR"  # marks a tuned environment: a process restarts at most once

TUNABLES: Mapping[str, str] = {
    "glibc.malloc.mmap_max": "0",  # freed big blocks return to the heap, not to the kernel: no page faults
    "glibc.malloc.trim_threshold": str(16 * 2**30),  # the end of the heap is not returned either
    "glibc.malloc.top_pad": str(256 * 2**20),  # the heap grows in large steps
    "glibc.malloc.hugetlb": "1",  # huge pages: fewer TLB entries
}
"""With them GPT-2 124M trains 1.16 times as fast (bf16, two cores, 4 x 64 tokens); see docs/launch.md."""


SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"
"""Of the three names this one works in every version of torch. Some ignore expandable segments under the newer name:
https://github.com/pytorch/pytorch/issues/183387"""
SEGMENTS_NAMES = (SEGMENTS, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def with_expandable_segments(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` in which torch's allocator for CUDA grows its segments, unless the user has configured it.

    A segment of fixed size is of no use to a tensor that is larger than what is free in it. torch reads the variable
    when it first allocates on CUDA; without CUDA it has no effect.
    """
    return dict(env) if any(env.get(name) for name in SEGMENTS_NAMES) else {**env, SEGMENTS: EXPANDABLE}


def tuned_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with GLIBC_TUNABLES for training. Tunables that the user has set stay.

    The copy equals `env` without glibc's malloc: another system, another libc or a preloaded allocator.
    """
    tuned = dict(env)
    if not _is_glibc() or "malloc" in env.get("LD_PRELOAD", ""):
        return tuned
    own = env.get("GLIBC_TUNABLES", "")
    set_already = {part.partition("=")[0] for part in own.split(":")}
    added = [f"{name}={value}" for name, value in TUNABLES.items() if name not in set_already]
    tuned["GLIBC_TUNABLES"] = ":".join([*([own] if own else []), *added])
    tuned[MARKER] = "tuned"
    return tuned


def needs_restart(env: Mapping[str, str]) -> bool:
    """Whether a process with the environment `env` should restart with `tuned_environment(env)`."""
    return MARKER not in env and tuned_environment(env).get("GLIBC_TUNABLES", "") != env.get("GLIBC_TUNABLES", "")


def _is_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    if name not in os.confstr_names:
        return False
    try:
        return (os.confstr(name) or "").startswith("glibc")
    except (OSError, ValueError):  # musl has the name but no value
        return False
