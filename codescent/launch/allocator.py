"""In: the environment. Out: one in which glibc's malloc keeps big blocks for the next step; whether it differs.
Does not restart the process: glibc reads tunables at the start, so the command line restarts once."""

from __future__ import annotations

import os
from collections.abc import Mapping

MARKER = "CODESCENT_ALLOCATOR"  # set in a tuned environment, so that a process restarts at most once

TUNABLES: Mapping[str, str] = {
    "glibc.malloc.mmap_max": "0",  # freed big blocks return to the heap, not to the kernel: no page faults
    "glibc.malloc.trim_threshold": str(16 * 2**30),  # the end of the heap is not returned either
    "glibc.malloc.top_pad": str(256 * 2**20),  # the heap grows in large steps
    "glibc.malloc.hugetlb": "1",  # huge pages: fewer TLB entries
}
"""They give 1.16 times the tokens per second on GPT-2 124M in bf16 (two cores, 4 x 64 tokens); docs/launch.md."""


def tuned_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with GLIBC_TUNABLES for training; tunables of the user are not changed.

    Equal to `env` if glibc's malloc is not used: not Linux, another libc, or a preloaded allocator.
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
    """Whether a process that started with `env` should restart with `tuned_environment(env)`."""
    return MARKER not in env and tuned_environment(env).get("GLIBC_TUNABLES", "") != env.get("GLIBC_TUNABLES", "")


def _is_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    if name not in os.confstr_names:
        return False
    try:
        return (os.confstr(name) or "").startswith("glibc")
    except (OSError, ValueError):  # musl has the name but no value
        return False
